"""The chat page and the page of the API, in a real browser, against answers that each test scripts."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, ViewportSize, expect, sync_playwright

from sightline.server.page.pages import page_text
from support.stub_server import MODEL, Answer, StubServer, chunk, event, serving

PHONE = ViewportSize(width=360, height=740)
BINARIES = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script> "
    "[press](javascript:alert(1)) [data](data:text/html,hi) [fine](https://example.com/a) **<b>bold</b>** "
    '![picture](https://example.com/p.png) https://example.com/?q="><svg/onload=alert(1)>\n\n'
    "```html\n<script>document.title='owned'</script>\n```\n"
)
pytestmark = pytest.mark.timeout(60)


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
    page.set_default_timeout(5000)
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


def answers(page: Page) -> list[str]:
    return [text.strip() for text in page.locator(".answer .text").all_inner_texts()]


def complete(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("The answer is complete.")


def raw_events(*data: object) -> bytes:
    return b"".join(event(each) for each in data)


def test_a_question_is_streamed_before_its_answer_is_complete(chat: Visit, site: StubServer) -> None:
    answer = site.answers("The sky ", "is ", "blue.", hold_after=2)
    chat.ask("Why?")
    expect(chat.page.locator(".answer .text")).to_have_text("The sky is")
    expect(chat.page.locator("#stop")).to_be_visible()
    expect(chat.page.locator("#question")).to_have_value("")
    answer.release.set()
    complete(chat.page)
    assert answers(chat.page) == ["The sky is blue."]
    assert site.bodies[0]["messages"] == [{"role": "user", "content": "Why?"}]
    assert (site.bodies[0]["model"], site.bodies[0]["stream"]) == (MODEL, True)


def test_each_answer_shows_its_numbers_and_the_sampling_that_applied(chat: Visit, site: StubServer) -> None:
    site.answers("one ", "two ", "three", pause=0.05)
    chat.ask("Count")
    complete(chat.page)
    facts = chat.page.locator(".facts").inner_text()
    assert re.search(r"[\d.]+ tokens/s", facts)
    assert re.search(r"first token \d+\.\d\d s", facts)
    assert "12 tokens" in facts
    assert "prompt 34 tokens, 16 cached" in facts
    chat.page.click(".sampling summary")
    # the digits that a double would lose are there
    expect(chat.page.locator(".sampling dl")).to_contain_text("18446744073709551557")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_keeps_what_came_and_the_server_sees_the_client_go(chat: Visit, site: StubServer, way: str) -> None:
    answer = site.answers("Once upon ", "a time", hold_after=1)
    chat.ask("A story")
    expect(chat.page.locator(".answer .text")).to_have_text("Once upon")
    if way == "button":
        chat.page.click("#stop")
    else:
        chat.page.keyboard.press("Escape")
    assert answer.disconnected.wait(5)
    expect(chat.page.locator(".facts")).to_contain_text("Stopped")
    assert answers(chat.page) == ["Once upon"]
    expect(chat.page.locator("#question")).to_be_focused()
    chat.ask("Go on")
    complete(chat.page)
    assert site.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Once upon "}


def test_an_answer_is_made_again_in_its_place(chat: Visit, site: StubServer) -> None:
    site.answers("first")
    site.answers("second")
    chat.ask("Say")
    complete(chat.page)
    chat.page.get_by_role("button", name="Regenerate").click()
    expect(chat.page.locator(".answer .text")).to_have_text("second")
    complete(chat.page)
    assert site.bodies[0] == site.bodies[1]


@pytest.mark.prove
def test_an_answer_survives_a_failed_attempt_to_make_it_again(chat: Visit, site: StubServer) -> None:
    site.answers("first")
    site.answers(status=500, message="out of luck")
    chat.ask("Say")
    complete(chat.page)
    chat.page.get_by_role("button", name="Regenerate").click()
    expect(chat.page.locator(".trouble")).to_contain_text("out of luck")
    chat.page.get_by_role("button", name="Bring back the earlier answer").click()
    assert answers(chat.page) == ["first"]


def test_the_last_question_can_be_edited_and_sent_again(chat: Visit, site: StubServer) -> None:
    chat.ask("Spelt rong")
    complete(chat.page)
    chat.page.get_by_role("button", name="Edit").click()
    chat.page.get_by_label("Edit the question").fill("Spelt right")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator(".answer .text")).to_have_text("You said: Spelt right")
    assert site.bodies[-1]["messages"] == [{"role": "user", "content": "Spelt right"}]


@pytest.mark.prove
def test_a_conversation_survives_a_reload_until_a_new_one_starts_and_that_can_be_undone(
    chat: Visit, site: StubServer
) -> None:
    chat.ask("one")
    complete(chat.page)
    chat.page.fill("#question", "half typed")
    chat.page.reload()
    assert answers(chat.page) == ["You said: one"]
    expect(chat.page.locator("#question")).to_have_value("half typed")
    chat.ask("two")
    complete(chat.page)
    assert [message["content"] for message in site.bodies[-1]["messages"]] == ["one", "You said: one", "two"]
    chat.page.click("#new")
    expect(chat.page.locator("#welcome")).to_be_visible()
    assert answers(chat.page) == []
    chat.page.get_by_role("button", name="Undo").click()
    assert answers(chat.page) == ["You said: one", "You said: two"]
    chat.page.click("#new")
    chat.page.reload()
    expect(chat.page.locator("#welcome")).to_be_visible()


@pytest.mark.prove
def test_an_answer_cut_by_a_reload_comes_back_as_broken_off(chat: Visit, site: StubServer) -> None:
    site.answers("half ", "whole", hold_after=1)
    chat.ask("Say")
    expect(chat.page.locator(".answer .text")).to_have_text("half")
    chat.page.reload()
    assert answers(chat.page) == ["half"]
    expect(chat.page.locator(".trouble b")).to_have_text("The answer broke off")


@pytest.mark.prove
def test_a_full_storage_is_told_and_the_conversation_goes_on(chat: Visit, site: StubServer) -> None:
    chat.page.evaluate(
        """() => {
            for (let size = 5_000_000, count = 0; size >= 1; count++) {
                try { localStorage.setItem("other" + count, "x".repeat(size)); } catch { size = size / 2; }
            }
        }"""
    )
    chat.ask("one")
    complete(chat.page)
    expect(chat.page.locator(".notice")).to_contain_text("will not be here after a reload")
    assert answers(chat.page) == ["You said: one"]


@pytest.mark.prove
def test_a_conversation_too_long_to_keep_loses_its_oldest_part_and_says_so(chat: Visit, site: StubServer) -> None:
    long = "word " * 220_000
    for answer in (long, long, "short"):
        site.answers(answer)
        chat.ask("Say")
        expect(chat.page.locator(".facts")).to_have_count(len(site.bodies), timeout=15000)
    expect(chat.page.locator(".notice")).to_contain_text("only its latest 2 exchanges", timeout=15000)
    kept = json.loads(chat.page.evaluate("localStorage.getItem('sightline.conversation')"))
    assert [len(exchange["answer"]["text"]) for exchange in kept["exchanges"]] == [len(long), len("short")]


@pytest.mark.parametrize(
    ("answer", "title", "message"),
    [
        (Answer(["so far "], fails=True, message="The engine died."), "The answer broke off", "The engine died."),
        (Answer(["so far "], breaks_off=True), "The answer broke off", "not the whole answer"),
        (Answer(raw=[event(chunk("so far ")), b"data: {not json\n\n"]), "The answer broke off", "not JSON"),
        (Answer(raw=[event(chunk("so far ")), b"data: [DO"]), "The answer broke off", "not the whole answer"),
    ],
    ids=["error", "no end", "no json", "half an end"],
)
def test_a_stream_that_fails_halfway_is_never_shown_as_complete(
    chat: Visit, site: StubServer, answer: Answer, title: str, message: str
) -> None:
    site.script.append(answer)
    chat.ask("Say")
    expect(chat.page.locator(".trouble b")).to_have_text(title)
    expect(chat.page.locator(".trouble p")).to_contain_text(message)
    assert answers(chat.page) == ["so far"]
    chat.page.get_by_role("button", name="Retry").click()
    complete(chat.page)
    assert answers(chat.page) == ["You said: Say"]
    expect(chat.page.locator(".trouble")).to_have_count(0)


def test_a_refusal_shows_the_servers_message_and_a_later_question_leaves_the_refused_one_out(
    chat: Visit, site: StubServer
) -> None:
    site.answers(status=400, message="The prompt has 9000 tokens, the context 8192.")
    chat.ask("much too long")
    expect(chat.page.locator(".trouble")).to_contain_text("The prompt has 9000 tokens, the context 8192.")
    expect(chat.page.locator(".asked")).to_have_text("much too long")
    chat.ask("short")
    complete(chat.page)
    assert [message["content"] for message in site.bodies[-1]["messages"]] == ["short"]


@pytest.mark.prove
def test_a_busy_server_is_asked_again_only_after_its_wait(chat: Visit, site: StubServer) -> None:
    site.answers(status=429, message="The queue is full.", retry_after="2")
    chat.ask("Say")
    retry = chat.page.locator(".trouble button")
    expect(retry).to_have_text("Retry in 2 s")
    expect(retry).to_be_disabled()
    expect(retry).to_have_text("Retry in 1 s")
    expect(retry).to_have_text("Retry")
    retry.click()
    complete(chat.page)
    assert answers(chat.page) == ["You said: Say"]


def test_a_server_that_is_gone_is_told_and_nothing_typed_is_lost(chat: Visit, site: StubServer) -> None:
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.ask("Anybody?")
    expect(chat.page.locator(".trouble")).to_contain_text("The server cannot be reached")
    chat.page.unroute("**/v1/chat/completions")
    chat.page.get_by_role("button", name="Retry").click()
    expect(chat.page.locator(".answer .text")).to_have_text("You said: Anybody?")


def test_a_key_is_asked_for_used_and_kept_out_of_lasting_storage(chat: Visit, site: StubServer) -> None:
    site.api_key = "sk-secret"
    chat.ask("Hello")
    key = chat.page.get_by_label("API key")
    expect(key).to_be_focused()
    key.fill("wrong")
    key.press("Enter")
    expect(key).to_be_visible()
    key.fill("sk-secret")
    key.press("Enter")
    complete(chat.page)
    assert answers(chat.page) == ["You said: Hello"]
    expect(chat.page.locator("#key-form")).to_be_hidden()
    lasting = chat.page.evaluate("JSON.stringify(localStorage) + document.documentElement.outerHTML")
    assert "sk-secret" not in lasting
    assert chat.page.evaluate("sessionStorage.getItem('sightline.key')") == "sk-secret"
    chat.page.click("#open-settings")
    chat.page.get_by_role("button", name="Forget API key").click()
    assert chat.page.evaluate("sessionStorage.length") == 0


def test_what_is_set_reaches_the_request_and_what_is_empty_stays_out(chat: Visit, site: StubServer) -> None:
    bare = {"model", "messages", "stream", "stream_options"}
    chat.ask("plain")
    complete(chat.page)
    assert set(site.bodies[0]) == bare
    fields = {"Temperature": "0,7", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.05", "Longest answer": "64"}
    fields |= {
        "Seed": "18446744073709551615",
        "Repetition penalty": "1.1",
        "Stop": "END\n\\n\\n",
        "System prompt": "Be brief.",
    }
    chat.page.click("#open-settings")
    for label, value in fields.items():
        chat.page.locator("#settings").get_by_label(label).fill(value)
    chat.page.get_by_role("button", name="Done").click()
    chat.page.reload()
    chat.ask("set")
    complete(chat.page)
    sent = site.bodies[1]
    assert {name: value for name, value in sent.items() if name not in bare} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 64,
        "seed": 2**64 - 1,
        "repetition_penalty": 1.1,
        "stop": ["END", "\n\n"],
    }
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.page.click("#open-settings")
    chat.page.get_by_role("button", name="Reset all").click()
    chat.page.keyboard.press("Escape")
    chat.ask("plain again")
    complete(chat.page)
    assert set(site.bodies[2]) == bare
    assert sent["messages"][0] not in site.bodies[2]["messages"]


def test_a_setting_out_of_range_is_told_and_nothing_is_sent(chat: Visit, site: StubServer) -> None:
    wrong = {
        "Top-p": ("0", "1.5"),
        "Temperature": ("-1", "hot"),
        "Top-k": ("1.5",),
        "Min-p": ("2",),
        "Longest answer": ("0",),
        "Seed": ("18446744073709551616",),
        "Repetition penalty": ("0",),
    }
    for label, value in [(label, value) for label, values in wrong.items() for value in values]:
        chat.page.click("#open-settings")
        chat.page.get_by_label(label).fill(value)
        chat.page.keyboard.press("Escape")
        chat.ask("Say")
        field = chat.page.get_by_label(label)
        expect(field).to_be_focused()
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(chat.page.locator(".wrong:visible")).to_contain_text(label)
        expect(chat.page.locator("#question")).to_have_value("Say")
        assert site.bodies == []
        field.fill("")
        chat.page.keyboard.press("Escape")
    chat.ask("Say")
    complete(chat.page)


def test_hostile_output_is_inert_while_it_streams_and_after(chat: Visit, site: StubServer) -> None:
    site.answers(*HOSTILE)
    chat.ask(HOSTILE)
    complete(chat.page)
    for _ in range(2):
        text = chat.page.locator(".exchange")
        assert text.locator("script, img, iframe, object, [onerror], [onload], b").count() == 0
        assert text.locator("svg:not(.icon)").count() == 0
        links = text.locator("a")
        assert [links.nth(index).get_attribute("href") for index in range(links.count())] == [
            "https://example.com/a",
            "https://example.com/p.png",
            "https://example.com/?q=",
        ]
        assert links.first.get_attribute("rel") == "noopener noreferrer"
        assert "[press](javascript:alert(1))" in answers(chat.page)[0]
        assert "owned" not in chat.page.title()
        chat.page.reload()


@pytest.mark.prove
def test_markdown_is_drawn_the_same_however_it_is_cut(chat: Visit, site: StubServer) -> None:
    source = (
        "# Head\n\nSome **bold**, *slanted*, `co*d*e`, snake_case_name, 2 * 3 * 4 and **open.\nNext line\n\n"
        "- one\n- two\n  1. in\n  2. ner\n- three\n\n  more of three\n\n> said\n\n---\n1. x\n2) y\n\n"
        "```py\nif a:\n\n    b = `c`\n```\nafter\n\n~~~\nnever closed\n"
    )
    site.answers(source)
    site.answers(*source)
    site.answers(*[source[at : at + 7] for at in range(0, len(source), 7)], pause=0.02)
    for count in range(1, 4):
        chat.ask("Show")
        expect(chat.page.locator(".facts:has-text('cached')")).to_have_count(count)
    drawn = chat.page.locator(".answer .text").evaluate_all("all => all.map((each) => each.innerHTML)")
    assert drawn[0] == drawn[1] == drawn[2]
    first = chat.page.locator(".answer .text").first
    assert first.locator("h3").inner_text() == "Head"
    assert first.locator("strong").all_inner_texts() == ["bold"]
    assert first.locator("em").all_inner_texts() == ["slanted"]
    assert first.locator(":not(pre) > code").all_inner_texts() == ["co*d*e"]
    assert first.locator("ul > li").count() == 3
    assert first.locator("ul > li:nth-child(2) > ol > li").all_inner_texts() == ["in", "ner"]
    assert first.locator("ul > li:nth-child(3) > p").inner_text() == "more of three"
    assert first.locator("blockquote").inner_text() == "said"
    assert first.locator("pre code").all_text_contents() == ["if a:\n\n    b = `c`\n", "never closed\n"]


@pytest.mark.prove
def test_a_finished_part_is_drawn_once(chat: Visit, site: StubServer) -> None:
    """Drawing is linear: what is complete is not touched again, and what is still open has a bound."""
    lines = "".join(f"line {number}\n" for number in range(400))
    parts = ["finished\n\n", "```\n", *lines.splitlines(keepends=True), "```\n\n", *["word "] * 3000, "end"]
    answer = site.answers(*parts, hold_after=1)
    chat.ask("Say")
    expect(chat.page.locator(".answer p")).to_have_text("finished")
    chat.page.evaluate(
        """() => {
            window.touched = 0;
            const first = document.querySelector(".answer .text p");
            const seen = { childList: true, characterData: true, subtree: true };
            new MutationObserver((records) => { window.touched += records.length; }).observe(first, seen);
        }"""
    )
    answer.release.set()
    complete(chat.page)
    assert chat.page.evaluate("window.touched") == 0
    pieces = chat.page.locator(".answer p > span").all_text_contents()
    assert max(map(len, pieces)) <= 2000
    assert "".join(pieces) == "finished" + "word " * 3000 + "end"
    assert chat.page.locator(".answer p > span:nth-child(5)").count() == 0
    assert max(text.count("\n") for text in chat.page.locator(".answer pre span").all_text_contents()) <= 64
    assert chat.page.locator(".answer code").text_content() == lines


@pytest.mark.prove
def test_code_and_answers_can_be_copied(context: BrowserContext, chat: Visit, site: StubServer) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    source = "Look:\n\n```python\nprint(1)\n```\n"
    site.answers(source)
    chat.ask("Show")
    complete(chat.page)
    buttons = chat.page.get_by_role("button", name="Copy")
    for button, copied in ((buttons.first, "print(1)\n"), (buttons.last, source)):
        button.click()
        expect(chat.page.locator("#status")).to_have_text("Copied")
        assert chat.page.evaluate("navigator.clipboard.readText()") == copied


@pytest.mark.prove
def test_events_may_be_cut_at_every_byte(chat: Visit, site: StubServer) -> None:
    message = "žluť 日本語 🙂 e\u0301"
    two_lines = b'data: {"choices": [{"delta":\ndata:{"content": "~"}}]}\n\n'
    data = raw_events(chunk(message[:7]), chunk(message[7:])) + two_lines
    body = (b": a comment\n\nevent: x\n" + data + b"data: [DONE]\n\n").replace(b"\n", b"\r\n")
    result = chat.page.evaluate(
        """async (bytes) => {
            const body = (parts) => new ReadableStream({ start(stream) {
                for (const part of parts) stream.enqueue(new Uint8Array(part));
                stream.close();
            } });
            const read = async (parts) => {
                let text = "";
                for await (const data of events(body(parts))) {
                    text += data === "[DONE]" ? "|end" : JSON.parse(data).choices[0].delta.content;
                }
                return text;
            };
            const results = new Set();
            for (let cut = 0; cut <= bytes.length; cut++) {
                results.add(await read([bytes.slice(0, cut), bytes.slice(cut)]));
            }
            results.add(await read(bytes.map((byte) => [byte])));
            return [...results];
        }""",
        list(body),
    )
    assert result == [message + "~|end"]


@pytest.mark.prove
def test_a_stream_of_single_bytes_arrives_whole_over_the_network(chat: Visit, site: StubServer) -> None:
    message = "ž日🙂"
    body = raw_events(chunk(message)) + b"data: [DONE]\n\n"
    site.answers(raw=[bytes([byte]) for byte in body])
    chat.ask("Say")
    complete(chat.page)
    assert answers(chat.page) == [message]


@pytest.mark.prove
def test_the_page_follows_the_answer_only_while_the_reader_is_at_its_end(chat: Visit, site: StubServer) -> None:
    paragraphs = [f"Paragraph {number}\n\n" for number in range(80)]
    answer = site.answers(*paragraphs, hold_after=40)
    chat.ask("Say")
    expect(chat.page.get_by_text("Paragraph 39", exact=True)).to_be_in_viewport()
    chat.page.locator("#scroller").hover()
    chat.page.mouse.wheel(0, -300)
    expect(chat.page.locator("#latest")).to_be_visible()
    chat.page.wait_for_timeout(300)  # the wheel glides
    seen = chat.page.get_by_text("Paragraph 33", exact=True)
    position = seen.bounding_box()
    assert position is not None
    answer.release.set()
    complete(chat.page)
    assert seen.bounding_box() == position
    chat.page.click("#latest")
    expect(chat.page.get_by_text("Paragraph 79", exact=True)).to_be_in_viewport()


@pytest.mark.prove
def test_the_keyboard_alone_is_enough(chat: Visit, site: StubServer) -> None:
    page = chat.page
    name = "[document.activeElement].map((at) => at.getAttribute('aria-label') || at.innerText.trim() || at.id)[0]"
    ring = "[document.activeElement].map((at) => getComputedStyle(at.closest('form') ?? at))[0]"
    expect(page.locator("#question")).to_be_focused()
    page.focus(".skip")
    walk = []
    for _ in range(10):
        walk.append(page.evaluate(name).split("\n")[0])
        assert page.evaluate(f"[{ring}.outlineColor, {ring}.borderColor].includes('rgb(12, 107, 94)')")
        page.keyboard.press("Tab")
    page.focus("#question")
    assert walk == [
        "Skip to the question box",
        "API documentation",
        "Switch between light and dark",
        "Settings",
        "New conversation",
        "Conversation",
        "Explain",
        "Write code",
        "Draft",
        "question",
    ]
    page.keyboard.type("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    answer = site.answers("half", "whole", hold_after=1)
    page.keyboard.press("Enter")
    expect(page.locator(".answer .text")).to_have_text("half")
    page.keyboard.type("while it answers")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_have_value("while it answers")
    page.keyboard.press("Escape")
    assert answer.disconnected.wait(5)
    assert [body["messages"][0]["content"] for body in site.bodies] == ["first\nsecond"]
    page.keyboard.press("Enter")
    complete(page)
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#open-settings")).to_be_focused()


@pytest.mark.prove
@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_follows_the_system_until_the_reader_chooses_and_the_choice_lasts(
    browser: Browser, site: StubServer, system: str
) -> None:
    other = {"light": "dark", "dark": "light"}[system]
    context = browser.new_context(color_scheme="light" if system == "light" else "dark")
    page = visit(context, site.url).page
    ground = "getComputedStyle(document.body).backgroundColor"
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == system
    before = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(theme) == other
    assert page.evaluate(ground) != before
    page.reload()
    assert page.evaluate(theme) == other
    page.goto(site.url + "/docs")
    assert page.evaluate(theme) == other
    page.click("#theme")
    assert page.evaluate(theme) == system
    context.close()


@pytest.mark.prove
def test_nothing_overflows_a_phone_and_the_question_box_stays_in_sight(browser: Browser, site: StubServer) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    opened = visit(context, site.url)
    page = opened.page
    wide = """() => {
        const inside = ({ left, right }) => left >= -1 && right <= innerWidth + 1;
        const apart = "pre *, .unseen, .unseen *, dialog:not([open]) *"; // what scrolls by itself, and what is not seen
        const parts = [...document.querySelectorAll("body *")].filter((part) => !part.matches(apart));
        const wider = ["html", "#scroller"].filter((part) => document.querySelector(part)?.scrollWidth > innerWidth);
        const out = parts.filter((part) => !inside(part.getBoundingClientRect()));
        return [...wider, ...out.map((part) => part.className)];
    }"""
    expect(page.locator("#model-name")).to_have_text(MODEL)
    assert page.evaluate(wide) == []
    site.answers("x" * 600 + "\n\n```\n" + "y" * 600 + "\n```\n\n`" + "z" * 300 + "` https://example.com/" + "a" * 300)
    opened.ask("w" * 500)
    complete(page)
    page.locator(".sampling summary").tap()
    assert page.evaluate(wide) == []
    site.answers(status=429, message="busy" * 100, retry_after="9")
    opened.ask("\n".join("many lines") * 8)
    expect(page.locator(".trouble")).to_be_visible()
    assert page.evaluate(wide) == []
    page.fill("#question", "line\n" * 60)
    for box in ("#question", "#send", "#new", "#open-settings"):
        expect(page.locator(box)).to_be_in_viewport(ratio=1)
    page.set_viewport_size({"width": 360, "height": 400})  # as with an on-screen keyboard
    expect(page.locator("#question")).to_be_in_viewport(ratio=1)
    page.locator("#open-settings").tap()
    assert page.evaluate(wide) == []
    page.goto(site.url + "/docs")
    expect(page.locator("#routes article").first).to_be_visible()
    assert page.evaluate(wide) == []
    context.close()
    assert opened.complaints == []


def test_an_example_is_asked_with_one_press(chat: Visit, site: StubServer) -> None:
    expect(chat.page.locator("#welcome")).to_contain_text(MODEL)
    chat.page.get_by_role("button", name="Write code").click()
    complete(chat.page)
    assert "palindrome" in site.bodies[0]["messages"][0]["content"]


def test_the_api_page_shows_every_route_with_its_fields_and_a_command(
    context: BrowserContext, site: StubServer
) -> None:
    opened = visit(context, site.url + "/docs")
    page = opened.page
    expect(page.locator("#routes article[id^=post-]")).to_have_count(1)
    assert page.locator("#routes h3.route code").all_inner_texts()[:3] == [
        "/v1/chat/completions",
        "/v1/models",
        "/health",
    ]
    rows = {row.split()[0]: row for row in page.locator("#post-v1-chat-completions tr").all_inner_texts()}
    assert "required" in rows["messages"]
    assert "array of Message" in rows["messages"]
    assert "number or null" in rows["temperature"]
    assert "0 to 10000" in rows["temperature"]
    assert "default null" in rows["temperature"]
    assert "above 0, at most 1" in rows["top_p"]
    assert "<img src=x onerror=alert(1)>" in rows["stream"]
    assert "429" in rows
    expect(page.locator("#post-v1-chat-completions .access")).to_have_text("access: key")
    expect(page.locator("#get-health .access")).to_have_text("open to all")
    command = page.locator("#post-v1-chat-completions pre").inner_text()
    assert f"curl -X POST {site.url}/v1/chat/completions" in command
    body = json.loads(command.partition("-d '")[2].removesuffix("'"))
    assert body == {"messages": [{"role": "user", "content": "Hello"}]}
    page.click("#post-v1-chat-completions a[href='#schema-Message']")
    expect(page.locator("#schema-Message")).to_be_in_viewport()
    assert opened.complaints == []
    assert {urlsplit(url).netloc for url in opened.requests if not url.startswith("data:")} == {
        urlsplit(site.url).netloc
    }


def test_the_api_page_asks_for_a_key_where_one_is_needed(context: BrowserContext, site: StubServer) -> None:
    site.api_key = "sk-secret"
    page = visit(context, site.url + "/docs").page
    expect(page.locator("#trouble")).to_contain_text("needs an API key")
    page.get_by_label("API key").fill("sk-secret")
    page.keyboard.press("Enter")
    expect(page.locator("#routes article").first).to_be_visible()
    assert "sk-secret" not in page.evaluate("JSON.stringify(localStorage)")


@pytest.mark.parametrize("name", ["chat", "docs"])
def test_a_page_is_one_file_that_a_strict_policy_can_describe(name: str) -> None:
    html = page_text(name)
    assert "shared." not in html
    assert len(re.findall(r"<script\b", html)) == len(re.findall(r"<style\b", html)) == 1
    markup = re.sub(r"<(script|style)>.*?</\1>", "", html, flags=re.DOTALL)
    assert not re.search(r"\s(on\w+|style|src)\s*=", markup)
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[0]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)\w", html)


@pytest.mark.prove
def test_the_policy_would_be_seen_to_be_broken(context: BrowserContext, site: StubServer) -> None:
    """That the other tests hear of no violation means something."""
    opened = visit(context, site.url)
    opened.page.evaluate("fetch('http://127.0.0.1:9/').catch(() => {})")
    opened.page.wait_for_timeout(100)
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)
