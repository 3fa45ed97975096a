"""The index: what its text may hold, and which of its values could lead out of its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files import INDEX_NAME, write_checkpoint, write_index, write_shard
from support.headers import LFS_POINTER

from kda_stream import ShardIndexError, open_checkpoint
from kda_stream.checkpoint.index import Index, parse_index
from kda_stream.errors import ErrorCode as Code

SHARD = "model-00001-of-00001.safetensors"


def refusal(text: str | bytes) -> ShardIndexError:
    text = text.encode("utf-8") if isinstance(text, str) else text
    with pytest.raises(ShardIndexError) as caught:
        parse_index(text, path="folder/" + INDEX_NAME)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.path == "folder/" + INDEX_NAME
    assert error.hint
    assert str(error).startswith("folder/" + INDEX_NAME + ": ")
    assert str(error).isprintable()
    return error


def index_text(weight_map: object, **members: object) -> str:
    return json.dumps({"weight_map": weight_map, **members})


# What it may hold --------------------------------------------------------------------------------


def test_an_index_is_a_map_from_tensor_to_shard_in_its_own_order() -> None:
    weight_map = {"b": "2.safetensors", "a": "1.safetensors", "c": "2.safetensors"}
    index = parse_index(index_text(weight_map, metadata={"total_size": 123}).encode())
    assert list(index.weight_map.items()) == list(weight_map.items())
    assert index.total_size == 123


def test_an_index_needs_no_metadata() -> None:
    assert parse_index(index_text({"a": SHARD}).encode()) == Index({"a": SHARD}, {SHARD: 1}, None)


@pytest.mark.parametrize(
    "metadata", ["{}", "null", "[]", '"x"', '{"total_parameters":5}', '{"total_size":null}']
)
def test_metadata_without_a_size_is_no_claim(metadata: str) -> None:
    index = parse_index(f'{{"metadata":{metadata},"weight_map":{{"a":"{SHARD}"}}}}'.encode())
    assert index.total_size is None


@pytest.mark.parametrize(
    "claim", ['"12"', "[]", "{}", "true", "-5", "1.5", "1E400", "-1E400", "9" * 5000]
)
def test_a_total_size_that_is_no_size_is_no_fault_of_the_weights(claim: str) -> None:
    text = f'{{"metadata":{{"total_size":{claim}}},"weight_map":{{"a":"{SHARD}"}}}}'
    index = parse_index(text.encode())
    assert index.total_size is None or type(index.total_size) is int
    assert dict(index.weight_map) == {"a": SHARD}


def test_a_total_size_that_is_written_as_a_float_is_understood() -> None:
    text = index_text({"a": SHARD}, metadata={"total_size": 328326771576.0})
    assert parse_index(text.encode()).total_size == 328326771576


def test_other_members_of_an_index_are_no_fault() -> None:
    text = index_text({"a": SHARD}, comment="by hand", layers=[1, 2])
    assert dict(parse_index(text.encode()).weight_map) == {"a": SHARD}


@pytest.mark.parametrize(
    "name",
    [
        SHARD,
        "model.safetensors",
        "mod\u00e8le.safetensors",
        "a b.safetensors",
        "..a",
        "a..b",
        "...",
        "-",
    ],
)
def test_a_plain_file_name_is_a_shard(name: str) -> None:
    assert dict(parse_index(index_text({"a": name}).encode()).weight_map) == {"a": name}


# What it may not ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "../../etc/passwd",
        "..",
        ".",
        "",
        "/abs.safetensors",
        "/etc/passwd",
        "//host/share/x",
        "sub/x.safetensors",
        "./x.safetensors",
        "x.safetensors/",
        "x/../y.safetensors",
        "C:\\x.safetensors",
        "C:x.safetensors",
        "..\\x.safetensors",
        "sub\\x.safetensors",
        "\\\\host\\share\\x",
        "a\nb.safetensors",
        "a\0.safetensors",
        "a\x1b[31m.safetensors",
        "a\x7f.safetensors",
        "\ud800.safetensors",
    ],
    ids=ascii,
)
def test_a_shard_name_that_is_no_plain_file_name_is_refused(name: str) -> None:
    error = refusal(index_text({"good": SHARD, "model.norm.weight": name}))
    assert error.code is Code.INDEX_SHARD_NAME
    assert error.tensor == "model.norm.weight"


@pytest.mark.parametrize("value", [1, 1.5, True, None, [], [SHARD], {}, {"file": SHARD}], ids=repr)
def test_a_shard_name_that_is_no_string_is_refused(value: object) -> None:
    error = refusal(index_text({"good": SHARD, "model.norm.weight": value}))
    assert error.code in (Code.INDEX_SHARD_NAME, Code.INDEX_WEIGHT_MAP)
    assert "model.norm.weight" in str(error)


@pytest.mark.parametrize(
    "text",
    ["{}", '{"metadata":{"total_size":1}}', '{"Weight_Map":{}}', "[]", "null", "1", '"weight_map"']
    + [f'{{"weight_map":{value}}}' for value in ("null", "[]", '"x"', "1", "true", '[["a","b"]]')],
)
def test_an_index_without_a_weight_map_is_refused(text: str) -> None:
    assert refusal(text).code is Code.INDEX_WEIGHT_MAP


@pytest.mark.parametrize(
    "text",
    [
        f'{{"weight_map":{{"a":"{SHARD}","a":"{SHARD}"}}}}',
        f'{{"weight_map":{{"a":"1.safetensors","b":"{SHARD}","a":"2.safetensors"}}}}',
        f'{{"weight_map":{{"a":"{SHARD}","\\u0061":"{SHARD}"}}}}',
        f'{{"weight_map":{{"b":"{SHARD}"}},"weight_map":{{"a":"{SHARD}"}}}}',
    ],
)
def test_a_name_that_an_index_gives_twice_is_refused_and_told(text: str) -> None:
    error = refusal(text)
    assert ("weight_map" if text.count("weight_map") > 1 else "a") in (error.tensor, error.got) or (
        "twice" in str(error)
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"\0" * 64,
        index_text({"a": SHARD}).encode()[:-1],
        index_text({"a": SHARD}).encode() + b"}",
        f'{{"weight_map":{{"a":"{SHARD}",}}}}'.encode(),
        f"{{'weight_map':{{'a':'{SHARD}'}}}}".encode(),
        f'{{"weight_map":{{"a":NaN}},"b":"{SHARD}"}}'.encode(),
        b"<!DOCTYPE html><html><body>Not found</body></html>",
        LFS_POINTER,
        b"\xef\xbb\xbf" + index_text({"a": SHARD}).encode(),
        index_text({"a": SHARD}).encode("utf-16"),
        b'{"weight_map":{"\xff":"a.safetensors"}}',
        b'{"weight_map":' * 100_000,
        b'{"weight_map":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_an_index_that_is_not_json_is_refused(text: bytes) -> None:
    assert refusal(text).code is Code.INDEX_NOT_JSON


@settings(max_examples=300, deadline=None)
@given(
    value=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["weight_map", "metadata", "total_size", "a"]), inner),
        ),
    )
)
def test_whatever_an_index_holds_the_answer_is_an_index_or_its_error(value: object) -> None:
    answers: list[object] = []
    try:
        answers.append(parse_index(json.dumps(value).encode()))
    except ShardIndexError as error:
        answers.append(error)
    assert len(answers) == 1
    if isinstance(answers[0], Index):
        assert isinstance(value, dict)
        assert dict(answers[0].weight_map) == value["weight_map"]


# On the disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"], ids=ascii)
def test_a_tensor_name_that_no_header_can_hold_is_refused_in_print(
    name: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "folder", {SHARD: {"a": b"1"}})
    write_index(folder, {"a": SHARD, name: SHARD})
    with pytest.raises(ShardIndexError) as caught:
        open_checkpoint(folder)
    assert str(caught.value).isprintable()
    assert ascii(name)[1:-1] in str(caught.value)


def test_a_value_that_leads_out_of_the_folder_is_refused_though_the_file_is_there(
    tmp_path: Path,
) -> None:
    write_shard(tmp_path / "outside.safetensors", {"a": b"secret"})
    folder = write_checkpoint(tmp_path / "folder", {SHARD: {"b": b"1"}})
    write_index(folder, {"b": SHARD, "a": "../outside.safetensors"})
    with pytest.raises(ShardIndexError) as caught:
        open_checkpoint(folder)
    assert caught.value.code is Code.INDEX_SHARD_NAME
    assert "../outside.safetensors" in str(caught.value)


@pytest.mark.parametrize("claim", [0, 4, 6, 2**63])
def test_a_wrong_total_size_is_noted_and_not_refused(claim: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", {SHARD: {"a": b"12345"}})
    write_index(folder, {"a": SHARD}, metadata={"total_size": claim})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.report.tensor_bytes == 5
        assert any("total_size" in note for note in checkpoint.report.notes)


def test_a_right_total_size_is_not_noted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", {SHARD: {"a": b"12345"}})
    write_index(folder, {"a": SHARD}, metadata={"total_size": 5})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.report.total_size_listed == checkpoint.report.tensor_bytes == 5
        assert checkpoint.report.notes == ()


def test_an_index_that_is_another_file_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", {SHARD: {"a": b"1"}}, {"num_hidden_layers": 1})
    with pytest.raises(ShardIndexError) as caught:
        open_checkpoint(folder / "config.json")
    assert caught.value.code is Code.INDEX_WEIGHT_MAP
    assert caught.value.path == str(folder / "config.json")
