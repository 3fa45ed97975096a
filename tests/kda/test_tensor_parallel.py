"""`KdaTpPlan` and `KdaShardedSource`: what of a block each rank holds, from metadata alone."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
from support.checkpoints import Geometry
from support.families import FAMILIES, GLM5_NEXT, KIMI_K3, Family, MemorySource, kda_config

import kda_stream
from kda_stream import (
    ArgumentError,
    AttnBlockKind,
    BindError,
    KdaConfig,
    KdaFamily,
    KdaShardedSource,
    KdaTpPlan,
    RawTensor,
    check_kda_weights,
    classify_attn_block,
)

GEOMETRY = Geometry(hidden=10, heads=12, head_dim=6, conv_kernel=4)
CONFIG = kda_config(GEOMETRY)
SIZES = (1, 2, 3, 4, 6, 12)

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_size = pytest.mark.parametrize("size", SIZES)

# How the ranks' parts of a tensor are put together again, written out from how engines cut them.
ROWS = (
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "f_b_proj.weight", "g_b_proj.weight"),
    *("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "f_proj.weight", "g_proj.weight"),
    *("dt_bias", "b_proj.weight", "A_log"),
)
COLUMNS = ("o_proj.weight", "dense.weight")
WHOLE = ("f_a_proj.weight", "g_a_proj.weight", "o_norm.weight")


def table(family: Family) -> KdaFamily:
    found: KdaFamily = getattr(kda_stream, family.name)
    return found


def plan(family: Family, rank: int, size: int) -> KdaTpPlan:
    return KdaTpPlan(CONFIG, rank, size, family=table(family))


def parts(family: Family, size: int) -> list[KdaShardedSource]:
    return [KdaShardedSource(family.source(GEOMETRY), plan(family, n, size)) for n in range(size)]


def joined(leaf: str, tensors: list[RawTensor], whole: RawTensor) -> bytes:
    """The whole tensor's bytes out of the ranks' parts of it."""
    if leaf in WHOLE:
        return bytes(tensors[0].data)
    if leaf in COLUMNS:
        lines = whole.shape[0]
        rows = [
            [bytes(t.data)[n * t.nbytes // lines :][: t.nbytes // lines] for t in tensors]
            for n in range(lines)
        ]
        return b"".join(b"".join(row) for row in rows)
    return b"".join(bytes(tensor.data) for tensor in tensors)


# --- the plan -------------------------------------------------------------------------------------


@each_size
def test_a_rank_has_its_share_of_the_heads_and_all_else_of_the_geometry(size: int) -> None:
    for rank in range(size):
        assert plan(GLM5_NEXT, rank, size).config == replace(CONFIG, heads=12 // size)


@pytest.mark.parametrize(
    "size", [5, 7, 8, 24, 0, -1, 2.0, "2", True, pytest.param(10**5000, id="long")]
)
def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(size: object) -> None:
    with pytest.raises(ArgumentError, match="1, 2, 3, 4, 6, 12") as caught:
        KdaTpPlan(CONFIG, 0, size)  # type: ignore[arg-type]
    assert "12 heads" in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 2, 10**30, 1.0, "0", None])
def test_a_rank_that_is_none_is_refused(rank: object) -> None:
    with pytest.raises(ArgumentError, match="0 to 1"):
        KdaTpPlan(CONFIG, rank, 2)  # type: ignore[arg-type]


def test_a_family_that_is_none_is_refused() -> None:
    with pytest.raises(ArgumentError, match="family is none"):
        KdaTpPlan(CONFIG, 0, 2, family="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [None, "config.json", {"heads": 4}])
def test_a_config_that_is_none_is_refused(config: object) -> None:
    with pytest.raises(ArgumentError, match="config is none: expected a KdaConfig"):
        KdaTpPlan(config, 0, 1)  # type: ignore[arg-type]


def test_a_source_and_a_plan_that_are_none_are_refused() -> None:
    made = plan(GLM5_NEXT, 0, 2)
    with pytest.raises(ArgumentError, match="no KdaTensorSource"):
        KdaShardedSource({}, made)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="plan is none: expected a KdaTpPlan"):
        KdaShardedSource(GLM5_NEXT.source(GEOMETRY), CONFIG)  # type: ignore[arg-type]


def test_a_count_of_heads_from_a_hostile_config_is_answered_at_once() -> None:
    with pytest.raises(ArgumentError, match="does not divide"):
        KdaTpPlan(KdaConfig(1, 2**63 + 1, 1, 1), 0, 2)


@each_family
def test_a_plan_survives_pickling_as_it_goes_to_the_ranks(family: Family) -> None:
    made = plan(family, 1, 2)
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert again.family == made.family


@each_family
def test_of_one_rank_the_part_is_the_whole(family: Family) -> None:
    made = plan(family, 0, 1)
    assert made.config == CONFIG
    assert made.family is table(family)
    assert [made.part(spec) for spec in made.family.tensors] == [None] * len(made.family.tensors)


# --- the parts ------------------------------------------------------------------------------------


@each_family
@each_size
def test_each_rank_s_part_is_a_block_of_the_plan_s_geometry(family: Family, size: int) -> None:
    for part in parts(family, size):
        report = check_kda_weights(part.plan.config, 0, part, family=part.plan.family)
        assert report.family == family.name


@each_family
@each_size
def test_the_parts_put_together_are_the_whole_bit_for_bit(family: Family, size: int) -> None:
    whole = family.source(GEOMETRY)
    sources = parts(family, size)
    for leaf in family.leaves:
        name = f"{family.block}{leaf}"
        tensors = [tensor for source in sources if (tensor := source.get(name))]
        assert len(tensors) == size
        assert joined(leaf, tensors, whole.tensors[name]) == bytes(whole.tensors[name].data), leaf
        width = whole.tensors[name].nbytes // math.prod(whole.tensors[name].shape)
        assert all(t.nbytes == len(t.data) == math.prod(t.shape) * width for t in tensors)


def test_the_tables_of_this_file_name_each_tensor_once() -> None:
    leaves = {leaf for family in FAMILIES.values() for leaf in family.leaves}
    assert leaves == {*ROWS, *COLUMNS, *WHOLE}
    assert len(ROWS) + len(COLUMNS) + len(WHOLE) == len(leaves)


def test_a_column_slice_is_rows_that_lie_apart() -> None:
    tensor = parts(GLM5_NEXT, 3)[1].get("self_attn.o_proj.weight")
    assert tensor is not None
    assert tensor.shape == (10, 24)
    assert tensor.rows is not None
    assert (tensor.rows.count, tensor.rows.nbytes, tensor.rows.stride) == (10, 48, 144)


def test_padding_goes_with_the_last_rank_alone() -> None:
    shapes = []
    for source in parts(KIMI_K3, 4):
        a_log = source.get("self_attn.A_log")
        assert a_log is not None
        shapes.append(a_log.shape)
    assert shapes == [(3,), (3,), (3,), (3 + 116,)]


def test_a_source_gives_the_names_and_the_index_of_what_it_is_of() -> None:
    source = GLM5_NEXT.source(GEOMETRY)
    sharded = KdaShardedSource(source, plan(GLM5_NEXT, 0, 2))
    assert sharded.names() == source.names()
    assert classify_attn_block(sharded.names()) is AttnBlockKind.KDA
    assert not hasattr(sharded, "index")
    source.index = 7  # type: ignore[attr-defined]
    assert KdaShardedSource(source, plan(GLM5_NEXT, 0, 2)).index == 7


def test_a_source_says_whose_part_it_is() -> None:
    sharded = KdaShardedSource(GLM5_NEXT.source(GEOMETRY), plan(GLM5_NEXT, 1, 2))
    assert repr(sharded).endswith(", rank 1 of 2)")


def test_what_is_outside_the_block_is_passed_on() -> None:
    source = GLM5_NEXT.source(GEOMETRY)
    sharded = KdaShardedSource(source, plan(GLM5_NEXT, 1, 2))
    assert sharded.get("mlp.gate_proj.weight") is source.tensors["mlp.gate_proj.weight"]
    assert sharded.get("self_attn.nothing") is None


def test_names_alone_ask_for_no_tensor() -> None:
    source = GLM5_NEXT.source(GEOMETRY)
    KdaShardedSource(source, plan(GLM5_NEXT, 1, 2)).names()
    assert source.asked == set()


# --- refusals -------------------------------------------------------------------------------------


@each_family
def test_tensors_that_are_cut_already_are_refused(family: Family) -> None:
    """Each has just the size that the rank expects; its values are another rank's."""
    cut = MemorySource()
    first = parts(family, 2)[0]
    for name in first.names():
        tensor = first.get(name)
        assert tensor is not None
        cut.tensors[name] = RawTensor(tensor.dtype, tensor.shape, bytes(tensor.data))
    made = plan(family, 1, 2)
    with pytest.raises(BindError, match="wrong shape"):
        check_kda_weights(made.config, 0, KdaShardedSource(cut, made), family=made.family)


