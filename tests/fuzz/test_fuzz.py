"""The fuzz targets without a fuzzer: every seed once, and faults planted that must be found."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz import fuzz_header, fuzz_index
from fuzz.judging import AcceptedLieError
from support.files import shard_bytes
from support.headers import BROKEN, GOOD, LET_THROUGH, one, raw, span

from kda_stream.checkpoint.header import Header
from kda_stream.checkpoint.header_text import Columns
from kda_stream.checkpoint.index import Index

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
SEEDS = {folder.name: sorted(folder.iterdir()) for folder in (HERE / "seeds").glob("*fuzz*")}
SPANS = ("kda_copy.c", "kda_guard.c", "kda_pieces.c", "kda_spans.c", "fuzz_spans.c")
C_TARGETS = {
    "kda_fuzz_header": ("kda_header.c", "fuzz_header.c"),
    "kda_fuzz_spans": SPANS,
    "kda_fuzz_spans_large": SPANS,
}
PYTHON_TARGETS: dict[str, Any] = {"fuzz_header": fuzz_header, "fuzz_index": fuzz_index}
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="the span targets need Linux 5.14")


# Seeds -------------------------------------------------------------------------------------------


def test_every_target_has_seeds_and_none_is_large() -> None:
    assert SEEDS.keys() == C_TARGETS.keys() | PYTHON_TARGETS.keys()
    for target, seeds in SEEDS.items():
        assert 20 <= len(seeds) <= 160, target
        assert all(seed.stat().st_size < 1024 for seed in seeds), target


@pytest.mark.parametrize("target", PYTHON_TARGETS)
def test_a_seed_is_taken_for_what_its_name_says(target: str) -> None:
    answers: Counter[str] = Counter()
    for seed in SEEDS[target]:
        answer = PYTHON_TARGETS[target].check(seed.read_bytes())
        kind = "refused" if answer is None else "legal"
        answers[kind] += 1
        said = seed.name.partition("-")[0]
        assert said == kind or said not in ("refused", "legal"), seed.name
    assert min(answers["legal"], answers["refused"]) >= 10, answers


@pytest.mark.parametrize("target", PYTHON_TARGETS)
def test_what_is_made_of_the_seeds_is_often_accepted_and_often_refused(target: str) -> None:
    def flip(part: bytes) -> bytes:
        at = random.randrange(len(part) + 1)
        return part[:at] + bytes([random.randrange(256)]) + part[at + 1 :]

    random = Random(1)
    seeds = [seed.read_bytes() for seed in SEEDS[target]]
    answers: Counter[bool] = Counter()
    for number in range(3000):
        made = PYTHON_TARGETS[target].mutate(seeds[number % len(seeds)], 1024, random, flip)
        assert len(made) <= 1024 + 1
        answers[PYTHON_TARGETS[target].check(made) is not None] += 1
    assert answers[True] > 200, answers
    assert answers[False] > 200, answers


# Lies that the Python targets must find ----------------------------------------------------------


def headers_that_lie() -> dict[str, tuple[bytes, Callable[[bytes], Header]]]:
    """Files, and readers that take them for what they are not."""
    truly = fuzz_header.read
    good = one(GOOD)
    two = raw(f'{{"a":{span(0, 2)},"b":{span(2, 4)}}}', 4)
    described = raw(f'{{"__metadata__":{{"a":"b"}},"a":{GOOD}}}', 2)

    def of(data: bytes, **changes: object) -> tuple[bytes, Callable[[bytes], Header]]:
        return data, lambda data: replace(truly(data), **changes)

    lies = {
        "a byte more at the end": (good + b"x", lambda _: truly(good)),
        "a byte less at the end": (good[:-1], lambda _: truly(good)),
        "another dtype": of(good, kinds=(("I8", (2,)),)),
        "another shape": of(good, kinds=(("U8", (1, 2)),)),
        "another name": of(good, numbers={"b": 0}),
        "a tensor less": of(two, numbers={"a": 0}),
        "two names for each other's bytes": of(two, numbers={"b": 0, "a": 1}),
        "another range": of(two, begins=[0, 1], ends=[2, 3]),
        "another payload": of(good, payload_begin=truly(good).payload_begin - 1),
        "no metadata": of(described, metadata={}),
    }
    for files in BROKEN.values():
        for name, data in files.items():
            if name in LET_THROUGH:
                lies[name] = (data, lambda _: truly(good))
    return lies


HEADER_LIES = headers_that_lie()


@pytest.mark.parametrize("lie", HEADER_LIES)
def test_a_header_that_is_accepted_for_what_it_is_not_is_found(lie: str) -> None:
    data, read = HEADER_LIES[lie]
    with pytest.raises(AcceptedLieError):
        fuzz_header.check(data, read)


def test_a_file_that_the_package_alone_refuses_is_found() -> None:
    data = one(GOOD.replace("U8", "U4"))
    truly = fuzz_header.read(one(GOOD))
    with pytest.raises(AcceptedLieError, match="refuses"):
        fuzz_header.check(data, lambda _: replace(truly, kinds=(("U4", (2,)),)))


def test_a_legal_file_that_is_refused_is_found() -> None:
    def read(data: bytes) -> Header:
        return fuzz_header.read(data + b"x")

    with pytest.raises(AcceptedLieError, match="refused, and legal"):
        fuzz_header.check(one(GOOD), read)


def names_twice(columns: Columns) -> Columns:
    return replace(columns, names=[*columns.names[:-1], columns.names[0]])


def another_offset(columns: Columns) -> Columns:
    return replace(columns, begins=columns.begins[:-1] + type(columns.begins)("Q", [1]))


@pytest.mark.parametrize("spoil", [names_twice, another_offset])
def test_two_ways_through_a_header_that_differ_are_found(
    spoil: Callable[[Columns], Columns], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fuzz_header._plain_columns

    def spoiled(text: bytes) -> Columns | None:
        columns = plain(text)
        return None if columns is None else spoil(columns)

    data = raw(f'{{"a":{span(0, 2)},"b":{span(2, 4)}}}', 4)
    fuzz_header.check(data)
    monkeypatch.setattr(fuzz_header, "_plain_columns", spoiled)
    with pytest.raises(AcceptedLieError):
        fuzz_header.check(data)


def index(weight_map: str) -> bytes:
    return f'{{"metadata":{{"total_size":8}},"weight_map":{weight_map}}}'.encode()


INDEX_LIES: dict[str, tuple[bytes, Index]] = {
    "a path": (index('{"a":"x/b"}'), Index({"a": "b"}, {"b": 1}, 8)),
    "a path, as it stands": (index('{"a":"x/b"}'), Index({"a": "x/b"}, {"x/b": 1}, 8)),
    "a name twice": (index('{"a":"b","a":"c"}'), Index({"a": "c"}, {"c": 1}, 8)),
    "another file": (index('{"a":"b"}'), Index({"a": "c"}, {"c": 1}, 8)),
    "another count": (index('{"a":"b"}'), Index({"a": "b"}, {"b": 2}, 8)),
    "another size": (index('{"a":"b"}'), Index({"a": "b"}, {"b": 1}, 9)),
    "another order": (index('{"a":"b","c":"b"}'), Index({"c": "b", "a": "b"}, {"b": 2}, 8)),
    "text after the object": (index('{"a":"b"}') + b"}", Index({"a": "b"}, {"b": 1}, 8)),
}


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_an_index_that_is_accepted_for_what_it_is_not_is_found(lie: str) -> None:
    data, answer = INDEX_LIES[lie]
    with pytest.raises(AcceptedLieError):
        fuzz_index.check(data, lambda _: answer)


@pytest.mark.parametrize("name", ["..", ".", "", "../b", "/b", "a:b", "a\\b", "a\0", "\u202e"])
def test_the_judge_of_indexes_refuses_what_is_no_file_name(name: str) -> None:
    text = json.dumps({"weight_map": {"a": name}}).encode()
    assert fuzz_index.judged(text) is None
    assert fuzz_index.judged(text.replace(b'"a": ', b'"a": "...b", "c": ')) is None
    assert fuzz_index.judged(b'{"weight_map":{"a":"...b"}}') is not None


def test_two_ways_through_an_index_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lie = Index({"a": "c"}, {"c": 1}, 8)
    monkeypatch.setattr(fuzz_index, "_plain_index", lambda _: lie)
    with pytest.raises(AcceptedLieError, match="two readings"):
        fuzz_index.check(index('{"a":"b"}'))


@pytest.mark.parametrize("target", PYTHON_TARGETS)
def test_an_error_of_another_kind_is_let_out(target: str) -> None:
    def read(_data: bytes) -> None:
        raise OverflowError

    with pytest.raises(OverflowError):
        PYTHON_TARGETS[target].check(shard_bytes("{}"), read)


# The C targets, by the compiler that there is ----------------------------------------------------

DRIVER = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int main(int count, char **names)
{
    for (int i = 1; i < count; i++) {
        static uint8_t read[4096];
        FILE *file = fopen(names[i], "rb");
        size_t size = file ? fread(read, 1, sizeof read, file) : 0;
        uint8_t *data = malloc(size + !size);
        if (!file || !data)
            return 2;
        memcpy(data, read, size);
        puts(names[i]);
        fflush(stdout);
        LLVMFuzzerTestOneInput(data, size);
        free(data);
        fclose(file);
    }
    return 0;
}
"""


