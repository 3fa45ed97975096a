"""Every tensor of a checkpoint as a torch tensor: what an engine's `load_weights` takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..arrays import as_torch
from ..checkpoint.checkpoint import Checkpoint
from ..limits import WEIGHTS_SLOT_BYTES
from ..packing import Order
from ..staging.locking import LockPolicy
from ..staging.reading import ReadPath, Residency
from ..staging.registration import HostRegistrar
from ..weights import WeightStream, iter_weights

if TYPE_CHECKING:
    from torch import Tensor


def iter_torch_weights(
    checkpoint: Checkpoint,
    *,
    names: Iterable[str] | None = None,
    order: Order = "file",
    slots: int = 3,
    slot_bytes: int = WEIGHTS_SLOT_BYTES,
    lock: LockPolicy = "prefer",
    read: ReadPath = "auto",
    residency: Residency = "auto",
    register: HostRegistrar | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """`iter_weights` as torch tensors on the CPU, without a copy, each of them whole.

    A tensor is lent, and stays right for as long as it is kept: see `WeightStream`. Options and
    errors are those of `iter_weights`; `ArgumentError` too for a dtype that torch does not have:
    F6_E2M3 and F6_E3M2, and with a torch that is older than they are F4, F8_E8M0 and U16 to U64.
    F4 comes as torch's pairs, so the last extent is halved. The iterator has no report: where that
    is wanted, take `iter_weights`, whose stream has it.

    Example: `model.load_weights(iter_torch_weights(checkpoint))`.
    """
    stream = iter_weights(
        checkpoint,
        names=names,
        order=order,
        slots=slots,
        slot_bytes=slot_bytes,
        lock=lock,
        read=read,
        residency=residency,
        register=register,
    )
    return torch_tensors(stream)


def torch_tensors(stream: WeightStream) -> Iterator[tuple[str, Tensor]]:
    """(name, torch tensor) for each tensor of the stream, which is closed at the end."""
    with stream:
        for name, tensor in stream:
            yield name, as_torch(tensor.dtype, tensor.shape, tensor.data, name=name)
