"""Checkpoints that the transformers library wrote, against the model that it wrote them from.

A small `Glm5NextForConditionalGeneration` with random weights is loaded in bfloat16 and saved into
many shards. Nothing here knows how kda_stream reads a file: the model's own parameters, its own
config and its own attention output are the answers that a bind is compared with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the interop extra")
pytest.importorskip("transformers", minversion="5.17", reason="glm5_next came with 5.17")

import torch
from safetensors.torch import load_file, save_file
from support.transformers_models import (
    CONV_LEAVES,
    INDEX,
    LOW_RANK_PARAMETERS,
    WAYS,
    BoundLayers,
    HowBound,
    assert_bit_for_bit,
    assert_filled_as_loaded,
    assert_filled_gives_the_same_logits,
    bound_by_stream,
    bound_from_state_dict,
    bound_one_by_one,
    cast_loses,
    families_of,
    kda_modules,
    layer_map_of,
    layers_in_two_shards,
    make_random,
    model_tensors,
    raw_bytes,
    refusals,
    weight_map_of,
)
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

from kda_stream import (
    GLM5_NEXT,
    GLM5_NEXT_F32_CONV,
    ArgumentError,
    AttnBlockKind,
    BindError,
    KdaConfig,
    bind_kda_weights,
    classify_attn_block,
    open_checkpoint,
)
from kda_stream.interop.transformers import fill_kda_layers
from kda_stream.kda.check import FamilyChoice

pytestmark = pytest.mark.interop

# Every extent of a KDA block differs from every other one (hidden is not heads x head_dim, and the
# DSA layers have other heads), so a transposed or misread shape cannot pass by chance.
HIDDEN, HEADS, HEAD_DIM, CONV_KERNEL, LAYERS = 96, 5, 16, 4, 8
QKV_DIM = HEADS * HEAD_DIM
KDA_LAYERS = [0, 1, 2, 4, 5, 6]  # the model's own default: each fourth layer is a DSA layer
SHARD_SIZE = "60KB"  # small enough to cut some KDA layers in two

PREFIX = "model.language_model.layers."
CONV_TENSORS = frozenset(f"self_attn.{leaf}" for leaf in CONV_LEAVES)


# --- the model and its files ----------------------------------------------------------------------


def small_config() -> Glm5NextConfig:
    return Glm5NextConfig(
        text_config={
            "vocab_size": 64,
            "pad_token_id": 0,
            "hidden_size": HIDDEN,
            "intermediate_size": 32,
            "num_hidden_layers": LAYERS,
            "linear_num_heads": HEADS,
            "linear_head_dim": HEAD_DIM,
            "linear_conv_kernel_dim": CONV_KERNEL,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "index_topk": 16,
            "index_kpool": 4,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "intermediate_size": 32,
            "projection_intermediate_size": 32,
            "image_size": 28,
        },
        image_token_id=58,
        video_token_id=59,
        image_start_token_id=60,
        image_end_token_id=61,
        video_start_token_id=62,
        video_end_token_id=63,
    )


def random_model(directory: Path, *, seed: int) -> Glm5NextForConditionalGeneration:
    """A model of random weights, as `from_pretrained(dtype=torch.bfloat16)` gives it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Glm5NextForConditionalGeneration(small_config())
        make_random(model.model.language_model.layers)
    model.save_pretrained(directory)
    return load_model(directory)


def load_model(directory: Path) -> Glm5NextForConditionalGeneration:
    return Glm5NextForConditionalGeneration.from_pretrained(directory, dtype=torch.bfloat16)


