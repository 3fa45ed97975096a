"""The `kda-stream` command."""

from __future__ import annotations

from .command import main

__all__ = ["main"]
