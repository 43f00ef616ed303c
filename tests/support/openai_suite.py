"""What the proofs with OpenAI's own client share: clients, streams put together again, metrics as numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
    ChatCompletionTokenLogprob,
)
from prometheus_client.parser import text_string_to_metric_families

from support.serving import ServedProcess

MODEL = "SmolLM2-135M-Instruct.Q4_1"
"""The default model's served name."""
CANCEL_SECONDS = 30.0
"""In which the engine must have dropped what nobody waits for."""


def asking(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@contextmanager
def openai_client(server: ServedProcess, key: str = "no key is needed") -> Iterator[OpenAI]:
    """A client that never tries again: every answer is the server's first."""
    with OpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=60.0) as client:
        yield client


@dataclass(frozen=True)
class Scored:
    """The older log probabilities, one of each for every token."""

    tokens: list[str]
    values: list[float | None]
    rivals: list[dict[str, float] | None] | None
    offsets: list[int]


@dataclass
class Joined:
    """A stream, put together again."""

    texts: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, list[str]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usages: list[CompletionUsage | None] = field(default_factory=list)
    """Of every event, in order."""
    choice_counts: list[int] = field(default_factory=list)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)

    def take(self, index: int, text: str, reason: str | None) -> None:
        if index in self.reasons:
            raise AssertionError(f"expected nothing of choice {index} after its end, got {text!r}")
        self.texts[index] = self.texts.get(index, "") + text
        self.pieces.setdefault(index, []).append(text)
        if reason is not None:
            self.reasons[index] = reason


def joined_chat(stream: Iterable[ChatCompletionChunk]) -> Joined:
    joined = Joined()
    for chunk in stream:
        joined.ids.add(chunk.id)
        joined.usages.append(chunk.usage)
        joined.choice_counts.append(len(chunk.choices))
        for choice in chunk.choices:
            joined.take(choice.index, choice.delta.content or "", choice.finish_reason)
            if choice.logprobs is not None:
                joined.logprobs.setdefault(choice.index, []).extend(choice.logprobs.content or [])
    return joined


def joined_completion(stream: Iterable[Completion]) -> Joined:
    joined = Joined()
    for event in stream:
        joined.ids.add(event.id)
        joined.usages.append(event.usage)
        joined.choice_counts.append(len(event.choices))
        for choice in event.choices:
            # An event before the last has no reason, whatever the client's types say.
            reason: str | None = choice.finish_reason
            joined.take(choice.index, choice.text, reason)
            if choice.logprobs is not None:
                joined.logprobs.setdefault(choice.index, []).append(choice.logprobs)
    return joined


def samples(server: ServedProcess, headers: dict[str, str] | None = None) -> dict[str, float]:
    """Every sample that `/metrics` shows, without the prefix and the model: `name`, or `name{label="value"}`."""
    status, text = server.get("/metrics", headers)
    assert status == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name")
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("sightline_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def wait_for_running(server: ServedProcess, count: int, seconds: float, headers: dict[str, str] | None = None) -> float:
    """How long it took until so many sequences ran; an error where they do not in time."""
    began = time.monotonic()
    while True:
        running = samples(server, headers)["num_requests_running"]
        waited = time.monotonic() - began
        if running == count:
            return waited
        if waited > seconds:
            raise AssertionError(f"expected {count} sequences that run within {seconds} s, got {running}")
        time.sleep(0.02)


def chat(client: OpenAI, text: str, **fields: Any) -> ChatCompletion:
    """One whole answer, greedy unless something else is asked for."""
    fields = {"max_tokens": 8, "temperature": 0} | fields
    return client.chat.completions.create(model=MODEL, messages=asking(text), **fields)


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Completion:
    """One whole continuation, or several, greedy unless something else is asked for."""
    fields = {"max_tokens": 8, "temperature": 0} | fields
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def said(answer: ChatCompletion) -> list[str]:
    """The answers' texts, in the order of their indices."""
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [choice.message.content or "" for choice in answer.choices]


def tokens_of(answer: ChatCompletion) -> list[ChatCompletionTokenLogprob]:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return logprobs.content


def scored(choice: CompletionChoice) -> Scored:
    assert choice.logprobs is not None
    told = choice.logprobs.model_dump()
    found = Scored(told["tokens"], told["token_logprobs"], told["top_logprobs"], told["text_offset"])
    assert len(found.tokens) == len(found.values) == len(found.offsets)
    assert found.rivals is None or len(found.rivals) == len(found.tokens)
    return found


def usage_of(answer: ChatCompletion | Completion) -> CompletionUsage:
    assert answer.usage is not None
    return answer.usage


def num_cached(answer: ChatCompletion | Completion) -> int:
    details = usage_of(answer).prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    return details.cached_tokens
