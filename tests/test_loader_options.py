"""What an engine's `model_loader_extra_config` may say: judged by name, without any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kda_stream import ArgumentError
from kda_stream.interop.engines import LoaderOptions, loader_options
from kda_stream.limits import WEIGHTS_SLOT_BYTES

RunPython = Callable[..., Any]


def test_nothing_said_is_the_defaults() -> None:
    assert loader_options({}) == LoaderOptions(
        slots=3,
        slot_bytes=WEIGHTS_SLOT_BYTES,
        lock="prefer",
        read="auto",
        residency=None,
        check_kda=True,
    )


def test_every_option_is_taken() -> None:
    given: dict[str, Any] = {
        "slots": 5,
        "slot_bytes": 1 << 20,
        "lock": "off",
        "read": "direct",
        "residency": "drop",
        "check_kda": False,
    }
    options = loader_options(given)
    assert {name: getattr(options, name) for name in given} == given


@pytest.mark.parametrize("name", ["slot", "threads", "SLOTS", ""])
def test_an_unknown_option_is_refused_by_name(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"slots, slot_bytes.*got {name}") as refused:
        loader_options({"slots": 3, name: 1})
    assert "--model-loader-extra-config" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("slots", value) for value in (True, "3", 3.0, None, [3])),
        *(("slot_bytes", value) for value in ("64MB", 1e6)),
        *((name, value) for name in ("lock", "read", "residency") for value in (1, None, True)),
        *(("check_kda", value) for value in (1, "false", None)),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=rf"^{name} .*got .*\({type(value).__name__}\)"):
        loader_options({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("slots", value) for value in (-1, 0, 1, 65)),
        *(("slot_bytes", value) for value in (-1, 0)),
        ("lock", "perhaps"),
        ("read", "quickly"),
        ("residency", "some"),
    ],
)
def test_a_value_that_is_none_of_its_kind_is_refused(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match="slot" if name == "slots" else name):
        loader_options({name: value})


@pytest.mark.parametrize("given", [None, '{"slots": 3}', [("slots", 3)], 3])
def test_what_is_no_object_is_refused(given: object) -> None:
    with pytest.raises(ArgumentError, match="model_loader_extra_config"):
        loader_options(given)


def test_ranks_share_the_page_cache_unless_told_otherwise() -> None:
    assert loader_options({}).residency_for(1) == "auto"
    assert loader_options({}).residency_for(8) == "keep"
    assert loader_options({"residency": "drop"}).residency_for(8) == "drop"
    assert loader_options({"residency": "auto"}).residency_for(8) == "auto"


@pytest.mark.parametrize("module", ["vllm", "sglang", "engines"])
def test_importing_a_loader_s_module_loads_no_framework(run_python: RunPython, module: str) -> None:
    script = f"""
        import json, sys
        import kda_stream.interop.{module}
        print(json.dumps(sorted({{"torch", "vllm", "sglang", "transformers"}} & set(sys.modules))))
    """
    assert run_python(script) == []
