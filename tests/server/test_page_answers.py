"""How the chat page draws what a model wrote: Markdown, code, formulas, reasoning, and text that attacks the reader."""

from __future__ import annotations

import pytest
from playwright.sync_api import BrowserContext, expect

from support.page_visits import Visit, answers, complete, visit
from support.stub_server import StubServer

pytest_plugins = ["support.page_fixtures"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.prove]
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script> "
    "[press](javascript:alert(1)) [data](data:text/html,hi) [fine](https://example.com/a) **<b>bold</b>** "
    '![picture](https://example.com/p.png) https://example.com/?q="><svg/onload=alert(1)>\n\n'
    "```html\n<script>document.title='owned'</script>\n```\n\n"
    "| <b>head</b> | [cell](javascript:alert(1)) |\n| --- | --- |\n| <img src=x onerror=alert(1)> | ![x](data:x) |\n\n"
    "$\\href{javascript:alert(1)}{x}$ $\\url{javascript:alert(1)}$ $\\includegraphics{https://example.com/x.png}$ "
    "$\\class{latest}{x}$ $\\style{position:fixed}{x}$\n\n"
    '```mermaid\ngraph TD; A["<img src=x onerror=alert(1)>"]-->B; click A "javascript:alert(1)"\n```\n\n'
    "<iframe src=https://example.com></iframe> <form action=https://example.com> [vb](vbscript:x) "
    "[rel](//example.com/r) [up](JaVaScRiPt:alert(1)) <javascript:alert(1)> &lt;b&gt; &#60;b&#62;\n\n"
    "[def]: javascript:alert(1)\n\n[def]\n\n<think>not a thought</think>\n"
)
MARKDOWN = (
    "# Head\n\nSome **bold**, *slanted*, ~~gone~~, `co*d*e`, snake_case_name, 2 * 3 * 4 and **open.\nNext line\n\n"
    "- one\n- two\n  1. in\n  2. ner\n- three\n\n> said\n\n---\n1. x\n2. y\n\n- [x] done\n- [ ] to do\n\n"
    "| left | right |\n| :--- | ----: |\n| `a` | 1 |\n| **b** | 2 |\n\nInline $e^{i\\pi}$, \\(a+b\\), $5 and $10.\n\n"
    "$$\n\\frac{a}{b}\n- c\n$$\n\n\\[ \\sqrt{x} \\]\n\n"
    "```py\nif a:\n\n    b = `c`  # note\n```\nafter\n\n~~~\nnever closed\n"
)


def test_markdown_is_drawn_the_same_however_it_is_cut(chat: Visit, site: StubServer) -> None:
    site.answers(MARKDOWN)
    site.answers(*MARKDOWN)
    site.answers(*[MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)], pause=0.005)
    for count in range(1, 4):
        chat.ask("Show")
        expect(chat.page.locator(".facts:has-text('cached')")).to_have_count(count, timeout=15000)
    drawn = chat.page.locator(".answer > .text").evaluate_all("all => all.map((each) => each.innerHTML)")
    assert drawn[0] == drawn[1] == drawn[2]
    first = chat.page.locator(".answer > .text").first
    assert first.locator("h3").inner_text() == "Head"
    assert first.locator("p strong").all_inner_texts() == ["bold"]
    assert first.locator("em").all_inner_texts() == ["slanted"]
    assert first.locator("del").all_inner_texts() == ["gone"]
    assert first.locator("p > code").all_inner_texts() == ["co*d*e"]
    assert first.locator("ul > li:nth-child(2) > ol > li").all_inner_texts() == ["in", "ner"]
    assert first.locator("blockquote").inner_text() == "said"
    assert first.locator("pre code").all_text_contents() == ["if a:\n\n    b = `c`  # note", "never closed"]
    assert first.locator("pre .code-keyword").all_inner_texts() == ["if"]
    assert first.locator("pre .code-comment").all_inner_texts() == ["# note"]
    boxes = first.locator("li.task input")
    assert [boxes.nth(index).is_checked() for index in range(2)] == [True, False]
    assert first.locator("th").all_inner_texts() == ["left", "right"]
    assert first.locator("tbody tr").all_inner_texts() == ["a\t1", "b\t2"]
    assert first.locator("td.right").all_inner_texts() == ["1", "2"]
    assert first.locator("math").count() == 4
    assert first.locator(".formula.display mfrac").count() == 1
    assert first.locator("math msqrt").count() == 1
    assert "$5 and $10" in first.inner_text()


def test_hostile_output_is_inert_while_it_streams_and_after(chat: Visit, site: StubServer) -> None:
    site.answers(*[HOSTILE[at : at + 3] for at in range(0, len(HOSTILE), 3)])
    chat.ask(HOSTILE)
    complete(chat.page)
    for _ in range(2):
        text = chat.page.locator(".exchange")
        expect(text.locator("table")).to_have_count(1)
        banned = (
            "script, img, iframe, object, form, style, [onerror], [onload], [style*=fixed], .answer b, mtext .latest"
        )
        assert text.locator(banned).count() == 0
        assert text.locator("svg:not(.icon)").count() == 0
        links = text.locator("a, math [href]")
        assert [links.nth(index).get_attribute("href") for index in range(links.count())] == [
            "https://example.com/a",
            "https://example.com/p.png",
            "https://example.com/?q=",
            "https://example.com/",
            "https://example.com/",
        ]
        assert links.first.get_attribute("rel") == "noopener noreferrer"
        shown = answers(chat.page)[0]
        assert "[press](javascript:alert(1))" in shown
        assert "<think>not a thought</think>" in shown
        assert "owned" not in chat.page.title()
        chat.page.reload()


