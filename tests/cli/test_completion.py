"""`kda-stream completion`: its scripts, in the shells that they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cli.running import ENVIRONMENT, Run
from support.terminals import OnTerminal, without_modules

from kda_stream.kda.families import FAMILIES

COMMANDS = ("inspect", "verify", "stream", "diff", "demo", "env", "completion")
SHELLS = ("bash", "zsh", "tcsh")
# Of each command with options: the words before the one that is completed, its start, what comes.
CHOICES = {
    "--lock": {"prefer", "require", "off"},
    "--read": {"auto", "mapped", "positional", "direct"},
    "--residency": {"auto", "keep", "drop"},
    "--family": {"auto", *(family.name for family in FAMILIES)},
}
ASK = """
source "$1"; shift
specification=$(complete -p kda-stream) || exit 9
function=${specification##* -F }; function=${function%% *}
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMP_LINE="${COMP_WORDS[*]}"
COMP_POINT=${#COMP_LINE}
COMPREPLY=()
"$function" kda-stream "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def needed(shell: str) -> str:
    """Where the shell is; skips the test where it is not."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell} here")
    return found


@pytest.fixture
def script(run: Run, tmp_path: Path) -> Path:
    """The script for bash."""
    ran = run("completion", "bash")
    assert (ran.status, ran.stderr) == (0, "")
    path = tmp_path / "completion.bash"
    path.write_text(ran.stdout)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint's name and a file in it."""
    made = tmp_path / "in"
    (made / "GLM-5.3-Flash").mkdir(parents=True)
    (made / "sums.json").write_text("{}")
    return made


def completed(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words, each without the blank that may follow it."""
    done = subprocess.run(
        [needed("bash"), "--norc", "--noprofile", "-c", ASK, "ask", script, "kda-stream", *words],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return {line.strip().rstrip("/") for line in done.stdout.splitlines() if line.strip()}


# The script --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_and_nothing_else(run: Run, shell: str) -> None:
    ran = run("completion", shell)
    assert (ran.status, ran.stderr) == (0, "")
    assert "kda-stream" in ran.stdout
    assert run("completion", shell).stdout == ran.stdout


def test_bash_finds_no_fault_in_it_and_says_nothing(script: Path, folder: Path) -> None:
    bash = needed("bash")
    for command in (
        [bash, "-n", str(script)],
        [bash, "--norc", "-euc", f"source {script}"],
        [bash, "--norc", "-c", f"source {script}; source {script}"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_script_is_what_quiet_does_not_leave_out(run: Run) -> None:
    assert run("completion", "bash", "-q").stdout == run("completion", "bash").stdout != ""


def test_zsh_finds_no_fault_in_it(run: Run, tmp_path: Path) -> None:
    zsh = needed("zsh")
    path = tmp_path / "_kda-stream"
    path.write_text(run("completion", "zsh").stdout)
    assert path.read_text().startswith("#compdef kda-stream")
    begin = f"autoload -U compinit; compinit -u -d {tmp_path}/dump"
    load = f'{begin}; eval "$(cat {path})"; print $_comps[kda-stream]'
    for command, said in (
        ([zsh, "-n", str(path)], ""),
        ([zsh, "-f", "-c", load], "_shtab_kda_stream\n"),
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_tcsh_finds_no_fault_in_it(run: Run, tmp_path: Path) -> None:
    tcsh = needed("tcsh")
    path = tmp_path / "completion.tcsh"
    path.write_text(run("completion", "tcsh").stdout)
    done = subprocess.run(
        [tcsh, "-f", "-c", f"source {path}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# What is offered ---------------------------------------------------------------------------------


def test_the_commands_are_offered(script: Path, folder: Path) -> None:
    assert completed(script, folder, "") >= set(COMMANDS)
    assert completed(script, folder, "str") == {"stream"}
    assert completed(script, folder, "in") == {"inspect"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_the_help_names_is_offered(
    run: Run, script: Path, folder: Path, command: str
) -> None:
    options = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*", run(command, "--help").stdout))
    own = {option for option in options if option in CHOICES} | {"--help", "--json", "--quiet"}
    offered = completed(script, folder, command, "--")
    assert offered >= own
    assert offered <= options
    assert completed(script, folder, command, "--js") == {"--json"}


@pytest.mark.parametrize("option", CHOICES)
def test_fixed_choices_and_families_are_offered(script: Path, folder: Path, option: str) -> None:
    assert completed(script, folder, "stream", option, "") == CHOICES[option]
    first = min(CHOICES[option])
    assert first in completed(script, folder, "stream", option, first[:2])
    assert completed(script, folder, "stream", option, "no-such") == set()
    if option == "--family":
        assert completed(script, folder, "verify", "--family", "") == CHOICES[option]
        assert completed(script, folder, "verify", "--family", "KIMI_L") == {"KIMI_LINEAR"}


def test_shells_are_offered(script: Path, folder: Path) -> None:
    offered = completed(script, folder, "completion", "")
    assert {"bash", "zsh"} <= offered <= {*SHELLS}


@pytest.mark.parametrize(
    "words",
    [
        ("inspect",),
        ("verify",),
        ("verify", "--manifest"),
        ("verify", "GLM-5.3-Flash", "--manifest"),
        ("stream",),
        ("stream", "--lock", "off"),
        ("diff",),
        ("diff", "GLM-5.3-Flash"),
        ("demo",),
        ("env",),
    ],
    ids=" ".join,
)
def test_files_and_folders_are_offered_where_a_path_belongs(
    script: Path, folder: Path, words: tuple[str, ...]
) -> None:
    offered = completed(script, folder, *words, "")
    assert "GLM-5.3-Flash" in offered
    if words != ("demo",):
        assert "sums.json" in offered
    assert "GLM-5.3-Flash" in completed(script, folder, *words, "GL")


@pytest.mark.parametrize("option", ["--slots", "--layers"])
def test_where_a_number_belongs_no_choice_is_offered(
    script: Path, folder: Path, option: str
) -> None:
    assert not completed(script, folder, "stream", option, "") & {*COMMANDS, "prefer", "auto"}


def test_keys_pressed_in_a_real_bash_complete(script: Path, folder: Path, tmp_path: Path) -> None:
    """The Tab key, in an interactive shell on a terminal."""
    rc = tmp_path / "rc"
    rc.write_text(
        f"PS1='$ '\nbind 'set enable-bracketed-paste off'\nsource {script}\nkda-stream() {{ echo "
        f'"got:$*:"; }}\n'
    )
    command = [needed("bash"), "--noprofile", "--rcfile", rc, "-i"]
    with OnTerminal(command, columns=200, cwd=folder) as shell:
        shell.read(until=lambda: b"$ " in shell.written)
        for keys, came in (
            (b"kda-stream ins\t GL\t\r", "got:inspect GLM-5.3-Flash/:"),
            (
                b"kda-stream stream --lock re\t --read map\t\r",
                "got:stream --lock require --read mapped:",
            ),
            (
                b"kda-stream verify --family KIMI_L\t --manifest su\t\r",
                "got:verify --family KIMI_LINEAR --manifest sums.json:",
            ),
        ):
            shell.press(keys)
            shell.read(
                until=lambda: shell.text.count("got:") > 0 and shell.text.endswith("$ "), seconds=10
            )
            assert came in re.sub(r" +", " ", shell.text).replace(" :", ":"), shell.text
            shell.written = b""
        shell.press(b"exit\r")
        shell.finish()


# What is refused ---------------------------------------------------------------------------------


def test_without_shtab_it_says_what_to_install(run: Run, tmp_path: Path) -> None:
    env = without_modules(tmp_path / "without", "shtab")
    ran = run("completion", "bash", env=env)
    assert ran.status != 0
    assert ran.stdout == ""
    assert len(ran.errors) == 1
    assert ran.hints == ["hint: pip install 'kda-stream[terminal]'"]
    found = run("completion", "bash", "--json", env=env)
    (problem,) = found.json["problems"]
    assert problem["code"] == "not-installed"
    assert problem["hint"] == "pip install 'kda-stream[terminal]'"
    assert found.json["exit_status"] == found.status == ran.status
    assert found.json["command"] == "completion"


def test_the_other_commands_do_not_need_shtab(run: Run, small: Path, tmp_path: Path) -> None:
    env = without_modules(tmp_path / "without", "shtab", "rich")
    for arguments in (("inspect", small), ("--help",), ("completion", "--help")):
        assert run(*arguments, env=env).status == 0


@pytest.mark.parametrize("arguments", [(), ("fish9",), ("bash", "zsh"), ("",)], ids=" ".join)
def test_a_shell_that_it_does_not_know_is_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run("completion", *arguments)
    assert (ran.status, ran.stdout, len(ran.errors)) == (2, "", 1)


def test_the_installed_command_is_the_one_that_completes(script: Path) -> None:
    name = Path(sysconfig.get_path("scripts")) / "kda-stream"
    assert name.exists() or sys.platform != "linux"
    assert re.search(r"complete .*-F \S+ kda-stream$", script.read_text(), re.MULTILINE)
