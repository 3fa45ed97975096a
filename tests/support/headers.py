"""Shards by what is odd in their headers: those that must be refused, and those that must open.

`BROKEN` gives each error code its files. `LET_THROUGH` names the ones that the safetensors package
opens although the format's own description forbids them. `ODD` are legal.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from typing import Final, NamedTuple

from support.files import Stored, shard_bytes, shard_of, u8

from kda_stream.errors import ErrorCode as Code

Info = tuple[str, tuple[int, ...], int, int]  # dtype, shape, begin, end

# Broken ------------------------------------------------------------------------------------------


def raw(text: str | bytes, payload_bytes: int = 0) -> bytes:
    """A shard whose whole header is `text`."""
    return shard_bytes(text, bytes(payload_bytes))


def entry(dtype: str = '"U8"', shape: str = "[2]", offsets: str = "[0,2]") -> str:
    """A tensor's entry, each value as JSON text."""
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def span(begin: int, end: int) -> str:
    """The entry of a tensor of bytes at [begin, end)."""
    return entry(shape=f"[{end - begin}]", offsets=f"[{begin},{end}]")


def one(text: str, payload_bytes: int = 2) -> bytes:
    """A shard with one tensor, its entry as JSON text."""
    return raw(f'{{"a":{text}}}', payload_bytes)


def two(first: str, second: str, payload_bytes: int) -> bytes:
    """A shard with two tensors, their entries as JSON text."""
    return raw(f'{{"a":{first},"b":{second}}}', payload_bytes)


def named(name: str) -> bytes:
    """A shard with one tensor, its quoted name as JSON text."""
    return raw(f"{{{name}:{GOOD}}}", 2)


def metadata(text: str) -> bytes:
    """A shard with no tensors, its metadata as JSON text."""
    return raw(f'{{"__metadata__":{text}}}')


def metadata_and_tensor(text: str) -> bytes:
    """A shard with one tensor, its metadata as JSON text."""
    return raw(f'{{"__metadata__":{text},"a":{GOOD}}}', 2)


def _zip() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", b"weights")
    return data.getvalue()


GOOD: Final = entry()
GOOD_SHARD: Final = one(GOOD)
DIGITS: Final = "9" * 5000
MANY: Final = 100_000
LFS_POINTER: Final = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 5365306704\n"
)

_WRONG_SHAPES: Final = (
    '2 "2" null {} true ["2"] [null] [[2]] [{}] [-2] [-1,-2] [true,2] [2,true] [2.0] [2e0] [20e-1] '
    "[1E400] [18446744073709551616] [-18446744073709551616]"
)
_WRONG_OFFSETS: Final = (
    '[] [0] [2] [0,2,2] [[0,2]] 2 null "0,2" {} {"begin":0,"end":2} ["0","2"] [0,null] [false,2] '
    "[0.0,2.0] [0,2.0] [0,2e0] [-0,2] [-1,1] [-2,0] [2,0] [0,1E400] [0,18446744073709551616] "
    "[18446744073709551614,18446744073709551616]"
)
_OVERFLOWS: Final = (
    *([2**62, 4], [4, 2**62], [2**32, 2**32], [2**64 - 1, 2**64 - 1], [2**61]),
    *([2**63, 2, 0], [2**64 - 1, 2, 0]),
)

FOREIGN: Final[Mapping[str, Mapping[str, bytes]]] = {
    "LFS": {"a Git LFS pointer": LFS_POINTER},
    "HTML": {
        "an HTML page": b"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n",
        "HTML in lower case": b"<!doctype html><title>502</title>",
        "HTML without a doctype": b"<html><head></head></html>",
        "HTML after a line break": b"\r\n<!DOCTYPE html><html></html>",
    },
    "JSON": {
        "a JSON error": b'{"error":"Invalid credentials"}',
        "a JSON error in lines": b'{\n  "error": "not found"\n}\n',
    },
    "GGUF": {"a GGUF": b"GGUF\x03\x00\x00\x00" + bytes(64)},
    "zip": {"a zip": _zip()},
    "pickle": {
        "a pickle": pickle.dumps({"a": [1.5] * 64}, protocol=2),
        "a pickle in frames": pickle.dumps({"a": [1.5] * 64}, protocol=4),
    },
    "gzip": {"a gzip": gzip.compress(GOOD_SHARD, mtime=1_700_000_000)},
}
"""Files that are no shards, by the word that the error must say."""

