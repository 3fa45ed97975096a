"""The fifteen tensors of a KDA block, written out as they stand in GLM-5.3-Flash."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from kda_stream import DSA_MARKERS, KDA_TENSORS, ArgumentError, KdaConfig, KdaDtype, TensorSpec
from kda_stream.kda.tensors import Padded

GLM_CONFIG = KdaConfig(hidden=4096, heads=64, head_dim=128, conv_kernel=4)

GLM_TABLE = [
    ("self_attn.q_proj.weight", "BF16", (8192, 4096), 67_108_864),
    ("self_attn.k_proj.weight", "BF16", (8192, 4096), 67_108_864),
    ("self_attn.v_proj.weight", "BF16", (8192, 4096), 67_108_864),
    ("self_attn.q_conv1d.weight", "BF16", (8192, 1, 4), 65_536),
    ("self_attn.k_conv1d.weight", "BF16", (8192, 1, 4), 65_536),
    ("self_attn.v_conv1d.weight", "BF16", (8192, 1, 4), 65_536),
    ("self_attn.f_a_proj.weight", "BF16", (128, 4096), 1_048_576),
    ("self_attn.f_b_proj.weight", "BF16", (8192, 128), 2_097_152),
    ("self_attn.g_a_proj.weight", "BF16", (128, 4096), 1_048_576),
    ("self_attn.g_b_proj.weight", "BF16", (8192, 128), 2_097_152),
    ("self_attn.b_proj.weight", "BF16", (64, 4096), 524_288),
    ("self_attn.A_log", "F32", (64,), 256),
    ("self_attn.dt_bias", "F32", (8192,), 32_768),
    ("self_attn.o_norm.weight", "BF16", (128,), 256),
    ("self_attn.o_proj.weight", "BF16", (4096, 8192), 67_108_864),
]

# No extent here equals another, so that no shape is right by chance.
UNEVEN_CONFIG = KdaConfig(hidden=24, heads=3, head_dim=5, conv_kernel=2)
UNEVEN_SHAPES = {
    "self_attn.q_proj.weight": (15, 24),
    "self_attn.k_proj.weight": (15, 24),
    "self_attn.v_proj.weight": (15, 24),
    "self_attn.q_conv1d.weight": (15, 1, 2),
    "self_attn.k_conv1d.weight": (15, 1, 2),
    "self_attn.v_conv1d.weight": (15, 1, 2),
    "self_attn.f_a_proj.weight": (5, 24),
    "self_attn.f_b_proj.weight": (15, 5),
    "self_attn.g_a_proj.weight": (5, 24),
    "self_attn.g_b_proj.weight": (15, 5),
    "self_attn.b_proj.weight": (3, 24),
    "self_attn.A_log": (3,),
    "self_attn.dt_bias": (15,),
    "self_attn.o_norm.weight": (5,),
    "self_attn.o_proj.weight": (24, 15),
}


def test_the_table_is_that_of_glm_5_3_flash() -> None:
    found = [
        (
            spec.name,
            spec.dtype.value,
            spec.expected_shape(GLM_CONFIG),
            spec.expected_bytes(GLM_CONFIG),
        )
        for spec in KDA_TENSORS
    ]
    assert sorted(found) == sorted(GLM_TABLE)


def test_q_k_and_v_stand_in_that_order() -> None:
    names = [spec.name for spec in KDA_TENSORS]
    convs = [name for name in names if "_conv1d" in name]
    assert convs == [f"self_attn.{part}_conv1d.weight" for part in "qkv"]


def test_a_layer_is_275_481_088_bytes_and_all_34_are_9_366_356_992() -> None:
    layer_bytes = sum(spec.expected_bytes(GLM_CONFIG) for spec in KDA_TENSORS)
    assert layer_bytes == 275_481_088
    assert 34 * layer_bytes == 9_366_356_992


def test_shapes_follow_the_geometry() -> None:
    found = {spec.name: spec.expected_shape(UNEVEN_CONFIG) for spec in KDA_TENSORS}
    assert found == UNEVEN_SHAPES


def test_bytes_are_those_of_the_shape_in_the_dtype() -> None:
    widths = {KdaDtype.BF16: 2, KdaDtype.F32: 4}
    for spec in KDA_TENSORS:
        count = math.prod(spec.expected_shape(UNEVEN_CONFIG))
        assert spec.expected_bytes(UNEVEN_CONFIG) == count * widths[spec.dtype], spec.name


def test_the_joined_extents_are_properties_of_the_config() -> None:
    assert (GLM_CONFIG.qkv_dim, GLM_CONFIG.conv_dim) == (8192, 24_576)
    assert (UNEVEN_CONFIG.qkv_dim, UNEVEN_CONFIG.conv_dim) == (15, 45)


def test_the_markers_of_a_dsa_block_are_two_names() -> None:
    assert tuple(DSA_MARKERS) == (
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.indexer.wk.weight",
    )


def test_kda_dtypes_are_the_two_codes_of_the_format() -> None:
    assert {dtype.value for dtype in KdaDtype} == {"BF16", "F32"}
    assert KdaDtype.BF16 == "BF16"


def test_the_table_cannot_be_changed() -> None:
    assert isinstance(KDA_TENSORS, tuple)
    with pytest.raises(AttributeError):
        KDA_TENSORS[0].name = "self_attn.other"  # type: ignore[misc]


def test_a_spec_of_ones_own_takes_numbers_and_names() -> None:
    spec = TensorSpec("self_attn.extra", KdaDtype.F32, ("heads", 7))
    assert spec.expected_shape(UNEVEN_CONFIG) == (3, 7)
    assert spec.expected_bytes(UNEVEN_CONFIG) == 84
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_no_tensor_of_the_table_is_padded_or_accepted_in_a_second_dtype() -> None:
    for spec in KDA_TENSORS:
        assert spec.dtypes == (spec.dtype,), spec.name
        assert spec.tail(GLM_CONFIG) == spec.tail(UNEVEN_CONFIG) == 0, spec.name
        assert spec.most_bytes(GLM_CONFIG) == spec.expected_bytes(GLM_CONFIG), spec.name
        assert not spec.unverified, spec.name


def test_a_spec_may_accept_a_second_dtype() -> None:
    spec = TensorSpec("self_attn.extra", KdaDtype.BF16, ("heads", 7), also=(KdaDtype.F32,))
    assert spec.dtypes == (KdaDtype.BF16, KdaDtype.F32)
    assert spec.expected_bytes(UNEVEN_CONFIG) == 42
    assert spec.expected_bytes(UNEVEN_CONFIG, KdaDtype.BF16) == 42
    assert spec.expected_bytes(UNEVEN_CONFIG, KdaDtype.F32) == 84
    assert spec.most_bytes(UNEVEN_CONFIG) == 84
    turned = TensorSpec("self_attn.extra", KdaDtype.F32, ("heads", 7), also=(KdaDtype.BF16,))
    assert turned.most_bytes(UNEVEN_CONFIG) == 84


@pytest.mark.parametrize(
    ("heads", "multiple", "stored"),
    [(3, 128, 128), (96, 128, 128), (128, 128, 128), (129, 128, 256), (3, 1, 3), (3, 2, 4)],
)
def test_a_padded_dimension_is_stored_as_a_multiple(heads: int, multiple: int, stored: int) -> None:
    config = KdaConfig(hidden=24, heads=heads, head_dim=5, conv_kernel=2)
    spec = TensorSpec("self_attn.extra", KdaDtype.F32, (Padded("heads", multiple),))
    assert spec.expected_shape(config) == (stored,)
    assert spec.expected_bytes(config) == 4 * stored
    assert spec.tail(config) == stored - heads
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "BF16"},
        {"also": ("F32",)},
        {"also": [KdaDtype.F32]},
        {"dims": ["heads"]},
        {"dims": ("head",)},
        {"dims": (0,)},
        {"dims": (Padded("head", 128),)},
    ],
    ids=str,
)
def test_a_tensor_that_cannot_be_described_so_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="no tensor is described so"):
        replace(KDA_TENSORS[0], **change)
