"""What kind of attention a layer has is told from its tensor names alone."""

from __future__ import annotations

import itertools
import pickle

import pytest
from support.checkpoints import UNEVEN, dsa_block, kda_block
from support.families import FAMILIES as WRITTEN_OUT
from support.families import Family, kda_config

import kda_stream
from kda_stream import (
    FAMILIES,
    GLM5_NEXT,
    KIMI_K3,
    AttnBlockKind,
    BindError,
    bind_kda_weights,
    classify_attn_block,
)
from kda_stream.kda.classify import is_broken_kda_block, is_kda_block

KDA_NAMES = [f"self_attn.{leaf}" for leaf in kda_block(UNEVEN)]
DSA_NAMES = [f"self_attn.{leaf}" for leaf in dsa_block(UNEVEN)]
MARKERS = ["self_attn.kv_a_proj_with_mqa.weight", "self_attn.indexer.wk.weight"]


def test_the_fifteen_names_are_a_kda_block() -> None:
    assert len(KDA_NAMES) == 15
    assert classify_attn_block(KDA_NAMES) is AttnBlockKind.KDA


def test_the_names_of_the_real_dsa_block_are_a_dsa_block() -> None:
    assert classify_attn_block(DSA_NAMES) is AttnBlockKind.DSA


@pytest.mark.parametrize("kind", AttnBlockKind)
def test_a_kind_is_printed_as_its_word(kind: AttnBlockKind) -> None:
    assert f"{kind}" == str(kind) == kind.value


def test_two_markers_are_enough_for_dsa() -> None:
    assert classify_attn_block(MARKERS) is AttnBlockKind.DSA


@pytest.mark.parametrize("name", KDA_NAMES)
def test_a_kda_block_without_one_name_is_unknown(name: str) -> None:
    assert classify_attn_block(set(KDA_NAMES) - {name}) is AttnBlockKind.UNKNOWN


@pytest.mark.parametrize("name", MARKERS)
def test_a_dsa_block_without_one_marker_is_unknown(name: str) -> None:
    assert classify_attn_block(set(DSA_NAMES) - {name}) is AttnBlockKind.UNKNOWN


def test_dsa_is_judged_before_kda() -> None:
    assert classify_attn_block(KDA_NAMES + MARKERS) is AttnBlockKind.DSA


@pytest.mark.parametrize("name", MARKERS)
def test_one_marker_does_not_make_a_kda_block_dsa(name: str) -> None:
    assert classify_attn_block([*KDA_NAMES, name]) is AttnBlockKind.KDA


def test_further_names_do_not_matter() -> None:
    further = ["self_attn.q_proj.bias", "self_attn.extra", "mlp.gate_proj.weight", "hc_attn_fn", ""]
    assert classify_attn_block(further + KDA_NAMES) is AttnBlockKind.KDA
    assert classify_attn_block(further + DSA_NAMES) is AttnBlockKind.DSA
    assert classify_attn_block(further) is AttnBlockKind.UNKNOWN


def test_no_names_are_unknown() -> None:
    assert classify_attn_block([]) is AttnBlockKind.UNKNOWN


@pytest.mark.parametrize("wrong", ["{}x", "x{}", "layers.0.{}", "{} ", "mlp.{}"])
def test_a_name_counts_only_as_a_whole(wrong: str) -> None:
    assert classify_attn_block([wrong.format(n) for n in KDA_NAMES]) is AttnBlockKind.UNKNOWN
    assert classify_attn_block([wrong.format(n) for n in MARKERS]) is AttnBlockKind.UNKNOWN


def test_names_are_told_apart_by_case() -> None:
    assert classify_attn_block([n.lower() for n in KDA_NAMES]) is AttnBlockKind.UNKNOWN


@pytest.mark.parametrize("names", [KDA_NAMES, DSA_NAMES], ids=["kda", "dsa"])
def test_order_repetition_and_kind_of_iterable_do_not_matter(names: list[str]) -> None:
    kind = classify_attn_block(names)
    assert classify_attn_block(reversed(names)) is kind
    assert classify_attn_block(names * 2) is kind
    assert classify_attn_block(frozenset(names)) is kind
    assert classify_attn_block(dict.fromkeys(names)) is kind
    assert classify_attn_block(name for name in names) is kind


