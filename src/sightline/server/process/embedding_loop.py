"""The loop of an engine process that embeds.

loop:  commands that came ─▶ as many texts as a step holds, callers in turn ─▶ their vectors, in one frame
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sightline.core.errors import RequestError
from sightline.core.metrics import EngineMetrics
from sightline.core.request import Terms
from sightline.engine.embedder import Embedder
from sightline.engine.text_embedder import TextEmbedder
from sightline.server.process.channel import Channel
from sightline.server.process.protocol import (
    Cancel,
    Command,
    Configure,
    Embed,
    Probe,
    Progress,
    Refused,
    Report,
    Stop,
    Submit,
    Vector,
)


class EmbeddingWorker:
    """Moves texts into the embedder, and vectors out of it."""

    def __init__(self, texts: TextEmbedder, channel: Channel) -> None:
        self._embedder: Embedder = texts.embedder
        self._num_degradations = len(texts.ledger.degradations)
        self._channel = channel
        self._waiting: dict[str, deque[tuple[int, tuple[int, ...]]]] = {}
        """By caller, the callers in turn."""
        self._num_steps = self._num_tokens = 0
        self._outgoing: list[Report] = []
        self._is_stopping = False

    def run(self) -> None:
        """Until told to stop."""
        while not self._is_stopping:
            for command in self._channel.take(wait=not self._waiting):
                self._obey(command)
            if self._waiting:
                self._step()
            if self._outgoing:
                self._channel.send([*self._outgoing, Progress(self._metrics())])
                self._outgoing = []

    def _obey(self, command: Command) -> None:
        match command:
            case Embed(texts, terms):
                for number, text in texts.items():
                    self._queue(number, text, terms)
            case Cancel(number):
                self._forget(number)
            case Probe():
                self._embedder.embed([(0,)])
                self._num_steps += 1
                self._outgoing.append(Progress(self._metrics()))
            case Stop():
                self._is_stopping = True
            case Configure() | Submit():
                raise RequestError(f"expected what an embedding engine does, got {type(command).__name__}")

    def _queue(self, number: int, text: tuple[int, ...], terms: Terms) -> None:
        try:
            self._embedder.check(text)
        except RequestError as error:
            self._outgoing.append(Refused(number, is_full=False, message=str(error)))
            return
        self._waiting.setdefault(terms.caller, deque()).append((number, text))

    def _step(self) -> None:
        """Callers give one text in turn, until a step is full."""
        by_caller: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for caller, number, text in self._taken():
            by_caller.setdefault(caller, []).append((number, text))
        for caller, texts in by_caller.items():
            self._outgoing += self._embedded(texts, Terms(caller=caller))
            self._num_steps += 1
            self._num_tokens += sum(len(text) for _, text in texts)

    def _embedded(self, texts: Sequence[tuple[int, tuple[int, ...]]], terms: Terms) -> list[Report]:
        """Their vectors. Where one gives none, the texts are parted until it stands alone."""
        try:
            vectors = self._embedder.embed([text for _, text in texts], terms)
        except RequestError as error:
            if len(texts) == 1:
                return [Refused(texts[0][0], is_full=False, message=str(error))]
            half = len(texts) // 2
            return [*self._embedded(texts[:half], terms), *self._embedded(texts[half:], terms)]
        return [
            Vector(number, each.vector.numpy().astype("<f4").tobytes(), each.num_cached)
            for (number, _), each in zip(texts, vectors, strict=True)
        ]

    def _taken(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """The next step's texts, whoever asked for them."""
        room, taken = self._embedder.runtime.config.max_step_tokens, list[tuple[str, int, tuple[int, ...]]]()
        while self._waiting and room > 0:
            caller, queue = next(iter(self._waiting.items()))
            number, text = queue.popleft()
            # To the end of the turns, or out of them.
            del self._waiting[caller]
            if queue:
                self._waiting[caller] = queue
            taken.append((caller, number, text))
            room -= len(text)
        return taken

    def _forget(self, number: int) -> None:
        left = {
            caller: deque(entry for entry in queue if entry[0] != number) for caller, queue in self._waiting.items()
        }
        self._waiting = {caller: queue for caller, queue in left.items() if queue}

    def _metrics(self) -> EngineMetrics:
        planner = self._embedder.runtime.planner
        return EngineMetrics(
            num_requests_running=0,
            num_requests_waiting=sum(map(len, self._waiting.values())),
            kv_cache_usage_perc=0.0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            prompt_tokens=self._num_tokens,
            generation_tokens=0,
            num_preemptions=0,
            request_success={},
            requests_refused=0,
            steps=self._num_steps,
            steps_cut=0,
            plans=planner.num_plans,
            plan_seconds=planner.plan_seconds,
            plans_rebuilt=planner.num_rebuilt,
            degradations=self._num_degradations,
        )
