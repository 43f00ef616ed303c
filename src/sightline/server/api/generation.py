"""The handlers of completions: from the engine's order to the answer or its stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass

from sightline.server.api.streams import AnswerStream
from sightline.server.desks.protocol import Continuation, FormName, Generated, Head
from sightline.server.http.errors import ApiError, failed, unavailable
from sightline.server.http.limits import HeldBytes
from sightline.server.http.routing import Call, Header, Reply, Stream
from sightline.server.process.port import AnswerTooLargeError, EngineDownError
from sightline.server.process.protocol import Delta, Ended
from sightline.server.service import RESTART_SECONDS, Running, Service

KEPT_BYTES = 6
"""Memory of a character that was streamed: it is kept twice, and once more on its way to a desk."""


class GenerationHandler:
    """The handler of one kind of completion."""

    def __init__(self, service: Service, form: FormName, stream: type[AnswerStream]) -> None:
        self._service = service
        self._form = form
        self._stream = stream

    async def handle(self, call: Call) -> Reply | Stream:
        """Runs a request. Returns its answer, or its stream once the engine has accepted it."""
        with ExitStack() as held:
            order = await self._service.order(call, self._form, held)
            running = await self._service.start(call, order, held.pop_all())
        head = Head(self._stream.id_prefix + call.answer_id, int(time.time()), order.model)
        call.trace.response_id = head.id
        headers: tuple[Header, ...] = ((b"x-sightline-sampling", running.sampling),)
        continuations = [Continuation() for _ in range(len(order.prompts) * order.n)]
        outcome = Generated(running.num_prompt_tokens, order.n, continuations)
        if order.stream is not None:
            call.held.push(running.release)
            stream = self._stream(head, order.stream, outcome)
            return Stream(self._events(call, running, Streamed(order.ticket, head, outcome, stream)), headers)
        with running.release:
            await self._finish(call, running, outcome)
            return await self._service.write(call, self._form, order.ticket, head, outcome, headers)

    async def _finish(self, call: Call, running: Running, outcome: Generated) -> None:
        """Collects all reports. Raises `ApiError` if a continuation failed."""
        try:
            async for place, report in running.answers.reports():
                if (delta := take(report, place, outcome)) is not None:
                    outcome.continuations[place * outcome.n + delta.index].keep(delta)
        except (EngineDownError, AnswerTooLargeError) as error:
            raise unavailable(str(error), RESTART_SECONDS) from error
        _tell(call, outcome)

    async def _events(self, call: Call, running: Running, streamed: Streamed) -> AsyncGenerator[bytes, None]:
        """The stream. An error is its last event."""
        stream, outcome = streamed.stream, streamed.outcome
        # What later events repeat is beside the reports, which count until they are sent.
        held = call.held.enter_context(self._service.answers.opened(call.caller))
        try:
            for event in stream.begin():
                yield event
            async for place, report in running.answers.reports():
                if (delta := take(report, place, outcome)) is None:
                    continue
                if stream.keeps_text:
                    _keep(delta, outcome.continuations[place * outcome.n + delta.index], held)
                for event in stream.tell(place * outcome.n + delta.index, delta):
                    yield event
            body = b"" if not stream.ends_with_body else await self._whole(call, streamed)
            for event in stream.end(body):
                yield event
        except (EngineDownError, AnswerTooLargeError) as error:
            failure = unavailable(str(error), RESTART_SECONDS)
        except ApiError as error:
            failure = error
        else:
            return
        finally:
            _tell(call, outcome)
        # The status has been sent.
        call.facts["error"] = failure.code
        for event in stream.fail(failure):
            yield event

    async def _whole(self, call: Call, streamed: Streamed) -> bytes:
        """The answer as it would be sent without a stream."""
        reply = await self._service.write(call, self._form, streamed.ticket, streamed.head, streamed.outcome, ())
        return reply.body


@dataclass(frozen=True)
class Streamed:
    """An answer that is streamed, and what is needed to write it as a whole."""

    ticket: bytes
    head: Head
    outcome: Generated
    stream: AnswerStream


def _keep(delta: Delta, continuation: Continuation, held: HeldBytes) -> None:
    """Keeps what was streamed. Raises `AnswerTooLargeError` if there is no room for it."""
    length = len(delta.text) + sum(len(event.text) for event in delta.events)
    if not held.take(KEPT_BYTES * length):
        raise AnswerTooLargeError("too much of the answers waits to be sent; ask for less")
    continuation.keep(delta)


def take(report: Delta | Ended, place: int, outcome: Generated) -> Delta | None:
    """Adds a report to the outcome. Returns it if it is a piece of text; raises `ApiError` if the prompt failed."""
    first = place * outcome.n
    match report:
        case Delta(index=index):
            outcome.continuations[first + index].count(report)
            return report
        case Ended(error=error, num_cached=num_cached, prompt_logprobs=prompt_logprobs):
            outcome.num_cached += num_cached
            if prompt_logprobs is not None:
                outcome.prompt_logprobs[place] = prompt_logprobs
            ended = outcome.continuations[first : first + outcome.n]
            if error is not None and "error" in {each.finish_reason for each in ended}:
                raise failed(f"the engine could not finish the request: {error}")
            if error is not None and not any(each.num_tokens for each in ended):
                raise unavailable(f"the request did not start: {error}", RESTART_SECONDS)
            return None


def _tell(call: Call, outcome: Generated) -> None:
    """Notes how a request ended, or was left."""
    call.facts["completion_tokens"] = outcome.num_generated
    call.trace.finish_reasons = tuple(each.finish_reason or "" for each in outcome.continuations)
