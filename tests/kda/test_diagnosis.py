"""A refusal says what the layer is when that is a known thing, and what to do about it."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from support.checkpoints import UNEVEN, Geometry, Stored, having
from support.families import (
    CONV_LEAVES,
    FAMILIES,
    GLM5_NEXT,
    KIMI_K3,
    KIMI_LINEAR,
    LING_3,
    Family,
    MemorySource,
    kda_config,
    write_family,
)

import kda_stream
from kda_stream import (
    BindError,
    KdaFamily,
    MappingSource,
    bind_kda_weights,
    check_kda_weights,
    open_checkpoint,
    stream_kda_layers,
)

Q, X, D, H = UNEVEN.qkv_dim, UNEVEN.hidden, UNEVEN.head_dim, UNEVEN.heads
FLAT = Geometry(hidden=24, heads=3, head_dim=5, conv_kernel=1)
Change = Callable[[MemorySource], None]

each_pair = pytest.mark.parametrize(
    ("asked", "stored"),
    list(itertools.permutations(FAMILIES.values(), 2)),
    ids=lambda family: family.name,
)


def table(family: Family) -> KdaFamily:
    found: KdaFamily = getattr(kda_stream, family.name)
    return found


def refusal(
    source: MemorySource, family: Family | None = GLM5_NEXT, geometry: Geometry = UNEVEN
) -> BindError:
    """The refusal of a bind, which is that of a check; with no family, of one with "auto"."""
    asked: KdaFamily | Literal["auto"] = "auto" if family is None else table(family)
    with pytest.raises(BindError) as caught:
        bind_kda_weights(kda_config(geometry), 4, source, family=asked)
    with pytest.raises(BindError) as checked:
        check_kda_weights(kda_config(geometry), 4, source, family=asked)
    error = caught.value
    assert (error.looks_like, str(error)) == (checked.value.looks_like, str(checked.value))
    assert error.problems
    assert "\n" not in str(error)
    if error.looks_like is not None:
        assert error.looks_like in str(error)
    assert pickle.loads(pickle.dumps(error)).looks_like == error.looks_like
    return error


def looks(source: MemorySource, family: Family | None = GLM5_NEXT) -> str:
    said = refusal(source, family).looks_like
    assert said is not None
    return said


# --- another family -------------------------------------------------------------------------------


def test_three_conv_tensors_in_f32_are_another_family_that_is_named() -> None:
    said = looks(FAMILIES["GLM5_NEXT_F32_CONV"].source(UNEVEN))
    assert said.startswith("three conv tensors are F32: this is GLM5_NEXT_F32_CONV")
    assert said.endswith("pass family=GLM5_NEXT_F32_CONV")


@each_pair
def test_a_layer_of_another_family_is_called_by_its_name(asked: Family, stored: Family) -> None:
    said = looks(stored.source(UNEVEN), asked)
    is_f32 = stored.dtypes["q_conv1d.weight"] == "F32"
    begin = "three conv tensors are F32: this is" if is_f32 else "this is"
    assert said.startswith(f"{begin} {stored.name}, {table(stored).about}: ")
    assert said.endswith(f": pass family={stored.name}")


@each_pair
def test_what_is_advised_then_binds(asked: Family, stored: Family) -> None:
    source = stored.source(UNEVEN)
    name = looks(source, asked).rpartition("family=")[2].partition(" ")[0]
    weights, report = bind_kda_weights(
        kda_config(UNEVEN), 4, source, family=getattr(kda_stream, name)
    )
    assert report.family == name
    weights.release()


def test_a_layer_that_is_not_exactly_of_the_other_family_is_not_called_so() -> None:
    for family in (FAMILIES["GLM5_NEXT_F32_CONV"], KIMI_K3, LING_3):
        source = family.source(UNEVEN)
        source.drop(f"{family.block}dt_bias")
        assert refusal(source).looks_like is None
    source = FAMILIES["GLM5_NEXT_F32_CONV"].source(UNEVEN)
    source.put("self_attn.k_conv1d.weight", Stored("BF16", (Q, 1, 3)))
    assert refusal(source).looks_like is None


def test_a_block_beside_the_one_asked_for_is_not_taken_for_the_layer() -> None:
    source = GLM5_NEXT.source(UNEVEN)
    source.drop("self_attn.dt_bias")
    source.tensors |= LING_3.source(UNEVEN).tensors
    assert "pass family" not in looks(source)


# --- no family ------------------------------------------------------------------------------------


def older_transformers(source: MemorySource) -> None:
    for leaf in CONV_LEAVES:
        source.drop(f"self_attn.{leaf}")
    source.put("self_attn.conv1d.weight", Stored("BF16", (3 * Q, 1, 3)))
    for leaf in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"):
        source.rename(f"self_attn.{leaf}", f"self_attn.forget_gate.{leaf}")


def joined_conv_alone(source: MemorySource) -> None:
    for leaf in CONV_LEAVES:
        source.drop(f"self_attn.{leaf}")
    source.put("self_attn.conv1d.weight", Stored("BF16", (3 * Q, 1, 3)))


def forget_gate_alone(source: MemorySource) -> None:
    source.rename("self_attn.A_log", "self_attn.forget_gate.A_log")


def transposed_conv(source: MemorySource) -> None:
    for leaf in CONV_LEAVES:
        source.put(f"self_attn.{leaf}", Stored("BF16", (Q, 3, 1)))


def scales(source: MemorySource) -> None:
    source.put("self_attn.f_a_proj.scales", Stored("BF16", (D, 1)))
    source.put("self_attn.f_a_proj.biases", Stored("BF16", (D, 1)))


def mlx(source: MemorySource) -> None:
    transposed_conv(source)
    scales(source)


def scale_inv(source: MemorySource) -> None:
    source.put_as("self_attn.q_proj.weight", "F8_E4M3", Q * X)
    source.put("self_attn.q_proj.weight_scale_inv", Stored("F32", (1, 1)))


def scale(source: MemorySource) -> None:
    source.put_as("self_attn.q_proj.weight", "F8_E4M3", Q * X)
    source.put("self_attn.q_proj.weight_scale", Stored("F32", (Q, 1)))


def packed_names(source: MemorySource) -> None:
    source.drop("self_attn.q_proj.weight")
    source.put("self_attn.q_proj.weight_packed", Stored("U8", (Q, X // 2)))
    source.put("self_attn.q_proj.weight_scale", Stored("F32", (Q, 1)))


def packed_qweight(source: MemorySource) -> None:
    source.rename("self_attn.q_proj.weight", "self_attn.q_proj.qweight")


def in_dtype(dtype: str) -> Change:
    def change(source: MemorySource) -> None:
        source.tensors["self_attn.q_proj.weight"] = kda_stream.RawTensor(
            dtype, (Q, X // 2), bytes(Q * X // 2)
        )

    return change


def cast(leaf: str) -> Change:
    def change(source: MemorySource) -> None:
        source.put(f"self_attn.{leaf}", Stored("BF16", GLM5_NEXT.rows(UNEVEN)[leaf].shape))

    return change


def full_rank_g(source: MemorySource) -> None:
    source.put("self_attn.g_proj.weight", Stored("BF16", (Q, X)))


def g_without(leaf: str) -> Change:
    def change(source: MemorySource) -> None:
        full_rank_g(source)
        source.drop(f"self_attn.{leaf}")

    return change


def f_without(leaf: str) -> Change:
    def change(source: MemorySource) -> None:
        source.put("self_attn.f_proj.weight", Stored("BF16", (Q, X)))
        source.drop(f"self_attn.{leaf}")

    return change


OLDER = "older release of the transformers library"
MLX = "an MLX build"
QUANTISED = (
    "like quantised attention (weight_scale or weight_scale_inv beside a projection), which no "
    "family here holds"
)
PACKED = "packed quantised attention"
MIXED = "mixes two families"
CAST = "A_log is BF16"

KNOWN = {
    "older transformers": (older_transformers, OLDER),
    "older transformers, joined conv": (joined_conv_alone, OLDER),
    "older transformers, forget_gate": (forget_gate_alone, OLDER),
    "MLX": (mlx, MLX),
    "MLX, transposed conv": (transposed_conv, MLX),
    "MLX, scales": (scales, MLX),
    "weight_scale_inv": (scale_inv, QUANTISED),
    "weight_scale": (scale, QUANTISED),
    "weight_packed": (packed_names, PACKED),
    "qweight": (packed_qweight, PACKED),
    **{f"q_proj in {dtype}": (in_dtype(dtype), PACKED) for dtype in ("U8", "I8", "I32")},
    "A_log in BF16": (cast("A_log"), CAST),
    "g_proj beside g_a and g_b": (full_rank_g, MIXED),
    "g_proj beside g_a": (g_without("g_b_proj.weight"), MIXED),
    "g_proj beside g_b": (g_without("g_a_proj.weight"), MIXED),
    "f_proj beside f_a": (f_without("f_b_proj.weight"), MIXED),
    "f_proj beside f_b": (f_without("f_a_proj.weight"), MIXED),
}
each_known = pytest.mark.parametrize(("change", "said"), KNOWN.values(), ids=KNOWN)
ALL_SAID = (OLDER, MLX, QUANTISED, PACKED, MIXED, CAST)


@each_known
@pytest.mark.parametrize("family", [GLM5_NEXT, None], ids=["named", "auto"])
def test_a_known_way_to_store_it_that_is_not_taken_is_told(
    change: Change, said: str, family: Family | None
) -> None:
    source = GLM5_NEXT.source(UNEVEN)
    change(source)
    told = looks(source, family)
    assert [one for one in ALL_SAID if one in told] == [said]


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (older_transformers, "save the model again with a current one"),
        (mlx, "load the checkpoint that it was made of"),
        (scale_inv, "load a build that leaves the KDA layers as they are"),
        (packed_names, "load a build that leaves the KDA layers as they are"),
        (cast("A_log"), "load the one that it was made of"),
        (full_rank_g, "two checkpoints were written into one"),
    ],
    ids=["older transformers", "MLX", "weight_scale_inv", "packed", "cast", "mixed"],
)
def test_the_refusal_says_what_to_do(change: Change, advice: str) -> None:
    source = GLM5_NEXT.source(UNEVEN)
    change(source)
    assert advice in looks(source)


def test_it_is_told_of_the_files_too(tmp_path: Path) -> None:
    """And of every layer at once, when they all look the same."""

    def cast_all(tensors: dict[str, Stored]) -> None:
        for name in list(tensors):
            if name.endswith("A_log"):
                tensors[name] = Stored("BF16", (H,))

    write_family(tmp_path, GLM5_NEXT, UNEVEN, change=cast_all)
    with open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(BindError) as one:
            check_kda_weights(kda_config(UNEVEN), 0, checkpoint.layer(0))
        with pytest.raises(BindError) as all_of_them:
            stream_kda_layers(checkpoint)
    assert one.value.looks_like is not None
    assert CAST in one.value.looks_like
    assert all_of_them.value.looks_like == one.value.looks_like
    assert len(all_of_them.value.problems) == 4


def test_layers_that_look_different_are_not_said_to_look_like_one_of_them(tmp_path: Path) -> None:
    prefix = GLM5_NEXT.prefix
    change = having(
        {
            f"{prefix}0.self_attn.A_log": Stored("BF16", (H,)),
            f"{prefix}1.self_attn.g_proj.weight": Stored("BF16", (Q, X)),
        }
    )
    write_family(tmp_path, GLM5_NEXT, UNEVEN, change=change)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(BindError) as caught:
        stream_kda_layers(checkpoint)
    assert caught.value.looks_like is None
    assert len(caught.value.problems) == 2


# --- nothing known --------------------------------------------------------------------------------


def lacking_q_proj(source: MemorySource) -> None:
    source.drop("self_attn.q_proj.weight")


def a_log_in_f16(source: MemorySource) -> None:
    source.put_as("self_attn.A_log", "F16", 2 * H)


def bias(source: MemorySource) -> None:
    source.put("self_attn.q_proj.bias", Stored("BF16", (Q,)))


def one_conv(stored: Stored) -> Change:
    return lambda source: source.put("self_attn.v_conv1d.weight", stored)


def every_conv(stored: Stored) -> Change:
    def change(source: MemorySource) -> None:
        for leaf in CONV_LEAVES:
            source.put(f"self_attn.{leaf}", stored)

    return change


def signs_of_it_beside_attention(source: MemorySource) -> None:
    for end in ("weight_scale_inv", "scales", "weight_packed", "g_proj.weight"):
        source.put(f"mlp.gate_proj.{end}", Stored("U8", (1,)))
    source.drop("self_attn.dt_bias")


UNKNOWN_THINGS = {
    "a tensor is missing": lacking_q_proj,
    "A_log in F16": a_log_in_f16,
    "dt_bias in BF16": cast("dt_bias"),
    "a bias": bias,
    "one conv in F32": one_conv(Stored("F32", (Q, 1, 3))),
    "one conv transposed": one_conv(Stored("BF16", (Q, 3, 1))),
    "conv turned over": every_conv(Stored("BF16", (1, Q, 3))),
    "conv without its 1": every_conv(Stored("BF16", (Q, 3))),
    "signs of it beside attention": signs_of_it_beside_attention,
    "nothing": lambda source: source.tensors.clear(),
}


@pytest.mark.parametrize("change", UNKNOWN_THINGS.values(), ids=UNKNOWN_THINGS)
def test_of_what_is_no_known_thing_nothing_is_said(change: Change) -> None:
    source = GLM5_NEXT.source(UNEVEN)
    change(source)
    assert refusal(source).looks_like is None


def test_a_kernel_of_one_does_not_look_transposed() -> None:
    source = GLM5_NEXT.source(FLAT)
    source.drop("self_attn.dt_bias")
    assert refusal(source, geometry=FLAT).looks_like is None


def test_a_block_that_is_accepted_is_not_judged_by_its_looks() -> None:
    """What would be said of another family's block is right in this one."""
    source = KIMI_LINEAR.stored_as({"A_log": "BF16"}).source(UNEVEN)
    bind_kda_weights(kda_config(UNEVEN), 0, source, family=kda_stream.KIMI_LINEAR)[0].release()
    source.drop("self_attn.o_norm.weight")
    assert refusal(source, KIMI_LINEAR).looks_like is None


def test_names_with_something_before_them_are_told_what_to_take_off() -> None:
    whole = GLM5_NEXT.source(UNEVEN)
    before = "model.layers.0."
    source = MappingSource({before + name: whole.get(name) for name in whole.names()})
    said = looks(source)  # type: ignore[arg-type]
    assert said.startswith(f"the names are not those within a layer: {before} stands before them")
    assert "MappingSource(tensors, prefix=...)" in said
    fitting = MappingSource({before + n: whole.get(n) for n in whole.names()}, prefix=before)
    bind_kda_weights(kda_config(UNEVEN), 4, fitting)[0].release()