def test_kinds_are_strings_and_pickle() -> None:
    assert {kind.value for kind in AttnBlockKind} == {"KDA", "DSA", "UNKNOWN"}
    assert pickle.loads(pickle.dumps(AttnBlockKind.KDA)) is AttnBlockKind.KDA


# --- of all families ------------------------------------------------------------------------------

each_family = pytest.mark.parametrize("family", WRITTEN_OUT.values(), ids=WRITTEN_OUT)


def names_of(family: Family) -> list[str]:
    return [family.block + leaf for leaf in family.leaves]


@each_family
def test_only_the_fifteen_names_are_a_kda_block_unless_families_are_given(family: Family) -> None:
    names = names_of(family)
    is_default = set(names).issuperset(KDA_NAMES)
    expected = AttnBlockKind.KDA if is_default else AttnBlockKind.UNKNOWN
    assert classify_attn_block(names) is expected
    assert classify_attn_block(names, [GLM5_NEXT]) is expected
    assert classify_attn_block(names, FAMILIES) is AttnBlockKind.KDA
    assert classify_attn_block(names, iter(FAMILIES)) is AttnBlockKind.KDA
    assert classify_attn_block(names, []) is AttnBlockKind.UNKNOWN


@each_family
def test_it_is_a_block_of_the_families_given_and_of_no_other(family: Family) -> None:
    for asked in FAMILIES:
        has_all = set(names_of(family)).issuperset(names_of(WRITTEN_OUT[asked.name]))
        expected = AttnBlockKind.KDA if has_all else AttnBlockKind.UNKNOWN
        assert classify_attn_block(names_of(family), [asked]) is expected


@each_family
def test_a_block_of_any_family_without_one_name_is_unknown_and_broken(family: Family) -> None:
    names = names_of(family)
    assert is_kda_block(names)
    assert not is_broken_kda_block(names)
    for name in names:
        left = set(names) - {name}
        assert classify_attn_block(left, FAMILIES) is AttnBlockKind.UNKNOWN
        assert is_broken_kda_block(left)
        assert is_kda_block(left)


def test_half_a_low_rank_gate_beside_a_full_rank_one_is_a_further_name() -> None:
    """Which the bind refuses: here it is a block of the family with the whole gate alone."""
    for lost in ("self_attn.g_a_proj.weight", "self_attn.g_b_proj.weight"):
        names = {*KDA_NAMES, "self_attn.g_proj.weight"} - {lost}
        assert classify_attn_block(names) is AttnBlockKind.UNKNOWN
        assert classify_attn_block(names, [GLM5_NEXT]) is AttnBlockKind.UNKNOWN
        assert classify_attn_block(names, [KIMI_K3]) is AttnBlockKind.KDA
        assert is_kda_block(names)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (one, other)
        for one, other in itertools.permutations(WRITTEN_OUT.values(), 2)
        if one.block == other.block and set(one.leaves) != set(other.leaves)
    ],
    ids=lambda family: family.name,
)
def test_a_block_that_mixes_two_families_is_kda_by_its_names_and_no_bind_takes_it(
    one: Family, other: Family
) -> None:
    """So that it is refused, and not passed over as a layer of another kind."""
    tables = [getattr(kda_stream, family.name) for family in (one, other)]
    source = one.source(UNEVEN)
    for name in names_of(other):
        source.tensors.setdefault(name, other.source(UNEVEN).tensors[name])
    for families in ([tables[0]], tables, FAMILIES):
        assert classify_attn_block(source.names(), families) is AttnBlockKind.KDA
    assert is_kda_block(source.names())
    for asked in (*tables, "auto"):
        with pytest.raises(BindError, match="is no tensor of a KDA block"):
            bind_kda_weights(kda_config(UNEVEN), 0, source, family=asked)


@each_family
def test_dsa_is_judged_before_any_family(family: Family) -> None:
    assert classify_attn_block(names_of(family) + MARKERS, FAMILIES) is AttnBlockKind.DSA
    assert not is_kda_block(names_of(family) + MARKERS)


@each_family
def test_attention_of_another_kind_is_no_kda_block_not_even_a_broken_one(family: Family) -> None:
    names = [family.block + leaf for leaf in family.other_leaves]
    assert classify_attn_block(names, FAMILIES) is AttnBlockKind.UNKNOWN
    assert not is_kda_block(names)
    assert not is_kda_block([])
    assert not is_kda_block(DSA_NAMES)
