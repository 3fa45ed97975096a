"""How vLLM goes through safetensors shards, as its weight iterators do it; vLLM is not needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed

from ..landing import Gathering, Landing, torch_put
from .runner import WHOLE, WHOLE_LAZILY, Job, Run, Runner

THREADS = 4  # vLLM's default for enable_multithread_load


def lazy() -> Run:
    """`safetensors_weights_iterator`: shard by shard every tensor asked for, the wanted copied."""
    import torch  # noqa: F401
    from safetensors import safe_open

    def run(job: Job, landing: Landing) -> None:
        gathering = Gathering(landing, torch_put(landing))
        for path in job.data.shards:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    gathering.add(name, file.get_tensor(name))

    return run


def multithread() -> Run:
    """`multi_thread_safetensors_weights_iterator`: load_file of several shards at a time."""
    import torch  # noqa: F401
    from safetensors.torch import load_file

    def run(job: Job, landing: Landing) -> None:
        gathering = Gathering(landing, torch_put(landing))
        with ThreadPoolExecutor(THREADS) as pool:
            loading = [pool.submit(load_file, path) for path in job.data.shards]
            for future in as_completed(loading):
                for name, tensor in future.result().items():
                    gathering.add(name, tensor)

    return run


def eager() -> Run:
    """`safetensors_load_strategy="eager"`: the whole file read at once, then parsed."""
    import torch  # noqa: F401
    from safetensors.torch import load

    def run(job: Job, landing: Landing) -> None:
        gathering = Gathering(landing, torch_put(landing))
        for path in job.data.shards:
            with open(path, "rb") as file:
                tensors = load(file.read())
            for name, tensor in tensors.items():
                gathering.add(name, tensor)

    return run


_PACKAGES = ("safetensors", "torch")

RUNNERS = (
    Runner("vLLM lazy", lazy, _PACKAGES, WHOLE_LAZILY, "get_tensor of every name, copy_"),
    Runner(
        "vLLM multithread",
        multithread,
        _PACKAGES,
        WHOLE_LAZILY,
        f"load_file in {THREADS} threads, copy_",
    ),
    Runner("vLLM eager", eager, _PACKAGES, WHOLE, "load(file.read()), copy_"),
)
