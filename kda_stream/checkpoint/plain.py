"""Headers and weight maps in the form that writers emit, taken apart by the C of `kda_header.h`.

Pure: no file, no clock. The form has no escapes and no choice but white space in a weight map, so
that a text that is in it is legal JSON and means just what the columns say. Of every other text,
legal or not, nothing is said: the json module reads it. Property tests hold the two together.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from ..staging.native import extension

# The shortest entry and member: they bound how many a text can have.
_ENTRY_BYTES: Final = len('"":{"dtype":"X","shape":[],"data_offsets":[0,0]},')
_MEMBER_BYTES: Final = len('"":"",')

_WORDS_MAX: Final = 1 << 16  # a text with more different kinds or files is left to json


@dataclass(frozen=True, slots=True)
class PlainMembers:
    """The members of an object as columns.

    `words` are the different values, in order of appearance: a header's kinds, such as
    `F32","shape":[32,16`, or a weight map's files; `word_rows` is how many rows have each, and
    `row_words` gives each row its word's place. `begins` and `ends` are a header's data offsets.
    `end` is where in the text the object ends, its `}` included.
    """

    names: list[str]
    words: tuple[str, ...]
    word_rows: tuple[int, ...]
    row_words: array[int]
    begins: array[int]
    ends: array[int]
    end: int


def split_header(text: bytes, begin: int) -> PlainMembers | None:
    """The entries of a header from `begin` to the end of `text`; None in any other form.

    `text` must be UTF-8, and `begin` be behind its `{` or behind the comma after its metadata.
    """
    return _split("kda_header_split", text, begin, len(text) // _ENTRY_BYTES + 1, offsets=True)


def split_weight_map(text: bytes, begin: int) -> PlainMembers | None:
    """The members of a weight map; None in any other form. `begin` must be behind its `{`.

    Raises UnicodeDecodeError when they are not UTF-8.
    """
    return _split("kda_weight_map_split", text, begin, len(text) // _MEMBER_BYTES + 1)


def _split(
    routine: str, text: bytes, begin: int, rows_max: int, *, offsets: bool = False
) -> PlainMembers | None:
    ffi, lib = extension()
    words_max = min(rows_max, _WORDS_MAX)
    rooms = _rooms(len(text), rows_max, words_max, rows_max if offsets else 0)
    columns = ffi.new("kda_columns *", rooms)
    columns.rows_max, columns.words_max = rows_max, words_max
    columns.slots_max = len(rooms["slots"])
    source = ffi.from_buffer(text)
    status = getattr(lib, routine)(source + begin, len(text) - begin, columns)
    if status != lib.KDA_FORM_PLAIN:
        return None

    def filled(room: str, kind: str, count: int) -> array[int]:
        return array(kind, ffi.buffer(rooms[room], count * array(kind).itemsize)[:])

    firsts = ffi.unpack(rooms["word_begins"], columns.words)
    lasts = ffi.unpack(rooms["word_ends"], columns.words)
    words = [text[begin + a : begin + b] for a, b in zip(firsts, lasts, strict=True)]
    return PlainMembers(
        str(ffi.buffer(rooms["names"], columns.names_bytes - 1), "utf-8").split("\n"),
        tuple(str(word, "utf-8") for word in words),
        tuple(ffi.unpack(rooms["word_rows"], columns.words)),
        filled("row_words", "I", columns.rows),
        filled("begins", "Q", columns.rows if offsets else 0),
        filled("ends", "Q", columns.rows if offsets else 0),
        begin + columns.used,
    )


def _rooms(text_bytes: int, rows_max: int, words_max: int, offsets_max: int) -> dict[str, Any]:
    """Memory for each field; it is not zeroed, so that what is not used costs nothing."""
    new = _allocator()
    return {
        "names": new("char[]", text_bytes),
        "row_words": new("uint32_t[]", rows_max),
        "begins": new("uint64_t[]", offsets_max),
        "ends": new("uint64_t[]", offsets_max),
        "word_begins": new("size_t[]", words_max),
        "word_ends": new("size_t[]", words_max),
        "word_rows": new("size_t[]", words_max),
        "slots": new("uint32_t[]", 2 << words_max.bit_length()),
    }


@cache
def _allocator() -> Any:
    return extension()[0].new_allocator(should_clear_after_alloc=False)
