"""Conversations and their answers, as every interface has them: one set of types behind several shapes of requests.

    request of an API ─▶ Conversation ─▶ prompt ─▶ text of a model ─▶ AnswerEvents ─▶ events of that API
                                                                          └─▶ CollectedAnswer ─▶ its whole answer

Owns turns, tools and the events of an answer. Does not know the shapes of APIs, chat templates, or how models write.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

_ID_LETTERS = string.ascii_letters + string.digits
NO_PARAMETERS = '{"type":"object","properties":{}}'
"""The schema of a function without parameters."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that a model asked for."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    """"system", "developer", "user", "assistant" or "tool", or another that the model's template knows."""
    content: str | tuple[str, ...] | None = None
    """Its text, or the texts of its parts."""
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    """Calls that this turn asks for."""
    call_id: str | None = None
    """The call of which this turn is the result."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask to be called."""

    name: str
    description: str | None = None
    parameters: str | None = None
    """The JSON schema of its arguments, as text; None if it has none."""
    strict: bool = False
    """True if the arguments must satisfy the schema."""

    @property
    def schema(self) -> str:
        """The schema of its arguments, as text."""
        return self.parameters or NO_PARAMETERS


class ToolMode(StrEnum):
    """Whether the answer may call tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may call tools, and which. A named tool is `ToolChoice(ToolMode.REQUIRED, (name,))`."""

    mode: ToolMode = ToolMode.AUTO
    only: tuple[str, ...] = ()
    """The tools that may be called; empty: all."""


@dataclass(frozen=True)
class Conversation:
    """What a model is to answer."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    """True if an answer may hold several calls."""
    effort: str | None = None
    """How much the model should reason, for templates that read `reasoning_effort`; "none" asks for no reasoning."""
    reasoning_budget: int | None = None
    """Most tokens of reasoning: behind them, the reasoning is closed."""
    switches: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """The template's own variables."""

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.choice.mode is ToolMode.NONE:
            return ()
        return tuple(tool for tool in self.tools if not self.choice.only or tool.name in self.choice.only)


class EventKind(StrEnum):
    """The kinds of events of an answer."""

    REASONING = "reasoning"
    """A piece of the reasoning, `text`."""
    CONTENT = "content"
    """A piece of the visible text, `text`."""
    CALL = "call"
    """A call begins: `call`, `call_id`, `name`."""
    ARGUMENTS = "arguments"
    """A piece of the arguments of call number `call`, `text`. All pieces together are its JSON text."""
    CALL_END = "call end"
    """Call number `call` is whole: its arguments are valid JSON. A call without this event was cut off."""


class AnswerEvent(NamedTuple):
    """A step of an answer. Calls are numbered from 0 and never overlap."""

    kind: EventKind
    text: str = ""
    call: int = 0
    """The number of the call."""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class CollectedAnswer:
    """A whole answer."""

    content: str | None
    """None if there is none."""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    is_cut: bool = False
    """True if the last call was cut off: its arguments are no valid JSON."""


def collected(events: Iterable[AnswerEvent]) -> CollectedAnswer:
    """The answer that some events tell."""
    texts: dict[tuple[EventKind, int], list[str]] = {}
    begun: list[AnswerEvent] = []
    num_whole = 0
    for event in events:
        match event.kind:
            case EventKind.CALL:
                begun.append(event)
            case EventKind.CALL_END:
                num_whole += 1
            case kind:
                texts.setdefault((kind, event.call), []).append(event.text)
    found = {key: "".join(pieces) for key, pieces in texts.items()}
    calls = (ToolCall(each.call_id, each.name, found.get((EventKind.ARGUMENTS, each.call), "")) for each in begun)
    content, reasoning = found.get((EventKind.CONTENT, 0)), found.get((EventKind.REASONING, 0))
    return CollectedAnswer(content, reasoning, tuple(calls), is_cut=num_whole < len(begun))


def merged(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """The same events with neighbouring pieces of one text joined."""
    found: list[AnswerEvent] = []
    for (kind, call), group in groupby(events, lambda event: (event.kind, event.call)):
        if kind in (EventKind.CALL, EventKind.CALL_END):
            found += group
        else:
            found.append(AnswerEvent(kind, "".join(event.text for event in group), call))
    return found


def new_call_id(length: int | None = None) -> str:
    """An id of a call that no other has. `length` is that of ids which the model's template accepts."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(length))
