"""New files: whole or not there, never in the place of another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kda_stream import PathError
from kda_stream.files import NewFile

# Linux and a file system with O_TMPFILE, and what stands in for every other system
WITH_AND_WITHOUT_NAME = pytest.mark.parametrize("has_name", [False, True])


def take_nameless_files_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")


@WITH_AND_WITHOUT_NAME
def test_a_file_is_there_once_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_name: bool
) -> None:
    if has_name:
        take_nameless_files_away(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with NewFile("page") as new:
        assert len(os.listdir()) == has_name
        new.finish(b"whole")
    assert os.listdir() == ["page"]
    assert Path("page").read_bytes() == b"whole"


@WITH_AND_WITHOUT_NAME
def test_a_file_that_is_not_finished_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_name: bool
) -> None:
    if has_name:
        take_nameless_files_away(monkeypatch)
    with NewFile(str(tmp_path / "page")):
        pass
    assert os.listdir(tmp_path) == []


@WITH_AND_WITHOUT_NAME
def test_a_file_that_another_process_wrote_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_name: bool
) -> None:
    if has_name:
        take_nameless_files_away(monkeypatch)
    with NewFile(str(tmp_path / "page")) as new:
        (tmp_path / "page").write_text("theirs")
        with pytest.raises(PathError):
            new.finish(b"ours")
    assert (tmp_path / "page").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["page"]


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="the system has no files without a name")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    script = (
        "import os, sys; from kda_stream.files import NewFile; "
        f"new = NewFile('page'); os.kill(os.getpid(), {int(sent)})"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False)
    assert done.returncode == -sent
    assert os.listdir(tmp_path) == []
