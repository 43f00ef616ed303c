"""Answers of every format are read the same however their text is divided, and no character is lost or invented."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.answer_format import AnswerFormat, AnswerReading, CallSyntax
from sightline.core.conversation import AnswerEvent, CollectedAnswer, EventKind, ToolMode, collected, merged
from sightline.text.answers.formats import CALL_FORMATS, REASONING_FORMATS
from sightline.text.answers.reader import AnswerReader
from sightline.text.answers.reading import answer_reader
from sightline.text.answers.typed import braced_json, typed_json
from support.answer_templates import ANSWERS, ARGUMENTS, TOOLS, format_named

HERMES = format_named("hermes", "think")
JSON_FORMATS = [name for name, row in CALL_FORMATS.items() if row.syntax in (CallSyntax.OBJECT, CallSyntax.NAMED)]


def _reader(form: AnswerFormat, **reading: object) -> AnswerReader:
    return answer_reader(AnswerReading(form, TOOLS, **reading), lambda length: "i" * (length or 4))  # type: ignore[arg-type]


def _events(reader: AnswerReader, pieces: Sequence[str]) -> list[AnswerEvent]:
    return merged([*(event for piece in pieces for event in reader.push(piece)), *reader.finish()])


def _answer(form: AnswerFormat, text: str, **reading: object) -> CollectedAnswer:
    return collected(_events(_reader(form, **reading), [text]))


def _divided(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_of_every_format_are_read(name: str) -> None:
    answer = _answer(format_named(name), ANSWERS[name])
    assert answer.content == (None if name == "llama3_json" else "Well.")
    assert [call.name for call in answer.calls] == ["get_weather", "get_time"]
    assert [json.loads(call.arguments) for call in answer.calls] == [json.loads(ARGUMENTS), {}]
    assert not answer.is_cut
    assert _events(_reader(format_named(name)), list(ANSWERS[name])) == _events(
        _reader(format_named(name)), [ANSWERS[name]]
    )
    if name in JSON_FORMATS or name == "gpt_oss":
        # As the model wrote them: a second escaping would show.
        assert answer.calls[0].arguments == ARGUMENTS
    expected = {"kimi_k2": "functions.get_time:1", "mistral": "abcdefghi"}
    assert answer.calls[1].id == expected.get(name, "i" * 9 if name == "mistral_list" else "iiii")


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(0, 1000), max_size=12), end=st.integers(0, 1000))
def test_the_division_of_a_text_changes_nothing_and_arguments_are_valid_at_every_cut(
    name: str, cuts: list[int], end: int
) -> None:
    text = "<think>\nHm. </thi\n</think>\n\n" + ANSWERS[name] if name != "gpt_oss" else ANSWERS[name]
    form = format_named(name, "think")
    whole = _events(_reader(form), [text])
    assert _events(_reader(form), _divided(text, cuts)) == whole
    # A text that ends anywhere says the beginning of the arguments that the whole one says.
    part, full = _answer(form, text[: end % (len(text) + 1)]), collected(whole)
    for call, said in zip(part.calls, full.calls, strict=False):
        assert said.arguments.startswith(call.arguments)


_LEAVES = st.none() | st.booleans() | st.integers() | st.text()
_VALUES = st.recursive(
    _LEAVES,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=8,
)
_TEXTS = st.text(st.sampled_from('ab<>{}[]"\\ \n,:/|tool_call>think1'), max_size=60)
_PIECES = ("<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "get_time", "arguments": {', "}}")


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.one_of(_TEXTS, st.sampled_from(_PIECES)), max_size=12),
    cuts=st.lists(st.integers(0, 1000), max_size=12),
    name=st.sampled_from(sorted(ANSWERS)),
    in_reasoning=st.booleans(),
)
def test_any_text_is_read_alike_however_divided_and_keeps_its_letters(
    parts: list[str], cuts: list[int], name: str, in_reasoning: bool
) -> None:
    text, form = "".join(parts), format_named(name, "think")
    in_reasoning = in_reasoning and form.reasoning is not None
    events = _events(_reader(form, in_reasoning=in_reasoning), [text])
    assert _events(_reader(form, in_reasoning=in_reasoning), _divided(text, cuts)) == events
    answer = collected(events)
    for call in answer.calls if not answer.is_cut else answer.calls[:-1]:
        json.loads(call.arguments)
    if not answer.calls and name != "gpt_oss" and "think>" not in text:
        said = (answer.reasoning or "") + (answer.content or "")
        assert "".join(said.split()) == "".join(text.split())


@settings(max_examples=20, deadline=None)
@given(value=_VALUES, ascii_only=st.booleans())
def test_json_arguments_go_through_as_they_are(value: object, ascii_only: bool) -> None:
    arguments = json.dumps({"more": value}, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    reader = _reader(HERMES)
    events = _events(reader, list(text))
    assert collected(events).calls[0].arguments == arguments
    assert reader.has_calls


def test_a_call_in_the_reasoning_is_reasoning() -> None:
    inside = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    answer = _answer(HERMES, f"<think>\nI could {inside}\n</think>\n\nNo.")
    assert answer == CollectedAnswer("No.", f"I could {inside}")
    assert _answer(HERMES, f"I could {inside}", in_reasoning=True) == CollectedAnswer(None, f"I could {inside}")
    # Behind the first word, the marker of reasoning is text.
    assert _answer(HERMES, "Type <think>x</think>.").content == "Type <think>x</think>."


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ('{"name": "get_other", "arguments": {}}', "hermes"),
        ('{"name": 5, "arguments": {}}', "hermes"),
        ('{"arguments": {}}', "hermes"),
        ("just text", "hermes"),
        ("<function=get_other>\n</function>", "qwen3_coder"),
    ],
)
def test_what_is_no_call_is_content_letter_by_letter(call: str, name: str) -> None:
    text = f"Look: <tool_call>\n{call}\n</tool_call> "
    assert _answer(format_named(name), text) == CollectedAnswer(text)


def test_a_call_that_breaks_off_says_so() -> None:
    begun = '<tool_call>\n{"name": "get_weather", "arguments": {"city": '
    for rest, said in (('"Kö', '{"city": "Kö'), ("nope}}\n</tool_call>", '{"city": n')):
        reader = _reader(HERMES)
        answer = collected(_events(reader, [begun + rest]))
        assert (answer.is_cut, reader.has_calls) == (True, False)
        assert answer.calls[0].arguments == said
        assert answer.content == (None if rest.startswith('"') else "ope}}\n</tool_call>")
    tagged = "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln"
    answer = _answer(format_named("qwen3_coder"), tagged)
    assert (answer.is_cut, answer.content) == (True, "\n<parameter=city>\nKöln")


def test_one_call_is_enough_without_parallel_calls() -> None:
    reader = _reader(HERMES, parallel_calls=False)
    events = _events(reader, [ANSWERS["hermes"]])
    assert reader.is_over
    assert [event.name for event in events if event.kind is EventKind.CALL] == ["get_weather"]


def test_without_tools_calls_are_text_and_reasoning_is_not() -> None:
    text = "<think>\nHm.\n</think>\n\n" + ANSWERS["hermes"]
    assert _answer(HERMES, text, mode=ToolMode.NONE) == CollectedAnswer(ANSWERS["hermes"], "Hm.")


def test_values_get_the_types_of_the_schema() -> None:
    text = (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12</arg_value><arg_key>days</arg_key>"
        "<arg_value>12</arg_value><arg_key>more</arg_key><arg_value>True</arg_value></tool_call>"
    )
    answer = _answer(format_named("glm45"), text)
    assert json.loads(answer.calls[0].arguments) == {"city": "12", "days": 12, "more": True}
    # What is none of the allowed types stays what was written.
    answer = _answer(format_named("glm45"), text.replace("<arg_value>12", "<arg_value>a dozen"))
    assert json.loads(answer.calls[0].arguments)["days"] == "a dozen"


@pytest.mark.parametrize("form", REASONING_FORMATS.values(), ids=REASONING_FORMATS)
def test_reasoning_is_told_apart(form: object) -> None:
    reasoning = next(each for each in REASONING_FORMATS.values() if each is form)
    text = f"{reasoning.open}First\nthis.{reasoning.close}Then that."
    expected = CollectedAnswer("Then that.", "First\nthis.")
    assert _answer(AnswerFormat(reasoning), text) == expected
    opened = text.removeprefix(reasoning.open)
    assert _answer(AnswerFormat(reasoning), opened, in_reasoning=True) == expected
    # Some models open again what the prompt has opened.
    assert _answer(AnswerFormat(reasoning), text, in_reasoning=True) == expected


def test_hostile_text_costs_linear_time_and_holds_back_little() -> None:
    reader = _reader(HERMES)
    for text in ("\n" * 1000, "<" * 1000, "<tool_cal" * 300, '<tool_call>{"name": "' + "x" * 1000):
        for letter in text:
            reader.push(letter)
            assert len(reader._held) <= 400


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_goes_on_without_end_holds_back_little_at_every_place(name: str) -> None:
    text = ANSWERS[name]
    for cut in range(1, len(text), 5):
        for filler in (" ", "a"):
            reader = _reader(format_named(name))
            for piece in [text[:cut], *[8 * filler] * 100]:
                reader.push(piece)
            assert len(reader._held) <= 520, (text[:cut], filler)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|channel|>" + 600 * "a" + "<|message|>b", "<|channel|>" + 600 * "a" + "<|message|>b"),
        (100 * "<|channel|>", 100 * "<|channel|>"),
        (600 * " " + "<|channel|>final<|message|>b", 600 * " " + "b"),
        ("to=day", "to=day"),
    ],
)
def test_what_begins_as_a_header_and_is_none_is_text(text: str, content: str) -> None:
    form = format_named("gpt_oss")
    assert _answer(form, text).content == content
    assert collected(_events(_reader(form), list(text))).content == content


def test_a_call_whose_header_the_prompt_has_begun_is_read() -> None:
    [call] = _answer(format_named("gpt_oss"), " to=functions.get_time<|channel|>commentary json<|message|>{}").calls
    assert (call.name, call.arguments) == ("get_time", "{}")


def test_no_two_calls_of_an_answer_have_one_id() -> None:
    call = "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    assert [each.id for each in _answer(format_named("kimi_k2"), text).calls] == ["functions.get_time:0", "iiii"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "[TOOL_CALLS]get_time[CALL_ID]" + 400 * "c" + "[ARGS]{}"),
        (
            "qwen3_coder",
            "<tool_call><function=get_time><parameter=" + 400 * "k" + ">1</parameter></function></tool_call>",
        ),
    ],
)
def test_names_and_ids_have_one_bound_however_a_text_is_divided(name: str, text: str) -> None:
    whole = _events(_reader(format_named(name)), [text])
    assert whole == _events(_reader(format_named(name)), list(text))
    assert all(len(event.call_id) <= 320 and event.kind is not EventKind.CALL_END for event in whole)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>get_time" + 2 * "<arg_key>a</arg_key><arg_value>1</arg_value>" + "</tool_call>"),
        ("gemma4", "<|tool_call>call:get_time{a:1,a:1}<tool_call|>"),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {}, "arguments": {}}</tool_call>'),
    ],
)
def test_an_argument_that_comes_twice_breaks_a_call(name: str, text: str) -> None:
    assert _answer(format_named(name), text).is_cut


def test_types_of_inner_values_and_of_alternatives_count() -> None:
    assert typed_json("1", {"oneOf": [{"type": "string"}]}) == '"1"'
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert braced_json("{a:1,b:1}", "'", inner) == '{"a":"1","b":1}'
