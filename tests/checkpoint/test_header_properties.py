"""Headers that nobody wrote by hand, with the safetensors package as the judge.

Three properties: what the package writes is read as the package reads it; whatever is done to a
file, it is never read where the package refuses it, nor read otherwise; and the two ways through a
header's text, in C and by the json module, never differ.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from safetensors import TensorSpec, deserialize, safe_open, serialize
from support.files import shard_bytes
from support.headers import BROKEN, ODD

from kda_stream import HeaderError, open_checkpoint
from kda_stream.checkpoint.header import Header, header_length, parse_header
from kda_stream.checkpoint.header_text import Columns, _json_columns, _plain_columns
from kda_stream.errors import ErrorCode as Code

Seen = dict[str, tuple[str, tuple[int, ...]]]

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