def test_one_tensor_that_is_cut_already_is_refused() -> None:
    source = GLM5_NEXT.source(GEOMETRY)
    source.tensors["self_attn.A_log"] = RawTensor("F32", (6,), bytes(24))
    made = plan(GLM5_NEXT, 1, 2)
    with pytest.raises(BindError, match=r"A_log has the wrong shape: expected F32 \[12\]"):
        check_kda_weights(made.config, 0, KdaShardedSource(source, made))


def test_every_problem_of_the_whole_layer_is_told() -> None:
    source = GLM5_NEXT.source(GEOMETRY)
    source.drop("self_attn.dt_bias")
    source.put_as("self_attn.A_log", "BF16", 24)
    source.tensors["self_attn.extra"] = RawTensor("U8", (1,), b"1")
    made = plan(GLM5_NEXT, 1, 2)
    with pytest.raises(BindError) as caught:
        check_kda_weights(made.config, 0, KdaShardedSource(source, made))
    assert {problem.tensor for problem in caught.value.problems} == {
        "self_attn.dt_bias",
        "self_attn.A_log",
        "self_attn.extra",
    }


# --- a part of a tensor ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "begin", "end"), [(-1, 0, 1), (2, 0, 1), (0, -1, 1), (0, 1, 1), (0, 2, 1), (0, 0, 5)]
)
def test_a_part_outside_the_shape_is_refused(axis: int, begin: int, end: int) -> None:
    with pytest.raises(ArgumentError, match="no such part"):
        RawTensor("BF16", (4, 6), bytes(48)).part(axis, begin, end)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "NONE", ""])
