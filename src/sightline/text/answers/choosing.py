"""Chooses the formats in which a model writes reasoning and calls: by what its own files say, and never by its name.

    1. the name that a flag gives
    2. the checkpoint's `response_template`
    3. the row of the table that reads back what the chat template writes for a probed call, and for probed reasoning

What no row reads is not guessed: requests with tools are refused then. The reason is told at start-up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sightline.core.answer_format import (
    AnswerFormat,
    AnswerReading,
    CallFormat,
    ChannelFormat,
    ChosenFormat,
    ReasoningFormat,
)
from sightline.core.conversation import AnswerEvent, Tool, ToolCall, Turn, collected
from sightline.core.errors import CheckpointError, ConfigError, RequestError
from sightline.text.answers.formats import (
    CALL_FORMATS,
    CHANNEL_FORMATS,
    NAMES_ELSEWHERE,
    REASONING_FORMATS,
    REASONING_NAMES_ELSEWHERE,
)
from sightline.text.answers.reading import answer_reader
from sightline.text.answers.response_template import read_response_template
from sightline.text.templates.chat_template import ChatTemplate, Ending
from sightline.text.templates.turns import template_tool, template_turn

AUTO, NONE = "auto", "none"
_Row: TypeAlias = CallFormat | ReasoningFormat | ChannelFormat
_TOOL = Tool(
    "probed_function",
    "Probed description.",
    '{"type":"object","properties":{"words":{"type":"string"},"count":{"type":"integer"}},"required":["words"]}',
)
_ARGUMENTS = '{"words": "probed, words", "count": 3}'
_CALL_IDS = ("call00001", "functions.probed_function:0")
"""Some templates accept only ids of nine letters, others write the name as part of the id."""
_QUESTION = Turn("user", "Probed question.")
_BETWEEN = re.compile(r"\s*(?:<[^<>]{1,40}>|\[/?[A-Z_]{1,40}\])*\s*")
"""What a template may write around an answer: white space and special tokens."""
_SWITCHES: tuple[Mapping[str, object], ...] = (
    {},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)


@dataclass(frozen=True)
class _Calls:
    """A format of calls, if one was found, and how."""

    told: str
    calls: CallFormat | None = None
    channels: ChannelFormat | None = None
    arguments_as_text: bool = False


@dataclass(frozen=True)
class _Reasoning:
    told: str
    reasoning: ReasoningFormat | None = None


def choose_format(
    template: ChatTemplate | None,
    response_template: Mapping[str, object] | None = None,
    *,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> ChosenFormat:
    """The formats of a model's answers. Raises `ConfigError` for names that there are not."""
    calls_rows: Mapping[str, _Row] = {**CALL_FORMATS, **CHANNEL_FORMATS}
    calls_row = _named(tool_call_parser, "tool_call_parser", calls_rows, NAMES_ELSEWHERE)
    reasoning_rows: Mapping[str, _Row] = {**REASONING_FORMATS, **CHANNEL_FORMATS}
    reasoning_row = _named(reasoning_parser, "reasoning_parser", reasoning_rows, REASONING_NAMES_ELSEWHERE)
    if template is None:
        return ChosenFormat()
    declared, refusal = _declared(response_template)
    channels = next((row for row in (calls_row, reasoning_row) if isinstance(row, ChannelFormat)), None)
    if channels is None and declared is None and (tool_call_parser, reasoning_parser) == (AUTO, AUTO):
        channels = _probed_channels(template)
    if channels is not None:
        told = f"{channels.name}, {'named by a flag' if calls_row or reasoning_row else 'as the chat template writes'}"
        return ChosenFormat(AnswerFormat(channels=channels), told, told)
    reasoning = _choose_reasoning(template, reasoning_parser, reasoning_row, declared)
    calls = _choose_calls(template, reasoning.reasoning, tool_call_parser, calls_row, declared, refusal)
    form = AnswerFormat(reasoning.reasoning, calls.calls)
    return ChosenFormat(form, calls.told, reasoning.told, calls.arguments_as_text)


def _named(name: str, setting: str, known: Mapping[str, _Row], elsewhere: Mapping[str, str]) -> _Row | None:
    """The row of a name; None for "auto" and "none"."""
    if name in (AUTO, NONE):
        return None
    found = known.get(elsewhere.get(name, name))
    if found is None:
        raise ConfigError(f"expected {setting} {AUTO}, {NONE}, {', '.join(known)}, got {name!r}; use one of them")
    return found


def _declared(response_template: Mapping[str, object] | None) -> tuple[AnswerFormat | None, str]:
    """What the checkpoint declares; None, with the reason, if it cannot be read."""
    if response_template is None:
        return None, ""
    try:
        return read_response_template(response_template), ""
    except CheckpointError as error:
        return None, str(error)


def _choose_reasoning(template: ChatTemplate, name: str, row: _Row | None, declared: AnswerFormat | None) -> _Reasoning:
    if name == NONE:
        return _Reasoning("turned off by reasoning_parser none")
    if isinstance(row, ReasoningFormat):
        return _Reasoning(f"{row.name}, named by reasoning_parser", row)
    if declared is not None and declared.reasoning is not None:
        return _Reasoning("as the checkpoint's response_template says", declared.reasoning)
    found = [form for form in REASONING_FORMATS.values() if _writes_reasoning(template, form)]
    match found:
        case []:
            return _Reasoning("none, as the chat template writes none")
        case [form]:
            return _Reasoning(f"{form.name}, as the chat template writes", form)
        case _:
            names = ", ".join(each.name for each in found)
            return _Reasoning(f"none, as the chat template writes several ({names}); name one by reasoning_parser")


