"""The form that writers emit, taken apart in C: it is never laxer than the json module's way.

Each text here goes both ways. What the C does not leave to the json module must be legal, and mean
what the json module says.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import event, example, given, settings

from kda_stream import HeaderError, ShardIndexError
from kda_stream.checkpoint import plain
from kda_stream.checkpoint.header import parse_header
from kda_stream.checkpoint.header_text import Columns, _json_columns, _plain_columns
from kda_stream.checkpoint.index import Index, _json_index, _plain_index, parse_index
from kda_stream.errors import ErrorCode as Code

GOOD = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
NEXT = '{"dtype":"U8","shape":[2],"data_offsets":[2,4]}'
SHARD = "model-00001-of-00002.safetensors"


def spelled_out(columns: Columns) -> list[object]:
    kinds = [columns.kinds[number] for number in columns.row_kinds]
    return [
        columns.metadata,
        list(zip(columns.names, kinds, columns.begins, columns.ends, strict=True)),
    ]


# A header, byte by byte --------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 20))
def test_each_ascii_character_at_each_place_of_a_name(length: int) -> None:
    """The C looks at eight bytes at once where it can: no place among them may be overlooked."""
    for place in range(length):
        for code in range(128):
            name = "n" * place + chr(code) + "n" * (length - place - 1)
            text = f'{{"{name}":{GOOD}}}'
            columns = _plain_columns(text.encode())
            assert (columns is not None) == (code >= 0x20 and chr(code) not in '"\\'), repr(text)
            if columns is not None:
                assert spelled_out(columns) == spelled_out(_json_columns(text, None))


@pytest.mark.parametrize("character", ["\u00e9", "\u2028", "\ufeff", "\U0001f600", "\x7f"])
@pytest.mark.parametrize("before", range(9))
def test_a_character_of_several_bytes_at_each_place_of_a_name(before: int, character: str) -> None:
    text = f'{{"{"n" * before}{character}{"n" * 8}":{GOOD}}}'
    columns = _plain_columns(text.encode())
    assert columns is not None
    assert spelled_out(columns) == spelled_out(_json_columns(text, None))


def test_each_byte_of_a_header_changed_into_each_other() -> None:
    whole = f'{{"__metadata__":{{"a":"b"}},"first":{GOOD},"second":{NEXT}}}'
    read = 0
    for place in range(len(whole)):
        for code in range(128):
            text = whole[:place] + chr(code) + whole[place + 1 :]
            columns = _plain_columns(text.encode())
            if columns is None:
                continue
            read += 1
            if len(set(columns.names)) == len(columns.names):
                assert spelled_out(columns) == spelled_out(_json_columns(text, None)), text
    assert read > len(whole)


# What a quick reader might let through -----------------------------------------------------------

HEADERS = {
    f'{{"a":{{"dtype":1}},"a":{GOOD}}}': Code.HEADER_DUPLICATE_KEY,
    f'{{"a":{GOOD},"a":{{"dtype":1}}}}': Code.HEADER_DUPLICATE_KEY,
    f'{{"a":{GOOD},"a":{GOOD}}}': Code.HEADER_DUPLICATE_KEY,
    f'{{"a":{GOOD},"\\u0061":{NEXT}}}': Code.HEADER_DUPLICATE_KEY,
    f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{GOOD}}}': Code.HEADER_DUPLICATE_KEY,
    f'{{"__metadata__":{{}},"__metadata__":{GOOD}}}': Code.HEADER_DUPLICATE_KEY,
    f'{{"__metadata__":{{"a":"b","a":"b"}},"a":{GOOD}}}': Code.HEADER_DUPLICATE_KEY,
    f'{{"__metadata__":{GOOD}}}': Code.HEADER_METADATA,
    f'{{"a":{GOOD},"__metadata__":{NEXT}}}': Code.HEADER_METADATA,
    '{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}': Code.HEADER_DUPLICATE_KEY,
    '{"a":{"dtype":"F3","dtype":"U8","shape":[2],"data_offsets":[0,2]}}': Code.HEADER_DUPLICATE_KEY,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":1}}': Code.ENTRY_KEYS,
    '{"a":{"x":1,"dtype":"U8","shape":[2],"data_offsets":[0,2]}}': Code.ENTRY_KEYS,
    '{"a":{"dtype":"U8","shape":[2]}}': Code.ENTRY_KEYS,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,4]}}': Code.OFFSETS_INVALID,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[2]}}': Code.OFFSETS_INVALID,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,{}]}}': Code.OFFSETS_INVALID,
    '{"a":{"dtype":"U8","shape":[[2]],"data_offsets":[0,2]}}': Code.SHAPE_INVALID,
    '{"a":{"dtype":"U8","shape":{"b":2},"data_offsets":[0,2]}}': Code.SHAPE_INVALID,
    '{"a":{"dtype":"","shape":[2],"data_offsets":[0,2]}}': Code.DTYPE_UNKNOWN,
    '{"a":{"dtype":"u8","shape":[2],"data_offsets":[0,2]}}': Code.DTYPE_UNKNOWN,
    '{"a":{"dtype":"U8 ","shape":[2],"data_offsets":[0,2]}}': Code.DTYPE_UNKNOWN,
    '{"a":{"dtype":"U8\\u0020","shape":[2],"data_offsets":[0,2]}}': Code.DTYPE_UNKNOWN,
    '{"a":{"dtype":"U8","shape":[2,],"data_offsets":[0,2]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[,2],"data_offsets":[0,2]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[02],"data_offsets":[0,2]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[00,2]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,02]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,+2]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[,2]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,Infinity]}}': Code.HEADER_NOT_JSON,
    '{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}': Code.SHAPE_INVALID,
    '{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}': Code.SHAPE_INVALID,
    '{"a":{"dtype":"U8","shape":[2e0],"data_offsets":[0,2]}}': Code.SHAPE_INVALID,
    '{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}': Code.SHAPE_INVALID,
    '{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,2]}}': Code.SHAPE_INVALID,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[-0,2]}}': Code.OFFSETS_INVALID,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1e3]}}': Code.OFFSETS_INVALID,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[false,2]}}': Code.OFFSETS_INVALID,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,18446744073709551616]}}': (
        Code.OFFSETS_INVALID
    ),
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,99999999999999999999]}}': (
        Code.OFFSETS_INVALID
    ),
    '{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,2]}}': Code.SHAPE_OVERFLOW,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,9999999999999999999]}}': Code.OFFSETS_SIZE,
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}': Code.OFFSETS_INVALID,
    f'{{"a":{GOOD},"b":{GOOD}}}': Code.OFFSETS_OVERLAP,
    f'{{"a":{NEXT}}}': Code.OFFSETS_HOLE,
    f'{{"a":{GOOD},}}': Code.HEADER_NOT_JSON,
    f'{{,"a":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"a":{GOOD}"b":{NEXT}}}': Code.HEADER_NOT_JSON,
    f'{{"a":{GOOD},,"b":{NEXT}}}': Code.HEADER_NOT_JSON,
    f'{{"a":{GOOD}}}}}': Code.HEADER_NOT_JSON,
    f'{{"a":{GOOD}}} {{}}': Code.HEADER_NOT_JSON,
    f'{{"a":{GOOD}': Code.HEADER_NOT_JSON,
    f'{{"a":{GOOD[:-1]}}}': Code.HEADER_NOT_JSON,
    f'{{"a"b":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"a\\":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"a\nb":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"a\0b":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"a\\x":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"\\ud800":{GOOD}}}': Code.HEADER_LONE_SURROGATE,
    f'{{"__metadata__":{{"a":"\\udc00"}},"a":{GOOD}}}': Code.HEADER_LONE_SURROGATE,
    f'{{"__metadata__":{{"a":1}},"a":{GOOD}}}': Code.HEADER_METADATA,
    f'{{"__metadata__":{{"a":{{}}}},"a":{GOOD}}}': Code.HEADER_METADATA,
    f'{{"__metadata__":{{"a":"\\"}},"a":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"__metadata__":{{"a":"}},"a":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"__metadata__":{{"a":"b"}}"a":{GOOD}}}': Code.HEADER_NOT_JSON,
    f'{{"__metadata__":null,"a":{GOOD}}}': Code.HEADER_METADATA,
    f'\ufeff{{"a":{GOOD}}}': Code.HEADER_START,
    f' {{"a":{GOOD}}}': Code.HEADER_START,
    f'{{"a":{GOOD}}}\n': Code.HEADER_PADDING,
    f'{{"a":{GOOD}}}\0': Code.HEADER_PADDING,
}

LEGAL = [
    f'{{"a":{GOOD},"b":{NEXT}}}',
    f'{{"b":{NEXT},"a":{GOOD}}}',
    f'{{"a":{GOOD}}}   ',
    f'{{ "a" : {GOOD}}}',
    f'{{"a":\t{GOOD}\r\n}}',
    f'{{"a:b":{GOOD},"{{":{NEXT}}}',
    f'{{"}}":{GOOD},"]}},":{NEXT}}}',
    f'{{"a\\"b":{GOOD},"\\\\":{NEXT}}}',
    f'{{"\\u0061":{GOOD},"\\ud83d\\ude00":{NEXT}}}',
    f'{{"":{GOOD},"\u00e9":{NEXT}}}',
    f'{{"dtype":{GOOD},"shape":{NEXT}}}',
    '{"a":{"\\u0064type":"U8","shape":[2],"data_offsets":[0,2]}}',
    '{"a":{"dtype":"\\u00558","shape":[2],"data_offsets":[0,2]}}',
    '{"a":{"shape":[2],"dtype":"U8","data_offsets":[0,2]}}',
    '{"a":{"dtype":"U8","shape":[2,1],"data_offsets":[0, 2]}}',
    '{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
    '{"a":{"dtype":"U8","shape":[9999999999999999999,0],"data_offsets":[0,0]}}',
    '{"a":{"dtype":"U8","shape":[18446744073709551615,0],"data_offsets":[0,0]}}',
    f'{{"a":{GOOD},"__metadata__":{{"b":"c"}}}}',
    f'{{"__metadata__":{{"a":"}}"}},"a":{GOOD}}}',
    f'{{"__metadata__":{{"a":"{{\\"a\\":"}},"a":{GOOD}}}',
    f'{{"__metadata__":{{"a":"b" , "c":"\u00e9"}},"a":{GOOD}}}',
    "{}",
    '{"__metadata__":{}}',
]


def payload_bytes(text: str) -> int:
    offsets = [entry["data_offsets"][1] for entry in json.loads(text).values() if "shape" in entry]
    return max(offsets, default=0)


@pytest.mark.parametrize(("text", "code"), HEADERS.items(), ids=repr)
def test_a_header_that_a_quick_reader_might_take_is_refused(text: str, code: Code) -> None:
    data = text.encode()
    for file_bytes in (8 + len(data) + 2, 8 + len(data) + 4):
        with pytest.raises(HeaderError) as caught:
            parse_header(data, file_bytes)
        assert caught.value.code is code


@pytest.mark.parametrize("text", LEGAL)
def test_a_legal_header_of_either_form_is_read_alike(text: str) -> None:
    data = text.encode()
    header = parse_header(data, 8 + len(data) + payload_bytes(text))
    stored = json.loads(text)
    assert header.metadata == stored.pop("__metadata__", {})
    assert list(header) == list(stored)
    for name, entry in stored.items():
        info = header.info(name)
        assert [info.dtype, list(info.shape)] == [entry["dtype"], entry["shape"]]
        assert [info.begin, info.end] == entry["data_offsets"]


# An index ----------------------------------------------------------------------------------------

Writer = Callable[[object], str]


@pytest.mark.parametrize(
    "write",
    [
        json.dumps,
        lambda document: json.dumps(document, indent=2) + "\n",
        lambda document: json.dumps(document, indent="\t"),
        lambda document: json.dumps(document, separators=(",", ":")),
        lambda document: json.dumps(document, indent=1).replace("\n", "\r\n"),
    ],
)
@pytest.mark.parametrize("metadata", [None, {}, {"total_size": 7}, {"total_size": 7.0, "a": [1]}])
def test_an_index_as_writers_leave_it_is_read_in_c(
    write: Writer, metadata: dict[str, Any] | None
) -> None:
    places = {"b": "2.safetensors", "a": "1.safetensors", "": "2.safetensors", "a{}": SHARD}
    head = {} if metadata is None else {"metadata": metadata}
    for document in ({**head, "weight_map": places}, {"weight_map": places, **head}):
        text = write(document).encode()
        index = _plain_index(text)
        assert index is not None
        assert list(index.weight_map.items()) == list(places.items())
        assert index == _json_index(text, None)
        assert index.total_size == (metadata or {}).get("total_size")
        assert dict(index.shard_tensors) == Counter(places.values())


@pytest.mark.parametrize("length", range(1, 18))
def test_each_ascii_character_at_each_place_of_an_indexs_name(length: int) -> None:
    for place in range(length):
        for code in range(128):
            name = "n" * place + chr(code) + "n" * (length - place - 1)
            text = f'{{"weight_map":{{"{name}":"{SHARD}"}}}}'.encode()
            index = _plain_index(text)
            assert (index is not None) == (code >= 0x20 and chr(code) not in '"\\'), text
            assert index is None or index == _json_index(text, None)


MAP = f'{{"a":"{SHARD}"}}'
INDEXES = {
    f'{{"weight_map":{{"a":"{SHARD}","a":"{SHARD}"}}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{{"a":"{SHARD}","\\u0061":"{SHARD}"}}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{MAP},"weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{MAP},"weight_map":{{}}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{MAP},"weight_m\\u0061p":{{}}}}': Code.INDEX_NOT_JSON,
    f'{{"metadata":{{"a":1,"a":1}},"weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'{{"metadata":{{"a":"}},"weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'{{"metadata":{{"a":"\\"}},"weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'{{"metadata":{{"a":"\\\\}},"weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'{{"metadata":{{"a":NaN}},"weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'{{"metadata":{{}} "weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{MAP}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{MAP},}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{MAP}}}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{MAP}}} {{}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{{"a":"{SHARD}",}}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{{,"a":"{SHARD}"}}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{{"a":"{SHARD}" "b":"{SHARD}"}}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{{"a":\v"{SHARD}"}}}}': Code.INDEX_NOT_JSON,
    f'{{"weight_map":{{"a":\u00a0"{SHARD}"}}}}': Code.INDEX_NOT_JSON,
    f'{{\f"weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'\ufeff{{"weight_map":{MAP}}}': Code.INDEX_NOT_JSON,
    f'{{"metadata":{{"weight_map":{MAP}}}}}': Code.INDEX_WEIGHT_MAP,
    f'{{"metadata":{{"weight_map":{MAP}}},"weight_map":{{}}}}': Code.INDEX_WEIGHT_MAP,
    f'{{"metadata":{{"a":"b"}},"x":{{"weight_map":{MAP}}}}}': Code.INDEX_WEIGHT_MAP,
    f'[{{"weight_map":{MAP}}}]': Code.INDEX_WEIGHT_MAP,
    '{"weight_map":{}}': Code.INDEX_WEIGHT_MAP,
    '{"weight_map":{"a":1}}': Code.INDEX_SHARD_NAME,
    '{"weight_map":{"a":null}}': Code.INDEX_SHARD_NAME,
    f'{{"weight_map":{{"a":["{SHARD}"]}}}}': Code.INDEX_SHARD_NAME,
    '{"weight_map":{"a":"../b"}}': Code.INDEX_SHARD_NAME,
    '{"weight_map":{"a":"a","b":""}}': Code.INDEX_SHARD_NAME,
    '{"weight_map":{"a":"\\ud800"}}': Code.INDEX_SHARD_NAME,
}


@pytest.mark.parametrize(("text", "code"), INDEXES.items(), ids=repr)
def test_an_index_that_a_quick_reader_might_take_is_refused(text: str, code: Code) -> None:
    assert _plain_index(text.encode()) is None
    with pytest.raises(ShardIndexError) as caught:
        parse_index(text.encode())
    assert caught.value.code is code


def test_an_index_that_is_not_utf8_is_refused_wherever_that_is() -> None:
    good = f'{{"metadata":{{"x":"y"}},"weight_map":{{"abcdefghij":"{SHARD}"}}}}'.encode()
    assert _plain_index(good) is not None
    for place in range(len(good)):
        for byte in (b"\xff", b"\x80", b"\xc3"):
            with pytest.raises(ShardIndexError):
                parse_index(good[:place] + byte + good[place + 1 :])


@st.composite
def index_texts(draw: st.DrawFn) -> str:
    """An index in some form, perhaps with a piece of it moved, doubled or replaced."""
    files = st.sampled_from([SHARD, "a", "\u00e9", "a:b", "", "x" * 9])
    strings = st.one_of(st.text(max_size=9), st.sampled_from(["a", "weight_map", "}", "{", '"']))
    metadata = st.dictionaries(strings, st.one_of(st.integers(), strings, st.just({})), max_size=2)
    document: dict[str, object] = {"weight_map": draw(st.dictionaries(strings, files, max_size=3))}
    if draw(st.booleans()):
        document = {"metadata": draw(metadata), **document}
    text = json.dumps(
        document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
    )
    for _ in range(draw(st.integers(0, 2))):
        a, b, at = sorted(draw(st.integers(0, len(text))) for _ in range(3))
        piece = draw(
            st.sampled_from([text[a:b], "", "{", "}", '"', "\\", ",", ":", " ", "1", "\v"])
        )
        text = text[:at] + piece + text[draw(st.sampled_from([at, b])) :]
    return text


@settings(max_examples=500, deadline=None, print_blob=True)
@given(text=index_texts())
@example(text=f'{{"metadata":{{"a":"}},"weight_map":{{"}},"weight_map":{MAP}}}')
def test_what_the_c_reads_of_an_index_the_json_module_reads_alike(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    index = _plain_index(data)
    if index is None:
        event("left to json")
        return
    event("read in C")
    other = _json_index(data, None)
    assert index == other
    assert list(index.weight_map) == list(other.weight_map)
    assert list(index.shard_tensors) == list(other.shard_tensors)


# The limits --------------------------------------------------------------------------------------


def test_more_kinds_or_files_than_there_is_room_for_are_left_to_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [f'"{n}":{{"dtype":"U8","shape":[0,{n}],"data_offsets":[0,0]}}' for n in range(4)]
    header = ("{" + ",".join(entries) + "}").encode()
    index = json.dumps({"weight_map": {f"t{n}": f"s{n}" for n in range(4)}}).encode()
    assert _plain_columns(header) is not None
    assert isinstance(_plain_index(index), Index)
    monkeypatch.setattr(plain, "_WORDS_MAX", 3)
    assert _plain_columns(header) is None
    assert _plain_index(index) is None
    assert len(parse_header(header, 8 + len(header))) == len(parse_index(index).weight_map) == 4
