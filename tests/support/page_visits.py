"""Visits to the pages that `stub_server` serves, and what the tests ask of them."""

from __future__ import annotations

from dataclasses import dataclass

from playwright.sync_api import BrowserContext, Page, ViewportSize, expect

from support.stub_server import event

PHONE = ViewportSize(width=360, height=740)

PATIENCE = 30_000
"""Milliseconds that a test waits for what the page shows: a busy machine may take seconds over it."""
expect.set_options(timeout=PATIENCE)


@dataclass
class Visit:
    """An open page and everything that it asked for and complained about."""

    page: Page
    requests: list[str]
    complaints: list[str]

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")


def visit(context: BrowserContext, url: str) -> Visit:
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    opened = Visit(page, [], [])
    page.on("request", lambda request: opened.requests.append(request.url))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    # a refused request is an error of the console too; what the page makes of it is what the tests look at
    page.on(
        "console",
        lambda message: (
            opened.complaints.append(message.text)
            if message.type == "error" and not message.text.startswith("Failed to load resource")
            else None
        ),
    )
    page.goto(url)
    return opened


def answers(page: Page) -> list[str]:
    return [text.strip() for text in page.locator(".answer > .text").all_inner_texts()]


def complete(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("The answer is complete.")


def raw_events(*data: object) -> bytes:
    return b"".join(event(each) for each in data)
