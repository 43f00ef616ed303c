"""Turns and tools of a conversation in the shape that chat templates read: OpenAI's messages, with parsed arguments.

Does not know requests, nor which template reads what.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress

from sightline.core.conversation import Tool, ToolCall, Turn

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The names under which templates read the reasoning of an earlier turn."""


def template_turn(turn: Turn, *, arguments_as_text: bool = False) -> dict[str, object]:
    """A turn as a message. `arguments_as_text` leaves the arguments of calls as JSON text."""
    message: dict[str, object] = {"role": turn.role}
    match turn.content:
        case tuple(texts):
            message["content"] = [{"type": "text", "text": text} for text in texts]
        case str() as text:
            message["content"] = text
        case None if turn.calls:
            message["content"] = ""
    if turn.reasoning is not None:
        message |= dict.fromkeys(REASONING_KEYS, turn.reasoning)
    if turn.calls:
        message["tool_calls"] = [_template_call(call, arguments_as_text) for call in turn.calls]
    named = {"name": turn.name, "tool_call_id": turn.call_id}
    return message | {name: value for name, value in named.items() if value is not None}


def template_tool(tool: Tool) -> dict[str, object]:
    """A tool as templates list it."""
    stated: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        stated["description"] = tool.description
    if tool.parameters is not None:
        stated["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": stated}


def _template_call(call: ToolCall, arguments_as_text: bool) -> Mapping[str, object]:
    arguments: object = call.arguments
    if not arguments_as_text:
        # An earlier answer may be cut off, and clients send anything: what is no JSON, or nested too deep, is repeated
        # as it is.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(call.arguments, parse_constant=_finite, parse_float=_finite)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _finite(number: str) -> float:
    """A number that JSON can say again. Raises `ValueError` for another."""
    found = float(number)
    if not math.isfinite(found):
        raise ValueError(f"{number[:40]} is no number of JSON")
    return found
