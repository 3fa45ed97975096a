"""`CudaHost` on a machine without a GPU: its sentence, and its calls, by a stand-in for cudart.

The stand-in has the signatures of torch's binding (`torch/csrc/cuda/shared/cudart.cpp`): both
functions take numbers by position and return a `cudaError`, of which `int()` is the number.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the interop extra")

import numpy
import torch
from support.checkpoints import Written
from support.fake_driver import NOT_SUPPORTED, FakeDriver

from kda_stream import (
    ErrorCode,
    HostRegistrar,
    MemoryRefusedError,
    PinnedArena,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.interop.cuda import CudaHost

RunPython = Callable[..., Any]
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
PORTABLE = 1


class CudaError:
    """As pybind11's enum_ gives it: a number that is none, unknown ones too."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number


@dataclass
class StandIn:
    """The runtime and the devices of torch.cuda, over a fake driver."""

    driver: FakeDriver
    device: int = 2
    flags: list[int] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=self.cuda_host_register, cudaHostUnregister=self.cuda_host_unregister
        )

    def cuda_host_register(self, ptr: int, size: int, flags: int, /) -> CudaError:
        self.flags.append(flags)
        self.devices.append(self.device)
        return CudaError(self.driver.register(ptr, size))

    def cuda_host_unregister(self, ptr: int, /) -> CudaError:
        self.devices.append(self.device)
        return CudaError(self.driver.unregister(ptr))

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before


def stand_in(monkeypatch: pytest.MonkeyPatch, **options: Any) -> StandIn:
    made = StandIn(FakeDriver(**options))
    monkeypatch.setattr(torch.cuda, "cudart", made.cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.device)
    monkeypatch.setattr(torch.cuda, "device", made.on_device)
    return made


@without_cuda
def test_without_cuda_it_is_a_sentence_that_says_so_and_what_to_do() -> None:
    with pytest.raises(MemoryRefusedError) as caught:
        CudaHost()
    assert caught.value.code is ErrorCode.REGISTER_REFUSED
    line = str(caught.value)
    assert line.isprintable()
    assert line.startswith(
        "there is no CUDA to register memory with: expected torch built with CUDA, and a GPU, got "
    )
    assert caught.value.got, "what torch says of it"
    assert "nvidia-smi" in (caught.value.hint or "")


def test_without_torch_it_is_the_same_sentence(run_python: RunPython) -> None:
    script = """
        import json, sys
        sys.modules["torch"] = None
        from kda_stream import MemoryRefusedError
        from kda_stream.interop.cuda import CudaHost
        try:
            CudaHost()
        except MemoryRefusedError as error:
            print(json.dumps([error.what, "torch" in error.got]))
    """
    assert run_python(script) == ["there is no CUDA to register memory with", True]


def test_torch_is_imported_only_when_it_is_used(run_python: RunPython) -> None:
    script = """
        import json, sys
        import kda_stream.interop.cuda
        print(json.dumps("torch" in sys.modules))
    """
    assert run_python(script) is False


def test_an_arena_is_registered_for_every_device_and_unregistered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = stand_in(monkeypatch)
    host: HostRegistrar = CudaHost()
    with PinnedArena(5000, slots=2, register=host) as arena:
        assert arena.report.registered
        assert [end - begin for begin, end in cuda.driver.ranges] == [arena.nbytes]
    assert cuda.flags == [PORTABLE]
    assert cuda.driver.names == ["register", "unregister"]
    cuda.driver.assert_clean()


@pytest.mark.parametrize(("given", "used"), [(None, 2), (5, 5), (0, 0)])
def test_each_call_is_made_on_the_device_that_was_chosen_whichever_is_current(
    monkeypatch: pytest.MonkeyPatch, given: int | None, used: int
) -> None:
    cuda = stand_in(monkeypatch)
    host = CudaHost(given)
    cuda.device = 7
    PinnedArena(5000, register=host).close()
    assert cuda.devices == [used, used]
    assert cuda.device == 7


def test_a_refusal_is_reported_by_its_number(
    monkeypatch: pytest.MonkeyPatch, written: Written
) -> None:
    cuda = stand_in(monkeypatch, answers=[NOT_SUPPORTED])
    with (
        open_checkpoint(written.folder) as checkpoint,
        stream_kda_layers(checkpoint, register=CudaHost()) as stream,
    ):
        assert sum(1 for _ in stream) == 6
        assert "not supported (801)" in (stream.report.lock.registration_refusal or "")
    assert cuda.driver.names == ["register"]


def test_a_refusal_is_taken_back_where_torch_binds_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = stand_in(monkeypatch, answers=[NOT_SUPPORTED])
    cleared: list[None] = []
    runtime = cuda.cudart()
    runtime.cudaGetLastError = lambda: cleared.append(None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for times in (1, 1):  # the second one is not refused
        PinnedArena(5000, register=CudaHost()).close()
        assert len(cleared) == times
    cuda.driver.assert_clean()


@pytest.mark.skipif(sys.platform != "linux", reason="a shared library as on Linux")
def test_a_refusal_is_taken_back_in_the_runtime_that_the_process_has_loaded(
    tmp_path: Path, run_python: RunPython
) -> None:
    source, library = tmp_path / "runtime.c", tmp_path / "libcudart.so"
    source.write_text("int cleared;\nint cudaGetLastError(void) { return ++cleared; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    script = """
        import ctypes, json, sys
        from types import SimpleNamespace
        from kda_stream.interop.cuda import _clear_last_error
        _clear_last_error(SimpleNamespace())  # no runtime: nothing to do
        library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
        _clear_last_error(SimpleNamespace())
        print(json.dumps(ctypes.c_int.in_dll(library, "cleared").value))
    """
    assert run_python(script, library) == 1


def test_the_calls_are_those_by_which_torch_registers_memory_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utils = pytest.importorskip("torch.cuda._pin_memory_utils", reason="another torch")
    cuda = stand_in(monkeypatch)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    utils.pin_memory(address, mmap.PAGESIZE)
    utils.unpin_memory(address)
    by_torch = (cuda.flags.copy(), cuda.driver.names.copy())
    cuda.flags.clear()
    cuda.driver.calls.clear()
    PinnedArena(mmap.PAGESIZE, register=CudaHost()).close()
    assert (cuda.flags, cuda.driver.names) == by_torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_torch_takes_a_registered_arena_for_pinned_and_copies_it_right(written: Written) -> None:
    with (
        open_checkpoint(written.folder) as checkpoint,
        stream_kda_layers(checkpoint, lock="require", register=CudaHost()) as stream,
    ):
        for layer in stream:
            array = numpy.frombuffer(layer.weights.q_proj.data, numpy.uint8)
            bits = torch.from_numpy(array)
            assert bits.is_pinned()
            copy = torch.empty(array.size, dtype=torch.uint8, device="cuda")
            copy.copy_(bits, non_blocking=True)
            torch.cuda.synchronize()
            assert copy.cpu().numpy().tobytes() == array.tobytes()
            del array, bits
