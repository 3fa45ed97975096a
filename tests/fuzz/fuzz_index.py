"""Fuzz target: the text of an index. Python's json module, held to strict rules, is the judge.

The library must accept exactly what the judge accepts, and see the same weight map in it; where the
C reads the weight map, the library's other way must read it alike. Only `ShardIndexError` may come
out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from fuzz.judging import AcceptedLieError, need
from fuzz.mutation import NAMES, changed_json, fresh_object

from kda_stream.checkpoint.index import Index, _json_index, _plain_index, parse_index
from kda_stream.errors import ShardIndexError

PIECES = (
    *('"weight_map":{"a":"b"}', '"metadata":{"total_size":8}', '"a":"model"', '"a":"b"'),
    *('"weight_map"', '"metadata"', '"total_size"', '".."', '"."', '"../x"', '"a/b"', r'"C:\\x"'),
    *(r'"\u002e."', r'"a\u0000"', '"\u202e"', '{"a":"b"}', "8.0", "1e3", "99999999999999999999999"),
)
SIZES = ("0", "8", "8.0", "1e3", "-1", "true", "null", "2.5", '"8"', "9" * 25)
FILES = ("b", "c", "a.b", "model-00001-of-00002.safetensors", "caf\u00e9", "...", "..x", "}", "' '")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def refuse(constant: str) -> None:
    raise ValueError(constant)


def judged(text: bytes) -> Index | None:
    """What the text says, by the rules; None when it is to be refused."""
    try:
        document = json.loads(
            str(text, "utf-8"),
            object_pairs_hook=unique,
            parse_constant=refuse,
            parse_int=lambda digits: int(digits) if len(digits) <= 20 else float(digits),
        )
    except (ValueError, RecursionError):
        return None
    files = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not files or not all(map(is_file, files.values())):
        return None
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool) or not isinstance(total, (int, float)) or total % 1 != 0:
        total = None
    return Index(files, Counter(files.values()), None if total is None else int(total))


def is_file(name: object) -> bool:
    """A name in its own folder that can be printed."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and set(name).isdisjoint("/\\:")
        and name.isprintable()
    )


def check(text: bytes, read: Callable[[bytes], Index] = parse_index) -> Index | None:
    """Raises when `read` and the judge disagree, or when it lets another error out."""
    expected = judged(text)
    check_both_ways(text)
    try:
        index = read(text)
    except ShardIndexError as error:
        if len(text) % 8 == 0:  # to tell an error takes longer than all the rest
            need(str(error).isprintable(), "an error of one line", str(error))
        need(expected is None, "refused, and right", text, error)
        return None
    need(expected is not None and index == expected, "accepted", text, index, expected)
    need(expected is not None and list(index.weight_map) == list(expected.weight_map), "order")
    return index


def check_both_ways(text: bytes) -> None:
    """Where the C takes the weight map apart, the json module must do so alike."""
    plain = _plain_index(text)
    if plain is not None:
        try:
            slow = _json_index(text, None)
        except ShardIndexError as error:
            raise AcceptedLieError(f"read in C and refused by json: {text!r}") from error
        need(plain == slow, "two readings", text, plain, slow)
        need(list(plain.weight_map) == list(slow.weight_map), "two orders", text)


def fresh(random: Random) -> bytes:
    """The text of a legal index, most often."""
    files = random.sample(FILES, 2)
    names = random.sample(NAMES, random.choice((1, 1, 2, 3, 5)))
    members = [(name, json.dumps(random.choice(files), ensure_ascii=False)) for name in names]
    document = [("weight_map", fresh_object(members, random))]
    if random.random() < 0.5:
        metadata = fresh_object([("total_size", random.choice(SIZES))], random)
        document.insert(random.choice((0, 0, 1)), ("metadata", metadata))
    if random.random() < 0.1:
        document.insert(random.choice((0, 1)), (random.choice(NAMES), random.choice(PIECES[-10:])))
    return fresh_object(document, random).encode() + b" " * random.choice((0, 0, 1))


def mutate(text: bytes, bytes_max: int, random: Random, change: Callable[[bytes], bytes]) -> bytes:
    """Another index."""
    is_fresh = random.random() < 0.25
    made = fresh(random) if is_fresh else text
    if not is_fresh or random.random() < 0.7:
        made = changed_json(made, random, change, PIECES)
    return made if len(made) <= bytes_max else change(text)
