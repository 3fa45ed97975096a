"""What the loaders for serving engines share: options, checks, and every tensor for the model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..checkpoint.checkpoint import Checkpoint
from ..errors import ArgumentError, ErrorCode, listed, shown
from ..kda.families import KDA_SIGNS
from ..limits import WEIGHTS_SLOT_BYTES
from ..selection import all_checked, config_of, kda_layers
from ..staging.locking import LockPolicy
from ..staging.reading import ReadPath, Residency, require_read_choice
from ..weights import WeightsReport, iter_weights, require_weight_slots
from .torch import torch_tensors

if TYPE_CHECKING:
    from torch import Tensor

LOAD_FORMAT: Final = "kda_stream"
"""The name of the load format, in every engine."""


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """What an engine's `model_loader_extra_config` may hold for the load format.

    `slots` of `slot_bytes`, `lock` and `read` are as for `iter_weights`. So is `residency`, but by
    default it is "keep" when several ranks load, and "auto" when one does: ranks that read the same
    files share the page cache. With `check_kda` every KDA layer is judged from metadata first.
    """

    slots: int = 3
    slot_bytes: int = WEIGHTS_SLOT_BYTES
    lock: LockPolicy = "prefer"
    read: ReadPath = "auto"
    residency: Residency | None = None
    check_kda: bool = True

    def residency_for(self, ranks: int) -> Residency:
        """What `ranks` processes that read the same checkpoint leave in the page cache."""
        if self.residency is not None:
            return self.residency
        return "keep" if ranks > 1 else "auto"


_TYPES: Final = {
    "slots": int,
    "slot_bytes": int,
    "lock": str,
    "read": str,
    "residency": str,
    "check_kda": bool,
}


def loader_options(extra_config: object) -> LoaderOptions:
    """The options in an engine's `model_loader_extra_config`; raises `ArgumentError` by name."""
    if not isinstance(extra_config, Mapping):
        raise _refused("model_loader_extra_config", "a JSON object", type(extra_config).__name__)
    unknown = [str(name) for name in extra_config if name not in _TYPES]
    if unknown:
        raise _refused(f"an option of {LOAD_FORMAT}", listed(list(_TYPES)), listed(unknown))
    for name, given in extra_config.items():
        if type(given) is not _TYPES[name]:
            raise _refused(name, _TYPES[name].__name__, f"{shown(given)} ({type(given).__name__})")
    options = LoaderOptions(**extra_config)
    require_read_choice(options.read, options.residency_for(1))
    require_weight_slots(options.slot_bytes, options.slots, options.lock)
    return options


def _refused(what: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        ErrorCode.ARGUMENT,
        f"{what} is not as it must be",
        expected=expected,
        got=got,
        hint='pass --model-loader-extra-config \'{"slots": 3, "lock": "prefer"}\', or leave it out',
    )


def engine_weights(
    checkpoint: Checkpoint,
    options: LoaderOptions,
    log: logging.Logger,
    *,
    is_wanted: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each wanted tensor of the checkpoint, for a model's `load_weights`.

    Every KDA layer is checked before the first is handed out, unless `options.check_kda` is False.
    The tensors are lent: see `WeightStream`. `log` is told of what is left out, and at the end of
    what was done. Raises what `stream_kda_layers` and `iter_weights` raise.
    """
    families = require_kda_layers(checkpoint) if options.check_kda else None
    for note in checkpoint.report.notes:
        log.warning("kda_stream: %s", note)
    residency = options.residency_for(rank_count())
    stream = iter_weights(
        checkpoint,
        names=None if is_wanted is None else filter(is_wanted, checkpoint),
        slots=options.slots,
        slot_bytes=options.slot_bytes,
        lock=options.lock,
        read=options.read,
        residency=residency,
    )
    yield from torch_tensors(stream)
    for note in stream.report.notes:
        log.warning("kda_stream: %s", note)
    log.info("kda_stream: %s", summary(stream.report, residency, families))


def require_kda_layers(checkpoint: Checkpoint) -> Counter[str]:
    """How many KDA layers each family has, all checked; raises as `stream_kda_layers`.

    A checkpoint without a name that only KDA blocks have has none, and is not looked at further.
    """
    if not any(name.endswith(KDA_SIGNS) for name in checkpoint):
        return Counter()
    checkpoint.require_every_layer()
    layers = kda_layers(checkpoint)
    blocks = all_checked(config_of(checkpoint), checkpoint, layers, "auto", None)
    return Counter(block.family.name for block in blocks)


def rank_count() -> int:
    """How many processes load the model together, as torch.distributed knows; 1 without it."""
    from torch import distributed

    is_initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_initialized else 1


def summary(report: WeightsReport, residency: Residency, families: Counter[str] | None) -> str:
    """What was done, in one line."""
    reads = ", ".join(f"{count} {path}" for path, count in sorted(report.reads.items()))
    checked = "not checked"
    if families is not None:
        checked = ", ".join(f"{count} {family}" for family, count in families.items()) or "none"
    lock = report.lock
    locked = "not used"
    if lock is not None:
        locked = (
            "page-locked" if lock.locked else f"not page-locked ({lock.refusal or lock.policy})"
        )
    return (
        f"{report.tensors} tensors, {report.bytes / 1e9:.3f} GB in {report.seconds:.2f} s "
        f"({report.bytes / 1e9 / max(report.seconds, 1e-9):.2f} GB/s); reads: {reads or 'none'}; "
        f"page cache: {residency}; "
        f"{report.slots} slots of {report.slot_bytes} bytes, {locked}; KDA layers: {checked}"
    )


def require_methods(loader: Any, parameters: Mapping[str, tuple[str, ...]], releases: str) -> None:
    """Raise `ArgumentError` unless the engine's own loader has these methods, called like this."""
    import inspect

    for name, expected in parameters.items():
        method = getattr(loader, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)
        if found != expected:
            raise ArgumentError(
                ErrorCode.ARGUMENT,
                f"the load format {LOAD_FORMAT} does not know this release of the engine",
                expected=f"{loader.__name__}.{name}({', '.join(expected)})",
                got=f"({', '.join(found)})" if method is not None else "no such method",
                hint=f"use {releases}, or another load format",
            )


def require_no_patterns(patterns: object) -> None:
    """Raise `ArgumentError` for a model that names its weight files by patterns."""
    if patterns is not None:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the model names its weight files by patterns, which are no checkpoint",
            expected="a directory with one index, or with one shard",
            got=repr(patterns),
            hint="use --load-format safetensors for this model",
        )
