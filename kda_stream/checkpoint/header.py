"""One shard's header: its bytes and the file's size in, a checked `Header` out.

Pure: no file, no clock. The format is the safetensors one: an unsigned 64-bit little-endian length,
that many bytes of JSON that begin with `{` and may be padded with spaces, then the payload, which
the tensors' `data_offsets` tile exactly. Nothing here is laxer than the safetensors package; where
that lets through what its specification forbids (duplicate names, unknown keys, white space before
`{`), this refuses.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ..dtypes import DTYPE_BITS
from ..errors import ErrorCode, HeaderError, shown
from ..foreign import LENGTH_BYTES
from ..jsontext import first_repeated
from ..limits import HEADER_BYTES_MAX, INTEGER_MAX
from .header_text import Columns, Kind, duplicate_name, entry_error, read_columns


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor.

    `dtype` is the format's code, `begin` and `end` are its `data_offsets`: bytes from the start of
    the payload.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header; iterates over its tensor names in the header's own order.

    The payload begins `payload_begin` bytes into the file and has `payload_bytes`; `metadata` is
    the header's `__metadata__`, empty without one.
    The tensors are kept as columns, which take a third of the memory of an object each: `numbers`
    gives a name's place in `row_kinds`, `begins` and `ends`, and `row_kinds` one in `kinds`.
    """

    payload_begin: int
    payload_bytes: int
    metadata: Mapping[str, str]
    numbers: Mapping[str, int] = field(repr=False)
    kinds: Sequence[Kind] = field(repr=False)
    row_kinds: Sequence[int] = field(repr=False)
    begins: Sequence[int] = field(repr=False)
    ends: Sequence[int] = field(repr=False)

    def info(self, name: str) -> TensorInfo:
        """The tensor `name`; raises KeyError when the shard does not hold it."""
        number = self.numbers[name]
        dtype, shape = self.kinds[self.row_kinds[number]]
        return TensorInfo(dtype, shape, self.begins[number], self.ends[number])

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, name: object) -> bool:
        return name in self.numbers


def header_length(
    start: bytes, file_bytes: int, *, path: object = None, header_bytes_max: int = HEADER_BYTES_MAX
) -> int:
    """The length of the JSON header, from the first bytes of a file of `file_bytes` bytes.

    `start` holds at least the first 8 bytes where the file has them. Raises `HeaderError` when no
    header can follow.
    """
    incomplete = "the file is incomplete or no safetensors file: fetch it again"
    if file_bytes < LENGTH_BYTES:
        raise HeaderError(
            ErrorCode.HEADER_FILE_TOO_SHORT,
            "the file is shorter than a header's length field",
            path=path,
            expected=f"at least {LENGTH_BYTES} bytes",
            got=f"{file_bytes} bytes",
            hint=incomplete if file_bytes else "the file is empty: fetch it again",
        )
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length == 0:
        raise HeaderError(
            ErrorCode.HEADER_LENGTH_ZERO,
            "the header is empty",
            path=path,
            expected="a JSON header",
            got="length 0",
            hint="the file starts with zeros, as a broken download does: fetch it again",
        )
    if length > file_bytes - LENGTH_BYTES:
        raise HeaderError(
            ErrorCode.HEADER_LENGTH_OVER_FILE,
            "the header reaches past the end of the file",
            path=path,
            expected=f"at most {file_bytes - LENGTH_BYTES} bytes of header",
            got=f"a length of {length}",
            hint=incomplete,
        )
    if length > header_bytes_max:
        raise HeaderError(
            ErrorCode.HEADER_LENGTH_OVER_CAP,
            "the header is longer than the cap",
            path=path,
            expected=f"at most {header_bytes_max} bytes",
            got=f"{length} bytes",
            hint="if the file is trusted, pass a larger header_bytes_max",
        )
    return length


def parse_header(text: bytes, file_bytes: int, *, path: object = None) -> Header:
    """Check the JSON header `text` of a file of `file_bytes` bytes, whole, and return it.

    Raises `HeaderError`, with a code for each kind of fault, when the header breaks the format, a
    tensor's size is not its shape's, the offsets do not tile the payload, or the file is not
    exactly as long as the header says. Source of the rules: the safetensors README ("Format") and
    its reader, safetensors/src/tensor.rs.
    """
    columns = read_columns(text, path)
    numbers = dict(zip(columns.names, range(len(columns.names)), strict=True))
    if len(numbers) != len(columns.names):
        raise duplicate_name(first_repeated(columns.names), path)
    sizes = [_kind_bytes(columns, kind, path) for kind in range(len(columns.kinds))]
    payload_bytes = _check_offsets(columns, sizes, path)
    payload_begin = LENGTH_BYTES + len(text)
    _check_file_size(payload_begin + payload_bytes, file_bytes, path)
    return Header(
        payload_begin,
        payload_bytes,
        columns.metadata,
        numbers,
        columns.kinds,
        columns.row_kinds,
        columns.begins,
        columns.ends,
    )


