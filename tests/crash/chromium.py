"""A headless Chromium that is installed here, or the reason why a test of pages is skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGE_MILLISECONDS = 30_000
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")


@contextmanager
def started_chromium(*arguments: str) -> "Iterator[Browser]":
    """A browser of its own; skips the test where playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    path = os.environ.get("CAIRN_TEST_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium here: install the package chromium, or name one in CAIRN_TEST_CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=[*_ARGUMENTS, *arguments])
        yield browser
        browser.close()
