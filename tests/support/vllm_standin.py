"""As much of vLLM's model loader as a load format meets: same modules, names and signatures.

Mirrors the interface, not the text, of vLLM 0.33.0 (0.32.0 is the same here):
`model_executor/model_loader/{__init__,default_loader,ep_weight_filter,weight_utils}.py` and
`config/load.py`. What the real one reads from files is not there: a loader that fell back to it
would fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

FORMATS: dict[str, type[Any]] = {}
REGISTERED: list[str] = []
HUB: dict[str, str] = {}
DOWNLOADED: list[tuple[str, str]] = []


@dataclass
class LoadConfig:
    load_format: str = "auto"
    download_dir: str | None = None
    safetensors_load_strategy: str | None = None
    model_loader_extra_config: Any = field(default_factory=dict)


class BaseModelLoader:
    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    @dataclass
    class Source:
        model_or_path: str
        revision: str | None
        subfolder: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None
        is_unused_weight: Callable[[str], bool] | None = None

    counter_before_loading_weights: float = 0.0
    counter_after_loading_weights: float = 0.0

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.local_expert_ids: set[int] | None = None
        if load_config.model_loader_extra_config:
            raise ValueError(f"unexpected: {load_config.model_loader_extra_config}")

    def _prepare_weights(
        self,
        model_name_or_path: str,
        subfolder: str | None,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[str, list[str], bool, str]:
        assert self.load_config.load_format == "safetensors", self.load_config.load_format
        DOWNLOADED.append((model_name_or_path, "*.safetensors"))
        return HUB[model_name_or_path], [], True, "model.safetensors.index.json"

    def _get_weights_iterator(self, source: Source) -> Iterator[tuple[str, Any]]:
        raise NotImplementedError("the default way of reading")

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        primary = self.Source(
            model_config.model,
            model_config.revision,
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
            is_unused_weight=getattr(model, "is_unused_checkpoint_weight", None),
        )
        for source in (primary, *getattr(model, "secondary_weights", ())):
            yield from self._get_weights_iterator(source)

    def download_model(self, model_config: Any) -> None:
        self._prepare_weights(model_config.model, None, model_config.revision, True, None)

    def load_weights(self, model: Any, model_config: Any) -> None:
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        missing = {name for name, _ in model.named_parameters()} - loaded
        if missing:
            raise ValueError(f"not initialized from checkpoint: {missing}")


def register_model_loader(load_format: str) -> Callable[[type[Any]], type[Any]]:
    def wrapper(loader: type[Any]) -> type[Any]:
        assert issubclass(loader, BaseModelLoader)
        REGISTERED.append(load_format)
        FORMATS[load_format] = loader
        return loader

    return wrapper


def get_model_loader(load_config: LoadConfig) -> Any:
    return FORMATS[load_config.load_format](load_config)


def should_skip_weight(weight_name: str, local_expert_ids: set[int] | None) -> bool:
    _, found, rest = weight_name.partition(".experts.")
    number = rest.split(".")[0]
    return (
        local_expert_ids is not None
        and bool(found)
        and weight_name.endswith((".weight", ".weight_packed"))
        and number.isdigit()
        and int(number) not in local_expert_ids
    )


def download_safetensors_index_file_from_hf(
    model_name_or_path: str,
    index_file: str,
    cache_dir: str | None,
    subfolder: str | None = None,
    revision: str | None = None,
) -> None:
    DOWNLOADED.append((model_name_or_path, index_file))
    aside = os.path.join(HUB[model_name_or_path], "at-the-hub." + index_file)
    os.rename(aside, os.path.join(HUB[model_name_or_path], index_file))


LOADER = "vllm.model_executor.model_loader"
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {},
    "vllm.config.load": {"LoadConfig": LoadConfig},
    "vllm.model_executor": {},
    LOADER: {
        "DefaultModelLoader": DefaultModelLoader,
        "get_model_loader": get_model_loader,
        "register_model_loader": register_model_loader,
    },
    f"{LOADER}.ep_weight_filter": {"should_skip_weight": should_skip_weight},
    f"{LOADER}.weight_utils": {
        "download_safetensors_index_file_from_hf": download_safetensors_index_file_from_hf
    },
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for `vllm` until the test ends, with nothing registered."""
    for memory in (FORMATS, REGISTERED, HUB, DOWNLOADED):
        memory.clear()
    install_modules(monkeypatch, MODULES)


def install_modules(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Put modules of these contents where an import finds them, until the test ends."""
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # a package, so that what is below it can be imported
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
