"""`kda_stream.testing.write_replica`: sparse checkpoints of every family, at a small geometry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors

from kda_stream import (
    FAMILIES,
    KIMI_K3,
    KdaConfig,
    KdaFamily,
    PayloadValueError,
    bind_kda_weights,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.testing import EDGE_BYTES, Replica, StoredTensor, payload, write_replica

UNEVEN = KdaConfig(hidden=24, heads=3, head_dim=70, conv_kernel=5)


def small(family: KdaFamily) -> Replica:
    other = (StoredTensor(f"{family.block}g_proj.weight", "BF16", (3, 24)),)
    return Replica(family, UNEVEN, layers=12, kda_layers=(0, 2, 10, 11), other=other, shards=5)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_safetensors_package_reads_the_edges_and_zeros_between(
    family: KdaFamily, tmp_path: Path
) -> None:
    replica = small(family)
    deserialize: Any = safetensors.deserialize  # the package has no types for it
    found = {}
    for file in write_replica(tmp_path / "replica", replica).glob("*.safetensors"):
        for name, tensor in deserialize(file.read_bytes()):
            found[name] = StoredTensor(name, tensor["dtype"], tuple(tensor["shape"]))
            expected = bytearray(found[name].nbytes)
            for begin, end in replica.written().get(name, ()):
                expected[begin:end] = payload(name, begin, end - begin)
            assert tensor["data"] == bytes(expected), name
    assert tuple(found[tensor.name] for tensor in replica.tensors()) == replica.tensors()
    assert len(found) == len(replica.tensors())


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_each_kda_layer_streams_as_the_family_it_was_written_in(
    family: KdaFamily, tmp_path: Path
) -> None:
    replica = small(family)
    write_replica(tmp_path, replica)
    streamed = []
    with (
        open_checkpoint(tmp_path) as checkpoint,
        stream_kda_layers(checkpoint, family="auto") as stream,
    ):
        for layer in stream:
            streamed.append(int(layer.index))
            assert layer.report.family == family.name
            prefix = f"{replica.prefix}{layer.index}."
            q_proj, a_log = layer.weights.q_proj.data, layer.weights.a_log.data
            name = f"{prefix}{family.block}q_proj.weight"
            assert q_proj[:EDGE_BYTES] == payload(name, 0, EDGE_BYTES)
            assert q_proj[-EDGE_BYTES:] == payload(name, len(q_proj) - EDGE_BYTES, EDGE_BYTES)
            assert not any(q_proj[EDGE_BYTES:-EDGE_BYTES])
            assert a_log == payload(f"{prefix}{family.block}A_log", 0, 3 * 4)
    assert tuple(streamed) == replica.kda_layers


def test_the_config_counts_the_layers_from_where_the_family_does(tmp_path: Path) -> None:
    for family in FAMILIES:
        folder = write_replica(tmp_path / family.name, small(family))
        text = json.loads((folder / "config.json").read_text())["text_config"]
        base = 1 if family.name.startswith("KIMI") else 0
        linear = text["linear_attn_config"]
        assert linear["kda_layers"] == [n + base for n in (0, 2, 10, 11)]
        assert linear["full_attn_layers"] == [n + base for n in (1, 3, 4, 5, 6, 7, 8, 9)]
        assert KdaConfig.from_json(folder / "config.json") == UNEVEN


def test_a_byte_planted_in_the_tail_of_a_log_is_refused(tmp_path: Path) -> None:
    """So the zeros that a replica has there are needed, and were read."""
    folder = write_replica(tmp_path, small(KIMI_K3))
    name = "language_model.model.layers.10.self_attn.A_log"
    with open_checkpoint(folder) as checkpoint:
        place = checkpoint.tensor(name).place
        bind_kda_weights(UNEVEN, 10, checkpoint.layer(10), family="auto")
    assert place is not None
    with open(place.file.path, "r+b") as file:
        file.seek(place.begin + 3 * 4)
        file.write(b"\1")
    with open_checkpoint(folder) as checkpoint, pytest.raises(PayloadValueError) as refused:
        bind_kda_weights(UNEVEN, 10, checkpoint.layer(10), family="auto")
    assert refused.value.tensor == "self_attn.A_log"
