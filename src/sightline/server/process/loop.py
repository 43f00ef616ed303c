"""The loop of the engine process.

loop:  commands that came ─▶ engine ─▶ one step ─▶ what every request gained, in one frame
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Protocol

import msgspec

from sightline.core.errors import QueueFullError, RequestError, SightlineError
from sightline.core.request import EffectiveParams, SamplingParams, Terms
from sightline.engine.embedder import Embedder
from sightline.engine.engine import Engine
from sightline.engine.live import TextPiece
from sightline.engine.steps import StepLoop
from sightline.runner.sampling.logprobs import TokenLogprobs
from sightline.server.process.channel import Channel
from sightline.server.process.frames import unpack_tokens
from sightline.server.process.protocol import (
    Accepted,
    Cancel,
    Command,
    Configure,
    Delta,
    Ended,
    PackedScores,
    Probe,
    Progress,
    Read,
    Refused,
    Report,
    ScoredToken,
    Stop,
    Submit,
    Vector,
    position_scores,
)
from sightline.server.process.window import ReadWindow
from sightline.structured.compiler import PendingGrammar

PROGRESS_SECONDS = 0.25
"""Seconds between two reports of the engine's state while it works."""
TAKE_IN_SECONDS = 0.004
"""How long prompts are taken in before the next step: the requests that run wait for it."""

GRAMMAR_SECONDS = 0.005
"""How long an idle loop waits for commands while grammars are compiled for it."""

_ENCODER = msgspec.msgpack.Encoder()
_PARAMS = msgspec.msgpack.Decoder(SamplingParams)
_UNSHOWN = frozenset(
    {"stop", "logit_bias", "eos_token_ids", "stop_token_ids", "allowed_token_ids", "bad_words", "structured_outputs"}
    | {"reading"}
)
"""Parameters that can be large, and are not repeated to the client."""


class Purpose(Protocol):
    """What an engine process is for: how a command becomes a request, and a request's results become reports."""

    @property
    def engine(self) -> StepLoop[Any, Any, Any]: ...

    def submit(self, prompt: Sequence[int], params: SamplingParams | None, terms: Terms) -> str:
        """Queues a request and returns the engine's id."""

    def prepare(self, params: SamplingParams | None, caller: str) -> PendingGrammar | None:
        """Begins to compile what the parameters hold answers to; None if nothing."""

    def probe(self) -> str:
        """Queues the smallest request."""

    def reports(self, number: int, request_id: str) -> Iterator[Report]:
        """What a request gained since the last call, given the front end's number for it."""

    def accepted(self, number: int, request_id: str) -> Report: ...


