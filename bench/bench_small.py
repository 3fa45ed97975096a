"""Small things, by pytest-benchmark: `python -m pytest bench/bench_small.py`.

The join of the three conv tensors against numpy and torch doing the same into the same buffer, one
layer's and 34 layers' one after the other; binding one small layer; opening a small checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

from kda_stream import bind_kda_weights, open_checkpoint
from kda_stream.staging.spans import CopyPlan, Span
from kda_stream.testing import GEOMETRY, write_checkpoint

SHAPE = (8192, 1, 4)  # of each of the three conv tensors at full geometry, BF16
JOINED_SHAPE = (3 * SHAPE[0], *SHAPE[1:])
LAYERS = 34

Job = Callable[[], object]


def plan_of(tensors: list[Any]) -> CopyPlan:
    spans = []
    at = 0
    for tensor in tensors:
        source = memoryview(tensor).cast("B")
        spans.append(Span(source, 1, source.nbytes, source.nbytes, at))
        at += source.nbytes
    return CopyPlan(tuple(spans))


def kda_stream(tensors: list[Any], joined: Any) -> Job:
    """The spans are made and run."""
    target = memoryview(joined).cast("B")
    return lambda: plan_of(tensors).run(target)


def kda_stream_run(tensors: list[Any], joined: Any) -> Job:
    """Spans that are made already are run."""
    return partial(plan_of(tensors).run, memoryview(joined).cast("B"))


def numpy_concatenate(tensors: list[Any], joined: Any) -> Job:
    return partial(numpy.concatenate, tensors, out=joined)


def torch_cat(tensors: list[Any], joined: Any) -> Job:
    torch = pytest.importorskip("torch")
    sources = [torch.from_numpy(tensor).view(torch.bfloat16) for tensor in tensors]
    return partial(torch.cat, sources, out=torch.from_numpy(joined).view(torch.bfloat16))


@pytest.fixture(scope="module")
def layers() -> list[list[numpy.ndarray]]:
    """BF16 as the 16 bits that it is: none of the three looks at the values."""
    random = numpy.random.default_rng(1)
    return [
        [random.integers(0, 2**16, SHAPE, numpy.uint16) for _ in range(3)] for _ in range(LAYERS)
    ]


@pytest.mark.parametrize("count", [1, LAYERS])
@pytest.mark.parametrize("joiner", [kda_stream, kda_stream_run, numpy_concatenate, torch_cat])
def test_conv_join(
    benchmark: Any, layers: list[list[numpy.ndarray]], joiner: Callable[..., Job], count: int
) -> None:
    benchmark.group = f"conv joins in a row: {count}"
    joined = numpy.zeros(JOINED_SHAPE, numpy.uint16)
    jobs = [joiner(tensors, joined) for tensors in layers[:count]]

    def join_all() -> None:
        for job in jobs:
            job()

    benchmark(join_all)
    assert joined.tobytes() == b"".join(tensor.tobytes() for tensor in layers[count - 1])


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def opened(small_checkpoint: Path) -> Iterator[Any]:
    with open_checkpoint(small_checkpoint) as checkpoint:
        yield checkpoint


def test_bind_small_layer(benchmark: Any, opened: Any) -> None:
    source = opened.layer(0)

    def bind() -> None:
        weights, _ = bind_kda_weights(GEOMETRY, 0, source)
        weights.release()

    benchmark(bind)


def test_open_small_checkpoint(benchmark: Any, small_checkpoint: Path) -> None:
    def open_and_close() -> None:
        with open_checkpoint(small_checkpoint):
            pass

    benchmark(open_and_close)
