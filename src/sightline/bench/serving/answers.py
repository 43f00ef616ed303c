"""Responses of an OpenAI-compatible server: whole bodies, streams, usage and errors. Everything is validated.

Does not know how responses arrive or what is measured.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sightline.core.errors import SightlineError

MAX_EVENT = 1 << 26
"""Most bytes of a server-sent event."""
_SHOWN = 200
"""Characters of an unexpected value that a message shows."""
_DONE = b"[DONE]"
_DEFAULT_WAIT = 1.0
"""Seconds before a refused request is sent again if Retry-After is missing or unreadable."""
_LEAST_WAIT = 0.05
_Count = Annotated[int, Meta(ge=0)]
_DecodedT = TypeVar("_DecodedT")


@dataclass(frozen=True)
class ReportedUsage:
    """Token counts as the server reports them."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """Cached prompt tokens; None if the server does not report them."""


class _Details(Struct):
    cached_tokens: _Count | None = None


class _Usage(Struct):
    prompt_tokens: _Count
    completion_tokens: _Count
    prompt_tokens_details: _Details | None = None

    def reported(self) -> ReportedUsage:
        cached = None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens
        return ReportedUsage(self.prompt_tokens, self.completion_tokens, cached)


class _Message(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    text: str | UnsetType | None = UNSET
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None

    def said(self) -> str:
        """The text of a completion, message or delta, reasoning included."""
        part = self.delta or self.message
        if self.text is not UNSET:
            return self.text or ""
        if part is None:
            raise SightlineError("expected a choice with text, a delta or a message, got none of them")
        return part.content or part.reasoning_content or ""


class _Completion(Struct):
    choices: list[_Choice]
    id: str | None = None
    usage: _Usage | None = None


class _Problem(Struct):
    message: str | None = None


class _Refusal(Struct):
    error: _Problem | str | None = None
    message: str | None = None
    detail: str | None = None


_COMPLETIONS = msgspec.json.Decoder(_Completion)


class StreamedAnswer:
    """A streamed completion, as far as it has arrived."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.times: list[float] = []
        """Arrival time of each piece of text."""
        self.usage: ReportedUsage | None = None
        self.finish_reason: str | None = None
        self.response_id: str | None = None
        self._events = EventSplitter()
        self._done = False

    def take(self, content: bytes, now: float) -> None:
        """Adds a part of the body that arrived at `now`. Raises if it is not a stream of completions."""
        for event in self._events.feed(content):
            if self._done:
                raise SightlineError(f"expected nothing after [DONE], got {shown(event)}")
            if event == _DONE:
                self._done = True
            else:
                self._take_chunk(_completion(event), now)

    def end(self) -> None:
        """Raises if the body ended before the completion did."""
        if not self._done:
            inside = ", inside an event" if self._events.unfinished else ""
            raise SightlineError(f"expected [DONE] at the end of the stream, got an end without it{inside}")
        if self.usage is None:
            raise SightlineError("expected usage in the stream, as stream_options.include_usage asks, got none")
        if self.finish_reason is None:
            raise SightlineError("expected a finish_reason in the stream, got none")

    def _take_chunk(self, chunk: _Completion, now: float) -> None:
        if chunk.id and self.response_id not in (None, chunk.id):
            raise SightlineError(f"expected chunks with one id, {self.response_id!r}, got {shown(chunk.id)}")
        self.response_id = chunk.id or self.response_id
        for choice in chunk.choices[:1]:
            if text := choice.said():
                if self.finish_reason is not None:
                    raise SightlineError(f"expected no text after the finish_reason, got {shown(text)}")
                self.pieces.append(text)
                self.times.append(now)
            self.finish_reason = choice.finish_reason or self.finish_reason
        if chunk.usage is not None:
            self.usage = chunk.usage.reported()


class EventSplitter:
    """Splits bytes into server-sent events. Bytes may be cut anywhere; lines end in LF, CR LF or CR."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False
        """The last piece ended in CR, whose LF may follow."""
        self._data: list[bytes] = []
        """Data lines of the unfinished event."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of every event that this piece completes."""
        if self._after_return and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_return = piece.endswith(b"\r")
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT:
            raise SightlineError(f"expected events of at most {MAX_EVENT} bytes, got a longer one")
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    @property
    def unfinished(self) -> bool:
        """Whether an event has started that is not complete."""
        return bool(self._rest.strip() or self._data)


def read_whole(body: bytes) -> tuple[str, str | None, ReportedUsage]:
    """Returns text, finish_reason and usage of a completion that was not streamed."""
    completion = _completion(body)
    if not completion.choices or completion.usage is None:
        raise SightlineError(f"expected a completion with choices and usage, got {shown(body)}")
    [choice, *_] = completion.choices
    return choice.said(), choice.finish_reason, completion.usage.reported()


def decoded(body: bytes, kind: type[_DecodedT]) -> _DecodedT | None:
    """Returns JSON as `kind`, or None if it is anything else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def error_message(body: bytes) -> str:
    """Returns the error that a JSON body reports in any of the usual places, or else the body itself."""
    found = decoded(body, _Refusal) or _Refusal()
    inner = found.error if isinstance(found.error, str | None) else found.error.message
    message = inner or found.message or found.detail
    return shown(body) if message is None else message[:_SHOWN]


def refusal(status: int, body: bytes) -> str:
    """Describes a response whose status is not 200."""
    return f"HTTP {status}: {error_message(body)}" if body else f"HTTP {status}"


def seconds_to_wait(retry_after: str | None) -> float:
    """Reads a Retry-After header, in seconds or as a date; one second if it is missing or unreadable."""
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


def shown(value: object) -> str:
    """Returns as much of a value as fits in a message."""
    text = repr(value.decode(errors="replace") if isinstance(value, bytes) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _completion(body: bytes) -> _Completion:
    try:
        return _COMPLETIONS.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SightlineError(f"expected a completion, got {error_message(body)}: {error}") from None
