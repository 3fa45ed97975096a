"""What an argument of another type is told, before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from kda_stream import (
    ArgumentError,
    Checkpoint,
    ErrorCode,
    KdaConfig,
    KdaTpPlan,
    MappingSource,
    NotFoundError,
    bind_kda_weights,
    check_kda_weights,
    check_payload,
    iter_weights,
    kda_slot_bytes,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.interop.transformers import fill_kda_layers


class OddPath:
    """Says that it is a path."""

    def __fspath__(self) -> int:
        return 5


Use = Callable[[Checkpoint], Any]

MISUSES: dict[str, tuple[str, Use]] = {
    "path None": (
        "path is none: expected a path, got NoneType",
        lambda _: open_checkpoint(None),
    ),  # type: ignore[arg-type]
    "path int": ("path is none: expected a path, got int", lambda _: KdaConfig.from_json(5)),  # type: ignore[arg-type]
    "path that is none after all": (
        "path is none: expected a path, got int",
        lambda _: open_checkpoint(OddPath()),  # type: ignore[arg-type]
    ),
    "verify": (
        "verify is unknown: expected all or needed, got 'some'",
        lambda c: open_checkpoint(c.path, verify="some"),  # type: ignore[arg-type]
    ),
    "read of another type": (
        r"read is unknown: expected auto or .*, got \['mapped'\]",
        lambda c: stream_kda_layers(c, read=["mapped"]),  # type: ignore[arg-type]
    ),
    "lock of another type": (
        "lock is unknown: expected require or prefer or off, got True",
        lambda c: stream_kda_layers(c, lock=True),  # type: ignore[arg-type]
    ),
    "one layer": (
        r"layers is one int: .* got 3 \(pass layers=\[0\]\)",
        lambda c: stream_kda_layers(c, layers=3),  # type: ignore[arg-type]
    ),
    "layers in a text": (
        "layers is one text: .* got '0,1'",
        lambda c: stream_kda_layers(c, layers="0,1"),  # type: ignore[arg-type]
    ),
    "layers in bytes": (
        "layers is one text",
        lambda c: stream_kda_layers(c, layers=bytearray(b"01")),
    ),
    "an array of no dimensions": (
        r"layers is one ndarray: .* got array\(3\)",
        lambda c: stream_kda_layers(c, layers=numpy.array(3)),
    ),
    "one name": ("names is one text", lambda c: iter_weights(c, names="lm_head.weight")),
    "one name to check": (
        "names is one text",
        lambda c: check_payload(c, names="lm_head.weight"),
    ),
    "a number of names": ("names is one int", lambda c: check_payload(c, names=2)),  # type: ignore[arg-type]
    "config as a dict": (
        "config is none: expected a KdaConfig, got dict",
        lambda c: stream_kda_layers(c, config={}),  # type: ignore[arg-type]
    ),
    "config of a bind": (
        "config is none",
        lambda c: bind_kda_weights(None, 0, c.layer(0)),  # type: ignore[arg-type]
    ),
    "config of a check": (
        "config is none",
        lambda c: check_kda_weights({}, 0, c.layer(0)),  # type: ignore[arg-type]
    ),
    "config of a slot": ("config is none", lambda _: kda_slot_bytes(None)),  # type: ignore[arg-type]
    "config of a plan": ("config is none", lambda _: KdaTpPlan({}, 0, 1)),  # type: ignore[arg-type]
    "tensors in a list": (
        "tensors is none: expected a mapping of names to tensors, got list",
        lambda _: MappingSource([1]),  # type: ignore[arg-type]
    ),
    "names that are numbers": (
        "a name of tensors is none: expected a text, got int",
        lambda _: MappingSource({5: 1}),  # type: ignore[dict-item]
    ),
    "a number as prefix": (
        "prefix is none: expected a text, got int",
        lambda _: MappingSource({"a": 1}, prefix=5),  # type: ignore[arg-type]
    ),
    "no model": (
        "model is none: expected a torch module, got SimpleNamespace",
        lambda c: fill_kda_layers(SimpleNamespace(), c),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize(("told", "use"), MISUSES.values(), ids=MISUSES)
def test_an_argument_of_another_kind_is_named(checkpoint: Checkpoint, told: str, use: Use) -> None:
    with pytest.raises(ArgumentError, match=told) as caught:
        use(checkpoint)
    assert caught.value.code is ErrorCode.ARGUMENT
    assert caught.value.hint


def test_a_layer_named_by_a_text_is_told_apart_from_its_number(checkpoint: Checkpoint) -> None:
    with pytest.raises(NotFoundError, match="has no layer '0'"):
        checkpoint.layer("0")  # type: ignore[arg-type]
