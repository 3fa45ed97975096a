"""Kimi-Linear models that the transformers library built and saved.

Loaded in bfloat16, transformers keeps `dt_bias` alone in F32: `A_log` and conv are cast with the
rest. The model's own parameters and config are the answers that a bind is compared with.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the interop extra")
pytest.importorskip("transformers", reason="needs the interop extra")
pytest.importorskip("transformers.models.kimi_linear", reason="needs a later transformers")

import torch
from support.transformers_models import (
    CONV_LEAVES,
    LOW_RANK_PARAMETERS,
    WAYS,
    HowBound,
    assert_bit_for_bit,
    assert_filled_as_loaded,
    assert_filled_gives_the_same_logits,
    bound_by_stream,
    bound_from_state_dict,
    cast_loses,
    dtypes_of,
    families_of,
    kda_modules,
    layers_in_two_shards,
    make_random,
    model_tensors,
    raw_bytes,
    refusals,
)
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from kda_stream import (
    GLM5_NEXT,
    KIMI_LINEAR,
    AttnBlockKind,
    BindError,
    KdaConfig,
    bind_kda_weights,
    classify_attn_block,
    open_checkpoint,
)
from kda_stream.kda.check import FamilyChoice

pytestmark = pytest.mark.interop

# No two extents of a KDA block are equal, and the other attention has other heads and widths.
HIDDEN, HEADS, HEAD_DIM, CONV_KERNEL, LAYERS = 24, 5, 14, 3, 5
QKV_DIM = HEADS * HEAD_DIM
KDA_LAYERS, MLA_LAYERS = [0, 1, 3], [2, 4]
SHARD_SIZE = "10KB"  # small enough to cut some KDA layers in two

PREFIX = "model.layers."
VIEWS = {
    "conv": (3 * QKV_DIM, CONV_KERNEL),  # the model's own is [3 * qkv_dim, 1, kernel]
    "a_log": (HEADS,),  # the model's own is [1, 1, heads, 1]
}
FAMILY = pytest.mark.parametrize("family", [KIMI_LINEAR, "auto"], ids=str)


def small_config() -> KimiLinearConfig:
    """Its KDA layers are given as in the published config.json, whose lists count from 1."""
    return KimiLinearConfig(
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_attn_config={
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
            "num_heads": HEADS,
            "head_dim": HEAD_DIM,
            "short_conv_kernel_size": CONV_KERNEL,
        },
    )


def load_model(directory: Path) -> KimiLinearForCausalLM:
    return KimiLinearForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)


def kda_attention(model: KimiLinearForCausalLM) -> dict[int, torch.nn.Module]:
    return kda_modules(model.model.layers, model.config.layer_types)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, saved as it is built: in F32."""
    directory = tmp_path_factory.mktemp("source")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = KimiLinearForCausalLM(small_config())
        make_random(model.model.layers)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model loaded in bfloat16, and saved."""
    directory = tmp_path_factory.mktemp("saved")
    load_model(source).save_pretrained(directory, max_shard_size=SHARD_SIZE)
    return directory


@pytest.fixture(scope="module")
def cast(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model cast to bfloat16 as a whole, and saved."""
    directory = tmp_path_factory.mktemp("cast")
    load_model(source).to(torch.bfloat16).save_pretrained(directory, max_shard_size=SHARD_SIZE)
    return directory


@pytest.fixture(scope="module")
def model(saved: Path) -> KimiLinearForCausalLM:
    """What transformers itself makes of the checkpoint that is to be bound."""
    return load_model(saved)


# The files are worth testing with -----------------------------------------------------------------


def test_transformers_saves_the_published_names_with_dt_bias_alone_in_f32(saved: Path) -> None:
    for number in KDA_LAYERS:
        dtypes = dtypes_of(saved, PREFIX, number)
        block = {name: dtype for name, dtype in dtypes.items() if name.startswith("self_attn.")}
        assert set(block) == KIMI_LINEAR.names
        assert [name for name, dtype in block.items() if dtype == "F32"] == ["self_attn.dt_bias"]
        assert set(block.values()) == {"BF16", "F32"}


def test_some_kda_layers_lie_in_two_shards(saved: Path) -> None:
    assert layers_in_two_shards(saved, PREFIX, "self_attn.", KDA_LAYERS)


def test_dt_bias_would_show_a_cast_and_the_conv_parts_another_order(
    model: KimiLinearForCausalLM,
) -> None:
    for attention in kda_attention(model).values():
        assert cast_loses(attention.get_parameter("forget_gate.dt_bias"))
        q, k, v = (raw_bytes(part) for part in attention.get_parameter("conv1d.weight").chunk(3))
        assert len({q, k, v}) == 3


# Bound --------------------------------------------------------------------------------------------


def test_layers_are_classified_as_the_models_own_config_says(saved: Path) -> None:
    layer_types = KimiLinearConfig.from_pretrained(saved).layer_types
    assert [n for n, kind in enumerate(layer_types) if kind == "linear_attention"] == KDA_LAYERS
    assert [n for n, kind in enumerate(layer_types) if kind == "full_attention"] == MLA_LAYERS
    with open_checkpoint(saved) as checkpoint:
        kinds = [classify_attn_block(checkpoint.layer(n).names()) for n in checkpoint.layers()]
    assert [n for n, kind in enumerate(kinds) if kind is AttnBlockKind.KDA] == KDA_LAYERS
    assert [n for n, kind in enumerate(kinds) if kind is AttnBlockKind.UNKNOWN] == MLA_LAYERS


