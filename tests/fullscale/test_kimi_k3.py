"""Kimi-K3's 69 KDA layers at full scale, as sparse files: 96 shards, 61 GB long.

What the published files hold is written out here by hand, so that neither the family's table nor
the replica's writer is its own judge.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kda_stream import KIMI_K3, KdaConfig, kda_slot_bytes, open_checkpoint
from kda_stream.testing import write_replica

pytestmark = pytest.mark.slow

PREFIX = "language_model.model.layers."
CONV = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
# 96 heads of 128 make 12,288 rows; the model is 7,168 wide; the convolution takes 4 values.
STORED = {
    "q_proj.weight": ("BF16", (12288, 7168)),
    "k_proj.weight": ("BF16", (12288, 7168)),
    "v_proj.weight": ("BF16", (12288, 7168)),
    "q_conv1d.weight": ("F32", (12288, 1, 4)),
    "k_conv1d.weight": ("F32", (12288, 1, 4)),
    "v_conv1d.weight": ("F32", (12288, 1, 4)),
    "f_a_proj.weight": ("BF16", (128, 7168)),
    "f_b_proj.weight": ("BF16", (12288, 128)),
    "b_proj.weight": ("BF16", (96, 7168)),
    "g_proj.weight": ("BF16", (12288, 7168)),
    "A_log": ("F32", (128,)),  # 96 values, and 32 zeros
    "dt_bias": ("F32", (12288,)),
    "o_norm.weight": ("F32", (128,)),
    "o_proj.weight": ("BF16", (7168, 12288)),
}
LAYER_BYTES = (
    5 * 176_160_768  # q, k, v, g and o: 12,288 * 7,168 * 2
    + 3 * 196_608  # the parts of conv: 12,288 * 4 * 4
    + 1_835_008  # f_a: 128 * 7,168 * 2
    + 3_145_728  # f_b: 12,288 * 128 * 2
    + 1_376_256  # b: 96 * 7,168 * 2
    + 512 + 49_152 + 512  # A_log, dt_bias and o_norm: 128, 12,288 and 128 times 4
)  # fmt: skip
# 4 KiB for each of 14 tensors, conv once more, and room for a b_proj in F32, of which the dtype is
# not known.
SLOT_BYTES = LAYER_BYTES + 14 * 4096 + 3 * 196_608 + 1_376_256
MIB = 1024**2

# Streams the checkpoint and looks for the planted bytes: at either end of the values of each
# tensor, those of the name that belongs there. Prints what it saw.
STREAM = """
import json, sys
from kda_stream import open_checkpoint, stream_kda_layers
from kda_stream.testing import payload

prefix, edge = "language_model.model.layers.", 64
leaves = {
    "q_proj": ["q_proj.weight"], "k_proj": ["k_proj.weight"], "v_proj": ["v_proj.weight"],
    "conv": ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"],
    "f_a": ["f_a_proj.weight"], "f_b": ["f_b_proj.weight"], "g": ["g_proj.weight"],
    "b_proj": ["b_proj.weight"], "a_log": ["A_log"], "dt_bias": ["dt_bias"],
    "o_norm": ["o_norm.weight"], "o_proj": ["o_proj.weight"],
}

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

def misplaced(index, weights):
    for field, names in leaves.items():
        data = weights[field].data
        size = len(data) // len(names)
        for at, leaf in enumerate(names):
            name = f"{prefix}{index}.self_attn.{leaf}"
            begin, end = at * size, (at + 1) * size
            first, last = payload(name, 0, edge), payload(name, size - edge, edge)
            if data[begin : begin + edge] != first or data[end - edge : end] != last:
                yield name

wrong, layers, peak, seen = [], [], 0, set()
with open_checkpoint(sys.argv[1]) as checkpoint:
    with stream_kda_layers(checkpoint, family="auto") as stream:
        for layer in stream:
            weights = dict(layer.weights.items())
            layers.append(int(layer.index))
            seen.add((layer.report.family, layer.report.bound, layer.report.bytes, *weights))
            wrong += misplaced(layer.index, weights)
            peak = max(peak, anonymous_bytes())
        report = stream.report
