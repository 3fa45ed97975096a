"""Colour: where it is and where it never is, and that it changes no character of the text."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cli.running import COMMAND, SHARDS, Run
from support.terminals import (
    SGR,
    OnTerminal,
    environment,
    spying,
    without_escapes,
    without_modules,
)

BOTH = (1, 2)
# Of each command that tells facts, the options and paths with which it tells them.
TELLING = {
    "inspect": ("inspect", "small"),
    "verify": ("verify", "small"),
    "verify --payload": ("verify", "small", "--payload"),
    "stream": ("stream", "small"),
    "diff": ("diff", "small", "small", "--payload"),
    "demo": ("demo", "made"),
    "env": ("env", "small"),
}
# What is no fact of the checkpoint and so differs from run to run: a figure with its unit.
FIGURE = re.compile(r"-?\d[\d,.]*(?: (?:bytes|[kMGT]i?B)\b)?")


@pytest.fixture
def here(small: Path, tmp_path: Path) -> Path:
    """A folder with the link `small` in it, to run in, so that each run prints the same paths."""
    (tmp_path / "small").symlink_to(small)
    return tmp_path


def on_terminal(
    folder: Path,
    *arguments: object,
    env: Mapping[str, str | None] | None = None,
    on: tuple[int, ...] = BOTH,
    columns: int = 200,
) -> OnTerminal:
    """A command that has ended, run in the folder on a terminal."""
    shutil.rmtree(folder / "made", ignore_errors=True)
    with OnTerminal([*COMMAND, *arguments], env=env, on=on, columns=columns, cwd=folder) as ran:
        ran.finish()
    assert "Traceback" not in ran.text + ran.stderr
    return ran


def elsewhere(run: Run, folder: Path, *arguments: object) -> tuple[str, str]:
    """What the same command writes to stdout and stderr where there is no terminal."""
    shutil.rmtree(folder / "made", ignore_errors=True)
    ran = run(*arguments)
    return ran.stdout, ran.stderr


# Where colour is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", TELLING)
def test_on_a_terminal_the_facts_are_coloured(here: Path, what: str) -> None:
    ran = on_terminal(here, *TELLING[what], on=(1,))
    assert ran.process.returncode == 0
    assert SGR.search(ran.text)


def test_on_a_terminal_errors_and_hints_are_coloured(here: Path) -> None:
    ran = on_terminal(here, "inspect", "nowhere", on=(2,))
    assert ran.process.returncode == 3
    error, hint = ran.text.splitlines()
    assert SGR.search(error)
    assert SGR.search(hint)


def test_colour_ends_with_each_line(here: Path) -> None:
    """So that what is cut out of the text by lines, or what comes next, has none of it."""
    for arguments in (("inspect", "small"), ("verify", "small"), ("inspect", "nowhere")):
        for line in on_terminal(here, *arguments).text.splitlines():
            codes = SGR.findall(line)
            assert not codes or codes[-1] in ("\x1b[0m", "\x1b[m"), line


@pytest.mark.parametrize(
    "changes",
    [
        {"NO_COLOR": "1"},
        {"NO_COLOR": "0"},
        {"TERM": None},
        {"TERM": ""},
        {"TERM": "dumb"},
        {"TERM": "unknown"},
        {"TERM": "dumb", "FORCE_COLOR": "1"},
        {"NO_COLOR": "1", "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"},
        {"TERM": None, "COLORTERM": "truecolor", "TTY_COMPATIBLE": "1"},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_there_is_no_colour_where_it_is_not_wanted(
    here: Path, changes: dict[str, str | None]
) -> None:
    for arguments in (("inspect", "small"), ("inspect", "nowhere")):
        ran = on_terminal(here, *arguments, env=changes)
        assert ran.text
        assert "\x1b" not in ran.text


@pytest.mark.parametrize("term", ["xterm", "xterm-256color", "screen", "linux", "vt100", "odd"])
def test_any_other_terminal_and_an_empty_no_color_have_colour(here: Path, term: str) -> None:
    ran = on_terminal(here, "inspect", "small", env={"TERM": term, "NO_COLOR": ""})
    assert SGR.search(ran.text)


@pytest.mark.parametrize(
    "changes",
    [{}, {"FORCE_COLOR": "1"}, {"FORCE_COLOR": "3", "CLICOLOR_FORCE": "1", "TTY_COMPATIBLE": "1"}],
    ids=str,
)
@pytest.mark.parametrize("on", [1, 2])
def test_each_stream_is_coloured_for_itself(
    here: Path, copied: Path, changes: dict[str, str], on: int
) -> None:
    """The other one is a pipe, which has no colour whatever the environment asks for."""
    os.truncate(copied / SHARDS[2], 5000)
    ran = on_terminal(here, "verify", copied, env=changes, on=(on,))
    assert ran.process.returncode == 1
    assert SGR.search(ran.text)
    piped = ran.stderr if on == 1 else ran.stdout
    assert piped
    assert "\x1b" not in piped


def test_without_rich_there_is_no_colour_and_no_complaint(
    run: Run, here: Path, tmp_path: Path
) -> None:
    hidden = without_modules(tmp_path / "without", "rich")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "rich.py").write_text("raise ImportError('this rich is none')")
    for env in (hidden, {"PYTHONPATH": str(broken)}):
        for arguments, status in ((("inspect", "small"), 0), (("verify", "nowhere"), 3)):
            ran = on_terminal(here, *arguments, env=env)
            assert ran.process.returncode == status
            assert ran.text
            assert "\x1b" not in ran.text
            assert ran.text == "".join(elsewhere(run, here, *arguments))


_HAS_RICH = """
import atexit, sys
atexit.register(lambda: print("rich" in sys.modules, file=open(F, "a")))
"""


def test_rich_is_imported_only_where_a_terminal_shows_it(
    here: Path, run: Run, tmp_path: Path
) -> None:
    """So that scripts, which start the command often, do not wait for it."""
    told = tmp_path / "told"
    env = spying(tmp_path / "spy", f"F = {str(told)!r}\n{_HAS_RICH}")
    run("inspect", "small", env=env)
    run("verify", "small", "--payload", "--json", env=env)
    on_terminal(here, "inspect", "small", env={**env, "TERM": "dumb"})
    on_terminal(here, "inspect", "small", env={**env, "NO_COLOR": "1"})
    assert told.read_text().split()[:3] == ["False"] * 3
    on_terminal(here, "inspect", "small", env=env)
    assert told.read_text().split()[-1] == "True"


# The text is the same ----------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [20, 200])
@pytest.mark.parametrize("what", ["inspect", "verify"])
def test_the_text_is_exactly_that_which_is_printed_without_colour(
    run: Run, here: Path, what: str, columns: int
) -> None:
    """No wrapping to the terminal, no filling, no character of rich's own."""
    text, _ = elsewhere(run, here, *TELLING[what])
    ran = on_terminal(here, *TELLING[what], columns=columns)
    assert without_escapes(ran.text) == text
    assert ran.text != text
    plain = on_terminal(here, *TELLING[what], columns=columns, env={"NO_COLOR": "1"})
    assert plain.text == text


