"""How far a long command is: a bar on a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from cli.running import COMMAND, Run
from support.checkpoints import Geometry
from support.checkpoints import write_checkpoint as write_sparse
from support.terminals import SGR, OnTerminal, Screen, shards_are_open, spying, without_modules

WIDE = Geometry(hidden=2048, heads=32, head_dim=128, conv_kernel=4)  # 75 MB a layer
SHORT = {
    "stream": ("stream", "small"),
    "verify": ("verify", "small", "--payload"),
    "diff": ("diff", "small", "small", "--payload"),
}
LONG = {
    "stream": ("stream", "long", "--layers", ",".join(["0,1,2,4,5,6"] * 400)),
    "verify": ("verify", "long", "--payload", "--write-manifest", "sums.json"),
    "diff": ("diff", "long", "long", "--payload"),
}
# "3 of 34 layers" or "3/34 layers"; "1.2 of 9.4 GB" or "1.2 GB of 9.4 GB"; "2.0 GB/s"
LAYERS = re.compile(r"([\d,]+) ?(?:of|/) ?([\d,]+) layers?\b")
BYTES = re.compile(
    r"([\d.,]+)(?: [kMGT]?B| bytes)? ?(?:of|/) ?([\d.,]+) ?(?:[kMGT]?B|bytes)\b(?!/)"
)
RATE = re.compile(r"[\d.,]+ GB/s")
LEFT = re.compile(r"\d+ \w+ left\b")
BAR = re.compile(r"([^\w\s,:/])\1{2,}|\[.{3,}\]")
SECONDS_BETWEEN_LINES = 5


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 128 large layers of zeros, which takes no room; not to be changed."""
    folder = tmp_path_factory.mktemp("long")
    return write_sparse(folder, geometry=WIDE, layers=128, sparse=True).folder


@pytest.fixture
def here(small: Path, long: Path, tmp_path: Path) -> Path:
    """A folder with links to both checkpoints in it, to run in."""
    (tmp_path / "small").symlink_to(small)
    (tmp_path / "long").symlink_to(long)
    return tmp_path


