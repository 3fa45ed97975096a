"""What holds for every subcommand: help, usage, JSON, exit statuses, pipes, odd names."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cli.conftest import prepared
from cli.running import COMMAND, ENVIRONMENT, INDEX, SHARDS, Rewrite, Run

import kda_stream
from kda_stream.testing import DSA, KDA, Layout, write_checkpoint

SUBCOMMANDS = ("inspect", "verify", "stream", "diff", "demo", "env", "completion")
READERS = ("inspect", "verify", "stream")


# Help and usage ----------------------------------------------------------------------------------


def test_the_version_is_the_packages(run: Run) -> None:
    ran = run("--version")
    assert (ran.status, ran.stdout) == (0, f"kda-stream {kda_stream.__version__}\n")


def test_the_installed_command_is_the_same(small: Path) -> None:
    script = Path(sysconfig.get_path("scripts")) / "kda-stream"
    outputs = [
        subprocess.run([*command, "verify", small], capture_output=True, check=True).stdout
        for command in ([script], COMMAND, [sys.executable, "-m", "kda_stream"])
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_every_example_in_the_help_runs(run: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "GLM-5.3-Flash", Layout(kinds=(KDA, KDA, KDA, DSA) * 3))
    examples = []
    for arguments in ((), *((name,) for name in SUBCOMMANDS)):
        ran = run(*arguments, "--help")
        assert ran.status == 0
        assert re.search(
            r"exit status:\n +0 [^0]*\n +1 .*\n.*\n +2 .*\n +3 .*\n.*\n +130 ", ran.stdout
        )
        examples += re.findall(r"^  kda-stream (.+)$", ran.stdout, re.MULTILINE)
    assert {example.split()[0] for example in examples} == set(SUBCOMMANDS)
    assert len(examples) == 5 + len(SUBCOMMANDS)
    for example in examples:
        assert run(*example.split()).status == 0, example


@pytest.mark.parametrize(
    "arguments",
    [[], ["frobnicate"], ["inspect"], ["verify", "a", "b"], ["--json"], ["inspect", "--jso", "x"]],
    ids=" ".join,
)
def test_wrong_usage_is_one_error_and_a_hint(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.status == 2
    if "--json" in arguments:
        assert ran.json["problems"][0]["code"] == "argument"
    else:
        assert (len(ran.errors), len(ran.hints)) == (1, 1)
        assert "--help" in ran.hints[0]


def test_an_unknown_option_points_to_the_help_of_its_command(run: Run) -> None:
    ran = run("stream", "x", "--html", "y")
    assert ran.status == 2
    assert ran.hints == ["hint: `kda-stream stream --help` tells more"]


# JSON --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*READERS, "env"])
@pytest.mark.parametrize("fault", ["none", "absent", "cut", "misuse"])
def test_json_is_one_object_whatever_happens(
    run: Run, copied: Path, command: str, fault: str
) -> None:
    path = copied
    extra = []
    if fault == "absent":
        path = copied / "nowhere"
    elif fault == "cut":
        os.truncate(copied / SHARDS[0], 500)
    elif fault == "misuse":
        extra = ["--frob"]
    ran = run(command, path, "--json", *extra)
    found = ran.json
    assert list(found)[:4] == ["schema_version", "command", "exit_status", "problems"]
    assert found["schema_version"] == 1
    assert found["command"] == (None if fault == "misuse" else command)
    assert found["exit_status"] == ran.status
    assert bool(found["problems"]) == (fault != "none")
    for problem in found["problems"]:
        assert list(problem) == ["code", "what", "path", "tensor", "expected", "got", "hint"]
    if fault != "none":
        assert ran.stderr == ""


# Exit statuses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "inspect", "verify", "stream"),
    [
        ("none", 0, 0, 0),
        ("the path is absent", 3, 3, 3),
        ("a shard is cut short", 3, 1, 3),
        ("a shard is a Git LFS pointer", 3, 1, 3),
        ("a shard is missing", 3, 1, 3),
        ("the index is no JSON", 3, 1, 3),
        ("the index names a tensor that its shard lacks", 3, 1, 3),
        ("the config is no JSON", 0, 1, 1),
    ],
)
def test_the_exit_status_tells_findings_from_what_cannot_be_read(
    run: Run, copied: Path, fault: str, inspect: int, verify: int, stream: int
) -> None:
    path = copied
    if fault == "the path is absent":
        path = copied / "nowhere"
    elif fault == "a shard is cut short":
        os.truncate(copied / SHARDS[2], 5000)
    elif fault == "a shard is a Git LFS pointer":
        (copied / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\n")
    elif fault == "a shard is missing":
        (copied / SHARDS[1]).unlink()
    elif fault == "the index is no JSON":
        (copied / INDEX).write_text("<html>")
    elif fault == "the index names a tensor that its shard lacks":
        (copied / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[0]}}))
    elif fault == "the config is no JSON":
        (copied / "config.json").write_text("{")
    for command, status in (("inspect", inspect), ("verify", verify), ("stream", stream)):
        ran = run(command, path)
        assert ran.status == status, command
        assert (len(ran.errors) > 0) == (status != 0), command
        assert (len(ran.hints) > 0) == (status != 0), command


# Where the output goes ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*READERS, "--help"])
def test_a_reader_that_goes_away_is_no_error(small: Path, command: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, command, small, "--json"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 141
    assert stderr == b""


def test_a_reader_of_stderr_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = [*COMMAND, "verify", str(tmp_path / "x")]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=30) == 141


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_stream_that_was_closed_from_the_start_is_done_without(
    run: Run, copied: Path, descriptor: int
) -> None:
    (copied / SHARDS[0]).write_bytes(b"")
    ran = run("verify", copied, before=f"import os; os.close({descriptor})")
    assert ran.status == 1
    if descriptor == 1:
        assert (ran.stdout, len(ran.errors)) == ("", 1)
    else:
        assert ran.stdout == f"{copied}\ncannot be loaded, 1 problem\n"
        assert ran.stderr == ""


def test_a_full_disk_under_stdout_is_told(small: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [*COMMAND, "inspect", str(small)]
        done = subprocess.run(
            command, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 3
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


SHORT_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))"


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_what_does_not_fit_under_stdout_is_told_and_never_cut_in_silence(
    small: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run(
            [*prepared(SHORT_FILES), *COMMAND, "inspect", str(small), "--json"],
            env={**ENVIRONMENT, **env},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (tmp_path / "out").stat().st_size == 500
    assert done.returncode == 3
    assert done.stderr == "error: the output cannot be written: File too large\n"


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_a_pipe_that_does_not_block_and_is_full_is_told_too(
    small: Path, env: dict[str, str]
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    room = 1000
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.read(reader, 4096)
    os.write(writer, bytes(4096 - room))
    done = subprocess.run(
        [*COMMAND, "inspect", str(small), "--json"],
        env={**ENVIRONMENT, **env},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    os.close(reader)
    assert done.returncode == 3
    unavailable = os.strerror(errno.EAGAIN)
    assert done.stderr in (
        f"error: the output cannot be written: {unavailable}\n",
        "error: the output cannot be written: write could not complete without blocking\n",
    )


def test_the_caller_s_streams_are_the_caller_s_again() -> None:
    script = (
        "import sys; from kda_stream.cli import main; before = sys.stdout, sys.stderr; "
        "status = main(sys.argv[1:]); print(status, (sys.stdout, sys.stderr) == before)"
    )
    for option in ("-u", "-B"):
        done = subprocess.run(
            [sys.executable, option, "-c", script, "env", "-q"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "0 True\n"


def test_a_reader_that_goes_away_is_no_error_without_dev_null_either(small: Path) -> None:
    script = (
        "import os, sys; os.devnull = '/nowhere/null'; from kda_stream.cli import main; "
        "os._exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "inspect", str(small), "--json"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), stderr) == (141, b"")


# Odd names ---------------------------------------------------------------------------------------


def test_control_characters_in_names_are_escaped(
    run: Run, rewritten: Rewrite, tmp_path: Path
) -> None:
    path = rewritten(
        lambda t: t._replace(name=t.name.replace("layers.0.input", "layers.0.self_attn.\x1b[31m\n"))
    )
    odd = tmp_path / "od\x1b[2Jd\n\u202edir"
    path.rename(odd)
    verified = run("verify", odd)  # `run` itself refuses escapes
    assert verified.status == 1
    assert len(verified.stderr.splitlines()) == 2
    assert r"self_attn.\x1b[31m\n" in verified.errors[0]
    inspected = run("inspect", odd)
    assert inspected.stdout.splitlines()[0].endswith(r"od\x1b[2Jd\n\u202edir")
    for ran in (verified, inspected, run("stream", odd), run("verify", odd, "--json")):
        assert "\u202e" not in ran.stdout + ran.stderr


def test_a_path_that_is_no_utf8_is_escaped(run: Run, copied: Path) -> None:
    odd = os.fsdecode(os.fsencode(copied) + b"\xff")
    copied.rename(odd)
    assert r"copied\udcff" in run("inspect", odd).stdout
    assert run("verify", odd, "--json").json["path"] == odd


def test_an_output_in_ascii_takes_every_name(run: Run, copied: Path) -> None:
    odd = copied.rename(copied.with_name("\u6743\u91cd"))
    ran = run("inspect", odd, env={"PYTHONIOENCODING": "ascii"})
    assert ran.status == 0
    assert r"\u6743\u91cd" in ran.stdout


# Weight ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_no_command_imports_numpy_nor_rich_without_a_terminal(small: Path, command: str) -> None:
    arguments = {"diff": [small, small], "demo": [], "completion": ["bash"]}
    script = (
        "import sys; from kda_stream.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or not {'numpy', 'torch', 'rich'}.isdisjoint(sys.modules))"
    )
    given = [command, *map(str, arguments.get(command, [small]))]
    done = subprocess.run(
        [sys.executable, "-c", script, *given], env=ENVIRONMENT, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_importing_the_command_loads_nothing_that_could_be_interrupted() -> None:
    script = "import sys, kda_stream.cli; print([m for m in sys.modules if 'kda_stream.' in m])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"['kda_stream.cli']\n"
