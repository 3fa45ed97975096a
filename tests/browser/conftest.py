"""Chromium, driven by playwright. `KDA_STREAM_CHROMIUM` names it where it must not be missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
Opened = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    named = os.environ.get("KDA_STREAM_CHROMIUM")
    if named is None:
        pytest.importorskip("playwright", reason="needs the `browser` extra (playwright)")
    path = named or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs Chromium: install it, or name it in KDA_STREAM_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any) -> Opened:
    """Open a file in a browser's page of its own; at the end it must have complained of nothing.

    Nothing but the file may have been asked for, either.
    """

    @contextmanager
    def open_file(path: Path, **context: Any) -> Iterator[Any]:
        complaints: list[str] = []
        asked: list[str] = []
        made = browser.new_context(**context)
        page = made.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        yield page
        assert complaints == []
        assert asked == [path.as_uri()]
        made.close()

    return open_file
