"""What --json prints, held against the schema that the package brings, in its strict form.

The schema allows facts that it does not know; its strict form, made here, allows none.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from cli.running import INDEX, SHARDS, Rewrite, Run
from jsonschema import Draft202012Validator
from support.checkpoints import UNEVEN, write_checkpoint
from support.families import FAMILIES, write_family
from support.terminals import without_modules

from kda_stream.testing import DSA, Layout
from kda_stream.testing import write_checkpoint as write_small

Json = dict[str, Any]
COMMANDS = ("inspect", "verify", "stream", "diff", "demo", "env", "completion")
ENVELOPE = {"schema_version", "command", "exit_status", "problems"}
# Keywords whose values are schemas of the same value, of parts of it, or lists and tables of them.
SAME_VALUE = ("if", "then", "else", "not")
SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")
SAME_VALUE_TABLES = ("$defs", "dependentSchemas")
PARTS = ("items", "additionalProperties", "contains", "propertyNames")
PART_LISTS = ("prefixItems",)
PART_TABLES = ("properties", "patternProperties")


@pytest.fixture(scope="module")
def schema() -> Json:
    text = (resources.files("kda_stream.cli") / "output.schema.json").read_text(encoding="utf-8")
    found: Json = json.loads(text)
    return found


@pytest.fixture(scope="module")
def strict(schema: Json) -> Draft202012Validator:
    return Draft202012Validator(strict_form(schema))


def strict_form(schema: Any, *, is_part: bool = True) -> Any:
    """The schema without room for what it does not name, in it and in what it refers to."""
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    for key, value in schema.items():
        if key in ("additionalProperties", "unevaluatedProperties") and value is True:
            continue
        if key in SAME_VALUE:
            made[key] = strict_form(value, is_part=False)
        elif key in SAME_VALUE_LISTS:
            made[key] = [strict_form(each, is_part=False) for each in value]
        elif key in SAME_VALUE_TABLES:
            made[key] = {name: strict_form(each, is_part=False) for name, each in value.items()}
        elif key in PARTS:
            made[key] = strict_form(value)
        elif key in PART_LISTS:
            made[key] = [strict_form(each) for each in value]
        elif key in PART_TABLES:
            made[key] = {name: strict_form(each) for name, each in value.items()}
        else:
            made[key] = value
    if is_part:
        made["unevaluatedProperties"] = False
    return made


def properties(schema: Any, at: str = "#") -> Iterator[tuple[str, Any]]:
    """(where, schema) of every property that the schema names, at any depth."""
    if isinstance(schema, dict):
        for name, each in schema.get("properties", {}).items():
            yield f"{at}/properties/{name}", each
        for key, value in schema.items():
            if key not in ("const", "enum", "default", "examples"):
                yield from properties(value, f"{at}/{key}")
    elif isinstance(schema, list):
        for number, each in enumerate(schema):
            yield from properties(each, f"{at}/{number}")


def faults(strict: Draft202012Validator, output: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:300]}" for error in strict.iter_errors(output)]


# The schema itself -------------------------------------------------------------------------------


def test_the_schema_is_a_schema(schema: Json) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)


def test_there_is_a_definition_for_each_command_and_for_a_problem(schema: Json) -> None:
    assert {*COMMANDS, "problem"} <= set(schema["$defs"])


def is_selector(where: str) -> bool:
    """Whether a property stands there only to choose by: within an `if`."""
    return "/if/" in where


def test_every_property_has_a_description(schema: Json) -> None:
    found = [(where, each) for where, each in properties(schema) if not is_selector(where)]
    assert len(found) > 80
    without = [where for where, each in found if not (each.get("description") or "").strip()]
    assert without == []


UNITS = {
    "bytes": ("byte",),
    "seconds": ("second",),
    "bytes_per_second": ("byte", "second"),
}


def test_a_description_of_an_amount_names_its_unit(schema: Json) -> None:
    without = []
    for where, each in properties(schema):
        name = where.rpartition("/")[2]
        ending = next((unit for unit in UNITS if name == unit or name.endswith(f"_{unit}")), None)
        is_object = each.get("type") == "object" or "properties" in each
        if ending is None or is_selector(where) or is_object:
            continue
        described = each.get("description", "").lower()
        if not any(word in described for word in UNITS[ending]):
            without.append(where)
    assert without == []


def test_what_may_be_added_under_the_same_version_is_allowed(schema: Json) -> None:
    output = {
        "schema_version": 1,
        "command": None,
        "exit_status": 2,
        "problems": [dict.fromkeys(PROBLEM, None) | {"code": "argument", "what": "w", "more": 1}],
        "later": {"a": 1},
    }
    Draft202012Validator(schema).validate(output)
    assert len(faults(Draft202012Validator(strict_form(schema)), output)) > 0


PROBLEM = ("code", "what", "path", "tensor", "expected", "got", "hint")


# Every command's output --------------------------------------------------------------------------


def _truncated(folder: Path) -> Path:
    os.truncate(folder / SHARDS[0], 500)
    return folder


def _unreadable_config(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def good(run: Run, small: Path, tmp_path: Path) -> list[Json]:
    """Outputs of commands that did what they were asked."""
    two = write_family(
        tmp_path / "two", (FAMILIES["GLM5_NEXT"], FAMILIES["GLM5_NEXT_F32_CONV"]), UNEVEN, layers=8
    ).folder
    dsa = write_small(tmp_path / "dsa", Layout(kinds=(DSA, DSA)))
    bare = write_checkpoint(tmp_path / "bare", config=False).folder
    sums = tmp_path / "sums.json"
    (tmp_path / "nothing").mkdir()
    commands: list[tuple[object, ...]] = [
        ("inspect", small),
        ("inspect", two),
        ("inspect", dsa),
        ("inspect", bare),
        ("verify", small),
        ("verify", two, "--family", "auto"),
        ("verify", small, "--payload"),
        ("verify", small, "--write-manifest", sums),
        ("verify", small, "--manifest", sums),
        ("stream", small),
        ("stream", small, "--layers", "4,0,4", "--lock", "off", "--read", "direct"),
        ("stream", two, "--family", "auto", "--read", "mapped", "--residency", "drop"),
        ("diff", small, small),
        ("diff", small, small, "--payload"),
        ("demo",),
        ("demo", "kept"),
        ("env",),
        ("env", small),
        ("env", tmp_path / "nothing"),
        ("env", dsa),
        ("completion", "bash"),
        ("completion", "zsh"),
    ]
    outputs = []
    for command in commands:
        ran = run(*command, "--json")
        assert ran.status == 0, (command, ran.stdout)
        outputs.append(ran.json)
    return outputs


def bad(run: Run, small: Path, copy_of_small: Callable[[], Path], tmp_path: Path) -> list[Json]:
    """Outputs of commands that found something, or could not do what they were asked."""
    cut = _truncated(copy_of_small())
    no_config = _unreadable_config(copy_of_small())
    html = copy_of_small()
    (html / INDEX).write_text("<html>")
    lost = copy_of_small()
    (lost / SHARDS[1]).unlink()
    zeros = write_checkpoint(tmp_path / "zeros", layers=4, sparse=True).folder
    commands: list[tuple[object, ...]] = [
        (),
        ("frobnicate",),
        *((command, "--frob") for command in COMMANDS),
        *((command, tmp_path / "gone") for command in ("inspect", "verify", "stream", "env")),
        *(
            (command, folder)
            for command in ("inspect", "verify", "stream", "env")
            for folder in (cut, html, lost)
        ),
        ("verify", cut, "--payload"),
        ("verify", no_config),
        ("stream", no_config),
        ("env", no_config),
        ("verify", zeros, "--payload"),
        ("verify", small, "--family", "KIMI_K3"),
        ("verify", small, "--write-manifest", tmp_path / "no" / "sums.json"),
        ("verify", small, "--manifest", small / INDEX),
        ("stream", small, "--layers", "99"),
        ("stream", small, "--slots", "0"),
        ("stream", small, "--family", "KIMI_K3"),
        ("diff", small, zeros),
        ("diff", small, cut),
        ("diff", small),
        ("demo", small),
        ("completion", "fish9"),
    ]
    without = without_modules(tmp_path / "without", "kda_stream._native", "shtab")
    outputs = []
    for command in commands:
        ran = run(*command, "--json")
        outputs.append(ran.json)
        if command != ("env", no_config):
            assert ran.status != 0, command
    for command in (("inspect", small), ("stream", small), ("env", small), ("completion", "bash")):
        outputs.append(run(*command, "--json", env=without).json)
    outputs.append(run("stream", small, "--lock", "require", "--json", before=NO_LOCKS).json)
    outputs.append(run("stream", small, "--json", before=NO_LOCKS).json)
    outputs.append(run("env", "--json", before=NO_LOCKS).json)
    return outputs


NO_LOCKS = """
import ctypes, resource
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
"""


def test_every_output_is_what_the_schema_says_and_no_more(
    run: Run,
    small: Path,
    rewritten: Rewrite,
    tmp_path: Path,
    schema: Json,
    strict: Draft202012Validator,
) -> None:
    """Good and failing; and every property that is described is printed by some of them."""
    made = 0

    def copy_of_small() -> Path:
        nonlocal made
        made += 1
        return write_small(tmp_path / f"copy{made}")

    outputs = [*good(run, small, tmp_path), *bad(run, small, copy_of_small, tmp_path)]
    missing = rewritten(lambda t: None if t.name.endswith(".0.self_attn.A_log") else t)
    for command in (("inspect", missing), ("verify", missing), ("stream", missing)):
        outputs.append(run(*command, "--json").json)
    for output in outputs:
        assert faults(strict, output) == [], output
        assert list(output)[:4] == ["schema_version", "command", "exit_status", "problems"]
    assert {output["command"] for output in outputs} == {None, *COMMANDS}
    printed = set(map(tuple, keys_of(outputs)))
    described = {where.rpartition("/")[2] for where, _ in properties(schema)}
    assert described - {key for path in printed for key in path} == set()
    assert_types_matter(strict, outputs)


def keys_of(value: Any) -> Iterator[list[str]]:
    if isinstance(value, dict):
        yield list(value)
        for each in value.values():
            yield from keys_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from keys_of(each)


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to each value that is no object and no list."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if isinstance(each, (dict, list)):
            yield from places(each, (*at, key))
        else:
            yield (*at, key)


def assert_types_matter(strict: Draft202012Validator, outputs: list[Json]) -> None:
    """That each value, changed into one of another type, is no longer what the schema says."""
    seen: set[tuple[str, ...]] = set()
    for output in outputs:
        for place in places(output):
            kind = (str(output["command"]), *("n" if isinstance(k, int) else k for k in place))
            if kind in seen:
                continue
            seen.add(kind)
            changed = copy.deepcopy(output)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]  # type: ignore[index]
            holder[place[-1]] = {"odd": 1}  # type: ignore[index]
            assert faults(strict, changed), f"anything may stand at {place}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_fact_that_the_schema_does_not_know_is_noticed(
    run: Run, small: Path, strict: Draft202012Validator, command: str
) -> None:
    """Else the test above could not fail."""
    arguments: dict[str, tuple[object, ...]] = {
        "diff": (small, small),
        "demo": (),
        "completion": ("bash",),
    }
    output = run(command, *arguments.get(command, (small,)), "--json").json
    assert faults(strict, output) == []
    assert faults(strict, {**output, "unknown": 1})
    assert faults(strict, {**output, "schema_version": 2})
    assert faults(strict, {**output, "command": "frobnicate"})
    assert faults(strict, {**output, "exit_status": "0"})
    for key in ENVELOPE:
        assert faults(strict, {k: v for k, v in output.items() if k != key}), key
    other = "inspect" if command == "env" else "env"
    assert faults(strict, {**output, "command": other})


def test_a_command_that_could_not_begin_need_have_no_facts(schema: Json) -> None:
    problem = {**dict.fromkeys(PROBLEM), "code": "argument", "what": "what is wrong"}
    for command in (None, *COMMANDS):
        output = {"schema_version": 1, "command": command, "exit_status": 3, "problems": [problem]}
        assert list(Draft202012Validator(schema).iter_errors(output)) == []
