"""What every error of the library promises, checked in one place.

A test that is named after an `ErrorCode` takes `told`, a fixture that is `Told(request)`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kda_stream import ErrorCode, KdaStreamError


def state(error: BaseException) -> dict[str, object]:
    """All that an error holds, those inside it too, as values that compare."""
    found: dict[str, object] = {"class": type(error), "line": str(error), "args": error.args}
    if isinstance(error, KdaStreamError):
        found["path"] = error.path  # an ImportError has it apart
    for name, value in vars(error).items():
        found[name] = value
        if name == "problems" and isinstance(value, tuple):
            found[name] = [state(v) if isinstance(v, BaseException) else v for v in value]
    return found


def assert_travels(error: KdaStreamError) -> None:
    """It is the same after each way of pickling and copying."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert state(pickle.loads(pickle.dumps(error, protocol))) == state(error)
    assert state(copy.copy(error)) == state(error)
    assert state(copy.deepcopy(error)) == state(error)


class Told:
    """Catches the error of the code that the test is named after, and holds it to its promises.

    `path` and `tensor` must be what the error names, `expected` and `got` be in what it says of
    them; what is None here must be None there.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.code = ErrorCode[request.function.__name__.removeprefix("test_").upper()]
        self.error: Any = None

    @contextmanager
    def __call__(
        self,
        builtin: type[Exception],
        *,
        path: object = None,
        tensor: str | None = None,
        expected: str | None = None,
        got: str | None = None,
    ) -> Iterator[None]:
        with pytest.raises(builtin) as caught:
            yield
        error = self.error = caught.value
        assert isinstance(error, KdaStreamError)
        assert error.code is self.code
        assert error.path == (None if path is None else str(path))
        assert error.tensor == tensor
        for wanted, said in ((expected, error.expected), (got, error.got)):
            assert (wanted is None) == (said is None), said
            assert (wanted or "") in (said or "")
        self._assert_one_line(error)
        assert error.hint is not None
        assert len(error.hint.split()) > 1, "a hint is a thing to do"
        assert_travels(error)

    def _assert_one_line(self, error: KdaStreamError) -> None:
        line = str(error)
        assert line.isprintable()
        assert error.what
        assert line == error.finding + f" ({error.hint})"
        for part in (error.path, error.tensor, error.what, error.expected, error.got):
            if part is not None and part.isprintable() and len(part) < 160:
                assert part in error.finding
