"""What all tests share: the `support` folder on the path, small checkpoints, real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support.checkpoints import MEDIUM, UNEVEN, Written, write_checkpoint

from kda_stream import Checkpoint, KdaConfig, NotBuiltError, open_checkpoint
from kda_stream.staging.native import extension

RunPython = Callable[..., Any]

# A process that was started in the background, as this one may have been, ignores SIGINT, and so
# does what it starts: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
SIGINT_RAISES = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
# There too, but for what Python 3.12 says of a fork beside threads: some scripts are about that.
WARNINGS_ARE_ERRORS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A checkpoint of 8 layers and an MTP layer at an uneven geometry; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("uneven"), geometry=UNEVEN)


@pytest.fixture(scope="session")
def written_medium(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A checkpoint with several pages a tensor; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("medium"), geometry=MEDIUM)


@pytest.fixture
def checkpoint(written: Written) -> Iterator[Checkpoint]:
    with open_checkpoint(written.folder) as opened:
        yield opened


@pytest.fixture(scope="session")
def config() -> KdaConfig:
    """The geometry of `written`, spelled out."""
    return KdaConfig(hidden=24, heads=3, head_dim=5, conv_kernel=3)


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run a script in a fresh interpreter; returns what it printed last, read as JSON.

    A script that fails, dies of a signal or takes longer than `seconds` fails the test.
    """

    def run(
        script: str, *arguments: object, seconds: float = 60, flags: tuple[str, ...] = ()
    ) -> Any:
        done = subprocess.run(
            [
                sys.executable,
                *WARNINGS_ARE_ERRORS,
                *flags,
                "-c",
                SIGINT_RAISES + textwrap.dedent(script),
                *map(str, arguments),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def interrupt_python(tmp_path: Path) -> RunPython:
    """Run a script, send it SIGINT some time after it printed its first line.

    The script then prints JSON with `caught`, the `time.monotonic()` at which it saw the
    KeyboardInterrupt; returned with `delay`, the seconds that it took to see it.
    """

    def run(script: str, *arguments: object, after: float = 0.25, seconds: float = 60) -> Any:
        with subprocess.Popen(
            [
                sys.executable,
                *WARNINGS_ARE_ERRORS,
                "-c",
                SIGINT_RAISES + textwrap.dedent(script),
                *map(str, arguments),
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                assert child.stdout is not None
                child.stdout.readline()
                time.sleep(after)
                sent = time.monotonic()
                child.send_signal(signal.SIGINT)
                stdout, stderr = child.communicate(timeout=seconds)
            finally:
                child.kill()
        assert child.returncode == 0, f"exit {child.returncode}\n{stdout}\n{stderr}"
        found = json.loads(stdout.splitlines()[-1])
        return {**found, "delay": found["caught"] - sent}

    return run


def pytest_sessionstart() -> None:
    """Stop at once, with the library's own sentence, where it was not compiled."""
    try:
        extension()
    except NotBuiltError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
