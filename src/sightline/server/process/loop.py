"""The loop of the engine process.

loop:  commands that came ─▶ engine ─▶ one step ─▶ what every request gained, in one frame
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from sightline.core.errors import QueueFullError, RequestError, SightlineError
from sightline.core.request import SamplingParams, Terms
from sightline.engine.embedder import Embedder
from sightline.engine.engine import Engine
from sightline.engine.steps import StepLoop
from sightline.server.process.channel import Channel
from sightline.server.process.protocol import (
    Accepted,
    Cancel,
    Command,
    Configure,
    Delta,
    Ended,
    Probe,
    Progress,
    Refused,
    Report,
    Stop,
    Submit,
    Vector,
)

PROGRESS_SECONDS = 0.25
"""Between two reports of the engine's state while it works."""


class Purpose(Protocol):
    """What an engine process is for: how a command becomes a request, and a request's results become reports."""

    @property
    def engine(self) -> StepLoop[Any, Any, Any]: ...

    def submit(self, prompt: Sequence[int], params: SamplingParams | None, terms: Terms) -> str:
        """Queues a request and returns the engine's id."""

    def probe(self) -> str:
        """Queues the smallest request."""

    def reports(self, number: int, request_id: str) -> Iterator[Report]:
        """What a request gained since the last call, given the front end's number for it."""

    def accepted(self, number: int, request_id: str) -> Report: ...


class GeneratingPurpose:
    """Prompts to text."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def submit(self, prompt: Sequence[int], params: SamplingParams | None, terms: Terms) -> str:
        if params is None:
            raise RequestError("expected sampling parameters, got none: this engine generates")
        return self.engine.submit(prompt, params, None, terms)

    def probe(self) -> str:
        return self.engine.submit([0], SamplingParams(max_tokens=1, ignore_eos=True))

    def accepted(self, number: int, request_id: str) -> Report:
        return Accepted(number, self.engine.params(request_id))

    def reports(self, number: int, request_id: str) -> Iterator[Report]:
        while (delta := self.engine.take_delta(request_id)) is not None:
            yield Delta(
                number,
                delta.index,
                delta.text,
                len(delta.token_ids),
                delta.finish_reason,
                delta.stop_reason,
                delta.logprobs,
            )
        if self.engine.is_finished(request_id):
            output = self.engine.pop_output(request_id)
            yield Ended(number, output.error, output.num_cached_tokens, output.queue_seconds, output.prompt_logprobs)


class EmbeddingPurpose:
    """Texts to vectors."""

    def __init__(self, embedder: Embedder) -> None:
        self.engine = embedder

    def submit(self, prompt: Sequence[int], params: SamplingParams | None, terms: Terms) -> str:
        if params is not None:
            raise RequestError("expected no sampling parameters, got some: this engine embeds")
        return self.engine.submit(prompt, None, None, terms)

    def probe(self) -> str:
        return self.engine.submit([0], None)

    def accepted(self, number: int, request_id: str) -> Report:
        del request_id
        return Accepted(number, None)

    def reports(self, number: int, request_id: str) -> Iterator[Report]:
        if self.engine.is_finished(request_id):
            output = self.engine.pop_output(request_id)
            if output.vector is not None:
                yield Vector(number, output.vector.numpy().astype("<f4").tobytes())
            yield Ended(number, output.error, output.num_cached, output.queue_seconds, None)


class Worker:
    """Moves commands into the engine, and what it produces out of it."""

    def __init__(self, purpose: Purpose, channel: Channel) -> None:
        self._purpose = purpose
        self._engine = purpose.engine
        self._channel = channel
        self._jobs: dict[int, str] = {}
        """By the front end's number, the engine's id."""
        self._probe: str | None = None
        self._outgoing: list[Report] = []
        self._is_stopping = False
        self._told_at = -PROGRESS_SECONDS

    def run(self) -> None:
        """Works until told to stop."""
        while not self._is_stopping:
            had_work = self._engine.has_work
            for command in self._channel.take(wait=not had_work):
                self._obey(command)
            if self._engine.has_work:
                self._engine.step()
                self._collect()
                self._tell_progress()
            elif had_work:
                # The last request was cancelled: no step will report that what it held is free.
                self._outgoing.append(Progress(self._engine.metrics()))
            if self._outgoing:
                self._channel.send(self._outgoing)
                self._outgoing = []
            if self._engine.fault is not None:
                raise self._engine.fault

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(prompts, params, terms):
                for number, prompt in prompts.items():
                    self._submit(number, prompt, params, terms)
            case Cancel(number):
                request_id = self._jobs.pop(number, None)
                if request_id is not None:
                    self._engine.forget(request_id)
            case Probe():
                if not self._engine.has_work and self._probe is None:
                    self._probe = self._purpose.probe()
            case Stop():
                self._is_stopping = True
            case Configure():
                raise RequestError("expected a command for a built engine, got Configure")

    def _submit(self, number: int, prompt: Sequence[int], params: SamplingParams | None, terms: Terms) -> None:
        try:
            request_id = self._purpose.submit(prompt, params, terms)
        except SightlineError as error:
            is_full = isinstance(error, QueueFullError)
            self._outgoing.append(Refused(number, is_full=is_full, message=str(error)))
            return
        self._jobs[number] = request_id
        self._outgoing.append(self._purpose.accepted(number, request_id))

    def _collect(self) -> None:
        """What every request gained in the step."""
        for number, request_id in tuple(self._jobs.items()):
            for report in self._purpose.reports(number, request_id):
                self._outgoing.append(report)
                match report:
                    case Ended():
                        del self._jobs[number]
        if self._probe is not None and self._engine.is_finished(self._probe):
            self._engine.forget(self._probe)
            self._probe, self._told_at = None, -PROGRESS_SECONDS

    def _tell_progress(self) -> None:
        """Reports the engine's state now and then, and always after the first and the last step of some work."""
        now, is_idle = time.monotonic(), not self._engine.has_work
        if is_idle or now - self._told_at >= PROGRESS_SECONDS:
            self._outgoing.append(Progress(self._engine.metrics()))
            self._told_at = -PROGRESS_SECONDS if is_idle else now