@pytest.mark.parametrize("what", TELLING)
def test_but_for_its_figures_all_text_is_the_same_in_colour(
    run: Run, here: Path, what: str
) -> None:
    """Of what is timed and measured the figures differ, and with their widths the blanks."""
    text, _ = elsewhere(run, here, *TELLING[what])
    ran = on_terminal(here, *TELLING[what], on=(1,))

    def shape(told: str) -> str:
        return " ".join(FIGURE.sub("N", told).split())

    assert shape(without_escapes(ran.text)) == shape(text)


def test_errors_and_hints_are_the_same_in_colour(
    run: Run, here: Path, copied: Path, tmp_path: Path
) -> None:
    os.truncate(copied / SHARDS[0], 500)
    long = tmp_path / ("a" * 120) / "[bold]not[/bold] :smile: 12:30 'x'"
    for arguments in (
        ("verify", copied),
        ("inspect", copied),
        ("inspect", long),
        ("stream", "small", "--layers", "[red]"),
        ("frobnicate",),
        ("diff", "small", long),
    ):
        out, err = elsewhere(run, here, *arguments)
        ran = on_terminal(here, *arguments, on=(2,), columns=40)
        assert without_escapes(ran.text) == err
        assert ran.stdout == out


def test_what_looks_like_the_markup_of_rich_is_printed_as_it_is(
    run: Run, here: Path, copied: Path
) -> None:
    odd = copied.rename(copied.with_name("[red]x[bold] :warning: [link=a]\\[b]"))
    text, _ = elsewhere(run, here, "inspect", odd.name)
    ran = on_terminal(here, "inspect", odd.name)
    assert without_escapes(ran.text) == text
    assert odd.name in text


