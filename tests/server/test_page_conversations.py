"""Conversations on the chat page: branches, the list, and what the browser keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from support.page_visits import PHONE, Visit, answers, complete, visit
from support.stub_server import MODEL, StubServer

pytest_plugins = ["support.page_fixtures"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.prove]
NO_ROOM = """
    const put = IDBObjectStore.prototype.put;
    IDBObjectStore.prototype.put = function (value) {
        if (window.full) throw new DOMException("no room", "QuotaExceededError");
        return put.call(this, value);
    };
"""


def asked(page: Page) -> list[str]:
    return page.locator(".asked").all_inner_texts()


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .entry").all_inner_texts()


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def open_menu(page: Page, title: str) -> None:
    page.get_by_role("button", name=f"Actions for {title}").click()


def contents(site: StubServer) -> list[str]:
    """Of the messages of the last request."""
    return [message["content"] for message in site.bodies[-1]["messages"]]


def test_a_second_answer_stands_beside_the_first(chat: Visit, site: StubServer) -> None:
    page = chat.page
    site.answers("first")
    site.answers("second")
    chat.ask("Say")
    complete(page)
    press(page, "Regenerate")
    expect(page.locator(".answer > .text")).to_have_text("second")
    complete(page)
    assert site.bodies[0] == site.bodies[1]
    expect(page.locator(".answer .switcher")).to_contain_text("2/2")
    press(page, "Side by side")
    expect(page.locator(".answer > .text")).to_have_text(["first", "second"])
    boxes = [page.locator(".answer").nth(index).bounding_box() for index in range(2)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert boxes[0]["y"] == boxes[1]["y"]
    expect(page.locator(".used")).to_have_count(1)
    press(page, "Use this one")
    page.locator(".answer.chosen").get_by_role("button", name="One at a time").click()
    expect(page.locator(".answer > .text")).to_have_text("first")
    press(page, "Next answer")
    expect(page.locator(".answer > .text")).to_have_text("second")
    press(page, "Previous answer")
    expect(page.get_by_role("button", name="Next answer")).to_be_focused()
    chat.ask("More")
    complete(page)
    assert contents(site) == ["Say", "first", "More"]
    page.get_by_role("button", name="Next answer").click()
    assert asked(page) == ["Say"]


@pytest.mark.prove
def test_an_answer_survives_a_failed_attempt_to_make_it_again(chat: Visit, site: StubServer) -> None:
    site.answers("first")
    site.answers(status=500, message="out of luck")
    chat.ask("Say")
    complete(chat.page)
    press(chat.page, "Regenerate")
    expect(chat.page.locator(".trouble")).to_contain_text("out of luck")
    press(chat.page, "Previous answer")
    expect(chat.page.locator(".answer > .text")).to_have_text("first")
    press(chat.page, "Next answer")
    press(chat.page, "Retry")
    expect(chat.page.locator(".answer > .text")).to_have_text("You said: Say")
    expect(chat.page.locator(".answer .switcher")).to_contain_text("2/2")


def test_any_question_can_be_edited_and_both_branches_stay(chat: Visit, site: StubServer) -> None:
    page = chat.page
    for question in ("one", "two", "three"):
        chat.ask(question)
        complete(page)
    page.get_by_role("button", name="Edit").nth(1).click()
    page.get_by_label("Edit the question").fill("zwei")
    page.keyboard.press("Enter")
    expect(page.locator(".answer > .text").last).to_have_text("You said: zwei")
    complete(page)
    assert contents(site) == ["one", "You said: one", "zwei"]
    assert asked(page) == ["one", "zwei"]
    chat.ask("drei")
    complete(page)
    assert contents(site) == ["one", "You said: one", "zwei", "You said: zwei", "drei"]
    press(page, "Previous question")
    assert asked(page) == ["one", "two", "three"]
    page.reload()
    expect(page.locator(".asked")).to_have_text(["one", "two", "three"])
    press(page, "Next question")
    assert asked(page) == ["one", "zwei", "drei"]


@pytest.mark.parametrize("cut", ["length", "stopped", "broken"])
def test_an_answer_that_was_cut_is_continued(chat: Visit, site: StubServer, cut: str) -> None:
    page = chat.page
    if cut == "length":
        site.answers("Once upon", finish="length")
    elif cut == "broken":
        site.answers("Once upon", breaks_off=True)
    else:
        site.answers("Once upon", " never", hold_after=1)
    chat.ask("A story")
    expect(page.locator(".answer > .text")).to_have_text("Once upon")
    if cut == "stopped":
        page.click("#stop")
    site.answers(" a **time**.")
    press(page, "Continue")
    complete(page)
    expect(page.locator(".answer > .text")).to_have_text("Once upon a time.")
    expect(page.locator(".answer strong")).to_have_text("time")
    assert site.bodies[-1]["messages"] == [
        {"role": "user", "content": "A story"},
        {"role": "assistant", "content": "Once upon"},
    ]
    assert (site.bodies[-1]["continue_final_message"], site.bodies[-1]["add_generation_prompt"]) == (True, False)
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


@pytest.mark.prove
def test_a_continuation_that_fails_keeps_what_was_there(chat: Visit, site: StubServer) -> None:
    site.answers("Once upon", finish="length")
    chat.ask("A story")
    complete(chat.page)
    site.answers(status=400, message="continue_final_message is not supported")
    press(chat.page, "Continue")
    expect(chat.page.locator(".trouble")).to_contain_text("not supported")
    assert answers(chat.page) == ["Once upon"]


def test_conversations_are_listed_searched_and_opened_again(chat: Visit, site: StubServer) -> None:
    page = chat.page
    for question in ("Apples are red", "Bananas are yellow"):
        page.click("#new")
        expect(page.locator("#welcome")).to_be_visible()
        chat.ask(question)
        complete(page)
    assert titles(page) == ["Bananas are yellow", "Apples are red"]
    page.fill("#search", "said: apples")
    assert titles(page) == ["Apples are red"]
    page.fill("#search", "cherries")
    expect(page.locator("#nothing")).to_have_text("No conversation contains this.")
    page.fill("#search", "")
    page.fill("#question", "half typed")
    page.locator(".entry", has_text="Apples").click()
    assert answers(page) == ["You said: Apples are red"]
    page.reload()
    expect(page.locator(".asked")).to_have_text("Apples are red")
    expect(page.locator("#question")).to_have_value("half typed")
    assert page.locator(".entry[aria-current]").all_inner_texts() == ["Apples are red"]


@pytest.mark.prove
def test_an_answer_goes_on_while_another_conversation_is_open(chat: Visit, site: StubServer) -> None:
    page = chat.page
    held = site.answers("half ", "whole", hold_after=1)
    chat.ask("Long")
    expect(page.locator(".answer > .text")).to_have_text("half")
    page.click("#new")
    expect(page.locator("#welcome")).to_be_visible()
    page.locator(".entry", has_text="Long").click()
    expect(page.locator(".answer > .text")).to_have_text("half")
    held.release.set()
    complete(page)
    assert answers(page) == ["half whole"]


def test_a_conversation_is_renamed_exported_and_deleted_with_a_way_back(
    chat: Visit, site: StubServer, tmp_path: Path
) -> None:
    page = chat.page
    site.answers("<think>hm</think>The **answer**.")
    chat.ask("The question")
    complete(page)
    open_menu(page, "The question")
    press(page, "Rename")
    page.get_by_label("New title").fill("My title")
    page.keyboard.press("Enter")
    assert titles(page) == ["My title"]
    exported = {}
    for kind in ("Markdown", "JSON"):
        open_menu(page, "My title")
        with page.expect_download() as download:
            press(page, f"Export as {kind}")
        exported[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(exported[kind])
    assert [path.name for path in exported.values()] == ["My-title.md", "My-title.json"]
    text = exported["Markdown"].read_text()
    assert text.startswith("# My title\n\n## Question\n\nThe question\n\n## Answer\n")
    assert text.endswith("The **answer**.\n")
    kept = json.loads(exported["JSON"].read_text())
    assert [(each["role"], each["text"]) for each in kept["messages"]] == [
        ("user", "The question"),
        ("assistant", "The **answer**."),
    ]
    open_menu(page, "My title")
    press(page, "Delete")
    expect(page.locator("#welcome")).to_be_visible()
    assert titles(page) == []
    press(page, "Undo")
    expect(page.locator(".answer > .text")).to_have_text("The answer.")
    assert titles(page) == ["My title"]
    open_menu(page, "My title")
    press(page, "Delete")
    page.reload()
    expect(page.locator("#nothing")).to_have_text("Conversations will be listed here.")


@pytest.mark.prove
def test_an_answer_cut_by_a_reload_comes_back_as_broken_off(chat: Visit, site: StubServer) -> None:
    site.answers("half ", "whole", hold_after=1)
    chat.ask("Say")
    expect(chat.page.locator(".answer > .text")).to_have_text("half")
    chat.page.wait_for_timeout(900)  # it is kept twice a second
    chat.page.reload()
    expect(chat.page.locator(".answer > .text")).to_have_text("half")
    expect(chat.page.locator(".trouble b")).to_have_text("The answer broke off")


def test_a_full_storage_is_told_and_the_conversation_goes_on(context: BrowserContext, site: StubServer) -> None:
    context.add_init_script(NO_ROOM)
    opened = visit(context, site.url)
    page = opened.page
    expect(page.locator("#model-name")).to_have_text(MODEL)
    page.evaluate("window.full = true")
    opened.ask("one")
    expect(page.locator(".notice")).to_contain_text("will not be here after a reload")
    complete(page)
    assert answers(page) == ["You said: one"]
    page.evaluate("window.full = false")
    opened.ask("two")
    expect(page.locator(".notice")).to_have_count(0)
    assert opened.complaints == []


@pytest.mark.prove
def test_a_browser_without_storage_still_chats(context: BrowserContext, site: StubServer) -> None:
    context.add_init_script("indexedDB.open = () => { throw new DOMException('off', 'SecurityError'); }")
    opened = visit(context, site.url)
    expect(opened.page.locator(".notice")).to_contain_text("storage is full or off")
    opened.ask("one")
    complete(opened.page)
    assert answers(opened.page) == ["You said: one"]
    assert opened.complaints == []


@pytest.mark.prove
def test_another_tab_sees_what_this_one_keeps(context: BrowserContext, chat: Visit, site: StubServer) -> None:
    other = visit(context, site.url)
    expect(other.page.locator("#model-name")).to_have_text(MODEL)
    chat.ask("From the first tab")
    complete(chat.page)
    expect(other.page.locator("#conversations .entry")).to_have_text("From the first tab")


KEPT = """async () => {
    const settled = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
    const database = await settled(indexedDB.open("sightline", 1));
    return settled(database.transaction("conversations").objectStore("conversations").getAll());
}"""
PUT = """async (record) => {
    const request = indexedDB.open("sightline", 1);
    await new Promise((resolve) => { request.onsuccess = resolve; });
    const transaction = request.result.transaction("conversations", "readwrite");
    transaction.objectStore("conversations").put(record);
    await new Promise((resolve) => { transaction.oncomplete = resolve; });
}"""


def test_two_tabs_that_write_to_one_conversation_lose_nothing(
    context: BrowserContext, chat: Visit, site: StubServer
) -> None:
    chat.ask("one")
    complete(chat.page)
    other = visit(context, site.url)
    other.page.locator("#conversations .entry").click()
    expect(other.page.locator(".asked")).to_have_text("one")
    other.ask("two, elsewhere")
    complete(other.page)
    expect(chat.page.locator(".notice")).to_contain_text("Another tab changed this conversation")
    chat.ask("two, here")
    complete(chat.page)
    chat.page.reload()
    expect(chat.page.locator(".asked").last).to_contain_text("two, here")
    [kept] = chat.page.evaluate(KEPT)
    assert [each["text"] for each in kept["messages"]] == [
        *("one", "You said: one"),
        *("two, elsewhere", "You said: two, elsewhere"),
        *("two, here", "You said: two, here"),
    ]


def test_a_kept_conversation_that_never_ends_is_left_alone(chat: Visit) -> None:
    question = {"id": "q", "parent": "a", "shown": "a", "role": "user", "text": "round"}
    answer = {"id": "a", "parent": "q", "shown": "q", "role": "assistant", "text": "and round", "state": "done"}
    known = {"id": "c", "title": "t", "renamed": False, "updated": 1, "shown": "q", "messages": [question, answer]}
    chat.page.evaluate(PUT, known)
    chat.page.reload()
    expect(chat.page.locator(".notice")).to_contain_text("1 kept conversations could not be read")
    chat.ask("one")
    complete(chat.page)


@pytest.mark.prove
def test_the_list_covers_a_phone_until_it_is_left(context: BrowserContext, chat: Visit, site: StubServer) -> None:
    page = chat.page
    page.set_viewport_size(PHONE)
    chat.ask("Say")
    complete(page)
    expect(page.locator("#side")).to_be_hidden()
    page.click("#toggle-list")
    expect(page.locator("#search")).to_be_focused()
    assert page.evaluate("document.getElementById('shell').inert")
    page.keyboard.press("Escape")
    expect(page.locator("#side")).to_be_hidden()
    expect(page.locator("#toggle-list")).to_be_focused()
    page.click("#toggle-list")
    page.locator(".entry").click()
    expect(page.locator("#side")).to_be_hidden()
    page.set_viewport_size({"width": 1100, "height": 760})
    expect(page.locator("#side")).to_be_visible()
    page.click("#toggle-list")
    page.reload()
    expect(page.locator("#side")).to_be_hidden()