def _writes_reasoning(template: ChatTemplate, form: ReasoningFormat) -> bool:
    """True if the template opens or closes reasoning so, or takes it out of earlier turns."""
    opens, closes = form.open.strip(), form.close.strip()
    if closes in template.source:
        return True
    for switches in _SWITCHES:
        prompt = _rendered(template, [_QUESTION], switches, Ending.NEXT_TURN)
        if prompt is not None and prompt.rstrip().endswith((opens, closes)):
            return True
    return False


def _probed_channels(template: ChatTemplate) -> ChannelFormat | None:
    """The row of messages with headers that reads back what the template writes."""
    for form in CHANNEL_FORMATS.values():
        if form.channel not in template.source:
            continue
        for part, _ in _answers(template, Turn("assistant", None, calls=(_probed_call(_CALL_IDS[0]),))):
            if _reads_call(AnswerFormat(channels=form), part):
                return form
    return None


def _choose_calls(
    template: ChatTemplate,
    reasoning: ReasoningFormat | None,
    name: str,
    row: _Row | None,
    declared: AnswerFormat | None,
    refusal: str,
) -> _Calls:
    if name == NONE:
        return _Calls("turned off by tool_call_parser none")
    if not _lists_tools(template):
        return _Calls("the model's chat template does not list tools")
    if isinstance(row, CallFormat):
        as_text = next((text for each, text in _probed_calls(template, reasoning) if each is row), False)
        return _Calls(f"{row.name}, named by tool_call_parser", row, None, as_text)
    if declared is not None and declared.calls is not None:
        return _Calls("as the checkpoint's response_template says", declared.calls)
    if refusal:
        return _Calls(f"{refusal}; name a format by tool_call_parser")
    found: dict[str, _Calls] = {}
    for form, as_text in _probed_calls(template, reasoning):
        found.setdefault(form.name, _Calls(f"{form.name}, as the chat template writes", form, None, as_text))
    match list(found.values()):
        case [calls]:
            return calls
        case []:
            return _Calls("no known format reads what the chat template writes; name one by tool_call_parser")
        case _:
            return _Calls(
                f"several formats read what the chat template writes ({', '.join(found)}); name one by tool_call_parser"
            )


def _lists_tools(template: ChatTemplate) -> bool:
    prompt = _rendered(template, [_QUESTION], {}, Ending.NEXT_TURN)
    return prompt is not None and _TOOL.name in prompt


def _probed_calls(template: ChatTemplate, reasoning: ReasoningFormat | None) -> Iterator[tuple[CallFormat, bool]]:
    """The rows that read back a call as the template writes it, with whether it wants arguments as text."""
    for call_id in _CALL_IDS:
        for part, as_text in _answers(template, Turn("assistant", None, calls=(_probed_call(call_id),))):
            for form in CALL_FORMATS.values():
                if _reads_call(AnswerFormat(reasoning, form), part):
                    yield form, as_text


def _probed_call(call_id: str) -> ToolCall:
    return ToolCall(call_id, _TOOL.name, _ARGUMENTS)


def _answers(template: ChatTemplate, turn: Turn) -> Iterator[tuple[str, bool]]:
    """What a template writes for a turn of the assistant, with arguments as values and as text."""
    opened = _rendered(template, [_QUESTION], {}, Ending.NEXT_TURN)
    if opened is None:
        return
    for as_text in (False, True):
        whole = _rendered(template, [_QUESTION, turn], {}, Ending.CLOSED, as_text=as_text)
        if whole is not None:
            yield whole[len(opened) if whole.startswith(opened) else _end_of_head(opened, whole) :], as_text


def _end_of_head(opened: str, whole: str) -> int:
    """Where an answer begins that does not begin as the prompt ends: behind the last marker that both have."""
    pairs = enumerate(zip(opened, whole, strict=False))
    common = opened[: next((place for place, (one, other) in pairs if one != other), len(opened))]
    return max(common.rfind(each) + 1 for each in (">", "]", "\n"))


def _reads_call(form: AnswerFormat, text: str) -> bool:
    """True if a format reads the probed call from a text, and leaves nothing but special tokens."""
    answer = collected(_read(form, text))
    if answer.is_cut or len(answer.calls) != 1 or not _BETWEEN.fullmatch(answer.content or ""):
        return False
    [call] = answer.calls
    return call.name == _TOOL.name and json.loads(call.arguments) == json.loads(_ARGUMENTS)


def _read(form: AnswerFormat, text: str) -> list[AnswerEvent]:
    reader = answer_reader(AnswerReading(form, (_TOOL,)), lambda _length: "call")
    return [*reader.push(text), *reader.finish()]


def _rendered(
    template: ChatTemplate,
    turns: Sequence[Turn],
    switches: Mapping[str, object],
    ending: Ending,
    *,
    as_text: bool = False,
) -> str | None:
    """A rendering of probed turns; None if the template refuses them."""
    messages = [template_turn(turn, arguments_as_text=as_text) for turn in turns]
    try:
        return template.render(messages, ending, tools=[template_tool(_TOOL)], **switches)
    except RequestError:
        return None
