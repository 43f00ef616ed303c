"""Accessibility of the pages, by axe-core, in light and dark and at two widths."""

from __future__ import annotations

from importlib.resources import files

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from support.page_visits import PHONE, complete, visit
from support.stub_server import MODEL, StubServer

pytest_plugins = ["support.page_fixtures"]
pytestmark = pytest.mark.timeout(300)
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
DESKTOP = ViewportSize(width=1280, height=800)
EVERYTHING = (
    "<think>Let me *think*.</think>### Part\n\nSome **bold** text, a [link](https://example.com) and `code`.\n\n"
    "| a | b |\n| - | -: |\n| x | 1 |\n\n- [x] done\n- [ ] to do\n\n> said\n\n$$\\frac{a}{b}$$\n\n"
    "```python\n@decorated\nclass Name(Base):  # note\n    def f(self) -> str:\n        return f'text {1 + 2}'\n```\n"
)


def faults(page: Page) -> list[str]:
    """What axe-core finds wrong, with where."""
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(AXE)
    results = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [f"{each['id']}: {node['target']}" for each in results["violations"] for node in each["nodes"]]


@pytest.mark.parametrize(
    ("theme", "size"),
    [
        pytest.param("light", DESKTOP, id="light desktop", marks=pytest.mark.prove),
        pytest.param("dark", PHONE, id="dark phone"),
        pytest.param("light", PHONE, id="light phone", marks=pytest.mark.prove),
        pytest.param("dark", DESKTOP, id="dark desktop", marks=pytest.mark.prove),
    ],
)
def test_axe_finds_no_fault(browser: Browser, site: StubServer, theme: str, size: ViewportSize) -> None:
    context = browser.new_context(color_scheme="dark" if theme == "dark" else "light", viewport=size)
    opened = visit(context, site.url)
    page = opened.page
    expect(page.locator("#model-name")).to_have_text(MODEL)
    found = {"welcome": faults(page)}
    page.click("#open-settings")
    page.check("#tools")
    page.keyboard.press("Escape")
    called = {"name": "calculate", "arguments": '{"expression": "1 / 0"}'}
    site.answers(calls=[{"index": 0, "function": called}], finish="tool_calls")
    site.answers(EVERYTHING)
    site.answers(EVERYTHING)
    opened.ask("Show")
    complete(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .switcher")).to_contain_text("2/2")
    page.get_by_role("button", name="Side by side").click()
    site.answers(status=429, message="busy", retry_after="60")
    opened.ask("Again")
    expect(page.locator(".trouble")).to_be_visible()
    page.locator(".thought:visible summary").first.click()
    page.locator(".sampling summary").first.click()
    found["two answers and a failure"] = faults(page)
    if size is PHONE:
        page.click("#toggle-list")
    page.get_by_role("button", name="Actions for Show").click()
    found["list"] = faults(page)
    page.keyboard.press("Escape")
    if size is PHONE:
        page.click("#close-list")
    page.click("#open-settings")
    found["settings"] = faults(page)
    page.goto(site.url + "/docs")
    expect(page.locator("#routes article").first).to_be_visible()
    found["docs"] = faults(page)
    context.close()
    assert {place: each for place, each in found.items() if each} == {}