def run_seeds(target: str, csrc: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Builds a C target without a fuzzer and gives it its seeds, one after the other."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler on this machine")
    (folder / "driver.c").write_text(DRIVER)
    options = ["-std=c11", "-pthread", "-D_FILE_OFFSET_BITS=64", f"-I{csrc}"]
    options += ["-DKDA_FUZZ_LARGE"] * target.endswith("_large")
    sources = [csrc / name for name in C_TARGETS[target]]
    program = folder / target
    subprocess.run([compiler, *options, *sources, folder / "driver.c", "-o", program], check=True)
    return subprocess.run([program, *SEEDS[target]], capture_output=True, text=True, timeout=60)


@LINUX_ONLY
@pytest.mark.parametrize("target", C_TARGETS)
def test_the_c_holds_on_every_seed(target: str, tmp_path: Path) -> None:
    done = run_seeds(target, CSRC, tmp_path)
    assert done.returncode == 0, done.stdout.splitlines()[-1]
    assert len(done.stdout.splitlines()) == len(SEEDS[target])


PLANTED = {
    "a number of 20 digits": ("kda_fuzz_header", "kda_header.c", "DIGITS_MAX 19", "DIGITS_MAX 20"),
    "text after the last brace": ("kda_fuzz_header", "kda_header.c", " || rest.at != rest.end", ""),
    "a byte more than the source has": (
        *("kda_fuzz_spans", "kda_spans.c"),
        *("shape.extent > span->source_bytes)", "shape.extent > span->source_bytes + 1)"),
    ),
    "the wrong part of a block": (
        *("kda_fuzz_spans", "kda_pieces.c"),
        *("bounce->memory + skipped, (size_t)got", "bounce->memory, (size_t)got"),
    ),
    "a piece that is too long": (
        *("kda_fuzz_spans_large", "kda_pieces.c"),
        *("left = shape->bytes - piece->done;", "left = shape->bytes;"),
    ),
}


@LINUX_ONLY
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_that_is_planted_in_the_c_is_found_by_the_seeds_alone(
    fault: str, tmp_path: Path
) -> None:
    target, name, right, wrong = PLANTED[fault]
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    source = (csrc / name).read_text()
    assert source.count(right) == 1
    (csrc / name).write_text(source.replace(right, wrong))
    done = run_seeds(target, csrc, tmp_path)
    assert done.returncode < 0, done.stdout  # abort()


# The short run -----------------------------------------------------------------------------------


def test_the_short_run_says_what_is_missing(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "CC": str(tmp_path / "clang"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(HERE / "run.py"), "--seconds", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stdout
    assert re.search("^missing: clang with libFuzzer", done.stderr, re.MULTILINE)
    has_atheris = importlib.util.find_spec("atheris") is not None
    assert has_atheris or re.search("^missing: atheris", done.stderr, re.MULTILINE)
    assert not list(tmp_path.iterdir())  # the temporary folder is gone
