"""What arguments must be: each check raises an `ArgumentError` that names the argument."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from .errors import ArgumentError, ErrorCode, in_words


def require_choice(name: str, given: object, known: Sequence[str], hint: str) -> None:
    """Raise `ArgumentError` when `given` is none of the `known` texts."""
    if not isinstance(given, str) or given not in known:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            f"{name} is unknown",
            expected=" or ".join(known),
            got=in_words(given, repr),
            hint=hint,
        )


def require_kind(
    name: str, given: object, kind: type | tuple[type, ...], expected: str, hint: str
) -> None:
    """Raise `ArgumentError` when `given` is no `kind`, which `expected` says in words."""
    if not isinstance(given, kind):
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            f"{name} is none",
            expected=expected,
            got=type(given).__name__,
            hint=hint,
        )


def require_items(name: str, given: object, kind: str, example: str) -> list[Any]:
    """The items of `given`; raises `ArgumentError` for one text and for what has no items."""
    is_text = isinstance(given, (str, bytes, bytearray))
    items = None if is_text else _items(given)
    if items is not None:
        return list(items)
    raise ArgumentError(
        ErrorCode.ARGUMENT,
        f"{name} is one {'text' if is_text else type(given).__name__}",
        expected=f"an iterable of {kind}",
        got=in_words(given, repr),
        hint=f"pass {name}=[{example}]",
    )


def _items(given: Any) -> Iterator[Any] | None:
    """None for what has none: a type does not tell, as that of an array of no dimensions."""
    try:
        items: Iterator[Any] = iter(given)
    except TypeError:
        return None
    return items


def require_path(path: object) -> str:
    """The path as text; raises `ArgumentError` when it is none."""
    named = path.__fspath__() if isinstance(path, os.PathLike) else path
    require_kind("path", named, (str, bytes), "a path", "pass a str or a pathlib.Path")
    return os.fsdecode(named)  # type: ignore[arg-type]
