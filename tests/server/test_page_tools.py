"""Tools on the chat page: calls that arrive in pieces, what runs in the browser, and answers in JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from support.page_visits import Visit, answers, complete
from support.stub_server import PAGE_FILES, StubServer

pytest_plugins = ["support.page_fixtures"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.prove]
ATTACK = "<img src=x onerror=\"document.title='owned'\">"
REFUSAL = "tools is not supported for this model: the model's chat template does not list tools"


def switch_on(page: Page) -> None:
    page.click("#open-settings")
    page.get_by_label("Let the model call them").check()
    page.get_by_role("button", name="Done").click()


def begun(index: int, name: str, arguments: str = "") -> dict[str, object]:
    """The first piece of a call."""
    called = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": called}


def more(index: int, arguments: str) -> dict[str, object]:
    return {"index": index, "function": {"arguments": arguments}}


def pieces(index: int, name: str, arguments: str) -> list[dict[str, object]]:
    """A call whose arguments come in single characters, inside of escapes too."""
    return [begun(index, name), *(more(index, each) for each in arguments)]


def result(page: Page, at: int = -1) -> str:
    return page.locator(".call .block:last-child code").nth(at).inner_text()


SUM = '{"expression":"(0.1\\u002b0.2) * 10"}'


def test_a_call_is_shown_while_it_comes_and_not_run_if_it_is_stopped(chat: Visit, site: StubServer) -> None:
    page = chat.page
    switch_on(page)
    half = [begun(0, "calculate"), *(more(0, each) for each in SUM[:9])]
    held = site.answers(calls=half, reasoning=["It needs ", "sums."], hold_after=0)
    chat.ask("How much?")
    expect(page.locator(".call .block").first).to_contain_text("calculate")
    expect(page.locator(".call code").first).to_have_text(SUM[:9])
    expect(page.locator(".call .state")).to_have_text("Writing…")
    page.click("#stop")
    assert held.disconnected.wait(5)
    expect(page.locator(".call .state")).to_have_text("Not run.")
    assert len(site.bodies) == 1


def test_calls_run_here_and_their_results_are_sent_and_kept(chat: Visit, site: StubServer, tmp_path: Path) -> None:
    page = chat.page
    chat.ask("No tools yet")
    complete(page)
    assert "tools" not in site.bodies[0]
    switch_on(page)
    page.reload()
    calls = [*pieces(0, "calculate", SUM), begun(1, "current_time"), more(1, '{"time_zone": "Nowhere/At"}')]
    site.answers("Let me see.", calls=calls, reasoning=["It needs ", "sums."], finish="tool_calls")
    site.answers("It is 3.")
    chat.ask("How much?")
    complete(page)
    assert [tool["function"]["name"] for tool in site.bodies[-1]["tools"]] == ["calculate", "current_time"]
    question, asked, first, second = site.bodies[-1]["messages"][2:]
    assert question == {"role": "user", "content": "How much?"}
    assert (asked["content"], asked["reasoning_content"]) == ("Let me see.", "It needs sums.")
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == [SUM, '{"time_zone": "Nowhere/At"}']
    assert first == {"role": "tool", "tool_call_id": "call_0", "name": "calculate", "content": "3"}
    assert second["content"].startswith("Error: Invalid time zone")
    for _ in range(2):  # the second time, as it was kept
        expect(page.locator(".call")).to_have_count(2)
        assert page.locator(".call code").first.inner_text() == '{\n  "expression": "(0.1\\u002b0.2) * 10"\n}'
        assert (result(page, 0), result(page, 1)) == ("3", second["content"])
        expect(page.locator(".call.failed")).to_have_count(1)
        expect(page.locator(".step > .text")).to_have_text("Let me see.")
        expect(page.locator(".answer > .text").last).to_have_text("It is 3.")
        page.reload()
    chat.ask("And then?")
    complete(page)
    roles = [message["role"] for message in site.bodies[-1]["messages"][2:]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert "reasoning_content" not in site.bodies[-1]["messages"][3]
    exported = export(page, "Markdown", tmp_path)
    assert f"### Call of `calculate`\n\n```json\n{SUM}\n```\n\nResult:\n\n```\n3\n```" in exported
    kept = json.loads(export(page, "JSON", tmp_path))["messages"]
    assert next(call["result"] for each in kept for round in each.get("rounds", ()) for call in round["calls"]) == "3"


def export(page: Page, kind: str, folder: Path) -> str:
    page.get_by_role("button", name="Actions for").first.click()
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Export as {kind}").click()
    download.value.save_as(folder / kind)
    return (folder / kind).read_text()


def test_rounds_are_bounded_stopped_and_continued(chat: Visit, site: StubServer) -> None:
    page = chat.page
    switch_on(page)
    for _ in range(8):
        site.answers(calls=pieces(0, "calculate", '{"expression": "1/3"}'), finish="tool_calls")
    chat.ask("Forever")
    expect(page.locator(".facts")).to_contain_text("Paused after 8 rounds of calls")
    assert len(site.bodies) == 8
    held = site.answers("never", hold_after=0)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".waiting")).to_be_visible()
    page.keyboard.press("Escape")
    assert held.disconnected.wait(5)
    expect(page.locator(".facts")).to_contain_text("Stopped")
    site.answers("A third.")
    page.get_by_role("button", name="Continue").click()
    complete(page)
    assert answers(page) == ["A third."]
    last = site.bodies[-1]
    assert "continue_final_message" not in last
    assert [message["role"] for message in last["messages"]] == ["user", *["assistant", "tool"] * 8]
    assert last["messages"][-1]["content"] == "1/3, about 0.333333333333333"


def test_hostile_calls_are_text_and_errors(chat: Visit, site: StubServer) -> None:
    page = chat.page
    switch_on(page)
    arguments = json.dumps({"expression": ATTACK})
    calls = [begun(0, ATTACK, "[1"), begun(1, "calculate", arguments), begun(2, "constructor", "{}")]
    site.answers(calls=[*calls, begun(3, "calculate", '{"__proto__": "1"}')], finish="tool_calls")
    site.answers("Done.")
    chat.ask("Say")
    complete(page)
    told = [message["content"] for message in site.bodies[-1]["messages"] if message["role"] == "tool"]
    assert told[0] == f"Error: there is no tool {ATTACK}"
    assert told[1] == 'Error: "<" is not understood'
    assert told[2] == "Error: there is no tool constructor"
    assert told[3] == "Error: there is no argument __proto__"
    expect(page.locator(".call.failed")).to_have_count(4)
    assert page.locator(".exchange img").count() == 0
    assert "owned" not in page.title()
    site.answers(calls=[begun(7, "calculate")], finish="tool_calls")
    chat.ask("Out of order")
    expect(page.locator(".trouble")).to_contain_text("out of order")


@pytest.mark.parametrize("why", ["cut", "not offered"])
def test_calls_that_were_cut_or_not_offered_are_not_run(chat: Visit, site: StubServer, why: str) -> None:
    if why == "cut":
        switch_on(chat.page)
        site.answers("So: ", calls=[begun(0, "calculate", '{"expression": "1')], finish="length")
    else:
        site.answers("So: ", calls=[begun(0, "calculate", '{"expression": "1"}')], finish="tool_calls")
    chat.ask("Say")
    complete(chat.page)
    expect(chat.page.locator(".call .state")).to_have_text("Not run.")
    assert len(site.bodies) == 1


@pytest.mark.parametrize("told", ["at the start", "by a refusal"])
def test_a_model_without_tools_says_so_beside_the_switch(chat: Visit, site: StubServer, told: str) -> None:
    page = chat.page
    if told == "at the start":
        site.tools_refusal = REFUSAL
        page.reload()
        page.click("#open-settings")
        expect(page.locator("#tools")).to_be_disabled()
    else:
        switch_on(page)
        site.answers(status=400, message=REFUSAL, param="tools")
        chat.ask("Say")
        expect(page.locator("#notice-tools")).to_contain_text(REFUSAL)
        page.get_by_role("button", name="Retry").click()
        complete(page)
        page.click("#open-settings")
    expect(page.locator("#tools-wrong")).to_have_text(f"Not offered: {REFUSAL}")
    page.get_by_role("button", name="Done").click()
    chat.ask("Say again")
    complete(page)
    assert "tools" not in site.bodies[-1]


@pytest.mark.parametrize("way", ["a document", "a fence"])
def test_json_is_indented_and_copied_as_it_came(
    context: BrowserContext, chat: Visit, site: StubServer, way: str
) -> None:
    page = chat.page
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    raw = '{"seed":18446744073709551615,"a":[1.0,{}],"text":"{\\"b\\": <i>}"}'
    shown = '{\n  "seed": 18446744073709551615,\n  "a": [\n    1.0,\n    {}\n  ],\n  "text": "{\\"b\\": <i>}"\n}'
    site.answers(*(raw if way == "a document" else f"So:\n\n```json\n{raw}\n```\n\nThat is it."))
    chat.ask("Say")
    complete(page)
    for _ in range(2):
        expect(page.locator(".answer pre code")).to_have_text(shown, use_inner_text=True)
        page.reload()
    expect(page.locator(".answer .code-attr").first).to_have_text('"seed"')
    page.locator(".answer .block").get_by_role("button", name="Copy").click()
    expect(page.locator("#status")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == (raw if way == "a document" else raw + "\n")


def test_what_only_begins_as_json_is_markdown(chat: Visit, site: StubServer) -> None:
    text = '{"a": **bold**} [not] json'
    site.answers(*text)
    chat.ask("Say")
    complete(chat.page)
    expect(chat.page.locator(".answer strong")).to_have_text("bold")


SUMS = {
    "2 + 3 * 4 ^ 2": "50", "-2^2": "-4", "2^3^2": "512", "0.1 + 0.2": "0.3", "7 % -3": "-2", "10 / 4": "2.5",
    "12345678901234567890 * 10": "123456789012345678900", "1/3": "1/3, about 0.333333333333333", "sqrt(16)": "4",
    "sqrt(2)": "about 1.4142135623731", "1e-7": "0.0000001", "8×2−1": "15", "sqrt(1e-100)": "about 1e-50",
    "1/0": "division by zero", "(1 + 2": '")" is missing', "": "the expression ends too early",
    "alert(1)": '"alert" is not understood', "1; 2": '";" is not understood',
    "sqrt(-1)": "the result is not a finite number",
    "9^99999": "a number has more than 1000 digits", "(10^-900)^90000": "a number has more than 1000 digits",
    "(" * 500: "the expression is nested too deeply", "1" * 1001: "an expression has at most 1000 characters",
}  # fmt: skip


def test_the_calculator_is_exact_or_says_that_it_is_not(chat: Visit) -> None:
    found: dict[str, Any] = chat.page.evaluate(
        """async ([path, sums]) => {
            const { calculated } = await import(path);
            const tried = (sum) => { try { return calculated(sum); } catch (error) { return error.message; } };
            return Object.fromEntries(sums.map((sum) => [sum, tried(sum)]));
        }""",
        [f"/page/{PAGE_FILES.digest}/chat/calculator.js", list(SUMS)],
    )
    assert found == SUMS
