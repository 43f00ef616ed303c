"""Grammars of whole answers: every text that they admit is read as calls whose arguments satisfy their schemas."""

from __future__ import annotations

import json
import random

import pytest

from sightline.core.answer_format import AnswerFormat, AnswerReading, CallSyntax, HeldAnswer
from sightline.core.conversation import Tool, ToolMode, collected
from sightline.core.errors import RequestError
from sightline.core.structured import MAX_HELD_CHARACTERS, StructuredOutputs
from sightline.text.answers.formats import CALL_FORMATS, CHANNEL_FORMATS
from sightline.text.answers.reading import answer_reader
from support.answer_checks import HERMES, admits, byte_tokenizer, call_of, check_end, check_named_choice, matcher_of
from support.answer_checks import may_end as ends
from support.answer_templates import CLOCK, format_named
from support.structured import holds

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
STRICT = Tool("get_weather", None, json.dumps(SCHEMA), strict=True)
NO_ARGUMENTS = Tool("get_time", None, '{"type":"object","properties":{},"additionalProperties":false}')
HELD = [name for name, row in CALL_FORMATS.items() if row.syntax in (CallSyntax.OBJECT, CallSyntax.NAMED)]
YES_OR_NO = StructuredOutputs(choice=("yes", "no"))


def _sampled(held: HeldAnswer, seed: int) -> str | None:
    """A random answer that a grammar admits; None if it does not end soon."""
    tokenizer, matcher, draw = byte_tokenizer(), matcher_of(held), random.Random(seed)
    [end], tokens = tokenizer.eos_ids, list[int]()
    spaces = set(tokenizer.encode_text(" \n\t\r"))
    while len(tokens) < 400 and not matcher.is_complete:
        mask = matcher.mask()
        left = [token for token in range(tokenizer.vocab_size) if mask[token // 64] >> (token % 64) & 1]
        if end in left and draw.random() < 0.4:
            break
        left = [token for token in left if token != end and token not in spaces] or left
        tokens.append(draw.choice(left))
        matcher.consume(tokens[-1:])
    return tokenizer.decode(tokens, skip_special_tokens=False) if len(tokens) < 400 else None


@pytest.mark.parametrize("name", [*HELD, *CHANNEL_FORMATS])
def test_every_required_call_satisfies_its_schema(name: str) -> None:
    reading = AnswerReading(format_named(name), (STRICT, NO_ARGUMENTS), ToolMode.REQUIRED)
    texts = [text for seed in range(3) if (text := _sampled(HeldAnswer(reading), seed)) is not None]
    num_calls = 0
    for text in texts:
        reader = answer_reader(reading)
        said = collected([*reader.push(text), *reader.finish()])
        assert said.content is None, text
        assert reader.has_calls, text
        num_calls += len(said.calls)
        assert all(call.name == "get_time" or holds(call.arguments, SCHEMA) for call in said.calls), text
    assert num_calls


def test_a_named_choice_is_held_and_answers_end_in_time() -> None:
    check_named_choice()
    check_end()


@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "text"])
def test_strict_tools_are_held_from_the_marker_on(has_markers: bool) -> None:
    held = HeldAnswer(AnswerReading(HERMES, (STRICT, CLOCK)))
    good, bad = '{"city":"Rome","days":3}', '{"city":"Bonn"'
    for text in ("Just text, with < and { in it.", "A < and <tool_cal", "", "<think>\nHm</think>\n\nText"):
        assert ends(held, text, has_markers), text
    assert ends(held, f"I ask. {call_of('get_weather', good)}", has_markers)
    assert ends(held, f"<think>\nHm\n</think>\n\nI ask. {call_of('get_weather', good)}", has_markers)
    assert ends(held, f"{call_of('get_time', '{}')}\n{call_of('get_weather', good)}", has_markers)
    for before in ("", "I ask. ", f"{call_of('get_time', '{}')}\n"):
        assert not admits(held, f'{before}<tool_call>\n{{"name": "get_weather", "arguments": {bad}', has_markers)
        assert not admits(held, f'{before}<tool_call>\n{{"name": "get_other"', has_markers)
        assert not ends(held, f"{before}<tool_call>", has_markers)
    assert not admits(held, f"{call_of('get_time', '{}')}\nText", has_markers)
    # What is not strict is any object.
    assert ends(held, call_of("get_time", '{"x":[1]}'), has_markers)
    # A marker that is a token cannot be spelled out by others.
    spelled = [byte_tokenizer().encode_text(letter)[0] for letter in "<tool_call>"]
    assert matcher_of(held, has_markers).num_admitted(spelled) == len(spelled) - has_markers


