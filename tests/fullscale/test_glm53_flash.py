"""The published GLM-5.3-Flash checkpoint at full scale: 62 shards, 76,108 tensors, 328 GB long."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.html_pages import read_page

from kda_stream import KDA_TENSORS, open_checkpoint, stream_kda_layers

pytestmark = pytest.mark.slow

SLOT_BYTES = 275_481_088
WHOLE_LAYERS = (0, 1, 9)  # 1 and 9 lie in two shards each
MIB = 1024**2


def load_replica_module() -> ModuleType:
    path = Path(__file__).with_name("replica.py")
    spec = importlib.util.spec_from_file_location("glm53_replica", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def replica() -> ModuleType:
    return load_replica_module()


@pytest.fixture(scope="module")
def checkpoint_path(replica: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm53")
    replica.write_replica(path, set(WHOLE_LAYERS))
    return path


def command_json(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kda_stream.cli", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_verify_finds_62_shards_34_kda_11_dsa_1_mtp_and_no_problem(checkpoint_path: Path) -> None:
    answer = command_json("verify", str(checkpoint_path))
    assert answer["shards"] == 62
    assert answer["tensors"] == 76_108
    assert answer["layers"] == {"KDA": 34, "DSA": 11, "UNKNOWN": 0, "MTP": 1}
    assert answer["problems"] == []
    assert answer["notes"] == []


def test_the_whole_checkpoint_is_a_page_of_less_than_a_megabyte(
    checkpoint_path: Path, tmp_path: Path
) -> None:
    answer = command_json("inspect", str(checkpoint_path), "--html", str(tmp_path / "page.html"))
    assert answer["tensors"] == 76_108
    page = read_page(tmp_path / "page.html")
    assert len(page.source) < 1_000_000
    assert len(page.rows("shards")) == 62
    assert sum(int(row[3]) for row in page.rows("layers")) == 34 * SLOT_BYTES
    pieces = page.root.one("ol", class_="map").all("title")
    assert 34 <= len(pieces) <= 4 * 34


def test_every_layer_streams_within_two_slots_and_64_mib(checkpoint_path: Path) -> None:
    answer = command_json("stream", str(checkpoint_path))
    assert answer["layers"] == 34
    assert answer["bytes"] == 34 * SLOT_BYTES == 9_366_356_992
    assert answer["peak_anonymous_bytes"] <= 2 * SLOT_BYTES + 64 * MIB


@pytest.mark.parametrize("read", ["mapped", "positional", "direct"])
def test_every_byte_of_whole_layers_is_the_stored_one(
    replica: ModuleType, checkpoint_path: Path, read: Any
) -> None:
    leaves = {
        "q_proj": ["q_proj.weight"],
        "k_proj": ["k_proj.weight"],
        "v_proj": ["v_proj.weight"],
        "conv": ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"],
        "f_a": ["f_a_proj.weight"],
        "f_b": ["f_b_proj.weight"],
        "g_a": ["g_a_proj.weight"],
        "g_b": ["g_b_proj.weight"],
        "b_proj": ["b_proj.weight"],
        "a_log": ["A_log"],
        "dt_bias": ["dt_bias"],
        "o_norm": ["o_norm.weight"],
        "o_proj": ["o_proj.weight"],
    }
    compared = 0
    with (
        open_checkpoint(checkpoint_path) as checkpoint,
        stream_kda_layers(checkpoint, layers=WHOLE_LAYERS, read=read) as stream,
    ):
        for layer in stream:
            assert len(layer.report.shards) == (1 if layer.index == 0 else 2)
            prefix = replica.PREFIX.format(i=layer.index) + "self_attn."
            for field, tensor in layer.weights.items():
                at = 0
                for leaf in leaves[field]:
                    size = len(tensor.data) // len(leaves[field])
                    for start in range(0, size, 8 * MIB):
                        length = min(8 * MIB, size - start)
                        expected = replica.tensor_bytes(prefix + leaf, start, length)
                        assert tensor.data[at + start : at + start + length] == expected, leaf
                        compared += length
                    at += size
    assert compared == len(WHOLE_LAYERS) * SLOT_BYTES
    assert len(KDA_TENSORS) == sum(map(len, leaves.values()))
