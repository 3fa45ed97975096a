"""vLLM's load format `kda_stream`: its own loader, with the reading of files replaced.

Facts are from the source of vLLM 0.32 and 0.33. A plugin of the group `vllm.general_plugins` is
called in every process. The loader below is vLLM's default one: it downloads, filters experts,
takes a model's further sources and checks that all parameters were loaded; where that loader would
read a checkpoint's files, this one streams them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..checkpoint.checkpoint import CONFIG_NAME, open_checkpoint
from ..errors import ArgumentError, ErrorCode
from .engines import (
    LOAD_FORMAT,
    engine_weights,
    loader_options,
    require_methods,
    require_no_patterns,
)

if TYPE_CHECKING:
    from torch import Tensor

_LOG: Final = logging.getLogger("vllm.kda_stream")  # vLLM shows what is logged below its own name
_RELEASES: Final = "vLLM 0.32 or 0.33"
_METHODS: Final = {
    "_get_weights_iterator": ("self", "source"),
    "_prepare_weights": (
        "self",
        "model_name_or_path",
        "subfolder",
        "revision",
        "fall_back_to_pt",
        "allow_patterns_overrides",
    ),
}


@cache
def register() -> None:
    """Make `kda_stream` a load format of vLLM in this process; again: no effect.

    vLLM calls it, through the entry point, in each of its processes. A release that it does not fit
    is told of in the log, and goes on without the load format.
    """
    try:
        from vllm.model_executor.model_loader import register_model_loader

        loader = loader_class()
    except ImportError as error:
        _LOG.warning("no load format %s: it needs %s (%s)", LOAD_FORMAT, _RELEASES, error)
        return
    register_model_loader(LOAD_FORMAT)(loader)


@cache
def loader_class() -> type[Any]:
    """The loader, a subclass of vLLM's `DefaultModelLoader`; raises `ImportError` without one."""
    from vllm.model_executor.model_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
    from vllm.model_executor.model_loader.weight_utils import (
        download_safetensors_index_file_from_hf as download_file,
    )

    class KdaStreamModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """Loads a model's weights through kda_stream; see `LoaderOptions` for its options."""

        counter_before_loading_weights: float

        def __init__(self, load_config: Any) -> None:
            self._options = loader_options(load_config.model_loader_extra_config)
            require_methods(DefaultModelLoader, _METHODS, _RELEASES)
            _require_lazy(load_config.safetensors_load_strategy)
            super().__init__(
                replace(load_config, load_format="safetensors", model_loader_extra_config={})
            )

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Tensor]]:
            _require_lazy(self.load_config.safetensors_load_strategy)
            require_no_patterns(source.allow_patterns_overrides)
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()

            def is_wanted(name: str) -> bool:
                is_unused = source.is_unused_weight
                return not should_skip_weight(name, self.local_expert_ids) and not (
                    is_unused is not None and is_unused(name)
                )

            with open_checkpoint(self._folder(source)) as checkpoint:
                for name, tensor in engine_weights(
                    checkpoint, self._options, _LOG, is_wanted=is_wanted
                ):
                    yield source.prefix + name, tensor

        def _folder(self, source: Any) -> str:
            """The folder of a local model; of any other, where vLLM's own helpers put it."""
            if os.path.isdir(source.model_or_path):
                return str(os.path.join(*filter(None, (source.model_or_path, source.subfolder))))
            folder, *_ = self._prepare_weights(
                source.model_or_path, source.subfolder, source.revision, False, None
            )
            if not os.path.exists(os.path.join(folder, CONFIG_NAME)):
                download_file(
                    source.model_or_path,
                    CONFIG_NAME,
                    cache_dir=self.load_config.download_dir,
                    subfolder=source.subfolder,
                    revision=source.revision,
                )
            return str(folder)

    return KdaStreamModelLoader


def _require_lazy(strategy: str | None) -> None:
    """Raise `ArgumentError` for a way of reading safetensors that is another loader's."""
    if strategy not in (None, "lazy"):
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            f"the load format {LOAD_FORMAT} has no safetensors_load_strategy",
            expected="None or 'lazy'",
            got=repr(strategy),
            hint="leave it out, or use --load-format safetensors",
        )
