"""The handlers of completions: from the engine's order to the answer or its stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack

import msgspec

from sightline.server.api.events import Chunks
from sightline.server.desks.protocol import Continuation, FormName, Generated, Head
from sightline.server.http.errors import ApiError, failed, unavailable
from sightline.server.http.routing import Call, Header, Reply, Stream
from sightline.server.process.port import AnswerTooLargeError, EngineDownError
from sightline.server.process.protocol import Delta, Ended
from sightline.server.service import RESTART_SECONDS, Running, Service

_ENCODER = msgspec.json.Encoder()


class GenerationHandler:
    """The handler of one kind of completion."""

    def __init__(self, service: Service, form: FormName, chunks: type[Chunks]) -> None:
        self._service = service
        self._form = form
        self._chunks = chunks

    async def handle(self, call: Call) -> Reply | Stream:
        """Runs a request. Returns its answer, or its stream once the engine has accepted it."""
        with ExitStack() as held:
            order = await self._service.order(call, self._form, held)
            running = await self._service.start(call, order, held.pop_all())
        head = Head(self._chunks.id_prefix + call.answer_id, int(time.time()), order.model)
        call.trace.response_id = head.id
        headers: tuple[Header, ...] = ((b"x-sightline-sampling", running.sampling),)
        continuations = [Continuation() for _ in range(len(order.prompts) * order.n)]
        outcome = Generated(running.num_prompt_tokens, order.n, continuations)
        if order.stream is not None:
            call.held.push(running.release)
            chunks = self._chunks(head, order.stream, outcome)
            return Stream(self._events(call, running, outcome, chunks), headers)
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

    async def _events(
        self, call: Call, running: Running, outcome: Generated, chunks: Chunks
    ) -> AsyncGenerator[bytes, None]:
        """The stream: chunks, usage if requested, and `[DONE]`. An error is the last event; no `[DONE]` follows it."""
        try:
            for chunk in chunks.opening():
                yield _event(chunk)
            async for place, report in running.answers.reports():
                delta = take(report, place, outcome)
                chunk = None if delta is None else chunks.chunk(place * outcome.n + delta.index, delta)
                if chunk is not None:
                    yield _event(chunk)
        except (EngineDownError, AnswerTooLargeError) as error:
            yield _error_event(call, unavailable(str(error), RESTART_SECONDS))
            return
        except ApiError as error:
            yield _error_event(call, error)
            return
        finally:
            _tell(call, outcome)
        if (last := chunks.closing()) is not None:
            yield _event(last)
        yield b"data: [DONE]\n\n"


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


def _event(chunk: object) -> bytes:
    return b"data: " + _ENCODER.encode(chunk) + b"\n\n"


def _error_event(call: Call, error: ApiError) -> bytes:
    """An error as an event, for an answer whose status has been sent."""
    call.facts["error"] = error.code
    return b"data: " + error.body() + b"\n\n"
