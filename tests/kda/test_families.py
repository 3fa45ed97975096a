"""The tables of the families, written out again from what is known of the published files."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython
from support.checkpoints import Geometry, dsa_block
from support.families import ALL_FIELDS
from support.families import FAMILIES as WRITTEN_OUT
from support.families import Family as WrittenOut

import kda_stream
from kda_stream import (
    FAMILIES,
    GLM5_NEXT,
    GLM5_NEXT_F32_CONV,
    KDA_TENSORS,
    KIMI_K3,
    KIMI_LINEAR,
    LING_3,
    LING_3_DENSE,
    ArgumentError,
    KdaConfig,
    KdaDtype,
    KdaFamily,
    TensorSpec,
    bind_kda_weights,
)
from kda_stream.kda.family import FIELDS
from kda_stream.kda.tensors import Padded

Row = tuple[str, str, tuple[int, ...]]

GLM_CONFIG = KdaConfig(hidden=4096, heads=64, head_dim=128, conv_kernel=4)
GLM_ROWS: list[Row] = [
    ("self_attn.q_proj.weight", "BF16", (8192, 4096)),
    ("self_attn.k_proj.weight", "BF16", (8192, 4096)),
    ("self_attn.v_proj.weight", "BF16", (8192, 4096)),
    ("self_attn.q_conv1d.weight", "BF16", (8192, 1, 4)),
    ("self_attn.k_conv1d.weight", "BF16", (8192, 1, 4)),
    ("self_attn.v_conv1d.weight", "BF16", (8192, 1, 4)),
    ("self_attn.f_a_proj.weight", "BF16", (128, 4096)),
    ("self_attn.f_b_proj.weight", "BF16", (8192, 128)),
    ("self_attn.g_a_proj.weight", "BF16", (128, 4096)),
    ("self_attn.g_b_proj.weight", "BF16", (8192, 128)),
    ("self_attn.b_proj.weight", "BF16", (64, 4096)),
    ("self_attn.A_log", "F32", (64,)),
    ("self_attn.dt_bias", "F32", (8192,)),
    ("self_attn.o_norm.weight", "BF16", (128,)),
    ("self_attn.o_proj.weight", "BF16", (4096, 8192)),
]
GLM_F32_CONV_ROWS: list[Row] = [
    (name, "F32" if "_conv1d" in name else dtype, shape) for name, dtype, shape in GLM_ROWS
]

KIMI_LINEAR_CONFIG = KdaConfig(hidden=2304, heads=32, head_dim=128, conv_kernel=4)
KIMI_LINEAR_ROWS: list[Row] = [
    ("self_attn.q_proj.weight", "BF16", (4096, 2304)),
    ("self_attn.k_proj.weight", "BF16", (4096, 2304)),
    ("self_attn.v_proj.weight", "BF16", (4096, 2304)),
    ("self_attn.q_conv1d.weight", "BF16", (4096, 1, 4)),
    ("self_attn.k_conv1d.weight", "BF16", (4096, 1, 4)),
    ("self_attn.v_conv1d.weight", "BF16", (4096, 1, 4)),
    ("self_attn.f_a_proj.weight", "BF16", (128, 2304)),
    ("self_attn.f_b_proj.weight", "BF16", (4096, 128)),
    ("self_attn.g_a_proj.weight", "BF16", (128, 2304)),
    ("self_attn.g_b_proj.weight", "BF16", (4096, 128)),
    ("self_attn.b_proj.weight", "BF16", (32, 2304)),
    ("self_attn.A_log", "F32 or BF16", (1, 1, 32, 1)),
    ("self_attn.dt_bias", "F32 or BF16", (4096,)),
    ("self_attn.o_norm.weight", "BF16 or F32", (128,)),
    ("self_attn.o_proj.weight", "BF16", (2304, 4096)),
]
KIMI_LINEAR_UNVERIFIED = {
    *("self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight"),
    *(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
}

KIMI_K3_CONFIG = KdaConfig(hidden=7168, heads=96, head_dim=128, conv_kernel=4)
KIMI_K3_ROWS: list[Row] = [
    ("self_attn.q_proj.weight", "BF16", (12288, 7168)),
    ("self_attn.k_proj.weight", "BF16", (12288, 7168)),
    ("self_attn.v_proj.weight", "BF16", (12288, 7168)),
    ("self_attn.q_conv1d.weight", "F32", (12288, 1, 4)),
    ("self_attn.k_conv1d.weight", "F32", (12288, 1, 4)),
    ("self_attn.v_conv1d.weight", "F32", (12288, 1, 4)),
    ("self_attn.f_a_proj.weight", "BF16", (128, 7168)),
    ("self_attn.f_b_proj.weight", "BF16", (12288, 128)),
    ("self_attn.b_proj.weight", "BF16 or F32", (96, 7168)),
    ("self_attn.g_proj.weight", "BF16", (12288, 7168)),
    ("self_attn.A_log", "F32", (128,)),
    ("self_attn.dt_bias", "F32", (12288,)),
    ("self_attn.o_norm.weight", "F32", (128,)),
    ("self_attn.o_proj.weight", "BF16", (7168, 12288)),
]
KIMI_K3_UNVERIFIED = {
    *("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.b_proj.weight"),
    *(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
    "self_attn.A_log",  # verified at 96 heads; only how other counts are padded is not
}

LING_CONFIG = KdaConfig(hidden=24, heads=3, head_dim=5, conv_kernel=2)  # no extent twice
LING_ROWS: list[Row] = [
    ("attention.q_proj.weight", "BF16 or F32", (15, 24)),
    ("attention.k_proj.weight", "BF16 or F32", (15, 24)),
    ("attention.v_proj.weight", "BF16 or F32", (15, 24)),
    ("attention.q_conv1d.weight", "BF16 or F32", (15, 1, 2)),
    ("attention.k_conv1d.weight", "BF16 or F32", (15, 1, 2)),
    ("attention.v_conv1d.weight", "BF16 or F32", (15, 1, 2)),
    ("attention.f_proj.weight", "BF16 or F32", (15, 24)),
    ("attention.g_proj.weight", "BF16 or F32", (15, 24)),
    ("attention.b_proj.weight", "BF16 or F32", (3, 24)),
    ("attention.A_log", "F32 or BF16", (3,)),
    ("attention.dt_bias", "F32 or BF16", (15,)),
    ("attention.o_norm.weight", "BF16 or F32", (5,)),
    ("attention.o_proj.weight", "BF16 or F32", (24, 15)),
]
LING_DENSE_ROWS: list[Row] = [*LING_ROWS[:-1], ("attention.dense.weight", *LING_ROWS[-1][1:])]

TABLES = {
    "GLM5_NEXT": (GLM5_NEXT, GLM_CONFIG, GLM_ROWS, set()),
    "GLM5_NEXT_F32_CONV": (GLM5_NEXT_F32_CONV, GLM_CONFIG, GLM_F32_CONV_ROWS, set()),
    "KIMI_LINEAR": (KIMI_LINEAR, KIMI_LINEAR_CONFIG, KIMI_LINEAR_ROWS, KIMI_LINEAR_UNVERIFIED),
    "KIMI_K3": (KIMI_K3, KIMI_K3_CONFIG, KIMI_K3_ROWS, KIMI_K3_UNVERIFIED),
    "LING_3": (LING_3, LING_CONFIG, LING_ROWS, {name for name, _, _ in LING_ROWS}),
    "LING_3_DENSE": (
        LING_3_DENSE,
        LING_CONFIG,
        LING_DENSE_ROWS,
        {name for name, _, _ in LING_DENSE_ROWS},
    ),
}
each_table = pytest.mark.parametrize(
    ("family", "config", "rows", "unverified"), TABLES.values(), ids=TABLES
)
each_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


# --- the tables -----------------------------------------------------------------------------------


@each_table
def test_the_table_is_that_of_the_published_files(
    family: KdaFamily, config: KdaConfig, rows: list[Row], unverified: set[str]
) -> None:
    del unverified
    found = [
        (spec.name, " or ".join(dtype.value for dtype in spec.dtypes), spec.expected_shape(config))
        for spec in family.tensors
    ]
    assert sorted(found) == sorted(rows)


@each_table
def test_what_is_not_verified_is_marked_and_nothing_else(
    family: KdaFamily, config: KdaConfig, rows: list[Row], unverified: set[str]
) -> None:
    del config, rows
    assert {spec.name for spec in family.tensors if spec.unverified} == unverified


@each_family
def test_a_tensor_with_two_accepted_dtypes_is_marked(family: KdaFamily) -> None:
    for spec in family.tensors:
        assert not spec.also or "dtype" in spec.unverified, spec.name
        assert len(set(spec.dtypes)) == len(spec.dtypes)


def test_a_mark_says_what_is_not_known() -> None:
    marks = {spec.name.removeprefix("self_attn."): spec.unverified for spec in KIMI_K3.tensors}
    assert "symmetry" in marks["k_proj.weight"]
    assert "symmetry" in marks["v_proj.weight"]
    assert "dtype" in marks["q_conv1d.weight"]
    assert "rank" in marks["q_conv1d.weight"]
    assert "padding" in marks["A_log"]
    assert "dtype" not in marks["A_log"]
    for spec in KIMI_LINEAR.tensors:
        assert spec.unverified.startswith("dtype") or not spec.unverified
    for spec in (*LING_3.tensors, *LING_3_DENSE.tensors):
        assert "dtype" in spec.unverified


def test_families_of_which_no_header_was_seen_say_so_as_a_whole() -> None:
    unverified = {name: bool(family.unverified) for name, (family, *_) in TABLES.items()}
    assert unverified == {
        "GLM5_NEXT": False,
        "GLM5_NEXT_F32_CONV": False,
        "KIMI_LINEAR": True,
        "KIMI_K3": False,
        "LING_3": True,
        "LING_3_DENSE": True,
    }
    assert "no header" in " ".join(KIMI_LINEAR.unverified)
    assert "shapes" in " ".join(KIMI_LINEAR.unverified)
    assert "no header" in " ".join(LING_3.unverified)


@pytest.mark.parametrize(
    ("family", "config", "nbytes"),
    [
        (GLM5_NEXT, GLM_CONFIG, 275_481_088),
        (GLM5_NEXT_F32_CONV, GLM_CONFIG, 275_481_088 + 3 * 65_536),
        (KIMI_LINEAR, KIMI_LINEAR_CONFIG, 79_036_800),
        (KIMI_K3, KIMI_K3_CONFIG, 887_800_832),
    ],
    ids=str,
)
def test_a_layer_is_so_many_bytes(family: KdaFamily, config: KdaConfig, nbytes: int) -> None:
    assert sum(spec.expected_bytes(config) for spec in family.tensors) == nbytes


def test_the_default_table_is_kda_tensors_itself() -> None:
    assert GLM5_NEXT.tensors is KDA_TENSORS
    assert FAMILIES[0] is GLM5_NEXT


def test_every_family_is_public_under_its_name_and_written_out_for_tests() -> None:
    assert [family.name for family in FAMILIES] == list(WRITTEN_OUT)
    for family in FAMILIES:
        assert getattr(kda_stream, family.name) is family
        assert str(family) == f"{family}" == family.name
        assert family.about


@each_family
def test_the_layers_that_tests_write_are_of_the_table(family: KdaFamily) -> None:
    """So that what is bound in other files is what stands here."""
    written = WRITTEN_OUT[family.name]
    geometry = Geometry(hidden=24, heads=3, head_dim=5, conv_kernel=2)
    rows = {f"{written.block}{leaf}": row for leaf, row in written.rows(geometry).items()}
    for spec in family.tensors:
        leaf = spec.name.removeprefix(family.block)
        assert rows[spec.name].shape == spec.expected_shape(LING_CONFIG)
        assert rows[spec.name].dtype == spec.dtype.value
        assert written.also.get(leaf) == (spec.also[0].value if spec.also else None)
    assert set(rows) == family.names


@each_family
def test_names_are_all_of_the_block_and_each_there_once(family: KdaFamily) -> None:
    names = [spec.name for spec in family.tensors]
    assert len(names) == len(set(names)) == len(family.names)
    assert all(name.startswith(family.block) for name in names)
    assert [family.leaf(spec) for spec in family.tensors] == [
        name.partition(".")[2] for name in names
    ]


def test_no_layer_can_be_of_two_families() -> None:
    """In names, in the rank of a shape, or in the dtypes of a tensor each two of them differ."""
    for one, other in itertools.combinations(FAMILIES, 2):
        others = {spec.name: spec for spec in other.tensors}
        differ = one.names != other.names or any(
            len(spec.dims) != len(others[spec.name].dims)
            or not set(spec.dtypes) & set(others[spec.name].dtypes)
            for spec in one.tensors
        )
        assert differ, (one.name, other.name)


# --- what the bytes do not tell -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "block", "prefixes", "decay_is_bounded", "index_base"),
    [
        (GLM5_NEXT, "self_attn.", {"model.language_model.layers."}, True, 0),
        (GLM5_NEXT_F32_CONV, "self_attn.", {"model.language_model.layers."}, True, 0),
        (KIMI_LINEAR, "self_attn.", {"model.layers."}, False, 1),
        (KIMI_K3, "self_attn.", {"language_model.model.layers.", "model.layers."}, True, 1),
        (LING_3, "attention.", {"model.layers."}, True, 0),
        (LING_3_DENSE, "attention.", {"model.layers."}, True, 0),
    ],
    ids=str,
)
def test_a_consumer_is_told_what_the_bytes_do_not_tell(
    family: KdaFamily, block: str, prefixes: set[str], decay_is_bounded: bool, index_base: int
) -> None:
    assert family.block == block
    assert set(family.prefixes) == prefixes
    assert family.decay_is_bounded is decay_is_bounded
    assert family.index_base == index_base


@pytest.mark.parametrize(
    ("family", "low_rank_decay", "low_rank_gate", "lacking"),
    [
        (GLM5_NEXT, True, True, {"f", "g"}),
        (GLM5_NEXT_F32_CONV, True, True, {"f", "g"}),
        (KIMI_LINEAR, True, True, {"f", "g"}),
        (KIMI_K3, True, False, {"f", "g_a", "g_b"}),
        (LING_3, False, False, {"f_a", "f_b", "g_a", "g_b"}),
        (LING_3_DENSE, False, False, {"f_a", "f_b", "g_a", "g_b"}),
    ],
    ids=str,
)
def test_it_is_told_which_of_gate_and_decay_are_of_low_rank(
    family: KdaFamily, low_rank_decay: bool, low_rank_gate: bool, lacking: set[str]
) -> None:
    assert family.has_low_rank_decay is low_rank_decay
    assert family.has_low_rank_gate is low_rank_gate
    assert set(family.lacking) == lacking
    assert set(family.fields) == set(FIELDS) - lacking


def test_the_fields_are_those_of_the_weights() -> None:
    assert FIELDS == ALL_FIELDS


@each_family
def test_each_field_is_made_of_its_tensors_and_conv_of_q_k_and_v_in_that_order(
    family: KdaFamily,
) -> None:
    found = {
        name: tuple(spec.name.removeprefix(family.block) for spec in specs)
        for name, specs in family.fields.items()
    }
    assert found == WRITTEN_OUT[family.name].fields


@pytest.mark.parametrize(
    ("heads", "stored", "tail"),
    [(96, 128, 32), (1, 128, 127), (3, 128, 125), (127, 128, 1), (128, 128, 0), (129, 256, 127)],
)
def test_of_a_padded_a_log_as_many_values_count_as_there_are_heads(
    heads: int, stored: int, tail: int
) -> None:
    config = replace(KIMI_K3_CONFIG, heads=heads)
    (spec,) = KIMI_K3.fields["a_log"]
    assert spec.expected_shape(config) == (stored,)
    assert spec.expected_bytes(config) == stored * 4
    assert spec.tail(config) == tail
    assert KIMI_K3.handed_out_shape("a_log", config) == (heads,)


def test_nothing_but_that_a_log_is_padded() -> None:
    padded = {
        (family.name, spec.name)
        for family in FAMILIES
        for spec in family.tensors
        if any(isinstance(dim, Padded) for dim in spec.dims)
    }
    assert padded == {("KIMI_K3", "self_attn.A_log")}
    for family in FAMILIES:
        for spec in family.tensors:
            if (family.name, spec.name) not in padded:
                assert spec.tail(LING_CONFIG) == 0


@each_table
def test_a_log_is_handed_out_by_head_and_conv_as_one_matrix(
    family: KdaFamily, config: KdaConfig, rows: list[Row], unverified: set[str]
) -> None:
    del unverified
    shapes = {name.removeprefix(family.block): shape for name, _, shape in rows}
    for name, leaves in WRITTEN_OUT[family.name].fields.items():
        expected = shapes[leaves[0]]
        if name == "a_log":
            expected = (config.heads,)
        elif name == "conv":
            expected = (3 * config.heads * config.head_dim, config.conv_kernel)
        assert family.handed_out_shape(name, config) == expected, name


@each_family
def test_signs_are_names_of_the_block_that_no_other_attention_has(family: KdaFamily) -> None:
    geometry = Geometry(hidden=24, heads=3, head_dim=5, conv_kernel=2)
    other = {f"self_attn.{leaf}" for leaf in dsa_block(geometry)}
    for written in WRITTEN_OUT.values():
        other |= {f"{written.block}{leaf}" for leaf in written.other_leaves}
    assert set(family.signs) <= family.names
    assert {f"{family.block}A_log", f"{family.block}q_conv1d.weight"} <= set(family.signs)
    assert not other.intersection(family.signs)


# --- one more family ------------------------------------------------------------------------------


def test_one_more_family_is_one_more_table_and_nothing_else() -> None:
    dims: dict[str, tuple[int | str, ...]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight"), ("qkv_dim", "hidden")),
        **dict.fromkeys(
            ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
            ("qkv_dim", 1, "conv_kernel"),
        ),
        **dict.fromkeys(("f_proj.weight", "g_proj.weight"), ("qkv_dim", "hidden")),
        "b_proj.weight": ("heads", "hidden"),
        "A_log": ("heads",),
        "dt_bias": ("qkv_dim",),
        "o_norm.weight": ("head_dim",),
        "dense.weight": ("hidden", "qkv_dim"),
    }
    mine = KdaFamily(
        name="MINE",
        about="a family of these tests",
        tensors=tuple(TensorSpec(f"mixer.{leaf}", KdaDtype.F32, d) for leaf, d in dims.items()),
        prefixes=("decoder.layers.",),
        decay_is_bounded=False,
        index_base=0,
        block="mixer.",
    )
    geometry = Geometry(hidden=24, heads=3, head_dim=5, conv_kernel=2)
    ling = WRITTEN_OUT["LING_3_DENSE"]
    written: WrittenOut = replace(
        ling, name="MINE", block="mixer.", dtypes=dict.fromkeys(ling.dtypes, "F32")
    )
    weights, report = bind_kda_weights(LING_CONFIG, 0, written.source(geometry), family=mine)
    assert {n: bytes(t.data) for n, t in weights.items()} == written.expected(geometry)
    assert report.family == "MINE"
    assert set(report.lacking) == {"f_a", "f_b", "g_a", "g_b"}
    assert report.self_attn_seen == 13
    weights.release()


CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
ADD_NEW_MODEL = """
    import json, pathlib, re, sys, textwrap
    from kda_stream.kda import families

    text = pathlib.Path(sys.argv[1]).read_text()
    (table,) = re.findall(r"```python(.*?)```", text, re.DOTALL)
    exec(textwrap.dedent(table), families.__dict__)
    families.FAMILIES += (families.NEW_MODEL,)

    import kda_stream
    from kda_stream.cli import main
    from kda_stream.testing import Replica, write_replica

    config = kda_stream.KdaConfig(hidden=24, heads=3, head_dim=70, conv_kernel=4)
    replica = Replica(kda_stream.NEW_MODEL, config, 4, (0, 2), (), 2)
    a, b = (write_replica(sys.argv[2] + name, replica) for name in "ab")
    statuses = [
        main([command, *map(str, paths), *options, "--json"])
        for command, paths, options in (
            ("inspect", [a], []),
            ("verify", [a], ["--payload", "--family", "new_model"]),
            ("verify", [a], ["--family", "auto"]),
            ("stream", [a], ["--family", "auto"]),
            ("diff", [a, b], ["--payload"]),
        )
    ]
    with kda_stream.open_checkpoint(a) as checkpoint:
        found = kda_stream.identify_family(checkpoint.layer(2)).name
    print(json.dumps([found, statuses]))
