"""How a step's time grows with rows and with context, beside the floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sightline.bench.engine.measure import Conditions
from sightline.bench.engine.stepping import check_room, decoding_rows
from sightline.bench.engine.work import MeasuredEngine
from sightline.bench.floor import Floor, Machine
from sightline.bench.plot import Panel, Series, draw
from sightline.engine.engine import Engine

MANY_ROWS = 8
"""Of the second curve over contexts."""


@dataclass(frozen=True)
class DecodeTimes:
    """Decode steps of one batch."""

    context: int
    """As asked for."""
    step_seconds: float
    """The median."""
    held: tuple[int, ...]
    """By row: tokens in the cache in the middle one of the steps."""


@dataclass(frozen=True)
class GrowthPoint:
    """One measured batch."""

    rows: int
    context: int
    step_seconds: float
    """The median of the timed decode steps."""
    floor_seconds: float
    """Of the middle one of them."""


@dataclass(frozen=True)
class GrowthReport:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    num_steps: int
    """Decode steps that each median is of."""
    by_rows: tuple[GrowthPoint, ...]
    by_context: tuple[GrowthPoint, ...]
    """With 1 row, then with more."""

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"{self.conditions}: {self.machine}; medians of {self.num_steps} decode steps", ""]
        for varied, points in (("rows", self.by_rows), ("context", self.by_context)):
            lines += [f"By {varied}:", "", "| rows | context | step, ms | floor, ms | of the floor | tokens/s |"]
            lines += ["| --- | --- | --- | --- | --- | --- |", *map(_row, points), ""]
        return lines[:-1]

    def svg(self) -> str:
        """The report as a drawing."""
        by_rows = _panel("rows", "rows", {f"context {self.by_rows[0].context}": self.by_rows}, lambda point: point.rows)
        curves: dict[str, tuple[GrowthPoint, ...]] = {}
        for point in self.by_context:
            name = f"{point.rows} row{'s' if point.rows > 1 else ''}"
            curves[name] = (*curves.get(name, ()), point)
        by_context = _panel("context", "tokens in each row's cache", curves, lambda point: point.context)
        return draw(str(self.conditions), [by_rows, by_context])


def measure_growth(
    subject: MeasuredEngine,
    rows: Sequence[int],
    contexts: Sequence[int],
    num_steps: int,
    on_timing: Callable[[DecodeTimes], None],
) -> GrowthReport:
    """Times all rows at the first context, then all contexts with 1 row and with `MANY_ROWS`."""
    by_rows = [(count, contexts[0]) for count in rows]
    by_context = [(count, context) for count in (1, MANY_ROWS) for context in contexts]
    for count, context in [*by_rows, *by_context]:
        check_room(subject.llm.engine, count, context, num_steps)
    timed: list[DecodeTimes] = []
    for count, context in [*by_rows, *by_context]:
        timed.append(time_steps(subject.llm.engine, count, context, num_steps))
        on_timing(timed[-1])
    floor = subject.measured_again()
    points = [_point(timing, floor) for timing in timed]
    return GrowthReport(
        conditions=subject.conditions,
        machine=floor.machine,
        num_steps=num_steps,
        by_rows=tuple(points[: len(by_rows)]),
        by_context=tuple(points[len(by_rows) :]),
    )


def time_steps(engine: Engine, rows: int, context: int, num_steps: int) -> DecodeTimes:
    """The median decode step of `rows` rows that hold `context` tokens, or a few more."""
    seconds = []
    with decoding_rows(engine, rows, context, num_steps) as held:
        for _ in range(num_steps):
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
    return DecodeTimes(context, statistics.median(seconds), tuple(tokens + 1 + num_steps // 2 for tokens in held))


def _point(timing: DecodeTimes, floor: Floor) -> GrowthPoint:
    return GrowthPoint(len(timing.held), timing.context, timing.step_seconds, floor.decode(timing.held))


def _panel(
    varied: str, label: str, curves: Mapping[str, Sequence[GrowthPoint]], place: Callable[[GrowthPoint], int]
) -> Panel:
    """Each curve's measured line and its floor's."""
    series = []
    for colour, (name, points) in enumerate(curves.items()):
        measured = tuple((float(place(point)), point.step_seconds * 1e3) for point in points)
        floor = tuple((float(place(point)), point.floor_seconds * 1e3) for point in points)
        series += [Series(f"{name}, measured", measured, colour), Series(f"{name}, floor", floor, colour, dashed=True)]
    return Panel(f"Step time by {varied}", label, "ms a step", tuple(series))


def _row(point: GrowthPoint) -> str:
    step, floor = point.step_seconds, point.floor_seconds
    return (
        f"| {point.rows} | {point.context} | {step * 1e3:.2f} | {floor * 1e3:.2f} | {floor / step:.0%} | "
        f"{point.rows / step:.1f} |"
    )
