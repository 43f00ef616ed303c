"""Plays many seeds, in one process or several, and shortens the scenario of one that fails. Does not know terminals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from sightline.core.device import single_threaded
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.scenario import Scenario
from sightline.testing.simulator.shrink import shrink
from sightline.testing.simulator.simulation import Violation, play, simulate


@dataclass(frozen=True)
class SeedFailure:
    """A seed in which something went wrong."""

    seed: int
    what: str


def play_seeds(
    seeds: Sequence[int],
    num_steps: int,
    num_jobs: int,
    *,
    guesses: bool = False,
    states: bool = False,
    sparse: bool = False,
    host: bool = False,
    ranks: bool = False,
) -> Iterator[EventCounts | SeedFailure]:
    """Yields one result for each seed, in order."""
    kinds = {"guesses": guesses, "states": states, "sparse": sparse, "host": host, "ranks": ranks}
    play_one = partial(_play_one, num_steps=num_steps, kinds=kinds)
    if num_jobs == 1:
        yield from map(play_one, seeds)
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(play_one, seeds, chunksize=max(1, min(20, len(seeds) // (4 * num_jobs))))


def shortened(scenario: Scenario) -> tuple[Scenario, Violation | None]:
    """Returns a short scenario with the same violation as this one, and the violation."""

    def wrong_step(candidate: Scenario) -> int | None:
        violation = play(candidate)
        same = violation is not None and first is not None and violation.kind == first.kind
        return violation.step if violation is not None and same else None

    with single_threaded():
        first = play(scenario)
        short = scenario if first is None else shrink(scenario, wrong_step)
        return short, play(short)


def _play_one(seed: int, num_steps: int, kinds: Mapping[str, bool]) -> EventCounts | SeedFailure:
    with single_threaded():
        try:
            return simulate(seed, num_steps, **kinds)
        except Violation as violation:
            return SeedFailure(seed, str(violation))
