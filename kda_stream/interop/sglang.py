"""SGLang's load format `kda_stream`: its own loader, with the reading of files replaced.

Facts are from the source of SGLang 0.5.23. A plugin of the group `sglang.srt.plugins` is called in
every process, before the arguments are parsed. SGLang keeps its load formats in an enum, and takes
a loader's class in the place of one: so a hook puts the class where the name was.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..checkpoint.checkpoint import CONFIG_NAME, open_checkpoint
from .engines import (
    LOAD_FORMAT,
    engine_weights,
    loader_options,
    require_methods,
    require_no_patterns,
)

if TYPE_CHECKING:
    from torch import Tensor

_LOG: Final = logging.getLogger("kda_stream")
_RELEASES: Final = "SGLang 0.5.23"
_HOOKED: Final = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_METHODS: Final = {
    "_get_weights_iterator": (
        "self",
        "source",
        "resolved_source",
        "startup_prefetch_started",
        "startup_prefetch_active",
    ),
    "_prepare_weights": (
        "self",
        "model_name_or_path",
        "revision",
        "fall_back_to_pt",
        "allow_patterns_overrides",
    ),
    "_filter_mtp_weights": ("weights_iterator", "prefix", "draft_model_idx"),
}


@cache
def register() -> None:
    """Make `kda_stream` a load format of SGLang in this process; again: no effect.

    SGLang calls it, through the entry point, in each of its processes. A release that it does not
    fit is told of in the log, and goes on without the load format.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import add_load_format_choices
    except ImportError as error:
        _LOG.warning("no load format %s: it needs %s (%s)", LOAD_FORMAT, _RELEASES, error)
        return
    add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(_HOOKED, put_loader_for_name, HookType.AROUND)


def put_loader_for_name(verify: Callable[[Any], None], load_config: Any) -> None:
    """Around the check of a `LoadConfig`'s load format: this one's name becomes its loader."""
    name = load_config.load_format
    if isinstance(name, str) and name.lower() == LOAD_FORMAT:
        load_config.load_format = loader_class()
    else:
        verify(load_config)


@cache
def loader_class() -> type[Any]:
    """The loader, a subclass of SGLang's `DefaultModelLoader`; `ImportError` without one."""
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import (
        download_safetensors_index_file_from_hf as download_file,
    )

    class KdaStreamModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """Loads a model's weights through kda_stream; see `LoaderOptions` for its options."""

        counter_before_loading_weights: float

        def __init__(self, load_config: Any) -> None:
            self._options = loader_options(load_config.model_loader_extra_config)
            require_methods(DefaultModelLoader, _METHODS, _RELEASES)
            super().__init__(
                replace(
                    load_config,
                    load_format=LoadFormat.SAFETENSORS,
                    model_loader_extra_config={},
                )
            )

        def _get_weights_iterator(
            self, source: Any, **_startup: Any
        ) -> Iterator[tuple[str, Tensor]]:
            require_no_patterns(source.allow_patterns_overrides)
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            name, revision = source.model_or_path, source.revision
            draft = self.load_config.draft_model_idx
            is_local = os.path.isdir(name)
            with open_checkpoint(name if is_local else self._brought(name, revision)) as checkpoint:
                if is_local:
                    self._prepare_weights(name, revision, False, None)  # compares --model-checksum
                weights = engine_weights(checkpoint, self._options, _LOG)
                if draft is not None:
                    yield from self._filter_mtp_weights(weights, source.prefix, draft)
                else:
                    for tensor_name, tensor in weights:
                        yield source.prefix + tensor_name, tensor

        def _brought(self, name: str, revision: str | None) -> str:
            """The folder where SGLang's own helpers put a model of a hub."""
            folder, *_ = self._prepare_weights(name, revision, False, None)
            if not os.path.exists(os.path.join(folder, CONFIG_NAME)):
                download_file(name, CONFIG_NAME, self.load_config.download_dir, revision)
            return str(folder)

    return KdaStreamModelLoader
