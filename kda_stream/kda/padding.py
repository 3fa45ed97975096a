"""The padding of a tensor that is stored longer than it counts: nothing but zeros."""

from __future__ import annotations

from ..errors import ErrorCode, PayloadValueError


def bytes_not_zero(padding: memoryview) -> int:
    """How many bytes of it are anything else; that of a -0.0 is one."""
    return padding.nbytes - bytes(padding).count(0)


def padding_error(
    tensor: str, path: str | None, *, padding: int, values: int, not_zero: int
) -> PayloadValueError:
    """The refusal of `padding` values behind the `values` that count, of `not_zero` bytes."""
    return PayloadValueError(
        ErrorCode.PAYLOAD_PADDING,
        "the padding behind the values that count is not zeros",
        path=path,
        tensor=tensor,
        expected=f"{padding} zeros behind {values} values",
        got=f"{not_zero} bytes that are not zero",
        hint="the config's count of heads is another checkpoint's, or the file is damaged",
    )
