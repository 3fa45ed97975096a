"""The text of a manifest: what is written is read again, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kda_stream import ManifestError, PayloadDigestError
from kda_stream.errors import ErrorCode as Code
from kda_stream.manifest import (
    ManifestEntry,
    manifest_problems,
    manifest_text,
    parse_manifest,
)

DIGEST = "0123456789abcdef" * 4
ENTRY = ManifestEntry("BF16", (2, 3), DIGEST)
DOCUMENT: dict[str, Any] = json.loads(manifest_text({"a": ENTRY}))


def test_what_was_written_is_read_again() -> None:
    tensors = {
        "b": ManifestEntry("F32", (), "f" * 64),
        "a": ENTRY,
        "": ManifestEntry("F4", (0, 2**63), DIGEST),
        'a "name"\n\u202e\U0001f600': ENTRY,
    }
    text = manifest_text(tensors)
    assert parse_manifest(text.encode()) == tensors
    assert list(parse_manifest(text.encode())) == sorted(tensors)
    assert text.isascii()


def test_a_manifest_of_nothing_is_one() -> None:
    assert parse_manifest(manifest_text({}).encode()) == {}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        DIGEST.encode() + b"  model.safetensors\n",
        b'{"format":"kda_stream.manifest","format":"kda_stream.manifest","version":1,"tensors":{}}',
    ],
)
def test_other_texts_are_refused(text: bytes) -> None:
    with pytest.raises(ManifestError) as refused:
        parse_manifest(text, path="m.json")
    assert refused.value.code is Code.MANIFEST_INVALID
    assert refused.value.path == "m.json"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "other"),
        ("format", None),
        ("version", 2),
        ("version", "1"),
        ("version", True),
        ("version", 1.0),
        ("tensors", None),
        ("tensors", []),
    ],
)
def test_other_documents_are_refused(key: str, value: object) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(json.dumps({**DOCUMENT, key: value}).encode())
    without = {k: v for k, v in DOCUMENT.items() if k != key}
    with pytest.raises(ManifestError):
        parse_manifest(json.dumps(without).encode())


@pytest.mark.parametrize(
    "entry",
    [
        None,
        DIGEST,
        {},
        {"dtype": "BF16", "shape": [2, 3]},
        {"dtype": "BF16", "shape": [2, 3], "sha256": DIGEST, "more": 1},
        {"dtype": 1, "shape": [2, 3], "sha256": DIGEST},
        {"dtype": "BF16", "shape": "2", "sha256": DIGEST},
        {"dtype": "BF16", "shape": [True], "sha256": DIGEST},
        {"dtype": "BF16", "shape": [-1], "sha256": DIGEST},
        {"dtype": "BF16", "shape": [1.0], "sha256": DIGEST},
        {"dtype": "BF16", "shape": [2, 3], "sha256": DIGEST[1:]},
        {"dtype": "BF16", "shape": [2, 3], "sha256": DIGEST.upper()},
        {"dtype": "BF16", "shape": [2, 3], "sha256": DIGEST + "\n"},
        {"dtype": "BF16", "shape": [2, 3], "sha256": None},
    ],
)
def test_an_entry_that_is_none_is_refused_by_name(entry: object) -> None:
    with pytest.raises(ManifestError) as refused:
        parse_manifest(json.dumps({**DOCUMENT, "tensors": {"a": ENTRY_JSON, "b": entry}}).encode())
    assert refused.value.tensor == "b"


ENTRY_JSON = DOCUMENT["tensors"]["a"]


def problems(
    listed: dict[str, ManifestEntry],
    found: dict[str, ManifestEntry],
    unread: tuple[str, ...] = (),
) -> list[Any]:
    shards = {name: f"{name}.safetensors" for name in (*found, *unread)}
    return list(manifest_problems(listed, found, shards, "m.json"))


def test_a_checkpoint_that_is_as_listed_has_no_problem() -> None:
    assert problems({"a": ENTRY}, {"a": ENTRY}) == []


def test_tensors_on_one_side_alone_are_a_problem_for_each_side() -> None:
    lost, more = problems({"a": ENTRY, "b": ENTRY}, {"b": ENTRY, "c": ENTRY})
    assert {lost.code, more.code} == {Code.MANIFEST_TENSORS}
    assert (lost.got, more.got) == ("1: a", "1: c")
    assert {lost.path, more.path} == {"m.json"}


@pytest.mark.parametrize(
    "other", [ManifestEntry("F32", (2, 3), DIGEST), ManifestEntry("BF16", (3, 2), DIGEST)]
)
def test_another_dtype_or_shape_is_a_problem_though_the_bytes_are_the_same(
    other: ManifestEntry,
) -> None:
    (problem,) = problems({"a": ENTRY}, {"a": other})
    assert isinstance(problem, ManifestError)
    assert (problem.code, problem.tensor, problem.path) == (
        Code.MANIFEST_TENSORS,
        "a",
        "a.safetensors",
    )
    assert (problem.expected, problem.got) == (str(ENTRY), str(other))


def test_other_bytes_are_a_problem_with_both_digests() -> None:
    (problem,) = problems({"a": ENTRY}, {"a": ManifestEntry("BF16", (2, 3), "e" * 64)})
    assert isinstance(problem, PayloadDigestError)
    assert (problem.code, problem.tensor) == (Code.PAYLOAD_DIGEST, "a")
    assert (problem.expected, problem.got) == (f"sha256 {DIGEST}", f"sha256 {'e' * 64}")


def test_of_a_tensor_that_could_not_be_read_nothing_is_said_here() -> None:
    assert problems({"a": ENTRY, "b": ENTRY}, {"a": ENTRY}, unread=("b",)) == []
