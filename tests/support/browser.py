"""A headless Chromium for the tests of the page; they skip, and say why, where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


def require_chromium() -> str:
    """The path of an installed Chromium; skips the calling module when something is missing."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium is installed ({', '.join(NAMES)})", allow_module_level=True)
    return path


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """A browser with a new profile, closed at the end."""
    from playwright.sync_api import sync_playwright

    flags = ["--disable-gpu", "--disable-quic"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium refuses to start as root with it
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield browser
        finally:
            browser.close()
