"""Plays a scenario on a real engine, event by event and step by step, and checks everything after each step.

The same scenario plays the same way, always: nothing depends on the time of day or on another run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from sightline.core.batch import Batch
from sightline.core.errors import DeviceFaultError
from sightline.testing.simulator.clients import Clients
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.faults import PlannedFault
from sightline.testing.simulator.invariants import Invariants
from sightline.testing.simulator.rows import RowShares
from sightline.testing.simulator.scenario import (
    ClientCancels,
    ClientGone,
    ClientSubmits,
    Close,
    DeviceFault,
    Event,
    FailForward,
    RefuseAllocations,
    Scenario,
    SlowForward,
)
from sightline.testing.simulator.stage import set_stage
from sightline.testing.simulator.workload import draw_scenario

_MOST_DRAINING = 20_000
"""Steps in which everything that was submitted has ended, in any scene: there are few requests, and short ones."""


class Violation(Exception):  # noqa: N818 - the name is the condition
    """An invariant does not hold, or the engine raised what it should not."""

    def __init__(self, step: int, what: str) -> None:
        # An engine's own ids come of chance: without them, the same run says the same.
        what = re.sub(r"request-[0-9a-f]+", "request", what)
        super().__init__(f"step {step}: {what}")
        self.step = step
        self.kind = re.sub(r"[\d(),: ]+", " ", what.partition(";")[0])
        """What it says first, without the numbers: the same for another instance of the same thing."""


class Simulation:
    """One play of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._events = list(reversed(scenario.events))
        """The next one is the last."""
        self.counts = EventCounts(seeds=1)
        self._stage = set_stage(scenario.scene, self._watch)
        self._clients = Clients(self._stage, self.counts)
        self._invariants = Invariants(self._stage)
        self._row_shares = RowShares(self._stage, self.counts)
        self._step = 0
        self._num_draining = 0
        self._is_open = True
        self._findings: list[str] = []
        """What is wrong, found where an exception would be taken for the model's."""

    def run(self) -> EventCounts:
        """To the end of everything. Raises `Violation`."""
        try:
            with torch.inference_mode(), _without_planned_faults():
                self._play()
        except Violation:
            raise
        except Exception as error:
            raise Violation(self._step, f"the engine raised {type(error).__name__}: {error}") from error
        faults = self._stage.faults
        self.counts.retractions = self._stage.engine.num_retractions
        self.counts.forwards = faults.num_forwards
        self.counts.failed_forwards = faults.num_failed_forwards
        self.counts.refused_allocations = faults.num_refused
        return self.counts

    def _play(self) -> None:
        while self._advance():
            while self._events and self._events[-1].at <= self._step:
                self._happen(self._events.pop())
            if self._is_open:
                self._run_step()
            self._step += 1
        if self._is_open:
            self._close()

    def _advance(self) -> bool:
        """Goes on to the next step in which something happens; False where nothing will."""
        if not self._is_open:
            return False
        if self._stage.engine.has_work:
            self._require_progress()
            return True
        coming = [event.at for event in self._events[-1:]]
        if self._clients.next_retry is not None:
            coming.append(self._clients.next_retry)
        if coming:
            self._step = max(self._step, min(coming))
        return bool(coming)

    def _require_progress(self) -> None:
        """Once nothing new happens, what is there ends."""
        if not self._events:
            self._num_draining += 1
            if self._num_draining > _MOST_DRAINING:
                self._check([f"{self._clients.num_live} requests never end"])

    def _run_step(self) -> None:
        stage = self._stage
        self._check(self._clients.before_step(self._step))
        self._row_shares.before_step()
        stage.faults.clock.tick()
        stage.engine.step()
        self.counts.steps += 1
        self._check(self._findings)
        if stage.faults.device_was_lost:
            self.counts.device_faults += 1
            self._is_open = False
            self._check(self._clients.after_step(self._step))
            self._check(self._clients.after_close())
            return
        self._check(self._invariants.after_step())
        self._check(self._clients.after_step(self._step))
        self.counts.ended_in_flight += any(
            row.sequence.is_out for flying in stage.engine.in_flight for row in flying.rows
        )

    def _happen(self, event: Event) -> None:
        faults = self._stage.faults
        match event:
            case ClientSubmits():
                self._check(self._clients.submit(self._step, event))
            case ClientCancels():
                self._clients.cancel(event.name)
            case ClientGone():
                self._clients.leave(event.name)
            case RefuseAllocations():
                faults.num_refusals += event.count
            case FailForward():
                faults.fails_next = True
            case SlowForward():
                self.counts.slow_forwards += 1
                faults.next_seconds += event.seconds
            case DeviceFault():
                faults.device_is_gone = True
            case Close():
                self.counts.closes += 1
                self._events.clear()
                self._close()

    def _close(self) -> None:
        self._is_open = False
        self._stage.engine.close()
        self._check(self._clients.after_close())
        self._check(self._invariants.at_rest())

    def _watch(self, batch: Batch) -> None:
        """Sees every batch just before its forward pass."""
        self._clients.see_running(self._step)
        self._findings.extend(self._invariants.before_forward(batch))
        self._findings.extend(self._row_shares.after_decision(self._step, sum(batch.query_lens.exact())))

    def _check(self, findings: Iterable[str]) -> None:
        found = list(findings)
        if found:
            raise Violation(self._step, "; ".join(dict.fromkeys(found)))


@contextmanager
def _without_planned_faults() -> Iterator[None]:
    """Keeps what the engine has to say of faults that the scenario asked for to itself."""

    def is_news(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], (PlannedFault, DeviceFaultError))

    logger = logging.getLogger("sightline")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def play(scenario: Scenario) -> Violation | None:
    """What is wrong with the engine as far as a scenario shows."""
    try:
        Simulation(scenario).run()
    except Violation as violation:
        return violation
    return None


def simulate(seed: int, num_steps: int) -> EventCounts:
    """Plays one seed. Raises `Violation`."""
    return Simulation(draw_scenario(seed, num_steps)).run()
