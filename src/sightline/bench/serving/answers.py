"""What an OpenAI-compatible server says: whole bodies, streams, usage, errors. All of it is checked, none trusted.

Owns the reading of answers. Does not know how they come, nor what is measured of them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from sightline.bench.serving.http_bodies import EventSplitter
from sightline.core.errors import SightlineError

_SHOWN = 200
"""Characters of something unexpected that a message shows."""
_DONE = b"[DONE]"
_DEFAULT_WAIT = 1.0
_LEAST_WAIT = 0.05
"""Seconds before a refused request is sent again: where the server does not say, and where it says none."""


@dataclass(frozen=True)
class ReportedUsage:
    """Tokens, as the server counts them."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """Of the prompt; None where the server does not tell."""

    @staticmethod
    def read(found: object) -> ReportedUsage:
        """Raises where it is not as OpenAI has it."""
        if not isinstance(found, dict):
            raise SightlineError(f"expected usage with the tokens of prompt and answer, got {shown(found)}")
        counts = [found.get("prompt_tokens"), found.get("completion_tokens")]
        details = found.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        prompt, output = (count if _is_count(count) else None for count in counts)
        if prompt is None or output is None or not (cached is None or _is_count(cached)):
            raise SightlineError(f"expected whole numbers of tokens in usage, got {shown(found)}")
        return ReportedUsage(prompt, output, cached)


class StreamedAnswer:
    """A stream as far as it has come."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.times: list[float] = []
        """When each piece of text came."""
        self.usage: ReportedUsage | None = None
        self.finish_reason: str | None = None
        self.response_id: str | None = None
        self._events = EventSplitter()
        self._done = False

    def take(self, content: bytes, now: float) -> None:
        """What came of the body at `now`. Raises where it is no stream of completions."""
        for event in self._events.feed(content):
            if self._done:
                raise SightlineError(f"expected nothing behind [DONE], got {shown(event)}")
            if event == _DONE:
                self._done = True
            else:
                self._take_chunk(read_object(event), now)

    def end(self) -> None:
        """The body is over. Raises where the answer is not."""
        if not self._done:
            inside = ", inside of an event" if self._events.unfinished else ""
            raise SightlineError(f"expected [DONE] at the end of the stream, got an end without it{inside}")
        if self.usage is None:
            raise SightlineError("expected usage in the stream, as stream_options.include_usage asks, got none")
        if self.finish_reason is None:
            raise SightlineError("expected a finish_reason in the stream, got none")

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def _take_chunk(self, chunk: Mapping[str, object], now: float) -> None:
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise SightlineError(f"expected choices in a chunk, got {error_message(chunk)}")
        self._take_id(chunk.get("id"))
        if choices:
            text, reason = read_choice(choices[0])
            if text:
                if self.finish_reason is not None:
                    raise SightlineError(f"expected no text behind the finish_reason, got {shown(text)}")
                self.pieces.append(text)
                self.times.append(now)
            self.finish_reason = reason or self.finish_reason
        if chunk.get("usage") is not None:
            self.usage = ReportedUsage.read(chunk["usage"])

    def _take_id(self, found: object) -> None:
        if not found or found == self.response_id:
            return
        if self.response_id is not None or not isinstance(found, str):
            raise SightlineError(f"expected chunks with one id, {self.response_id!r}, got {shown(found)}")
        self.response_id = found


def read_choice(choice: object) -> tuple[str, str | None]:
    """The text of a completion, a message or a part of either, reasoning included, and why it ended."""
    if not isinstance(choice, dict):
        raise SightlineError(f"expected an object as a choice, got {shown(choice)}")
    if "text" in choice:
        text = choice["text"] or ""
    else:
        part = choice.get("delta", choice.get("message"))
        if not isinstance(part, dict):
            raise SightlineError(f"expected a choice with text, a delta or a message, got {shown(choice)}")
        text = part.get("content") or part.get("reasoning_content") or ""
    reason = choice.get("finish_reason")
    if not isinstance(text, str) or not (reason is None or isinstance(reason, str)):
        raise SightlineError(f"expected a choice of text, got {shown(choice)}")
    return text, reason


def read_whole(body: bytes) -> tuple[str, str | None, ReportedUsage]:
    """Text, reason and usage of an answer that was not streamed."""
    answer = read_object(body)
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise SightlineError(f"expected an answer with choices, got {error_message(answer)}")
    return *read_choice(choices[0]), ReportedUsage.read(answer.get("usage"))


def read_object(text: bytes) -> Mapping[str, object]:
    """JSON that is an object; raises where it is not."""
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise SightlineError(f"expected JSON, got {shown(text)}") from None
    if not isinstance(found, dict):
        raise SightlineError(f"expected a JSON object, got {shown(text)}")
    return found


def error_message(answer: Mapping[str, object]) -> str:
    """What an answer says about what went wrong, in any of the usual places; else the answer itself."""
    error = answer.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    message = next((found for found in (inner, answer.get("message"), answer.get("detail")) if found), answer)
    return message[:_SHOWN] if isinstance(message, str) else shown(message)


def refusal(status: int, body: bytes) -> str:
    """The line to tell of an answer that is not 200."""
    try:
        return f"HTTP {status}: {error_message(read_object(body))}"
    except SightlineError:
        return f"HTTP {status}: {shown(body)}" if body else f"HTTP {status}"


def seconds_to_wait(retry_after: str | None) -> float:
    """What a Retry-After header asks for, in seconds or as a date; a second where it asks for nothing readable."""
    if retry_after is None:
        return _DEFAULT_WAIT
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return _DEFAULT_WAIT
    return max(seconds, _LEAST_WAIT) if math.isfinite(seconds) else _DEFAULT_WAIT


def shown(what: object) -> str:
    """As much of it as fits in a message."""
    text = what.decode(errors="replace") if isinstance(what, bytes) else what
    told = repr(text)
    return told if len(told) <= _SHOWN else f"{told[:_SHOWN]}…"


def _is_count(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 0
