"""Draws a scenario from a seed: bursts of requests with common prefixes, clients that give up or stop reading for a
while, and faults.

Draws from the seed alone, so that nothing that the engine does changes the events.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from sightline.testing.simulator.faults import TICK
from sightline.testing.simulator.oracle import NUM_ORDINARY, RAISING, SPOILING
from sightline.testing.simulator.scenario import (
    ClientCancels,
    ClientGone,
    ClientReads,
    ClientStalls,
    ClientSubmits,
    Close,
    DeviceFault,
    Drafting,
    Event,
    FailForward,
    HostScene,
    LoseRank,
    RankLoss,
    RefuseAllocations,
    Scenario,
    Scene,
    SlowForward,
)


def draw_scenario(
    seed: int,
    num_steps: int,
    *,
    guesses: bool = False,
    states: bool = False,
    sparse: bool = False,
    host: bool = False,
    ranks: bool = False,
) -> Scenario:
    """Draws `num_steps` steps of traffic; then the open requests run to their end, unless the engine ends first.

    With `guesses`, the same traffic comes to an engine whose tokens are guessed by a drafter that lies at random; with
    `states`, to one whose model has a recurrent group too; with `sparse`, to one with a layer that attends to chosen
    tokens, whose entries are in host memory for most seeds; with `host`, to one that keeps pages in host memory; with
    `ranks`, to one of several ranks, in one replica or several, one of which may be lost, which have no host memory.
    """
    draw = random.Random(seed)
    reading = random.Random(f"reading {seed}")
    scene = draw_scene(draw)
    if guesses:
        scene = _with_guesses(scene, seed)
    if states:
        scene = _with_states(scene, seed)
    if sparse:
        top_k = random.Random(f"sparse {seed}").choice([1, 2, 5, 9, 16])
        hot = None if host else random.Random(f"hot {seed}").choice([None, 1, 2, 9])
        scene = msgspec.structs.replace(scene, top_k=top_k, hot_per_choice=hot)
    if ranks:
        choose = random.Random(f"ranks {seed}")
        count, replicas = choose.choice([(2, 1), (3, 1), (2, 2), (2, 2), (3, 3), (4, 2), (4, 4)])
        grid = {"num_ranks": count, "num_replicas": replicas, "pads_replicas": replicas > 1 and choose.random() < 0.6}
        scene = msgspec.structs.replace(scene, **grid, hot_per_choice=None)
    elif host:
        scene = _with_host(scene, seed)
    workload = _Workload(draw, scene, draw.choice([0.07, 0.15, 0.3]), draw.random() < 0.15, reading)
    for step in range(num_steps):
        workload.step(step)
    end = draw.random()
    if ranks and end < 0.6:
        workload.events.append(LoseRank(num_steps, random.Random(f"loss {seed}").choice(list(RankLoss))))
    elif end < 0.08:
        workload.events.append(DeviceFault(num_steps))
    elif end < 0.25:
        workload.events.append(Close(num_steps))
    return Scenario(workload.scene, tuple(workload.events))


def draw_scene(draw: random.Random) -> Scene:
    """Draws a scene that is small enough for pages, rows and the queue to run out."""
    page_size = draw.choice([1, 2, 3, 4, 5, 8])
    max_len = draw.randint(12, 48)
    least = -(-max_len // page_size)
    max_rows = draw.randint(1, 6)
    return Scene(
        page_size=page_size,
        num_pages=least + draw.choice([0, 1, 2, least, 4 * least]),
        max_rows=max_rows,
        max_step_tokens=draw.choice([max_rows, max_rows + 3, 16, 64]),
        max_len=max_len,
        max_queued=draw.choice([3, 6, 12, 24]),
        prefix_caching=draw.random() < 0.8,
        async_scheduling=draw.random() < 0.6,
        paranoid=draw.random() < 0.15,
    )


def _with_states(scene: Scene, seed: int) -> Scene:
    """Draws how many states may be kept for others. Guesses are chains: states follow one text."""
    draw = random.Random(f"states {seed}")
    chains = None if scene.drafting is None else msgspec.structs.replace(scene.drafting, num_branches=1)
    return msgspec.structs.replace(scene, drafting=chains, max_checkpoints=draw.choice([0, 1, 3, 8, 40]))


def _with_host(scene: Scene, seed: int) -> Scene:
    """Draws how pages are kept in host memory. The cache is so small that many have to leave it."""
    draw = random.Random(f"host {seed}")
    least = -(-scene.max_len // scene.page_size)
    host = HostScene(
        num_blocks=draw.choice([1, 4, 2 * least, 20 * least]),
        lateness=draw.choice([0.0, 0.0, 0.5, 0.9]),
        failures=draw.choice([0.0, 0.0, 0.1, 0.5]),
        seed=seed,
    )
    num_pages = least + draw.choice([0, 1, 2, least // 2])
    return msgspec.structs.replace(scene, prefix_caching=True, num_pages=num_pages, host=host)


def _with_guesses(scene: Scene, seed: int) -> Scene:
    """Draws how tokens are guessed: chains or trees, by anything from a liar to one that knows the truth.

    Pages are larger and steps longer: guesses use what the rows have left of them.
    """
    draw = random.Random(f"guesses {seed}")
    page_size = draw.choice([4, 5, 8, 16])
    least = -(-scene.max_len // page_size)
    drafting = Drafting(
        honesty=draw.choice([0.0, 0.3, 0.6, 0.85, 0.95, 1.0]),
        most=draw.choice([1, 2, 4, 8]),
        num_branches=draw.choice([1, 2, 3]),
        adapts=draw.random() < 0.25,
        seed=seed,
    )
    return msgspec.structs.replace(
        scene,
        page_size=page_size,
        num_pages=least + draw.choice([0, 1, 2, least, 4 * least]),
        max_rows=draw.randint(1, 3),
        max_step_tokens=draw.choice([16, 32, 64]),
        paranoid=draw.random() < 0.05,
        async_scheduling=False,
        drafting=drafting,
    )


@dataclass
class _Workload:
    draw: random.Random
    scene: Scene
    rate: float
    """Bursts per step."""
    samples: bool
    """True if some requests sample their tokens, so that continuations of one prompt differ."""
    reading: random.Random
    """Draws which clients stop reading."""
    events: list[Event] = field(default_factory=list)
    num_submitted: int = 0

    def __post_init__(self) -> None:
        self._beginnings = [self._tokens(self.draw.randint(0, self.scene.max_len // 2)) for _ in range(3)]

    def step(self, at: int) -> None:
        """Draws the events before one step."""
        draw = self.draw
        if draw.random() < self.rate:
            for _ in range(draw.choice([1, 1, 2, 5])):
                self.events.append(self._submit(at))
        if self.num_submitted and draw.random() < 0.08:
            name = max(0, self.num_submitted - draw.randint(1, 12))
            self.events.append(ClientGone(at, name) if draw.random() < 0.3 else ClientCancels(at, name))
        if draw.random() < 0.04:
            self.events.append(self._fault(at))
        if self.num_submitted and self.reading.random() < 0.1:
            name = max(0, self.num_submitted - self.reading.randint(1, 6))
            stops_reading = self.reading.random() < 0.6
            self.events.append(ClientStalls(at, name) if stops_reading else ClientReads(at, name))

    def _fault(self, at: int) -> Event:
        kind = self.draw.randrange(3)
        if kind == 0:
            return RefuseAllocations(at, self.draw.randint(1, 4))
        if kind == 1:
            # With several ranks, a step that raises ends the engine: the last event does that.
            return FailForward(at) if self.scene.num_ranks == 1 else RefuseAllocations(at, 2)
        return SlowForward(at, TICK * self.draw.randint(50, 600))

    def _submit(self, at: int) -> ClientSubmits:
        draw, name = self.draw, self.num_submitted
        self.num_submitted += 1
        prompt = self._prompt()
        n = draw.choice([1, 1, 1, 1, 2, 3])
        temperature = 1.0 if self.samples and (n > 1 or draw.random() < 0.1) else 0.0
        return ClientSubmits(
            at=at,
            name=name,
            prompt=tuple(prompt),
            max_tokens=draw.randint(1, self.scene.max_len - len(prompt)),
            n=n,
            caller=draw.choice(["", "", "", "other", "other", "third"]),
            priority=draw.choice([0, 0, 0, -1, 1]),
            timeout=(draw.randint(10, 1500) + 0.5) * TICK if draw.random() < 0.2 else None,
            stop_token_ids=tuple(self._tokens(draw.choice([0, 0, 1, 4]))),
            temperature=temperature,
            seed=draw.getrandbits(16) if temperature > 0.0 else 0,
            frequency_penalty=0.75 if temperature == 0.0 and draw.random() < 0.1 else 0.0,
            logprobs=draw.randint(0, 2) if draw.random() < 0.1 else None,
            prompt_logprobs=draw.randint(0, 1) if draw.random() < 0.05 else None,
            streams=draw.random() < 0.3,
            retries=draw.choice([0, 0, 1, 2]),
        )

    def _prompt(self) -> list[int]:
        draw = self.draw
        prompt = draw.choice(self._beginnings) + self._tokens(draw.randint(0, 6))
        prompt = prompt[: self.scene.max_len - 2] or [1]
        if draw.random() < 0.06:
            special = draw.choice([RAISING, SPOILING])
            prompt[draw.randrange(len(prompt))] = special if self.scene.num_ranks == 1 else SPOILING
        return prompt

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(NUM_ORDINARY) for _ in range(count)]
