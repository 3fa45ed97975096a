"""Every error the library raises: each a `KdaStreamError`, and the builtin a caller would catch.

An error says, in one line: where (path, tensor), what is wrong, what was expected, what was found,
and what to do next. `code` names the kind of fault and stays the same from release to release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from .error_codes import ErrorCode as ErrorCode  # part of every error
from .limits import LINE_CHARS_MAX, SHOWN_CHARS_MAX, SHOWN_ITEMS_MAX

# Python calls these printable, and nothing is seen of them: Unicode's Default_Ignorable_Code_Point.
_UNSEEN: Final = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"
_UNSEEN_RANGES: Final = (("\ufe00", "\ufe0f"), ("\U000e0100", "\U000e01ef"))


def shown(value: object, chars_max: int = SHOWN_CHARS_MAX) -> str:
    """A name or value from a file, safe to print: escaped, on one line, and not too long."""
    text = value if isinstance(value, str) else in_words(value, repr)
    if len(text) > chars_max:
        text = text[:chars_max] + "..."
    return "".join(c if _is_seen(c) else ascii(c)[1:-1] for c in text)


def _is_seen(character: str) -> bool:
    return (
        character.isprintable()
        and character not in _UNSEEN
        and not any(first <= character <= last for first, last in _UNSEEN_RANGES)
    )


def in_words(value: object, to_text: Callable[[object], str] = str) -> str:
    """`to_text(value)`, and for an int of more digits than Python prints, words that say so."""
    try:
        return to_text(value)
    except ValueError:
        return f"{type(value).__name__} with more digits than can be printed"


def listed(items: Sequence[str]) -> str:
    """The first items of a list, each as `shown` gives it, and how many more there are."""
    text = ", ".join(map(shown, items[:SHOWN_ITEMS_MAX]))
    more = len(items) - SHOWN_ITEMS_MAX
    return f"{text} and {more} more" if more > 0 else text


class KdaStreamError(Exception):
    """The base of every error here.

    Attributes: `code` (an `ErrorCode`), `what` (the fault in words), `path`, `tensor`, `expected`,
    `got`, `hint` (likely cause and next step); each of the last five is a string or None. Errors
    pickle.
    """

    def __init__(
        self,
        code: ErrorCode,
        what: str,
        *,
        path: object = None,
        tensor: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.path = None if path is None else str(path)
        self.tensor = tensor
        self.expected = None if expected is None else in_words(expected)
        self.got = None if got is None else in_words(got)
        self.hint = hint

    @property
    def finding(self) -> str:
        """The error without its hint: `path: tensor: what: expected ..., got ...`."""
        parts = [] if self.path is None else [shown(self.path, LINE_CHARS_MAX)]
        if self.tensor is not None:
            parts.append(shown(self.tensor))
        compared = [
            f"{word} {shown(value, LINE_CHARS_MAX)}"
            for word, value in (("expected", self.expected), ("got", self.got))
            if value is not None
        ]
        parts.append(self.what)
        if compared:
            parts.append(", ".join(compared))
        return ": ".join(parts)

    def __str__(self) -> str:
        return self.finding if self.hint is None else f"{self.finding} ({self.hint})"

    def __reduce__(self) -> tuple[Any, ...]:
        # `path` is apart: in an ImportError it is no entry of __dict__.
        return _rebuilt, (type(self), self.code, self.what, {**self.__dict__, "path": self.path})


def _rebuilt(
    kind: type[KdaStreamError], code: ErrorCode, what: str, state: dict[str, Any]
) -> KdaStreamError:
    error = kind(code, what)
    for name, value in state.items():
        setattr(error, name, value)
    return error


class PathError(KdaStreamError, OSError):
    """A path that cannot be read or written: absent, no regular file, too large, not permitted."""


class PathMissingError(PathError, FileNotFoundError):
    """A path under which there is nothing, or a link to nothing."""


class HeaderError(KdaStreamError, ValueError):
    """A shard's header breaks the safetensors format, or does not fit its file."""


class ShardIndexError(KdaStreamError, ValueError):
    """An index that is malformed, or that its shards contradict."""


class ShardsMissingError(KdaStreamError, FileNotFoundError):
    """Shards that the index names are not there; `missing` holds their file names."""

    missing: tuple[str, ...] = ()


class CheckpointError(KdaStreamError, ValueError):
    """Files that are no one checkpoint; `problems` holds each error where there are many."""

    problems: tuple[KdaStreamError, ...] = ()


class NotFoundError(KdaStreamError, KeyError):
    """A tensor or a layer that the checkpoint does not have."""


class ConfigError(KdaStreamError, ValueError):
    """A config.json that is missing, no JSON, or at odds with itself or with the layers."""


class BindError(KdaStreamError, ValueError):
    """A layer is not exactly the expected KDA block; `problems` holds every deviation.

    Each problem is a `kda_stream.BindProblem`. `looks_like` says what the layer is, when it is a
    known thing, and what to do about it; it is the hint then.
    With the code `model-differs` it is a model that cannot take a layer, and `problems` is empty.
    """

    problems: tuple[Any, ...] = ()
    looks_like: str | None = None


class SpanError(KdaStreamError, ValueError):
    """A copy that does not fit its source or destination; nothing was written."""


class PayloadError(KdaStreamError, OSError):
    """Payload that could not be brought in: cut short, changed, or the read failed."""


class PayloadDigestError(KdaStreamError, ValueError):
    """Bytes that are not those which a file's name or a manifest gives the sha256 of."""


class PayloadValueError(KdaStreamError, ValueError):
    """A KDA tensor with what it must not hold: NaN, infinity, zeros alone, padding that is not."""


class ManifestError(KdaStreamError, ValueError):
    """A manifest that is malformed, or whose tensors are not those of the checkpoint."""


class MemoryRefusedError(KdaStreamError, MemoryError):
    """The system refused memory, or under `lock="require"` to lock or to register it.

    Or the driver did not unregister what was registered.
    """


class SlotError(KdaStreamError, RuntimeError):
    """A slot that is not free, not claimed, or too small for the layer."""


class StreamError(KdaStreamError, RuntimeError):
    """A stream that would hand out overwritten weights as it is used, or that cannot go on."""


class ClosedError(KdaStreamError, ValueError):
    """What is used after it was closed or given back; also a copy that was stopped."""


class InUseError(KdaStreamError, BufferError):
    """Memory that was to be given back while an array still points into it."""


class ArgumentError(KdaStreamError, ValueError):
    """An argument outside what the function takes."""


class NotInstalledError(KdaStreamError, ImportError):
    """A package that is needed for what was asked is not there: torch, ml_dtypes or shtab."""


class NotBuiltError(KdaStreamError, ImportError):
    """The compiled part of the library is missing, or the machine cannot run it."""
