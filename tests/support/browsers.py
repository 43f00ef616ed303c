"""An installed Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

BINARIES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; without one the test is skipped, or fails if SIGHTLINE_REQUIRE_BROWSER is set."""
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    if binary is None:
        reason = f"no browser: none of {', '.join(BINARIES)} is on the path"
        if os.environ.get("SIGHTLINE_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield running
        running.close()
