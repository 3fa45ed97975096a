"""Every tensor of a checkpoint, one after the other, against loops over safe_open."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import data
from ..sides import Comparison, Request, Side, Timed, UnavailableError, clocked

TOLD = """\
Every tensor of the checkpoint, from its path to the last byte. What is lent is copied once, into
one buffer of the largest tensor's size that is used again, as an upload to a device would, and is
then let go. "kept" has each tensor in memory of its own at the end: `safe_open` gives views of the
mapped file, so that it clones them; what its pread backend gives is kept as it is."""
LENT, KEPT = "safe_open, lent", "safe_open, kept"
PREAD_LENT, PREAD_KEPT = "safe_open pread, lent", "safe_open pread, kept"

Take = Callable[[str, Any], None]


class _Consumer:
    """Takes each tensor's bytes, and has their digests when they are asked for."""

    def __init__(self, request: Request) -> None:
        self._checked = request.checked
        self._digests: dict[str, str] = {}

    def seen(self, name: str, content: Any) -> None:
        if self._checked:
            self._digests[name] = hashlib.sha256(content).hexdigest()

    def figures(self) -> dict[str, Any]:
        if not self._checked:
            return {}
        text = repr(sorted(self._digests.items()))
        return {"delivered": hashlib.sha256(text.encode()).hexdigest()}


def _timed(request: Request, consumer: _Consumer, job: Callable[[], None]) -> Timed:
    nbytes = sum(data.tensor_sizes(request.folder))

    def timed() -> dict[str, Any]:
        return clocked(job) | {"payload_bytes": nbytes} | consumer.figures()

    return timed


def _into_torch(request: Request, consumer: _Consumer) -> Take:
    """Copies torch tensors into the one buffer, whose pages are there already."""
    import torch

    buffer = torch.zeros(max(data.tensor_sizes(request.folder)), dtype=torch.uint8)

    def take(name: str, tensor: Any) -> None:
        place = buffer[: tensor.nbytes]
        place.copy_(tensor.reshape(-1).view(torch.uint8))
        consumer.seen(name, place.numpy())

    return take


def load_iter_weights(request: Request) -> Timed:
    import numpy

    from kda_stream import iter_weights, open_checkpoint
    from kda_stream.staging.native import extension

    extension()
    consumer = _Consumer(request)
    buffer = numpy.zeros(max(data.tensor_sizes(request.folder)), numpy.uint8)
    buffer.fill(0)

    def job() -> None:
        with open_checkpoint(request.checkpoint) as checkpoint:
            for name, tensor in iter_weights(checkpoint):
                place = buffer[: tensor.nbytes]
                numpy.copyto(place, numpy.frombuffer(tensor.data, numpy.uint8))
                consumer.seen(name, place)

    return _timed(request, consumer, job)


def load_iter_torch_weights(request: Request) -> Timed:
    from kda_stream import iter_torch_weights, open_checkpoint
    from kda_stream.staging.native import extension

    extension()
    consumer = _Consumer(request)
    take = _into_torch(request, consumer)

    def job() -> None:
        with open_checkpoint(request.checkpoint) as checkpoint:
            for name, tensor in iter_torch_weights(checkpoint):
                take(name, tensor)

    return _timed(request, consumer, job)


def _files_of(request: Request, backend: str) -> Callable[[], Any]:
    """Opens the shards one after the other."""
    from safetensors import safe_open

    keywords = {}
    if backend != "mmap":  # the default, and the only one before 0.8
        if "backend" not in str(inspect.signature(safe_open)):
            raise UnavailableError("this safetensors has no backend=")
        keywords = {"backend": backend}
    paths = sorted(request.checkpoint.glob("*.safetensors"))
    return lambda: (safe_open(path, "pt", **keywords) for path in paths)


def load_lent(backend: str, request: Request) -> Timed:
    consumer = _Consumer(request)
    take = _into_torch(request, consumer)
    files = _files_of(request, backend)

    def job() -> None:
        for opened in files():
            with opened as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    take(name, file.get_tensor(name))

    return _timed(request, consumer, job)


def load_kept(backend: str, request: Request) -> Timed:
    import torch

    consumer = _Consumer(request)
    files = _files_of(request, backend)
    kept: dict[str, Any] = {}

    def job() -> None:
        for opened in files():
            with opened as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    tensor = file.get_tensor(name)
                    kept[name] = tensor.clone() if backend == "mmap" else tensor

    def timed() -> dict[str, Any]:
        figures = _timed(request, consumer, job)()
        if request.checked:
            for name, tensor in kept.items():
                consumer.seen(name, tensor.reshape(-1).view(torch.uint8).numpy())
        return figures | consumer.figures()

    return timed


def _peer(name: str, load: Callable[[Request], Timed], settings: str) -> Side:
    packages = ("safetensors", "torch")
    return Side(name, "peer", load, packages=packages, reads="whole shards", settings=settings)


COMPARISON = Comparison(
    name="weights",
    title="Every tensor",
    told=TOLD,
    sides=(
        Side(
            "iter_weights",
            "own",
            load_iter_weights,
            packages=("kda_stream",),
            reads="whole shards",
            settings="numpy.copyto",
        ),
        Side(
            "iter_torch_weights",
            "own",
            load_iter_torch_weights,
            packages=("kda_stream", "torch"),
            reads="whole shards",
            settings="copy_",
        ),
        _peer(LENT, partial(load_lent, "mmap"), "get_tensor, copy_"),
        _peer(KEPT, partial(load_kept, "mmap"), "get_tensor, clone"),
        _peer(PREAD_LENT, partial(load_lent, "pread"), 'backend="pread", get_tensor, copy_'),
        _peer(PREAD_KEPT, partial(load_kept, "pread"), 'backend="pread", get_tensor'),
    ),
    references=(LENT, KEPT, PREAD_LENT, PREAD_KEPT),
    own="iter_torch_weights",
    conditions=("warm", "cold"),
    make=data.place,
)
