"""Where a layer's tensors lie in a slot, however they lie in their files; in how few reads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import (
    FIELD_LEAVES,
    GLM,
    MEDIUM,
    UNEVEN,
    Geometry,
    Stored,
    kda_block,
    save_raw_shard,
    save_shard,
    write_index,
)

from kda_stream import (
    ArgumentError,
    KdaConfig,
    PinnedArena,
    RawTensor,
    bind_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
)
from kda_stream.kda.check import check_kda_block
from kda_stream.kda.families import GLM5_NEXT
from kda_stream.layout import Layout, fields_of, lay_out

PREFIX = "model.layers.0.self_attn."
PAGE = 4096
CONVS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
LARGE_CONV = Geometry(hidden=16, heads=64, head_dim=128, conv_kernel=80)
"""Each conv tensor is 1.3 MB: more than is read along for the sake of one long read."""

each_read = pytest.mark.parametrize("read", ["mapped", "positional", "direct", "auto"])


def config_of(geometry: Geometry) -> KdaConfig:
    return KdaConfig(geometry.hidden, geometry.heads, geometry.head_dim, geometry.conv_kernel)


def block_of(geometry: Geometry) -> dict[str, Stored]:
    return {PREFIX + leaf: stored for leaf, stored in kda_block(geometry).items()}


def in_order(geometry: Geometry, leaves: Sequence[str]) -> dict[str, Stored]:
    block = block_of(geometry)
    return {PREFIX + leaf: block.pop(PREFIX + leaf) for leaf in leaves} | block


def laid_out(path: Path, geometry: Geometry, alignment: int | None = None) -> Layout:
    with open_checkpoint(path) as checkpoint:
        config = config_of(geometry)
        block = check_kda_block(config, 0, checkpoint.layer(0), GLM5_NEXT)
        return lay_out(fields_of(config, GLM5_NEXT, block.tensors), block.tensors, alignment)


def assert_bound(
    path: Path, geometry: Geometry, read: Any = "positional", alignment: int | None = None
) -> dict[str, int]:
    """Bind the layer, compare every byte; where each weight begins in memory."""
    block = block_of(geometry)
    with (
        open_checkpoint(path) as checkpoint,
        PinnedArena(kda_slot_bytes(config_of(geometry)), lock="off") as arena,
    ):
        slot = arena.claim()
        slot.memory()[:] = b"\xa5" * slot.nbytes
        slot.abandon()
        weights, report = bind_kda_weights(
            *(config_of(geometry), 0, checkpoint.layer(0)),
            into=arena,
            read=read,
            alignment=alignment,
        )
        begins = {}
        for name, tensor in weights.items():
            full = [PREFIX + leaf for leaf in FIELD_LEAVES[name]]
            assert bytes(tensor.data) == b"".join(block[n].bytes_of(n) for n in full), name
            begins[name] = int(np.frombuffer(tensor.data, np.uint8).ctypes.data)
        bits = PAGE
        for begin in begins.values():
            bits |= begin
        assert report.read.alignment_bytes == bits & -bits
        if alignment is not None:
            assert report.read.alignment_bytes >= alignment
        weights.release()
    return begins


def assert_sound(layout: Layout, geometry: Geometry) -> None:
    """No two fields share a byte, reads are in order and within the slot, nothing is missed."""
    config = config_of(geometry)
    fields = {
        name: sum(spec.expected_bytes(config) for spec in specs)
        for name, specs in GLM5_NEXT.fields.items()
    }
    assert set(layout.begins) == set(fields)
    places = sorted((begin, begin + fields[name]) for name, begin in layout.begins.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    reads = [(part.destination, part.destination + part.end - part.begin) for part in layout.wanted]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(reads))
    assert layout.end <= kda_slot_bytes(config_of(geometry))
    assert max(end for _, end in reads) <= layout.end


# --- how few reads --------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [MEDIUM, UNEVEN, Geometry(64, 4, 16, 4)], ids=repr)
def test_a_layer_as_the_safetensors_package_writes_it_is_one_read_and_the_three_conv_tensors(
    tmp_path: Path, geometry: Geometry
) -> None:
    path = tmp_path / "model.safetensors"
    save_shard(path, block_of(geometry))
    layout = laid_out(path, geometry)
    assert_sound(layout, geometry)
    assert len(layout.wanted) <= 4
    assert_bound(path, geometry)


def test_a_layer_of_glm_5_3_flash_between_other_tensors_is_two_to_four_reads_and_the_conv_tensors(
    tmp_path: Path,
) -> None:
    """In the package's order, by size of element and then by name, the F32 ones lie apart."""
    rows: dict[str, Stored] = {}
    for layer in (0, 1):
        rows |= {f"model.layers.{layer}.self_attn.{leaf}": t for leaf, t in kda_block(GLM).items()}
        rows[f"model.layers.{layer}.input_layernorm.weight"] = Stored("BF16", (4096,))
        rows[f"model.layers.{layer}.mlp.down_proj.weight"] = Stored("F8_E4M3", (4096, 512))
        rows[f"model.layers.{layer}.hc_attn_base"] = Stored("F32", (24,))
    size = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
    ordered = dict(sorted(rows.items(), key=lambda row: (-size[row[1].dtype], row[0])))
    path = tmp_path / "model.safetensors"
    save_raw_shard(path, ordered, sparse=True)
    layout = laid_out(path, GLM)
    assert_sound(layout, GLM)
    apart = [
        part for part in layout.wanted if len(part.starts) == 1 and "conv" in part.starts[0][1]
    ]
    assert 2 <= len(layout.wanted) - len(apart) <= 4
    assert len(apart) <= 3


