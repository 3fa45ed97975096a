"""The only face of the compiled extension: its functions, and its statuses as errors.

The extension holds the copy routine of `csrc/` and the C library's calls for maps and locks. It is
imported when it is first needed, so that `import kda_stream` costs nothing.
"""

from __future__ import annotations

import errno
import os
from functools import cache
from typing import Any, Final

from ..errors import ErrorCode, KdaStreamError, NotBuiltError, PayloadError, SpanError

_CUT_SHORT: Final = (
    "it was cut short after it was opened: fetch it again and open the checkpoint anew"
)
_PAYLOAD_ERRORS: Final = {
    "KDA_SOURCE_FAULT": (
        ErrorCode.PAYLOAD_FAULT,
        "a page of the mapped shard cannot be read",
        f"{_CUT_SHORT}; or its disk failed",
    ),
    "KDA_FILE_END": (ErrorCode.PAYLOAD_END, "the shard ends before the tensor does", _CUT_SHORT),
    "KDA_READ_FAILED": (
        ErrorCode.PAYLOAD_READ,
        "the shard cannot be read",
        "check the disk or the network file system",
    ),
    "KDA_NO_POPULATE": (
        ErrorCode.POPULATE_UNSUPPORTED,
        "mapped pages cannot be checked before they are copied: that needs Linux 5.14",
        'pass read="positional"',
    ),
    "direct": (
        ErrorCode.DIRECT_REFUSED,
        "the file system refuses direct reads of this alignment",
        'pass read="auto"',
    ),
    "KDA_NO_GUARD": (
        ErrorCode.GUARD_REFUSED,
        "the handler that makes an error of a shard's cut under its map cannot be set",
        'pass read="positional"',
    ),
}
_SPAN_FAULTS: Final = {
    "KDA_SIZE_OVERFLOW": "its size overflows",
    "KDA_STRIDE_SHORT": "its rows overlap",
    "KDA_SOURCE_SHORT": "its rows reach past its source",
    "KDA_DESTINATION_SHORT": "its rows reach past the destination",
    "KDA_DESTINATION_OVERLAP": "it lands on the span before it",
    "KDA_SOURCE_OVERLAP": "its source lies in the destination",
}


@cache
def extension() -> tuple[Any, Any]:
    """The extension's (ffi, lib); raises `NotBuiltError` when it was not compiled."""
    try:
        from .. import _native
    except ImportError as error:
        raise NotBuiltError(
            ErrorCode.NOT_BUILT,
            "the compiled part of the library is missing",
            path=os.path.dirname(os.path.dirname(__file__)),
            expected="the module kda_stream._native",
            got=str(error),
            hint="install the package (pip install .) and start Python outside its source tree, "
            "or install it in place (pip install -e .); both need a C compiler",
        ) from error
    return _native.ffi, _native.lib


def copy_error(
    status: int,
    error_number: int,
    *,
    tensor: str | None,
    path: str | None,
    span: str | None,
    direct: bool = False,
) -> KdaStreamError:
    """The error for a status of `kda_spans_copy` that is neither KDA_OK nor KDA_PAUSED.

    `error_number` is the errno that came with it, or 0; `tensor`, `path` and `span` say which span,
    `direct` that it was read past the page cache.
    """
    name = extension()[0].typeof("enum kda_status").elements[status]
    if direct and name == "KDA_READ_FAILED" and error_number == errno.EINVAL:
        name = "direct"
    if name in _PAYLOAD_ERRORS:
        code, what, hint = _PAYLOAD_ERRORS[name]
        reason = os.strerror(error_number) if error_number else None
        return PayloadError(code, what, path=path, tensor=tensor, got=reason, hint=hint)
    return span_error(_SPAN_FAULTS.get(name, "it is malformed"), tensor, path, span)


def span_error(why: str, tensor: str | None, path: str | None, span: str | None) -> SpanError:
    """The error for a span that was refused before anything was written."""
    return SpanError(
        ErrorCode.SPAN_REFUSED,
        f"a span was refused and nothing was written: {why}",
        path=path,
        tensor=tensor,
        expected="rows within the source, and within the destination behind the span before",
        got=span,
        hint="the plan that was handed in is wrong",
    )
