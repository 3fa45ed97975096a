"""The safetensors package: tensor by tensor, and a file at a time; and torch's own format."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ..data import DataSet, flush_to_disk
from ..landing import Gathering, Landing, torch_put
from .runner import (
    KDA_ONLY,
    OWN_FORMAT,
    WHOLE,
    WHOLE_LAZILY,
    Job,
    Run,
    Runner,
    UnavailableError,
)


def safe_open_numpy() -> Run:
    import ml_dtypes  # noqa: F401 - gives numpy the BF16 that safetensors asks it for
    import numpy
    from safetensors import safe_open

    def run(job: Job, landing: Landing) -> None:
        buffer = landing.make_buffer()
        whole = numpy.frombuffer(buffer, numpy.uint8)
        with ExitStack() as opened:
            # Every shard is opened once, and a layer's tensors are asked for in their order.
            files = {
                path.name: opened.enter_context(safe_open(path, "np")) for path in job.data.shards
            }
            for layer in job.data.layers:
                for row in layer.tensors:
                    tensor = files[row.file].get_tensor(row.name)
                    place = whole[row.place : row.place + row.nbytes]
                    numpy.copyto(place, tensor.reshape(-1).view(numpy.uint8))
                landing.layer_done(layer.index)

    return run


def safe_open_torch(backend: str) -> Run:
    import torch  # noqa: F401
    from safetensors import safe_open

    keywords = _backend_keywords(safe_open, backend)

    def run(job: Job, landing: Landing) -> None:
        put = torch_put(landing)
        with ExitStack() as opened:
            files = {
                path.name: opened.enter_context(safe_open(path, "pt", **keywords))
                for path in job.data.shards
            }
            for layer in job.data.layers:
                for row in layer.tensors:
                    put(row, files[row.file].get_tensor(row.name))
                landing.layer_done(layer.index)

    return run


def load_file_torch(backend: str) -> Run:
    import torch  # noqa: F401
    from safetensors.torch import load_file

    keywords = _backend_keywords(load_file, backend)

    def run(job: Job, landing: Landing) -> None:
        gathering = Gathering(landing, torch_put(landing))
        for path in job.data.shards:
            tensors = load_file(path, **keywords)
            while tensors:  # each tensor is let go as soon as it is copied
                gathering.add(*tensors.popitem())

    return run


def _backend_keywords(function: Any, backend: str) -> dict[str, str]:
    """How to ask for the backend; "mmap" is the default, and the only one before 0.8."""
    if backend == "mmap":
        return {}
    text = str(inspect.signature(function)) if callable(function) else ""
    if "backend" not in text:
        raise UnavailableError("this safetensors has no backend=")
    return {"backend": backend}


# torch.load of a .pt: torch's own format with torch's own map ---------------------------------


def pt_path(data: DataSet) -> Path:
    return data.folder / "kda.pt"


def write_pt(data: DataSet) -> None:
    if pt_path(data).exists():
        return
    import torch

    unfinished = pt_path(data).with_suffix(".unfinished")
    torch.save(kda_tensors(data), unfinished)
    flush_to_disk([unfinished])
    unfinished.rename(pt_path(data))


def kda_tensors(data: DataSet) -> dict[str, Any]:
    """Every KDA tensor, as views of the shards' maps."""
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for path in data.shards:
        with safe_open(path, "pt") as file:
            for layer in data.layers:
                for row in layer.tensors:
                    if row.file == path.name:
                        tensors[row.name] = file.get_tensor(row.name)
    return {row.name: tensors[row.name] for layer in data.layers for row in layer.tensors}


def torch_load() -> Run:
    import torch

    def run(job: Job, landing: Landing) -> None:
        put = torch_put(landing)
        tensors = torch.load(pt_path(job.data), mmap=True, weights_only=True)
        for layer in job.data.layers:
            for row in layer.tensors:
                put(row, tensors[row.name])
            landing.layer_done(layer.index)

    return run


RUNNERS = (
    Runner(
        "safetensors numpy",
        safe_open_numpy,
        ("safetensors", "numpy", "ml_dtypes"),
        KDA_ONLY,
        "safe_open, get_tensor, numpy.copyto",
    ),
    Runner(
        "safetensors torch",
        partial(safe_open_torch, "mmap"),
        ("safetensors", "torch"),
        KDA_ONLY,
        "safe_open, get_tensor, copy_",
    ),
    Runner(
        "safetensors torch pread",
        partial(safe_open_torch, "pread"),
        ("safetensors", "torch"),
        KDA_ONLY,
        'safe_open(backend="pread"), get_tensor, copy_',
    ),
    Runner(
        "safetensors load_file",
        partial(load_file_torch, "mmap"),
        ("safetensors", "torch"),
        WHOLE_LAZILY,
        "load_file, copy_",
    ),
    Runner(
        "safetensors load_file pread",
        partial(load_file_torch, "pread"),
        ("safetensors", "torch"),
        WHOLE,
        'load_file(backend="pread"), copy_',
    ),
    Runner(
        "torch.load",
        torch_load,
        ("torch",),
        OWN_FORMAT,
        "mmap=True, copy_; a .pt of the KDA tensors alone",
        files=lambda data: (pt_path(data),),
        prepare=write_pt,
    ),
)
