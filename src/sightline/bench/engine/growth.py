"""How the time of a decode step grows with rows and with context, compared with the floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sightline.bench.engine.measure import Conditions
from sightline.bench.engine.stepping import check_decoding, decoding_rows, step_seconds
from sightline.bench.engine.work import MeasuredEngine
from sightline.bench.floor import Machine
from sightline.bench.plot import Panel, Series, draw
from sightline.bench.tables import markdown_table
from sightline.engine.engine import Engine

MANY_ROWS = 8
"""Rows of the second curve over contexts."""
_HEADING = "rows | context | step, ms | floor, ms | of the floor | tokens/s"


@dataclass(frozen=True)
class GrowthPoint:
    """One measured batch."""

    rows: int
    context: int
    step_seconds: float
    """Median of the timed decode steps."""
    floor_seconds: float
    """Floor of the middle one of these steps."""

    def row(self) -> list[str]:
        """The cells of a table row."""
        step, floor = self.step_seconds, self.floor_seconds
        times = [f"{step * 1e3:.2f}", f"{floor * 1e3:.2f}", f"{floor / step:.0%}", f"{self.rows / step:.1f}"]
        return [str(self.rows), str(self.context), *times]


@dataclass(frozen=True)
class GrowthReport:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    num_steps: int
    """Decode steps per point."""
    by_rows: tuple[GrowthPoint, ...]
    by_context: tuple[GrowthPoint, ...]
    """With 1 row, then with `MANY_ROWS`."""

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"{self.conditions}: {self.machine}; medians of {self.num_steps} decode steps"]
        for varied, points in (("rows", self.by_rows), ("context", self.by_context)):
            lines += ["", f"By {varied}:", "", *markdown_table(_HEADING, [point.row() for point in points])]
        return lines

    def svg(self) -> str:
        """The report as a drawing."""
        by_rows = _panel("rows", "rows", {f"context {self.by_rows[0].context}": self.by_rows}, lambda point: point.rows)
        curves: dict[str, list[GrowthPoint]] = {}
        for point in self.by_context:
            curves.setdefault(f"{point.rows} row{'s' if point.rows > 1 else ''}", []).append(point)
        by_context = _panel("context", "tokens in each row's cache", curves, lambda point: point.context)
        return draw(str(self.conditions), [by_rows, by_context])


def measure_growth(
    subject: MeasuredEngine,
    rows: Sequence[int],
    contexts: Sequence[int],
    num_steps: int,
    on_timing: Callable[[int, int, float], None],
) -> GrowthReport:
    """Times all rows at the first context, then all contexts with 1 row and with `MANY_ROWS`.

    `on_timing` receives the rows, the context and the seconds of a step of every point.
    """
    batches = [(count, contexts[0]) for count in rows]
    batches += [(count, context) for count in (1, MANY_ROWS) for context in contexts]
    for count, context in batches:
        check_decoding(subject.llm.engine, count, context, num_steps)
    timed = []
    for count, context in batches:
        seconds, held = time_steps(subject.llm.engine, count, context, num_steps)
        timed.append((count, context, seconds, held))
        on_timing(count, context, seconds)
    floor = subject.measured_again()
    points = [GrowthPoint(count, context, seconds, floor.decode(held)) for count, context, seconds, held in timed]
    return GrowthReport(
        conditions=subject.conditions,
        machine=floor.machine,
        num_steps=num_steps,
        by_rows=tuple(points[: len(rows)]),
        by_context=tuple(points[len(rows) :]),
    )


def time_steps(engine: Engine, rows: int, context: int, num_steps: int) -> tuple[float, list[int]]:
    """Returns the median seconds of a decode step, and each row's cached tokens in the middle one of the steps."""
    with decoding_rows(engine, rows, context, num_steps) as held:
        seconds = step_seconds(engine, num_steps)
    return statistics.median(seconds), [tokens + 1 + num_steps // 2 for tokens in held]


def _panel(
    varied: str, label: str, curves: Mapping[str, Sequence[GrowthPoint]], place: Callable[[GrowthPoint], int]
) -> Panel:
    """Each curve's measured line and its floor."""
    series = []
    for colour, (name, points) in enumerate(curves.items()):
        measured = tuple((float(place(point)), point.step_seconds * 1e3) for point in points)
        floor = tuple((float(place(point)), point.floor_seconds * 1e3) for point in points)
        series += [Series(f"{name}, measured", measured, colour), Series(f"{name}, floor", floor, colour, dashed=True)]
    return Panel(f"Step time by {varied}", label, "ms per step", tuple(series))
