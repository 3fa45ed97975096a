"""What a config says of the kinds of its layers, held against the names."""

from __future__ import annotations

from typing import Any

import pytest

from kda_stream.errors import ErrorCode
from kda_stream.kda.claims import layer_disagreements, mtp_layer_count, short_list

KINDS = {number: number % 4 != 3 for number in range(8)}  # as in GLM-5.3-Flash
KDA = [number for number, is_kda in KINDS.items() if is_kda]
FULL = [number for number, is_kda in KINDS.items() if not is_kda]
TYPES = ["linear_attention" if is_kda else "full_attention" for is_kda in KINDS.values()]


def one_more(numbers: list[int]) -> list[int]:
    return [number + 1 for number in numbers]


AGREE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layer_types": {"layer_types": TYPES},
    "lists from 0": {"linear_attn_config": {"kda_layers": KDA, "full_attn_layers": FULL}},
    "lists from 1": {
        "linear_attn_config": {"kda_layers": one_more(KDA), "full_attn_layers": one_more(FULL)}
    },
    "a group size": {"layer_group_size": 4},
    "what is no list": {"layer_types": "all", "linear_attn_config": {"kda_layers": ["0"]}},
    "layer_types of MTP layers too": {"layer_types": [*TYPES, "linear_attention"]},
    "a list with the MTP layer": {"linear_attn_config": {"full_attn_layers": [*FULL, 8]}},
    **{
        f"{size!r} for a group size": {"layer_group_size": size}
        for size in (0, -3, True, "4", 3.0, [4], None)
    },
}


@pytest.mark.parametrize("name", AGREE)
@pytest.mark.parametrize("nested", [False, True])
def test_what_agrees_is_no_finding(name: str, nested: bool) -> None:
    config = {"text_config": AGREE[name]} if nested else AGREE[name]
    assert list(layer_disagreements(config, 8, KINDS, "c")) == []


@pytest.mark.parametrize(
    ("place", "config"),
    [
        ("layer_types", {"layer_types": TYPES[::-1]}),
        ("layer_types", {"layer_types": TYPES[:6]}),
        ("kda_layers", {"linear_attn_config": {"kda_layers": []}}),
        ("full_attn_layers", {"linear_attn_config": {"full_attn_layers": []}}),
        ("kda_layers", {"linear_attn_config": {"kda_layers": [*KDA, 7]}}),
        ("full_attn_layers", {"linear_attn_config": {"full_attn_layers": [3]}}),
        ("layer_group_size", {"layer_group_size": 3}),
    ],
)
def test_what_differs_is_told_with_both_lists(place: str, config: dict[str, Any]) -> None:
    (problem,) = layer_disagreements(config, 8, KINDS, "c")
    assert problem.code is ErrorCode.CONFIG_LAYERS
    assert problem.what.startswith(place)
    assert problem.expected == "KDA layers 0-2, 4-6, by their names"
    assert problem.got is not None
    assert problem.got.startswith("KDA layers ")
    assert problem.path == "c"


@pytest.mark.parametrize("base", [0, 1])
def test_of_two_readings_of_a_list_the_one_nearer_to_the_names_is_told(base: int) -> None:
    lists = {
        "kda_layers": [number + base for number in KDA if number != 4],
        "full_attn_layers": [number + base for number in [*FULL, 4]],
    }
    problems = list(layer_disagreements({"linear_attn_config": lists}, 8, KINDS, "c"))
    assert [problem.got for problem in problems] == ["KDA layers 0-2, 5-6, by the config"] * 2


@pytest.mark.parametrize("base", [0, 1])
def test_a_kda_layer_behind_all_that_there_are_is_told(base: int) -> None:
    lists = {"kda_layers": [number + base for number in [*KDA, 20]]}
    (problem,) = layer_disagreements({"linear_attn_config": lists}, 8, KINDS, "c")
    assert problem.got == "KDA layers 0-2, 4-6, 20, by the config"


@pytest.mark.parametrize(
    ("place", "numbers", "claimed"),
    [
        ("kda_layers", [0, *one_more(KDA)], "0-3, 5-7"),
        ("full_attn_layers", [0, *one_more(FULL)], "1-3, 5-7"),
    ],
)
def test_a_list_that_has_a_0_counts_from_0(place: str, numbers: list[int], claimed: str) -> None:
    """Counted from 1 the rest of it would be right."""
    config = {"linear_attn_config": {place: numbers}}
    (problem,) = layer_disagreements(config, 8, KINDS, "c")
    assert problem.got == f"KDA layers {claimed}, by the config"


def test_of_layers_that_are_missing_nothing_is_said_here() -> None:
    present = {number: KINDS[number] for number in (0, 3, 5)}
    for config in AGREE.values():
        assert list(layer_disagreements(config, 8, present, "c")) == []


def test_layers_behind_the_last_whole_group_may_be_of_either_kind() -> None:
    """Engines read `layer_group_size` both ways where it does not divide the count."""
    for last in (True, False):
        kinds = {**KINDS, 8: last}
        assert list(layer_disagreements({"layer_group_size": 4}, 9, kinds, "c")) == []


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, None),
        ({"num_nextn_predict_layers": 1}, 1),
        ({"text_config": {"num_mtp_layers": 2}}, 2),
        ({"num_nextn_predict_layers": -1}, None),
        ({"num_nextn_predict_layers": True}, None),
    ],
)
def test_mtp_layers_are_counted_where_the_config_does(
    config: dict[str, Any], count: int | None
) -> None:
    assert mtp_layer_count(config) == count


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "none"), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 1, 2, 4, 6, 7], "0-2, 4, 6-7")],
)
def test_a_short_list_has_ranges(numbers: list[int], text: str) -> None:
    assert short_list(numbers) == text
