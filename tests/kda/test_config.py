"""`KdaConfig`: the geometry, read from a config.json in every spelling, or refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import GLM, config_json

from kda_stream import ConfigError, ErrorCode, KdaConfig, PathError

Json = dict[str, Any]

GLM_CONFIG = KdaConfig(hidden=4096, heads=64, head_dim=128, conv_kernel=4)

FIELDS = ("hidden", "heads", "head_dim", "conv_kernel")
NOT_COUNTS = [0, -4, True, False, 4.0, "64", [64], {}, 10**30]
NOT_COUNT_IDS = [repr(value) for value in NOT_COUNTS]

# Where each field stands, in the official spelling and in that of the transformers library.
OFFICIAL = {
    "hidden": ("hidden_size",),
    "heads": ("linear_attn_config", "num_heads"),
    "head_dim": ("linear_attn_config", "head_dim"),
    "conv_kernel": ("linear_attn_config", "short_conv_kernel_size"),
}
TRANSFORMERS = {
    "hidden": ("hidden_size",),
    "heads": ("linear_num_heads",),
    "head_dim": ("linear_head_dim",),
    "conv_kernel": ("linear_conv_kernel_dim",),
}
SPELLINGS = {"official": OFFICIAL, "transformers": TRANSFORMERS}
VALUES = {"hidden": 4096, "heads": 64, "head_dim": 128, "conv_kernel": 4}


def put(into: Json, path: tuple[str, ...], value: object) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = value


def drop(out_of: Json, path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        out_of = out_of[key]
    del out_of[path[-1]]


def spelled(spelling: dict[str, tuple[str, ...]], *, nested: bool) -> Json:
    geometry: Json = {}
    for name, path in spelling.items():
        put(geometry, path, VALUES[name])
    return {"text_config": geometry} if nested else geometry


def inner(config: Json) -> Json:
    found: Json = config.get("text_config", config)
    return found


def refused(config: Json | str | os.PathLike[str], code: ErrorCode) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        KdaConfig.from_json(config)
    assert caught.value.code is code, caught.value
    assert "\n" not in str(caught.value)
    return caught.value


both_spellings = pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
nested_or_not = pytest.mark.parametrize("nested", [True, False], ids=["nested", "at the top"])
each_field = pytest.mark.parametrize("field", FIELDS)


# --- what is read ---------------------------------------------------------------------------------


@both_spellings
@nested_or_not
def test_each_spelling_is_read_at_either_place(
    spelling: dict[str, tuple[str, ...]], nested: bool
) -> None:
    assert KdaConfig.from_json(spelled(spelling, nested=nested)) == GLM_CONFIG


def test_the_official_config_is_read() -> None:
    assert KdaConfig.from_json(config_json(GLM, 45, mtp=True)) == GLM_CONFIG


def test_the_config_of_kimi_linear_is_read() -> None:
    kimi = {
        "head_dim": 72,
        "hidden_size": 2304,
        "num_attention_heads": 32,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [1, 2, 3, 5],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    }
    assert KdaConfig.from_json(kimi) == KdaConfig(2304, 32, 128, 4)


def test_keys_of_another_attention_do_not_stand_in() -> None:
    config = spelled(TRANSFORMERS, nested=True)
    drop(inner(config), ("linear_head_dim",))
    inner(config)["head_dim"] = 128
    refused(config, ErrorCode.CONFIG_KEY_MISSING)


@nested_or_not
def test_both_spellings_may_be_given_when_they_agree(nested: bool) -> None:
    config = spelled(OFFICIAL, nested=nested)
    for name, path in TRANSFORMERS.items():
        put(inner(config), path, VALUES[name])
    assert KdaConfig.from_json(config) == GLM_CONFIG


@both_spellings
def test_both_places_may_be_given_when_they_agree(spelling: dict[str, tuple[str, ...]]) -> None:
    top = spelled(spelling, nested=False)
    assert KdaConfig.from_json({**top, **spelled(spelling, nested=True)}) == GLM_CONFIG


def test_one_value_of_each_spelling_is_enough() -> None:
    config = spelled(OFFICIAL, nested=True)
    drop(inner(config), OFFICIAL["heads"])
    put(inner(config), TRANSFORMERS["heads"], 64)
    assert KdaConfig.from_json(config) == GLM_CONFIG


@pytest.mark.parametrize("as_path", [Path, str], ids=["Path", "str"])
def test_a_path_gives_what_the_parsed_object_gives(tmp_path: Path, as_path: type) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_json(GLM, 45, mtp=True)))
    assert KdaConfig.from_json(as_path(file)) == GLM_CONFIG


def test_the_parsed_object_is_left_as_it_was() -> None:
    config = spelled(OFFICIAL, nested=True)
    before = copy.deepcopy(config)
    KdaConfig.from_json(config)
    assert config == before


# --- what is refused ------------------------------------------------------------------------------


@both_spellings
@nested_or_not
@each_field
def test_a_missing_key_is_refused_by_name(
    spelling: dict[str, tuple[str, ...]], nested: bool, field: str
) -> None:
    config = spelled(spelling, nested=nested)
    drop(inner(config), spelling[field])
    error = refused(config, ErrorCode.CONFIG_KEY_MISSING)
    assert OFFICIAL[field][-1] in str(error)
    assert TRANSFORMERS[field][-1] in str(error)


@both_spellings
@nested_or_not
@each_field
@pytest.mark.parametrize("value", NOT_COUNTS, ids=NOT_COUNT_IDS)
def test_only_a_positive_int_is_a_count(
    spelling: dict[str, tuple[str, ...]], nested: bool, field: str, value: object
) -> None:
    config = spelled(spelling, nested=nested)
    put(inner(config), spelling[field], value)
    error = refused(config, ErrorCode.CONFIG_VALUE)
    assert spelling[field][-1] in str(error)


@pytest.mark.parametrize("value", NOT_COUNTS, ids=NOT_COUNT_IDS)
def test_a_file_is_judged_as_the_parsed_object_is(tmp_path: Path, value: object) -> None:
    config = spelled(OFFICIAL, nested=True)
    put(inner(config), OFFICIAL["heads"], value)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    error = refused(file, ErrorCode.CONFIG_VALUE)
    assert error.path == str(file)


@pytest.mark.parametrize("field", ["heads", "head_dim", "conv_kernel"])
@nested_or_not
def test_spellings_that_disagree_are_refused(field: str, nested: bool) -> None:
    config = spelled(OFFICIAL, nested=nested)
    put(inner(config), TRANSFORMERS[field], VALUES[field] + 1)
    error = refused(config, ErrorCode.CONFIG_CONTRADICTION)
    for part in (OFFICIAL[field][-1], TRANSFORMERS[field][-1]):
        assert part in str(error)
    for value in (VALUES[field], VALUES[field] + 1):
        assert str(value) in str(error)


@both_spellings
@each_field
def test_places_that_disagree_are_refused(spelling: dict[str, tuple[str, ...]], field: str) -> None:
    config = spelled(spelling, nested=True)
    put(config, spelling[field], VALUES[field] + 1)
    refused(config, ErrorCode.CONFIG_CONTRADICTION)


@each_field
def test_a_bad_value_is_refused_although_another_spelling_is_right(field: str) -> None:
    config = spelled(OFFICIAL, nested=True)
    put(config, TRANSFORMERS[field], True)
    with pytest.raises(ConfigError):
        KdaConfig.from_json(config)


@pytest.mark.parametrize("value", [[], "x", 3, True], ids=repr)
@pytest.mark.parametrize("key", ["text_config", "linear_attn_config"])
def test_a_section_that_is_no_object_is_refused(key: str, value: object) -> None:
    config = spelled(OFFICIAL, nested=True)
    put(config if key == "text_config" else inner(config), (key,), value)
    with pytest.raises(ConfigError) as caught:
        KdaConfig.from_json(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [{}, {"text_config": {}}, {"text_config": {"x": 1}}], ids=repr)
def test_a_config_without_any_geometry_is_refused(config: Json) -> None:
    refused(config, ErrorCode.CONFIG_KEY_MISSING)


NOT_JSON = {
    "empty": b"",
    "cut short": b'{"text_config": {"hidden_size": 40',
    "an array": b"[]",
    "a number": b"5",
    "null": b"null",
    "two objects": b"{}{}",
    "not utf-8": b'{"a": "\xff"}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "an error page": b"<!DOCTYPE html><html></html>",
    "deep nesting": b"[" * 200_000,
    "a key given twice": b'{"hidden_size": 1, "hidden_size": 2}',
}


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text)
    error = refused(file, ErrorCode.CONFIG_NOT_JSON)
    assert error.path == str(file)


def test_a_missing_file_is_refused_by_path(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(PathError, match="config\\.json") as caught:
        KdaConfig.from_json(file)
    assert caught.value.code is ErrorCode.PATH_MISSING
    assert isinstance(caught.value, OSError)


def test_a_directory_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(PathError) as caught:
        KdaConfig.from_json(tmp_path)
    assert caught.value.code is ErrorCode.PATH_NOT_REGULAR


def test_a_named_pipe_is_refused_and_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(PathError) as caught:
        KdaConfig.from_json(pipe)
    assert caught.value.code is ErrorCode.PATH_NOT_REGULAR


# --- the object -----------------------------------------------------------------------------------


@each_field
@pytest.mark.parametrize("value", [*NOT_COUNTS, None], ids=repr)
def test_the_constructor_takes_positive_ints_only(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        KdaConfig(**{**VALUES, field: value})  # type: ignore[arg-type]
    assert field in str(caught.value)


def test_a_config_is_a_value() -> None:
    again = pickle.loads(pickle.dumps(GLM_CONFIG))
    assert again == GLM_CONFIG
    assert hash(again) == hash(GLM_CONFIG)
    assert copy.deepcopy(GLM_CONFIG) == GLM_CONFIG
    with pytest.raises(AttributeError):
        GLM_CONFIG.heads = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "the config is empty ("),
        (b" \n", "the config is empty ("),
        (b"[" * 200_000, "the config is nested too deeply ("),
        (b"<html>", "the config is not valid JSON: got an HTML or XML page ("),
    ],
)
def test_what_the_file_is_instead_is_told(tmp_path: Path, text: bytes, told: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text)
    assert told in str(refused(file, ErrorCode.CONFIG_NOT_JSON))
