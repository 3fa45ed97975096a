"""Ctrl-C, at every moment of every command: 130 and one line, or all was done already."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from cli.running import COMMAND, ENVIRONMENT, Ran
from support.checkpoints import Geometry
from support.checkpoints import write_checkpoint as write_sparse
from support.terminals import OnTerminal, launched, shards_are_open, spying, without_modules

WIDE = Geometry(hidden=2048, heads=32, head_dim=128, conv_kernel=4)  # 75 MB a layer
LONG = {
    "stream": ("stream", "long", "--layers", ",".join(["0,1,2,4,5,6"] * 400)),
    "verify": ("verify", "long", "--write-manifest", "sums.json"),
    "diff": ("diff", "long", "long", "--payload"),
}
EACH = {
    "inspect": ("inspect", "small"),
    "verify": ("verify", "small", "--payload"),
    "verify --write-manifest": ("verify", "small", "--write-manifest", "small-sums.json"),
    "stream": ("stream", "small"),
    "diff": ("diff", "small", "small", "--payload"),
    "demo": ("demo",),
    "env": ("env", "small"),
    "completion": ("completion", "bash"),
    "--help": ("--help",),
    "wrong usage": ("frobnicate",),
}
SHORT = ("--help", "wrong usage")  # may be done before an interrupt within an import is answered
MOMENTS = 8
ANSWER_SECONDS = 3.0  # on a machine where others work too


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


@contextlib.contextmanager
def started(
    command: Sequence[object], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command that writes to pipes, and answers SIGINT even where this process does not."""
    process = subprocess.Popen(
        launched(command),
        cwd=folder,
        env={**ENVIRONMENT, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], seconds: float = 30) -> Ran:
    stdout, stderr = process.communicate(timeout=seconds)
    return Ran(process.returncode, stdout, stderr)


def assert_interrupted(ran: Ran, *, as_json: bool = False) -> None:
    assert (ran.status, ran.stderr) == (130, "interrupted\n")
    if as_json:
        assert ran.stdout == ""


# Wherever the command is -------------------------------------------------------------------------

# Counts what Python tells an audit hook: imports, opened files, maps, programs and much else; from
# the first import of the command's own modules on, when whatever is imported is its own affair.
_AT_EVENT = """
import atexit, os, signal, sys
count, began = 0, False
def _note(event, arguments):
    global count, began
    began = began or (event == "import" and arguments[0].startswith("kda_stream.cli."))
    if began:
        count += 1
        if count == AT:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(_note)
if not AT:
    atexit.register(lambda: os.write(os.open(F, os.O_WRONLY | os.O_CREAT, 0o600), b"%d" % count))
"""


def run_to_event(folder: Path, at: int, arguments: Sequence[object]) -> Ran:
    """The command, interrupted at the event of that number; at 0: not at all, and they are counted.

    The moment is the same in each run, however busy the machine is; what the command does with it
    is not: within an import it may wait a little, and a short command may be done by then.
    """
    for made in ("small-sums.json", "sums.json"):
        (folder / made).unlink(missing_ok=True)
    (folder / "events").unlink(missing_ok=True)
    spy = spying(folder / "spy", f"AT, F = {at}, {str(folder / 'events')!r}\n{_AT_EVENT}")
    with started([*COMMAND, *arguments], folder, spy) as process:
        return ended(process)


@pytest.mark.parametrize(
    ("what", "as_json"),
    [
        *((what, False) for what in EACH),
        *((what, True) for what in ("inspect", "verify", "stream")),
    ],
)
def test_at_any_moment_it_is_130_and_one_line_or_all_is_done(
    here: Path, what: str, as_json: bool
) -> None:
    """With --json never a piece of the object: none of it, or all where it was just printed."""
    arguments = (*EACH[what], *(["--json"] if as_json else []))
    whole = run_to_event(here, 0, arguments)
    events = int((here / "events").read_text())
    assert events > 2 * MOMENTS
    assert whole.status in (0, 2)
    wrong = []
    interrupted = 0
    for moment in range(MOMENTS):
        at = 1 + (events - 1) * moment // (MOMENTS - 1)
        ran = run_to_event(here, at, arguments)
        interrupted += ran.status == 130
        told, line, rest = ran.stderr.partition(
            "interrupted\n"
        )  # what is wrong may be told already
        is_told = whole.stderr.startswith(told) and bool(line) and not rest
        is_interrupted = ran.status == 130 and is_told
        is_printed = ran.stdout.count("\n") == whole.stdout.count("\n")
        is_done = is_printed and (ran.status, ran.stderr) == (whole.status, whole.stderr)
        is_no_piece = ran.stdout == "" or is_printed
        if not (is_done or (is_interrupted and (is_no_piece or not as_json))):
            wrong.append((f"event {at} of {events}", ran))
    assert wrong == []
    assert interrupted > 0 or what in SHORT


