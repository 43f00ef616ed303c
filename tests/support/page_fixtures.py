"""Fixtures of the tests in `tests/server/test_page*.py`, which name this module in `pytest_plugins`.

They last for one file, because Playwright keeps an event loop running meanwhile.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Playwright, expect, sync_playwright

from support.page_visits import Visit, visit
from support.stub_server import MODEL, StubServer, serving

BINARIES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    if binary is None:
        reason = f"no browser: none of {', '.join(BINARIES)} is on the path"
        if os.environ.get("SIGHTLINE_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    playwright: Playwright
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def running_site() -> Iterator[StubServer]:
    with serving() as server:
        yield server


@pytest.fixture
def site(running_site: StubServer) -> StubServer:
    """What serves the pages: nothing else here knows that it is a stand-in."""
    running_site.reset()
    return running_site


@pytest.fixture
def context(browser: Browser, site: StubServer) -> Iterator[BrowserContext]:
    opened = browser.new_context(color_scheme="light", viewport={"width": 1100, "height": 760})
    yield opened
    opened.close()


@pytest.fixture
def chat(context: BrowserContext, site: StubServer) -> Iterator[Visit]:
    """The chat page. Whatever a test does with it, it stays at home and raises no error."""
    opened = visit(context, site.url)
    expect(opened.page.locator("#model-name")).to_have_text(MODEL)
    yield opened
    assert opened.complaints == []
    assert {urlsplit(url).netloc for url in opened.requests if not url.startswith("data:")} == {
        urlsplit(site.url).netloc
    }
