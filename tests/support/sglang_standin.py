"""As much of SGLang's model loader and plugins as a load format meets, with the same signatures.

Mirrors the interface, not the text, of SGLang 0.5.23: `srt/configs/load_config.py`,
`srt/model_loader/{loader,weight_utils}.py`, `srt/plugins/hook_registry.py` and what
`srt/server_args.py` offers to plugins. What the real one reads from files is not there: a loader
that fell back to it would fail.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.vllm_standin import install_modules

LOAD_FORMAT_CHOICES: list[str] = []
HUB: dict[str, str] = {}
DOWNLOADED: list[tuple[str, str]] = []
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = []


class HookType(enum.Enum):
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        HOOKS.append((target, hook, hook_type))


class LoadFormat(str, enum.Enum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"


@dataclass
class LoadConfig:
    load_format: Any = LoadFormat.AUTO
    download_dir: str | None = None
    model_loader_extra_config: Any = field(default_factory=dict)
    draft_model_idx: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model_loader_extra_config, str):
            self.model_loader_extra_config = json.loads(self.model_loader_extra_config)
        verify = LoadConfig._verify_load_format
        for target, hook, kind in HOOKS:  # as the registry does after the plugins were called
            assert target == f"{LOAD_CONFIG}.LoadConfig._verify_load_format"
            assert kind is HookType.AROUND
            inner = verify

            def verify(
                config: LoadConfig,
                hook: Callable[..., Any] = hook,
                inner: Callable[[LoadConfig], None] = inner,
            ) -> None:
                hook(inner, config)

        verify(self)

    def _verify_load_format(self) -> None:
        if isinstance(self.load_format, str):
            self.load_format = LoadFormat(self.load_format.lower())


class DefaultModelLoader:
    @dataclass
    class Source:
        model_or_path: str
        revision: str | None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None
        model_config: Any = None

    counter_before_loading_weights: float = 0.0

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config
        if load_config.model_loader_extra_config:
            raise ValueError(f"unexpected: {load_config.model_loader_extra_config}")

    def _prepare_weights(
        self,
        model_name_or_path: str,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None = None,
    ) -> tuple[str, list[str], bool]:
        assert self.load_config.load_format is LoadFormat.SAFETENSORS
        DOWNLOADED.append((model_name_or_path, "*.safetensors"))
        return HUB.get(model_name_or_path, model_name_or_path), [], True

    def _get_weights_iterator(
        self,
        source: Source,
        *,
        resolved_source: Any = None,
        startup_prefetch_started: bool = False,
        startup_prefetch_active: bool = False,
    ) -> Iterator[tuple[str, Any]]:
        raise NotImplementedError("the default way of reading")

    @classmethod
    def _filter_mtp_weights(
        cls, weights_iterator: Any, prefix: str, draft_model_idx: int
    ) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights_iterator:
            yield f"{prefix}{name}@{draft_model_idx}", tensor

    def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        primary = self.Source(
            model_config.model_path,
            model_config.revision,
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
        )
        for source in (primary, *getattr(model, "secondary_weights", ())):
            yield from self._get_weights_iterator(source)


def get_model_loader(load_config: LoadConfig, model_config: Any = None) -> Any:
    if isinstance(load_config.load_format, type):
        return load_config.load_format(load_config)
    return DefaultModelLoader(load_config)


def download_safetensors_index_file_from_hf(
    model_name_or_path: str, index_file: str, cache_dir: str | None, revision: str | None = None
) -> None:
    DOWNLOADED.append((model_name_or_path, index_file))
    aside = os.path.join(HUB[model_name_or_path], "at-the-hub." + index_file)
    os.rename(aside, os.path.join(HUB[model_name_or_path], index_file))


LOAD_CONFIG = "sglang.srt.configs.load_config"
LOADER = "sglang.srt.model_loader"
MODULES: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang.srt": {},
    "sglang.srt.configs": {},
    LOAD_CONFIG: {"LoadConfig": LoadConfig, "LoadFormat": LoadFormat},
    LOADER: {},
    f"{LOADER}.loader": {
        "DefaultModelLoader": DefaultModelLoader,
        "get_model_loader": get_model_loader,
    },
    f"{LOADER}.weight_utils": {
        "download_safetensors_index_file_from_hf": download_safetensors_index_file_from_hf
    },
    "sglang.srt.plugins": {},
    "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    "sglang.srt.server_args": {"add_load_format_choices": LOAD_FORMAT_CHOICES.extend},
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for `sglang` until the test ends, with nothing registered."""
    for memory in (LOAD_FORMAT_CHOICES, HUB, DOWNLOADED, HOOKS):
        memory.clear()
    install_modules(monkeypatch, MODULES)
