"""Ling-3.0 models (`bailing_hybrid`) that the transformers library built and saved.

Loaded in bfloat16, transformers keeps conv, `A_log` and `dt_bias` in F32, and saves `o_proj` as
`dense`. The model's own parameters and config are the answers that a bind is compared with.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the interop extra")
pytest.importorskip("transformers", reason="needs the interop extra")
pytest.importorskip("transformers.models.bailing_hybrid", reason="needs a later transformers")

import torch
from safetensors.torch import load_file, save_file
from support.transformers_models import (
    CONV_LEAVES,
    INDEX,
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
from transformers import BailingHybridConfig, BailingHybridForCausalLM

from kda_stream import (
    FAMILIES,
    LING_3,
    LING_3_DENSE,
    AttnBlockKind,
    BindError,
    KdaConfig,
    bind_kda_weights,
    classify_attn_block,
    open_checkpoint,
)
from kda_stream.kda.check import FamilyChoice

pytestmark = pytest.mark.interop

# No two extents of a KDA block are equal, and the other attention has other widths.
HIDDEN, HEADS, HEAD_DIM, CONV_KERNEL, LAYERS = 24, 5, 14, 3, 5
QKV_DIM = HEADS * HEAD_DIM
KDA_LAYERS, MLA_LAYERS = [0, 1, 3, 4], [2]  # the last one of each group of 3 is an MLA layer
SHARD_SIZE = "10KB"  # small enough to cut some KDA layers in two

PREFIX = "model.layers."
PARAMETERS = {
    field: name
    for field, name in LOW_RANK_PARAMETERS.items()
    if field not in ("f_a", "f_b", "g_a", "g_b")
} | {"f": "forget_gate.f_proj.weight", "g": "g_proj.weight"}
VIEWS = {"conv": (3 * QKV_DIM, CONV_KERNEL)}  # the model's own is [3 * qkv_dim, 1, kernel]
FAMILY = pytest.mark.parametrize("family", [LING_3_DENSE, "auto"], ids=str)


def small_config() -> BailingHybridConfig:
    return BailingHybridConfig(
        vocab_size=64,
        pad_token_id=0,
        eos_token_id=1,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        short_conv_kernel_size=CONV_KERNEL,
        layer_group_size=3,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    )


def load_model(directory: Path) -> BailingHybridForCausalLM:
    return BailingHybridForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)


def kda_attention(model: BailingHybridForCausalLM) -> dict[int, torch.nn.Module]:
    return kda_modules(model.model.layers, model.config.layer_types)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, saved as it is built: in F32."""
    directory = tmp_path_factory.mktemp("source")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = BailingHybridForCausalLM(small_config())
        make_random(model.model.layers)
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    return directory


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model loaded in bfloat16, and saved."""
    directory = tmp_path_factory.mktemp("saved")
    load_model(source).save_pretrained(directory, max_shard_size=SHARD_SIZE)
    return directory


@pytest.fixture(scope="module")
def published(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shards with `o_proj` for the `dense` of the KDA layers, and a config as published.

    Its geometry is in `head_dim` and `short_conv_kernel_size`, and it has no `linear_` keys.
    """
    directory = tmp_path_factory.mktemp("published")
    renamed = {f"{PREFIX}{n}.attention.dense.weight": n for n in KDA_LAYERS}

    def name(before: str) -> str:
        return before.replace("dense", "o_proj") if before in renamed else before

    index = json.loads((saved / INDEX).read_bytes())
    for shard in set(index["weight_map"].values()):
        tensors = {name(before): tensor for before, tensor in load_file(saved / shard).items()}
        save_file(tensors, directory / shard, metadata={"format": "pt"})
    index["weight_map"] = {name(before): shard for before, shard in index["weight_map"].items()}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    config = json.loads((saved / "config.json").read_bytes())
    config = {key: value for key, value in config.items() if not key.startswith("linear_")}
    config["head_dim"] = HEAD_DIM
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def model(saved: Path) -> BailingHybridForCausalLM:
    """What transformers itself makes of the checkpoint that is to be bound."""
    return load_model(saved)