def store_conv_as_bf16(saved: Path, directory: Path) -> Path:
    """The same shards and the same index, with nothing cast but the KDA layers' conv tensors."""
    index = json.loads((saved / INDEX).read_bytes())
    total_size = 0
    for shard in sorted(set(index["weight_map"].values())):
        tensors = load_file(saved / shard)
        for name, tensor in tensors.items():
            if name.endswith(tuple(CONV_TENSORS)):
                tensors[name] = tensor.to(torch.bfloat16)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, directory / shard, metadata={"format": "pt"})
    index["metadata"]["total_size"] = total_size
    (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    (directory / "config.json").write_bytes((saved / "config.json").read_bytes())
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model loaded in bfloat16 and saved: transformers keeps conv1d, A_log and dt_bias in F32."""
    directory = tmp_path_factory.mktemp("saved")
    model = random_model(tmp_path_factory.mktemp("source"), seed=1)
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    return directory


@pytest.fixture(scope="module")
def served(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint with its conv tensors in BF16, as the official file stores them."""
    return store_conv_as_bf16(saved, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def model(served: Path) -> Glm5NextForConditionalGeneration:
    """What transformers itself makes of the checkpoint that kda_stream is to bind."""
    return load_model(served)


def kda_attention(model: Glm5NextForConditionalGeneration) -> dict[int, torch.nn.Module]:
    layers = model.model.language_model.layers
    return kda_modules(layers, model.config.text_config.layer_types)


# --- the files are worth testing with -------------------------------------------------------------


def test_the_saved_checkpoint_has_many_shards_and_some_kda_layers_span_two(saved: Path) -> None:
    assert len(set(weight_map_of(saved).values())) > LAYERS
    assert layers_in_two_shards(saved, PREFIX, "self_attn.", KDA_LAYERS)


def test_only_the_conv_tensors_differ_between_the_saved_and_the_rewritten_shards(
    saved: Path, served: Path
) -> None:
    assert weight_map_of(served) == weight_map_of(saved)
    cast = set()
    for shard in set(weight_map_of(saved).values()):
        before, after = load_file(saved / shard), load_file(served / shard)
        assert set(before) == set(after)
        cast |= {name for name in before if raw_bytes(before[name]) != raw_bytes(after[name])}
    assert cast == {f"{PREFIX}{layer}.{tensor}" for layer in KDA_LAYERS for tensor in CONV_TENSORS}


def test_the_f32_parameters_would_show_a_cast_and_the_conv_parts_another_order(
    model: Glm5NextForConditionalGeneration,
) -> None:
    for attention in kda_attention(model).values():
        for name in ("forget_gate.A_log", "forget_gate.dt_bias"):
            assert cast_loses(attention.get_parameter(name))
        q, k, v = (raw_bytes(part) for part in attention.get_parameter("conv1d.weight").chunk(3))
        assert len({q, k, v}) == 3


# --- open, view, decide ---------------------------------------------------------------------------


@pytest.mark.parametrize("files", ["saved", "served"])
def test_layers_are_classified_as_the_models_own_config_says(
    files: str, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(files)
    layer_types = Glm5NextConfig.from_pretrained(directory).text_config.layer_types
    kind_of = {
        "linear_attention": AttnBlockKind.KDA,
        "indexed_attention": AttnBlockKind.DSA,
        "deepseek_sparse_attention": AttnBlockKind.DSA,  # the name in transformers 5.17
    }
    with open_checkpoint(directory) as checkpoint:
        indices = list(checkpoint.layers())
        kinds = [classify_attn_block(checkpoint.layer(index).names()) for index in indices]
    assert indices == list(range(LAYERS))
    assert not any(index.is_mtp for index in indices)
    assert kinds == [kind_of[layer_type] for layer_type in layer_types]
    assert set(kinds) == {AttnBlockKind.KDA, AttnBlockKind.DSA}


def test_the_saved_config_gives_the_geometry_of_the_kda_layers(saved: Path) -> None:
    # `head_dim` is 0 in that file's text_config (the width of RoPE), and the DSA layers and the
    # vision tower have head counts and widths of their own.
    config = KdaConfig.from_json(saved / "config.json")
    geometry = (config.hidden, config.heads, config.head_dim, config.conv_kernel)
    assert geometry == (HIDDEN, HEADS, HEAD_DIM, CONV_KERNEL)


# --- refused --------------------------------------------------------------------------------------


def test_as_saved_each_kda_layer_is_refused_for_its_three_f32_conv_tensors_alone(
    saved: Path,
) -> None:
    refused = dict(refusals(saved, KDA_LAYERS, GLM5_NEXT))
    for index, error in refused.items():
        assert sorted(problem.tensor for problem in error.problems) == sorted(CONV_TENSORS)
        for problem in error.problems:
            assert problem.kind == "dtype"
            assert (problem.stored_dtype, problem.expected_dtype) == ("F32", "BF16")
            assert tuple(problem.stored_shape) == (QKV_DIM, 1, CONV_KERNEL)
            assert tuple(problem.expected_shape) == (QKV_DIM, 1, CONV_KERNEL)
            assert Path(problem.shard).name == layer_map_of(saved, PREFIX, index)[problem.tensor]
        assert "pass family=GLM5_NEXT_F32_CONV" in str(error)


def test_as_saved_the_stream_hands_out_no_layer(saved: Path) -> None:
    handed_out: BoundLayers = {}
    with pytest.raises(BindError) as refused:
        bound_by_stream(saved, GLM5_NEXT, handed_out)
    assert handed_out == {}
    assert {problem.tensor for problem in refused.value.problems} == CONV_TENSORS


@pytest.fixture(scope="module")
def cast(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model cast to bfloat16 as a whole, and saved."""
    directory = tmp_path_factory.mktemp("cast")
    load_model(saved).to(torch.bfloat16).save_pretrained(directory, max_shard_size=SHARD_SIZE)
    return directory


def test_saved_wholly_in_bf16_each_kda_layer_is_refused_for_exactly_a_log_and_dt_bias(
    cast: Path,
) -> None:
    for index, error in refusals(cast, KDA_LAYERS, GLM5_NEXT):
        shapes = {problem.tensor: tuple(problem.stored_shape) for problem in error.problems}
        assert shapes == {"self_attn.A_log": (HEADS,), "self_attn.dt_bias": (QKV_DIM,)}
        assert len(error.problems) == 2
        for problem in error.problems:
            assert problem.kind == "dtype"
            assert (problem.stored_dtype, problem.expected_dtype) == ("BF16", "F32")
            assert Path(problem.shard).name == layer_map_of(cast, PREFIX, index)[problem.tensor]


@pytest.mark.parametrize(
    "family",
    [
        GLM5_NEXT_F32_CONV,
        "auto",
    ],
    ids=str,
)
def test_saved_wholly_in_bf16_no_family_takes_a_kda_layer_and_both_are_named(
    family: FamilyChoice, cast: Path
) -> None:
    for _, error in refusals(cast, KDA_LAYERS, family):
        wrong = {problem.tensor for problem in error.problems if problem.kind == "dtype"}
        assert {"self_attn.A_log", "self_attn.dt_bias"} <= wrong
        assert "self_attn.A_log" in str(error)
        assert "self_attn.dt_bias" in str(error)


def test_saved_under_the_modules_own_names_every_renamed_tensor_is_listed(
    saved: Path, tmp_path: Path
) -> None:
    load_model(saved).save_pretrained(tmp_path, save_original_format=False)
    gate = ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")
    missing = CONV_TENSORS | {f"self_attn.{name}" for name in gate}
    unknown = {"self_attn.conv1d.weight"} | {f"self_attn.forget_gate.{name}" for name in gate}
    with open_checkpoint(tmp_path) as checkpoint:
        assert classify_attn_block(checkpoint.layer(0).names()) is AttnBlockKind.UNKNOWN
        assert classify_attn_block(checkpoint.layer(3).names()) is AttnBlockKind.DSA
    for _, error in refusals(tmp_path, KDA_LAYERS, GLM5_NEXT):
        assert {p.tensor for p in error.problems if p.kind == "missing"} == missing
        assert {p.tensor for p in error.problems if p.kind == "unknown"} == unknown
        assert len(error.problems) == len(missing) + len(unknown)


# --- bound ----------------------------------------------------------------------------------------


PARAMETERS = LOW_RANK_PARAMETERS
VIEWS = {"conv": (3 * QKV_DIM, CONV_KERNEL)}  # the model's own is [3 * qkv_dim, 1, kernel]


@pytest.mark.parametrize("family", [GLM5_NEXT_F32_CONV, "auto"], ids=str)
@pytest.mark.parametrize("bound", WAYS)
def test_as_saved_every_bound_tensor_equals_the_models_parameter_bit_for_bit(
    bound: HowBound, family: FamilyChoice, saved: Path
) -> None:
    """conv too, in F32: it is the model's own joined conv1d."""
    expected = model_tensors(kda_attention(load_model(saved)), PARAMETERS, VIEWS)
    assert list(expected) == KDA_LAYERS
    assert {tensors["conv"].dtype for tensors in expected.values()} == {torch.float32}
    assert_bit_for_bit(bound(saved, family), expected)


@pytest.mark.parametrize("family", [GLM5_NEXT, "auto"], ids=str)
@pytest.mark.parametrize("bound", WAYS)
def test_as_served_every_bound_tensor_equals_the_models_parameter_bit_for_bit(
    bound: HowBound, family: FamilyChoice, served: Path, model: Glm5NextForConditionalGeneration
) -> None:
    expected = model_tensors(kda_attention(model), PARAMETERS, VIEWS)
    for tensors in expected.values():  # stored as BF16; the model holds the same values in F32
        assert torch.equal(tensors["conv"].to(torch.bfloat16).to(torch.float32), tensors["conv"])
        tensors["conv"] = tensors["conv"].to(torch.bfloat16)
    assert_bit_for_bit(bound(served, family), expected)


def test_the_family_is_found_by_how_conv_is_stored(saved: Path, served: Path) -> None:
    assert families_of(saved, KDA_LAYERS) == dict.fromkeys(KDA_LAYERS, "GLM5_NEXT_F32_CONV")
    assert families_of(served, KDA_LAYERS) == dict.fromkeys(KDA_LAYERS, "GLM5_NEXT")


def test_the_report_counts_what_the_shards_hold(served: Path) -> None:
    config = KdaConfig.from_json(served / "config.json")
    with open_checkpoint(served) as checkpoint:
        _, report = bind_kda_weights(config, 5, checkpoint.layer(5))
    names = layer_map_of(served, PREFIX, 5)
    attention = [name for name in names if name.startswith("self_attn.")]
    stored_bytes = sum(
        load_file(served / names[name])[f"{PREFIX}5.{name}"].nbytes for name in attention
    )
    assert report.layer_idx == 5
    assert report.self_attn_seen == len(attention) == 15
    assert report.non_attn_seen == len(names) - len(attention)
    assert report.bytes == stored_bytes


# --- the model does not notice --------------------------------------------------------------------


def put_back(model: Glm5NextForConditionalGeneration, layers: BoundLayers) -> None:
    """Overwrite every parameter of the model's KDA attention with the bytes that were bound."""
    with torch.no_grad():
        for index, attention in kda_attention(model).items():
            for field, name in PARAMETERS.items():
                parameter = attention.get_parameter(name)
                parameter.copy_(layers[index][field].tensor().reshape(parameter.shape))


@pytest.mark.parametrize("bound", [bound_one_by_one, bound_by_stream])
def test_a_stranger_with_the_bound_weights_gives_the_models_attention_output(
    bound: HowBound, served: Path, model: Glm5NextForConditionalGeneration, tmp_path: Path
) -> None:
    stranger = random_model(tmp_path, seed=2)
    # 70 tokens: more than one chunk of the attention, so its recurrent state is carried along.
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(2, 70, HIDDEN, generator=generator).to(torch.bfloat16)
    own, others = kda_attention(model), kda_attention(stranger)
    with torch.no_grad():
        expected = {index: attention(tokens) for index, attention in own.items()}
        before = {index: attention(tokens) for index, attention in others.items()}
        put_back(stranger, bound(served, GLM5_NEXT))
        after = {index: attention(tokens) for index, attention in others.items()}
    assert list(expected) == KDA_LAYERS
    for index, output in expected.items():
        assert output.isfinite().all()
        assert not torch.equal(before[index], output)
        assert torch.equal(after[index], output)


def test_the_models_logits_come_back_once_its_overwritten_kda_weights_are_put_back(
    served: Path,
) -> None:
    model = load_model(served)
    tokens = torch.randint(1, 50, (1, 40), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        for attention in kda_attention(model).values():
            for parameter in attention.parameters():
                parameter.mul_(-1.5)
        overwritten = model(input_ids=tokens).logits
        put_back(model, bound_by_stream(served, GLM5_NEXT))
        after = model(input_ids=tokens).logits
    assert not torch.equal(overwritten, expected)
    assert torch.equal(after, expected)


def test_a_tensor_that_torch_made_of_a_slot_outlives_the_slot_without_a_crash(
    tmp_path: Path,
) -> None:
    """torch.frombuffer keeps the view and no buffer of it: the pages must not go under it."""
    script = """
import gc, sys, warnings
import torch
from kda_stream import KdaConfig, bind_kda_weights, open_checkpoint
from kda_stream.testing import write_checkpoint

warnings.simplefilter("ignore")
write_checkpoint(sys.argv[1])
config = KdaConfig.from_json(sys.argv[1] + "/config.json")
with open_checkpoint(sys.argv[1]) as checkpoint:
    weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0))
tensor = torch.frombuffer(weights.q_proj.data, dtype=torch.uint8)
before = tensor.sum()
weights.release()
del weights
gc.collect()
assert tensor.sum() == before
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


# --- a model in memory ----------------------------------------------------------------------------


def test_a_model_in_memory_is_bound_out_of_its_own_parameters(saved: Path) -> None:
    config = KdaConfig.from_json(saved / "config.json")
    model = load_model(saved)
    bound = bound_from_state_dict(model, config, PREFIX, KDA_LAYERS, GLM5_NEXT_F32_CONV)
    assert bound == bound_by_stream(saved, GLM5_NEXT_F32_CONV)


def test_a_model_is_filled_with_what_it_saved(saved: Path) -> None:
    report = assert_filled_as_loaded(load_model(saved), saved, KDA_LAYERS)
    assert report.tensors == len(KDA_LAYERS) * len(LOW_RANK_PARAMETERS)
    assert report.families == ("GLM5_NEXT_F32_CONV",)
    assert report.widened == ()


def test_a_filled_model_computes_what_the_loaded_one_does(saved: Path, served: Path) -> None:
    assert_filled_gives_the_same_logits(load_model(saved), saved, KDA_LAYERS)
    assert_filled_gives_the_same_logits(load_model(served), served, KDA_LAYERS, widen=True)


def test_an_encoder_with_layers_of_the_same_names_is_left_alone(saved: Path) -> None:
    encoder = torch.nn.Module()
    encoder.layers = torch.nn.ModuleList([torch.nn.Module()])
    encoder.layers[0].self_attn = torch.nn.Module()
    encoder.layers[0].self_attn.q_proj = torch.nn.Linear(2, 2)
    pair = torch.nn.ModuleDict({"decoder": load_model(saved), "encoder": encoder})
    kept = raw_bytes(encoder.layers[0].self_attn.q_proj.weight)
    with open_checkpoint(saved) as checkpoint:
        report = fill_kda_layers(pair, checkpoint)
    assert report.layers == tuple(KDA_LAYERS)
    assert raw_bytes(encoder.layers[0].self_attn.q_proj.weight) == kept


def test_a_model_with_two_decoders_is_refused_and_nothing_is_written(saved: Path) -> None:
    pair = torch.nn.ModuleList([load_model(saved), load_model(saved)])
    before = {name: raw_bytes(parameter) for name, parameter in pair.named_parameters()}
    with (
        open_checkpoint(saved) as checkpoint,
        pytest.raises(
            ArgumentError,
            match=r"more than one decoder.*got 0\.model\.language_model\.layers, 1\.model",
        ),
    ):
        fill_kda_layers(pair, checkpoint)
    assert before == {name: raw_bytes(parameter) for name, parameter in pair.named_parameters()}


def test_a_model_is_filled_with_conv_in_bf16_when_that_may_be_widened(served: Path) -> None:
    report = assert_filled_as_loaded(load_model(served), served, KDA_LAYERS, widen=True)
    assert report.families == ("GLM5_NEXT",)
    assert report.widened == ("conv",)


def test_a_model_is_not_filled_where_dtypes_differ_and_nothing_is_written(served: Path) -> None:
    model = load_model(served)
    before = {name: raw_bytes(parameter) for name, parameter in model.named_parameters()}
    with (
        open_checkpoint(served) as checkpoint,
        pytest.raises(BindError, match="conv is float32, stored BF16") as caught,
    ):
        fill_kda_layers(model, checkpoint)
    assert "widen=True" in str(caught.value)
    assert before == {name: raw_bytes(parameter) for name, parameter in model.named_parameters()}


def test_a_model_cast_to_one_dtype_is_not_filled(saved: Path) -> None:
    model = load_model(saved).to(torch.bfloat16)
    with (
        open_checkpoint(saved) as checkpoint,
        pytest.raises(BindError, match=r"a_log is bfloat16, stored F32.*dt_bias is bfloat16"),
    ):
        fill_kda_layers(model, checkpoint, widen=True)


def test_a_model_of_another_geometry_is_not_filled(saved: Path) -> None:
    config = small_config()
    config.text_config.linear_num_heads = HEADS + 1
    model = Glm5NextForConditionalGeneration(config)
    with (
        open_checkpoint(saved) as checkpoint,
        pytest.raises(BindError, match=r"a_log is \[6\], stored \[5\]"),
    ):
        fill_kda_layers(model, checkpoint, layers=[1])


def test_a_model_without_memory_is_not_filled(saved: Path) -> None:
    with torch.device("meta"):
        model = Glm5NextForConditionalGeneration(small_config())
    with open_checkpoint(saved) as checkpoint, pytest.raises(BindError, match="meta device"):
        fill_kda_layers(model, checkpoint)


def test_a_model_that_has_no_such_layers_is_refused(saved: Path) -> None:
    with open_checkpoint(saved) as checkpoint:
        with pytest.raises(ArgumentError, match="no such KDA layers"):
            fill_kda_layers(torch.nn.Linear(2, 2), checkpoint)
        with pytest.raises(ArgumentError, match="0, 1, 2, 4, 5, 6"):
            fill_kda_layers(load_model(saved), checkpoint, layers=[0, 3])
