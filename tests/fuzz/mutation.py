"""Changes to a JSON text that leave most of it JSON; deterministic for a seed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random

TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9.eE+]+|[a-z]+|\s+|.', re.DOTALL)
MEMBER = re.compile(rb'"[^"]*"\s*:\s*(?:\{[^{}]*\}|"[^"]*")')
NUMBER = re.compile(rb"(?<![\w.\"-])[0-9]+(?![\w.\"])")

NUMBERS = (
    *("0", "1", "2", "3", "4", "6", "8", "16", "00", "01", "-0", "-1", "0.0", "1.0", "1e0", "true"),
    *("null", '"1"', "[]", "9223372036854775808", "9999999999999999999", "10000000000000000000"),
    *("18446744073709551615", "18446744073709551616", "2305843009213693952", "4294967296", "1E400"),
)
PIECES = (
    *('"', "\\", "{", "}", "[", "]", ",", ":", " ", "\n", "\t", "\r", "\0", "\x1f", "\x7f", "{}"),
    *(r"\u0061", r"\ud800", r"\udc00", r"\ud83d\ude00", r"\u0000", r"\n", r"\/", r"\"", r"\x"),
    *("null", "true", "NaN", "Infinity", "-", "e5", ".5", '""', '"a"', '"b"', "\u00e9", "\u2028"),
    *("\ufeff", "\U0001f600", "\u0662", "/* */", "//", "'"),
)


NAMES = (
    *("a", "b", "c", "", "\u00e9", "\U0001f600", "}", "{", '"', "\\", "\n", "\0", "\x7f", "\u2028"),
    *("dtype", "weight_map", "metadata", "__metadata", "__metadata__", "self_attn.A_log", "/", ":"),
)


def fresh_object(members: Sequence[tuple[str, str]], random: Random) -> str:
    """An object of names and values that are JSON text; written in one of the ways there are."""
    ascii_only = random.random() < 0.3
    space = random.choice(("", "", "", " ", "\n\t"))
    parts = [
        f"{json.dumps(name, ensure_ascii=ascii_only)}{space}:{space}{value}"
        for name, value in members
    ]
    return "{" + f",{space}".join(parts) + "}"


def changed_json(
    text: bytes, random: Random, change: Callable[[bytes], bytes], pieces: Sequence[str]
) -> bytes:
    """`text` with one or two changes, by bytes, tokens, numbers or members."""
    for _ in range(random.choice((1, 1, 1, 2))):
        kind = random.randrange(8)
        if kind < 3 or not text:
            text = change(text)
        elif kind == 3:
            text = spliced(text, random, pieces)
        elif kind == 4:
            text = tokens_moved(text, random)
        elif kind == 5:
            text = number_edited(text, random)
        else:
            text = members_moved(text, random)
    return text


def spliced(text: bytes, random: Random, pieces: Sequence[str]) -> bytes:
    at = random.randint(0, len(text))
    piece = random.choice(random.choice((pieces, PIECES, NUMBERS)))
    return text[:at] + piece.encode() + text[at + random.choice((0, 0, 1, 4)) :]


def tokens_moved(text: bytes, random: Random) -> bytes:
    tokens = TOKEN.findall(text)
    a, b = random.randrange(len(tokens)), random.randrange(len(tokens))
    kind = random.randrange(4)
    if kind == 0:
        tokens[a], tokens[b] = tokens[b], tokens[a]
    elif kind == 1:
        tokens.insert(b, tokens[a])
    elif kind == 2:
        tokens.insert(a, random.choice((b" ", b"\n", b"\t", b"\r")))
    else:
        del tokens[a]
    return b"".join(tokens)


def number_edited(text: bytes, random: Random) -> bytes:
    found = list(NUMBER.finditer(text))
    if not found:
        return text
    at = random.choice(found)
    number = random.choice(NUMBERS)
    if random.random() < 0.5 and len(at[0]) < 19:
        number = str(max(0, int(at[0]) + random.choice((-2, -1, 1, 2, 4))))
    return text[: at.start()] + number.encode() + text[at.end() :]


def members_moved(text: bytes, random: Random) -> bytes:
    """One more member, one less, or two that change places."""
    found = list(MEMBER.finditer(text))
    if not found:
        return text
    a, b = sorted((random.choice(found), random.choice(found)), key=re.Match.start)
    kind = random.randrange(3)
    if kind == 0:
        return text[: a.start()] + b[0] + b"," + text[a.start() :]
    if kind == 1:
        return text[: a.start()] + text[a.end() :].lstrip(b",")
    if a.start() == b.start():
        return text
    return text[: a.start()] + b[0] + text[a.end() : b.start()] + a[0] + text[b.end() :]
