"""`identify_family`: the one family that a layer is exactly a block of, or a refusal."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import UNEVEN, Geometry, Stored, dsa_block
from support.families import FAMILIES as WRITTEN_OUT
from support.families import Family, MemorySource, kda_config, write_family

from kda_stream import (
    ArgumentError,
    BindError,
    ErrorCode,
    KdaConfig,
    ProblemKind,
    RawTensor,
    bind_kda_weights,
    identify_family,
    open_checkpoint,
)

each_family = pytest.mark.parametrize("family", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
knowing_or_not = pytest.mark.parametrize("knowing", [True, False], ids=["config", "no config"])

GEOMETRIES = [
    UNEVEN,
    *(Geometry(*extents) for extents in itertools.product((1, 2), repeat=4)),
    *(Geometry(1, 128, 1, 1), Geometry(8, 8, 8, 8), Geometry(128, 3, 128, 4)),
    *(Geometry(3, 1, 3, 3), Geometry(3, 3, 1, 3), Geometry(2, 129, 2, 1), Geometry(7, 96, 2, 4)),
]


def config_or_none(geometry: Geometry, *, knowing: bool) -> KdaConfig | None:
    return kda_config(geometry) if knowing else None


def told_apart_by(family: Family, leaf: str) -> bool:
    """Whether one that stands before it takes all its other tensors, so that it is as near."""
    rest = {name: row for name, row in family.rows(UNEVEN).items() if name != leaf}
    before = itertools.takewhile(lambda other: other is not family, WRITTEN_OUT.values())
    return any(
        (other.block, len(other.leaves)) == (family.block, len(family.leaves)) and other.takes(rest)
        for other in before
    )


def refused(source: object, config: KdaConfig | None) -> BindError:
    with pytest.raises(BindError) as caught:
        identify_family(source, config)  # type: ignore[arg-type]
    assert caught.value.code is ErrorCode.BIND_REFUSED
    assert "\n" not in str(caught.value)
    return caught.value


# --- what is known --------------------------------------------------------------------------------


@each_family
def test_a_layer_of_each_family_is_told_at_any_geometry(family: Family) -> None:
    """Also where extents are equal, or 1, and a shape alone tells nothing."""
    for geometry in GEOMETRIES:
        source = family.source(geometry)
        assert identify_family(source).name == family.name, geometry
        assert identify_family(source, kda_config(geometry)).name == family.name, geometry


@each_family
@knowing_or_not
def test_each_dtype_that_is_accepted_is_of_the_family(family: Family, knowing: bool) -> None:
    config = config_or_none(UNEVEN, knowing=knowing)
    conv = {leaf: dtype for leaf, dtype in family.also.items() if "_conv1d" in leaf}
    single = [{leaf: dtype} for leaf, dtype in family.also.items() if leaf not in conv]
    for dtypes in (*single, conv, family.also):
        source = family.stored_as(dtypes).source(UNEVEN)
        assert identify_family(source, config).name == family.name


@each_family
def test_every_layer_of_a_checkpoint_is_told(family: Family, tmp_path: Path) -> None:
    written = write_family(tmp_path, family, UNEVEN)
    with open_checkpoint(tmp_path) as checkpoint:
        for layer in written.kda_layers:
            assert identify_family(checkpoint.layer(layer)).name == family.name
            assert identify_family(checkpoint.layer(layer), kda_config(UNEVEN)).name == family.name


def test_no_payload_is_touched() -> None:
    class Unread(RawTensor):
        @property
        def data(self) -> memoryview:
            raise AssertionError("payload was read")

    for family in WRITTEN_OUT.values():
        source = family.source(UNEVEN)
        for name, tensor in list(source.tensors.items()):
            held = Unread(tensor.dtype, tensor.shape, bytes(tensor.nbytes))
            source.tensors[name] = held
        assert identify_family(source).name == family.name
        assert "mlp.gate_proj.weight" not in source.asked


def test_extents_may_be_integers_of_another_library() -> None:
    np = pytest.importorskip("numpy")
    source = WRITTEN_OUT["KIMI_K3"].source(UNEVEN)
    for name, tensor in list(source.tensors.items()):
        shape = tuple(np.int64(extent) for extent in tensor.shape)
        source.tensors[name] = RawTensor(tensor.dtype, shape, tensor.data)
    assert identify_family(source).name == "KIMI_K3"


# --- what is not ----------------------------------------------------------------------------------


@each_family
@knowing_or_not
@pytest.mark.parametrize("geometry", [UNEVEN, Geometry(1, 1, 1, 1)], ids=repr)
def test_a_layer_that_lacks_any_tensor_is_of_no_family_and_the_nearest_is_named(
    family: Family, geometry: Geometry, knowing: bool
) -> None:
    for leaf in family.leaves:
        source = family.source(geometry)
        source.drop(family.block + leaf)
        error = refused(source, config_or_none(geometry, knowing=knowing))
        if not told_apart_by(family, leaf):
            assert [(p.tensor, p.kind) for p in error.problems] == [
                (family.block + leaf, ProblemKind.MISSING)
            ]
            assert f"KDA block of {family.name}:" in str(error)


@each_family
@knowing_or_not
def test_a_layer_with_any_tensor_in_no_known_dtype_is_of_no_family(
    family: Family, knowing: bool
) -> None:
    config = config_or_none(UNEVEN, knowing=knowing)
    for leaf, dtype in itertools.product(family.leaves, ("F16", "U8")):
        source = family.source(UNEVEN)
        source.put_as(family.block + leaf, dtype, 8)
        error = refused(source, config)
        assert [(p.tensor, p.kind) for p in error.problems] == [
            (family.block + leaf, ProblemKind.DTYPE)
        ]
        if not told_apart_by(family, leaf):
            assert f"KDA block of {family.name}:" in str(error)


@each_family
@knowing_or_not
def test_a_layer_whose_dtypes_are_all_wrong_is_still_told_from_its_names(
    family: Family, knowing: bool
) -> None:
    """And not said to be a block of the family with fewest tensors, all of them missing."""
    source = family.stored_as(dict.fromkeys(family.leaves, "U8")).source(UNEVEN)
    error = refused(source, config_or_none(UNEVEN, knowing=knowing))
    assert {problem.kind for problem in error.problems} == {ProblemKind.DTYPE}
    assert {p.tensor for p in error.problems} == {family.block + leaf for leaf in family.leaves}


@each_family
def test_one_tensor_whose_extents_disagree_with_those_of_others_is_the_one_that_is_told(
    family: Family,
) -> None:
    told_by_it_alone = ("b_proj.weight", "o_norm.weight")  # the heads, the head_dim
    leaves = [leaf for leaf in family.leaves if leaf not in told_by_it_alone]
    for leaf, more in itertools.product(leaves, (4, -1)):
        stored = family.rows(UNEVEN)[leaf]
        source = family.source(UNEVEN)
        shape = tuple(max(1, extent + more) for extent in stored.shape)
        source.put(family.block + leaf, Stored(stored.dtype, shape))
        error = refused(source, None)
        assert [(p.tensor, p.kind) for p in error.problems] == [
            (family.block + leaf, ProblemKind.SHAPE)
        ]


@each_family
def test_a_layer_at_another_geometry_than_the_config_s_is_refused(family: Family) -> None:
    source = family.source(UNEVEN)
    for name in ("hidden", "heads", "head_dim", "conv_kernel"):
        config = replace(kda_config(UNEVEN), **{name: 7})
        error = refused(source, config)
        assert {problem.kind for problem in error.problems} == {ProblemKind.SHAPE}
        assert f"KDA block of {family.name}:" in str(error)
    assert identify_family(source).name == family.name


@each_family
@knowing_or_not
@pytest.mark.parametrize(
    "extra", ["self_attn.q_proj.bias", "attention.q_proj.bias", "attention.x", "self_attn.x"]
)
def test_one_more_name_in_a_block_is_refused(family: Family, extra: str, knowing: bool) -> None:
    source = family.source(UNEVEN)
    source.put(extra, Stored("BF16", (1,)))
    error = refused(source, config_or_none(UNEVEN, knowing=knowing))
    assert [(p.tensor, p.kind) for p in error.problems] == [(extra, ProblemKind.UNKNOWN)]


@knowing_or_not
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (one, other)
        for one, other in itertools.permutations(WRITTEN_OUT.values(), 2)
        if one.block != other.block
    ],
    ids=lambda family: family.name,
)
def test_two_whole_blocks_in_one_layer_are_of_no_family(
    one: Family, other: Family, knowing: bool
) -> None:
    source = one.source(UNEVEN)
    source.tensors |= other.source(UNEVEN).tensors
    error = refused(source, config_or_none(UNEVEN, knowing=knowing))
    assert {problem.kind for problem in error.problems} == {ProblemKind.UNKNOWN}
    assert "pass family" not in str(error)


@pytest.mark.parametrize("index", [None, 3])
@knowing_or_not
def test_a_dsa_layer_is_of_no_family_and_called_one(index: int | None, knowing: bool) -> None:
    source = MemorySource()
    for leaf, stored in dsa_block(UNEVEN).items():
        source.put(f"self_attn.{leaf}", stored)
    if index is not None:
        source.index = index  # type: ignore[attr-defined]
    error = refused(source, config_or_none(UNEVEN, knowing=knowing))
    called = "the layer" if index is None else f"layer {index}"
    assert str(error).startswith(f"{called} is a DSA block, not a KDA block")
    assert error.hint == error.looks_like == "leave the layer out: only KDA layers are bound"


@each_family
@knowing_or_not
def test_an_attention_layer_of_another_kind_is_said_to_have_no_kda_block(
    family: Family, knowing: bool
) -> None:
    names = sorted(family.block + leaf for leaf in family.other_leaves)
    source = MemorySource()
    for name in (*names, "mlp.gate_proj.weight"):
        source.put(name, Stored("BF16", (15, 24)))
    error = refused(source, config_or_none(UNEVEN, knowing=knowing))
    assert error.what == f"the layer has no KDA block: its names are {', '.join(names)}"


@knowing_or_not
@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "it has no names"),
        (["mlp.gate_proj.weight", "A_log"], "its names are A_log, mlp.gate_proj.weight"),
        (["mlp.gate_proj.weight", "self_attn."], "its names are self_attn."),
        ([f"mlp.experts.{n}" for n in range(10, 99)], " and 77 more"),
    ],
    ids=["no names", "no attention", "no attention that is known", "many names"],
)
def test_a_layer_without_attention_is_said_to_have_no_kda_block(
    names: list[str], told: str, knowing: bool
) -> None:
    source = MemorySource()
    for name in names:
        source.put(name, Stored("F32", (3,)))
    error = refused(source, config_or_none(UNEVEN, knowing=knowing))
    assert error.what.startswith("the layer has no KDA block: ")
    assert error.what.endswith(told)
    assert ProblemKind.MISSING in {problem.kind for problem in error.problems}
    for problem in error.problems:
        if problem.kind is ProblemKind.MISSING:
            assert (problem.expected_shape is not None) is knowing


def test_a_bind_of_a_named_family_lists_all_that_is_missing_besides() -> None:
    source = MemorySource()
    source.put("mlp.gate_proj.weight", Stored("F32", (3,)))
    config, said = (
        kda_config(UNEVEN),
        "layer 2 has no KDA block: its names are mlp.gate_proj.weight",
    )
    with pytest.raises(BindError) as named:
        bind_kda_weights(config, 2, source)
    assert named.value.what.startswith(
        f"{said}; of GLM5_NEXT: self_attn.q_proj.weight is missing: expected BF16 [15, 24]; "
    )
    assert len(named.value.problems) == named.value.what.count("is missing") == 15
    with pytest.raises(BindError) as auto:
        bind_kda_weights(config, 2, source, family="auto")
    assert auto.value.what == said


@each_family
def test_no_expected_shape_is_told_that_no_tensor_shows(family: Family) -> None:
    """dt_bias shows the width of all heads together; with o_norm beside it, how many there are."""
    by_heads = {"A_log", "dt_bias", "o_norm.weight", "f_b_proj.weight", "g_b_proj.weight"}
    for kept, known in ((["dt_bias"], {"dt_bias"}), (["dt_bias", "o_norm.weight"], by_heads)):
        source = family.source(UNEVEN)
        source.drop(*(family.block + leaf for leaf in family.leaves if leaf not in kept))
        problems = refused(source, None).problems
        assert len(problems) >= len(family.leaves) - len(kept) - 1
        for problem in problems:
            leaf = problem.tensor.partition(".")[2]
            assert leaf not in kept
            assert (problem.expected_shape is not None) is (leaf in known), leaf
            assert (problem.expected_bytes is not None) is (leaf in known), leaf
            assert ("[" in problem.fault) is (leaf in known), leaf


@knowing_or_not
def test_extents_that_are_no_counts_are_of_no_family(knowing: bool) -> None:
    for shape in [(0, 24), (2**70, 0), (-15, -24), ()]:
        source = WRITTEN_OUT["GLM5_NEXT"].source(UNEVEN)
        source.tensors["self_attn.q_proj.weight"] = RawTensor("BF16", shape, bytes(720))
        error = refused(source, config_or_none(UNEVEN, knowing=knowing))
        assert [p.tensor for p in error.problems] == ["self_attn.q_proj.weight"]


def test_a_block_of_no_extent_is_of_no_family() -> None:
    source = WRITTEN_OUT["GLM5_NEXT"].source(Geometry(0, 3, 5, 3))
    refused(source, None)


@pytest.mark.parametrize("source", [None, {}, 7, "layer"])
def test_what_is_no_source_is_refused(source: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        identify_family(source)  # type: ignore[arg-type]
    assert "no KdaTensorSource" in str(caught.value)


@each_family
def test_the_family_that_is_told_is_the_one_that_auto_binds(family: Family) -> None:
    config, source = kda_config(UNEVEN), family.source(UNEVEN)
    weights, report = bind_kda_weights(config, 0, source, family="auto")
    assert report.family == identify_family(source, config).name == family.name
    weights.release()