def test_names_with_escapes_reach_no_terminal(here: Path, copied: Path) -> None:
    odd = copied.rename(copied.with_name("od\x1b[2Jd\x1b]0;t\x07\u202edir"))
    for arguments in (("inspect", odd.name), ("inspect", odd.name + "2")):
        ran = on_terminal(here, *arguments)
        others = SGR.sub("", ran.text)
        assert "\x1b" not in others
        assert "\u202e" not in others
        assert r"od\x1b[2Jd" in others


@pytest.mark.parametrize("command", ["inspect", "verify", "stream", "diff", "demo", "env"])
def test_json_has_no_colour_on_a_terminal_either(here: Path, command: str) -> None:
    ran = on_terminal(here, *TELLING[command], "--json", on=(1,))
    assert "\x1b" not in ran.text
    assert json.loads(ran.text)["command"] == command


def test_a_terminal_that_takes_ascii_alone_gets_every_name(here: Path, copied: Path) -> None:
    odd = copied.rename(copied.with_name("\u6743\u91cd"))
    ran = on_terminal(here, "inspect", odd.name, env={"PYTHONIOENCODING": "ascii"})
    assert ran.process.returncode == 0
    assert r"\u6743\u91cd" in without_escapes(ran.text)


# Quiet -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("flag", ["-q", "--quiet"])
@pytest.mark.parametrize("what", TELLING)
def test_quiet_prints_nothing_when_all_is_well(run: Run, what: str, flag: str) -> None:
    ran = run(*TELLING[what], flag)
    assert (ran.status, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("what", ["verify --payload", "stream", "diff", "env"])
def test_quiet_is_quiet_on_a_terminal_too(here: Path, what: str) -> None:
    ran = on_terminal(here, *TELLING[what], "-q")
    assert (ran.process.returncode, ran.text) == (0, "")


@pytest.mark.usefixtures("here")
def test_quiet_keeps_errors_hints_and_the_exit_status(run: Run, copied: Path) -> None:
    os.truncate(copied / SHARDS[0], 500)
    for arguments, status in (
        (("inspect", copied), 3),
        (("verify", copied), 1),
        (("verify", copied, "--payload"), 1),
        (("stream", copied), 3),
        (("diff", "small", copied), 3),
        (("stream", "small", "--layers", "99"), 2),
        (("env", copied), 3),
    ):
        told, quiet = run(*arguments), run(*arguments, "-q")
        assert quiet.status == told.status == status
        assert quiet.stdout == ""
        assert (quiet.errors, quiet.hints) == (told.errors, told.hints)
        assert len(quiet.errors) > 0
        assert quiet.stderr.splitlines() == [
            line for line in quiet.stderr.splitlines() if line.startswith(("error: ", "hint: "))
        ]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("what", ["inspect", "verify --payload", "stream", "diff", "env"])
def test_quiet_json_is_the_same_object(run: Run, what: str) -> None:
    told = run(*TELLING[what], "--json")
    quiet = run(*TELLING[what], "--json", "-q")
    assert quiet.stderr == ""
    assert list(quiet.json) == list(told.json)
    if what == "inspect":
        assert quiet.stdout == told.stdout


# The one command under each of its names ---------------------------------------------------------


def test_python_m_kda_stream_is_the_same_command(here: Path) -> None:
    texts = []
    for module in ("kda_stream", "kda_stream.cli"):
        for arguments in (("inspect", "small"), ("--help",), ("frobnicate",)):
            command = [sys.executable, "-m", module, *arguments]
            with OnTerminal(command, cwd=here, env=environment()) as ran:
                texts.append((ran.finish(), ran.text))
    assert texts[:3] == texts[3:]
    assert [status for status, _ in texts[:3]] == [0, 0, 2]
    assert "kda-stream" in texts[1][1]