def test_a_part_of_what_does_not_fill_bytes_is_refused(dtype: str) -> None:
    with pytest.raises(ArgumentError, match="no such part"):
        RawTensor(dtype, (4, 6), bytes(12)).part(0, 0, 1)


def test_a_part_of_a_part_with_rows_is_refused() -> None:
    part = RawTensor("U8", (2, 4), bytes(8)).part(1, 0, 2)
    with pytest.raises(ArgumentError, match="no such part"):
        part.part(0, 0, 1)


def test_a_part_of_an_inner_axis_is_what_slicing_gives() -> None:
    data = bytes(range(120))
    for axis, shape in enumerate([(2, 5, 12), (2, 5, 12), (2, 5, 12)]):
        for begin in range(shape[axis]):
            for end in range(begin + 1, shape[axis] + 1):
                part = RawTensor("U8", shape, data).part(axis, begin, end)
                view = memoryview(data).cast("B", shape)
                index = [range(extent) for extent in shape]
                index[axis] = range(begin, end)
                want = [view[i, j, k] for i in index[0] for j in index[1] for k in index[2]]
                assert list(part.data) == want
                assert part.nbytes == len(want)


def test_a_part_of_nothing_is_nothing() -> None:
    part = RawTensor("F32", (0, 4), b"").part(1, 1, 3)
    assert (part.shape, part.nbytes, bytes(part.data)) == ((0, 2), 0, b"")
