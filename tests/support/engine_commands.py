"""`vllm serve` and `sglang serve` as far as a load format meets them: over the stand-ins.

    python -m support.engine_commands vllm serve PATH --load-format kda_stream ...

The plugin is found by its entry point and makes the loader, as in the engine; the loader fills a
model of the checkpoint's own parameters, which then must hold what is stored.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import sglang_standin, vllm_standin
from support.engine_models import EngineModel, stored_tensors

STANDINS = {"vllm": vllm_standin, "sglang": sglang_standin}
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


def main() -> None:
    engine = sys.argv[1]
    arguments = parsed(sys.argv[3:])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    with pytest.MonkeyPatch.context() as patch:
        STANDINS[engine].install(patch)
        (plugin,) = entry_points(group=GROUPS[engine], name=arguments.load_format)
        plugin.load()()
        model = EngineModel(stored_tensors(Path(arguments.model)))
        model.load_weights(weights(engine, arguments, model))
        model.assert_holds(stored_tensors(Path(arguments.model)))


def parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument("model", nargs="?")
    named.add_argument("--model-path")
    parser.add_argument("--load-format")
    parser.add_argument("--model-loader-extra-config", type=json.loads, default={})
    arguments = parser.parse_args(given)
    arguments.model = arguments.model or arguments.model_path
    return arguments


def weights(engine: str, arguments: argparse.Namespace, model: EngineModel) -> Any:
    extra = arguments.model_loader_extra_config
    if engine == "vllm":
        config = import_module("vllm.config.load").LoadConfig(
            load_format=arguments.load_format, model_loader_extra_config=extra
        )
        loader = import_module(vllm_standin.LOADER).get_model_loader(config)
        told = SimpleNamespace(model=arguments.model, revision=None)
        return loader.get_all_weights(told, model)
    config = import_module(sglang_standin.LOAD_CONFIG).LoadConfig(
        load_format=arguments.load_format, model_loader_extra_config=extra
    )
    loader = import_module(f"{sglang_standin.LOADER}.loader").get_model_loader(config)
    told = SimpleNamespace(model_path=arguments.model, revision=None)
    return loader._get_all_weights(told, model)


if __name__ == "__main__":
    main()
