"""`kda-stream stream`: what it tells, what it refuses, and how it is interrupted."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.running import COMMAND, ENVIRONMENT, Rewrite, Run
from support.checkpoints import UNEVEN, Geometry
from support.checkpoints import write_checkpoint as write_sparse
from support.families import FAMILIES, write_family

from kda_stream import KdaConfig, kda_slot_bytes
from kda_stream.testing import GEOMETRY, Layout

LAYER_BYTES = 43_312
WIDE = Geometry(hidden=2048, heads=32, head_dim=128, conv_kernel=4)  # 75 MB a layer


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of eight large layers of zeros, which takes no room; not to be changed."""
    return write_sparse(tmp_path_factory.mktemp("wide"), geometry=WIDE, sparse=True).folder


WITHOUT_LOCK_RIGHTS = """
import ctypes, resource
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
"""
WITHIN_4_GIB = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (4 * 1024**3, 4 * 1024**3))
"""


# What it tells -----------------------------------------------------------------------------------


def test_every_kda_layer_is_streamed_and_told(run: Run, small: Path) -> None:
    ran = run("stream", small)
    assert ran.status == 0
    assert "6 KDA layers, 259,872 bytes (259.872 kB)" in ran.stdout
    assert "GB/s, 6 layers mapped\n" in ran.stdout
    assert "2 slots of 106.288 kB; peak " in ran.stdout
    assert "locked    yes, " in ran.stdout or "locked    no: " in ran.stdout


def test_with_auto_it_is_told_of_which_families_the_layers_were(run: Run, tmp_path: Path) -> None:
    families = (FAMILIES["GLM5_NEXT"], FAMILIES["GLM5_NEXT_F32_CONV"], FAMILIES["GLM5_NEXT"])
    written = write_family(tmp_path / "two", families, UNEVEN, layers=8)
    ran = run("stream", written.folder, "--family", "auto")
    assert "  family    GLM5_NEXT (4), GLM5_NEXT_F32_CONV (2)\n" in ran.stdout
    found = run("stream", written.folder, "--family", "auto", "--json").json
    assert found["families"] == {"GLM5_NEXT": 4, "GLM5_NEXT_F32_CONV": 2}
    assert run("stream", written.folder, "--json").status == 1


def test_the_facts_as_json(run: Run, small: Path) -> None:
    found = run("stream", small, "--json", "--slots", "3").json
    assert (found["schema_version"], found["command"], found["exit_status"]) == (1, "stream", 0)
    assert found["problems"] == []
    assert found["layers"] == 6
    assert found["layer_numbers"] == [0, 1, 2, 4, 5, 6]
    assert found["bytes"] == 6 * LAYER_BYTES
    assert found["seconds"] > 0
    assert found["bytes_per_second"] == pytest.approx(found["bytes"] / found["seconds"])
    assert found["slots"] == 3
    assert found["slot_bytes"] == kda_slot_bytes(GEOMETRY)
    assert found["peak_anonymous_bytes"] > 3 * found["slot_bytes"]
    assert found["peak_resident_bytes"] > found["peak_anonymous_bytes"]
    assert set(found["lock"]) == {
        "policy",
        "locked",
        "wanted_bytes",
        "locked_bytes",
        "locked_before_bytes",
        "limit_bytes",
        "refusal",
    }
    assert found["lock"]["policy"] == "prefer"


def test_chosen_layers_come_in_the_order_given(run: Run, small: Path) -> None:
    found = run("stream", small, "--layers", "4,0,4", "--json").json
    assert found["layer_numbers"] == [4, 0, 4]
    assert found["bytes"] == 3 * LAYER_BYTES


@pytest.mark.parametrize("read", ["mapped", "positional", "direct"])
def test_the_way_that_was_asked_for_is_the_way_taken(run: Run, small: Path, read: str) -> None:
    assert run("stream", small, "--read", read, "--json").json["reads"] == {read: 6}


def test_peak_memory_is_that_of_the_slots_whatever_the_layers(run: Run, wide: Path) -> None:
    slot_bytes = kda_slot_bytes(KdaConfig(2048, 32, 128, 4))
    for slots in (1, 3):
        found = run("stream", wide, "--slots", slots, "--json").json
        peak = found["peak_anonymous_bytes"]
        assert slot_bytes < peak < slots * slot_bytes + 64 * 1024**2


# Page-locked or not ------------------------------------------------------------------------------


def test_unlocked_memory_says_that_it_was_wished_for(run: Run, small: Path) -> None:
    ran = run("stream", small, "--lock", "off")
    assert "locked    no, by --lock off" in ran.stdout


def test_memory_that_cannot_be_locked_says_why_and_how_to_change_it(run: Run, small: Path) -> None:
    ran = run("stream", small, before=WITHOUT_LOCK_RIGHTS)
    assert ran.status == 0
    assert "locked    no: 212,992 bytes wanted under a limit of 4,096: " in ran.stdout
    assert "ulimit -l unlimited" in ran.stdout
    lock = run("stream", small, "--json", before=WITHOUT_LOCK_RIGHTS).json["lock"]
    assert (lock["locked"], lock["wanted_bytes"], lock["limit_bytes"]) == (False, 212_992, 4096)
    assert "limit" in lock["refusal"]


def test_memory_that_must_be_locked_and_cannot_be_is_refused(run: Run, small: Path) -> None:
    ran = run("stream", small, "--lock", "require", before=WITHOUT_LOCK_RIGHTS)
    assert ran.status == 3
    assert "expected 212992 bytes, got a limit of 4096 bytes" in ran.errors[0]
    assert "ulimit -l" in ran.hints[0]
    assert ran.stdout == ""


def test_memory_that_the_system_refuses_ends_with_3(run: Run, wide: Path) -> None:
    ran = run("stream", wide, "--slots", "64", before=WITHIN_4_GIB)
    assert ran.status == 3
    assert "the system refuses the memory" in ran.errors[0]
    assert "with fewer slots" in ran.hints[0]


# What it refuses ---------------------------------------------------------------------------------


def test_an_f32_conv_is_refused_with_the_three_names(run: Run, rewritten: Rewrite) -> None:
    path = rewritten(
        lambda t: t._replace(dtype="F32") if "layers.4." in t.name and "conv1d" in t.name else t
    )
    ran = run("stream", path)
    assert ran.status == 1
    assert ran.stdout == ""
    assert len(ran.errors) == len(ran.hints) == 1
    for part in "qkv":
        assert f"self_attn.{part}_conv1d.weight has the wrong dtype" in ran.errors[0]
    assert "layer 4" in ran.errors[0]


def test_a_refusal_as_json_is_an_object_too(run: Run, rewritten: Rewrite) -> None:
    ran = run("stream", rewritten(lambda t: None if t.name.endswith("0.A_log") else t), "--json")
    assert ran.status == 0  # no tensor has that name
    ran = run(
        "stream",
        rewritten(lambda t: None if t.name.endswith(".0.self_attn.A_log") else t),
        "--json",
    )
    assert ran.status == 1
    assert ran.stderr == ""
    (problem,) = ran.json["problems"]
    assert problem["code"] == "bind-refused"
    assert "self_attn.A_log is missing" in problem["what"]
    assert "layers" not in ran.json


def test_a_missing_config_and_a_dsa_layer_are_refused(run: Run, copied: Path) -> None:
    assert run("stream", copied, "--layers", "3").status == 1
    (copied / "config.json").unlink()
    ran = run("stream", copied)
    assert ran.status == 1
    assert "there is no config.json" in ran.errors[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layers", "99"],
        ["--layers", "-1"],
        ["--layers", "a"],
        ["--layers", ""],
        ["--layers", "9" * 5000],
        ["--slots", "0"],
        ["--slots", "65"],
        ["--slots", "two"],
        ["--lock", "maybe"],
        ["--read", "magic"],
        ["--frob"],
    ],
    ids=lambda arguments: " ".join(arguments)[:20],
)
def test_wrong_arguments_are_wrong_usage(run: Run, small: Path, arguments: list[str]) -> None:
    ran = run("stream", small, *arguments)
    assert ran.status == 2
    assert len(ran.errors) == 1
    assert ran.stdout == ""


# On a terminal -----------------------------------------------------------------------------------


class OnTerminal:
    """A command whose stderr is a terminal."""

    def __init__(self, *arguments: object, columns: int = 80) -> None:
        self.terminal, child_side = pty.openpty()
        fcntl.ioctl(child_side, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            env={**ENVIRONMENT, "TERM": "xterm", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=child_side,
            text=True,
        )
        os.close(child_side)

    def read_first(self) -> bytes:
        """What is written first, once it is."""
        return os.read(self.terminal, 4096)

    def read_rest(self) -> bytes:
        """All that is written until the command ends."""
        pieces: list[bytes] = []
        while True:
            try:
                piece = os.read(self.terminal, 4096)
            except OSError:  # how Linux says that the other side was closed
                piece = b""
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.terminal)


@pytest.fixture
def long_stream(wide: Path) -> Iterator[OnTerminal]:
    """A stream of many gigabytes that has begun to hand out layers."""
    layers = ",".join(["0,1,2,4,5,6"] * 1000)
    started = OnTerminal("stream", wide, "--slots", "1", "--layers", layers)
    yield started
    started.close()


def test_on_a_terminal_progress_rewrites_one_line(small: Path) -> None:
    started = OnTerminal("stream", small, "--layers", ",".join(["0"] * 2000))
    try:
        written = started.read_rest()
        assert started.process.wait(timeout=30) == 0
    finally:
        started.close()
    assert written.count(b"\r") > 2
    assert written.count(b"\n") == 1
    assert b" 2,000 of 2,000 layers, 86.624 MB of 86.624 MB, " in written


def test_on_a_narrow_terminal_progress_stays_on_one_line(small: Path) -> None:
    started = OnTerminal("stream", small, "--layers", ",".join(["0"] * 2000), columns=20)
    try:
        written = started.read_rest()
    finally:
        started.close()
    drawn = written.decode().strip().split("\r")
    assert max(map(len, drawn)) < 20
    assert drawn[-1].endswith(" 100 %")


def test_ctrl_c_ends_the_stream_with_130_and_one_line(long_stream: OnTerminal) -> None:
    long_stream.read_first()
    sent = time.monotonic()
    long_stream.process.send_signal(signal.SIGINT)
    rest = long_stream.read_rest()
    assert long_stream.process.wait(timeout=30) == 130
    assert time.monotonic() - sent < 2
    assert rest.splitlines()[-1] == b"interrupted"
    assert b"Traceback" not in rest
    assert long_stream.process.stdout is not None
    assert long_stream.process.stdout.read() == ""


def test_a_shard_that_is_cut_short_under_the_stream_is_an_error_and_no_signal(
    tmp_path: Path,
) -> None:
    folder = write_sparse(tmp_path / "cut", geometry=WIDE, sparse=True).folder
    layers = ",".join(["0,1,2,4,5,6"] * 1000)
    started = OnTerminal("stream", folder, "--slots", "1", "--layers", layers)
    try:
        started.read_first()
        for shard in folder.glob("*.safetensors"):
            os.truncate(shard, 4096)
        rest = started.read_rest().decode()
        assert started.process.wait(timeout=30) == 3
    finally:
        started.close()
    assert "Traceback" not in rest
    assert "error: " + str(folder) in rest
    assert "hint: " in rest


def test_the_layout_that_these_figures_are_of_is_the_default_one() -> None:
    attention = [t for t in Layout().tensors() if ".layers.0.self_attn." in t.name]
    assert sum(tensor.nbytes for tensor in attention) == LAYER_BYTES
