"""Cost of the scheduler and the prefix cache per step, by number of rows and of cached prefixes.

    schedule       decide which rows run, evict, allocate pages, lay out the rows
    bookkeeping    launch the step, commit every row's token, publish full pages, end the step

Times are processor times of the single thread that does all of it, so that other processes do not count. Elapsed times
are reported too. `load` makes the load and checks the result before any number is reported; `idle_engine` measures the
rest of a step's work on the host.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sightline.bench.host.idle_engine import HostBench, HostStep
from sightline.bench.host.load import LONG_PROMPT, NUM_CALLERS, PAGE_SIZE, PREFIX_PAGES, Load, LoadedScheduler
from sightline.bench.tables import markdown_table
from sightline.core.device import single_threaded
from sightline.core.errors import SightlineError
from sightline.runner.environment import collect_environment
from sightline.scheduler.sequence import ScheduledRow

BAR_ROWS, BAR_PREFIXES = 256, 10_000
"""The load to which both bars apply."""
STEP_BAR = 1.5e-3
"""Limit for scheduling and bookkeeping of a step, in seconds."""
LOOKUP_BAR = 1e-3
"""Limit for finding a cached prompt of `LONG_PROMPT` tokens, in seconds."""
WARM_STEPS = 4
TURN_STEPS = 8
"""Steps of one load before it is the next one's turn."""
_FACTS = ("sightline", "python", "platform", "cpu", "load average")
_HEADING = (
    "rows | prefixes | schedule, ms | bookkeeping, ms | both, ms: median, least, largest | growth | if linear | "
    "elapsed, ms | lookup, ms | lock and unlock, ms"
)


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds of processor time."""

    median: float
    least: float
    largest: float

    @staticmethod
    def of(seconds: Sequence[float]) -> ProcessorTimes:
        return ProcessorTimes(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class LoadPoint:
    """The times of one load."""

    TIMED: ClassVar = ("schedule", "bookkeeping", "both", "elapsed", "lookup", "lock")
    rows: int
    prefixes: int
    schedule: ProcessorTimes
    bookkeeping: ProcessorTimes
    both: ProcessorTimes
    """The sum of both, per step."""
    elapsed: ProcessorTimes
    """Elapsed time of both."""
    lookup: ProcessorTimes
    """Finding a cached prompt of `LONG_PROMPT` tokens."""
    lock: ProcessorTimes
    """Locking what was found, and unlocking it."""


@dataclass(frozen=True)
class SchedulingReport:
    """A whole run."""

    environment: Mapping[str, str]
    num_steps: int
    by_rows: tuple[LoadPoint, ...]
    by_prefixes: tuple[LoadPoint, ...]
    overlapped: LoadPoint
    """The load of the bars, or the first one given, with a step in flight while the next is scheduled."""
    host: HostStep
    """A step of an engine under the same load, for information."""

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            "; ".join(f"{name} {self.environment[name]}" for name in _FACTS),
            f"{self.num_steps} decode steps per load, in turns; processor time. As many requests wait as run, of "
            f"{NUM_CALLERS} callers. Each cached prefix is a separate prompt: {PREFIX_PAGES} pages of {PAGE_SIZE} "
            "tokens in each of two pools. No page is free: a row grows by evicting a page. After the steps, the "
            "owners of every page and the tokens of every row were checked.",
            *_table("rows", self.by_rows, [point.rows for point in self.by_rows]),
            *_table("prefixes", self.by_prefixes, [point.prefixes for point in self.by_prefixes]),
            *_table("a step in flight while the next is scheduled", [self.overlapped], [1]),
            "",
            *verdicts((*self.by_rows, *self.by_prefixes)),
            "",
            *_host_lines(self.host, self.overlapped),
        ]


class SchedulerBench:
    """A loaded scheduler and the times of its steps."""

    def __init__(self, load: Load, max_in_flight: int = 0) -> None:
        """`max_in_flight` steps are launched but not committed when the next is scheduled."""
        self.loaded = LoadedScheduler(load, max_in_flight)
        self._load = load
        self._seconds: dict[str, list[float]] = {name: [] for name in LoadPoint.TIMED}

    def run(self, num_steps: int) -> None:
        """Runs decode steps, and as many lookups. Raises if a step did not run every row."""
        for tokens in [self.loaded.tokens() for _ in range(num_steps)]:
            self._time_step(tokens)
        for _ in range(num_steps):
            self._time_lookup()

    def point(self) -> LoadPoint:
        """Returns the times. Raises if the steps left an inconsistent state."""
        self.loaded.land()
        self.loaded.check()
        spreads = {name: ProcessorTimes.of(seconds[WARM_STEPS:]) for name, seconds in self._seconds.items()}
        return LoadPoint(rows=self._load.rows, prefixes=self._load.prefixes, **spreads)

    def _time_step(self, tokens: Sequence[int]) -> None:
        start, begun = time.perf_counter(), time.thread_time()
        rows = self.loaded.scheduler.schedule().rows
        scheduled, paused = time.thread_time(), time.perf_counter()
        self._check_rows(rows)
        resumed, committing = time.perf_counter(), time.thread_time()
        self.loaded.launch(rows)
        self.loaded.commit(tokens)
        bookkeeping, schedule = time.thread_time() - committing, scheduled - begun
        elapsed = time.perf_counter() - resumed + paused - start
        self._note(schedule=schedule, bookkeeping=bookkeeping, both=schedule + bookkeeping, elapsed=elapsed)

    def _check_rows(self, rows: Sequence[ScheduledRow]) -> None:
        num_tokens = sum(row.num_tokens for row in rows)
        if len(rows) != self._load.rows or num_tokens != self._load.rows:
            raise SightlineError(
                f"expected steps of {self._load.rows} rows, one token each, got one of {len(rows)} rows and "
                f"{num_tokens} tokens; nothing is reported"
            )

    def _time_lookup(self) -> None:
        start = time.thread_time()
        match = self.loaded.find_long()
        found = time.thread_time()
        self.loaded.lock_long(match)
        self._note(lookup=found - start, lock=time.thread_time() - found)

    def _note(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self._seconds[name].append(value)


def measure_scheduling(
    rows: Sequence[int], prefixes: Sequence[int], num_steps: int, on_built: Callable[[Load], None]
) -> SchedulingReport:
    """Measures all rows at one number of prefixes, and all prefixes at one number of rows.

    These numbers are those of the bars if given, otherwise the first. Raises if a check of the steps fails.
    """
    usual = (_usual(rows, BAR_ROWS), _usual(prefixes, BAR_PREFIXES))
    asked = [(count, usual[1]) for count in rows] + [(usual[0], count) for count in prefixes]
    benches: dict[tuple[int, int], SchedulerBench] = {}
    for each in dict.fromkeys(asked):
        load = Load(*each, WARM_STEPS + num_steps)
        benches[each] = SchedulerBench(load)
        on_built(load)
    environment = collect_environment() | {"load average": f"{os.getloadavg()[0]:.1f}"}
    load = Load(*usual, WARM_STEPS + num_steps)
    overlapped, host = SchedulerBench(load, max_in_flight=1), HostBench(load)
    # The tensors here are too small for several threads, which would only spin.
    with single_threaded():
        _run_in_turns([*benches.values(), overlapped, host], num_steps)
    points = {each: bench.point() for each, bench in benches.items()}
    return SchedulingReport(
        environment=environment,
        num_steps=num_steps,
        by_rows=tuple(points[each] for each in asked[: len(rows)]),
        by_prefixes=tuple(points[each] for each in asked[len(rows) :]),
        overlapped=overlapped.point(),
        host=host.step(),
    )


def _run_in_turns(benches: Sequence[SchedulerBench | HostBench], num_steps: int) -> None:
    """Runs a few steps of each at a time, so that other load on the machine affects all of them."""
    # Collects garbage of the set-up, so that no step has to.
    gc.collect()
    for count in [WARM_STEPS, *(min(TURN_STEPS, num_steps - done) for done in range(0, num_steps, TURN_STEPS))]:
        for bench in benches:
            bench.run(count)


def _usual(counts: Sequence[int], bar: int) -> int:
    return bar if bar in counts else counts[0]


def _table(varied: str, points: Sequence[LoadPoint], sizes: Sequence[int]) -> list[str]:
    """A table of points. `sizes` are proportional to the times if these grow linearly."""
    rows = [
        [
            *(f"{point.rows:,}", f"{point.prefixes:,}", _ms(point.schedule.median), _ms(point.bookkeeping.median)),
            ", ".join(map(_ms, (point.both.median, point.both.least, point.both.largest))),
            *(f"{point.both.median / points[0].both.median:.2f}×", f"{size / sizes[0]:.2f}×"),
            *map(_ms, (point.elapsed.median, point.lookup.median, point.lock.median)),
        ]
        for point, size in zip(points, sizes, strict=True)
    ]
    return ["", f"By {varied}:" if len(points) > 1 else f"With {varied}:", "", *markdown_table(_HEADING, rows)]


def verdicts(points: Iterable[LoadPoint]) -> list[str]:
    """Says whether the medians meet the bars."""
    where = f"at {BAR_ROWS} rows and {BAR_PREFIXES:,} prefixes"
    at_bar = [point for point in points if (point.rows, point.prefixes) == (BAR_ROWS, BAR_PREFIXES)]
    if not at_bar:
        return [f"The bars apply {where}, which was not measured."]
    held = (
        ("Scheduling and bookkeeping", at_bar[0].both, STEP_BAR),
        (f"Lookup of {LONG_PROMPT:,} tokens", at_bar[0].lookup, LOOKUP_BAR),
    )
    return [
        f"{name} {where}: {_ms(spread.median)} ms, bar {_ms(bar)} ms: {'met' if spread.median <= bar else 'MISSED'}."
        for name, spread, bar in held
    ]


def _host_lines(host: HostStep, point: LoadPoint) -> list[str]:
    """Shows where the host's time of a step goes."""
    parts = {
        "scheduling and bookkeeping": point.both.median,
        "assemble": host.assemble,
        "plan": host.plan,
        "sampling": host.sampling,
    }
    listed = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in parts.items())
    return [
        f"For information, a step of an engine at {point.rows} rows and {point.prefixes:,} prefixes whose model "
        f"computes nothing, with a step in flight, one thread and no tokenizer: {_ms(host.whole)} ms, of which "
        f"{listed}, the rest {_ms(host.whole - sum(parts.values()))}."
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