@pytest.mark.parametrize("name", ["mistral_list", "deepseek_v31", "kimi_k2"])
def test_calls_in_sections_whose_markers_are_text_are_held(name: str) -> None:
    held = HeldAnswer(AnswerReading(format_named(name), (STRICT, NO_ARGUMENTS)))
    form = format_named(name).calls
    assert form is not None
    assert ends(held, "Just [text] <of any kind>.", has_markers=False)
    assert admits(held, f"I ask. {form.section_open}", has_markers=False)
    assert not ends(held, f"I ask. {form.section_open}", has_markers=False)
    assert not admits(held, f"{form.section_open}?", has_markers=False)


def test_one_call_is_the_most_without_parallel_calls() -> None:
    one = call_of("get_time", "{}")
    for parallel in (True, False):
        reading = AnswerReading(HERMES, (NO_ARGUMENTS,), ToolMode.REQUIRED, parallel)
        assert admits(HeldAnswer(reading), f"{one}\n{one}") is parallel


def test_a_response_format_and_tools_go_together() -> None:
    held = HeldAnswer(AnswerReading(HERMES, (STRICT, CLOCK)), YES_OR_NO)
    assert ends(held, "yes")
    assert ends(held, f"<think>\nAny {call_of('x', '1')} text.\n</think>\n\nno")
    assert ends(held, call_of("get_time", "{}"))
    assert not admits(held, "maybe")
    assert not ends(held, "ye")


def test_constraints_begin_behind_reasoning_that_the_prompt_opened() -> None:
    held = HeldAnswer(AnswerReading(HERMES, in_reasoning=True), YES_OR_NO)
    assert ends(held, "Perhaps yes.\n</think>\n\nyes")
    assert not ends(held, "yes")
    assert not admits(held, "So.</think>maybe")


def test_a_budget_closes_the_reasoning() -> None:
    held = HeldAnswer(AnswerReading(HERMES, in_reasoning=True, reasoning_budget=3))
    assert admits(held, "abc</think>")
    assert admits(held, "a</think>")
    assert not admits(held, "abcd")
    assert ends(held, "a<think>c</think>What <think> comes <tool_call> is free")
    assert admits(HeldAnswer(AnswerReading(HERMES, in_reasoning=True, reasoning_budget=0)), "</think>")
    assert not admits(HeldAnswer(AnswerReading(HERMES, in_reasoning=True, reasoning_budget=0)), "a")


@pytest.mark.parametrize("name", sorted({*CALL_FORMATS} - {*HELD}))
def test_formats_that_cannot_be_held_are_refused_by_name(name: str) -> None:
    reading = AnswerReading(format_named(name), (STRICT,), ToolMode.REQUIRED)
    with pytest.raises(RequestError, match=f"format {name}"):
        matcher_of(HeldAnswer(reading))


def test_a_strict_schema_that_cannot_be_held_is_refused_and_a_loose_one_is_any_object() -> None:
    schema = json.dumps({"type": "object", "properties": {"x": {"not": {"type": "string"}}}})
    strict = AnswerReading(HERMES, (Tool("f", None, schema, strict=True),))
    with pytest.raises(RequestError, match=r"'f' with strict true.*'not'"):
        matcher_of(HeldAnswer(strict))
    loose = AnswerReading(HERMES, (Tool("f", None, schema),), ToolMode.REQUIRED)
    assert ends(HeldAnswer(loose), call_of("f", '{"x":"y"}'))


