"""Generation for people who write coroutines: `AsyncLLM`. What runs is `engine.background`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self

from sightline.core.errors import RequestError
from sightline.core.request import (
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    Terms,
    TextDelta,
    new_request_id,
)
from sightline.engine.background import BackgroundSteps, Gain, RequestReading
from sightline.llm import LLM, Prompt, configured_by
from sightline.text.tokenizers.tokenizer import Tokenizer


class AsyncLLM:
    """A model that answers coroutines, as many at a time as there is room for.

    A thread steps the engine while there are requests. Leaving a generator, or cancelling the task that reads it, ends
    its request. A reader that is slow gets what came meanwhile at once. Several event loops may share one.
    """

    @configured_by(LLM)
    def __init__(self, llm: LLM) -> None:
        """Takes what `LLM` takes. Loads the model before it returns: in a running event loop, use `to_thread`."""
        self._llm = llm
        self._steps = BackgroundSteps(llm.shared)
        self._readings: dict[str, RequestReading] = {}
        """The open requests, by the caller's id."""
        self._finalizer = weakref.finalize(self, self._steps.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises if it was not loaded."""
        return self._llm.get_tokenizer()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the output so far whenever it has grown, and at the end the whole, which is `finished`.

        Raises `RequestError` if the request cannot run, and `EngineClosedError` if the engine is shut down. A request
        that fails later ends with a `RequestOutput.error`, as in `LLM.generate`. A `request_id` is for `abort`, and
        must not be in use.
        """
        params = sampling_params or SamplingParams()
        outputs = [CompletionOutput(index, "", (), None) for index in range(params.n)]
        async with aclosing(
            self._gains(prompt, params, request_id, Terms(priority=priority, timeout=timeout))
        ) as gains:
            async for reading, gain in gains:
                for delta in gain.deltas:
                    outputs[delta.index] = _grown(outputs[delta.index], delta)
                yield gain.output or _so_far(reading, outputs)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[TextDelta]:
        """Yields only what is new, as `LLM.stream` does; as `generate` otherwise."""
        params = sampling_params or SamplingParams()
        if params.prompt_logprobs is not None:
            raise RequestError("expected prompt_logprobs with generate, got them with a stream, which has no place")
        async with aclosing(
            self._gains(prompt, params, request_id, Terms(priority=priority, timeout=timeout))
        ) as gains:
            async for _, gain in gains:
                for delta in gain.deltas:
                    yield delta

    async def abort(self, request_id: str) -> None:
        """Ends a request: its generator yields what there is, with the finish reason "abort". An unknown id is no
        error."""
        reading = self._readings.get(request_id)
        if reading is not None:
            self._steps.cancel(reading)

    def shutdown(self) -> None:
        """Ends everything. Generators that are open raise `EngineClosedError`; waits for the step that runs."""
        self._finalizer()
        self._llm.close()

    async def _gains(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, terms: Terms
    ) -> AsyncGenerator[tuple[RequestReading, Gain]]:
        name = new_request_id() if request_id is None else request_id
        reading = RequestReading(name, params, terms)
        # In one call: other event loops, in threads of their own, may use the same id.
        if self._readings.setdefault(name, reading) is not reading:
            raise RequestError(f"expected a request_id that is not in use, got {name!r} again; use another")
        try:
            # In a thread, because a long prompt or grammar would hold the event loop up.
            encoded = await asyncio.to_thread(self._llm.encode_prompt, prompt)
            grammars = await asyncio.to_thread(self._llm.compile_grammars, [params])
            self._steps.start(reading, encoded)
            is_over = False
            while not is_over:
                gain = await self._steps.read(reading)
                is_over = gain.output is not None
                yield reading, gain
            del grammars
        finally:
            del self._readings[name]
            self._steps.drop(reading)


def _grown(output: CompletionOutput, delta: TextDelta) -> CompletionOutput:
    logprobs = None if delta.logprobs is None else (*(output.logprobs or ()), *delta.logprobs)
    return replace(
        output,
        text=output.text + delta.text,
        token_ids=output.token_ids + delta.token_ids,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        logprobs=logprobs,
    )


def _so_far(reading: RequestReading, outputs: Sequence[CompletionOutput]) -> RequestOutput:
    text, token_ids = reading.encoded
    return RequestOutput(
        reading.request_id, text, tuple(token_ids), tuple(outputs), finished=False, params=reading.effective
    )
