"""Steps an engine in a thread for coroutines, which read what their requests gain.

    coroutine ─ RequestReading ─▶ orders ─▶ the thread: submit, step, take ─▶ the coroutine's event loop

The thread is one more caller of `SharedEngine`: it takes turns with the threads that call `LLM`. A slow reader holds
nothing up and queues nothing: what it has not read stays in its request, and it gets all of that at once. So a request
never takes more memory than its answer, which `max_tokens` bounds.

Owns the thread and the open readings. Everything that changes belongs to the thread; coroutines only send orders. Does
not know prompts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from sightline.core.errors import EngineClosedError, SightlineError
from sightline.core.request import (
    CompletionOutput,
    EffectiveParams,
    FinishReason,
    RequestOutput,
    SamplingParams,
    Terms,
    TextDelta,
)
from sightline.core.turns import ThreadTurn, is_gone
from sightline.engine.calls import Encoded, SharedEngine
from sightline.engine.engine import Engine

logger = logging.getLogger("sightline")


class Gain(NamedTuple):
    """What a request gained since it was last read."""

    deltas: Sequence[TextDelta]
    output: RequestOutput | None
    """The whole result, once the request has ended."""


Asked: TypeAlias = "asyncio.Future[Gain]"


class RequestReading:
    """A request that one coroutine reads. Only the thread changes it once it is started."""

    def __init__(self, request_id: str, params: SamplingParams, terms: Terms) -> None:
        self.request_id = request_id
        """The caller's name for it."""
        self.encoded: Encoded = (None, ())
        """The prompt, from when it is started."""
        self.params = params
        self.terms = terms
        self.engine_id: str | None = None
        """The engine's name for it while it is there."""
        self.effective: EffectiveParams | None = None
        """The parameters that it runs with, from when it is submitted."""
        self.asked: Asked | None = None
        """What the coroutine waits for."""
        self.last: Gain | Exception | None = None
        """The last thing to tell, if that is known and was not asked for yet."""
        self.is_cancelled = False