@pytest.fixture(params=["with rich", "without rich"])
def env(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """What to add to the environment: nothing, or what takes rich away."""
    return {} if request.param == "with rich" else without_modules(tmp_path / "without", "rich")


def begun(
    folder: Path,
    *arguments: object,
    env: Mapping[str, str | None] | None = None,
    columns: int = 120,
    on: tuple[int, ...] = (2,),
) -> OnTerminal:
    return OnTerminal([*COMMAND, *arguments], env=env, on=on, columns=columns, cwd=folder)


def bar_row(ran: OnTerminal) -> int:
    """The row that was drawn again and again."""
    rows = [row for _, row in ran.screen.draws]
    return max(set(rows), key=rows.count)


def states(ran: OnTerminal) -> list[str]:
    """What stood on that row, one after the other."""
    row = bar_row(ran)
    return [text for at, text in ran.screen.states if at == row]


def assert_facts(text: str, command: str) -> None:
    """That a line says how far it is, how fast, and how long it will take."""
    assert BYTES.search(text), text
    assert RATE.search(text), text
    is_begun = not text.startswith("0 bytes")  # before that nobody knows how long it takes
    assert bool(LEFT.search(RATE.sub("", text))) == is_begun, text
    assert bool(LAYERS.search(text)) == (command == "stream"), text


# The bar -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", LONG)
def test_a_bar_says_how_far_how_fast_and_how_long(
    here: Path, env: dict[str, str], command: str
) -> None:
    with begun(here, *LONG[command], env=env) as ran:
        ran.read(until=lambda: len(ran.screen.draws) > 3)
    seen = states(ran)
    assert len(seen) >= 2
    for text in seen[1:]:
        assert_facts(text, command)
        assert BAR.search(text), text
    if not env:
        assert SGR.search(ran.text)
        assert "\u2501" in ran.text or "\u2578" in ran.text


def test_what_is_done_grows_and_what_is_to_be_done_stays(here: Path, env: dict[str, str]) -> None:
    with begun(here, *LONG["stream"], env=env) as ran:
        ran.read(until=lambda: len(ran.screen.draws) > 4)
    layers = [found.groups() for text in states(ran) if (found := LAYERS.search(text))]
    done = [int(count.replace(",", "")) for count, _ in layers]
    assert {total for _, total in layers} == {"2,400"}
    assert done == sorted(done)
    assert done[0] < done[-1] < 2400
    totals = {found.group(2) for text in states(ran) if (found := BYTES.search(text))}
    assert len(totals) == 1


def test_the_bar_is_drawn_at_most_ten_times_a_second(here: Path, env: dict[str, str]) -> None:
    """Of a stream whose layers come by far more often than that."""
    layers = ",".join(["0"] * 4000)
    with begun(here, "stream", "small", "--layers", layers, env=env) as ran:
        ran.read(until=lambda: len(ran.screen.draws) > 0)
        end = time.monotonic() + 1.5
        ran.read(until=lambda: time.monotonic() > end)
    times = [seconds for seconds, row in ran.screen.draws if row == bar_row(ran)]
    assert 3 <= len(times) <= 10 * (end - times[0]) + 2


def test_the_bar_takes_one_line_which_keeps_its_last_state(here: Path, env: dict[str, str]) -> None:
    layers = ",".join(["0"] * 300)
    with begun(here, "stream", "small", "--layers", layers, env=env) as ran:
        assert ran.finish() == 0
    (line,) = ran.screen.lines
    found = LAYERS.search(line)
    assert found
    assert found.groups() == ("300", "300")
    assert_facts(line, "stream")
    assert ran.text.endswith("\n")
    assert not ran.screen.cursor_is_hidden
    assert ran.stdout.startswith("small\n")


@pytest.mark.parametrize("command", SHORT)
def test_a_short_pass_leaves_its_last_state_too(
    here: Path, env: dict[str, str], command: str
) -> None:
    with begun(here, *SHORT[command], env=env) as ran:
        assert ran.finish() == 0
    line = ran.screen.lines[-1]
    found = BYTES.search(line)
    assert found
    assert found.group(1) == found.group(2)
    assert ran.text.endswith("\n")
    assert not ran.screen.cursor_is_hidden


@pytest.mark.parametrize("columns", [20, 21, 27, 64, 200])
def test_the_bar_never_wraps(here: Path, env: dict[str, str], columns: int) -> None:
    layers = ",".join(["0"] * 200)
    with begun(here, "stream", "small", "--layers", layers, env=env, columns=columns) as ran:
        assert ran.finish() == 0
    assert ran.screen.wraps == 0
    assert len(ran.screen.lines) == 1
    assert ran.screen.lines[0]


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_a_terminal_that_has_no_room_for_a_bar_is_not_filled(here: Path, columns: int) -> None:
    layers = ",".join(["0"] * 200)
    with begun(here, "stream", "small", "--layers", layers, columns=columns) as ran:
        assert ran.finish() == 0
    assert ran.screen.wraps == 0
    assert len(ran.screen.lines) <= 1


@pytest.mark.parametrize(("command", "columns"), [("stream", 20), ("stream", 60), ("diff", 20)])
def test_nor_does_it_while_figures_are_large(
    here: Path, env: dict[str, str], command: str, columns: int
) -> None:
    with begun(here, *LONG[command], env=env, columns=columns) as ran:
        ran.read(until=lambda: len(ran.screen.draws) > 2)
    assert ran.screen.wraps == 0
    assert len(ran.screen.lines) == 1
    if columns >= 60:
        assert any(BYTES.search(text) for text in states(ran))


def test_a_terminal_that_does_not_know_its_width_is_taken_for_one_of_eighty_columns(
    here: Path, env: dict[str, str]
) -> None:
    layers = ",".join(["0"] * 200)
    with begun(here, "stream", "small", "--layers", layers, env=env, columns=0) as ran:
        ran.screen.columns = 80
        assert ran.finish() == 0
    assert ran.screen.wraps == 0
    assert len(ran.screen.lines) == 1


def test_no_color_takes_the_colour_from_the_bar_and_leaves_the_bar(here: Path) -> None:
    with begun(here, *SHORT["verify"], env={"NO_COLOR": "1"}) as ran:
        assert ran.finish() == 0
    assert "\r" in ran.text.replace("\n", "")
    assert not SGR.search(ran.text)
    (line,) = ran.screen.lines
    assert_facts(line, "verify")
    assert BAR.search(line)


# What comes after the bar ------------------------------------------------------------------------


@pytest.mark.parametrize("command", SHORT)
def test_facts_begin_on_a_line_of_their_own_below_the_bar(
    run: Run, here: Path, env: dict[str, str], command: str
) -> None:
    with begun(here, *SHORT[command], env=env, on=(1, 2)) as ran:
        assert ran.finish() == 0
    lines = ran.screen.lines
    at = next(at for at, line in enumerate(lines) if RATE.search(line))
    facts = run(*SHORT[command]).stdout.splitlines()
    assert at == 0
    assert lines[1] == facts[0]
    assert len(lines) == 1 + len(facts)
    for line, fact in zip(lines[1:], facts, strict=True):
        assert line[:12] == fact[:12]


def test_errors_begin_on_a_line_of_their_own_below_the_bar(
    tmp_path: Path, env: dict[str, str]
) -> None:
    folder = write_sparse(tmp_path / "cut", geometry=WIDE, layers=8, sparse=True).folder
    layers = ",".join(["0,1,2,4,5,6"] * 400)
    with begun(tmp_path, "stream", "cut", "--layers", layers, env=env, columns=4000) as ran:
        ran.read(until=lambda: len(ran.screen.draws) > 2)
        for shard in folder.glob("*.safetensors"):
            os.truncate(shard, 4096)
        assert ran.finish() == 3
    bar, error, hint = ran.screen.lines
    assert LAYERS.search(bar)
    assert error.startswith("error: ")
    assert "error:" not in bar
    assert hint.startswith("hint: ")
    assert not ran.screen.cursor_is_hidden


def test_findings_of_a_pass_begin_below_the_bar(tmp_path: Path, env: dict[str, str]) -> None:
    write_sparse(tmp_path / "zeros", layers=4, sparse=True)
    with begun(tmp_path, "verify", "zeros", "--payload", env=env, columns=4000, on=(1, 2)) as ran:
        assert ran.finish() == 1
    bar, facts, *others = ran.screen.lines
    assert RATE.search(bar)
    assert facts == "zeros"
    assert any(line.startswith("error: ") for line in others)
    assert all("error: " not in line[1:] for line in others)


def test_json_on_stdout_is_clean_beside_a_bar(here: Path, env: dict[str, str]) -> None:
    layers = ",".join(["0"] * 300)
    with begun(here, "stream", "small", "--layers", layers, "--json", env=env) as ran:
        assert ran.finish() == 0
    assert json.loads(ran.stdout)["layers"] == 300
    assert LAYERS.search(ran.screen.lines[0])


# Where there is none -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [("verify", "small"), ("diff", "small", "small"), ("inspect", "small"), ("demo",)],
    ids=" ".join,
)
def test_a_command_that_reads_no_payload_or_little_has_no_bar(
    here: Path, arguments: tuple[str, ...]
) -> None:
    with begun(here, *arguments) as ran:
        assert ran.finish() == 0
    assert ran.text == ""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", SHORT)
