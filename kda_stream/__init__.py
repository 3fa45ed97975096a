"""Loads the KDA layers of safetensors checkpoints, checked, into page-locked memory.

The public names are loaded when they are first used, so that the import costs milliseconds.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # the typing module alone would take half of the import's time
if sys.byteorder != "little":
    from .errors import ErrorCode, NotBuiltError

    raise NotBuiltError(
        ErrorCode.PLATFORM,
        "kda_stream needs a little-endian machine",
        expected="little",
        got=sys.byteorder,
        hint="use one: safetensors payload is little-endian, and bytes are never changed here",
    )

if TYPE_CHECKING:
    from typing import Any

    from .bind import (
        BoundTensor,
        KdaBindReport,
        KdaWeights,
        bind_kda_weights,
        check_kda_weights,
    )
    from .checkpoint.checkpoint import Checkpoint, OpenReport, open_checkpoint
    from .checkpoint.header import Header, TensorInfo
    from .checkpoint.layer import LayerIndex, LayerSource
    from .dtypes import KdaDtype
    from .errors import (
        ArgumentError,
        BindError,
        CheckpointError,
        ClosedError,
        ConfigError,
        ErrorCode,
        HeaderError,
        InUseError,
        KdaStreamError,
        ManifestError,
        MemoryRefusedError,
        NotBuiltError,
        NotFoundError,
        NotInstalledError,
        PathError,
        PathMissingError,
        PayloadDigestError,
        PayloadError,
        PayloadValueError,
        ShardIndexError,
        ShardsMissingError,
        SlotError,
        SpanError,
        StreamError,
    )
    from .interop.mapping import MappingSource
    from .interop.torch import iter_torch_weights
    from .kda.check import BindProblem, ProblemKind, identify_family
    from .kda.classify import AttnBlockKind, classify_attn_block
    from .kda.config import KdaConfig
    from .kda.families import (
        FAMILIES,
        GLM5_NEXT,
        GLM5_NEXT_F32_CONV,
        KIMI_K3,
        KIMI_LINEAR,
        LING_3,
        LING_3_DENSE,
    )
    from .kda.family import KdaFamily
    from .kda.source import KdaTensorSource, RawTensor
    from .kda.tensor_parallel import KdaShardedSource, KdaTpPlan
    from .kda.tensors import DSA_MARKERS, KDA_TENSORS, TensorSpec
    from .layout import kda_slot_bytes
    from .payload import PayloadReport, check_payload
    from .staging.arena import Lease, PinnedArena, Slot
    from .staging.locking import LockReport
    from .staging.reading import ReadReport
    from .staging.registration import HostRegistrar
    from .staging.spans import CopyPlan, CopyStop, FileRange, Span
    from .stream import KdaLayer, KdaLayerStream, StreamReport, stream_kda_layers
    from .weights import TensorPiece, WeightsReport, WeightStream, iter_weights

__version__ = "0.1.0"

_HOMES = {
    "bind": (
        "BoundTensor",
        "KdaBindReport",
        "KdaWeights",
        "bind_kda_weights",
        "check_kda_weights",
    ),
    "checkpoint.checkpoint": (
        "Checkpoint",
        "OpenReport",
        "open_checkpoint",
    ),
    "checkpoint.header": (
        "Header",
        "TensorInfo",
    ),
    "checkpoint.layer": (
        "LayerIndex",
        "LayerSource",
    ),
    "dtypes": ("KdaDtype",),
    "errors": (
        "ArgumentError",
        "BindError",
        "CheckpointError",
        "ClosedError",
        "ConfigError",
        "ErrorCode",
        "HeaderError",
        "InUseError",
        "KdaStreamError",
        "ManifestError",
        "MemoryRefusedError",
        "NotBuiltError",
        "NotFoundError",
        "NotInstalledError",
        "PathError",
        "PathMissingError",
        "PayloadDigestError",
        "PayloadError",
        "PayloadValueError",
        "ShardIndexError",
        "ShardsMissingError",
        "SlotError",
        "SpanError",
        "StreamError",
    ),
    "interop.mapping": ("MappingSource",),
    "interop.torch": ("iter_torch_weights",),
    "kda.check": (
        "BindProblem",
        "ProblemKind",
        "identify_family",
    ),
    "kda.classify": (
        "AttnBlockKind",
        "classify_attn_block",
    ),
    "kda.config": ("KdaConfig",),
    "kda.families": (
        "FAMILIES",
        "GLM5_NEXT",
        "GLM5_NEXT_F32_CONV",
        "KIMI_K3",
        "KIMI_LINEAR",
        "LING_3",
        "LING_3_DENSE",
    ),
    "kda.family": ("KdaFamily",),
    "kda.source": (
        "KdaTensorSource",
        "RawTensor",
    ),
    "kda.tensor_parallel": (
        "KdaShardedSource",
        "KdaTpPlan",
    ),
    "kda.tensors": (
        "DSA_MARKERS",
        "KDA_TENSORS",
        "TensorSpec",
    ),
    "layout": ("kda_slot_bytes",),
    "payload": (
        "PayloadReport",
        "check_payload",
    ),
    "staging.arena": (
        "Lease",
        "PinnedArena",
        "Slot",
    ),
    "staging.locking": ("LockReport",),
    "staging.reading": ("ReadReport",),
    "staging.registration": ("HostRegistrar",),
    "staging.spans": (
        "CopyPlan",
        "CopyStop",
        "FileRange",
        "Span",
    ),
    "stream": (
        "KdaLayer",
        "KdaLayerStream",
        "StreamReport",
        "stream_kda_layers",
    ),
    "weights": (
        "TensorPiece",
        "WeightStream",
        "WeightsReport",
        "iter_weights",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DSA_MARKERS",
    "FAMILIES",
    "GLM5_NEXT",
    "GLM5_NEXT_F32_CONV",
    "KDA_TENSORS",
    "KIMI_K3",
    "KIMI_LINEAR",
    "LING_3",
    "LING_3_DENSE",
    "ArgumentError",
    "AttnBlockKind",
    "BindError",
    "BindProblem",
    "BoundTensor",
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "CopyPlan",
    "CopyStop",
    "ErrorCode",
    "FileRange",
    "Header",
    "HeaderError",
    "HostRegistrar",
    "InUseError",
    "KdaBindReport",
    "KdaConfig",
    "KdaDtype",
    "KdaFamily",
    "KdaLayer",
    "KdaLayerStream",
    "KdaShardedSource",
    "KdaStreamError",
    "KdaTensorSource",
    "KdaTpPlan",
    "KdaWeights",
    "LayerIndex",
    "LayerSource",
    "Lease",
    "LockReport",
    "ManifestError",
    "MappingSource",
    "MemoryRefusedError",
    "NotBuiltError",
    "NotFoundError",
    "NotInstalledError",
    "OpenReport",
    "PathError",
    "PathMissingError",
    "PayloadDigestError",
    "PayloadError",
    "PayloadReport",
    "PayloadValueError",
    "PinnedArena",
    "ProblemKind",
    "RawTensor",
    "ReadReport",
    "ShardIndexError",
    "ShardsMissingError",
    "Slot",
    "SlotError",
    "Span",
    "SpanError",
    "StreamError",
    "StreamReport",
    "TensorInfo",
    "TensorPiece",
    "TensorSpec",
    "WeightStream",
    "WeightsReport",
    "bind_kda_weights",
    "check_kda_weights",
    "check_payload",
    "classify_attn_block",
    "identify_family",
    "iter_torch_weights",
    "iter_weights",
    "kda_slot_bytes",
    "open_checkpoint",
    "stream_kda_layers",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    value = _family(name) if home is None else getattr(import_module(f".{home}", __name__), name)
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _family(name: str) -> KdaFamily | None:
    """The family of that name; a new one needs no line here."""
    if not name.isupper():
        return None
    families = import_module(".kda.families", __name__).FAMILIES
    return next((family for family in families if family.name == name), None)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
