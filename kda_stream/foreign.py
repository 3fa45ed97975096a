"""What a file that is not what its name says looks like, from its first bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .limits import SNIFF_BYTES

_BINARY: Final = (
    (rb"GGUF", "a GGUF file", "kda_stream reads safetensors only"),
    (rb"PK\x03\x04", "a zip archive or a PyTorch .bin", "convert it to safetensors first"),
    (rb"\x80[\x02-\x05]", "a Python pickle", "convert it to safetensors first"),
    (rb"\x1f\x8b", "a gzip file", "unpack it first"),
    (rb"\x93NUMPY", "a numpy .npy file", "kda_stream reads safetensors only"),
    (rb"\x89HDF", "an HDF5 file", "kda_stream reads safetensors only"),
)
_TEXT: Final = (
    (rb"version https://git-lfs", "a Git LFS pointer", "fetch the real file: git lfs pull"),
    (rb"\s*<(!doctype|html|\?xml)", "an HTML or XML page", "the download got an error page"),
    (rb"\s*[{\[]", "JSON text", "an error message or an index was saved under a shard's name"),
)
LENGTH_BYTES: Final = 8


def foreign_kind(start: bytes, *, json_expected: bool = False) -> tuple[str, str] | None:
    """(what the file looks like, what to do about it) from its first bytes; None when unknown."""
    is_text = b"\0" not in start[:LENGTH_BYTES]  # a shard's length field ends in zeros
    if not is_text and start[LENGTH_BYTES:].startswith(b"{"):
        return None
    text = _TEXT[:-1] if json_expected else _TEXT
    kinds = (*_BINARY, *text) if is_text else _BINARY
    for pattern, kind, hint in kinds:
        if re.match(pattern, start, re.IGNORECASE):
            return kind, hint
    return None


@dataclass(frozen=True, slots=True)
class NotJson:
    """What a text is that `parse_json` does not take: `fault` goes on after "the index is"."""

    fault: str
    got: str | None = None
    hint: str | None = None


def not_json(text: bytes, error: ValueError | RecursionError) -> NotJson:
    """Why `parse_json` refuses the text, by the `error` that it raised; the hint where known."""
    if not text.strip():
        return NotJson("empty")
    if isinstance(error, RecursionError):
        return NotJson("nested too deeply")
    seen = foreign_kind(text[:SNIFF_BYTES], json_expected=True) or (str(error), None)
    return NotJson("not valid JSON", *seen)
