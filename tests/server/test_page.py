"""The chat page and the page of the API, in a real browser, against answers that each test scripts."""

from __future__ import annotations

import json
import re
import time
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from support.page_visits import PHONE, Visit, answers, complete, raw_events, visit
from support.stub_server import MODEL, PAGE_FILES, Answer, StubServer, chunk, event

pytest_plugins = ["support.page_fixtures"]
pytestmark = pytest.mark.timeout(300)


def test_a_question_is_streamed_before_its_answer_is_complete(chat: Visit, site: StubServer) -> None:
    answer = site.answers("The sky ", "is ", "blue.", hold_after=2)
    chat.ask("Why?")
    expect(chat.page.locator(".answer > .text")).to_have_text("The sky is")
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
    expect(chat.page.locator(".answer > .text")).to_have_text("Once upon")
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
    # The page's clock moves only when the test says so: a busy machine would miss the seconds.
    chat.page.clock.install()
    chat.page.clock.pause_at(time.time() + 60)
    site.answers(status=429, message="The queue is full.", retry_after="2")
    chat.ask("Say")
    retry = chat.page.locator(".trouble button")
    expect(retry).to_have_text("Retry in 2 s")
    expect(retry).to_be_disabled()
    chat.page.clock.run_for(1000)
    expect(retry).to_have_text("Retry in 1 s")
    expect(retry).to_be_disabled()
    chat.page.clock.run_for(1000)
    expect(retry).to_have_text("Retry")
    chat.page.clock.resume()
    retry.click()
    complete(chat.page)
    assert answers(chat.page) == ["You said: Say"]


def test_a_server_that_is_gone_is_told_and_nothing_typed_is_lost(chat: Visit, site: StubServer) -> None:
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.ask("Anybody?")
    expect(chat.page.locator(".trouble")).to_contain_text("The server cannot be reached")
    chat.page.unroute("**/v1/chat/completions")
    chat.page.get_by_role("button", name="Retry").click()
    expect(chat.page.locator(".answer > .text")).to_have_text("You said: Anybody?")


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
    assert chat.page.evaluate("sessionStorage.getItem('sightline.key')") is None


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


@pytest.mark.prove
def test_events_may_be_cut_at_every_byte(chat: Visit, site: StubServer) -> None:
    message = "žluť 日本語 🙂 e\u0301"
    two_lines = b'data: {"choices": [{"delta":\ndata:{"content": "~"}}]}\n\n'
    data = raw_events(chunk(message[:7]), chunk(message[7:])) + two_lines
    body = (b": a comment\n\nevent: x\n" + data + b"data: [DONE]\n\n").replace(b"\n", b"\r\n")
    result = chat.page.evaluate(
        """async ([path, bytes]) => {
            const { events } = await import(path);
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
        [f"/page/{PAGE_FILES.digest}/chat/api.js", list(body)],
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
    for _ in range(12):
        walk.append(page.evaluate(name).split("\n")[0])
        assert page.evaluate(f"[{ring}.outlineColor, {ring}.borderColor].includes('rgb(12, 107, 94)')")
        page.keyboard.press("Tab")
    page.focus("#question")
    assert walk == [
        "Skip to the question box",
        "search",
        "Conversations",
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
    expect(page.locator(".answer > .text")).to_have_text("half")
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
        // what scrolls by itself, and what is not seen
        const unseen = ".unseen, .unseen *, .brand, .brand *, dialog:not([open]) *, [popover]:not(:popover-open)";
        const apart = "pre *, .table *, .formula *, " + unseen;
        const parts = [...document.querySelectorAll("body *")].filter((part) => !part.matches(apart));
        const wider = ["html", "#scroller"].filter((part) => document.querySelector(part)?.scrollWidth > innerWidth);
        const out = parts.filter((part) => !inside(part.getBoundingClientRect()));
        return [...wider, ...out.map((part) => part.className)];
    }"""
    expect(page.locator("#model-name")).to_have_text(MODEL)
    assert page.evaluate(wide) == []
    wide_table = "|" + "head|" * 12 + "\n|" + "-|" * 12 + "\n|" + "cell|" * 12 + "\n\n$$" + "x+" * 200 + "y$$\n\n"
    wide_text = "x" * 600 + "\n\n```\n" + "y" * 600 + "\n```\n\n`" + "z" * 300 + "` https://example.com/" + "a" * 300
    site.answers(wide_table + wide_text)
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