BROKEN: Final[Mapping[Code, Mapping[str, bytes]]] = {
    Code.HEADER_FILE_TOO_SHORT: {
        "an empty file": b"",
        "one byte": b"\x02",
        "seven bytes": b"\x02" + bytes(6),
    },
    Code.HEADER_LENGTH_ZERO: {
        "length 0 and no more": bytes(8),
        "length 0 before an object": bytes(8) + b"{}",
        "a page of zeros": bytes(4096),
    },
    Code.HEADER_LENGTH_OVER_FILE: {
        "a length and no header": shard_bytes("", length=2),
        "a length one over": shard_bytes("{}", length=3),
        "the length of the whole file": shard_bytes("{}", length=10),
        "length 2^31": shard_bytes("{}", length=2**31),
        "length 2^63": shard_bytes("{}", length=2**63),
        "length 2^64 - 8": shard_bytes("{}", length=2**64 - 8),
        "length 2^64 - 1": shard_bytes("{}", length=2**64 - 1),
        "a big-endian length": bytes(7) + b"\x02{}",
        "a file cut in its header": GOOD_SHARD[:20],
    },
    Code.HEADER_FOREIGN_FILE: {
        name: data for kind in FOREIGN.values() for name, data in kind.items()
    },
    Code.HEADER_NOT_UTF8: {
        "a byte that UTF-8 never has": raw(b'{"\xff":' + GOOD.encode() + b"}", 2),
        "a name in Latin-1": raw(b'{"\xe9":' + GOOD.encode() + b"}", 2),
        "an overlong slash": raw(b'{"\xc0\xaf":' + GOOD.encode() + b"}", 2),
        "a surrogate as UTF-8": raw(b'{"\xed\xa0\x80":' + GOOD.encode() + b"}", 2),
        "a character cut in two": raw(b'{"\xe2\x82'),
        "UTF-16 with its mark": raw("{}".encode("utf-16")),
    },
    Code.HEADER_START: {
        "a space before the object": raw(" {}"),
        "a line break before the object": raw("\n{}"),
        "a tab before the object": raw("\t{}"),
        "a NUL before the object": raw("\0{}"),
        "a byte-order mark": raw("\ufeff{}"),
        "UTF-16, big end first": raw("{}".encode("utf-16-be")),
        "spaces alone": raw(" " * 64),
        "zeros alone": raw("\0" * 64),
        "a list": raw("[]"),
        "a string": raw('"{}"'),
        "a null": raw("null"),
        "a number": raw("12345678"),
    },
    Code.HEADER_PADDING: {
        "padding with a line break": raw("{}\n"),
        "padding with a tab": raw("{}\t"),
        "padding with CR LF": raw("{}\r\n"),
        "a line break among spaces": raw("{}  \n  "),
        "padding with NUL": raw("{}\0\0\0\0\0\0"),
        "a NUL after spaces": raw(f'{{"a":{GOOD}}}  \0', 2),
    },
    Code.HEADER_NOT_JSON: {
        "an open brace alone": raw("{"),
        "an object cut off": raw('{"a":{"dtype":"U8"'),
        "a string cut off": raw('{"a'),
        "a comma after the last entry": raw(f'{{"a":{GOOD},}}', 2),
        "a comma before the first entry": raw(f'{{,"a":{GOOD}}}', 2),
        "two commas between entries": raw(f'{{"a":{GOOD},,"b":{span(2, 4)}}}', 4),
        "no comma between entries": raw(f'{{"a":{GOOD}"b":{span(2, 4)}}}', 4),
        "a comma after the last dimension": one(entry(shape="[2,]")),
        "a comma before the first dimension": one(entry(shape="[,2]")),
        "two commas between dimensions": one(entry(shape="[1,,2]")),
        "a comma alone in a shape": one(entry(shape="[,]")),
        "a comma after the last offset": one(entry(offsets="[0,2,]")),
        "a comma after the last key": one(GOOD[:-1] + ",}"),
        "no colon": raw(f'{{"a"{GOOD}}}', 2),
        "a name without quotes": named("a"),
        "a name in single quotes": named("'a'"),
        "a comment": raw(f'{{/* a */"a":{GOOD}}}', 2),
        "two objects": raw("{}{}"),
        "text after the object": raw("{} x"),
        "a brace more": raw(f'{{"a":{GOOD}}}}}', 2),
        "NaN": one(entry(shape="[NaN]")),
        "Infinity": one(entry(offsets="[0,Infinity]")),
        "-Infinity": one(entry(offsets="[-Infinity,2]")),
        "NaN in the metadata": metadata('{"a":NaN}'),
        "a zero before a dimension": one(entry(shape="[02]")),
        "a zero before an offset": one(entry(offsets="[00,2]")),
        "a plus before a number": one(entry(shape="[+2]")),
        "a hexadecimal number": one(entry(shape="[0x2]")),
        "a number with an underscore": one(entry(shape="[0_2]")),
        "a number in Arabic digits": one(entry(shape="[\u0662]")),
        "a point and no fraction": one(entry(shape="[2.]")),
        "a minus alone": one(entry(shape="[-]")),
        "True in capitals": one(entry(shape="[True]")),
        "an unknown escape": named(r'"\x61"'),
        "a short escape": named(r'"\u61"'),
        "a raw line break in a name": named('"a\nb"'),
        "a raw NUL in a name": named('"a\0b"'),
        "a no-break space between tokens": raw(f'{{"a":\u00a0{GOOD}}}', 2),
        "a form feed between tokens": raw(f'{{"a":\f{GOOD}}}', 2),
    },
    Code.HEADER_NESTING: {
        "lists that never close": one("[" * MANY),
        "lists that close": one("[" * MANY + "]" * MANY),
        "objects that never close": one('{"a":' * MANY),
        "lists in the metadata": metadata('{"a":' + "[" * MANY),
        "lists in the metadata, before a tensor": metadata_and_tensor("[" * MANY + "]" * MANY),
        "lists in a shape": one(entry(shape="[" * MANY + "]" * MANY)),
    },
    Code.HEADER_DUPLICATE_KEY: {
        "one name twice": raw(f'{{"a":{GOOD},"a":{GOOD}}}', 2),
        "one name twice, other bytes": raw(f'{{"a":{GOOD},"a":{span(2, 4)}}}', 4),
        "one name twice, one between": raw(f'{{"a":{GOOD},"b":{span(2, 4)},"a":{GOOD}}}', 4),
        "one name twice, once escaped": raw(f'{{"a":{GOOD},"\\u0061":{GOOD}}}', 2),
        "one name twice, with spaces": raw(f'{{"a": {GOOD}, "a": {GOOD}}}', 2),
        "the empty name twice": raw(f'{{"":{GOOD},"":{GOOD}}}', 2),
        "dtype twice": one('{"dtype":"U8",' + GOOD[1:]),
        "shape twice": one('{"shape":[3],' + GOOD[1:]),
        "data_offsets twice": one('{"data_offsets":[0,2],' + GOOD[1:]),
        "__metadata__ twice": raw('{"__metadata__":{},"__metadata__":{}}'),
        "__metadata__ twice, a tensor between": raw(
            f'{{"__metadata__":{{}},"a":{GOOD},"__metadata__":{{}}}}', 2
        ),
        "a metadata key twice": metadata('{"a":"b","a":"c"}'),
        "a metadata key twice, before a tensor": metadata_and_tensor('{"a":"b","a":"c"}'),
    },
    Code.HEADER_LONE_SURROGATE: {
        "a high surrogate alone": named(r'"\ud800"'),
        "a low surrogate alone": named(r'"\udc00"'),
        "a high surrogate before a letter": named(r'"\ud800a"'),
        "surrogates the wrong way round": named(r'"\udc00\ud800"'),
        "a lone surrogate in a metadata key": metadata(r'{"\ud800":"a"}'),
        "a lone surrogate in a metadata value": metadata(r'{"a":"\udfff"}'),
        "a lone surrogate in a metadata key, before a tensor": metadata_and_tensor(
            r'{"\ud800":"a"}'
        ),
        "a lone surrogate in a metadata value, before a tensor": metadata_and_tensor(
            r'{"a":"\udfff"}'
        ),
    },
    Code.HEADER_METADATA: {
        **{
            f"__metadata__ is {text}": metadata_and_tensor(text)
            for text in ("null", "[]", '"pt"', "1", "true", '[["format","pt"]]')
        },
        **{
            f"a metadata value is {text}": metadata_and_tensor(f'{{"format":{text}}}')
            for text in ("null", "1", "1.5", "true", "[]", '["pt"]', "{}", '{"a":"b"}')
        },
        "__metadata__ is a tensor": raw(f'{{"__metadata__":{GOOD}}}', 2),
        "__metadata__ is the second tensor": raw(f'{{"a":{GOOD},"__metadata__":{span(2, 4)}}}', 4),
    },
    Code.ENTRY_NOT_OBJECT: {
        **{f"an entry is {text}": one(text, 0) for text in ("null", "true", "1", '"U8"', "[]")},
        "an entry is a list of its values": one('["U8",[2],[0,2]]'),
    },
    Code.ENTRY_KEYS: {
        "an entry is empty": one("{}", 0),
        "no dtype": one('{"shape":[2],"data_offsets":[0,2]}'),
        "no shape": one('{"dtype":"U8","data_offsets":[0,2]}'),
        "no data_offsets": one('{"dtype":"U8","shape":[2]}'),
        "no shape in the second entry": two(GOOD, '{"dtype":"U8","data_offsets":[2,4]}', 4),
        "a key more": one(GOOD[:-1] + ',"strides":[1]}'),
        "a key more, nested": one(GOOD[:-1] + ',"x":[[[[[]]]]]}'),
        "an empty key more": one(GOOD[:-1] + ',"":0}'),
        "a key in capitals": one(GOOD.replace("dtype", "Dtype")),
        "a key with a space": one(GOOD.replace("shape", "shape ")),
    },
    Code.DTYPE_UNKNOWN: {
        **{
            f'dtype "{code}"': one(entry(dtype=f'"{code}"'))
            for code in (
                "F128",
                "bf16",
                "float32",
                "F8",
                "F8_E4M3FN",
                "U8 ",
                " U8",
                "\\u0000",
                "U4",
                "",
            )
        },
        **{
            f"dtype {text}": one(entry(dtype=text))
            for text in ("8", "null", "true", '["U8"]', "{}")
        },
    },
    Code.SHAPE_INVALID: {
        **{f"shape {text}": one(entry(shape=text)) for text in _WRONG_SHAPES.split()},
        "[-2,-3] over six bytes": one(entry(shape="[-2,-3]", offsets="[0,6]"), 6),
        "[true] over a byte": one(entry(shape="[true]", offsets="[0,1]"), 1),
        "[false] over nothing": one(entry(shape="[false]", offsets="[0,0]"), 0),
        "[1.0] over a byte": one(entry(shape="[1.0]", offsets="[0,1]"), 1),
        "[1e0] over a byte": one(entry(shape="[1e0]", offsets="[0,1]"), 1),
        "[-0] over nothing": one(entry(shape="[-0]", offsets="[0,0]"), 0),
        "[0.0] over nothing": one(entry(shape="[0.0]", offsets="[0,0]"), 0),
        "a dimension of 5000 digits": one(entry(shape=f"[{DIGITS}]")),
        "5000 digits beside a zero": one(entry(shape=f"[0,{DIGITS}]", offsets="[0,0]"), 0),
    },
    Code.SHAPE_OVERFLOW: {
        **{
            f"U8 {dims} over nothing": one(entry(shape=str(dims), offsets="[0,0]"), 0)
            for dims in _OVERFLOWS
        },
        "F64 [2^58] over nothing": one(entry('"F64"', f"[{2**58}]", "[0,0]"), 0),
        "F4 [2^62] over nothing": one(entry('"F4"', f"[{2**62}]", "[0,0]"), 0),
        "a product that wraps to 2": one(entry(shape=f"[{(2**64 + 2) // 6},6]")),
    },
    Code.SHAPE_PARTIAL_BYTE: {
        "F4 [1] over nothing": one(entry('"F4"', "[1]", "[0,0]"), 0),
        "F4 [1] over a byte": one(entry('"F4"', "[1]", "[0,1]"), 1),
        "F4 [] over a byte": one(entry('"F4"', "[]", "[0,1]"), 1),
        "F4 [3,1] over two": one(entry('"F4"', "[3,1]", "[0,2]"), 2),
        "F6_E2M3 [1] over a byte": one(entry('"F6_E2M3"', "[1]", "[0,1]"), 1),
        "F6_E2M3 [2] over two": one(entry('"F6_E2M3"', "[2]", "[0,2]"), 2),
        "F6_E3M2 [3] over two": one(entry('"F6_E3M2"', "[3]", "[0,2]"), 2),
        "F6_E3M2 [5] over four": one(entry('"F6_E3M2"', "[5]", "[0,4]"), 4),
    },
    Code.OFFSETS_INVALID: {
        **{f"data_offsets {text}": one(entry(offsets=text)) for text in _WRONG_OFFSETS.split()},
        "[1,0] of an empty tensor": one(entry(shape="[0]", offsets="[1,0]"), 0),
        "[false,true]": one(entry(shape="[1]", offsets="[false,true]"), 1),
        "an offset of 5000 digits": one(entry(offsets=f"[0,{DIGITS}]")),
    },
    Code.OFFSETS_SIZE: {
        "U8 [128,128] over 128 bytes": one(entry(shape="[128,128]", offsets="[0,128]"), 128),
        "a byte too few": one(entry(shape="[3]")),
        "a byte too many": one(entry(shape="[1]")),
        "a scalar of two bytes": one(entry(shape="[]")),
        "an empty tensor of two bytes": one(entry(shape="[0,2]")),
        "BF16 counted as bytes": one(entry('"BF16"')),
        "F32 counted as BF16": one(entry('"F32"', offsets="[0,4]"), 4),
        "F4 counted as bytes": one(entry('"F4"')),
        "F6 counted as bytes": one(entry('"F6_E2M3"', "[4]", "[0,4]"), 4),
        "two sizes that make up for each other": two(
            entry(shape="[1]"), entry(shape="[3]", offsets="[2,4]"), 4
        ),
    },
    Code.OFFSETS_OVERLAP: {
        "two tensors at [0,8) of 16 bytes": two(span(0, 8), span(0, 8), 16),
        "two tensors at [0,8) of 8 bytes": two(span(0, 8), span(0, 8), 8),
        "two tensors that share a byte": two(span(0, 8), span(7, 15), 15),
        "a tensor inside another": two(span(0, 8), span(2, 4), 8),
        "an empty tensor inside another": two(span(0, 8), span(4, 4), 8),
        "an overlap and a hole of one size": raw(
            f'{{"a":{span(0, 4)},"b":{span(2, 6)},"c":{span(8, 12)}}}', 12
        ),
    },
    Code.OFFSETS_HOLE: {
        "a hole of a byte": two(span(0, 4), span(5, 8), 8),
        "a hole, the entries in other order": two(span(5, 8), span(0, 4), 8),
        "a hole for alignment": two(span(0, 4), span(64, 68), 68),
        "a late start": one(span(1, 3), 3),
        "offsets from the start of the file": one(span(64, 66)),
        "an empty tensor past the end": two(GOOD, span(5, 5), 5),
        "an empty tensor alone, not at 0": one(span(1, 1), 1),
    },
    Code.FILE_LONG: {
        "a tail of a byte": one(GOOD, 3),
        "a tail of a page": one(GOOD, 4098),
        "a tail and no tensors": raw("{}", 1),
        "a tail after an empty tensor": one(span(0, 0), 1),
        "two shards in one file": GOOD_SHARD + GOOD_SHARD,
    },
    Code.FILE_SHORT: {
        "the last byte cut off": GOOD_SHARD[:-1],
        "no payload": one(GOOD, 0),
        "one of two tensors": two(span(0, 8), span(8, 16), 8),
        "a tensor of 2^60 bytes": one(span(0, 2**60)),
    },
}
"""By the code of the error that each file must give: what is wrong, and the file."""

