"""A `model.safetensors.index.json`: its text in, the weight map out. Pure: no file, no clock."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import ErrorCode, ShardIndexError, shown
from ..foreign import not_json
from ..jsontext import DuplicateKeyError, parse_json
from .plain import split_weight_map

_SPACE: Final = rb"[ \t\n\r]*"
_PLAIN_HEAD: Final = re.compile(
    rb'\{ (?:"metadata" : \{[^{}]*\} , )?"weight_map" : \{'.replace(b" ", _SPACE)
)


@dataclass(frozen=True, slots=True)
class Index:
    """A checked index: `weight_map` is tensor name -> shard file name, in the index's order.

    `shard_tensors` is how many tensors it places in each shard file. `total_size` is the size in
    bytes that the index's metadata claims, or None; it is a claim, and writers disagree on what it
    counts.
    """

    weight_map: Mapping[str, str] = field(repr=False)
    shard_tensors: Mapping[str, int] = field(repr=False)
    total_size: int | None = None


def parse_index(text: bytes, *, path: object = None) -> Index:
    """Check the text of an index and return it.

    Raises `ShardIndexError` when it is not JSON, gives a name twice, has no `weight_map` from
    strings to strings, or names a shard by anything else than a plain file name in its own folder.
    """
    return _plain_index(text) or _json_index(text, path)


def _plain_index(text: bytes) -> Index | None:
    """The index, where its weight map is in the form that writers emit and all is right with it.

    The weight map is taken apart in C and the rest is read strictly, with `{}` in its stead. That
    is the same document: up to the map's brace both texts are equal, and where the rest is legal
    that brace is the value of the outermost object's "weight_map". For the metadata before it has
    no brace within, so it ends at its own or in a string; and a string would end at the quote
    before weight_map, which no JSON goes on with.
    """
    head = _PLAIN_HEAD.match(text)
    try:
        members = None if head is None else split_weight_map(text, head.end())
        if head is None or members is None or not all(map(_is_plain_file_name, members.words)):
            return None
        document = parse_json((text[: head.end()] + b"}" + text[members.end :]).decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    files = map(members.words.__getitem__, members.row_words)
    weight_map = dict(zip(members.names, files, strict=True))
    if len(weight_map) != len(members.names):
        return None
    shard_tensors = dict(zip(members.words, members.word_rows, strict=True))
    return Index(weight_map, shard_tensors, _total_size(document))


def _json_index(text: bytes, path: object) -> Index:
    """Any legal index; raises `ShardIndexError` for every other one."""
    try:
        document = parse_json(text.decode("utf-8"))
    except DuplicateKeyError as error:
        raise ShardIndexError(
            ErrorCode.INDEX_NOT_JSON,
            "the index gives one name twice",
            path=path,
            tensor=error.key,
            expected="each name once",
            hint="readers disagree on which counts: write the index again",
        ) from None
    except (ValueError, RecursionError) as error:
        raise _not_json(text, error, path) from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ShardIndexError(
            ErrorCode.INDEX_WEIGHT_MAP,
            "the index has no weight_map, or an empty one",
            path=path,
            expected='an object "weight_map" of tensor names and shard files',
            got=_summary(document),
            hint="pass the model.safetensors.index.json of a sharded checkpoint",
        )
    shard_tensors: Counter[str] = Counter()
    for name, shard in weight_map.items():
        is_known = isinstance(shard, str) and shard in shard_tensors
        if not is_known and not _is_plain_file_name(shard):
            raise ShardIndexError(
                ErrorCode.INDEX_SHARD_NAME,
                "the index does not name a shard in its own folder",
                path=path,
                tensor=name,
                expected="a plain file name such as model-00001-of-00062.safetensors",
                got=json.dumps(shard),
                hint="an index from a trusted source holds no paths: do not use this one",
            )
        shard_tensors[shard] += 1
    return Index(weight_map, shard_tensors, _total_size(document))


def _not_json(text: bytes, error: ValueError | RecursionError, path: object) -> ShardIndexError:
    """The error for a text that `parse_json` does not take."""
    found = not_json(text, error)
    return ShardIndexError(
        ErrorCode.INDEX_NOT_JSON,
        f"the index is {found.fault}",
        path=path,
        got=found.got,
        hint=found.hint or "the file is damaged or no index: fetch it again",
    )


def _is_plain_file_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(c in "/\\:" or not c.isprintable() for c in name)
    )


def _total_size(document: dict[str, Any]) -> int | None:
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # some writers compute it as a float
        return int(total)
    return total if type(total) is int else None


def _summary(document: Any) -> str:
    if isinstance(document, dict):
        return "an object with the keys " + (shown(", ".join(document)) or "none")
    return shown(document)
