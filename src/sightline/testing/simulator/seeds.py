"""Many seeds, in one process or several, and what is said of one that fails.

Knows seeds and scripts. Does not know terminals.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
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
    """A seed in which something is wrong."""

    seed: int
    what: str


def play_seeds(seeds: Sequence[int], num_steps: int, num_jobs: int) -> Iterator[EventCounts | SeedFailure]:
    """One result for each seed, in order."""
    play_one = partial(_play_one, num_steps=num_steps)
    if num_jobs == 1:
        yield from map(play_one, seeds)
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(play_one, seeds, chunksize=max(1, min(20, len(seeds) // (4 * num_jobs))))


def shortened(scenario: Scenario) -> tuple[Scenario, Violation | None]:
    """A short scenario in which the same thing is wrong as in this one, and what."""

    def wrong_step(candidate: Scenario) -> int | None:
        violation = play(candidate)
        same = violation is not None and first is not None and violation.kind == first.kind
        return violation.step if violation is not None and same else None

    with single_threaded(), unsaid():
        first = play(scenario)
        short = scenario if first is None else shrink(scenario, wrong_step)
        return short, play(short)


def _play_one(seed: int, num_steps: int) -> EventCounts | SeedFailure:
    with single_threaded(), unsaid():
        try:
            return simulate(seed, num_steps)
        except Violation as violation:
            return SeedFailure(seed, str(violation))


@contextmanager
def unsaid() -> Iterator[None]:
    """What an engine logs of faults that were planned is no news."""
    logger = logging.getLogger("sightline")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
