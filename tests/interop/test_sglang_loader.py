"""SGLang's load format `kda_stream`: against the real package, and against a stand-in for it.

The stand-in has the signatures of SGLang 0.5.23 and is always there; the real package is used where
it is installed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the interop extra")

from support import sglang_standin
from support.engine_models import EngineModel, stored_tensors

from kda_stream import ArgumentError, KdaStreamError
from kda_stream.interop.sglang import loader_class, register
from kda_stream.kda.classify import AttnBlockKind
from kda_stream.testing import Broken, Layout, write_broken_checkpoint, write_checkpoint

pytestmark = pytest.mark.interop

LOADER = "sglang.srt.model_loader.loader"


@dataclass
class Engine:
    """SGLang, real or not, with the plugin registered."""

    def loader(self, extra: object = None, **config: Any) -> Any:
        return import_module(LOADER).get_model_loader(self.config(extra, **config))

    def config(self, extra: object = None, **config: Any) -> Any:
        return import_module("sglang.srt.configs.load_config").LoadConfig(
            load_format=config.pop("load_format", "kda_stream"),
            model_loader_extra_config=extra or {},
            **config,
        )


def weights_of(loader: Any, model: EngineModel, path: str | os.PathLike[str]) -> Iterator[Any]:
    config = SimpleNamespace(model_path=os.fspath(path), revision=None)
    weights: Iterator[Any] = loader._get_all_weights(config, model)
    return weights


def load(loader: Any, model: EngineModel, path: str | os.PathLike[str]) -> None:
    model.load_weights(weights_of(loader, model, path))


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    yield
    register.cache_clear()
    loader_class.cache_clear()


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Engine:
    sglang_standin.install(monkeypatch)
    register()
    return Engine()


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Engine:
    pytest.importorskip("sglang", reason="SGLang is not installed; the stand-in is used")
    import_module("sglang.srt.plugins").load_plugins()
    monkeypatch.setattr(import_module(LOADER), "get_server_args", lambda: None)  # no server here
    return Engine()


@pytest.fixture(
    params=["standin", pytest.param("real", marks=pytest.mark.filterwarnings("ignore"))]
)
def sglang(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def model(folder: Path) -> EngineModel:
    return EngineModel(stored_tensors(folder))


# --- the plugin -----------------------------------------------------------------------------------


def test_the_plugin_is_installed_where_sglang_looks_for_it() -> None:
    (plugin,) = entry_points(group="sglang.srt.plugins", name="kda_stream")
    assert plugin.load() is register


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("real")
def test_the_command_line_of_the_real_sglang_takes_the_load_format() -> None:
    from argparse import ArgumentParser

    arguments = import_module("sglang.srt.server_args").ServerArgs
    parser = ArgumentParser()
    arguments.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path", "x", "--load-format", "kda_stream"])
    assert parsed.load_format == "kda_stream"


@pytest.mark.usefixtures("standin")
def test_registering_again_has_no_effect() -> None:
    register()
    assert sglang_standin.LOAD_FORMAT_CHOICES == ["kda_stream"]
    assert len(sglang_standin.HOOKS) == 1


def test_other_load_formats_are_sglang_s_own_affair(sglang: Engine) -> None:
    formats = import_module("sglang.srt.configs.load_config").LoadFormat
    assert sglang.config(load_format="auto").load_format is formats.AUTO
    with pytest.raises(ValueError, match="kda_streams"):
        sglang.config(load_format="kda_streams")


def test_a_sglang_without_plugins_goes_on_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sglang_standin.install(monkeypatch)
    monkeypatch.delattr(import_module("sglang.srt.server_args"), "add_load_format_choices")
    register()
    assert "no load format kda_stream: it needs SGLang 0.5.23" in caplog.text
    assert sglang_standin.HOOKS == []


def test_a_loader_of_another_release_is_refused_in_a_sentence(
    sglang: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = import_module(LOADER).DefaultModelLoader
    monkeypatch.setattr(default, "_get_weights_iterator", lambda: None)
    with pytest.raises(ArgumentError, match=r"does not know this release.*SGLang 0\.5\.23"):
        sglang.loader()


# --- what it loads --------------------------------------------------------------------------------


def test_a_model_is_filled_with_what_is_stored(
    sglang: Engine, folder: Path, model: EngineModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kda_stream")
    load(sglang.loader('{"lock": "off"}'), model, folder)
    model.assert_holds(stored_tensors(folder))
    assert sorted(model.handed) == sorted(stored_tensors(folder))
    assert f"{len(model.handed)} tensors, " in caplog.text
    assert "KDA layers: 6 GLM5_NEXT" in caplog.text


def test_a_checkpoint_without_kda_layers_loads_as_well(sglang: Engine, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Layout(kinds=(AttnBlockKind.DSA,) * 2))
    model = EngineModel(stored_tensors(tmp_path))
    load(sglang.loader(), model, tmp_path)
    model.assert_holds(stored_tensors(tmp_path))


def test_a_model_s_further_sources_are_read_with_their_prefix(
    sglang: Engine, folder: Path, model: EngineModel
) -> None:
    loader = sglang.loader()
    model.secondary_weights = [loader.Source(os.fspath(folder), None, prefix="draft.")]
    handed = [name for name, _ in weights_of(loader, model, folder)]
    assert set(handed) == {
        f"{at}{name}" for at in ("", "draft.") for name in stored_tensors(folder)
    }


def test_the_layers_of_a_draft_model_are_filtered_by_sglang(
    standin: Engine, folder: Path, model: EngineModel
) -> None:
    handed = [name for name, _ in weights_of(standin.loader(draft_model_idx=2), model, folder)]
    assert set(handed) == {f"{name}@2" for name in stored_tensors(folder)}


def test_sglang_s_own_helper_sees_a_local_model_and_brings_another(
    standin: Engine, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path)
    model = EngineModel(stored_tensors(tmp_path))
    load(standin.loader(), model, tmp_path)
    assert [(os.fspath(tmp_path), "*.safetensors")] == sglang_standin.DOWNLOADED
    sglang_standin.DOWNLOADED.clear()
    (tmp_path / "config.json").rename(tmp_path / "at-the-hub.config.json")
    sglang_standin.HUB["org/model"] = os.fspath(tmp_path)
    load(standin.loader(), model, "org/model")
    model.assert_holds(stored_tensors(tmp_path))
    files = ["*.safetensors", "config.json"]
    assert [("org/model", file) for file in files] == sglang_standin.DOWNLOADED


# --- what it refuses ------------------------------------------------------------------------------


def test_options_are_refused_when_the_loader_is_made(sglang: Engine) -> None:
    with pytest.raises(ArgumentError, match="got slot"):
        sglang.loader({"slot": 3})


def test_a_model_that_names_its_files_by_patterns_is_refused(
    sglang: Engine, folder: Path, model: EngineModel
) -> None:
    model.allow_patterns_overrides = ["consolidated*.safetensors"]
    with pytest.raises(ArgumentError, match="consolidated"):
        load(sglang.loader(), model, folder)
    assert model.handed == []


@pytest.mark.parametrize(
    "broken", [Broken.FILE_CUT_BY_A_BYTE, Broken.INDEX_CUT, Broken.BLOCK_TENSOR_MORE]
)
def test_a_broken_checkpoint_is_refused_unchanged_and_nothing_is_handed_out(
    sglang: Engine, broken: Broken, tmp_path: Path
) -> None:
    write_broken_checkpoint(tmp_path, broken)
    model = EngineModel({})
    with pytest.raises(KdaStreamError) as refused:
        load(sglang.loader(), model, tmp_path)
    assert refused.value.code is broken.code
    assert model.handed == []
