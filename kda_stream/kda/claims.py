"""What a config says of which layers are KDA layers, to be held against what the names show."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from ..errors import ConfigError, ErrorCode
from .config import GROUPED_SIGN, TEXT_CONFIG

_LINEAR: Final = "linear_attention"
_MTP_COUNTS: Final = ("num_nextn_predict_layers", "num_mtp_layers")

Layers = frozenset[int]


def layer_disagreements(
    config: Mapping[str, Any], count: int, kinds: Mapping[int, bool], path: object
) -> Iterator[ConfigError]:
    """An error for each place of the config that has other KDA layers than the names show.

    `count` is how many decoder layers the config counts; `kinds` says of those that are there
    whether each is a KDA layer. The lists of a `linear_attn_config` count from 0, or from 1 where
    they have no 0: what is right for one of these is right; where neither is, the nearer one is
    told.
    """
    present = frozenset(kinds)
    shown = frozenset(number for number, is_kda in kinds.items() if is_kda)
    for place, readings in _claims(config, count, present):
        nearest = min(readings, key=lambda reading: len(reading ^ shown))
        if nearest != shown:
            yield ConfigError(
                ErrorCode.CONFIG_LAYERS,
                f"{place} has other KDA layers than the tensors' names show",
                path=path,
                expected=f"KDA layers {short_list(shown)}, by their names",
                got=f"KDA layers {short_list(nearest)}, by the config",
                hint="the names decide; the config.json is another checkpoint's, or was edited",
            )


def mtp_layer_count(config: Mapping[str, Any]) -> int | None:
    """How many MTP layers the config counts behind the decoder's own; None when it does not."""
    for section in _sections(config):
        for key in _MTP_COUNTS:
            count = section.get(key)
            if type(count) is int and count >= 0:
                return count
    return None


def short_list(numbers: Collection[int]) -> str:
    """Numbers as ranges: `0-2, 4-6, 8`; `none` without any."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = (f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
    return ", ".join(texts) or "none"


def _claims(
    config: Mapping[str, Any], count: int, present: Layers
) -> Iterator[tuple[str, tuple[Layers, ...]]]:
    """Each place that says which of the layers are KDA layers, and the ways to read it."""
    for section in _sections(config):
        types = section.get("layer_types")
        if isinstance(types, list):
            linear = frozenset(n for n in present if n < len(types) and types[n] == _LINEAR)
            yield "layer_types", (linear,)
        lists = section.get("linear_attn_config")
        if isinstance(lists, Mapping):
            kda = _readings(lists.get("kda_layers"))
            if kda:
                held = (frozenset(n for n in one if n in present or n >= count) for one in kda)
                yield "kda_layers", tuple(held)
            full = _readings(lists.get("full_attn_layers"))  # which may have MTP layers
            if full:
                yield "full_attn_layers", tuple(present - one for one in full)
        size = section.get(GROUPED_SIGN)
        if type(size) is int and size > 0:
            grouped = frozenset(n for n in present if (n + 1) % size)
            in_whole_groups = frozenset(n for n in grouped if n < count // size * size)
            yield GROUPED_SIGN, (grouped, in_whole_groups)


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for section in (config, config.get(TEXT_CONFIG)):
        if isinstance(section, Mapping):
            yield section


def _readings(value: object) -> tuple[Layers, ...]:
    """A list of layers counted from 0, and from 1 unless it has a 0; none of what is no list."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        return ()
    from_zero = frozenset(value)
    if 0 in from_zero:
        return (from_zero,)
    return (from_zero, frozenset(number - 1 for number in from_zero))