LET_THROUGH: Final = frozenset(
    {
        "a space before the object",
        "a line break before the object",
        "a tab before the object",
        "padding with a line break",
        "padding with a tab",
        "padding with CR LF",
        "a line break among spaces",
        "one name twice",
        "one name twice, one between",
        "one name twice, once escaped",
        "one name twice, with spaces",
        "the empty name twice",
        "a metadata key twice",
        "a metadata key twice, before a tensor",
        "__metadata__ is null",
        "an entry is a list of its values",
        "a key more",
        "a key more, nested",
        "an empty key more",
    }
)
"""What the safetensors package opens, and the format's own description forbids."""

# Odd but legal -----------------------------------------------------------------------------------


class Odd(NamedTuple):
    """A legal file, and the tensors and metadata that it holds."""

    data: bytes
    tensors: Mapping[str, Info]
    metadata: Mapping[str, str] = {}


_U8: Final[Info] = ("U8", (2,), 0, 2)
_SPACED: Final = (
    '{\n\t"a" : { "dtype" : "U8" ,\r\n "shape" : [ 2 ] , "data_offsets" : [ 0 , 2 ] } }'
)
_OTHER_ORDER: Final = '{"data_offsets":[0,2],"shape":[2],"dtype":"U8"}'
_DTYPE_BITS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_ODD_NAMES: Final = {
    "a control character": "\x01",
    "a line break": "a\nb",
    "a NUL": "a\0b",
    "an escape sequence": "\x1b[31m",
    "DEL": "\x7f",
    "__metadata": "__metadata",
    "__metadata__ and more": "__metadata__2",
    "no characters": "",
    "an accent": "caf\u00e9",
    "no Latin letter": "\u6743\u91cd",
    "a character beyond 16 bits": "\U0001f600",
    "right-to-left marks": "\u202egnp.\u2066",
    "a line separator": "a\u2028b",
    "a byte-order mark": "\ufeff",
    "quotes and backslashes": '"\\"',
    "braces and commas": '{"a":[1,2]},',
    "a dtype's text": '":{"dtype":"U8","shape":[',
    "10,000 letters": "a" * 10_000,
}

