"""vLLM's load format `kda_stream`: against the real package, and against a stand-in for it.

The stand-in has the signatures of vLLM 0.33.0 and is always there; the real package is used where
it is installed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the interop extra")

import torch
from support import vllm_standin
from support.engine_models import EngineModel, stored_tensors

from kda_stream import ArgumentError, ErrorCode, KdaStreamError
from kda_stream.interop.vllm import loader_class, register
from kda_stream.kda.classify import AttnBlockKind
from kda_stream.testing import Broken, Layout, write_broken_checkpoint, write_checkpoint

pytestmark = pytest.mark.interop

LOADER = "vllm.model_executor.model_loader"


@dataclass
class Engine:
    """vLLM, real or not, with the plugin registered."""

    is_real: bool

    def loader(self, extra: object = None, **config: Any) -> Any:
        load_config = import_module("vllm.config.load").LoadConfig(
            load_format="kda_stream", model_loader_extra_config=extra or {}, **config
        )
        return import_module(LOADER).get_model_loader(load_config)

    def load(self, loader: Any, model: EngineModel, path: str | os.PathLike[str]) -> None:
        with self._config():
            loader.load_weights(model, model_config(path))

    def _config(self) -> AbstractContextManager[Any]:
        if not self.is_real:
            return nullcontext()
        config = import_module("vllm.config")
        device = config.DeviceConfig(device="cpu")
        entered: AbstractContextManager[Any] = config.set_current_vllm_config(
            config.VllmConfig(device_config=device)
        )
        return entered


def model_config(path: str | os.PathLike[str]) -> Any:
    return SimpleNamespace(
        model=os.fspath(path),
        revision=None,
        quantization=None,
        multimodal_config=None,
        is_moe=False,
    )


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    yield
    register.cache_clear()
    loader_class.cache_clear()


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Engine:
    vllm_standin.install(monkeypatch)
    register()
    return Engine(is_real=False)


@pytest.fixture
def real() -> Engine:
    pytest.importorskip("vllm", reason="vLLM is not installed; the stand-in is used")
    register()
    logging.getLogger("vllm").propagate = True
    return Engine(is_real=True)


@pytest.fixture(
    params=["standin", pytest.param("real", marks=pytest.mark.filterwarnings("ignore"))]
)
def vllm(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def model(folder: Path) -> EngineModel:
    return EngineModel(stored_tensors(folder))


# --- the plugin -----------------------------------------------------------------------------------


def test_the_plugin_is_installed_where_vllm_looks_for_it() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="kda_stream")
    assert plugin.load() is register


@pytest.mark.filterwarnings("ignore")
def test_vllm_s_own_search_for_plugins_registers_the_load_format() -> None:
    plugins = pytest.importorskip("vllm.plugins", reason="vLLM is not installed")
    plugins.load_general_plugins()
    assert "kda_stream" in import_module(LOADER)._LOAD_FORMAT_TO_MODEL_LOADER


@pytest.mark.usefixtures("standin")
def test_registering_again_has_no_effect() -> None:
    register()
    assert vllm_standin.REGISTERED == ["kda_stream"]


def test_a_vllm_without_load_formats_goes_on_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_standin.install(monkeypatch)
    monkeypatch.delattr(import_module(LOADER), "register_model_loader")
    register()
    assert "no load format kda_stream: it needs vLLM 0.32 or 0.33" in caplog.text


def test_a_loader_of_another_release_is_refused_in_a_sentence(
    vllm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = import_module(LOADER).DefaultModelLoader
    monkeypatch.setattr(default, "_prepare_weights", lambda: None)
    with pytest.raises(ArgumentError, match=r"does not know this release.*vLLM 0\.32 or 0\.33"):
        vllm.loader()
    monkeypatch.delattr(default, "_prepare_weights")
    with pytest.raises(ArgumentError, match="no such method"):
        vllm.loader()


# --- what it loads --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"slots": 4, "slot_bytes": 1 << 20, "lock": "off", "read": "direct", "residency": "keep"},
    ],
)
def test_a_model_is_filled_with_what_is_stored(
    vllm: Engine, folder: Path, model: EngineModel, extra: object
) -> None:
    vllm.load(vllm.loader(extra), model, folder)
    model.assert_holds(stored_tensors(folder))
    assert sorted(model.handed) == sorted(stored_tensors(folder))


def test_it_says_what_it_did(
    vllm: Engine, folder: Path, model: EngineModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kda_stream")
    options = {"slots": 2, "slot_bytes": 1 << 20, "lock": "off", "read": "positional"}
    vllm.load(vllm.loader(options), model, folder)
    (line,) = [record for record in caplog.records if record.name == "vllm.kda_stream"]
    assert re.fullmatch(
        rf"kda_stream: {len(model.handed)} tensors, 0\.\d\d\d GB in \d+\.\d\d s \(.* GB/s\); "
        r"reads: \d+ positional; page cache: auto; 2 slots of 1048576 bytes, "
        r"not page-locked \(off\); KDA layers: 6 GLM5_NEXT",
        line.getMessage(),
    )


def test_what_the_index_does_not_name_is_told_of(
    vllm: Engine, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied = write_checkpoint(tmp_path)
    (copied / "extra.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    model = EngineModel(stored_tensors(folder))
    vllm.load(vllm.loader(), model, copied)
    assert "extra.safetensors" in caplog.text


def test_a_checkpoint_without_kda_layers_loads_as_well(vllm: Engine, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Layout(kinds=(AttnBlockKind.DSA,) * 2))
    model = EngineModel(stored_tensors(tmp_path))
    vllm.load(vllm.loader(), model, tmp_path)
    model.assert_holds(stored_tensors(tmp_path))


def test_one_shard_that_shows_no_decoder_and_has_no_config_loads_as_well(
    vllm: Engine, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.arange(6.0), "bias": torch.ones(())}, tmp_path / "model.safetensors")
    model = EngineModel(stored_tensors(tmp_path))
    vllm.load(vllm.loader(), model, tmp_path)
    model.assert_holds(stored_tensors(tmp_path))


def test_experts_of_other_ranks_are_not_read(
    vllm: Engine, folder: Path, model: EngineModel
) -> None:
    loader = vllm.loader()
    loader.local_expert_ids = {1}
    handed = [name for name, _ in loader.get_all_weights(model_config(folder), model)]
    others = {n for n in stored_tensors(folder) if ".experts.0." in n and n.endswith(".weight")}
    assert len(others) > 3
    assert set(handed) == set(stored_tensors(folder)) - others  # scales are kept, as vLLM has it


def test_what_the_model_calls_unused_is_not_read(
    vllm: Engine, folder: Path, model: EngineModel
) -> None:
    model.is_unused_checkpoint_weight = lambda name: "layers.0." in name
    handed = [name for name, _ in vllm.loader().get_all_weights(model_config(folder), model)]
    assert set(handed) == {name for name in stored_tensors(folder) if "layers.0." not in name}


def test_a_model_s_further_sources_are_read_with_their_prefix(
    vllm: Engine, folder: Path, model: EngineModel, tmp_path: Path
) -> None:
    loader = vllm.loader()
    write_checkpoint(tmp_path / "below", Layout(kinds=(AttnBlockKind.KDA,)))
    model.secondary_weights = [
        loader.Source(os.fspath(tmp_path), None, subfolder="below", prefix="draft.")
    ]
    handed = [name for name, _ in loader.get_all_weights(model_config(folder), model)]
    assert set(handed) == {
        *stored_tensors(folder),
        *(f"draft.{name}" for name in stored_tensors(tmp_path / "below")),
    }


def test_a_model_that_is_not_local_is_brought_by_vllm_s_own_helpers(
    standin: Engine, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "at-the-hub.config.json")
    vllm_standin.HUB["org/model"] = os.fspath(tmp_path)
    model = EngineModel(stored_tensors(tmp_path))
    loader = standin.loader()
    loader.download_model(model_config("org/model"))
    standin.load(loader, model, "org/model")
    model.assert_holds(stored_tensors(tmp_path))
    files = ["*.safetensors", "*.safetensors", "config.json"]
    assert [("org/model", file) for file in files] == vllm_standin.DOWNLOADED


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_the_hub_s_cache_is_found_by_the_real_vllm(
    real: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--model"
    snapshot = write_checkpoint(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    model = EngineModel(stored_tensors(snapshot))
    real.load(real.loader(download_dir=os.fspath(tmp_path)), model, "org/model")
    model.assert_holds(stored_tensors(snapshot))


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"slot": 3}, "got slot"), ({"slots": "3"}, "slots"), ({"read": "fast"}, "read")],
)
def test_options_are_refused_when_the_loader_is_made(
    vllm: Engine, extra: object, named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        vllm.loader(extra)


@pytest.mark.parametrize("strategy", ["eager", "prefetch", "torchao"])
def test_another_way_of_reading_safetensors_is_refused(
    vllm: Engine, folder: Path, model: EngineModel, strategy: str
) -> None:
    with pytest.raises(ArgumentError, match=strategy):
        vllm.loader(safetensors_load_strategy=strategy)
    loader = vllm.loader(safetensors_load_strategy="lazy")
    loader.load_config.safetensors_load_strategy = strategy  # as vLLM sets it for torchao
    with pytest.raises(ArgumentError, match=strategy):
        vllm.load(loader, model, folder)
    assert model.handed == []


def test_a_model_that_names_its_files_by_patterns_is_refused(
    vllm: Engine, folder: Path, model: EngineModel
) -> None:
    model.allow_patterns_overrides = ["consolidated*.safetensors"]
    with pytest.raises(ArgumentError, match="consolidated"):
        vllm.load(vllm.loader(), model, folder)
    assert model.handed == []


def test_a_parameter_that_no_tensor_fills_is_refused_by_vllm(
    vllm: Engine, folder: Path, model: EngineModel
) -> None:
    model.register_parameter("forgotten", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match="forgotten"):
        vllm.load(vllm.loader(), model, folder)


def test_a_kda_layer_of_another_dtype_is_refused_unless_that_is_not_to_be_checked(
    vllm: Engine, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, Layout(dtypes={"A_log": "BF16"}))
    model = EngineModel(stored_tensors(tmp_path))
    with pytest.raises(KdaStreamError, match="A_log") as refused:
        vllm.load(vllm.loader(), model, tmp_path)
    assert refused.value.code is ErrorCode.BIND_REFUSED
    assert model.handed == []
    vllm.load(vllm.loader({"check_kda": False}), model, tmp_path)
    model.assert_holds(stored_tensors(tmp_path))


ANOTHER_FAMILY = {Broken.BLOCK_CONV_IN_F32, Broken.BLOCK_A_LOG_OF_FOUR_AXES}


@pytest.mark.parametrize(
    "broken", [b for b in Broken if b not in ANOTHER_FAMILY], ids=lambda broken: broken.name
)
def test_a_broken_checkpoint_is_refused_unchanged_and_nothing_is_handed_out(
    standin: Engine, broken: Broken, tmp_path: Path
) -> None:
    write_broken_checkpoint(tmp_path, broken)
    model = EngineModel({})
    with pytest.raises(KdaStreamError) as refused:
        standin.load(standin.loader(), model, tmp_path)
    assert refused.value.code is broken.code
    assert model.handed == []


def test_layers_that_another_family_has_like_this_are_taken_and_told_of(
    vllm: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kda_stream")
    write_broken_checkpoint(tmp_path, Broken.BLOCK_CONV_IN_F32)
    vllm.load(vllm.loader(), EngineModel(stored_tensors(tmp_path)), tmp_path)
    assert "KDA layers: 1 GLM5_NEXT_F32_CONV, 5 GLM5_NEXT" in caplog.text


# --- several ranks --------------------------------------------------------------------------------


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_several_ranks_read_through_the_page_cache_that_they_share(
    standin: Engine, folder: Path, model: EngineModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kda_stream")
    standin.load(standin.loader(), model, folder)
    assert "page cache: keep;" in caplog.text


def test_the_config_can_be_given_as_on_the_command_line(vllm: Engine) -> None:
    options = vllm.loader(json.loads('{"slots": 4, "lock": "off"}'))._options
    assert (options.slots, options.lock) == (4, "off")
