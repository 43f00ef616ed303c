"""From a conversation to a prompt, and to how its answer is read. Does not know the shapes of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sightline.core.answer_format import AnswerReading
from sightline.core.conversation import Conversation, Tool, ToolMode
from sightline.core.errors import RequestError
from sightline.core.structured import parameters_text
from sightline.text.answers.headers import opens_reasoning
from sightline.text.templates.chat_template import Ending
from sightline.text.templates.turns import template_tool, template_turn
from sightline.text.tokenizers.tokenizer import Tokenizer

_EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates turn reasoning on and off."""


def num_characters(conversation: Conversation) -> int:
    """Number of characters of a conversation's texts, tools included."""
    count = 0
    for turn in conversation.turns:
        count += len(turn.content or "") if not isinstance(turn.content, tuple) else sum(map(len, turn.content))
        count += len(turn.reasoning or "") + sum(len(call.name) + len(call.arguments) for call in turn.calls)
    return count + sum(
        len(tool.name) + len(tool.description or "") + len(tool.parameters or "") for tool in conversation.tools
    )


def _variables(variables: frozenset[str] | set[str], conversation: Conversation) -> dict[str, object]:
    """The template's variables: those of the request, and what the effort means to the template."""
    found = dict(conversation.switches)
    effort = conversation.effort
    if effort is None:
        return found
    for name in _SWITCHES:
        if name in variables and (effort == "none" or _EFFORT not in variables):
            found.setdefault(name, effort != "none")
    if _EFFORT in variables:
        found.setdefault(_EFFORT, effort)
    return found


def unread_switches(tokenizer: Tokenizer, conversation: Conversation) -> list[str]:
    """The paths of the fields that this model's template and format never read."""
    template = tokenizer.chat_template
    if template is None:
        return []
    unread = [f"chat_template_kwargs.{name}" for name in conversation.switches if name not in template.variables]
    if conversation.effort is not None and not template.variables & {_EFFORT, *_SWITCHES}:
        unread.append(_EFFORT)
    if conversation.reasoning_budget is not None and not tokenizer.answers.format.has_reasoning:
        unread.append("thinking_token_budget")
    return unread


def check_tools(tokenizer: Tokenizer, conversation: Conversation) -> None:
    """Raises `RequestError` for tools that the model's template or format does not allow."""
    offers = conversation.choice.mode is not ToolMode.NONE
    if offers and conversation.tools and tokenizer.answers.refusal is not None:
        raise RequestError(tokenizer.answers.refusal)


def render_conversation(tokenizer: Tokenizer, conversation: Conversation, ending: Ending) -> str:
    """The prompt of a conversation. Raises `RequestError` if the template refuses it."""
    template = tokenizer.chat_template
    if template is None:
        raise RequestError("expected a model with a chat template, got one without")
    answers = tokenizer.answers
    offers = conversation.choice.mode is not ToolMode.NONE
    turns = [template_turn(turn, arguments_as_text=answers.arguments_as_text) for turn in conversation.turns]
    tools = [template_tool(tool) for tool in conversation.tools] if offers else []
    return template.render(turns, ending, tools=tools or None, **_variables(template.variables, conversation))


def reading_of(tokenizer: Tokenizer, conversation: Conversation, rendered: str) -> AnswerReading | None:
    """How the answer to a rendered conversation is read; None if it is text."""
    answers = tokenizer.answers
    form = answers.format
    tools = conversation.callable_tools
    if not form.has_reasoning and not tools:
        return None
    in_reasoning = form.reasoning is not None and rendered.rstrip().endswith(form.reasoning.open.rstrip())
    if form.channels is not None:
        in_reasoning = opens_reasoning(form.channels, rendered)
    return AnswerReading(
        form,
        tools,
        conversation.choice.mode if tools else ToolMode.NONE,
        conversation.parallel_calls,
        in_reasoning,
        conversation.reasoning_budget if form.has_reasoning else None,
    )


def offered_tools(tools: Sequence[Mapping[str, object]]) -> tuple[Tool, ...]:
    """Tools from OpenAI's shape. Raises `RequestError` for another."""
    found: list[Tool] = []
    for entry in tools:
        match entry.get("function", entry):
            case {"name": str(name), **stated}:
                parameters, description = stated.get("parameters"), stated.get("description")
                schema = None if parameters is None else parameters_text(parameters, name)
                told = None if description is None else str(description)
                found.append(Tool(name, told, schema, stated.get("strict") is True))
            case _:
                raise RequestError(f"expected tools with a function and its name, got {str(entry)[:80]}")
    return tuple(found)