class GeneratingPurpose:
    """Prompts to text."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._name = str if engine.tokenizer is None else engine.tokenizer.token_text

    def submit(self, prompt: Sequence[int], params: SamplingParams | None, terms: Terms) -> str:
        if params is None:
            raise RequestError("expected sampling parameters, got none: this engine generates")
        return self.engine.submit(prompt, params, None, terms)

    def prepare(self, params: SamplingParams | None, caller: str) -> PendingGrammar | None:
        return None if params is None else self.engine.prepare(params, caller)

    def probe(self) -> str:
        # With a seed: those of the requests must not depend on how often the engine is probed.
        return self.engine.submit([0], SamplingParams(max_tokens=1, ignore_eos=True, seed=0))

    def accepted(self, number: int, request_id: str) -> Report:
        return Accepted(number, _shown(self.engine.params(request_id)))

    def reports(self, number: int, request_id: str) -> Iterator[Report]:
        while (taken := self.engine.take_piece(request_id)) is not None:
            sequence, piece = taken
            yield Delta(
                number,
                sequence.sequence.index,
                piece.text if sequence.reader is None else "",
                len(piece.token_ids),
                sequence.finish_reason,
                sequence.stop_reason,
                None if sequence.params.logprobs is None else self._scored(piece),
                piece.events,
                piece.num_reasoning,
            )
        if self.engine.is_finished(request_id):
            end = self.engine.pop_end(request_id)
            scores = None if end.prompt_scores is None else pack_scores(end.prompt_scores)
            yield Ended(number, end.error, end.num_cached_tokens, end.phases, scores)

    def _scored(self, piece: TextPiece) -> bytes:
        """Generated tokens with their log probabilities, named: events are made of them as they come."""
        tokens = [
            ScoredToken(offset, position_scores(entry.tokens, entry.logprobs, entry.ranks, self._name))
            for offset, entry in zip(piece.offsets, piece.scores, strict=True)
        ]
        return _ENCODER.encode(tokens)


class EmbeddingPurpose:
    """Texts to vectors."""

    def __init__(self, embedder: Embedder) -> None:
        self.engine = embedder

    def submit(self, prompt: Sequence[int], params: SamplingParams | None, terms: Terms) -> str:
        if params is not None:
            raise RequestError("expected no sampling parameters, got some: this engine embeds")
        return self.engine.submit(prompt, None, None, terms)

    def prepare(self, params: SamplingParams | None, caller: str) -> PendingGrammar | None:
        del params, caller
        return None

    def probe(self) -> str:
        return self.engine.submit([0], None)

    def accepted(self, number: int, request_id: str) -> Report:
        del request_id
        return Accepted(number, b"")

    def reports(self, number: int, request_id: str) -> Iterator[Report]:
        if self.engine.is_finished(request_id):
            output = self.engine.pop_output(request_id)
            if output.vector is not None:
                yield Vector(number, output.vector.numpy().astype("<f4").tobytes())
            yield Ended(number, output.error, output.num_cached, output.phases, None)


class PendingPrompts:
    """The prompts of one command that the engine has not taken in."""

    def __init__(self, command: Submit, prepare: Callable[[SamplingParams | None, str], PendingGrammar | None]) -> None:
        self.params = None if command.params is None else _PARAMS.decode(command.params)
        self._grammar = prepare(self.params, command.terms.caller)
        self.terms = command.terms
        self.max_unread = command.max_unread
        self._prompts = dict(command.prompts)

    def take(self) -> tuple[int, Sequence[int]]:
        number = next(iter(self._prompts))
        return number, unpack_tokens(self._prompts.pop(number))

    @property
    def is_empty(self) -> bool:
        return not self._prompts

    @property
    def is_ready(self) -> bool:
        """True if submitting would not wait for a grammar."""
        return self._grammar is None or self._grammar.is_settled

    def check(self) -> None:
        """Raises `RequestError` if the grammar cannot be had. To wait for it again would hold up the loop."""
        if self._grammar is not None:
            self._grammar.result()

    def drop(self, number: int) -> None:
        self._prompts.pop(number, None)


class Worker:
    """Moves commands into the engine, and what it produces out of it."""

    def __init__(self, purpose: Purpose, channel: Channel) -> None:
        self._purpose = purpose
        self._engine = purpose.engine
        self._channel = channel
        self._pending: deque[PendingPrompts] = deque()
        """Commands whose prompts are taken in a few at a time, one of each command in turn."""
        self._jobs: dict[int, str] = {}
        """The engine's id for each of the front end's numbers."""
        self._windows: dict[int, ReadWindow] = {}
        """The reports that the client of a stream has not read, by number."""
        self._probe: str | None = None
        self._outgoing: list[Report] = []
        self._is_stopping = False
        self._told_at = -PROGRESS_SECONDS

    def run(self) -> None:
        """Works until told to stop."""
        while not self._is_stopping:
            # Where all that is left is paused, its next deadline ends the wait.
            # Where only grammars are being compiled, they are looked after often.
            is_idle = not self._engine.has_work and not any(each.is_ready for each in self._pending)
            seconds = GRAMMAR_SECONDS if self._pending else self._engine.idle_seconds
            for command in self._channel.take(wait=is_idle, seconds=seconds):
                self._obey(command)
            self._take_in()
            if self._engine.has_work:
                self._engine.step()
                self._collect()
                self._tell_progress()
            if self._outgoing:
                self._channel.send(self._outgoing)
                self._outgoing = []
            if self._engine.fault is not None:
                raise self._engine.fault

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._pending.append(PendingPrompts(command, self._purpose.prepare))
            case Read(number, count, num_bytes):
                if number in self._windows and self._windows[number].read(count, num_bytes):
                    self._engine.resume(self._jobs[number])
            case Cancel(number):
                request_id = self._jobs.pop(number, None)
                self._windows.pop(number, None)
                for pending in self._pending:
                    pending.drop(number)
                if request_id is not None:
                    self._engine.forget(request_id)
                    if not self._engine.has_work:
                        # No step will report that what it held is free.
                        self._outgoing.append(Progress(self._engine.metrics()))
            case Probe():
                if not self._engine.has_work and self._probe is None:
                    self._probe = self._purpose.probe()
            case Stop():
                self._is_stopping = True
            case Configure():
                raise RequestError("expected a command for a built engine, got Configure")

    def _take_in(self) -> None:
        """Submits prompts for a short while, at least one."""
        until = time.monotonic() + TAKE_IN_SECONDS
        waiting = deque[PendingPrompts]()
        for _ in range(len(self._pending)):
            pending = self._pending.popleft()
            (self._pending if pending.is_ready or pending.is_empty else waiting).append(pending)
        while self._pending:
            pending = self._pending.popleft()
            if pending.is_empty:
                continue
            self._submit(*pending.take(), pending)
            self._pending.append(pending)
            if time.monotonic() >= until:
                break
        self._pending += waiting

    def _submit(self, number: int, prompt: Sequence[int], pending: PendingPrompts) -> None:
        try:
            pending.check()
            request_id = self._purpose.submit(prompt, pending.params, pending.terms)
        except SightlineError as error:
            is_full = isinstance(error, QueueFullError)
            self._outgoing.append(Refused(number, is_full=is_full, message=str(error)))
            return
        self._jobs[number] = request_id
        if pending.max_unread is not None:
            self._windows[number] = ReadWindow(pending.max_unread)
        self._outgoing.append(self._purpose.accepted(number, request_id))

    def _collect(self) -> None:
        """What every request gained in the step. A request whose client has too much to read pauses."""
        for number, request_id in tuple(self._jobs.items()):
            for report in self._purpose.reports(number, request_id):
                self._outgoing.append(report)
                match report:
                    case Delta(num_content_bytes=num_bytes) if number in self._windows and self._windows[number].sent(
                        num_bytes
                    ):
                        self._engine.pause(request_id)
                    case Ended():
                        del self._jobs[number]
                        self._windows.pop(number, None)
        if self._probe is not None and self._engine.is_finished(self._probe):
            self._engine.forget(self._probe)
            self._probe, self._told_at = None, -PROGRESS_SECONDS

    def _tell_progress(self) -> None:
        """Reports the engine's state now and then, and always after the first and the last step of some work."""
        now, is_idle = time.monotonic(), not self._engine.has_work
        if is_idle or now - self._told_at >= PROGRESS_SECONDS:
            self._outgoing.append(Progress(self._engine.metrics()))
            self._told_at = -PROGRESS_SECONDS if is_idle else now


def _shown(params: EffectiveParams) -> bytes:
    """The parameters in effect, as JSON."""
    names = [each.name for each in fields(params) if each.name not in _UNSHOWN]
    return msgspec.json.encode({name: vars(params)[name] for name in names})


def pack_scores(scores: Sequence[TokenLogprobs]) -> bytes:
    """Log probabilities of a prompt, which may be many: only the desk that writes them down reads them."""
    counts, tokens, logprobs, ranks = array("i"), array("i"), array("d"), array("i")
    for entry in scores:
        counts.append(len(entry.tokens))
        tokens.extend(entry.tokens)
        logprobs.extend(entry.logprobs)
        ranks.extend(entry.ranks)
    return _ENCODER.encode(PackedScores(counts.tobytes(), tokens.tobytes(), logprobs.tobytes(), ranks.tobytes()))