@pytest.mark.parametrize("extra", [(), ("--json",)], ids=" ".join)
def test_elsewhere_than_on_a_terminal_a_short_command_says_nothing_of_it(
    run: Run, command: str, extra: tuple[str, ...]
) -> None:
    for term in ("xterm", "dumb"):
        ran = run(*SHORT[command], *extra, env={"TERM": term, "FORCE_COLOR": "1"})
        assert (ran.status, ran.stderr) == (0, "")


@pytest.mark.parametrize("term", [None, "unknown"])
def test_a_terminal_that_cannot_move_back_gets_no_bar(here: Path, term: str | None) -> None:
    with begun(here, *LONG["verify"], env={"TERM": term, "TTY_INTERACTIVE": "1"}) as ran:
        ran.read(until=lambda: shards_are_open(ran.process.pid))
        end = time.monotonic() + 0.5
        ran.read(until=lambda: time.monotonic() > end)
    assert ran.text == ""


# Lines now and then ------------------------------------------------------------------------------


@dataclass
class _Told:
    """What a long command wrote to stderr, and when each line of it came."""

    text: str
    seconds: list[float]


@pytest.fixture(scope="module", autouse=True)
def waiting(
    long: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, OnTerminal]]:
    """Each long command, and one on a terminal that is dumb: begun, and stopped while others run.

    So they take no processor; a clock that tells when five seconds are over goes on.
    """
    running = {}
    with contextlib.ExitStack() as opened:
        for name in ("dumb terminal", *LONG):
            folder = tmp_path_factory.mktemp("waiting")
            (folder / "long").symlink_to(long)
            arguments, on = (LONG[name], (1,)) if name in LONG else (LONG["stream"], (2,))
            ran = begun(folder, *arguments, env={} if name in LONG else {"TERM": "dumb"}, on=on)
            running[name] = opened.enter_context(ran)
            ran.read(until=partial(shards_are_open, ran.process.pid))
            ran.signal(signal.SIGSTOP)
        yield running


