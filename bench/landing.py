"""Where a runner's bytes land: one reused buffer, the times of what happens, and the check."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import time
from collections.abc import Callable, Iterable
from typing import Any

from .data import DataSet, Layer, Tensor
from .sides import WrongBytesError

HUGE_PAGE_BYTES = 2 * 1024**2


class Landing:
    """What a runner reports to. Times are seconds since `began`.

    The runner calls `make_buffer` for the buffer of one layer (or `memory_ready` when it has memory
    of its own), and `layer_done` as soon as all of a layer's tensors lie in it. `did` may tell
    which of its ways it took.
    """

    def __init__(self, data: DataSet, *, check: bool) -> None:
        self.data = data
        self.check = check
        self.began = time.perf_counter()
        self.memory_seconds = 0.0
        self.done_seconds: dict[int, float] = {}
        self.did = ""
        self.locked = False
        self.buffer_bytes = data.buffer_bytes
        self._layers = {layer.index: layer for layer in data.layers}
        self._buffer: mmap.mmap | None = None

    def make_buffer(self) -> mmap.mmap:
        """The one buffer: huge pages where the kernel has them, populated, locked where it may be.

        That is what serves every way to fill it best: O_DIRECT and non-temporal stores are several
        times slower into small pages.
        """
        began = time.perf_counter()
        nbytes = -(-self.data.buffer_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        locked = _lock(buffer)
        self._buffer = buffer
        self.memory_ready(locked=locked, nbytes=nbytes, seconds=time.perf_counter() - began)
        return buffer

    def memory_ready(self, *, locked: bool, nbytes: int, seconds: float) -> None:
        """The memory to land in is there; making it took `seconds` of the time."""
        self.locked = locked
        self.buffer_bytes = nbytes
        self.memory_seconds = seconds

    def layer_done(self, index: int, pieces: Iterable[memoryview] | None = None) -> None:
        """All of the layer is there: in the buffer, or in `pieces` in the order of its tensors."""
        self.done_seconds[index] = time.perf_counter() - self.began
        if self.check:
            layer = self._layers[index]
            digest = hashlib.sha256()
            for piece in self._pieces(layer) if pieces is None else pieces:
                digest.update(piece)
            if digest.hexdigest() != layer.sha256:
                raise WrongBytesError(f"layer {index} has other bytes than were stored")

    def require_every_layer(self) -> None:
        missing = self._layers.keys() - self.done_seconds.keys()
        if missing:
            raise WrongBytesError(f"layers {sorted(missing)} were not delivered")

    def _pieces(self, layer: Layer) -> Iterable[memoryview]:
        if self._buffer is None:
            raise WrongBytesError("the runner made no buffer")
        whole = memoryview(self._buffer)
        return [whole[t.place : t.place + t.nbytes] for t in layer.tensors]


class Gathering:
    """Takes tensors in whatever order a peer has them, and lands each layer when it is complete.

    A layer's tensors cannot go into the one buffer while another layer is being put there, so they
    are kept until then: some small ones as a rule, most of a layer where a shard's end cuts it.
    """

    def __init__(self, landing: Landing, put: Callable[[Tensor, Any], None]) -> None:
        self._landing = landing
        self._put = put
        self._layer_of = {t.name: layer for layer in landing.data.layers for t in layer.tensors}
        self._kept: dict[int, dict[str, Any]] = {layer.index: {} for layer in landing.data.layers}

    def add(self, name: str, tensor: Any) -> None:
        """Take a tensor; of no KDA layer: no effect."""
        layer = self._layer_of.get(name)
        if layer is None:
            return
        kept = self._kept[layer.index]
        kept[name] = tensor
        if len(kept) == len(layer.tensors):
            for row in layer.tensors:
                self._put(row, kept[row.name])
            self._landing.layer_done(layer.index)
            del self._kept[layer.index]


def torch_put(landing: Landing) -> Callable[[Tensor, Any], None]:
    """Copies a torch tensor to its place in the buffer; torch spreads a large copy over threads."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    whole = torch.frombuffer(landing.make_buffer(), dtype=torch.uint8)
    places = {
        row.name.rpartition("self_attn.")[2]: whole[row.place : row.place + row.nbytes]
        .view(dtypes[row.dtype])
        .view(row.shape)
        for row in landing.data.layers[0].tensors
    }

    def put(row: Tensor, tensor: Any) -> None:
        places[row.name.rpartition("self_attn.")[2]].copy_(tensor)

    return put


def _lock(buffer: mmap.mmap) -> bool:
    """Lock the buffer's pages; where that is refused they are populated all the same."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_char.from_buffer(buffer)
    address = ctypes.c_void_p(ctypes.addressof(first))
    locked = bool(libc.mlock(address, ctypes.c_size_t(len(buffer))) == 0)
    if not locked:
        ctypes.memset(address, 0, len(buffer))
    del first
    return locked
