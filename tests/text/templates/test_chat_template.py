"""Chat templates: equal to transformers, and harmless whatever the template or the messages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sightline.core.errors import CheckpointError, RequestError
from sightline.text.templates import chat_template
from sightline.text.templates.chat_template import ChatTemplate, Ending

CONVERSATION: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Hi \n"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": 'What\'s "up"?'},
]
TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "größe", "parameters": {"a<b": [1, None, True]}}}
]

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}\n  {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\n"
        "{% endfor %}\n{% if add_generation_prompt %}assistant{% endif %}"
    ),
    "whitespace control": "{%- for m in messages -%}\n  {{- m.role }}: {{ m.content | trim }}\n{% endfor -%}  x",
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(first=true) %}{% for m in messages %}{% if ns.first %}{{ bos_token }}"
        "{% set ns.first = false %}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    ),
    "tools": "{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}",
    "generation block": ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"),
    "undefined": "{{ nothing }}{% if nothing is defined %}x{% endif %}{{ documents is none }}{{ flag }}",
    "slicing": "{{ messages[0].content[::-1] }}{{ messages[-1]['content'].split(' ') | join('-') }}",
    "macro": "{% macro f(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "arithmetic": "{{ 7 * 6 }}{{ '=' * 5 }}{{ 7 % 4 }}{% for i in range(3) %}{{ i }}{% endfor %}",
}


def oracle(source: str, messages: Sequence[Mapping[str, object]], **variables: object) -> str:
    """What `apply_chat_template` of transformers gives."""
    rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **variables)
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(name: str, prompt: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], "<s>", "</s>").render(
        CONVERSATION, Ending.NEXT_TURN if prompt else Ending.CLOSED, tools=TOOLS, flag="on"
    )
    assert ours == oracle(
        TEMPLATES[name],
        CONVERSATION,
        tools=TOOLS,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
        flag="on",
    )


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("text", ["i", "end", "|>", "user", "Hello ", " Hi", "The end", "a\n", "<|im_end|>", "q"])
def test_a_message_is_continued_at_its_own_end(text: str) -> None:
    """Whatever of it also occurs in what the template writes."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    for source, shown in ((CHATML, text), (CHATML.replace("m.content", "m.content | trim"), text.strip())):
        rendered = ChatTemplate(source, None, None).render(messages, Ending.CONTINUED)
        assert rendered == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{shown}"


def test_a_message_in_parts_is_continued_at_the_end_of_the_last() -> None:
    source = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[dict[str, object]] = [{"role": "assistant", "content": parts}]
    for template, shown in ((source, "[one][two"), (CHATML, "<|im_start|>assistant\none\ntwo")):
        assert ChatTemplate(template, None, None).render(messages, Ending.CONTINUED) == shown


def test_a_message_that_a_template_changes_is_not_continued() -> None:
    messages: list[dict[str, object]] = [{"role": "assistant", "content": "one two"}]
    for content in ("m.content | upper", "m.content.split(' ')[-1]", "m.content[:3]", "'one two'"):
        template = ChatTemplate(CHATML.replace("m.content", content), None, None)
        with pytest.raises(RequestError, match="expected a template that repeats the last message"):
            template.render(messages, Ending.CONTINUED)


def test_the_variables_that_a_template_reads_are_known() -> None:
    source = (
        "{% macro f() %}{{ inner }}{% endmacro %}{% set own = 1 %}{% set kept = kept or 2 %}{{ own }}"
        "{% for m in messages %}{% if thinking is defined and thinking %}{{ m.role }}{% endif %}{% endfor %}{{ f() }}"
    )
    read = ChatTemplate(source, None, None).variables
    assert {"inner", "kept", "messages", "thinking"} <= read
    assert "own" not in read


def test_a_missing_special_token_is_undefined_and_not_the_word_none() -> None:
    assert ChatTemplate("{{ bos_token }}|{{ eos_token }}", None, "</s>").render(CONVERSATION) == "|</s>"


def test_special_tokens_cannot_be_replaced_by_a_request() -> None:
    assert ChatTemplate("{{ bos_token }}", "<s>", None).render(CONVERSATION, bos_token="x") == "<s>"


def test_current_date_is_available() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}", None, None).render(CONVERSATION)
    assert rendered == time.strftime("%Y")


def test_text_parts_reach_templates_that_read_parts_and_are_joined_for_others() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    plain = ChatTemplate("{{ messages[0].content + '!' }}", None, None)
    assert plain.render(messages) == "one\ntwo!"
    aware = ChatTemplate(
        "{% for p in messages[0].content %}{% if p['type'] == 'text' %}<{{ p['text'] }}>{% endif %}{% endfor %}",
        None,
        None,
    )
    assert aware.render(messages) == "<one><two>"
    assert messages[0]["content"] is parts


