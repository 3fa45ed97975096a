"""The packages that are made to load fast: fastsafetensors, runai-model-streamer, tensorizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..data import DataSet, Layer, Tensor, flush_to_disk
from ..landing import Gathering, Landing, torch_put
from .runner import KDA_ONLY, OWN_FORMAT, Job, Run, Runner
from .safetensors_peers import kda_tensors

RUNAI_BYTES_MAX = 140_000_000
GROUP_BYTES_MAX = 70 * 1024**2  # of the four large tensors of a layer, one


def _fast_loader() -> Any:
    """As many threads as processors: its own 16 were slower on two."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    threads = os.cpu_count() or 1
    return SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True, max_threads=threads)


def _choose_fast_reads(job: Job) -> None:
    """Its default is O_DIRECT, which is faster from the disk and slower out of the page cache."""
    os.environ["FASTSAFETENSORS_ODIRECT"] = "0" if job.cached else "1"


def fastsafetensors_by_shard() -> Run:
    """Its usual way, and the fastest of several, its ParallelLoader among them."""
    import torch  # noqa: F401 - it imports torch itself, but only when it first needs it

    _fast_loader().close()

    def run(job: Job, landing: Landing) -> None:
        _choose_fast_reads(job)
        gathering = Gathering(landing, torch_put(landing))
        wanted = {row.name for layer in job.data.layers for row in layer.tensors}
        loader = _fast_loader()
        loader.set_tensor_filter(wanted.__contains__)
        for path in job.data.shards:
            loader.reset()
            loader.add_filenames({0: [str(path)]})
            buffers = loader.copy_files_to_device()
            for name in loader.get_keys():
                gathering.add(name, buffers.get_tensor(name))
            buffers.close()
        loader.close()

    return run


def fastsafetensors_by_group() -> Run:
    """With little memory: a few tensors at a time, since it allocates what it reads."""
    import torch  # noqa: F401

    _fast_loader().close()

    def run(job: Job, landing: Landing) -> None:
        _choose_fast_reads(job)
        put = torch_put(landing)
        loader = _fast_loader()
        for layer in job.data.layers:
            for rows in _groups(layer, GROUP_BYTES_MAX):
                loader.reset()
                loader.set_tensor_filter({row.name for row in rows}.__contains__)
                loader.add_filenames({0: [str(job.data.checkpoint / rows[0].file)]})
                buffers = loader.copy_files_to_device(borrowed_tensors=True)
                for row in rows:
                    put(row, buffers.get_tensor(row.name))
                buffers.close()
            landing.layer_done(layer.index)
        loader.close()

    return run


def _groups(layer: Layer, bytes_max: int) -> list[list[Tensor]]:
    """The layer's tensors in the order of the files, in groups of one file and so many bytes."""
    groups: list[list[Tensor]] = []
    for row in sorted(layer.tensors, key=lambda row: (row.file, row.begin)):
        size = sum(other.nbytes for other in groups[-1]) if groups else 0
        if groups and groups[-1][0].file == row.file and size + row.nbytes <= bytes_max:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def runai() -> Run:
    import runai_model_streamer
    import torch  # noqa: F401

    streamer_of = runai_model_streamer.SafetensorsStreamer
    # Of its own limits this was the fastest with the least memory: it allocates its buffers anew
    # for each call, so that small ones (two of the largest tensor) cost fewer fresh pages than the
    # layer's worth that it would take. As few threads as processors were no faster.
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(RUNAI_BYTES_MAX)

    def run(job: Job, landing: Landing) -> None:
        # Its default is O_DIRECT by io_uring; out of the page cache, plain reads are twice as fast.
        if job.cached:
            os.environ["RUNAI_STREAMER_FS_STRATEGY"] = "sync_buffered"
        put = torch_put(landing)
        with streamer_of() as streamer:
            # A layer at a time, since tensors come in the order in which their reads end and there
            # is one buffer. owned=False lets it reuse its own buffers.
            for layer in job.data.layers:
                rows = {row.name: row for row in layer.tensors}
                paths = [str(path) for path in _files(job.data, layer)]
                streamer.stream_files(paths, tensor_names=rows.keys(), owned=False)
                for name, tensor in streamer.get_tensors():
                    put(rows[name], tensor)
                landing.layer_done(layer.index)

    return run


def _files(data: DataSet, layer: Layer) -> list[Path]:
    return [data.checkpoint / name for name in sorted({row.file for row in layer.tensors})]


def tensors_path(data: DataSet) -> Path:
    return data.folder / "kda.tensors"


def write_tensors(data: DataSet) -> None:
    if tensors_path(data).exists():
        return
    from tensorizer import TensorSerializer

    unfinished = tensors_path(data).with_suffix(".unfinished")
    serializer = TensorSerializer(str(unfinished))
    serializer.write_state_dict(kda_tensors(data))
    serializer.close()
    flush_to_disk([unfinished])
    unfinished.rename(tensors_path(data))


def tensorizer() -> Run:
    from tensorizer import TensorDeserializer

    def run(job: Job, landing: Landing) -> None:
        put = torch_put(landing)
        # All at once, with as many readers as it chooses: the fastest of its ways. A layer at a
        # time (filter_func) was slower and saved no memory, as it keeps on the CPU what it read.
        deserializer = TensorDeserializer(str(tensors_path(job.data)), device="cpu")
        for layer in job.data.layers:
            for row in layer.tensors:
                put(row, deserializer[row.name])
            landing.layer_done(layer.index)

    return run


_FAST = "nogds, tensor filter, a thread a processor; O_DIRECT unless cached"

RUNNERS = (
    Runner(
        "fastsafetensors",
        fastsafetensors_by_shard,
        ("fastsafetensors", "torch"),
        KDA_ONLY,
        f"{_FAST}, a shard at a time",
    ),
    Runner(
        "fastsafetensors 70 MiB",
        fastsafetensors_by_group,
        ("fastsafetensors", "torch"),
        KDA_ONLY,
        f"{_FAST}, 70 MiB at a time",
    ),
    Runner(
        "runai-model-streamer",
        runai,
        ("runai-model-streamer", "torch"),
        KDA_ONLY,
        "tensor_names, owned=False, a layer at a time, 140 MB of buffers; O_DIRECT unless cached",
    ),
    Runner(
        "tensorizer",
        tensorizer,
        ("tensorizer", "torch"),
        OWN_FORMAT,
        "all at once, threads as it chooses; a .tensors of the KDA tensors alone",
        files=lambda data: (tensors_path(data),),
        prepare=write_tensors,
    ),
)