def test_the_saved_config_gives_the_geometry_of_the_kda_layers(saved: Path) -> None:
    config = KdaConfig.from_json(saved / "config.json")
    assert config == KdaConfig(HIDDEN, HEADS, HEAD_DIM, CONV_KERNEL)


def test_the_family_is_found_and_has_every_field_but_the_full_rank_ones(saved: Path) -> None:
    assert families_of(saved, KDA_LAYERS) == dict.fromkeys(KDA_LAYERS, "KIMI_LINEAR")
    config = KdaConfig.from_json(saved / "config.json")
    with open_checkpoint(saved) as checkpoint:
        weights, report = bind_kda_weights(config, 3, checkpoint.layer(3), family="auto")
    assert report.lacking == ("f", "g")
    assert (weights.f, weights.g) == (None, None)
    assert report.bound == report.self_attn_seen == 15


@FAMILY
@pytest.mark.parametrize("bound", WAYS)
def test_every_bound_tensor_equals_the_models_parameter_bit_for_bit(
    bound: HowBound, family: FamilyChoice, saved: Path, model: KimiLinearForCausalLM
) -> None:
    expected = model_tensors(kda_attention(model), LOW_RANK_PARAMETERS, VIEWS)
    assert list(expected) == KDA_LAYERS
    assert_bit_for_bit(bound(saved, family), expected)


@FAMILY
def test_cast_to_bf16_as_a_whole_it_is_bound_with_a_log_and_dt_bias_in_bf16(
    family: FamilyChoice, cast: Path, source: Path
) -> None:
    """No published header says that these are F32, so BF16 is taken, and handed out as BF16."""
    model = load_model(source).to(torch.bfloat16)
    expected = model_tensors(kda_attention(model), LOW_RANK_PARAMETERS, VIEWS)
    bound = bound_by_stream(cast, family)
    assert_bit_for_bit(bound, expected)
    assert {stored.dtype for layer in bound.values() for stored in layer.values()} == {"BF16"}


@FAMILY
@pytest.mark.parametrize("bound", WAYS)
def test_a_log_that_was_kept_in_f32_is_bound_in_f32(
    bound: HowBound, family: FamilyChoice, source: Path, tmp_path: Path
) -> None:
    model = load_model(source)
    exact = KimiLinearForCausalLM.from_pretrained(source)
    for number, attention in kda_attention(model).items():
        a_log = kda_attention(exact)[number].get_parameter("forget_gate.A_log")
        assert cast_loses(a_log)
        attention.get_submodule("forget_gate").A_log = a_log
    model.save_pretrained(tmp_path, max_shard_size=SHARD_SIZE)
    expected = model_tensors(kda_attention(model), LOW_RANK_PARAMETERS, VIEWS)
    assert {tensors["a_log"].dtype for tensors in expected.values()} == {torch.float32}
    assert_bit_for_bit(bound(tmp_path, family), expected)


# Refused ------------------------------------------------------------------------------------------


def test_taken_for_glm5_next_it_is_refused_for_a_log_and_told_what_it_is(saved: Path) -> None:
    for _, error in refusals(saved, KDA_LAYERS, GLM5_NEXT):
        assert [problem.tensor for problem in error.problems] == ["self_attn.A_log"]
        assert "pass family=KIMI_LINEAR" in str(error)


@pytest.mark.parametrize(
    "family",
    [
        KIMI_LINEAR,
        "auto",
    ],
    ids=str,
)
def test_saved_in_f32_every_tensor_that_must_be_bf16_is_named(
    family: FamilyChoice, source: Path
) -> None:
    taken = {"self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight"}
    for _, error in refusals(source, KDA_LAYERS, family):
        assert {problem.tensor for problem in error.problems} == KIMI_LINEAR.names - taken
        assert {str(problem.kind) for problem in error.problems} == {"dtype"}
        assert {problem.stored_dtype for problem in error.problems} == {"F32"}


def test_saved_under_the_modules_own_names_no_layer_is_skipped_or_bound(
    source: Path, tmp_path: Path
) -> None:
    load_model(source).save_pretrained(tmp_path, save_original_format=False)
    gate = ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")
    missing = {f"self_attn.{leaf}" for leaf in (*CONV_LEAVES, *gate)}
    unknown = {"self_attn.conv1d.weight", *(f"self_attn.forget_gate.{leaf}" for leaf in gate)}
    for _, error in refusals(tmp_path, KDA_LAYERS, KIMI_LINEAR):
        assert {p.tensor for p in error.problems if p.kind == "missing"} == missing
        assert {p.tensor for p in error.problems if p.kind == "unknown"} == unknown
        assert len(error.problems) == len(missing) + len(unknown)
    with pytest.raises(BindError) as refused:
        bound_by_stream(tmp_path, "auto")
    assert {problem.layer_idx for problem in refused.value.problems} == set(KDA_LAYERS)


# --- a model in memory ----------------------------------------------------------------------------


def test_a_model_in_memory_is_bound_out_of_its_own_parameters(saved: Path) -> None:
    config = KdaConfig.from_json(saved / "config.json")
    bound = bound_from_state_dict(load_model(saved), config, PREFIX, KDA_LAYERS, KIMI_LINEAR)
    assert bound == bound_by_stream(saved, KIMI_LINEAR)


def test_a_filled_model_computes_what_the_loaded_one_does(saved: Path) -> None:
    assert_filled_gives_the_same_logits(load_model(saved), saved, KDA_LAYERS)


def test_a_model_is_filled_with_what_it_saved(saved: Path) -> None:
    report = assert_filled_as_loaded(load_model(saved), saved, KDA_LAYERS)
    assert report.families == ("KIMI_LINEAR",)