ODD: Final[Mapping[str, Odd]] = {
    "no tensors": Odd(raw("{}"), {}),
    "no tensors and spaces": Odd(raw("{}" + " " * 100), {}),
    "empty metadata": Odd(metadata("{}"), {}),
    "metadata alone": Odd(metadata('{"format":"pt"}'), {}, {"format": "pt"}),
    "metadata after a tensor": Odd(
        raw(f'{{"a":{GOOD},"__metadata__":{{"format":"pt"}}}}', 2), {"a": _U8}, {"format": "pt"}
    ),
    "metadata with braces": Odd(
        metadata_and_tensor('{"a":"}, {","":"{}"}'), {"a": _U8}, {"a": "}, {", "": "{}"}
    ),
    "metadata with escapes": Odd(
        metadata_and_tensor(r'{"\n\u00e9":"\ud83d\ude00\u0000\/"}'),
        {"a": _U8},
        {"\n\u00e9": "\U0001f600\0/"},
    ),
    "a metadata key like a tensor": Odd(
        metadata_and_tensor('{"a":"b","dtype":"U8"}'), {"a": _U8}, {"a": "b", "dtype": "U8"}
    ),
    "a scalar": Odd(one(entry('"F32"', "[]", "[0,4]"), 4), {"a": ("F32", (), 0, 4)}),
    "a zero dimension": Odd(
        one(entry('"F32"', "[3,0,5]", "[0,0]"), 0), {"a": ("F32", (3, 0, 5), 0, 0)}
    ),
    "a zero before 2^63 x 4": Odd(
        one(entry(shape=f"[0,{2**63},4]", offsets="[0,0]"), 0), {"a": ("U8", (0, 2**63, 4), 0, 0)}
    ),
    "empty tensors first, between and last": Odd(
        raw(
            f'{{"a":{span(0, 0)},"b":{span(0, 2)},"c":{span(2, 2)},"d":{span(2, 2)},'
            f'"e":{span(2, 4)},"f":{span(4, 4)}}}',
            4,
        ),
        {
            name: ("U8", (end - begin,), begin, end)
            for name, begin, end in zip(
                "abcdef", (0, 0, 2, 2, 2, 4), (0, 2, 2, 2, 4, 4), strict=True
            )
        },
    ),
    "payload in another order than the entries": Odd(
        raw(f'{{"a":{span(3, 5)},"b":{span(0, 1)},"c":{span(1, 3)}}}', 5),
        {"a": ("U8", (2,), 3, 5), "b": ("U8", (1,), 0, 1), "c": ("U8", (2,), 1, 3)},
    ),
    "an odd payload offset": Odd(
        raw('{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}'.ljust(61), 6),
        {"a": ("BF16", (3,), 0, 6)},
    ),
    "BF16 after one byte": Odd(
        two(span(0, 1), entry('"BF16"', "[1]", "[1,3]"), 3),
        {"a": ("U8", (1,), 0, 1), "b": ("BF16", (1,), 1, 3)},
    ),
    "100,000 spaces after the object": Odd(raw(f'{{"a":{GOOD}}}' + " " * MANY, 2), {"a": _U8}),
    "white space inside the object": Odd(raw(_SPACED, 2), {"a": _U8}),
    "a line break before the last brace": Odd(raw(f'{{"a":{GOOD}\n}}', 2), {"a": _U8}),
    "another order of keys": Odd(one(_OTHER_ORDER), {"a": _U8}),
    "two orders of keys": Odd(
        two(GOOD, _OTHER_ORDER.replace("[0,2]", "[2,4]"), 4), {"a": _U8, "b": ("U8", (2,), 2, 4)}
    ),
    "escapes in names": Odd(named(r'"\u0061\/\t\ud83d\ude00"'), {"a/\t\U0001f600": _U8}),
    "escapes in keys": Odd(one(GOOD.replace("dtype", r"d\u0074ype")), {"a": _U8}),
    "an escape in a dtype": Odd(one(entry(dtype=r'"\u00558"')), {"a": _U8}),
    "4,000 dimensions": Odd(
        one(entry(shape=str([1] * 3999 + [2]))), {"a": ("U8", (1,) * 3999 + (2,), 0, 2)}
    ),
    "dimensions of one, and one of 2^64 - 1 behind a zero": Odd(
        one(entry(shape=f"[1,0,{2**64 - 1}]", offsets="[0,0]"), 0),
        {"a": ("U8", (1, 0, 2**64 - 1), 0, 0)},
    ),
    **{
        f"a name with {what}": Odd(named(json.dumps(name, ensure_ascii=False)), {name: _U8})
        for what, name in _ODD_NAMES.items()
    },
    **{
        f"a tensor of {code}": Odd(
            shard_of({"a": Stored(code, (2, 4), bytes(bits)), "b": u8(b"c")}),
            {"a": (code, (2, 4), 0, bits), "b": ("U8", (1,), bits, bits + 1)},
        )
        for code, bits in _DTYPE_BITS.items()
    },
}
"""By what is odd in it: a file that must open."""
