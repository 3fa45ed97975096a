"""What a file that stands under a shard's name and is no shard looks like."""

from __future__ import annotations

import re
from typing import Final

from ..errors import ErrorCode, HeaderError

_FOREIGN: Final = (
    (rb"version https://git-lfs", "a Git LFS pointer", "fetch the real file: git lfs pull"),
    (rb"\s*<(!doctype|html|\?xml)", "an HTML or XML page", "the download got an error page"),
    (rb"\s*[{\[]", "JSON text", "an error message or an index was saved under a shard's name"),
    (rb"GGUF", "a GGUF file", "kda_stream reads safetensors only"),
    (rb"PK\x03\x04", "a zip archive or a PyTorch .bin", "convert it to safetensors first"),
    (rb"\x80[\x02-\x05]", "a Python pickle", "convert it to safetensors first"),
    (rb"\x1f\x8b", "a gzip file", "unpack it first"),
    (rb"\x93NUMPY", "a numpy .npy file", "kda_stream reads safetensors only"),
    (rb"\x89HDF", "an HDF5 file", "kda_stream reads safetensors only"),
)


def no_header(
    code: ErrorCode, what: str, start: bytes, path: object, expected: str, got: str
) -> HeaderError:
    """The error for a file without a header, naming the file's kind where its start betrays it."""
    for pattern, kind, hint in _FOREIGN:
        if re.match(pattern, start, re.IGNORECASE):
            return HeaderError(
                ErrorCode.HEADER_FOREIGN_FILE,
                f"not a safetensors file: it looks like {kind}",
                path=path,
                expected=expected,
                got=got,
                hint=hint,
            )
    hint = "the file is incomplete or no safetensors file: fetch it again"
    if not start:
        hint = "the file is empty: fetch it again"
    elif not any(start):
        hint = "the file starts with zeros, as a broken download does: fetch it again"
    return HeaderError(code, what, path=path, expected=expected, got=got, hint=hint)