def test_nothing_is_left_of_a_demo_that_was_interrupted(here: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    whole = run_to_event(here, 0, EACH["demo"])
    assert whole.status == 0
    events = int((here / "events").read_text())
    for part in (3, 5, 7, 9):
        spy = spying(here / "spy", f"AT, F = {events * part // 10}, ''\n{_AT_EVENT}")
        with started([*COMMAND, "demo"], here, {**spy, "TMPDIR": str(temporary)}) as process:
            assert ended(process).status in (0, 130)
        assert list(temporary.glob("kda-stream-*")) == []  # tempfile tries the folder with its own


_AT_EXIT = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))"


@pytest.mark.parametrize("arguments", [("inspect", "small"), ("stream", "small", "--json")])
def test_when_python_ends_after_all_was_done(here: Path, arguments: tuple[str, ...]) -> None:
    with started([*COMMAND, *arguments], here, spying(here / "spy", _AT_EXIT)) as process:
        ran = ended(process)
    assert (ran.status, ran.stderr) in ((0, ""), (130, "interrupted\n"))
    assert ran.stdout
    assert ran.status == 0 or "--json" not in arguments


# At many times -----------------------------------------------------------------------------------

_BEGAN = """
import sys
def _note(event, arguments):
    if event == "import" and arguments[0].startswith("kda_stream.cli."):
        open(F, "w").close()
sys.addaudithook(_note)
"""


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", LONG)
def test_a_long_command_is_interrupted_whenever_it_is(
    here: Path, command: str, as_json: bool
) -> None:
    """While it imports, opens, reads and hashes: some tenths of a second, spread evenly."""
    began = here / "began"
    spy = spying(here / "spy", f"F = {str(began)!r}\n{_BEGAN}")
    arguments = (*LONG[command], *(["--json"] if as_json else []))
    for delay_ms in (0, 15, 40, 90, 200, 450):
        began.unlink(missing_ok=True)
        with started([*COMMAND, *arguments], here, spy) as process:
            while not began.exists():
                assert process.poll() is None, process.communicate()
            time.sleep(delay_ms / 1000)
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            ran = ended(process)
        assert_interrupted(ran, as_json=True)  # it had nothing to print yet
        assert time.monotonic() - sent < ANSWER_SECONDS
        assert not (here / "sums.json").exists()
        assert sorted(path.name for path in here.iterdir() if "sums" in path.name) == []


# What Python does itself, before a line of the package's modules runs, is not in its hands.
_OWN_MODULES = re.compile(
    r'kda_stream/(?!__init__|__main__|cli/__init__|cli/__main__)[\w/]+\.py", line'
)


@pytest.mark.parametrize("name", ["module", "script"])
def test_from_the_start_of_the_process_on(here: Path, name: str) -> None:
    """Before the package is there Python answers; from then on it is 130 and one line."""
    script = Path(sysconfig.get_path("scripts")) / "kda-stream"
    command = [sys.executable, "-m", "kda_stream"] if name == "module" else [script]
    for delay_ms in range(0, 160, 16):
        with started([*command, *LONG["stream"], "--json"], here) as process:
            time.sleep(delay_ms / 1000)
            process.send_signal(signal.SIGINT)
            ran = ended(process)
        assert ran.stdout == ""
        if ran.status == 130:
            assert ran.stderr == "interrupted\n"
        else:
            assert ran.status in (-signal.SIGINT, 1)  # 1: while it looks for its packages
            assert not _OWN_MODULES.search(ran.stderr), ran.stderr


def test_a_second_signal_changes_nothing(here: Path) -> None:
    """Of a user who has no patience, and of a shell and a supervisor that both send one."""
    for pause_ms in (0, 1, 5, 20):
        with started([*COMMAND, *LONG["stream"]], here) as process:
            while not shards_are_open(process.pid):
                time.sleep(0.005)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            time.sleep(pause_ms / 1000)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            assert_interrupted(ended(process))


def test_while_nobody_takes_what_it_prints(here: Path) -> None:
    """It waits for the reader then, who need not come: not even for what is in the buffer."""
    with started([*COMMAND, "inspect", "long", "--json"], here) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        assert select.select([process.stdout], [], [], 30)[0]
        time.sleep(0.2)
        assert process.poll() is None, "its output fits in the pipe"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=ANSWER_SECONDS) == 130
        assert process.stderr.read() == "interrupted\n"