@pytest.mark.parametrize("order", [CONVS, (CONVS[1], CONVS[0], CONVS[2])], ids=["qkv", "kqv"])
def test_conv_tensors_side_by_side_in_their_order_are_one_read_and_in_another_order_are_not(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    path = tmp_path / "model.safetensors"
    save_raw_shard(path, in_order(UNEVEN, order))
    layout = laid_out(path, UNEVEN)
    assert_sound(layout, UNEVEN)
    begin = layout.begins["conv"]
    conv = [part for part in layout.wanted if begin <= part.destination < begin + 270]
    assert len(conv) == (1 if order == CONVS else 3)
    assert_bound(path, UNEVEN)


def test_large_conv_tensors_are_not_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    leaves = ["q_proj.weight", "q_conv1d.weight", "k_proj.weight", "v_conv1d.weight"]
    save_raw_shard(path, in_order(LARGE_CONV, leaves))
    layout = laid_out(path, LARGE_CONV)
    assert_sound(layout, LARGE_CONV)
    read = sum(part.end - part.begin for part in layout.wanted)
    assert read == sum(stored.nbytes for stored in block_of(LARGE_CONV).values())
    assert_bound(path, LARGE_CONV)


# --- where tensors lie ----------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 2, 4, 514, 4094])
def test_tensors_lie_as_far_into_a_page_as_in_their_file(tmp_path: Path, start: int) -> None:
    path = tmp_path / "model.safetensors"
    at = save_raw_shard(path, block_of(MEDIUM), start=start)
    begins = assert_bound(path, MEDIUM, "direct")
    apart = {"conv"} | ({"a_log", "dt_bias"} if start % 4 else set())
    for name, (leaf, *_) in FIELD_LEAVES.items():
        if name not in apart:
            assert begins[name] % PAGE == at[PREFIX + leaf] % PAGE, name
        else:
            assert begins[name] % 256 == 0, name


@pytest.mark.parametrize("start", [1, 3, 7, 4095])
def test_elements_that_lie_askew_in_their_file_lie_straight_in_memory(
    tmp_path: Path, start: int
) -> None:
    path = tmp_path / "model.safetensors"
    save_raw_shard(path, block_of(MEDIUM), start=start)
    for name, begin in assert_bound(path, MEDIUM, "direct").items():
        assert begin % (4 if name in ("a_log", "dt_bias") else 2) == 0, name


@each_read
@pytest.mark.parametrize("alignment", [None, 1, 2, 64, 256, 512, 4096])
@pytest.mark.parametrize("start", [0, 5, 4090])
def test_an_alignment_that_was_asked_for_is_had_on_every_path(
    tmp_path: Path, read: str, alignment: int | None, start: int
) -> None:
    path = tmp_path / "model.safetensors"
    save_raw_shard(path, block_of(MEDIUM), start=start)
    assert_bound(path, MEDIUM, read, alignment)


@pytest.mark.parametrize("alignment", [0, -1, 3, 8192, 256.0, "256", True, 2**64])
def test_what_is_no_alignment_is_refused(tmp_path: Path, alignment: Any) -> None:
    path = tmp_path / "model.safetensors"
    save_raw_shard(path, block_of(UNEVEN))
    with open_checkpoint(path) as checkpoint:
        config = config_of(UNEVEN)
        with pytest.raises(ArgumentError, match="power of two"):
            bind_kda_weights(config, 0, checkpoint.layer(0), alignment=alignment)


# --- files of every kind --------------------------------------------------------------------------


@each_read
@pytest.mark.parametrize("geometry", [Geometry(1, 1, 1, 1), UNEVEN, LARGE_CONV], ids=repr)
@pytest.mark.parametrize("seed", range(4))
def test_tensors_in_any_order_between_others_at_any_offset_are_bound(
    tmp_path: Path, read: str, geometry: Geometry, seed: int
) -> None:
    """The last tensor ends where the file does, which is at no block's border."""
    order = random.Random(seed)
    rows = list(block_of(geometry).items())
    order.shuffle(rows)
    tensors: dict[str, Stored] = {}
    for n, (name, stored) in enumerate(rows):
        nbytes = order.choice([0, 0, 1, 3, 511, 4097, 70_000])
        tensors[f"between.{n}"] = Stored("U8", (nbytes,))
        tensors[name] = stored
    path = tmp_path / "model.safetensors"
    save_raw_shard(path, tensors, start=order.randrange(4096))
    assert_sound(laid_out(path, geometry), geometry)
    assert_bound(path, geometry, read)


@each_read
@pytest.mark.parametrize("shards", [2, 3, 15])
def test_a_layer_in_several_shards_is_bound(tmp_path: Path, read: str, shards: int) -> None:
    tensors = block_of(UNEVEN)
    files = {name: f"model-{n % shards:05}.safetensors" for n, name in enumerate(tensors)}
    for n, file in enumerate(sorted(set(files.values()))):
        held = {name: t for name, t in tensors.items() if files[name] == file}
        save_raw_shard(tmp_path / file, held, start=n)
    write_index(tmp_path, tensors, files)
    assert_sound(laid_out(tmp_path, UNEVEN), UNEVEN)
    assert_bound(tmp_path, UNEVEN, read)


@given(
    order=st.permutations(list(kda_block(UNEVEN))),
    gaps=st.lists(st.sampled_from([0, 0, 0, 1, 2, 4096]), min_size=15, max_size=15),
    start=st.integers(0, 4097),
    alignment=st.sampled_from([None, None, 1, 256, 4096]),
)
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_file_is_laid_out_soundly_and_bound_to_the_byte(
    tmp_path: Path, order: list[str], gaps: list[int], start: int, alignment: int | None
) -> None:
    block = block_of(UNEVEN)
    tensors: dict[str, Stored] = {}
    for n, (leaf, gap) in enumerate(zip(order, gaps, strict=True)):
        tensors[PREFIX + leaf] = block[PREFIX + leaf]
        tensors[f"between.{n}"] = Stored("U8", (gap,))
    path = tmp_path / "model.safetensors"
    save_raw_shard(path, tensors, start=start)
    assert_sound(laid_out(path, UNEVEN, alignment), UNEVEN)
    for read in ("mapped", "positional", "direct"):
        assert_bound(path, UNEVEN, read, alignment)


@each_read
def test_a_source_may_hold_some_tensors_in_files_and_some_in_memory(
    tmp_path: Path, read: Any
) -> None:
    path = tmp_path / "model.safetensors"
    block = block_of(UNEVEN)
    save_raw_shard(path, block)
    config = config_of(UNEVEN)
    with open_checkpoint(path) as checkpoint:
        layer = checkpoint.layer(0)

        class Source:
            def names(self) -> list[str]:
                return layer.names()

            def get(self, name: str) -> RawTensor | None:
                held = layer.get(name)
                if held is None or sum(name.encode()) % 2:
                    return held
                return RawTensor(held.dtype, held.shape, bytes(held.data))

        weights, report = bind_kda_weights(config, 0, Source(), read=read)
        for name, tensor in weights.items():
            full = [PREFIX + leaf for leaf in FIELD_LEAVES[name]]
            assert bytes(tensor.data) == b"".join(block[n].bytes_of(n) for n in full), name
        assert report.read.path != "memory"
        weights.release()