"""


def test_the_family_that_contributing_shows_is_taken_by_all_of_the_library(
    run_python: RunPython, tmp_path: Path
) -> None:
    found = run_python(ADD_NEW_MODEL, CONTRIBUTING, f"{tmp_path}/")
    assert found == ["NEW_MODEL", [0, 0, 0, 0, 0]]


@each_family
def test_a_family_pickles_compares_and_is_a_key(family: KdaFamily) -> None:
    again = pickle.loads(pickle.dumps(family))
    assert again == family
    assert {family: 1}[again] == 1
    assert again.fields == family.fields
    assert [other for other in FAMILIES if other == family] == [family]


def test_a_family_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        GLM5_NEXT.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "tensors",
    [
        [*KDA_TENSORS, replace(KDA_TENSORS[0], name="self_attn.out_proj.weight")],
        [*KDA_TENSORS, replace(KDA_TENSORS[-1], name="self_attn.dense.weight")],
        KDA_TENSORS[:-1],
        [spec for spec in KDA_TENSORS if "k_conv1d" not in spec.name],
        [],
    ],
    ids=["an unknown leaf", "o_proj twice", "no o_proj", "two conv tensors", "nothing"],
)
def test_a_table_that_is_of_no_kda_block_is_refused(tensors: list[TensorSpec]) -> None:
    with pytest.raises(ArgumentError):
        replace(GLM5_NEXT, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"index_base": 2}, "an index_base of 0 or 1"),
        ({"prefixes": "model.layers."}, "the last dot too"),
        ({"prefixes": ("model.layers",)}, "the last dot too"),
    ],
)
def test_what_no_config_or_name_can_have_is_refused_in_a_family(
    change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ArgumentError) as refusal:
        replace(GLM5_NEXT, **change)
    assert expected in str(refusal.value.expected)
