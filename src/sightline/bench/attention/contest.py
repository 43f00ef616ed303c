"""Contests between implementations of one shape: each is checked, then all are timed in turns, in CUDA graphs.

Prints medians as Markdown, in microseconds, beside the least time that bytes and products allow. Does not know what is
computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from sightline.bench.attention.shapes import Cost
from sightline.bench.attention.timing import (
    Between,
    Rates,
    TimedTask,
    TimingBudget,
    capture,
    clock_of,
    eager_task,
    time_in_turns,
)
from sightline.bench.budget import Budget, OutOfTime
from sightline.core.device import Device


class Entrant(NamedTuple):
    """Something that may be timed. `run` takes the layer."""

    run: Callable[[int], Tensor]
    check: Callable[[Tensor], str | None]
    """What is wrong with the result of the last layer; None if nothing is."""


Entrants: TypeAlias = Iterable[tuple[str, Callable[[], Entrant]]]
"""Names, and what makes the contender, which may take minutes to compile."""


@dataclass(frozen=True)
class Contest:
    """Checks and times contenders."""

    device: Device
    rates: Rates
    effort: TimingBudget
    layers: int
    budgets: defaultdict[str, Budget] = field(compare=False)
    """How long each contender may still be made and tried."""

    def report(self, title: str, cost: Cost, contenders: Entrants) -> None:
        floor = self.rates.floor(cost)
        head = f"\n## {title}\n\nfloor {floor * 1e6:.1f} µs\n\n| contender | µs | times the floor |\n|---|---|---|"
        print(head, flush=True)
        tasks: dict[str, TimedTask] = {}
        between = Between(self.device.torch_device)
        for name, make in contenders:
            try:
                with self.budgets[name].spend():
                    contender = make()
                    wrong = contender.check(contender.run(self.layers - 1))
                    if wrong is None:
                        tasks[name] = self._task(contender, between)
                        continue
            except OutOfTime:
                wrong = "skipped: its budget of seconds is used up"
            except Exception as error:  # A contender that fails must not end the run.
                wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"| {name} | {wrong} | |", flush=True)
        empty = self._task(Entrant(between.no_layer, lambda _: None), between) if tasks else None
        self._print(tasks if empty is None else {**tasks, "": empty}, floor)

    def _print(self, tasks: Mapping[str, TimedTask], floor: float) -> None:
        times = time_in_turns(tasks, clock_of(self.device), self.effort)
        between = times.pop("").median if "" in times else 0.0
        for name, taken in times.items():
            seconds = max(taken.median - between, 0.0)
            print(f"| {name} | {seconds * 1e6:.1f} | {seconds / floor:.2f} |", flush=True)

    def _task(self, contender: Entrant, between: Between) -> TimedTask:
        if self.device.torch_device.type != "cuda":
            return eager_task(contender.run, self.layers)
        try:
            captured = capture(contender.run, self.layers, between)
            captured.out.fill_(-1)
            captured.graph.replay()
            wrong = contender.check(captured.out)
        except Exception as error:  # Whatever cannot be captured is timed from the host.
            wrong = f"{type(error).__name__}"
            torch.cuda.synchronize()
        if wrong is None:
            return captured.task()
        print(f"| timed from the host: {wrong} in a graph | | |", flush=True)
        return eager_task(contender.run, self.layers)
