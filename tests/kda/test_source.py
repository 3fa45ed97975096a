"""`RawTensor`: one tensor as it is stored, its bytes read-only."""

from __future__ import annotations

import numpy as np
import pytest

from kda_stream import RawTensor, SpanError


def test_a_tensor_says_what_it_was_made_of() -> None:
    tensor = RawTensor("F8_E4M3", [2, 3], b"abcdef")
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("F8_E4M3", (2, 3), 6)
    assert bytes(tensor.data) == b"abcdef"
    assert tensor.place is None


BUFFERS = {
    "bytes": b"abcd",
    "bytearray": bytearray(b"abcd"),
    "memoryview": memoryview(b"abcd"),
    "array": np.array([97, 98, 99, 100], dtype=np.uint8),
}


@pytest.mark.parametrize("held", BUFFERS.values(), ids=BUFFERS)
def test_any_buffer_is_taken_and_handed_out_read_only(held: bytes) -> None:
    tensor = RawTensor("F32", (1,), held)
    assert tensor.data.readonly
    assert bytes(tensor.data) == b"abcd"
    with pytest.raises(TypeError):
        tensor.data[0] = 1  # type: ignore[index]


def test_wide_elements_are_handed_out_as_bytes() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = RawTensor("F32", (2, 3), values)
    assert (tensor.nbytes, len(tensor.data), tensor.data.format) == (24, 24, "B")
    assert bytes(tensor.data) == values.tobytes()


def test_nothing_is_copied() -> None:
    held = bytearray(4)
    tensor = RawTensor("F32", (1,), held)
    held[0] = 7
    assert tensor.data[0] == 7


def test_bytes_that_do_not_fit_the_shape_are_left_to_the_binder() -> None:
    assert RawTensor("F32", (9,), b"abc").nbytes == 3


def test_empty_tensors_are_legal() -> None:
    tensor = RawTensor("BF16", (0, 4), b"")
    assert (tensor.nbytes, bytes(tensor.data)) == (0, b"")


def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(SpanError):
        RawTensor("U8", (2,), np.zeros(4, dtype=np.uint8)[::2])


def test_a_column_of_a_matrix_is_refused() -> None:
    with pytest.raises(SpanError):
        RawTensor("U8", (4,), np.zeros((4, 4), dtype=np.uint8)[:, 0])
