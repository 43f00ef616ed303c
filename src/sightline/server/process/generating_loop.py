"""The loop of an engine process that generates.

loop:  commands that came ─▶ engine ─▶ one step ─▶ what every request gained, in one frame
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sightline.core.errors import QueueFullError, RequestError, SightlineError
from sightline.core.request import SamplingParams, Terms
from sightline.engine.engine import Engine
from sightline.server.process.channel import Channel
from sightline.server.process.protocol import (
    Accepted,
    Cancel,
    Command,
    Configure,
    Delta,
    Embed,
    Ended,
    Probe,
    Progress,
    Refused,
    Report,
    Stop,
    Submit,
)

PROGRESS_SECONDS = 0.25
"""Between two reports of the engine's state while it works."""


class Worker:
    """Moves commands into the engine, and what it produces out of it."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._jobs: dict[int, str] = {}
        """By the front end's number, the engine's id."""
        self._probe: str | None = None
        self._outgoing: list[Report] = []
        self._is_stopping = False
        self._told_at = -PROGRESS_SECONDS

    def run(self) -> None:
        """Until told to stop."""
        while not self._is_stopping:
            had_work = self._engine.has_work
            for command in self._channel.take(wait=not had_work):
                self._obey(command)
            if self._engine.has_work:
                self._engine.step()
                self._collect()
                self._tell_progress()
            elif had_work:
                # The last was cancelled: no step will tell that what it held is free.
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
                    self._probe = self._engine.submit([0], SamplingParams(max_tokens=1, ignore_eos=True))
            case Stop():
                self._is_stopping = True
            case Configure() | Embed():
                raise RequestError(f"expected what a generating engine does, got {type(command).__name__}")

    def _submit(self, number: int, prompt: Sequence[int], params: SamplingParams, terms: Terms) -> None:
        try:
            request_id = self._engine.submit(prompt, params, None, terms)
        except QueueFullError as error:
            self._outgoing.append(Refused(number, is_full=True, message=str(error)))
            return
        except SightlineError as error:
            self._outgoing.append(Refused(number, is_full=False, message=str(error)))
            return
        self._jobs[number] = request_id
        self._outgoing.append(Accepted(number, self._engine.params(request_id)))

    def _collect(self) -> None:
        """What every request gained in the step."""
        for number, request_id in tuple(self._jobs.items()):
            while (delta := self._engine.take_delta(request_id)) is not None:
                self._outgoing.append(
                    Delta(
                        number,
                        delta.index,
                        delta.text,
                        len(delta.token_ids),
                        delta.finish_reason,
                        delta.stop_reason,
                        delta.logprobs,
                    )
                )
            if self._engine.is_finished(request_id):
                output = self._engine.pop_output(request_id)
                self._outgoing.append(
                    Ended(number, output.error, output.num_cached_tokens, output.queue_seconds, output.prompt_logprobs)
                )
                del self._jobs[number]
        if self._probe is not None and self._engine.is_finished(self._probe):
            self._engine.forget(self._probe)
            self._probe, self._told_at = None, -PROGRESS_SECONDS

    def _tell_progress(self) -> None:
        """Now and then, and always before there is nothing left to do."""
        now = time.monotonic()
        if not self._engine.has_work or now - self._told_at >= PROGRESS_SECONDS:
            self._outgoing.append(Progress(self._engine.metrics()))
            self._told_at = now
