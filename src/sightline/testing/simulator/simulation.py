"""Plays a scenario on a real engine and checks every invariant after each step.

Deterministic: a run depends on its scenario alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from sightline.core.batch import Batch
from sightline.testing.simulator.clients import Clients
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.invariants import Invariants
from sightline.testing.simulator.rows import RowShares
from sightline.testing.simulator.scenario import (
    ClientCancels,
    ClientGone,
    ClientReads,
    ClientStalls,
    ClientSubmits,
    Close,
    DeviceFault,
    Event,
    FailForward,
    LoseRank,
    RefuseAllocations,
    Scenario,
    SlowForward,
)
from sightline.testing.simulator.stage import set_stage
from sightline.testing.simulator.workload import draw_scenario

_MOST_DRAINING = 20_000
"""Steps after the last event by which every request must have ended: requests are few and short."""


class Violation(Exception):  # noqa: N818 - the name is the condition
    """An invariant does not hold, or the engine raised an unexpected error."""

    def __init__(self, step: int, what: str) -> None:
        # The engine's request ids are random: without them, the same run gives the same message.
        what = re.sub(r"request-[0-9a-f]+", "request", what)
        super().__init__(f"step {step}: {what}")
        self.step = step
        self.kind = re.sub(r"[\d(),: ]+", " ", what.partition(";")[0])
        """The first finding without its numbers, which is the same for violations of the same kind."""


class Simulation:
    """One play of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._events = list(reversed(scenario.events))
        """In reverse: the next event is the last item."""
        self.counts = EventCounts(seeds=1)
        self._findings: list[str] = []
        """Violations found inside a forward pass, where an exception would be taken for the model's."""
        self._stage = set_stage(scenario.scene, self._watch, self.counts, self._findings.append)
        self._clients = Clients(self._stage, self.counts)
        self._invariants = [Invariants(each) for each in self._stage.replicas]
        self._row_shares = [RowShares(each, self.counts) for each in self._stage.replicas]
        self._step = 0
        self._num_draining = 0
        self._is_open = True

    def run(self) -> EventCounts:
        """Plays until every event has happened and every request has ended. Raises `Violation`."""
        try:
            with torch.inference_mode(), _unlogged():
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
        """Moves on to the next step in which something happens. Returns False if nothing will."""
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
        elif self._clients.num_live:
            self._wake()
            return True
        return bool(coming)

    def _wake(self) -> None:
        """Lets time pass until the next deadline of what is paused or, if there is none, lets every client read."""
        engine, clock = self._stage.engine, self._stage.faults.clock
        if engine.idle_seconds is not None:
            clock.now += engine.idle_seconds
        else:
            self._clients.read_all()
        if not engine.has_work:
            self._check([f"{self._clients.num_live} requests never end"])

    def _require_progress(self) -> None:
        """Fails if requests are still open long after the last event."""
        if not self._events:
            self._num_draining += 1
            if self._num_draining > _MOST_DRAINING:
                self._check([f"{self._clients.num_live} requests never end"])

    def _run_step(self) -> None:
        stage = self._stage
        self._check(self._clients.before_step(self._step))
        for shares in self._row_shares:
            shares.before_step()
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
        for invariants in self._invariants:
            self._check(invariants.after_step())
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
            case ClientStalls():
                self._clients.stall(event.name)
            case ClientReads():
                self._clients.read_on(event.name)
            case RefuseAllocations():
                faults.num_refusals += event.count
            case FailForward():
                faults.fails_next = True
            case SlowForward():
                self.counts.slow_forwards += 1
                faults.next_seconds += event.seconds
            case LoseRank(how=how):
                faults.rank_loss = how
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
        for invariants in self._invariants:
            self._check(invariants.at_rest())

    def _watch(self, replica: int, batch: Batch) -> None:
        """Checks a replica's batch just before its forward pass."""
        self.counts.trees += sum(mask.tree is not None for mask in batch.masks)
        self._findings.extend(self._clients.see_running(self._step, replica, batch.rows))
        self._findings.extend(self._invariants[replica].before_forward(batch))
        num_tokens = sum(batch.query_lens.exact())
        self._findings.extend(self._row_shares[replica].after_decision(self._step, num_tokens))

    def _check(self, findings: Iterable[str]) -> None:
        found = list(findings)
        if found:
            raise Violation(self._step, "; ".join(dict.fromkeys(found)))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silences the engine's log: its errors are planned, or found as violations."""
    logger = logging.getLogger("sightline")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def play(scenario: Scenario) -> Violation | None:
    """Returns the violation that a scenario shows, or None."""
    try:
        Simulation(scenario).run()
    except Violation as violation:
        return violation
    return None


def simulate(
    seed: int,
    num_steps: int,
    *,
    guesses: bool = False,
    states: bool = False,
    sparse: bool = False,
    host: bool = False,
    ranks: bool = False,
) -> EventCounts:
    """Plays one seed, with guessed tokens, a recurrent group, a sparse layer, a host tier or several ranks if asked.

    Raises `Violation`.
    """
    scenario = draw_scenario(seed, num_steps, guesses=guesses, states=states, sparse=sparse, host=host, ranks=ranks)
    return Simulation(scenario).run()
