"""What to do next, in the words of the command: the library's hints are for those who call it."""

from __future__ import annotations

import re
from typing import Final

from ..errors import ErrorCode, KdaStreamError

_HINTS: Final = {
    ErrorCode.CONFIG_MISSING: "fetch it: the command knows the geometry from there alone",
    ErrorCode.HEADER_LENGTH_OVER_CAP: "the command takes no longer one; if the file is trusted, "
    "open it in Python, with header_bytes_max=",
    ErrorCode.LAYER_UNKNOWN: "`kda-stream inspect` lists the layers",
    ErrorCode.LAYERS_MISSING: "the download is incomplete, or the config.json is another "
    "checkpoint's; `kda-stream stream --layers N,N,...` streams those that are there",
    ErrorCode.MEMORY_REFUSED: "raise the limit on memory, which `kda-stream env` tells; a stream "
    "takes less with fewer slots",
}
_ARGUMENT: Final = re.compile(r'\b(read|lock|family)="?(\w+)"?')


def hint_of(error: KdaStreamError) -> str | None:
    """The hint of an error that ends a command, or is found by one; None where it has none."""
    if error.code in _HINTS:
        return _HINTS[error.code]
    return None if error.hint is None else _ARGUMENT.sub(r"--\1 \2", error.hint)
