"""A `model.safetensors.index.json`: its text in, the weight map out. Pure: no file, no clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ErrorCode, ShardIndexError, shown
from ..foreign import foreign_kind
from ..jsontext import DuplicateKeyError, parse_json
from ..limits import SNIFF_BYTES


@dataclass(frozen=True, slots=True)
class Index:
    """A checked index: `weight_map` is tensor name -> shard file name, in the index's order.

    `total_size` is the size in bytes that the index's metadata claims, or None; it is a claim, and
    writers disagree on what it counts.
    """

    weight_map: Mapping[str, str] = field(repr=False)
    total_size: int | None = None


def parse_index(text: bytes, *, path: object = None) -> Index:
    """Check the text of an index and return it.

    Raises `ShardIndexError` when it is not JSON, gives a name twice, has no `weight_map` from
    strings to strings, or names a shard by anything else than a plain file name in its own folder.
    """
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
        seen = foreign_kind(text[:SNIFF_BYTES], json_expected=True)
        got, hint = seen or (str(error), "the file is damaged or no index: fetch it again")
        raise ShardIndexError(
            ErrorCode.INDEX_NOT_JSON,
            "the index is not valid JSON",
            path=path,
            got=got,
            hint=hint,
        ) from None
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
    strings_only = set(map(type, weight_map.values())) <= {str}
    for shard in dict.fromkeys(weight_map.values()) if strings_only else weight_map.values():
        if not _is_plain_file_name(shard):
            raise ShardIndexError(
                ErrorCode.INDEX_SHARD_NAME,
                "the index does not name a shard in its own folder",
                path=path,
                tensor=next(name for name, file in weight_map.items() if file == shard),
                expected="a plain file name such as model-00001-of-00062.safetensors",
                got=json.dumps(shard),
                hint="an index from a trusted source holds no paths: do not use this one",
            )
    return Index(weight_map, _total_size(document))


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
