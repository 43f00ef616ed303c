"""Calls on one engine from several threads: whoever has the turn steps it for everybody.

    thread 1: generate ─┐
    thread 2: stream   ─┼─ Turns ─▶ Engine: requests of all threads, in one batch
    thread 3: close    ─┘

There is no thread of its own: one of those that wait steps the engine, and when its own answers are there another one
goes on. Each thread submits and collects by itself, so that an error of its own cannot reach another.

Owns the order of calls, and what one call has asked for and not got. Does not know text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from sightline.core.device import same_stream
from sightline.core.errors import LaneBusyError, RequestError
from sightline.core.interruption import uninterrupted
from sightline.core.request import CompletionOutput, FinishReason, RequestOutput, Terms, TextDelta, new_request_id
from sightline.core.turns import ThreadTurn, Turns
from sightline.engine.engine import Engine
from sightline.engine.steps import OutputT, ParamsT, StepLoop

logger = logging.getLogger("sightline")
_InputT = TypeVar("_InputT")
_T = TypeVar("_T")
LoopT = TypeVar("LoopT", bound=StepLoop[Any, Any, Any])

Encoded: TypeAlias = tuple[str | None, Sequence[int]]
"""A prompt's text, where it has one, and its tokens."""


class SharedEngine(Generic[LoopT]):
    """An engine that several threads use in turns."""

    def __init__(self, engine: LoopT) -> None:
        self.engine = engine
        self._turns = Turns()
        self._on_stream = same_stream(engine.runtime.config.device)

    def run(self, work: Callable[[ThreadTurn], _T]) -> _T:
        """Calls `work` while no other thread uses the engine, on one CUDA stream whichever thread it is."""

        def on_stream(turn: ThreadTurn) -> _T:
            with self._on_stream():
                return work(turn)

        return self._turns.run(on_stream)

    def step_until(self, turn: ThreadTurn, is_ready: Callable[[], bool]) -> None:
        """Steps until `is_ready()`, or waits while another thread steps; others may use the engine in between."""
        self._turns.drive_until(turn, is_ready, self.engine.step)


class BatchCall(Generic[_InputT, ParamsT, OutputT]):
    """One call with many prompts: submitted as there is room, collected as they finish."""

    def __init__(
        self,
        shared: SharedEngine[Any],
        engine: StepLoop[Any, ParamsT, OutputT],
        inputs: Sequence[_InputT],
        encode: Callable[[_InputT], Encoded],
        params: Sequence[ParamsT],
        terms: Sequence[Terms],
        counts: Sequence[int],
        refused: Callable[[_InputT, int, RequestError], OutputT],
    ) -> None:
        """`engine` is the one that is shared. `params`, `terms` and `counts`, of sequences, have one entry for each
        input; `refused` is what an input that cannot run gets."""
        self._shared = shared
        self._engine = engine
        self._inputs = inputs
        self._encode = encode
        self._params = params
        self._terms = terms
        self._counts = counts
        self._refused = refused
        self._left = deque(range(len(inputs)))
        self._encoded: deque[tuple[int, Encoded]] = deque()
        """Prompts that are not submitted yet, with their places."""
        self._running: dict[str, int] = {}
        """Maps the engine's id to the prompt's index."""
        self._outputs: dict[int, OutputT] = {}

    def run(self, on_progress: Callable[[int], None]) -> list[OutputT]:
        """An output for each prompt, in order. `on_progress` is told how many there are."""
        try:
            while self._left or self._encoded or self._running:
                self._encode_more()
                self._shared.run(self._advance)
                on_progress(len(self._outputs))
        finally:
            self._end()
        return [self._outputs[index] for index in range(len(self._inputs))]

    def _encode_more(self) -> None:
        """Encodes as many prompts as there is room for. Needs no turn: a long prompt holds up nobody's step."""
        count = sum(self._counts[index] for index, _ in self._encoded)
        while self._left:
            index = self._left[0]
            count += self._counts[index]
            if not (self._engine.can_queue(count) or (not self._encoded and self._is_due(index))):
                return
            try:
                self._encoded.append((index, self._encode(self._inputs[index])))
            except RequestError as error:
                self._refuse(index, error)
            self._left.popleft()

    def _advance(self, turn: ThreadTurn) -> None:
        """Submits what there is room for, waits until something can be done, and collects."""
        while self._encoded and self._is_due(self._encoded[0][0]):
            self._submit(*self._encoded.popleft())
        if self._left or self._encoded or self._running:
            self._shared.step_until(turn, self._is_ready)
        for request_id in [name for name in self._running if self._engine.is_finished(name)]:
            self._outputs[self._running[request_id]] = self._engine.pop_output(request_id)
            del self._running[request_id]

    def _is_due(self, index: int) -> bool:
        """True if a prompt can be queued, or nothing is left to wait for: then it is submitted, and refused.

        One that never fits waits for this call's own requests only: other threads may always have some.
        """
        count = self._counts[index]
        never_fits = count > self._engine.runtime.config.max_queued
        return self._engine.can_queue(count) or not (self._running if never_fits else self._engine.has_work)

    def _is_ready(self) -> bool:
        if any(self._engine.is_finished(name) for name in self._running):
            return True
        following = self._encoded[0][0] if self._encoded else next(iter(self._left), None)
        return following is not None and self._is_due(following)

    def _submit(self, index: int, encoded: Encoded) -> None:
        text, token_ids = encoded
        try:
            with uninterrupted():
                request_id = self._engine.submit(token_ids, self._params[index], text, self._terms[index])
                self._running[request_id] = index
        except RequestError as error:
            self._refuse(index, error)

    def _refuse(self, index: int, error: RequestError) -> None:
        logger.warning("request %d was refused: %s", index, error)
        self._outputs[index] = self._refused(self._inputs[index], self._counts[index], error)

    def _end(self) -> None:
        """Ends what runs, after an error or Ctrl-C. What cannot be ended here ends at the next step."""
        if not self._running:
            return
        try:
            self._shared.run(self._forget_all)
        except BaseException as error:
            for request_id in self._running:
                self._engine.abandon(request_id)
            # Somebody uses the engine directly. That is not why this call ends.
            if not isinstance(error, LaneBusyError):
                raise

    def _forget_all(self, _turn: ThreadTurn) -> None:
        with uninterrupted():
            for request_id in self._running:
                self._engine.forget(request_id)