def test_a_budget_needs_a_closing_token() -> None:
    reading = AnswerReading(AnswerFormat(format_named("hermes", "seed_oss").reasoning), reasoning_budget=3)
    with pytest.raises(RequestError, match="thinking_token_budget is not supported"):
        matcher_of(HeldAnswer(reading))


@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "text"])
def test_free_text_begins_no_message_that_no_schema_holds(has_markers: bool) -> None:
    """The reader would find a call in it, with any arguments."""
    held = HeldAnswer(AnswerReading(format_named("gpt_oss"), (STRICT,)))
    thought, said = "<|channel|>analysis<|message|>Hm", "<|channel|>final<|message|>Well"
    call = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    assert ends(held, said, has_markers)
    assert ends(held, f"{thought}<|end|><|start|>assistant{said}", has_markers)
    assert not ends(held, thought, has_markers)
    assert ends(held, f'{thought}<|end|>{call}{{"city":"Rome","days":3}}', has_markers)
    assert not admits(held, f'{thought}<|end|>{call}{{"city":"Bonn"', has_markers)
    for text in (thought, said):
        for begun in (call, "<|channel|>", "<|message|>"):
            assert not admits(held, text + begun, has_markers), text + begun
    assert not admits(held, f"{said}<|end|>", has_markers)


def test_messages_begin_behind_reasoning_that_the_prompt_opened() -> None:
    form = format_named("gpt_oss")
    final = "<|start|>assistant<|channel|>final<|message|>"
    for budget in (None, 5):
        held = HeldAnswer(AnswerReading(form, in_reasoning=True, reasoning_budget=budget), YES_OR_NO)
        assert ends(held, f"Hm.<|end|>{final}yes")
        assert not ends(held, "Hm.")
        assert not admits(held, "<|channel|>final")
        assert not admits(held, f"Hm.<|end|>{final}maybe")
    assert not admits(held, "Hm....")


def _long(number: int, length: int, *, strict: bool) -> Tool:
    """A tool whose schema has a length."""
    schema = json.loads(NO_ARGUMENTS.schema) | {"required": ["x"], "properties": {"x": {"type": "integer"}}}
    bare = json.dumps(schema | {"description": ""}, separators=(",", ":"))
    return Tool(
        f"f{number}", None, bare.replace('"description":""', f'"description":"{"d" * (length - len(bare))}"'), strict
    )


def test_the_schemas_of_all_tools_of_a_request_are_bounded_together() -> None:
    each = MAX_HELD_CHARACTERS // 8
    strict = tuple(_long(number, each, strict=True) for number in range(8))
    good, bad = call_of("f7", '{"x":1}'), call_of("f7", '{"x":"a"}')
    held = HeldAnswer(AnswerReading(HERMES, strict))
    assert ends(held, good)
    assert not admits(held, bad)
    for more in ((_long(8, 200, strict=True),), ()):
        structured = None if more else StructuredOutputs(json={"type": "object"})
        with pytest.raises(RequestError, match="tools with strict true and a response format of at most 262,144"):
            matcher_of(HeldAnswer(AnswerReading(HERMES, (*strict, *more)), structured))
    # Tools that are not strict are held to their schemas as far as these fit, behind those that must be held.
    loose = tuple(_long(number, each, strict=False) for number in range(8))
    reading = AnswerReading(HERMES, (*loose, _long(8, each, strict=True)), ToolMode.REQUIRED)
    assert admits(HeldAnswer(reading), bad)
    assert not admits(HeldAnswer(reading), bad.replace("f7", "f6"))
    assert not admits(HeldAnswer(reading), bad.replace("f7", "f8"))
