"""What tests of several interfaces share: an answer that says everything, and how a stream of named events is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from sightline.core.conversation import AnswerEvent, EventKind
from sightline.server.process.frames import unpack_tokens
from support.local_front_end import LocalFrontEnd, Script

THOUGHT, TEXT, ARGUMENTS = EventKind.REASONING, EventKind.CONTENT, EventKind.ARGUMENTS
CALL = (
    AnswerEvent(EventKind.CALL, call_id="call_1", name="look"),
    AnswerEvent(ARGUMENTS, '{"at":'),
)
CALL_REST = (AnswerEvent(ARGUMENTS, " 1}"), AnswerEvent(EventKind.CALL_END))
EVERYTHING = Script(
    [
        [AnswerEvent(THOUGHT, "Let me ")],
        [AnswerEvent(THOUGHT, "see."), AnswerEvent(TEXT, "I l")],
        [AnswerEvent(TEXT, "ook."), *CALL],
        CALL_REST,
    ],
    "tool_calls",
    num_cached=2,
)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


def named_events(body: bytes) -> list[Any]:
    """The events of a stream; each must be named as its data says."""
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompt_of(front_end: LocalFrontEnd) -> str:
    """The last prompt that the engine got."""
    [prompt] = front_end.engine.submitted[-1].prompts.values()
    return bytes(unpack_tokens(prompt)).decode()