# The values of the columns -----------------------------------------------------------------------


def _kind_bytes(columns: Columns, kind: int, path: object) -> int:
    """The size of a tensor of that kind."""
    dtype, shape = columns.kinds[kind]
    width = DTYPE_BITS.get(dtype)
    if width is None:
        known = "one of " + ", ".join(DTYPE_BITS)
        raise _kind_error(
            ErrorCode.DTYPE_UNKNOWN,
            "its dtype is unknown",
            columns,
            kind,
            path,
            known,
            dtype or '""',
        )
    bits = 1
    for factor in (*shape, width):
        bits *= factor
        if bits > INTEGER_MAX:
            what, expected = "its shape overflows 64 bits", "at most 2^64 - 1 bits"
            got = f"{dtype} {list(shape)}"
            raise _kind_error(ErrorCode.SHAPE_OVERFLOW, what, columns, kind, path, expected, got)
    if bits % 8:
        what, expected = "it does not fill whole bytes", "a multiple of 8 bits"
        got = f"{bits} bits for {dtype} {list(shape)}"
        raise _kind_error(ErrorCode.SHAPE_PARTIAL_BYTE, what, columns, kind, path, expected, got)
    return bits // 8


def _kind_error(
    code: ErrorCode,
    what: str,
    columns: Columns,
    kind: int,
    path: object,
    expected: str,
    got: str,
) -> HeaderError:
    """The error for the first tensor of that kind."""
    name = columns.names[columns.row_kinds.index(kind)]
    return entry_error(code, what, name, path, expected, shown(got))


def _check_offsets(columns: Columns, sizes: Sequence[int], path: object) -> int:
    """The payload's size, when each byte range is its shape's size and they tile the payload."""
    expected = map(sizes.__getitem__, columns.row_kinds)
    begins, ends = columns.begins, columns.ends
    in_order = begins[:1] == array("Q", [0]) and begins[1:] == ends[:-1]
    if in_order and ends.tolist() == list(accumulate(expected)):  # as writers leave it
        return ends[-1]
    _check_sizes(columns, sizes, path)
    return _check_tiling(columns, path)


def _check_sizes(columns: Columns, sizes: Sequence[int], path: object) -> None:
    rows = zip(columns.names, columns.row_kinds, columns.begins, columns.ends, strict=True)
    for name, kind, begin, end in rows:
        if end - begin != sizes[kind]:
            dtype, shape = columns.kinds[kind]
            backwards = end < begin
            raise entry_error(
                ErrorCode.OFFSETS_INVALID if backwards else ErrorCode.OFFSETS_SIZE,
                "its byte range " + ("runs backwards" if backwards else "is not its shape's size"),
                name,
                path,
                shown(f"{sizes[kind]} bytes for {dtype} {list(shape)}"),
                f"{end - begin} bytes at [{begin}, {end}]",
            )


def _check_tiling(columns: Columns, path: object) -> int:
    """The payload's size, when the byte ranges in order of offset leave no hole and no overlap."""
    ranges = sorted(zip(columns.begins, columns.ends, columns.names, strict=True))
    at, before = 0, None
    for begin, end, name in ranges:
        if begin != at:
            hole = begin > at
            raise entry_error(
                ErrorCode.OFFSETS_HOLE if hole else ErrorCode.OFFSETS_OVERLAP,
                "no tensor covers the bytes before it"
                if hole
                else f"its bytes overlap those of {shown(before)}",
                name,
                path,
                f"a range from {at}",
                f"[{begin}, {end}]",
            )
        at, before = end, name
    return at


def _check_file_size(expected: int, file_bytes: int, path: object) -> None:
    if file_bytes < expected:
        missing = expected - file_bytes
        lack = "1 byte is" if missing == 1 else f"{missing} bytes are"
        raise HeaderError(
            ErrorCode.FILE_SHORT,
            "the file is cut short",
            path=path,
            expected=f"{expected} bytes",
            got=f"{file_bytes} bytes",
            hint=f"{lack} missing, as after a broken download: fetch it again",
        )
    if file_bytes > expected:
        raise HeaderError(
            ErrorCode.FILE_LONG,
            "the file goes on after its last tensor",
            path=path,
            expected=f"{expected} bytes",
            got=f"{file_bytes} bytes",
            hint="the file is damaged or two writes were mixed: fetch it again",
        )