class BackgroundSteps:
    """The thread, and what it is told."""

    def __init__(self, shared: SharedEngine[Engine]) -> None:
        self._shared = shared
        self._engine = shared.engine
        self._lock = threading.RLock()
        """Guards the thread's start and stop."""
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: deque[RequestReading] = deque()
        """Not submitted yet, because as many wait in the engine as may."""
        self._open: dict[str, RequestReading] = {}
        """Submitted and not over, by the engine's id."""
        self._told: list[tuple[Asked, Gain | Exception]] = []
        """Answers on their way to the event loops."""

    def start(self, reading: RequestReading, encoded: Encoded) -> None:
        """Submits a request when there is room for it."""
        reading.encoded = encoded
        self._order(lambda: self._start(reading))

    async def read(self, reading: RequestReading) -> Gain:
        """Waits until the request has gained something, and returns that. Raises the reason if it could not run."""
        asked: Asked = asyncio.get_running_loop().create_future()
        self._order(lambda: self._ask(reading, asked))
        return await asked

    def cancel(self, reading: RequestReading) -> None:
        """Ends a request, started or not: its reader gets what there is, with the finish reason "abort"."""
        self._order(lambda: self._cancel(reading))

    def drop(self, reading: RequestReading) -> None:
        """Ends a request that nobody reads any more; one that is over is left alone."""
        if not self._is_stopping:
            self._order(lambda: self._drop(reading))

    def stop(self) -> None:
        """Ends the thread after the step that it is in, and every reading with `EngineClosedError`."""
        with self._lock:
            self._is_stopping = True
            thread = self._thread
        if thread is not None and not is_gone(thread):
            self._orders.put(lambda: None)
            if thread is not threading.current_thread():
                thread.join()

    def _order(self, order: Callable[[], None]) -> None:
        """Has the thread do something between two steps. The first order starts the thread."""
        with self._lock:
            if self._is_stopping:
                raise EngineClosedError("expected an open engine, got one that was shut down; build a new one")
            if self._thread is None or is_gone(self._thread):
                self._thread = threading.Thread(target=self._run, name="sightline-steps", daemon=True)
                self._thread.start()
            self._orders.put(order)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                # Whoever waits when the last request ends can be submitted now: no further order has to come.
                is_idle = not self._waiting and (not self._engine.has_work or not self._open)
                first = self._orders.get() if is_idle else None
                try:
                    self._shared.run(lambda turn, first=first: self._advance(turn, first))  # type: ignore[misc]
                except Exception as error:
                    # A step that raises belongs to no request: all that run end with it, as in `LLM.generate`.
                    logger.error("a step failed: %s", error, exc_info=error)
                    self._fail_all(error)
        finally:
            self._fail_all(EngineClosedError("the engine was shut down before the request was finished"))

    def _advance(self, turn: ThreadTurn, first: Callable[[], None] | None) -> None:
        """Follows orders, submits requests while there is room, steps until a reader can be answered, and answers."""
        try:
            if first is not None:
                first()
            self._follow_orders()
            while self._waiting and self._has_room():
                self._submit(self._waiting.popleft())
            self._shared.step_until(turn, self._is_ready)
            for reading in [each for each in self._open.values() if self._is_answerable(each)]:
                self._answer(reading)
        finally:
            self._send()

    def _is_ready(self) -> bool:
        return (
            self._is_stopping
            or not self._engine.has_work
            or not self._orders.empty()
            or len(self._told) > 0
            or (len(self._waiting) > 0 and self._has_room())
            or any(map(self._is_answerable, self._open.values()))
        )

    def _has_room(self) -> bool:
        """True if the first that waits can be queued, or waits for nothing: then it is submitted, and refused."""
        count = self._waiting[0].params.n
        never_fits = count > self._engine.runtime.config.max_queued
        return never_fits or self._engine.can_queue(count) or not self._engine.has_work

    def _is_answerable(self, reading: RequestReading) -> bool:
        assert reading.engine_id is not None
        return reading.asked is not None and self._engine.has_delta(reading.engine_id)

    def _submit(self, reading: RequestReading) -> None:
        text, token_ids = reading.encoded
        try:
            reading.engine_id = self._engine.submit(token_ids, reading.params, text, reading.terms)
        except SightlineError as error:
            self._finish(reading, error)
            return
        reading.effective = self._engine.params(reading.engine_id)
        self._open[reading.engine_id] = reading

    def _answer(self, reading: RequestReading) -> None:
        engine_id, deltas = reading.engine_id, list[TextDelta]()
        assert engine_id is not None
        while (delta := self._engine.take_delta(engine_id)) is not None:
            deltas.append(replace(delta, request_id=reading.request_id))
        if self._engine.is_read(engine_id):
            del self._open[engine_id]
            output = self._engine.pop_output(engine_id)
            self._finish(reading, Gain(deltas, replace(output, request_id=reading.request_id)))
        elif reading.asked is not None:
            self._told.append((reading.asked, Gain(deltas, None)))
            reading.asked = None

    def _follow_orders(self) -> None:
        while not self._orders.empty():
            self._orders.get()()

    def _start(self, reading: RequestReading) -> None:
        if reading.is_cancelled:
            self._finish(reading, Gain((), _aborted(reading)))
        else:
            self._waiting.append(reading)

    def _ask(self, reading: RequestReading, asked: Asked) -> None:
        reading.asked = asked
        if reading.last is not None:
            self._finish(reading, reading.last)

    def _finish(self, reading: RequestReading, last: Gain | Exception) -> None:
        """Tells a reader the last thing, when it asks."""
        reading.engine_id, reading.last = None, last
        if reading.asked is not None:
            self._told.append((reading.asked, last))
            reading.asked = None

    def _cancel(self, reading: RequestReading) -> None:
        reading.is_cancelled = True
        if reading.engine_id is not None:
            self._engine.cancel(reading.engine_id)
        elif reading in self._waiting:
            self._waiting.remove(reading)
            self._finish(reading, Gain((), _aborted(reading)))

    def _drop(self, reading: RequestReading) -> None:
        if reading in self._waiting:
            self._waiting.remove(reading)
        if reading.engine_id is not None and self._open.pop(reading.engine_id, None) is not None:
            self._engine.forget(reading.engine_id)

    def _send(self) -> None:
        """Wakes the coroutines that get answers, once for each event loop."""
        told, self._told = self._told, []
        loops = {id(asked.get_loop()): asked.get_loop() for asked, _ in told}
        for key, loop in loops.items():
            own = [(asked, what) for asked, what in told if id(asked.get_loop()) == key]
            # A loop that was closed has nobody who waits. It may close at any moment, which is no fault of the others.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, own)

    def _fail_all(self, error: Exception) -> None:
        """Ends every request with an error, also in the engine."""
        failed: list[RequestReading] = []
        try:
            self._shared.run(lambda _: self._forget_all(failed))
        except Exception:
            logger.debug("some requests could not be ended, and end with the next step", exc_info=True)
            for engine_id in self._open:
                self._engine.abandon(engine_id)
        for reading in (*failed, *self._open.values(), *self._waiting):
            self._finish(reading, error)
        self._open.clear()
        self._waiting.clear()
        self._send()

    def _forget_all(self, failed: list[RequestReading]) -> None:
        self._follow_orders()
        while self._open:
            engine_id, reading = self._open.popitem()
            failed.append(reading)
            self._engine.forget(engine_id)


def _resolve(told: Sequence[tuple[Asked, Gain | Exception]]) -> None:
    """Runs in the event loop. A coroutine that was cancelled meanwhile waits for nothing."""
    for asked, what in told:
        if asked.done():
            continue
        if isinstance(what, Exception):
            asked.set_exception(what)
        else:
            asked.set_result(what)


def _aborted(reading: RequestReading) -> RequestOutput:
    """The output of a request that ends before it is submitted."""
    text, token_ids = reading.encoded
    none = (CompletionOutput(index, "", (), FinishReason.ABORT.value) for index in range(reading.params.n))
    return RequestOutput(reading.request_id, text, tuple(token_ids), tuple(none), finished=True, params=None)
