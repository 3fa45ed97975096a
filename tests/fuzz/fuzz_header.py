"""Fuzz target: a shard's bytes. What a header is taken for, three other readers must agree on.

The safetensors package must accept the file and see the same tensors in it; Python's json module,
held to the format's own description, must see the same names, dtypes, shapes, offsets and metadata;
and where the C reads the header, the library's other way must read it alike. A file that is
accepted against one of them is an accepted lie. What the package and the description both allow
must be accepted. Only `HeaderError` may come out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import chain
from random import Random
from typing import Any

from fuzz.judging import AcceptedLieError, need
from fuzz.mutation import NAMES, changed_json, fresh_object
from safetensors import SafetensorError, deserialize

from kda_stream.checkpoint.header import Header, header_length, parse_header
from kda_stream.checkpoint.header_text import Columns, _json_columns, _plain_columns
from kda_stream.errors import ErrorCode, HeaderError

PAYLOAD = bytes((n + n // 256) % 256 for n in range(10_000))
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
DTYPES = tuple(DTYPE_BITS)
DIMENSIONS = (0, 1, 2, 2, 3, 4, 5, 8)
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
LAST_OFFSET = re.compile(rb"([0-9]{1,4})[ \t\r\n]*\][ \t\r\n]*[},]")

PIECES = (
    *('"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}', '"__metadata__":{"format":"pt"}'),
    *('"":{"dtype":"F32","shape":[],"data_offsets":[2,6]}', '"__metadata__":{"a":"}"}'),
    *('"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', "[0,0]", "[0,2]", "[2,4]", "[]"),
    *('"BF16"', '"F4"', '"F6_E2M3"', '"F8_E4M3"', '"F64"', '"U8"', '"BOOL"', '"C64"', '"F128"'),
)


def read(data: bytes) -> Header:
    """The library's answer for a file of these bytes."""
    length = header_length(data[:64], len(data))
    return parse_header(data[8 : 8 + length], len(data))


def check(data: bytes, read: Callable[[bytes], Header] = read) -> Header | None:
    """Raises when `read` accepts a lie or lets another error out; returns what it accepted."""
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    check_both_ways(text)
    try:
        header = read(data)
    except HeaderError as error:
        if len(data) % 8 == 0:  # to tell an error takes longer than all the rest
            need(str(error).isprintable(), "an error of one line", str(error))
        need(not is_legal(data, text), "refused, and legal", data, error)
        return None
    seen = {name: header.info(name) for name in header}
    check_text(text, header)
    for name, info in seen.items():
        need(0 <= info.begin <= info.end, "a range", name, info)
    need(header.payload_begin == 8 + len(text), "where the payload begins")
    need(header.payload_begin + header.payload_bytes == len(data), "the file's size")
    try:
        parts = deserialize(data)
    except SafetensorError as error:
        raise AcceptedLieError(f"the package refuses it: {error}") from error
    need(len(parts) == len(seen) and {name for name, _ in parts} == seen.keys(), "names", parts)
    for name, part in parts:
        info = seen[name]
        begin, end = header.payload_begin + info.begin, header.payload_begin + info.end
        need(part["dtype"] == info.dtype, "a dtype", name, info, part)
        need(tuple(part["shape"]) == info.shape, "a shape", name, info, part)
        need(part["data"] == data[begin:end], "bytes", name, info, part)
    return header


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def as_described(text: bytes) -> dict[str, Any]:
    """The text as JSON; raises where the structure is not what the format's description allows."""
    if not text.startswith(b"{") or not text.rstrip(b" ").endswith(b"}"):
        raise ValueError("no bare object")
    stored = json.loads(text.decode(), object_pairs_hook=unique)
    if not isinstance(stored.get("__metadata__", {}), dict):
        raise ValueError("metadata that is no object")
    for name, entry in stored.items():
        if name != "__metadata__" and not (isinstance(entry, dict) and entry.keys() == ENTRY_KEYS):
            raise ValueError("an entry with other keys")
    return stored


