"""The text of a header to columns of names, dtypes, shapes and offsets, none of them judged yet.

Two ways for the same answer: the form that writers emit is taken apart in C, which is several times
faster and needs no object for each entry; every other legal form, and every error, is left to the
json module. A property test holds the two together.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from ..errors import ErrorCode, HeaderError, shown
from ..jsontext import DuplicateKeyError, parse_json
from ..limits import INTEGER_MAX
from .plain import split_header

METADATA_KEY: Final = "__metadata__"
ENTRY_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})


Kind = tuple[str, tuple[int, ...]]  # dtype and shape; the tensors of a header share a few of them


@dataclass(frozen=True, slots=True)
class Columns:
    """The tensors of a header, a column a field; `row_kinds` gives each its place in `kinds`.

    Every kind is in use, and the first rows of two kinds come in the order of the kinds.
    """

    metadata: dict[str, str]
    names: Sequence[str]
    kinds: Sequence[Kind]
    row_kinds: array[int]
    begins: array[int]
    ends: array[int]


_OTHER_PADDING: Final = "\0\t\n\v\f\r "
_PLAIN_METADATA: Final = re.compile(rb'\{(?:"__metadata__":(\{[^{}]*\}),)?')


def read_columns(text: bytes, path: object) -> Columns:
    """Take a header apart; raises `HeaderError` when its text or structure breaks the format."""
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeaderError(
            ErrorCode.HEADER_NOT_UTF8,
            "the header is not UTF-8",
            path=path,
            expected="UTF-8 text",
            got=f"byte {text[error.start]:#04x} at {error.start}",
            hint="the file is damaged or no safetensors file: fetch it again",
        ) from None
    if not decoded.startswith("{"):
        raise HeaderError(
            ErrorCode.HEADER_START,
            "the header does not begin with '{'",
            path=path,
            expected="'{'",
            got=repr(decoded[:1]),
            hint="the format forbids white space and byte-order marks before it"
            if decoded.lstrip("\ufeff \t\r\n").startswith("{")
            else "the header must be an object: fetch the file again",
        )
    body = decoded.rstrip(" ")
    if not body.endswith("}") and body.rstrip(_OTHER_PADDING).endswith("}"):
        raise HeaderError(
            ErrorCode.HEADER_PADDING,
            "the header is padded with something else than spaces",
            path=path,
            expected="spaces (0x20) after '}'",
            got=repr(body[-1]),
            hint="the format allows spaces only: write the file again with the safetensors package",
        )
    return _plain_columns(text.rstrip(b" ")) or _json_columns(body, path)


def _plain_columns(text: bytes) -> Columns | None:
    """The columns of a header in the form that the safetensors package writes, else None.

    `text` is UTF-8. Every byte belongs to an entry without escapes, white space or another order of
    keys, or to metadata without a brace in it, which is read strictly and so ends at its brace.
    """
    head = _PLAIN_METADATA.match(text)
    members = None if head is None else split_header(text, head.end())
    if head is None or members is None or METADATA_KEY in members.names:
        return None
    try:
        metadata = _checked_metadata(parse_json(head[1].decode("utf-8"))) if head[1] else {}
    except (ValueError, RecursionError):
        return None
    if not all(map(_is_unicode, chain(metadata, metadata.values()))):
        return None
    return Columns(
        metadata,
        members.names,
        tuple(map(_kind_of_word, members.words)),
        members.row_words,
        members.begins,
        members.ends,
    )


def _kind_of_word(word: str) -> Kind:
    dtype, _, dimensions = word.partition('","shape":[')
    return dtype, tuple(map(int, dimensions.split(","))) if dimensions else ()


class _MetadataError(ValueError):
    pass


def _checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise _MetadataError(_kind(metadata))
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _MetadataError(f"{_kind(value)} for {shown(repr(key))}")
    return metadata


def _json_columns(text: str, path: object) -> Columns:
    """The columns of any legal header; raises `HeaderError` for every other one."""
    try:
        members = parse_json(text)
    except DuplicateKeyError as error:
        raise duplicate_name(error.key, path) from None
    except RecursionError:
        raise HeaderError(
            ErrorCode.HEADER_NESTING,
            "the header is nested too deeply",
            path=path,
            expected="at most 3 levels",
            hint="the file is crafted or damaged: do not use it",
        ) from None
    except ValueError as error:
        raise HeaderError(
            ErrorCode.HEADER_NOT_JSON,
            "the header is not valid JSON",
            path=path,
            got=str(error),
            hint="the file is damaged: fetch it again",
        ) from None
    try:
        metadata = _checked_metadata(members.pop(METADATA_KEY, {}))
    except _MetadataError as error:
        raise HeaderError(
            ErrorCode.HEADER_METADATA,
            "__metadata__ is malformed",
            path=path,
            expected="an object with string values",
            got=str(error),
            hint="write the file again with the safetensors package",
        ) from None
    for string in chain(members, metadata, metadata.values()):
        if not _is_unicode(string):
            raise HeaderError(
                ErrorCode.HEADER_LONE_SURROGATE,
                "a string holds half a surrogate pair",
                path=path,
                expected="Unicode text",
                got=string,
                hint="the file is crafted or damaged: fetch it again",
            )
    rows = [_checked_entry(name, entry, path) for name, entry in members.items()]
    numbers: dict[Kind, int] = {}
    return Columns(
        metadata,
        tuple(members),
        row_kinds=array("I", [numbers.setdefault(kind, len(numbers)) for kind, _, _ in rows]),
        kinds=tuple(numbers),
        begins=array("Q", [begin for _, begin, _ in rows]),
        ends=array("Q", [end for _, _, end in rows]),
    )


def _checked_entry(name: str, entry: Any, path: object) -> tuple[Kind, int, int]:
    """One member of the header as a row, its JSON types checked but not yet its values."""
    if not isinstance(entry, dict):
        raise entry_error(
            ErrorCode.ENTRY_NOT_OBJECT,
            "its entry is no object",
            name,
            path,
            "an object",
            _kind(entry),
        )
    if entry.keys() != ENTRY_KEYS:
        raise entry_error(
            ErrorCode.ENTRY_KEYS,
            "its entry has other keys than the format's",
            name,
            path,
            "data_offsets, dtype, shape",
            ", ".join(key or '""' for key in sorted(entry)) or "no key",
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise entry_error(
            ErrorCode.DTYPE_UNKNOWN,
            "its dtype is no string",
            name,
            path,
            "a dtype code",
            _kind(dtype),
        )
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise entry_error(
            ErrorCode.SHAPE_INVALID,
            "its shape is malformed",
            name,
            path,
            "a list of integers from 0 to 2^64 - 1",
            shape,
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise entry_error(
            ErrorCode.OFFSETS_INVALID,
            "its data_offsets are malformed",
            name,
            path,
            "two integers from 0 to 2^64 - 1",
            offsets,
        )
    return (dtype, tuple(shape)), offsets[0], offsets[1]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INTEGER_MAX


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return kinds[type(value)]


def duplicate_name(key: str, path: object) -> HeaderError:
    """The error for a header that gives the name `key` twice."""
    return HeaderError(
        ErrorCode.HEADER_DUPLICATE_KEY,
        "the header gives one name twice",
        path=path,
        tensor=key,
        expected="each name once",
        hint="readers disagree on which counts, so none does: write the file again",
    )


def entry_error(
    code: ErrorCode, what: str, name: str, path: object, expected: object, got: object
) -> HeaderError:
    """The error for a fault in the entry of the tensor `name`."""
    return HeaderError(
        code,
        what,
        path=path,
        tensor=name,
        expected=expected,
        got=got,
        hint="the file is damaged or was written wrongly: fetch it again",
    )