_TELLING_AT_ONCE = "import kda_stream.cli.progress as progress; progress._TELL_SECONDS = 0"


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """A pipe's end to write to, which takes no more and has nobody who reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    os.close(reader)


def test_while_nobody_takes_what_it_says_of_its_progress(here: Path, full_pipe: int) -> None:
    spy = spying(here / "spy", _TELLING_AT_ONCE)
    process = subprocess.Popen(
        launched([*COMMAND, *LONG["stream"]]),
        cwd=here,
        env={**ENVIRONMENT, **spy},
        stdout=subprocess.DEVNULL,
        stderr=full_pipe,
    )
    try:
        while not shards_are_open(process.pid):
            time.sleep(0.005)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=ANSWER_SECONDS) == 130
    finally:
        process.kill()


def test_nobody_who_reads_of_its_progress_keeps_it_waiting(here: Path, full_pipe: int) -> None:
    spy = spying(here / "spy", _TELLING_AT_ONCE)
    done = subprocess.run(
        launched([*COMMAND, "stream", "small"]),
        cwd=here,
        env={**ENVIRONMENT, **spy},
        stdout=subprocess.PIPE,
        stderr=full_pipe,
        timeout=20,
    )
    assert done.returncode == 0
    assert b"6 KDA layers" in done.stdout


# On a terminal -----------------------------------------------------------------------------------


@pytest.fixture(params=["with rich", "without rich"])
def env(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """What to add to the environment: nothing, or what takes rich away."""
    return {} if request.param == "with rich" else without_modules(tmp_path / "without", "rich")


@pytest.mark.parametrize("command", LONG)
def test_the_key_ends_it_with_one_line_below_the_bar(
    here: Path, env: dict[str, str], command: str
) -> None:
    with OnTerminal([*COMMAND, *LONG[command]], env=env, columns=100, cwd=here) as ran:
        ran.read(until=lambda: len(ran.screen.draws) > 2)
        ran.press(b"\x03")
        sent = time.monotonic()
        assert ran.finish() == 130
        assert time.monotonic() - sent < ANSWER_SECONDS
    bar, line = ran.screen.lines
    assert re.search(r"\dB?/s|B/s", bar)
    assert line == "interrupted"
    assert ran.text.endswith("\n")
    assert ran.screen.wraps == 0
    assert not ran.screen.cursor_is_hidden


def test_the_key_pressed_again_and_again_too(here: Path, env: dict[str, str]) -> None:
    with OnTerminal([*COMMAND, *LONG["stream"]], env=env, columns=100, cwd=here) as ran:
        ran.read(until=lambda: len(ran.screen.draws) > 2)
        for _ in range(5):
            with contextlib.suppress(OSError):
                ran.press(b"\x03")
            time.sleep(0.01)
        assert ran.finish() == 130
    assert ran.screen.lines[1:] == ["interrupted"]
    assert not ran.screen.cursor_is_hidden


@pytest.mark.parametrize("delay_ms", [0, 10, 30, 60, 100])
def test_the_key_pressed_while_it_begins(here: Path, delay_ms: int) -> None:
    began = here / "began"
    spy = spying(here / "spy", f"F = {str(began)!r}\n{_BEGAN}")
    with OnTerminal([*COMMAND, *LONG["stream"]], env=spy, columns=100, cwd=here) as ran:
        ran.read(until=began.exists)
        time.sleep(delay_ms / 1000)
        ran.press(b"\x03")
        assert ran.finish() == 130
    assert ran.screen.lines[-1] == "interrupted"
    assert len(ran.screen.lines) <= 2
    assert not ran.screen.cursor_is_hidden


def test_a_pipeline_is_interrupted_as_a_whole(here: Path) -> None:
    """All of a process group gets the signal, the reader of the output too."""
    words = " ".join(map(str, (*COMMAND, *LONG["stream"])))
    shell = ["/bin/sh", "-c", f"{words} | cat; exit 7"]
    with OnTerminal(shell, columns=100, cwd=here) as ran:
        ran.read(until=lambda: len(ran.screen.draws) > 2)
        ran.press(b"\x03")
        assert ran.finish() in (7, -signal.SIGINT, 130)
    assert ran.screen.lines[1:] == ["interrupted"]
    assert "Traceback" not in ran.text


def test_called_from_python_it_gives_the_status_back(here: Path) -> None:
    """The interpreter goes on, with the handler of SIGINT that was there before."""
    script = """
import os, sys, threading, time, signal
from kda_stream.cli import main
def is_shard(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors")
    except OSError:
        return False
def later():
    while not any(map(is_shard, range(3, 40))):
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=later, daemon=True).start()
status = main(sys.argv[1:])
print("status", status, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    with started([sys.executable, "-c", script, *LONG["stream"]], here) as process:
        ran = ended(process)
    assert (ran.status, ran.stderr) == (0, "interrupted\n")
    assert ran.stdout == "status 130 True\n"
