"""As much of torch.cuda as code that copies layers to a GPU meets, over a fake driver.

Copies are to memory of the CPU and are over at once, so their events have always passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_driver import FakeDriver


class Event:
    def synchronize(self) -> None:
        """Nothing is under way."""


class Stream:
    def synchronize(self) -> None:
        """Nothing is under way."""

    def record_event(self) -> Event:
        return Event()


@contextmanager
def entered(_: Any) -> Iterator[None]:
    yield


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Stand in for the runtime and its streams until the test ends."""
    import torch

    driver = FakeDriver()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda ptr, size, _flags: driver.register(ptr, size),
        cudaHostUnregister=driver.unregister,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    return driver