# The files are worth testing with -----------------------------------------------------------------


def test_transformers_saves_conv_a_log_and_dt_bias_in_f32_and_o_proj_as_dense(saved: Path) -> None:
    f32 = {f"attention.{leaf}" for leaf in (*CONV_LEAVES, "A_log", "dt_bias")}
    for number in KDA_LAYERS:
        dtypes = dtypes_of(saved, PREFIX, number)
        block = {name: dtype for name, dtype in dtypes.items() if name.startswith("attention.")}
        assert set(block) == LING_3_DENSE.names
        assert {name for name, dtype in block.items() if dtype == "F32"} == f32
        assert set(block.values()) == {"BF16", "F32"}


def test_some_kda_layers_lie_in_two_shards(saved: Path) -> None:
    assert layers_in_two_shards(saved, PREFIX, "attention.", KDA_LAYERS)


def test_the_f32_parameters_would_show_a_cast_and_the_conv_parts_another_order(
    model: BailingHybridForCausalLM,
) -> None:
    for attention in kda_attention(model).values():
        for name in ("conv1d.weight", "forget_gate.A_log", "forget_gate.dt_bias"):
            assert cast_loses(attention.get_parameter(name))
        q, k, v = (raw_bytes(part) for part in attention.get_parameter("conv1d.weight").chunk(3))
        assert len({q, k, v}) == 3


# Bound --------------------------------------------------------------------------------------------


def test_layers_are_classified_as_the_models_own_config_says(saved: Path) -> None:
    """An MLA layer has an `attention.g_proj` and an `attention.dense`, too."""
    layer_types = BailingHybridConfig.from_pretrained(saved).layer_types
    assert [n for n, kind in enumerate(layer_types) if kind == "linear_attention"] == KDA_LAYERS
    assert [n for n, kind in enumerate(layer_types) if kind == "full_attention"] == MLA_LAYERS
    with open_checkpoint(saved) as checkpoint:
        names = [checkpoint.layer(index).names() for index in checkpoint.layers()]
    assert {"attention.g_proj.weight", "attention.dense.weight"} <= set(names[2])
    kinds = [classify_attn_block(held, FAMILIES) for held in names]
    assert [n for n, kind in enumerate(kinds) if kind is AttnBlockKind.KDA] == KDA_LAYERS
    assert [n for n, kind in enumerate(kinds) if kind is AttnBlockKind.UNKNOWN] == MLA_LAYERS


@pytest.mark.parametrize("files", ["saved", "published"])
def test_the_config_gives_the_geometry_of_the_kda_layers(
    files: str, request: pytest.FixtureRequest
) -> None:
    """As saved, `head_dim` is the width of RoPE, and `linear_head_dim` that of KDA."""
    directory: Path = request.getfixturevalue(files)
    text = json.loads((directory / "config.json").read_bytes())
    assert text["head_dim"] == (4 if files == "saved" else HEAD_DIM)
    config = KdaConfig.from_json(directory / "config.json")
    assert config == KdaConfig(HIDDEN, HEADS, HEAD_DIM, CONV_KERNEL)


def test_the_family_is_found_and_has_every_field_but_the_low_rank_ones(
    saved: Path, published: Path
) -> None:
    assert families_of(saved, KDA_LAYERS) == dict.fromkeys(KDA_LAYERS, "LING_3_DENSE")
    assert families_of(published, KDA_LAYERS) == dict.fromkeys(KDA_LAYERS, "LING_3")
    config = KdaConfig.from_json(saved / "config.json")
    with open_checkpoint(saved) as checkpoint:
        weights, report = bind_kda_weights(config, 3, checkpoint.layer(3), family="auto")
    assert report.lacking == ("f_a", "f_b", "g_a", "g_b")
    assert (weights.f_a, weights.f_b, weights.g_a, weights.g_b) == (None, None, None, None)
    assert report.bound == report.self_attn_seen == 13