class TextStream(Iterator[TextDelta]):
    """A running request, read piece by piece. Reading drives the engine.

    Streams may be read in turns, and from several threads. With `n` above 1 the continuations' pieces come mixed:
    `TextDelta.index` says whose each is.
    """

    def __init__(self, shared: SharedEngine[Engine], request_id: str) -> None:
        self._ended = False
        self._shared = shared
        self._engine = shared.engine
        self.request_id = request_id
        self.params = shared.engine.params(request_id)
        """The parameters that the request runs with."""

    def __next__(self) -> TextDelta:
        delta = None if self._ended else self._shared.run(self._read)
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        """Ends the request if it runs, and frees its pages now. Any thread may call it, also while another reads."""
        if self._ended:
            return
        try:
            self._shared.run(self._end)
        except LaneBusyError:
            # In the middle of a step, from a finaliser or a signal handler: it ends before the next one.
            self._engine.abandon(self.request_id)
            self._ended = True

    def __del__(self) -> None:
        if not self._ended:
            self._engine.abandon(self.request_id)

    def _read(self, turn: ThreadTurn) -> TextDelta | None:
        self._shared.step_until(turn, lambda: self._ended or self._engine.has_delta(self.request_id))
        if self._ended:
            return None
        delta = self._engine.take_delta(self.request_id)
        if self._engine.is_read(self.request_id):
            self._end(turn)
        return delta

    def _end(self, _turn: ThreadTurn) -> None:
        self._engine.forget(self.request_id)
        self._ended = True


def refused_output(item: object, num_outputs: int, error: RequestError) -> RequestOutput:
    """Returns the output of a refused prompt: every continuation failed, as in a request that fails while it runs."""
    return RequestOutput(
        request_id=new_request_id(),
        prompt=_text_of(item),
        prompt_token_ids=(),
        outputs=tuple(CompletionOutput(index, "", (), FinishReason.ERROR.value) for index in range(num_outputs)),
        finished=True,
        params=None,
        error=str(error),
    )


def _text_of(item: object) -> str | None:
    match item:
        case str(text) | {"prompt": str(text)}:
            return text
        case _:
            return None
