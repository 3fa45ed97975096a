"""Headers that nobody wrote by hand, with the safetensors package as the judge.

Three properties: what the package writes, in one file or in many with an index, is read as the
package reads it; whatever is done to a file, it is never read where the package refuses it, nor
read otherwise; and the two ways through a header's text, in C and by the json module, never differ.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from safetensors import SafetensorError, TensorSpec, deserialize, safe_open, serialize
from safetensors.numpy import save_file
from support.files import shard_bytes, write_index
from support.headers import BROKEN, ODD

from kda_stream import Checkpoint, HeaderError, ShardIndexError, open_checkpoint
from kda_stream.checkpoint.header import Header, header_length, parse_header
from kda_stream.checkpoint.header_text import Columns, _json_columns, _plain_columns
from kda_stream.errors import ErrorCode as Code

Seen = dict[str, tuple[str, tuple[int, ...]]]
Array = np.ndarray[Any, Any]

# What the package's writer calls the dtypes, and their width in bytes; F4 comes two in a byte.
WRITER_DTYPES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn"), 1),
    **dict.fromkeys(
        ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), 1
    ),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
}

thorough = settings(
    max_examples=300,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def ours(data: bytes) -> Header:
    """Read `data` as kda_stream does; raises HeaderError."""
    length = header_length(data[:64], len(data))
    return parse_header(data[8 : 8 + length], len(data))


def seen_by_us(header: Header) -> Seen:
    return {name: (header.info(name).dtype, header.info(name).shape) for name in header}


def seen_by_the_package(data: bytes) -> Seen:
    """Read `data` as the safetensors package does; raises SafetensorError."""
    return {name: (part["dtype"], tuple(part["shape"])) for name, part in deserialize(data)}


# Files as the package writes them ----------------------------------------------------------------


def written(stored: Mapping[str, tuple[str, Sequence[int]]], metadata: dict[str, str]) -> bytes:
    """A file that the package wrote; the payload is 0, 1, 2, ... in each tensor."""
    specs, kept = {}, []
    for name, (dtype, shape) in stored.items():
        size = math.prod(shape) * WRITER_DTYPES[dtype]
        buffer = ctypes.create_string_buffer(bytes(n % 256 for n in range(size)), max(size, 1))
        kept.append(buffer)
        specs[name] = TensorSpec(
            dtype=dtype, shape=list(shape), data_ptr=ctypes.addressof(buffer), data_len=size
        )
    return serialize(specs, metadata=metadata or None)


unicode = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.one_of(
    unicode,
    st.sampled_from(["", "__metadata", "a\0", '"', "\\", "\u2028", "\ufeff", "\U0010ffff", "\x7f"]),
    st.builds("model.layers.{}.self_attn.{}".format, st.integers(0, 99), st.sampled_from("abc")),
).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4)
dtypes = st.sampled_from(sorted(WRITER_DTYPES))
tensors = st.tuples(dtypes, shapes).filter(lambda t: bool(t[1]) or not t[0].startswith("float4"))
contents = st.dictionaries(names, tensors, max_size=6)
files = st.builds(written, contents, st.dictionaries(unicode, unicode, max_size=3))
# The package's writer leaves the order of the metadata to chance; these files can be drawn again.
steady_files = st.builds(written, contents, st.dictionaries(unicode, unicode, max_size=1))


@thorough
@given(data=files)
def test_a_file_that_the_package_wrote_is_read_as_the_package_reads_it(
    data: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    length = int.from_bytes(data[:8], "little")
    stored = json.loads(data[8 : 8 + length])
    metadata = stored.pop("__metadata__", {})
    with open_checkpoint(path) as checkpoint, safe_open(path, "np") as opened:
        assert set(checkpoint.keys()) == set(opened.keys()) == set(stored)
        header = checkpoint.shards[path.name].header
        assert dict(header.metadata) == metadata == (opened.metadata() or {})
        assert header.payload_begin == 8 + length
        for name, part in deserialize(data):
            info, slice_ = checkpoint.info(name), opened.get_slice(name)
            assert info.dtype == part["dtype"] == slice_.get_dtype() == stored[name]["dtype"]
            assert list(info.shape) == part["shape"] == slice_.get_shape() == stored[name]["shape"]
            assert [info.begin, info.end] == stored[name]["data_offsets"]
            assert checkpoint.tensor(name).data == part["data"]


# What numpy saves --------------------------------------------------------------------------------

NUMPY_CODES: Mapping[str, str] = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "complex64": "C64",
}


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Any bytes as an array; of truth values, zeros and ones."""
    dtype, shape = np.dtype(draw(st.sampled_from(sorted(NUMPY_CODES)))), draw(shapes)
    data = hashlib.shake_128(draw(st.binary(max_size=8))).digest(math.prod(shape) * dtype.itemsize)
    if dtype.name == "bool":
        data = bytes(value & 1 for value in data)
    return np.frombuffer(data, dtype=dtype).reshape(shape)