@FAMILY
@pytest.mark.parametrize("bound", WAYS)
def test_as_saved_every_bound_tensor_equals_the_models_parameter_bit_for_bit(
    bound: HowBound, family: FamilyChoice, saved: Path, model: BailingHybridForCausalLM
) -> None:
    expected = model_tensors(kda_attention(model), PARAMETERS, VIEWS)
    assert list(expected) == KDA_LAYERS
    assert_bit_for_bit(bound(saved, family), expected)


@pytest.mark.parametrize("family", [LING_3, "auto"], ids=str)
@pytest.mark.parametrize("bound", WAYS)
def test_as_published_every_bound_tensor_equals_the_models_parameter_bit_for_bit(
    bound: HowBound, family: FamilyChoice, published: Path
) -> None:
    """The model is what transformers makes of these files, too."""
    expected = model_tensors(kda_attention(load_model(published)), PARAMETERS, VIEWS)
    assert_bit_for_bit(bound(published, family), expected)


@FAMILY
def test_cast_to_bf16_as_a_whole_it_is_bound_with_every_tensor_in_bf16(
    family: FamilyChoice, source: Path, tmp_path: Path
) -> None:
    """No published header says what is F32, so either dtype is taken, and handed out as it is."""
    model = load_model(source).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=SHARD_SIZE)
    bound = bound_by_stream(tmp_path, family)
    assert_bit_for_bit(bound, model_tensors(kda_attention(model), PARAMETERS, VIEWS))
    assert {stored.dtype for layer in bound.values() for stored in layer.values()} == {"BF16"}


@FAMILY
def test_saved_in_f32_it_is_bound_with_every_tensor_in_f32(
    family: FamilyChoice, source: Path
) -> None:
    model = BailingHybridForCausalLM.from_pretrained(source)
    bound = bound_by_stream(source, family)
    assert_bit_for_bit(bound, model_tensors(kda_attention(model), PARAMETERS, VIEWS))
    assert {stored.dtype for layer in bound.values() for stored in layer.values()} == {"F32"}


# Refused ------------------------------------------------------------------------------------------


def test_taken_for_the_published_names_it_is_refused_for_dense_and_told_what_it_is(
    saved: Path,
) -> None:
    for _, error in refusals(saved, KDA_LAYERS, LING_3):
        problems = {problem.tensor: str(problem.kind) for problem in error.problems}
        assert problems == {
            "attention.o_proj.weight": "missing",
            "attention.dense.weight": "unknown",
        }
        assert "pass family=LING_3_DENSE" in str(error)


def test_saved_under_the_modules_own_names_no_layer_is_skipped_or_bound(
    source: Path, tmp_path: Path
) -> None:
    """The block is `self_attn.` then, as in other families, and the decay is in `forget_gate.`."""
    load_model(source).save_pretrained(tmp_path, save_original_format=False)
    for number in KDA_LAYERS:
        names = dtypes_of(tmp_path, PREFIX, number)
        assert {"self_attn.conv1d.weight", "self_attn.forget_gate.A_log"} <= set(names)
        assert not any(name.startswith("attention.") for name in names)
    for _, error in refusals(tmp_path, KDA_LAYERS, LING_3_DENSE):
        missing = {problem.tensor for problem in error.problems if problem.kind == "missing"}
        assert missing == LING_3_DENSE.names
    with pytest.raises(BindError) as refused:
        bound_by_stream(tmp_path, "auto")
    assert {problem.layer_idx for problem in refused.value.problems} == set(KDA_LAYERS)


# --- a model in memory ----------------------------------------------------------------------------


def test_a_model_in_memory_is_bound_out_of_its_own_parameters(saved: Path) -> None:
    config = KdaConfig.from_json(saved / "config.json")
    bound = bound_from_state_dict(load_model(saved), config, PREFIX, KDA_LAYERS, LING_3_DENSE)
    assert bound == bound_by_stream(saved, LING_3_DENSE)


def test_a_filled_model_computes_what_the_loaded_one_does(saved: Path) -> None:
    assert_filled_gives_the_same_logits(load_model(saved), saved, KDA_LAYERS)


def test_a_model_is_filled_with_what_it_saved(saved: Path) -> None:
    report = assert_filled_as_loaded(load_model(saved), saved, KDA_LAYERS)
    assert report.families == ("LING_3_DENSE",)