print(json.dumps({
    "layers": layers, "seen": sorted(seen), "wrong": wrong,
    "bytes": report.bytes, "slots": report.slots, "slot_bytes": report.slot_bytes, "peak": peak,
}))
"""


def kda_layers() -> list[int]:
    """Every fourth layer is another kind, and so is the last one: 69 of 93 are left."""
    return [number for number in range(93) if number % 4 != 3 and number != 92]


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_replica(tmp_path_factory.mktemp("kimi_k3"))


def printed_json(*command: str) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def command_json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = printed_json(
        sys.executable, "-m", "kda_stream.cli", *arguments, "--json"
    )
    return answer


@pytest.fixture(scope="module")
def streamed(checkpoint_path: Path) -> dict[str, Any]:
    if sys.platform != "linux":
        pytest.skip("the peak is read from /proc/self/status")
    answer: dict[str, Any] = printed_json(sys.executable, "-c", STREAM, str(checkpoint_path))
    return answer


def test_the_numbers_written_out_here_are_those_of_a_kimi_k3() -> None:
    assert LAYER_BYTES == 887_800_832
    assert len(kda_layers()) == 69
    assert kda_slot_bytes(KdaConfig(7168, 96, 128, 4), KIMI_K3) == SLOT_BYTES == 889_824_256


def test_the_replica_takes_a_thousandth_of_its_length_on_the_disk(checkpoint_path: Path) -> None:
    shards = [path.stat() for path in checkpoint_path.glob("*.safetensors")]
    assert len(shards) == 96
    assert sum(shard.st_size for shard in shards) > 69 * LAYER_BYTES
    assert sum(shard.st_blocks * 512 for shard in shards) < 69 * LAYER_BYTES // 1000


def test_the_config_counts_its_layers_from_1(checkpoint_path: Path) -> None:
    text = json.loads((checkpoint_path / "config.json").read_text())["text_config"]
    linear = text["linear_attn_config"]
    assert linear["kda_layers"] == [number + 1 for number in kda_layers()]
    assert linear["full_attn_layers"] == [*range(4, 93, 4), 93]


def test_every_header_holds_the_fourteen_tensors_of_each_kda_layer(checkpoint_path: Path) -> None:
    with open_checkpoint(checkpoint_path) as checkpoint:
        for number in kda_layers():
            prefix = f"{PREFIX}{number}.self_attn."
            names = [name for name in checkpoint.layer(number).names() if "self_attn." in name]
            assert len(names) == len(STORED) == 14
            for leaf, (dtype, shape) in STORED.items():
                info = checkpoint.info(prefix + leaf)
                assert (info.dtype, tuple(info.shape)) == (dtype, shape), leaf


def test_inspect_finds_69_kda_layers_and_takes_no_mla_layer_for_one(checkpoint_path: Path) -> None:
    """An MLA layer has a g_proj, too."""
    answer = command_json("inspect", str(checkpoint_path))
    assert (answer["prefix"], len(answer["shards"])) == (PREFIX, 96)
    assert answer["layers"] == {"KDA": 69, "DSA": 0, "UNKNOWN": 24, "MTP": 0}
    assert answer["kda_bytes"] == 69 * LAYER_BYTES == 61_258_257_408
    files = [shard["file"] for shard in answer["shards"]]
    for layer in answer["layer_details"]:
        is_kda = layer["index"] in kda_layers()
        assert layer["family"] == ("KIMI_K3" if is_kda else None)
        assert bool(layer["kda_shards"]) is is_kda
        assert set(layer["kda_shards"]) <= set(files)
        assert layer["kind"] == ("KDA" if is_kda else "UNKNOWN")
        assert layer["kda_bytes"] == (LAYER_BYTES if is_kda else 0)
        assert not layer["is_broken_kda"]


def test_verify_finds_no_problem_in_69_layers_of_kimi_k3(checkpoint_path: Path) -> None:
    answer = command_json("verify", str(checkpoint_path), "--family", "auto")
    assert (answer["sound"], answer["problems"]) == (True, [])
    assert (answer["kda_layers_bound"], answer["families"]) == (69, {"KIMI_K3": 69})


def test_inspect_shows_all_of_it_on_one_screen(checkpoint_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kda_stream.cli", "inspect", str(checkpoint_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    assert f"{'':12}{'KKK?' * 20}" in lines
    assert f"{'':12}{'KKK?' * 3}?" in lines
    assert "  family    KIMI_K3 (69 layers): Kimi-K3, and its dequantised export" in lines
    assert any("69 layers of 887,800,832 bytes, 61,258,257,408 in all" in line for line in lines)
    assert re.search(r"spanning  layer \d+ in shards \d+ \+ \d+, ", done.stdout)
    other = 93 + 24 * 5  # a norm in each layer, and an MLA layer's tensors
    assert re.search(
        rf"BF16 .* bytes in {69 * 8 + other} tensors, .* in {other} not KDA", done.stdout
    )
    assert re.search(rf"F32 .* bytes in {69 * 6} tensors, all KDA", done.stdout)


def test_the_command_streams_69_layers_of_kimi_k3(checkpoint_path: Path) -> None:
    answer = command_json("stream", str(checkpoint_path), "--family", "auto", "--lock", "off")
    assert (answer["layers"], answer["families"]) == (69, {"KIMI_K3": 69})
    assert answer["layer_numbers"] == kda_layers()
    assert answer["bytes"] == 61_258_257_408
    assert answer["slot_bytes"] <= SLOT_BYTES


def test_every_layer_streams_in_order_with_all_of_its_bytes(streamed: dict[str, Any]) -> None:
    assert streamed["layers"] == kda_layers()
    fields = ["q_proj", "k_proj", "v_proj", "conv", "f_a", "f_b", "g"]
    fields += ["b_proj", "a_log", "dt_bias", "o_norm", "o_proj"]
    assert streamed["seen"] == [["KIMI_K3", 14, LAYER_BYTES, *fields]]
    assert streamed["bytes"] == 61_258_257_408


def test_what_was_planted_in_each_tensor_is_found_where_it_belongs(
    streamed: dict[str, Any],
) -> None:
    assert streamed["wrong"] == []


def test_the_stream_stays_within_two_slots_and_64_mib(streamed: dict[str, Any]) -> None:
    assert streamed["slots"] == 2
    assert streamed["peak"] <= 2 * SLOT_BYTES + 64 * MIB


def test_with_auto_a_slot_is_as_large_as_the_layers_need(streamed: dict[str, Any]) -> None:
    assert streamed["slot_bytes"] <= SLOT_BYTES
