"""Traffic by seed: bursts of requests that begin alike, several continuations, cancels, pools that are too small.

After every step each page has exactly the owners that it should have, and every token is the one that the request's
own history gives. A seed repeats a run exactly.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sightline.attention.selection import Candidate, Selection
from sightline.attention.spec import group_layers
from sightline.core.config import PADDING_PAGES, Quantization, ResolvedConfig
from sightline.core.device import detect_device
from sightline.core.errors import RequestError
from sightline.core.ledger import Ledger
from sightline.core.request import SamplingParams
from sightline.engine import Engine
from sightline.models.loading.generation import GenerationDefaults
from sightline.runner.build import assemble_runtime
from sightline.testing.simulator.model import DTYPE, VOCAB, ReadingBackend, ReadingDefinition, ReadingModel, next_token


class Violation(Exception):  # noqa: N818 - the name is the condition
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scene:
    """What a seed plays on."""

    page_size: int
    num_pages: int
    max_rows: int
    max_step_tokens: int
    max_len: int
    prefix_caching: bool

    @staticmethod
    def of(draw: random.Random) -> Scene:
        """Small enough for everything to run out."""
        page_size = draw.choice([1, 2, 3, 4, 8])
        max_len = draw.randint(12, 48)
        least = -(-max_len // page_size)
        max_rows = draw.randint(1, 6)
        return Scene(
            page_size=page_size,
            num_pages=least + draw.choice([0, 1, 2, least, 4 * least]),
            max_rows=max_rows,
            max_step_tokens=draw.choice([max_rows, max_rows + 3, 16, 64]),
            max_len=max_len,
            prefix_caching=draw.random() < 0.8,
        )


def build_engine(scene: Scene) -> Engine:
    """A real engine over a model that tells what it read."""
    config = ResolvedConfig(
        device=detect_device("cpu"),
        dtype=DTYPE,
        quantization=Quantization.DEQUANTISE,
        max_model_len=scene.max_len,
        max_rows=scene.max_rows,
        max_step_tokens=scene.max_step_tokens,
        page_size=scene.page_size,
        num_pages=scene.num_pages + PADDING_PAGES,
        scratch_bytes=1 << 20,
        prefix_caching=scene.prefix_caching,
        attention_backend=None,
        seed=0,
        paranoid=True,
        require_proof=False,
    )
    groups = group_layers(ReadingDefinition().attention_specs())
    candidate = Candidate("reading", False, "sightline", lambda: ReadingBackend)
    selection = Selection(candidate, ReadingBackend, ReadingBackend.capabilities[0], ())
    runtime = assemble_runtime(config, ReadingDefinition(), ReadingModel(), groups, [selection] * len(groups))
    return Engine(runtime, None, GenerationDefaults(frozenset()), Ledger())


@dataclass(frozen=True)
class _Asked:
    """A request as it was submitted."""

    prompt: tuple[int, ...]
    max_tokens: int
    namespace: str


@dataclass
class Simulation:
    """One seed's run."""

    seed: int
    make_engine: Callable[[Scene], Engine] = build_engine
    engine: Engine = field(init=False)
    num_steps: int = 0
    num_finished: int = 0
    _running: dict[str, _Asked] = field(default_factory=dict)
    _histories: dict[str, dict[str, list[tuple[int, ...]]]] = field(default_factory=dict)
    """By namespace and request: what it may have left in the cache."""
    _cancelled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self.scene = Scene.of(self._draw)
        self.engine = self.make_engine(self.scene)
        self._beginnings = [self._tokens(self._draw.randint(0, self.scene.max_len // 2)) for _ in range(3)]

    def run(self, num_steps: int) -> None:
        """So many steps of traffic, and then as many as it takes until nothing is left. Raises `Violation`."""
        with torch.inference_mode():
            for _ in range(num_steps):
                self._happen()
                self._step()
            most = self.num_steps + 200 * (1 + len(self._running)) * self.scene.max_len
            while self.engine.has_work:
                self._step()
                if self.num_steps > most:
                    raise Violation(f"seed {self.seed}: expected the traffic to end, got work for ever")
        self._check_rest()

    def _happen(self) -> None:
        """What comes from outside between two steps."""
        draw = self._draw
        if draw.random() < 0.25 and len(self._running) < 12:
            for _ in range(draw.choice([1, 1, 2, 5])):
                self._submit()
        if self._running and draw.random() < 0.06:
            request = draw.choice(list(self._running))
            self._cancelled.add(request)
            self.engine.cancel(request)

    def _submit(self) -> None:
        draw = self._draw
        beginning = draw.choice(self._beginnings)
        prompt = (beginning + self._tokens(draw.randint(0, 6)))[: self.scene.max_len - 2] or [1]
        max_tokens = draw.randint(1, self.scene.max_len - len(prompt))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=draw.choice([1, 1, 1, 2, 3]))
        namespace = draw.choice(["", "", "other"])
        try:
            request = self.engine.submit(prompt, params, namespace=namespace)
        except RequestError:
            return
        self._running[request] = _Asked(tuple(prompt), max_tokens, namespace)
        self._histories.setdefault(namespace, {})[request] = [tuple(prompt)]

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(VOCAB) for _ in range(count)]

    def _step(self) -> None:
        self.engine.step()
        self.num_steps += 1
        self._check_pages()
        for request in [request for request in self._running if self.engine.is_finished(request)]:
            self._check_answer(request)

    def _check_answer(self, request: str) -> None:
        asked = self._running.pop(request)
        output = self.engine.pop_output(request)
        self.num_finished += 1
        self._check_reuse(request, asked, output.num_cached_tokens)
        for continuation in output.outputs:
            tokens = list(asked.prompt)
            for token in continuation.token_ids:
                if token != next_token(tokens):
                    raise Violation(
                        f"seed {self.seed}, step {self.num_steps}: expected token {next_token(tokens)} after "
                        f"{len(tokens)} tokens, got {token}: the cache that was read is not the request's own"
                    )
                tokens.append(token)
            self._histories[asked.namespace][request].append(tuple(tokens))
            cut_short = len(continuation.token_ids) < asked.max_tokens
            if continuation.finish_reason == "error" or (cut_short and request not in self._cancelled):
                raise Violation(
                    f"seed {self.seed}, step {self.num_steps}: expected {asked.max_tokens} tokens, got "
                    f"{len(continuation.token_ids)} and the end {continuation.finish_reason}: {output.error}"
                )

    def _check_reuse(self, request: str, asked: _Asked, num_cached: int) -> None:
        """What a request found in the cache, another of its namespace had left there."""
        found = asked.prompt[:num_cached]
        others = self._histories[asked.namespace].items()
        if num_cached and not any(
            tokens[:num_cached] == found for other, left in others if other != request for tokens in left
        ):
            raise Violation(
                f"seed {self.seed}, step {self.num_steps}: expected a request to find what its own namespace left, "
                f"got {num_cached} tokens that nobody of {asked.namespace!r} had"
            )

    def _check_pages(self) -> None:
        """Every page is free, or has exactly its rows and the prefix tree as owners."""
        store, prefixes = self.engine.runtime.store, self.engine.prefixes
        nodes = [] if prefixes is None else list(prefixes.nodes())
        for index, pool in enumerate(store.pools):
            owners = Counter(page for row in range(1, store.limits.max_rows + 1) for page in pool.table.owned(row))
            owners.update(node.bundle[index] for node in nodes)
            free = pool.allocator.num_usable - len(owners)
            wrong = [page for page, count in owners.items() if pool.allocator.owners(page) != count]
            if wrong or pool.allocator.num_free != free:
                raise Violation(
                    f"seed {self.seed}, step {self.num_steps}: expected {free} free pages in {pool.key} and each other "
                    f"with its owners, got {pool.allocator.num_free} free and wrong counts for pages {wrong}"
                )
        if prefixes is not None and prefixes.num_evictable != sum(node.num_locks == 0 for node in nodes):
            raise Violation(f"seed {self.seed}, step {self.num_steps}: the tree's count of locks is wrong")

    def _check_rest(self) -> None:
        store = self.engine.runtime.store
        if self._running or store.num_free_rows != store.limits.max_rows:
            raise Violation(f"seed {self.seed}: expected every request to end, got {len(self._running)} left")
        self.engine.close()
        if store.num_free_pages != store.num_usable_pages:
            raise Violation(f"seed {self.seed}: expected every page back, got {store.num_free_pages}")


def simulate(seed: int, num_steps: int, make_engine: Callable[[Scene], Engine] = build_engine) -> Simulation:
    """Plays one seed. Raises `Violation`."""
    simulation = Simulation(seed, make_engine)
    simulation.run(num_steps)
    return simulation
