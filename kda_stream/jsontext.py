"""JSON read strictly, for the headers, indexes and configs that come with a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .limits import INTEGER_MAX


class DuplicateKeyError(ValueError):
    """An object gives `key` twice; parsers differ on which one counts."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is given twice in one object")
        self.key = key


def parse_json(text: str) -> Any:
    """`text` as JSON, with no duplicate keys, NaN or Infinity.

    An integer beyond 64 bits, and -0, come back as floats, as in the safetensors package's parser.
    Raises `DuplicateKeyError`, any other ValueError, or RecursionError.
    """
    return json.loads(
        text,
        object_pairs_hook=_without_duplicates,
        parse_constant=_refuse_constant,
        parse_int=_bounded_int,
    )


def first_repeated(names: Iterable[str]) -> str:
    """The first of `names` that has come before; there must be one."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise LookupError("no name is repeated")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise DuplicateKeyError(first_repeated(key for key, _ in pairs))
    return members


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _bounded_int(text: str) -> int | float:
    if text == "-0" or len(text) > len(str(INTEGER_MAX)):
        return float(text)
    return int(text)