PARTS: list[dict[str, object]] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.type }}{% endfor %}{% endfor %}", "J"),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}{{ (tools or [{}])[0]['type'] }}", "J"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", '"J"'),
        ("{% for m in messages %}{{ m.content ~ m.text }}{% endfor %}", "J"),
        ("{% for m in messages %}{{ m.content[0].text or m.content }}{% endfor %}", "J"),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{{ m.content | map(attribute='text') | join }}{% endif %}{% endfor %}",
            "onetwo",
        ),
        (
            "{% macro f(c) %}{% for p in c %}{{ p.text }};{% endfor %}{% endmacro %}{{ f(messages[0].content) }}",
            "one;two;",
        ),
        (
            "{% for m in messages %}{% if m.content is iterable and m.content is not string %}"
            "{% for p in m.content %}{% if p['type'] == 'text' %}[{{ p['text'] | trim }}]{% endif %}{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "[one][two]",
        ),
    ],
)
def test_whether_parts_are_read_is_decided_by_what_becomes_of_them(source: str, expected: str) -> None:
    rendered = ChatTemplate(source, None, None).render([{"role": "user", "content": PARTS}])
    assert rendered == expected.replace("J", "one\\ntwo" if "tojson" in source else "one\ntwo")


def test_parts_are_passed_on_by_role() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}<{{ p.text }}>{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}]
    assert ChatTemplate(source, None, None).render(messages) == "one\ntwo<one><two>"
    odd = [{"role": "critic", "content": PARTS}]
    assert ChatTemplate(source, None, None).render(odd) == "one\ntwo"


def test_a_template_that_refuses_the_probe_gets_plain_text() -> None:
    source = "{{ raise_exception('no date') if date is not defined }}{{ messages[0].content }}"
    messages = [{"role": "user", "content": PARTS}]
    assert ChatTemplate(source, None, None).render(messages, date="today") == "one\ntwo"


def test_what_a_template_says_in_refusing_is_cut() -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate("{{ raise_exception('x' * 1000000) }}", None, None).render(CONVERSATION)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (None, "non-empty list"),
        (["hi"], r"messages\[0\]: expected an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"messages\[0\]\.content\[0\]"),
    ],
)
def test_malformed_messages_are_request_errors_that_name_the_place(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate("x", None, None).render(messages)


def test_an_assistant_message_with_tool_calls_needs_no_content() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert ChatTemplate("{{ messages[0].tool_calls[0].id }}", None, None).render(messages) == "1"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[99].content }}", "refused"),
        ("{{ 1 / 0 }}", "refused"),
        ("{{ messages + 1 }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ namespace.__init__.__globals__ }}", "refused"),
        ("{% set ns = namespace(_x=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deep"),
        ("{{ 'a' * 10 ** 10 }}", "refused"),
        ("{{ 'a' * 10000000000 }}", "refused"),
        ("{{ [0] * 10000000000 }}", "refused"),
        ("{% include 'x' %}", "refused"),
    ],
)
def test_templates_that_fail_or_reach_out_become_request_errors(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(source, None, None).render(CONVERSATION)


def test_output_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARACTERS", 1000)
    template = ChatTemplate("{% for i in range(1000) %}{{ 'ab' }}{% endfor %}", None, None)
    with pytest.raises(RequestError, match="at most 1000 characters"):
        template.render(CONVERSATION)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}",
        "{% set l = range(99999) | list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
        "{% set l = range(99999) | list %}{% for a in l %}{% for b in l if b < 0 %}{% endfor %}{% endfor %}",
        "{% set l = range(99999) | list %}{% for a in l %}{{ l | select('lt', 0) | list | length }}{% endfor %}",
        "{% set l = range(99999) | list %}{% for a in l %}{{ l | map('abs') | sum }}{% endfor %}",
        "{% macro f(n) %}{% for i in range(9) %}{{ f(n + 1) if n < 9 }}{% endfor %}{% endmacro %}{{ f(0) }}",
        "{% set a = 'a' * 9999999 ~ 'a' %}{% set b = 'a' * 9999999 ~ 'b' %}"
        "{% for i in range(99999) if a == b %}{% endfor %}",
    ],
)
def test_rendering_has_a_deadline(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.05)
    monkeypatch.setattr(chat_template, "PROBE_SECONDS", 0.01)
    template = ChatTemplate(source, None, None)
    start = time.process_time()
    with pytest.raises(RequestError, match="within"):
        template.render(CONVERSATION)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{",
        "{% endfor %}",
        "{{ x | nosuchfilter }}",
        "{{ x | wordwrap(5) }}",
        "{{ " + "9" * 5000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    ],
)
def test_a_broken_template_is_a_checkpoint_error_at_load(source: str) -> None:
    with pytest.raises(CheckpointError, match="Jinja"):
        ChatTemplate(source, None, None)


def test_an_oversized_template_is_refused() -> None:
    with pytest.raises(CheckpointError, match="at most"):
        ChatTemplate("x" * (chat_template.MAX_TEMPLATE_CHARACTERS + 1), None, None)
