"""Ctrl-C where Python would lose it, or make another error of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli.running import ENVIRONMENT

PREPARED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kda_stream.cli import command, main


def interrupted(_):
    {body}


command.run = interrupted
sys.exit(main())
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


def run(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "interrupted_import.py").write_text(
        "import os, signal\n"
        "class Named:\n"
        f"    def __set_name__(self, *_): {INTERRUPT}\n"
        "class Owner:\n"
        "    named = Named()\n"
    )
    return run_script(tmp_path, PREPARED.format(body=body))


def run_script(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    "body",
    [
        f"{INTERRUPT}",
        f"type('Owner', (), {{'__del__': lambda _: {INTERRUPT}}})(); signal.pause()",
        f"exec({INTERRUPT!r})",
        "import interrupted_import; signal.pause()",
        f"sys.stdout.write('half of a line'); {INTERRUPT}",
    ],
    ids=["anywhere", "in a destructor", "in exec", "in an import", "in the middle of a line"],
)
def test_ctrl_c_ends_the_command_with_130_and_one_line(tmp_path: Path, body: str) -> None:
    ran = run(tmp_path, body)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_behind_the_end_of_the_command_does_nothing(tmp_path: Path) -> None:
    script = PREPARED.format(body="return 3").replace(
        "sys.exit(main())", f"status = main(); {INTERRUPT}; sys.exit(status)"
    )
    ran = run_script(tmp_path, script)
    assert (ran.returncode, ran.stderr) == (3, "")


def test_a_second_ctrl_c_does_not_come_between_the_line_and_the_end(tmp_path: Path) -> None:
    again = f"import kda_stream.cli.interrupts as i; i.tell = lambda: {INTERRUPT} or 130\n"
    script = PREPARED.format(body=INTERRUPT).replace("command.run =", f"{again}command.run =")
    ran = run_script(tmp_path, script)
    assert (ran.returncode, ran.stderr) == (130, "")


def test_a_command_that_was_started_without_ctrl_c_stays_so(tmp_path: Path) -> None:
    script = PREPARED.replace("default_int_handler", "SIG_IGN").format(
        body=f"{INTERRUPT}; return 3"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False)
    assert done.returncode == 3


def test_other_errors_of_destructors_are_told_as_ever(tmp_path: Path) -> None:
    ran = run(tmp_path, "type('Owner', (), {'__del__': lambda _: 1 / 0})(); return 0")
    assert "ZeroDivisionError" in ran.stderr


def test_ctrl_c_in_a_function_call_is_told_and_leaves_the_process_alone() -> None:
    script = """
import signal
from kda_stream.cli import command, main
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupted(_):
    raise KeyboardInterrupt
command.run = interrupted
assert main(["inspect"]) == 130
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"interrupted\n")
