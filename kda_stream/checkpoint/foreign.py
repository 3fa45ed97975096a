"""What a file that stands under a shard's name and is no shard looks like."""

from __future__ import annotations

import re
from typing import Final

from ..errors import ErrorCode, HeaderError

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

# Only a file that fails one of these first checks can be something else: the length field of a
# shard may by chance begin like a gzip file.
_FIRST_CHECKS: Final = frozenset(
    {
        ErrorCode.HEADER_FILE_TOO_SHORT,
        ErrorCode.HEADER_LENGTH_OVER_FILE,
        ErrorCode.HEADER_LENGTH_OVER_CAP,
        ErrorCode.HEADER_NOT_UTF8,
        ErrorCode.HEADER_START,
    }
)


def named_if_foreign(error: HeaderError, start: bytes) -> HeaderError:
    """`error`, or one that says what the file is when its first bytes betray another kind."""
    is_text = b"\0" not in start[:LENGTH_BYTES]  # a length field has zeros at its end
    is_shard = not is_text and start[LENGTH_BYTES:].startswith(b"{")
    if is_shard or error.code not in _FIRST_CHECKS:
        return error
    for pattern, kind, hint in (*_BINARY, *(_TEXT if is_text else ())):
        if re.match(pattern, start, re.IGNORECASE):
            return HeaderError(
                ErrorCode.HEADER_FOREIGN_FILE,
                f"not a safetensors file: it looks like {kind}",
                path=error.path,
                expected=error.expected,
                got=error.got,
                hint=hint,
            )
    return error
