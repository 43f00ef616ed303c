"""How models write reasoning and calls, as data, and how the text of one answer is to be read.

Owns the values only. Does not know which models write what, nor how text is read: `text/answers/` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from sightline.core.conversation import Tool, ToolMode
from sightline.core.structured import StructuredOutputs


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is set apart from what follows. White space beside a marker belongs to it."""

    name: str
    open: str
    close: str


class CallSyntax(StrEnum):
    """How the name and the arguments of a call are written."""

    OBJECT = "object"
    """A JSON object with the name and the arguments."""
    NAMED = "named"
    """The name, a marker, and a JSON object."""
    TAGGED = "tagged"
    """The name, and each argument's key and value between tags."""
    BRACED = "braced"
    """The name, and arguments in braces with quotation marks of their own."""


@dataclass(frozen=True)
class CallFormat:
    """How calls are written. White space beside a marker belongs to it.

    section_open  open name after_name arguments close  separator  open ... close  section_close
    """

    name: str
    syntax: CallSyntax
    open: str = ""
    """Empty: a call begins with what its syntax begins with, at the beginning of an answer or of a section."""
    close: str = ""
    section_open: str = ""
    section_close: str = ""
    separator: str = ""
    before_name: str = ""
    after_name: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_mark: str = ""
    """Stands between the name and the call's id, if a model writes one."""
    is_id: bool = False
    """True if what stands before `after_name` is the call's id, of which the name is a part: `functions.NAME:0`."""
    id_length: int | None = None
    """Length of the ids that templates of this format accept; None: any."""
    key_open: str = ""
    key_close: str = ""
    value_open: str = ""
    value_close: str = ""
    quote: str = ""
    """The quotation mark of `BRACED` arguments."""


@dataclass(frozen=True)
class ChannelFormat:
    """An answer as messages with headers, which say whether each is reasoning, text or a call.

    channel header message body end  start role channel header message body end
    """

    name: str
    start: str
    role: str
    """The role of the model's own messages. One of another role is none of the model's."""
    channel: str
    message: str
    ends: tuple[str, ...]
    reasoning: str
    """The channel of reasoning. Other channels are text."""
    others: tuple[str, ...]
    """The other channels. A header within a message, whose end is missing, is one only if it names a channel."""
    recipient: str
    """Stands in a header before whom the message is for."""
    namespace: str
    """Stands in a recipient before the name of the function that is called."""
    content_type: str
    """Stands in a header before the type of a message's text."""


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    channels: ChannelFormat | None = None
    """In place of both."""

    @property
    def has_calls(self) -> bool:
        return self.calls is not None or self.channels is not None

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None or self.channels is not None

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that set parts of an answer apart. Special tokens among them are needed to read it."""
        found: list[str] = []
        if self.reasoning is not None:
            found += [self.reasoning.open, self.reasoning.close]
        if (calls := self.calls) is not None:
            found += [calls.open, calls.close, calls.section_open, calls.section_close, calls.separator]
            found += [calls.before_name, calls.after_name, calls.id_mark, calls.quote]
            found += [calls.key_open, calls.key_close, calls.value_open, calls.value_close]
        if (channels := self.channels) is not None:
            found += [channels.start, channels.channel, channels.message, channels.content_type, *channels.ends]
        return tuple(dict.fromkeys(each.strip() for each in found if each.strip()))


@dataclass(frozen=True)
class AnswerReading:
    """How the text of one answer is read, and what it may be."""

    format: AnswerFormat
    tools: tuple[Tool, ...] = ()
    """The functions that it may call. A call of another one is text."""
    mode: ToolMode = ToolMode.AUTO
    parallel_calls: bool = True
    """False ends the answer behind its first call."""
    in_reasoning: bool = False
    """True if the prompt has opened the reasoning."""
    reasoning_budget: int | None = None
    """Most tokens of reasoning."""

    @property
    def is_held(self) -> bool:
        """True if its calls must satisfy something, or its reasoning must end in time."""
        is_strict = any(tool.strict for tool in self.tools)
        return self.mode is ToolMode.REQUIRED or is_strict or self.reasoning_budget is not None


@dataclass(frozen=True)
class HeldAnswer:
    """An answer of which a grammar says what it may be, reasoning and calls included."""

    reading: AnswerReading
    structured: StructuredOutputs | None = None
    """What its text must be, if it calls no tools."""

    @property
    def calls_tools(self) -> bool:
        return self.reading.mode is not ToolMode.NONE and bool(self.reading.tools)

    @property
    def holds_calls(self) -> bool:
        """True if the grammar says what calls may be; otherwise an answer with tools is free behind its reasoning."""
        is_strict = any(tool.strict for tool in self.reading.tools)
        return self.reading.mode is ToolMode.REQUIRED or is_strict or self.structured is not None


AnswerRule: TypeAlias = StructuredOutputs | HeldAnswer
"""What an answer may be."""


@dataclass(frozen=True)
class ChosenFormat:
    """How a model writes its answers, and how that is known."""

    format: AnswerFormat = AnswerFormat()
    calls_told: str = "no chat template"
    """How the format of calls was chosen, or why there is none."""
    reasoning_told: str = "no chat template"
    """How the format of reasoning was chosen, or why there is none."""
    arguments_as_text: bool = False
    """True if the template writes the arguments of earlier calls only if they are text."""

    @property
    def refusal(self) -> str | None:
        """Why `tools` is refused; None if it is not."""
        return None if self.format.has_calls else f"tools is not supported for this model: {self.calls_told}"

    def __str__(self) -> str:
        return f"calls of tools: {self.calls_told}; reasoning: {self.reasoning_told}"


NOTHING_CHOSEN = ChosenFormat()
