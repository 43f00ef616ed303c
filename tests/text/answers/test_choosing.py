"""The format of answers is what the chat template writes: recognised by reading it back, and never guessed."""

from __future__ import annotations

import pytest

from sightline.core.errors import ConfigError
from sightline.text.answers.choosing import choose_format
from sightline.text.answers.formats import CALL_FORMATS, CHANNEL_FORMATS
from sightline.text.templates.chat_template import ChatTemplate
from support.answer_templates import TEMPLATES

PLAIN = "{% for message in messages %}{{ message.role + ': ' + (message.content or '') }}{% endfor %}"


def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source, None, None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_which_format_its_model_writes(name: str) -> None:
    chosen = choose_format(_template(TEMPLATES[name]))
    calls = chosen.format.channels or chosen.format.calls
    assert calls is not None, chosen
    assert calls.name == name
    assert "chat template" in chosen.calls_told
    assert chosen.arguments_as_text is (name == "deepseek_v3")


def test_every_format_has_a_template() -> None:
    assert {*CALL_FORMATS, *CHANNEL_FORMATS} == set(TEMPLATES)


def test_no_marker_begins_another_of_its_format() -> None:
    """The search for markers takes the first that is whole."""
    for form in CALL_FORMATS.values():
        markers = {each.split()[0] for each in (form.open, form.section_open, form.close) if each.strip()}
        assert not [(a, b) for a in markers for b in markers if a != b and b.startswith(a)], form.name


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (TEMPLATES["hermes"], "think"),
        (TEMPLATES["deepseek_v3"], "think"),
        (TEMPLATES["deepseek_v31"], "think"),
        (PLAIN + "{% if add_generation_prompt %}[THINK]{% endif %}", "mistral"),
        (PLAIN + "{{ '<|channel>thought\n<channel|>' if enable_thinking is false }}", "gemma4"),
        (PLAIN, None),
    ],
    ids=["hermes", "opened", "closed", "mistral", "gemma4", "plain"],
)
def test_a_template_says_how_reasoning_is_written(source: str, named: str | None) -> None:
    reasoning = choose_format(_template(source)).format.reasoning
    assert (None if reasoning is None else reasoning.name) == named


def test_a_template_without_tools_refuses_them_with_the_reason() -> None:
    chosen = choose_format(_template(PLAIN))
    assert "does not list tools" in (chosen.refusal or "")
    # Not even a flag makes up for it: the model would not know of the tools.
    assert choose_format(_template(PLAIN), tool_call_parser="hermes").refusal is not None


def test_an_unknown_format_is_refused_and_not_guessed() -> None:
    source = TEMPLATES["hermes"].replace("tool_call>", "other_call>")
    chosen = choose_format(_template(source))
    assert "no known format" in (chosen.refusal or "")
    assert choose_format(_template(source), tool_call_parser="mistral").format.calls == CALL_FORMATS["mistral"]


def test_flags_override_and_unknown_names_list_the_known() -> None:
    template = _template(TEMPLATES["hermes"])
    chosen = choose_format(template, tool_call_parser="qwen3_xml", reasoning_parser="none")
    assert chosen.format.calls == CALL_FORMATS["qwen3_coder"]
    assert chosen.format.reasoning is None
    assert choose_format(template, tool_call_parser="none").refusal is not None
    assert choose_format(template, reasoning_parser="deepseek_r1").format.reasoning is not None
    with pytest.raises(ConfigError, match=r"tool_call_parser auto, none, hermes, .*gpt_oss, got 'hermez'"):
        choose_format(template, tool_call_parser="hermez")
    with pytest.raises(ConfigError, match=r"reasoning_parser auto, none, think, .*gpt_oss, got 'thonk'"):
        choose_format(template, reasoning_parser="thonk")


def test_a_response_template_says_it_first() -> None:
    calls = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
    declared: dict[str, object] = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"thinking": {"open": "<seed:think>", "close": "</seed:think>"}, "tool_calls": calls, "content": {}},
    }
    chosen = choose_format(_template(TEMPLATES["glm45"]), declared)
    assert chosen.format.calls == CALL_FORMATS["hermes"]
    assert chosen.format.reasoning is not None
    assert chosen.format.reasoning.open == "<seed:think>"
    assert "response_template" in chosen.calls_told
    # The same delimiters with other content are another format.
    declared["fields"] = {"tool_calls": calls | {"content": "xml-inline"}}
    assert choose_format(_template(TEMPLATES["hermes"]), declared).format.calls == CALL_FORMATS["glm45"]


@pytest.mark.parametrize("calls", [{"open_pattern": "<c>(?P<n>.*)", "close": "</c>"}, {"open": "<c>", "close": "</c>"}])
def test_a_response_template_that_is_not_understood_is_refused(calls: dict[str, object]) -> None:
    chosen = choose_format(_template(TEMPLATES["hermes"]), {"fields": {"tool_calls": calls}})
    assert "response_template" in (chosen.refusal or "")
