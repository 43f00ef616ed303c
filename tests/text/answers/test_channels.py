"""Answers made of messages with headers are read as the harmony format has them, however they are divided and cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.answer_format import AnswerReading, ChosenFormat
from sightline.core.conversation import AnswerEvent, CollectedAnswer, Conversation, Turn, collected, merged
from sightline.text.answers.formats import CHANNEL_FORMATS
from sightline.text.answers.headers import opens_reasoning
from sightline.text.answers.opening import reading_of
from sightline.text.answers.reading import answer_reader
from sightline.text.tokenizers.tokenizer import Tokenizer
from support.answer_templates import ARGUMENTS, TOOLS, format_named

FORM = format_named("gpt_oss")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def _events(pieces: Sequence[str], **reading: object) -> list[AnswerEvent]:
    reader = answer_reader(AnswerReading(FORM, TOOLS, **reading), lambda _: "id")  # type: ignore[arg-type]
    return merged([*(event for piece in pieces for event in reader.push(piece)), *reader.finish()])


def _read(text: str, **reading: object) -> CollectedAnswer:
    """The answer, which is the same letter by letter."""
    events = _events([text], **reading)
    assert _events(list(text), **reading) == events
    return collected(events)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json",
        "<|channel|>commentary to=functions.get_weather json",
        "<|channel|>commentary to=functions.get_weather",
        "<|channel|>commentary functions.get_weather <|constrain|>json",
        "<|channel|>commentary to=get_weather <|constrain|>json",
        "<|channel|>commentary <|constrain|>json to=functions.get_weather",
        "<|channel|>analysis to=functions.get_weather code",
        "<|channel|>commentary<|channel|>commentary to=functions.get_weather json",
        "<|channel|>commentary?? to=functions.get_weather json",
        "<|constrain|>json<|channel|>commentary to=functions.get_weather",
        " to=functions.get_weather<|channel|>commentary json",
        "to=functions.get_weather<|channel|>commentary json",
        " to=functions.get_weather",
        "\n to=functions.get_weather\n<|channel|>commentary\n",
    ],
)
@pytest.mark.parametrize("before", ["", ANALYSIS + "Hm.<|end|><|start|>assistant", ANALYSIS + "Hm.<|end|>"])
def test_a_call_is_read_wherever_its_header_names_the_recipient(header: str, before: str) -> None:
    for space in ("", "\n "):
        answer = _read(f"{before}{header}<|message|>{space}{ARGUMENTS}<|call|>")
        [call] = answer.calls
        assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
        assert (answer.content, answer.reasoning, answer.is_cut) == (None, "Hm." if before else None, False)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<|message|>Hi<|return|>", "Hi", None),
        ("<|start|>assistant<|message|>Hi", "Hi", None),
        (f"{ANALYSIS}Hm.<|end|>Hi", "Hi", "Hm."),
        (f"{ANALYSIS}Hm.{FINAL}Hi", "Hi", "Hm."),
        (f"{ANALYSIS}Hm.<|channel|>final<|message|>Hi", "Hi", "Hm."),
        (f"{ANALYSIS}Hm.<|end|>{ANALYSIS}So.<|end|>{FINAL}Hi", "Hi", "Hm.So."),
        (f"<|channel|>analysis<|constrain|>text<|message|>Hm.<|end|>{FINAL}Hi", "Hi", "Hm."),
        (f"<|channel|>analysis? <|message|>Hm.<|end|>{FINAL}Hi", "Hi", "Hm."),
        (f"<|channel|>analysis to=python code<|message|>1+1<|call|>{FINAL}Hi", "Hi", "1+1"),
        (f"<|channel|>analysis<|end|>{FINAL}Hi", "Hi", None),
        (f"<|channel|>analysis Hm.<|end|>{FINAL}Hi", "Hi", "Hm."),
        (f"<|channel|>analysis Hm.{FINAL}Hi", "Hi", "Hm."),
        (f"<|channel|>??<|end|>{FINAL}Hi", "Hi", None),
        ('<|channel|>final <|constrain|>json<|message|>{"a":1}', '{"a":1}', None),
        ("<|channel|>commentary to=assistant<|message|>Hi", "Hi", None),
        # Calls of what is not offered, and messages of others, keep their headers.
        (
            "<|channel|>commentary to=functions.f json<|message|>{}",
            "<|channel|>commentary to=functions.f json<|message|>{}",
            None,
        ),
        ("<|start|>user<|message|>Hi", "<|start|>user<|message|>Hi", None),
        (
            "<|start|>user to=functions.get_time<|message|>{}",
            "<|start|>user to=functions.get_time<|message|>{}",
            None,
        ),
        (
            f"<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>1<|end|>{FINAL}Hi",
            "<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>1Hi",
            None,
        ),
    ],
)
def test_channels_say_what_is_text_and_what_is_reasoning(text: str, content: str, reasoning: str | None) -> None:
    assert _read(text) == CollectedAnswer(content, reasoning)


@pytest.mark.parametrize(
    "cut",
    [
        "<|start|>",
        "<|start|>assi",
        "<|start|>assistant",
        "<|start|>assistant<|channel|>",
        "<|start|>assistant<|channel|>fin",
    ],
)
def test_a_header_that_is_cut_off_is_no_text(cut: str) -> None:
    assert _read(f"{ANALYSIS}Hm.<|end|>{cut}") == CollectedAnswer(None, "Hm.")
    if cut.endswith("fin"):
        assert _read("<|channel|>fin") == CollectedAnswer(None)


@pytest.mark.parametrize(
    "text",
    [
        "the <|channel|> marker",
        "the <|start|>assistant marker, and " + 600 * "y",
        "Use `<|channel|>` and `<|message|>`.",
        "I could <|start|>assistant to=functions.get_time<|message|>{}",
        "<|channel|>" * 3 + "x",
        "<|channel|>analysis and <|channel|>",
    ],
)
def test_markers_in_the_middle_of_a_message_stay_what_the_message_is(text: str) -> None:
    assert _read(f"{ANALYSIS}{text}<|end|>{FINAL}Hi") == CollectedAnswer("Hi", text)
    assert _read(f"{ANALYSIS}{text}{FINAL}Hi") == CollectedAnswer("Hi", text)
    assert _read(f"<|channel|>final<|message|>{text}") == CollectedAnswer(text)


def test_text_that_names_a_marker_is_no_header() -> None:
    for text in ("<|channel|>` begins a channel", "<|start|>user is a header of the user", "to=day", "<", "<|ch"):
        assert _read(text) == CollectedAnswer(text)


def test_text_behind_a_call_is_told_without_the_space_before_it() -> None:
    call = "<|channel|>commentary to=functions.get_time<|message|>{}"
    assert _read(f"{call} \n <|call|>").content is None
    assert _read(f"{call} \n And so.").content == "And so."


_BODIES = st.text(st.sampled_from('ab {}"\\\n<|é'), max_size=12)
_WORDS = (
    "<|start|> assistant <|channel|> analysis final commentary get_time nope <|message|> <|end|> <|call|> <|constrain|>"
)
_PARTS = st.sampled_from([*_WORDS.split(), "json", "{}", "<|", "user", " to=functions.", " ", "\n", " to=", ANALYSIS])


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(_PARTS, max_size=16), cuts=st.lists(st.integers(0, 300), max_size=8), inside=st.booleans())
def test_the_division_of_any_messages_changes_nothing(parts: list[str], cuts: list[int], inside: bool) -> None:
    text = "".join(parts)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    divided = [text[start:end] for start, end in pairwise(places)]
    assert _events(divided, in_reasoning=inside) == _events([text], in_reasoning=inside)


_CALL_HEADERS = st.sampled_from(
    [
        "<|channel|>commentary to=functions.{} <|constrain|>json",
        "<|channel|>analysis to=functions.{} code",
        " to=functions.{}<|channel|>commentary json",
    ]
)
_MESSAGES = st.one_of(
    st.tuples(
        st.just("reasoning"), st.sampled_from(["<|channel|>analysis", "<|channel|>analysis<|constrain|>text"]), _BODIES
    ),
    st.tuples(st.just("content"), st.sampled_from(["<|channel|>commentary", "<|channel|>final", ""]), _BODIES),
    st.tuples(
        st.sampled_from(["get_time", "get_weather"]),
        _CALL_HEADERS,
        st.dictionaries(_BODIES, _BODIES, max_size=3).map(json.dumps),
    ),
)


@settings(max_examples=200, deadline=None)
@given(messages=st.lists(_MESSAGES, max_size=6))
def test_messages_are_read_as_they_were_written(messages: list[tuple[str, str, str]]) -> None:
    text = "<|start|>assistant".join(
        f"{header.format(kind)}<|message|>{body}{'<|call|>' if kind.startswith('get') else '<|end|>'}"
        for kind, header, body in messages
    )
    answer = _read(text)
    said = {kind: "".join(body for each, _, body in messages if each == kind) for kind in ("reasoning", "content")}
    assert (answer.reasoning or "", answer.content or "") == (said["reasoning"], said["content"])
    written = [(kind, body) for kind, _, body in messages if kind.startswith("get")]
    assert [(call.name, call.arguments) for call in answer.calls] == written


@pytest.mark.parametrize(
    ("end", "opens"),
    [
        ("<|start|>assistant", False),
        (f"<|start|>assistant{ANALYSIS}", True),
        (f"<|start|>assistant{ANALYSIS}I think", True),
        (f"<|start|>assistant{ANALYSIS}I think<|end|>", False),
        (f"<|start|>user{ANALYSIS}", False),
        (FINAL, False),
    ],
)
def test_reasoning_that_the_prompt_opened_goes_on(end: str, opens: bool) -> None:
    form = CHANNEL_FORMATS["gpt_oss"]
    prompt = f"<|start|>user<|message|>Hi<|end|>{end}"
    assert opens_reasoning(form, prompt) is opens
    tokenizer = cast("Tokenizer", SimpleNamespace(answers=ChosenFormat(FORM)))
    reading = reading_of(tokenizer, Conversation((Turn("user", "Hi"),)), prompt)
    assert reading is not None
    assert reading.in_reasoning is opens
    assert _read(f"Hm.<|end|>{FINAL}Hi", in_reasoning=True) == CollectedAnswer("Hi", "Hm.")