def is_legal(data: bytes, text: bytes) -> bool:
    """Whether both the package and the format's description allow the file."""
    try:
        deserialize(data)
        as_described(text)
    except (SafetensorError, ValueError, RecursionError):
        return False
    return True


def check_text(text: bytes, header: Header) -> None:
    """The accepted text against the json module's view of it and the format's description."""
    try:
        stored = as_described(text)
    except ValueError as error:
        raise AcceptedLieError(f"against the format's description: {error}") from error
    metadata = stored.pop("__metadata__", {})
    need(header.metadata == metadata, "metadata", header.metadata, metadata)
    need(all(type(value) is str for value in metadata.values()), "metadata of strings", metadata)
    need(list(header) == list(stored), "names in order", list(header))
    for name, entry in stored.items():
        info = header.info(name)
        need(info.dtype == entry["dtype"], "a dtype", name, info, entry)
        numbers = [*entry["shape"], *entry["data_offsets"]]
        need(all(type(number) is int for number in numbers), "integers", name, entry)
        need([*info.shape, info.begin, info.end] == numbers, "numbers", name, info, entry)


def check_both_ways(text: bytes) -> None:
    """Where the C takes the header's text apart, the json module must do so alike."""
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        return  # neither way is asked
    plain = _plain_columns(text.rstrip(b" "))
    if plain is None:
        return
    try:
        slow = _json_columns(decoded.rstrip(" "), None)
    except HeaderError as error:
        twice = len(set(plain.names)) < len(plain.names)
        refused = error.code is ErrorCode.HEADER_DUPLICATE_KEY
        need(twice and refused, "read in C and refused by json", text, error)
        return
    need(spelled_out(plain) == spelled_out(slow), "two readings", text, plain, slow)


def spelled_out(columns: Columns) -> tuple[object, ...]:
    kinds = [columns.kinds[number] for number in columns.row_kinds]
    rows = list(zip(columns.names, kinds, columns.begins, columns.ends, strict=True))
    return columns.metadata, rows, list(dict.fromkeys(chain(kinds))) == list(columns.kinds)


def fresh(random: Random) -> bytes:
    """The text of a legal header, most often."""
    members, at = [], 0
    names = random.sample(NAMES, random.choice((0, 1, 1, 2, 3)))
    for name in names:
        dtype = random.choice(DTYPES)
        shape = random.choices(DIMENSIONS, k=random.choice((0, 1, 1, 2, 3)))
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        values = [f'"{dtype}"', json.dumps(shape, separators=(",", ":")), f"[{at},{at + size}]"]
        entry = list(zip(("dtype", "shape", "data_offsets"), values, strict=True))
        if random.random() < 0.1:
            random.shuffle(entry)
        members.append((name, fresh_object(entry, random)))
        at += size
    if random.random() < 0.1:
        random.shuffle(members)
    if random.random() < 0.3:
        metadata = [(name, json.dumps(name)) for name in random.sample(NAMES, 2)]
        members.insert(0, ("__metadata__", fresh_object(metadata, random)))
    return fresh_object(members, random).encode() + b" " * random.choice((0, 0, 1, 7))


def mutate(data: bytes, bytes_max: int, random: Random, change: Callable[[bytes], bytes]) -> bytes:
    """Another file; most often its length field and its payload are made to fit its text."""
    if random.random() < 0.05:
        return change(data)
    is_fresh = random.random() < 0.25
    text = fresh(random) if is_fresh else data[8 : 8 + int.from_bytes(data[:8], "little")]
    if not is_fresh or random.random() < 0.7:
        text = changed_json(text, random, change, PIECES)
    payload_bytes = max((int(n) for n in LAST_OFFSET.findall(text)), default=0)
    if random.random() < 0.04:
        payload_bytes = max(0, payload_bytes + random.choice((-1, 1)))
    made = len(text).to_bytes(8, "little") + text + PAYLOAD[:payload_bytes]
    return made if len(made) <= bytes_max else change(data)
