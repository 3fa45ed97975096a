"""How fast the KDA layers of a checkpoint reach a GPU: `python bench/bench_gpu.py [CHECKPOINT]`.

It needs a GPU and torch with CUDA; without them it says so and exits 0. `--device cpu` runs the
same steps with copies to other memory, to try them: its rates mean nothing.

Measured in one run, medians of the rounds, with warm files: staging alone; copying alone, of one
layer that stays in its registered slot; both at once, each layer held until the copy's event has
passed; and beside them what the bus gives, a plain copy of as many bytes out of memory that torch
pinned itself. Before that each layer goes through once, and its checksum, taken on the device
behind the copy, is compared with that of a bind by itself; the exit status is 1 when one differs.
Without CHECKPOINT one at the geometry of GLM-5.3-Flash is written, 275 MB a layer.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from kda_stream import (
    Checkpoint,
    HostRegistrar,
    KdaConfig,
    KdaLayer,
    KdaLayerStream,
    KdaWeights,
    bind_kda_weights,
    open_checkpoint,
    stream_kda_layers,
)

SUMMED_BYTES = 16 * 1024**2  # at once: eight times as much is taken on the device for it


class Target:
    """A buffer of the device that copies go to, on a stream beside the usual one."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.device = device
        self.is_cuda = device.startswith("cuda")
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._factors = torch.arange(1, SUMMED_BYTES + 1, dtype=torch.int64, device=device)
        self._side = torch.cuda.Stream(device) if self.is_cuda else None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))

    def copy(self, *sources: Any) -> Any:
        """Copy host tensors into the buffer, one behind the other; the event that follows them."""
        with torch.cuda.stream(self._side):
            begin = 0
            for source in sources:
                end = begin + source.numel()
                self.buffer[begin:end].copy_(source, non_blocking=True)
                begin = end
            return None if self._side is None else self._side.record_event()

    def checksum(self, nbytes: int) -> Any:
        """Of what the copies before it brought, there: each byte counts by its place."""
        with torch.cuda.stream(self._side):
            total = torch.zeros((), dtype=torch.int64, device=self.device)
            for begin in range(0, nbytes, SUMMED_BYTES):
                piece = self.buffer[begin : min(begin + SUMMED_BYTES, nbytes)]
                placed = (piece * self._factors[: piece.numel()]).sum()
                total = (total * 31 + placed) % (2**31 - 1)
            return total

    def finish(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


class Releasing:
    """A thread that gives each layer back when its copy's event has passed."""

    def __init__(self) -> None:
        self._given: queue.Queue[tuple[KdaLayer, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def after(self, event: Any, layer: KdaLayer) -> None:
        self._given.put((layer, event))

    def finish(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            layer, event = given
            if event is not None:
                event.synchronize()
            layer.release()


class Bench:
    """What is measured of one checkpoint on one device."""

    def __init__(
        self, checkpoint: Checkpoint, device: str, slots: int, register: HostRegistrar | None
    ) -> None:
        self._checkpoint = checkpoint
        self._slots = slots
        self._register = register
        with self._stream() as stream:
            self.layers = stream.layers
            report = next(stream).report
        self.layer_bytes, self.lock = report.bytes, report.lock
        self.nbytes = self.layer_bytes * len(self.layers)
        self.target = Target(device, self.layer_bytes)

    def wrong_layers(self) -> list[int]:
        """The layers whose checksum on the device is not that of a bind by itself."""
        host = Target("cpu", self.layer_bytes)
        expected, found = {}, {}
        config = KdaConfig.from_json(self._checkpoint.config_path)
        for index in self.layers:
            weights, _ = bind_kda_weights(config, index, self._checkpoint.layer(index))
            host.copy(*host_tensors(weights))
            expected[index] = int(host.checksum(self.layer_bytes))
            weights.release()
        with self._stream() as stream, releasing(self.target) as thread:
            for layer in stream:
                thread.after(self.target.copy(*host_tensors(layer.hold().weights)), layer)
                found[int(layer.index)] = self.target.checksum(self.layer_bytes)
        return [index for index in self.layers if int(found[index]) != expected[index]]

    def staging(self) -> float:
        with self._stream() as stream:
            return seconds_of(lambda: sum(1 for _ in stream))

    def copying(self) -> float:
        with self._stream(self.layers[:1]) as stream:  # no other is staged beside the copies
            weights = next(stream).weights
            return seconds_of(lambda: self._copy_times(host_tensors(weights)))

    def bus(self) -> float:
        source = torch.ones(self.layer_bytes, dtype=torch.uint8)
        source = source.pin_memory() if self.target.is_cuda else source
        return seconds_of(lambda: self._copy_times([source]))

    def both(self) -> float:
        with self._stream() as stream:
            return seconds_of(lambda: self._upload(stream))

    def _stream(self, layers: Iterable[int] | None = None) -> KdaLayerStream:
        return stream_kda_layers(
            self._checkpoint, layers=layers, slots=self._slots, register=self._register
        )

    def _copy_times(self, sources: list[Any]) -> None:
        for _ in self.layers:
            self.target.copy(*sources)
        self.target.finish()

    def _upload(self, stream: KdaLayerStream) -> None:
        with releasing(self.target) as thread:
            for layer in stream:
                thread.after(self.target.copy(*host_tensors(layer.hold().weights)), layer)


@contextmanager
def releasing(target: Target) -> Iterator[Releasing]:
    thread = Releasing()
    try:
        yield thread
    finally:  # no slot is given back under a copy, whatever went wrong
        target.finish()
        thread.finish()


def host_tensors(weights: KdaWeights) -> list[Any]:
    """The slot's bytes as torch tensors, without a copy."""
    arrays = (numpy.frombuffer(tensor.data, numpy.uint8) for _, tensor in weights.items())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return [torch.from_numpy(array) for array in arrays]


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write_glm(folder: Path, layers: int) -> Path:
    from kda_stream.testing import KDA, Layout, write_checkpoint

    config = KdaConfig(hidden=4096, heads=64, head_dim=128, conv_kernel=4)
    layout = Layout(config=config, kinds=(KDA,) * layers, mtp=0, dense=0, experts=1, mlp=128)
    return write_checkpoint(folder, layout)


def measure(path: Path, device: str, slots: int, rounds: int) -> int:
    register: HostRegistrar | None = None
    if device.startswith("cuda"):
        from kda_stream.interop.cuda import CudaHost

        register = CudaHost(torch.device(device).index)
    with open_checkpoint(path) as checkpoint:
        bench = Bench(checkpoint, device, slots, register)
        told = (
            "yes" if bench.lock.registered else bench.lock.registration_refusal or "not asked for"
        )
        print(f"{len(bench.layers)} layers, {bench.nbytes:,} bytes, {slots} slots, to {device}")
        print(f"registered: {told}")
        if wrong := bench.wrong_layers():
            print(f"checksums differ: layers {wrong}")
            return 1
        print("checksums: those of every layer are right on the device")
        ways = {
            "staging alone": bench.staging,
            "copying alone": bench.copying,
            "both, overlapped": bench.both,
            "bus: plain pinned copy": bench.bus,
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                taken[name].append(run())
        rates = {name: bench.nbytes / statistics.median(all_) for name, all_ in taken.items()}
    bus = rates["bus: plain pinned copy"]
    for name, rate in rates.items():
        print(f"  {name:<24} {rate / 1e9:8.3f} GB/s  {rate / bus:6.1%} of the bus")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="of the checkpoint that is written")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("bench_gpu.py needs a GPU and torch with CUDA, and finds none here.")
        return 0
    if options.checkpoint is not None:
        return measure(options.checkpoint, options.device, options.slots, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        path = write_glm(Path(folder), options.layers)
        return measure(path, options.device, options.slots, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