dictionaries = st.dictionaries(names, arrays(), max_size=6)


def assert_holds(checkpoint: Checkpoint, saved: Mapping[str, Array]) -> None:
    """Exactly these arrays: names, dtypes, shapes and bytes."""
    assert set(checkpoint.keys()) == set(saved)
    for name, array in saved.items():
        tensor, info = checkpoint.tensor(name), checkpoint.info(name)
        assert tensor.dtype == info.dtype == NUMPY_CODES[array.dtype.name]
        assert tensor.shape == info.shape == array.shape
        assert tensor.data == array.tobytes()
        assert info.end - info.begin == array.nbytes


def offsets_stored(path: Path) -> dict[str, list[int]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: row["data_offsets"] for name, row in header.items() if name != "__metadata__"}


@thorough
@given(saved=dictionaries)
def test_a_dictionary_of_arrays_that_was_saved_opens_with_the_same_arrays(
    saved: Mapping[str, Array], tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(dict(saved), path)
    with open_checkpoint(path) as checkpoint:
        assert_holds(checkpoint, saved)
        infos = {name: checkpoint.info(name) for name in saved}
        assert {n: [i.begin, i.end] for n, i in infos.items()} == offsets_stored(path)


@thorough
@given(saved=dictionaries.filter(bool), data=st.data())
def test_a_dictionary_that_was_saved_in_many_shards_opens_with_the_same_arrays(
    saved: Mapping[str, Array],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("sharded")
    files = [f"model-{n}.safetensors" for n in range(4)]
    places = {name: data.draw(st.sampled_from(files)) for name in saved}
    for file in set(places.values()):
        save_file({name: saved[name] for name in saved if places[name] == file}, folder / file)
    order = data.draw(st.permutations(sorted(places)))
    write_index(folder, {name: places[name] for name in order})
    for verify in ("all", "needed"):
        with open_checkpoint(folder, verify=verify) as checkpoint:
            assert checkpoint.keys() == order
            assert_holds(checkpoint, saved)
            assert {n: checkpoint.shard_of(n).file_name for n in saved} == places
            for file in set(places.values()):
                header = checkpoint.shards[file].header
                infos = {name: header.info(name) for name in header}
                assert {n: [i.begin, i.end] for n, i in infos.items()} == offsets_stored(
                    folder / file
                )


# Files that something was done to ----------------------------------------------------------------

VALID = [odd.data for odd in ODD.values() if len(odd.data) < 2000]
INVALID = [data for rows in BROKEN.values() for data in rows.values() if len(data) < 2000]
NUMBERS = ["0", "1", "2", "3", "4", "7", "8", "16", "-0", "-1", "1.0", "2e0", "true", "null", '"2"']
NUMBERS += [
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775808",
    "4611686018427387904",
]
PIECES = [
    *'{}[],:"\\ \n\t\r\0',
    "\ufeff",
    "\u00a0",
    r"\u0061",
    r"\ud800",
    r"\udc00",
    r"\n",
    ",,",
    "{}",
    "[]",
]
PIECES += [
    '"__metadata__":',
    '"__metadata__":{},',
    '"a":',
    '"dtype":"U8",',
    '"shape":[2],',
    '"x":0,',
]
PIECES += ['"U8"', '"F4"', '"F6_E2M3"', '"BF16"', '"F128"', '"data_offsets":[0,2]', "NaN", "1E999"]
METADATA = [
    '{"a":"b","a":"c"}',
    '{"a":1}',
    "null",
    "[]",
    r'{"a":"\ud800"}',
    r'{"\udc00":"a"}',
    '{"a":"}"}',
]
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9.eE+]+|[^\s]|\s+', re.DOTALL)
NUMBER = re.compile(r"(?<![\w.-])[0-9]+(?![\w.])")


def is_unicode(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _flipped(draw: st.DrawFn, text: str) -> str:
    data = bytearray(text.encode("utf-8", "surrogateescape"))
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return data.decode("utf-8", "surrogateescape")


def _spliced(draw: st.DrawFn, text: str) -> str:
    at = draw(st.integers(0, len(text)))
    gone = draw(st.integers(0, 4))
    return text[:at] + draw(st.sampled_from(PIECES)) + text[at + gone :]


def _cut(draw: st.DrawFn, text: str) -> str:
    begin = draw(st.integers(0, len(text)))
    return text[:begin] + text[draw(st.integers(begin, len(text))) :]


def _tokens_moved(draw: st.DrawFn, text: str) -> str:
    tokens = TOKEN.findall(text)
    a, b = (draw(st.integers(0, len(tokens) - 1)) for _ in "ab")
    if draw(st.booleans()):
        tokens[a], tokens[b] = tokens[b], tokens[a]
    else:
        tokens.insert(b, tokens[a])
    return "".join(tokens)


def _spaced(draw: st.DrawFn, text: str) -> str:
    tokens = TOKEN.findall(text)
    tokens.insert(draw(st.integers(0, len(tokens))), draw(st.sampled_from(" \n\t\r\f\v\0\u00a0")))
    return "".join(tokens)


def _number_edited(draw: st.DrawFn, text: str) -> str:
    found = list(NUMBER.finditer(text))
    if not found:
        return text
    at = draw(st.sampled_from(found))
    return text[: at.start()] + draw(st.sampled_from(NUMBERS)) + text[at.end() :]


def _entries_moved(draw: st.DrawFn, text: str) -> str:
    """Other order of entries, or of the keys in them; one of them twice, or under another name."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(document, dict) or not document:
        return text
    members = list(document.items())
    members = list(draw(st.permutations(members)))
    if draw(st.booleans()):
        members.append((draw(names), draw(st.sampled_from(members))[1]))
    parts = []
    for name, value in members:
        if isinstance(value, dict) and draw(st.booleans()):
            value = dict(draw(st.permutations(list(value.items()))))
        ascii_only = draw(st.booleans()) or not is_unicode(name)
        body = json.dumps(value, separators=(",", ":"))
        parts.append(f"{json.dumps(name, ensure_ascii=ascii_only)}:{body}")
    return "{" + ",".join(parts) + "}"


CHANGES = (_flipped, _spliced, _cut, _tokens_moved, _spaced, _number_edited, _entries_moved)


def _header_text(data: bytes) -> str:
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length].decode("utf-8", "surrogateescape")


@st.composite
def plain_texts(draw: st.DrawFn) -> str:
    """A header in the form that the package writes, with a few values that are wrong for it."""
    numbers = st.one_of(st.integers(0, 9).map(str), st.sampled_from(NUMBERS))
    parts = []
    if draw(st.booleans()):
        members = st.dictionaries(unicode, unicode, max_size=2).map(json.dumps)
        parts.append(f'"__metadata__":{draw(st.one_of(members, st.sampled_from(METADATA)))}')
    for _ in range(draw(st.integers(0, 3))):
        name = json.dumps(draw(names), ensure_ascii=draw(st.booleans()))
        dtype = draw(st.sampled_from(["U8", "F4", "BF16", "F128", "bf16", "", "U8 ", r"\u0055"]))
        shape, offsets = ",".join(draw(st.lists(numbers, max_size=3))), draw(numbers)
        parts.append(
            f'{name}:{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets},{draw(numbers)}]}}'
        )
    return "{" + ",".join(parts) + "}"


@st.composite
def changed_texts(draw: st.DrawFn) -> str:
    """A header's text with some changes; it may hold what is not UTF-8, escaped."""
    whole = st.one_of(steady_files, st.sampled_from(VALID), st.sampled_from(INVALID)).map(
        _header_text
    )
    text = draw(st.one_of(plain_texts(), whole))
    for _ in range(draw(st.integers(0, 2))):
        if text:
            text = draw(st.sampled_from(CHANGES))(draw, text)
    return text


@st.composite
def changed_files(draw: st.DrawFn) -> bytes:
    """A file with some changes; most often its length field and its size are made to fit again."""
    text = draw(changed_texts()).encode("utf-8", "surrogateescape")
    ends = [int(n) for n in re.findall(rb"([0-9]{1,4})\]\}", text)]
    size = max(ends, default=0)
    if draw(st.integers(0, 9)) == 0:
        size = draw(st.integers(0, 64))
    data = shard_bytes(text, bytes(n % 256 for n in range(size)))
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    return data


@settings(thorough, max_examples=1000)
@given(data=changed_files())
def test_a_changed_file_is_never_read_where_the_package_refuses_it(data: bytes) -> None:
    try:
        header = ours(data)
    except HeaderError:
        event("refused")
        return
    event("accepted")
    assert seen_by_the_package(data) == seen_by_us(header)
    for name, part in deserialize(data):
        info = header.info(name)
        begin, end = header.payload_begin + info.begin, header.payload_begin + info.end
        assert data[begin:end] == part["data"]


@settings(thorough, max_examples=1000)
@given(data=st.one_of(changed_files(), st.binary(max_size=64)))
def test_whatever_a_file_holds_the_answer_is_a_header_or_a_header_error(data: bytes) -> None:
    answers: list[HeaderError] = []
    try:
        ours(data)
    except HeaderError as error:
        answers.append(error)
    assert all(str(error).isprintable() for error in answers)


@pytest.mark.parametrize("data", VALID, ids=lambda data: repr(data[8:48]))
def test_no_flip_of_one_bit_is_read_where_the_package_refuses_it(data: bytes) -> None:
    begin = 8 + int.from_bytes(data[:8], "little")
    for bit in range(8 * min(begin, 200)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            header = ours(bytes(flipped))
        except HeaderError:
            continue
        assert seen_by_the_package(bytes(flipped)) == seen_by_us(header)


@pytest.mark.parametrize("data", VALID, ids=lambda data: repr(data[8:48]))
def test_no_cut_of_a_file_is_read(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(HeaderError):
            ours(data[:end])


# Whole files that something was done to ----------------------------------------------------------
# A change is told the file and another one.


def _bits_flipped(draw: st.DrawFn, data: bytes, _: bytes) -> bytes:
    flipped = bytearray(data)
    for _flip in range(draw(st.integers(1, 3))):
        flipped[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(flipped)


def _stretch(draw: st.DrawFn, data: bytes) -> tuple[int, int]:
    begin = draw(st.integers(0, len(data)))
    return begin, draw(st.integers(begin, len(data)))


def _cut_off(draw: st.DrawFn, data: bytes, _: bytes) -> bytes:
    return data[: draw(st.integers(0, len(data)))]


def _cut_out(draw: st.DrawFn, data: bytes, _: bytes) -> bytes:
    begin, end = _stretch(draw, data)
    return data[:begin] + data[end:]


def _spliced_with(draw: st.DrawFn, data: bytes, other: bytes) -> bytes:
    """The beginning of one and the end of the other; often where header and payload meet."""
    at, behind = (
        draw(st.one_of(st.integers(0, len(x)), st.just(_payload_begin(x)))) for x in (data, other)
    )
    return data[:at] + other[behind:]


def _pasted_into(draw: st.DrawFn, data: bytes, other: bytes) -> bytes:
    """A stretch of the other, put between or over what is there."""
    begin, end = _stretch(draw, other)
    at = draw(st.integers(0, len(data)))
    return data[:at] + other[begin:end] + data[at + draw(st.sampled_from([0, end - begin])) :]


def _stretches_swapped(draw: st.DrawFn, data: bytes, _: bytes) -> bytes:
    a, b, c, d = sorted(draw(st.integers(0, len(data))) for _ in "abcd")
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _entries_swapped(draw: st.DrawFn, data: bytes, _: bytes) -> bytes:
    """Two tensors have each other's name, or each other's dtype, shape or offsets."""
    begin = _payload_begin(data)
    header = _object(data[8:begin])
    tensors = [name for name, row in header.items() if name != "__metadata__" and type(row) is dict]
    if len(tensors) < 2:
        return data
    a, b = draw(st.permutations(tensors))[:2]
    key = draw(st.sampled_from(["name", "dtype", "shape", "data_offsets"]))
    if key == "name":
        header[a], header[b] = header[b], header[a]
    elif key in header[a] and key in header[b]:
        header[a][key], header[b][key] = header[b][key], header[a][key]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=draw(st.booleans()))
    return shard_bytes(text.encode("utf-8", "surrogatepass"), data[begin:])


def _entry_taken_over(draw: st.DrawFn, data: bytes, other: bytes) -> bytes:
    """An entry of the other file, under its own name, or in place of one that is there."""
    begin = _payload_begin(data)
    header, more = _object(data[8:begin]), _object(other[8 : _payload_begin(other)])
    if not more:
        return data
    name = draw(st.sampled_from(sorted(more)))
    header[draw(st.sampled_from([name, *sorted(header)]))] = more[name]
    text = json.dumps(header, separators=(",", ":"))
    return shard_bytes(text, data[begin:])


def _length_changed(draw: st.DrawFn, data: bytes, _: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little") + draw(st.integers(-9, 9))
    return max(length, 0).to_bytes(8, "little") + data[8:]


def _payload_begin(data: bytes) -> int:
    return min(8 + int.from_bytes(data[:8], "little"), len(data))


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


WHOLE_CHANGES = (
    _bits_flipped,
    _cut_off,
    _cut_out,
    _spliced_with,
    _pasted_into,
    _stretches_swapped,
    _entries_swapped,
    _entry_taken_over,
    _length_changed,
)


@st.composite
def changed_wholes(draw: st.DrawFn) -> bytes:
    """A good file to which one or two things were done, and perhaps nothing."""
    good = st.one_of(steady_files, st.sampled_from(VALID))
    data, other = draw(good), draw(good)
    for _ in range(draw(st.integers(0, 2))):
        if data:
            change = draw(st.sampled_from(WHOLE_CHANGES))
            data = change(draw, data, other)
            event(change.__name__)
    return data


STRICTER = {
    Code.HEADER_START,
    Code.HEADER_PADDING,
    Code.HEADER_DUPLICATE_KEY,
    Code.HEADER_METADATA,
    Code.ENTRY_NOT_OBJECT,
    Code.ENTRY_KEYS,
}
"""What is refused here where the package reads the file against the format's own description."""


def package_reads(data: bytes) -> bool:
    try:
        deserialize(data)
    except SafetensorError:
        return False
    return True


def assert_opens_as_the_package_opens(path: Path, checkpoint: Checkpoint) -> None:
    """The same tensors, of the same dtypes and shapes, with the same bytes."""
    stored = deserialize(path.read_bytes())
    with safe_open(path, "np") as opened:
        assert {name for name, _ in stored} == set(opened.keys())
        for name, part in stored:
            tensor, slice_ = checkpoint.tensor(name), opened.get_slice(name)
            assert tensor.dtype == part["dtype"] == slice_.get_dtype()
            assert list(tensor.shape) == part["shape"] == slice_.get_shape()
            assert tensor.data == part["data"]


def opened_or_refused(path: Path) -> Checkpoint | HeaderError | ShardIndexError:
    try:
        return open_checkpoint(path)
    except (HeaderError, ShardIndexError) as error:
        return error


@settings(thorough, max_examples=700)
@given(data=changed_wholes())
def test_a_changed_file_opens_only_where_the_package_opens_it_and_with_the_same_tensors(
    data: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    opened = opened_or_refused(path)
    if not isinstance(opened, Checkpoint):
        event("refused")
        assert not package_reads(data) or opened.code in STRICTER, f"too strict: {opened}"
        return
    event("opened")
    with opened, safe_open(path, "np") as package:
        stored = dict(deserialize(data))
        assert set(opened.keys()) == set(package.keys()) == set(stored)
        for name, part in stored.items():
            tensor, slice_ = opened.tensor(name), package.get_slice(name)
            assert tensor.dtype == part["dtype"] == slice_.get_dtype()
            assert list(tensor.shape) == part["shape"] == slice_.get_shape()
            assert tensor.data == part["data"]


@thorough
@given(shards=st.lists(steady_files, min_size=2, max_size=3), data=st.data())
def test_a_checkpoint_with_a_changed_shard_opens_only_where_the_package_opens_each(
    shards: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    files = [f"model-{n}.safetensors" for n in range(len(shards))]
    places = {
        name: file
        for file, shard in zip(files, shards, strict=True)
        for name, _ in deserialize(shard)
    }
    places = places or {"a": files[0]}
    which = data.draw(st.integers(0, len(shards) - 1))
    change = data.draw(st.sampled_from(WHOLE_CHANGES))
    shards[which] = change(data.draw, shards[which], shards[which - 1])
    for file, shard in zip(files, shards, strict=True):
        (folder / file).write_bytes(shard)
    write_index(folder, places)
    opened = opened_or_refused(folder)
    if not isinstance(opened, Checkpoint):
        event(f"refused: {opened.code.value}")
        return
    event("opened")
    with opened:
        named = [shard for file, shard in zip(files, shards, strict=True) if file in opened.shards]
        stored = dict(zip(opened.shards, map(dict, map(deserialize, named)), strict=True))
        assert opened.keys() == list(places)
        for name, file in places.items():
            tensor, part = opened.tensor(name), stored[file][name]
            assert (tensor.dtype, list(tensor.shape)) == (part["dtype"], part["shape"])
            assert tensor.data == part["data"]


# The two ways through a header's text ------------------------------------------------------------


def spelled_out(columns: Columns) -> list[object]:
    kinds = [columns.kinds[number] for number in columns.row_kinds]
    return [
        columns.metadata,
        list(zip(columns.names, kinds, columns.begins, columns.ends, strict=True)),
    ]


@settings(thorough, max_examples=1000)
@given(text=changed_texts())
@example(
    text=r'{"__metadata__":{"a":"\ud800"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
)
@example(text='{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,9999999999999999999]}}')
@example(text='{"a":{"dtype":"U8","shape":[9999999999999999999],"data_offsets":[0,2]}}')
@example(text='{"a":{"dtype":"U8","shape":[02],"data_offsets":[0,2]}}')
@example(text='{"a":{"dtype":"U8","shape":[,],"data_offsets":[0,2]}}')
@example(
    text='{"__metadata__":{"a":"b","a":"c"},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'
)
@example(text='{"__metadata__":{},"__metadata__":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}')
def test_what_the_c_reads_of_a_header_the_json_module_reads_alike(text: str) -> None:
    if not is_unicode(text):
        return  # not UTF-8: neither way is asked
    try:
        plain = _plain_columns(text.encode())
    except HeaderError:
        plain = None
    if plain is None:
        event("left to json")
        return
    event("read in C")
    if len(set(plain.names)) < len(plain.names):
        with pytest.raises(HeaderError) as caught:
            _json_columns(text, None)
        assert caught.value.code is Code.HEADER_DUPLICATE_KEY
        return
    assert spelled_out(plain) == spelled_out(_json_columns(text, None))


@thorough
@given(data=files)
def test_what_the_package_writes_without_escapes_is_read_in_c(data: bytes) -> None:
    text = _header_text(data).rstrip(" ")
    stored = json.loads(text)
    metadata = "".join(chain.from_iterable(stored.pop("__metadata__", {}).items()))
    if not stored or "\\" in text or "{" in metadata or "}" in metadata:
        return
    plain = _plain_columns(text.encode())
    assert plain is not None
    assert spelled_out(plain) == spelled_out(_json_columns(text, None))
