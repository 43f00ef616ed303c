"""From OpenAI's messages, tools and choices to a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from sightline.core.conversation import Conversation, Tool, ToolCall, ToolChoice, ToolMode, Turn
from sightline.server.api.schema import AllowedTools, ChosenTools, Message, MessageCall, NamedFunction, ToolEntry
from sightline.server.http.errors import invalid

Choice: TypeAlias = Literal["none", "auto", "required"] | ChosenTools


def conversation_of(
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolEntry] | None = None,
    choice: Choice | None = None,
    parallel_calls: bool | None = None,
    effort: str | None = None,
    budget: int | None = None,
    switches: Mapping[str, Any] | None = None,
) -> Conversation:
    """The conversation that the fields of a body say. Raises `ApiError` for fields that do not agree."""
    offered = tuple(_tool(entry) for entry in tools or ())
    return Conversation(
        tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(messages)),
        check_tools(offered),
        check_choice(_choice(choice), offered),
        parallel_calls is not False,
        effort,
        budget,
        switches or {},
    )


def check_tools(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Returns the tools. Raises `ApiError` if two have one name."""
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise invalid(f"expected tools with names of their own, got {twice!r} twice; rename one", "tools")
    return tools


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Returns the choice. Raises `ApiError` if it needs a tool that is not offered."""
    names = {tool.name for tool in tools}
    missing = next((name for name in choice.only if name not in names), None)
    if missing is not None:
        raise invalid(f"expected tool_choice to name one of tools, got {missing!r}; add it to tools", "tool_choice")
    if choice.mode is ToolMode.REQUIRED and not tools:
        raise invalid('expected tools with tool_choice "required", got none; send some', "tool_choice")
    return choice


def _turn(message: Message, where: str) -> Turn:
    if None not in (message.reasoning, message.reasoning_content) and message.reasoning != message.reasoning_content:
        raise invalid("reasoning and reasoning_content differ; send one of them", f"{where}.reasoning")
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    content = message.content
    return Turn(
        message.role,
        tuple(part.text for part in content) if isinstance(content, list) else content,
        message.name,
        reasoning,
        tuple(_call(call) for call in message.tool_calls or ()),
        message.tool_call_id,
    )


def _call(call: MessageCall) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(call.id or "", call.function.name, text)


def _tool(entry: ToolEntry) -> Tool:
    function = entry.function
    parameters = None if function.parameters is None else msgspec.json.encode(function.parameters).decode()
    return Tool(function.name, function.description, parameters, function.strict is True)


def _choice(choice: Choice | None) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice()
        case str():
            return ToolChoice(ToolMode(choice))
        case ChosenTools("function", NamedFunction(name=name), None):
            return ToolChoice(ToolMode.REQUIRED, (name,))
        case ChosenTools("allowed_tools", None, AllowedTools(mode=mode, tools=allowed)):
            return ToolChoice(ToolMode(mode), tuple(each.function.name for each in allowed))
    raise invalid(f'expected tool_choice with "{choice.type}" and no other choice, got another shape', "tool_choice")