@pytest.fixture(scope="module")
def told(waiting: dict[str, OnTerminal]) -> dict[str, _Told]:
    """Two lines of each; they go on in turns, for some tenths of a second."""
    seconds: dict[str, list[float]] = {name: [] for name in waiting}
    end = time.monotonic() + 20
    while any(len(times) < 2 for times in seconds.values()):
        assert time.monotonic() < end, {name: _stderr(ran) for name, ran in waiting.items()}
        for name, ran in waiting.items():
            ran.signal(signal.SIGCONT)
            ran.read(until=partial(_is_over, time.monotonic() + 0.2))
            ran.signal(signal.SIGSTOP)
            lines = _stderr(ran).count("\n")
            seconds[name] += [time.monotonic()] * (lines - len(seconds[name]))
    return {
        name: _Told(_stderr(ran), [moment - ran.began_seconds for moment in seconds[name]])
        for name, ran in waiting.items()
    }


def _is_over(moment: float) -> bool:
    return time.monotonic() > moment


def _stderr(ran: OnTerminal) -> str:
    return ran.text + ran.stderr


@pytest.mark.parametrize("name", ["dumb terminal", *LONG])
def test_elsewhere_a_line_of_the_same_facts_comes_every_five_seconds(
    told: dict[str, _Told], name: str
) -> None:
    lines = told[name].text.splitlines()
    assert told[name].text.endswith("\n")
    for line in lines:
        assert_facts(line, "stream" if name == "dumb terminal" else name)
    first, second = told[name].seconds[:2]
    assert first >= SECONDS_BETWEEN_LINES - 0.5
    assert second - first >= SECONDS_BETWEEN_LINES - 1.5  # it was let go now and then only
    assert second - first <= 2 * SECONDS_BETWEEN_LINES + 2


@pytest.mark.parametrize("name", ["dumb terminal", *LONG])
def test_such_a_line_is_whole_and_has_no_bar_and_no_escapes(
    told: dict[str, _Told], name: str
) -> None:
    text = told[name].text
    assert "\x1b" not in text
    assert "\r" not in text
    assert not BAR.search(text)
    assert text.count("\n") == len([line for line in text.splitlines() if line.strip()])


# How it is drawn ---------------------------------------------------------------------------------

_THREADS = """
import threading
_start = threading.Thread.start
def start(thread):
    target = getattr(thread, "_target", None)
    with open(F, "a") as file:
        print(type(thread).__module__, getattr(target, "__module__", None), file=file)
    _start(thread)
threading.Thread.start = start
"""


@pytest.mark.parametrize("command", SHORT)
def test_no_thread_is_started_to_draw(here: Path, tmp_path: Path, command: str) -> None:
    started = tmp_path / "threads"
    spy = spying(tmp_path / "spy", f"F = {str(started)!r}\n{_THREADS}")
    with begun(here, *SHORT[command], env=spy) as ran:
        assert ran.finish() == 0
    assert RATE.search(ran.text)
    owners = started.read_text().split() if started.exists() else []
    assert not [name for name in owners if name.startswith(("rich", "kda_stream.cli"))]


def test_the_spy_sees_a_thread(tmp_path: Path) -> None:
    started = tmp_path / "threads"
    spy = spying(tmp_path / "spy", f"F = {str(started)!r}\n{_THREADS}")
    script = "import threading; threading.Thread(target=print).start()"
    with OnTerminal([sys.executable, "-c", script], env=spy) as ran:
        assert ran.finish() == 0
    assert "threading" in started.read_text()


def test_a_line_that_is_too_long_would_be_noticed() -> None:
    for text, wraps in ((b"x" * 20 + b"\r\n", 0), (b"x" * 21, 1), (b"\x1b[31m" + b"x" * 41, 2)):
        screen = Screen(20)
        screen.feed(text)
        assert screen.wraps == wraps