@pytest.mark.prove
@pytest.mark.parametrize(
    "text",
    [
        "[" * 30_000,
        "> " * 10_000,
        "- " * 10_000,
        "*a **b " * 4000,
        "$" + "{" * 10_000,
        "$\\def\\a{\\a\\a}\\a$",
        "`" * 20_000 + "x",
        "|" * 20_000,
        "\u202e" * 5000 + "\U0001f642" * 5000,
    ],
    ids=["brackets", "quotations", "items", "emphasis", "braces", "macros", "ticks", "cells", "characters"],
)
def test_text_that_is_costly_to_read_ends(chat: Visit, site: StubServer, text: str) -> None:
    site.answers(*[text[at : at + 5000] for at in range(0, len(text), 5000)], "\n\nend")
    chat.ask("Say")
    expect(chat.page.locator("#status")).to_have_text("The answer is complete.", timeout=20000)
    assert answers(chat.page)[0].endswith("end")


def test_a_long_answer_streams_without_freezing_the_page(chat: Visit, site: StubServer) -> None:
    """200 KB of everything. What is finished is drawn once, and the page stays responsive meanwhile."""
    section = MARKDOWN.replace("~~~\nnever closed\n", "") + "word " * 1500 + "\n\n"
    code = "```\n" + "".join(f"line {number}\n" for number in range(6000)) + "```\n\n"
    table = "| a | b |\n| - | - |\n" + "| cell | **cell** |\n" * 1200 + "\n"
    text = section * 15 + code + table
    assert len(text) > 200_000
    pieces = ["finished\n\n", *[text[at : at + 250] for at in range(0, len(text), 250)], "\n\nend"]
    answer = site.answers(*pieces, hold_after=1)
    chat.ask("Say")
    expect(chat.page.locator(".answer p")).to_have_text("finished")
    chat.page.evaluate(
        """() => {
            window.touched = window.longest = 0;
            const first = document.querySelector(".answer > .text p");
            const seen = { childList: true, characterData: true, subtree: true };
            new MutationObserver((records) => { window.touched += records.length; }).observe(first, seen);
            new PerformanceObserver((list) => {
                for (const { duration } of list.getEntries()) window.longest = Math.max(window.longest, duration);
            }).observe({ type: "longtask" });
        }"""
    )
    answer.release.set()
    expect(chat.page.locator("#status")).to_have_text("The answer is complete.", timeout=40000)
    assert chat.page.evaluate("window.touched") == 0
    assert chat.page.evaluate("window.longest") < 2000  # 100 ms or so where nothing else runs
    assert chat.page.locator(".answer pre").last.text_content() == code.removeprefix("```\n").removesuffix("\n```\n\n")
    assert chat.page.locator(".answer > .text").inner_text().endswith("end")


@pytest.mark.parametrize("way", ["tags", "field", "opened by the prompt"])
def test_reasoning_is_folded_and_left_out_of_what_follows(chat: Visit, site: StubServer, way: str) -> None:
    page = chat.page
    if way == "tags":
        held = site.answers(*"<think>\nFirst, *think*.", *"\n</think>\n\nThe answer.", hold_after=20)
    elif way == "field":
        held = site.answers("", "The answer.", reasoning=["First, ", "*think*."], hold_after=1)
    else:
        held = site.answers(*"First, *think*.", *"\n</think>\n\nThe answer.", hold_after=20)
    chat.ask("Say")
    if way != "opened by the prompt":
        expect(page.locator(".thought summary")).to_have_text("Reasoning…")
    held.release.set()
    complete(page)
    assert answers(page) == ["The answer."]
    expect(page.locator(".thought summary")).to_have_text("Reasoning")
    expect(page.locator(".thought .text")).to_be_hidden()
    page.click(".thought summary")
    expect(page.locator(".thought em")).to_have_text("think")
    chat.ask("More")
    complete(page)
    assert [message["content"] for message in site.bodies[-1]["messages"]] == ["Say", "The answer.", "More"]


@pytest.mark.prove
def test_a_thought_that_was_cut_is_continued_as_a_thought(chat: Visit, site: StubServer) -> None:
    site.answers("<think>First", finish="length")
    chat.ask("Say")
    complete(chat.page)
    site.answers(", second.</think>Done.")
    chat.page.get_by_role("button", name="Continue").click()
    complete(chat.page)
    assert site.bodies[-1]["messages"][-1] == {"role": "assistant", "content": "<think>First"}
    assert answers(chat.page) == ["Done."]
    expect(chat.page.locator(".thought .text")).to_have_text("First, second.")


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
@pytest.mark.parametrize(
    "attempt",
    [
        "fetch('http://127.0.0.1:9/').catch(() => {})",
        "document.body.append(Object.assign(document.createElement('img'), {src: 'http://127.0.0.1:9/x.png'}))",
        "try { document.body.innerHTML = '<b>x</b>' } catch (error) { console.error(String(error)) }",
        "document.body.setAttribute('style', 'color: red')",
    ],
    ids=["request", "image", "markup", "style"],
)
def test_the_policy_would_be_seen_to_be_broken(context: BrowserContext, site: StubServer, attempt: str) -> None:
    """That the other tests hear of no violation means something."""
    opened = visit(context, site.url)
    opened.page.evaluate(attempt)
    opened.page.wait_for_timeout(150)
    assert any("Content Security Policy" in text or "Trusted" in text for text in opened.complaints)
