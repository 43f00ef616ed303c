"""Times attention backends and peers on the same shapes, in turns. A contender with a wrong answer gets no time.

shape ─▶ tensors ─▶ contenders ─▶ checked, eager and in a graph ─▶ timed in turns ─▶ plan timed on the host ─▶ result
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from sightline.attention.selection import Candidate, nearest_miss, serving_row
from sightline.bench.attention.contenders import Contender, Origin, build_ours, requirement, selected, work_of
from sightline.bench.attention.data import ShapeData, build_data, count_layers, pool_bytes
from sightline.bench.attention.peers import AttentionPeer
from sightline.bench.attention.results import (
    AttentionReport,
    ContenderResult,
    ContenderState,
    Mode,
    Part,
    ShapeResult,
)
from sightline.bench.attention.shapes import Shape
from sightline.bench.attention.surroundings import surround
from sightline.bench.attention.timing import (
    Between,
    Captured,
    Rates,
    RoundTimes,
    TimedTask,
    TimingBudget,
    capture,
    clock_of,
    eager_task,
    host_seconds,
    measure_rates,
    time_in_turns,
)
from sightline.core.device import Device, DeviceKind, available_bytes
from sightline.runner.environment import collect_environment

_PLANS = 21
_SURROUNDINGS = ""
"""Key of the time of the cache write and projections alone, in place of a contender's name."""
_BETWEEN = " "
"""Key of the time of the launch between the layers of a graph."""


@dataclass(frozen=True)
class Field:
    """The contenders and the device."""

    device: Device
    candidates: tuple[Candidate, ...]
    """Backends to measure."""
    installed: tuple[Candidate, ...]
    """Backends among which an engine would choose."""
    peers: tuple[AttentionPeer, ...]
    effort: TimingBudget = field(default_factory=TimingBudget)
    max_pool_bytes: int | None = None
    """Largest cache of a shape; None is half of the free memory."""


@dataclass(frozen=True, eq=False)
class _Entry:
    """A contender that was tried, and its tasks to time."""

    result: ContenderResult
    contender: Contender | None = None
    tasks: Mapping[tuple[Part, Mode], TimedTask] = field(default_factory=dict)


class _WrongAnswer(Exception):  # noqa: N818 - the name is the condition
    """An output that differs from the oracle's."""


def measure_attention(
    shapes: Sequence[Shape], entrants: Field, on_shape: Callable[[AttentionReport, Shape, float], None]
) -> AttentionReport:
    """Measures every shape that fits into memory. Ctrl-C ends it with what was measured until then.

    After each shape, measured or not, `on_shape` receives the report so far, the shape and its seconds, so that a
    process that dies later has already written its results.
    """
    run = _Run(shapes, entrants)
    try:
        for shape in shapes:
            began = time.perf_counter()
            run.measure(shape)
            on_shape(run.report(), shape, time.perf_counter() - began)
    except KeyboardInterrupt:
        pass
    return run.report()


class _Run:
    """The results of a run so far."""

    def __init__(self, shapes: Sequence[Shape], entrants: Field) -> None:
        self._started = time.perf_counter()
        self._environment = collect_environment()
        self._device = entrants.device
        self._rates = measure_rates(entrants.device, shapes[0].dtype)
        self._missing = {peer.name: reason for peer in entrants.peers if (reason := peer.missing()) is not None}
        present = tuple(peer for peer in entrants.peers if peer.name not in self._missing)
        self._entrants = replace(entrants, peers=present)
        self._limit = entrants.max_pool_bytes or available_bytes(entrants.device) // 2
        self._names = tuple(shape.name for shape in shapes)
        self._results: list[ShapeResult] = []
        self._skipped: dict[str, str] = {}
        self._broken: dict[str, str] = {}

    def measure(self, shape: Shape) -> None:
        num_bytes = pool_bytes(shape, count_layers(shape, self._device))
        if num_bytes > self._limit:
            room = f"{num_bytes / 2**30:.1f} GiB of the {self._limit / 2**30:.1f} allowed"
            self._skipped[shape.name] = f"its cache takes {room}"
        else:
            try:
                result = measure_shape(shape, self._entrants, self._rates)
                _release(self._device)
                self._results.append(result)
            except RuntimeError as error:  # the device failed or is full: keep earlier results
                self._broken[shape.name] = _described(error)

    def report(self) -> AttentionReport:
        done = {result.shape.name for result in self._results} | self._skipped.keys() | self._broken.keys()
        left = [name for name in self._names if name not in done]
        return AttentionReport(
            environment=self._environment,
            device=self._device.name,
            rates=self._rates,
            shapes=tuple(self._results),
            skipped_shapes=self._skipped | dict.fromkeys(left, "interrupted"),
            broken_shapes=dict(self._broken),
            missing_peers=self._missing,
            is_interrupted=bool(left),
            seconds=time.perf_counter() - self._started,
        )


def measure_shape(shape: Shape, entrants: Field, rates: Rates) -> ShapeResult:
    """Measures all contenders that serve the shape, on the same tensors."""
    data = build_data(shape, entrants.device, count_layers(shape, entrants.device))
    between = Between(entrants.device.torch_device)
    entries = [_enter_ours(candidate, data, between) for candidate in entrants.candidates]
    entries += [_enter_peer(peer, data, between) for peer in entrants.peers]
    times = _apart(time_in_turns(_tasks(entries, data, between), clock_of(entrants.device), entrants.effort))
    chosen = selected(entrants.installed, shape, entrants.device)
    results = tuple(_timed(entry, times, entrants, chosen) for entry in entries)
    return ShapeResult(shape, data.num_layers, rates, data.tolerance, results)


def _enter_ours(candidate: Candidate, data: ShapeData, between: Between) -> _Entry:
    blank = ContenderResult(candidate.name, Origin.OURS, ContenderState.RIGHT)
    need, work = requirement(data.shape, data.device), work_of(data.shape)
    row = serving_row(candidate, need, work)
    if row is None:
        detail = "; ".join(nearest_miss(candidate, need, work).reasons)
        return _Entry(replace(blank, state=ContenderState.SKIPPED, detail=detail))
    return _try(blank, lambda: build_ours(candidate, row, data), data, between)


def _enter_peer(peer: AttentionPeer, data: ShapeData, between: Between) -> _Entry:
    blank = ContenderResult(peer.name, Origin.PEER, ContenderState.RIGHT)
    refusal = peer.refuses(data.shape, data.device)
    if refusal is not None:
        return _Entry(replace(blank, state=ContenderState.SKIPPED, detail=refusal))
    return _try(blank, lambda: peer.build(data), data, between)


def _try(blank: ContenderResult, build: Callable[[], Contender], data: ShapeData, between: Between) -> _Entry:
    """Builds a contender and compares its output with the oracle's, eager and in a graph."""
    try:
        contender = build()
        error = _check(lambda: _all_layers(contender, data), data, "")
        tasks, no_graph = _contender_tasks(contender, data, between)
    except _WrongAnswer as wrong:
        return _Entry(replace(blank, state=ContenderState.WRONG, detail=str(wrong)))
    except Exception as raised:  # foreign code: whatever it raises is its result
        trace = "".join(traceback.format_exception(raised))
        return _Entry(replace(blank, state=ContenderState.FAILED, detail=_described(raised), trace=trace))
    return _Entry(replace(blank, error=error, no_graph=no_graph), contender, tasks)


def _all_layers(contender: Contender, data: ShapeData) -> Tensor:
    for layer in range(data.num_layers):
        out = contender.layer(layer)
    return out


def _check(run: Callable[[], Tensor], data: ShapeData, where: str) -> float:
    data.forget()
    error = data.error(run())
    if error > data.tolerance:
        raise _WrongAnswer(
            f"expected outputs within {data.tolerance:g} of the oracle{where}, got one that is {error:.3g} away"
        )
    return error


def _contender_tasks(
    contender: Contender, data: ShapeData, between: Between
) -> tuple[dict[tuple[Part, Mode], TimedTask], str | None]:
    """Returns the tasks to time, and why not in a graph. Raises `_WrongAnswer` if a graph gives another answer."""
    tasks = {(Part.LAYER, Mode.EAGER): eager_task(contender.layer, data.num_layers)}
    if contender.kernel is not None:
        tasks[Part.KERNEL, Mode.EAGER] = eager_task(contender.kernel, data.num_layers)
    if data.device.kind is not DeviceKind.CUDA:
        return tasks, None
    if contender.no_graph is not None:
        return tasks, contender.no_graph
    try:
        layers = capture(contender.layer, data.num_layers, between)
        _check(lambda: _replayed(layers), data, " in a graph")
        tasks[Part.LAYER, Mode.GRAPH] = layers.task()
        if contender.kernel is not None:
            tasks[Part.KERNEL, Mode.GRAPH] = capture(contender.kernel, data.num_layers, between).task()
    except _WrongAnswer:
        raise
    except Exception as raised:  # foreign code: it runs, but cannot be captured
        return tasks, f"capture failed: {_described(raised)}"
    return tasks, None


def _replayed(captured: Captured) -> Tensor:
    """The last layer's output, which is NaN if the graph does not write it."""
    captured.out.fill_(torch.nan)
    captured.graph.replay()
    return captured.out


def _tasks(entries: Sequence[_Entry], data: ShapeData, between: Between) -> dict[tuple[str, Part, Mode], TimedTask]:
    """The tasks of all contenders, of the surroundings alone, and of the launch between layers alone."""
    tasks = {(entry.result.name, *key): task for entry in entries for key, task in entry.tasks.items()}
    if not tasks:
        return {}
    alone = surround(data).alone
    tasks[_SURROUNDINGS, Part.LAYER, Mode.EAGER] = eager_task(alone, data.num_layers)
    if data.device.kind is DeviceKind.CUDA:
        tasks[_SURROUNDINGS, Part.LAYER, Mode.GRAPH] = capture(alone, data.num_layers, between).task()
        tasks[_BETWEEN, Part.LAYER, Mode.GRAPH] = capture(between.no_layer, data.num_layers, between).task()
    return tasks


def _apart(times: Mapping[tuple[str, Part, Mode], RoundTimes]) -> dict[tuple[str, Part, Mode], RoundTimes]:
    """Subtracts the time of the launch between layers from all other times in a graph."""
    around = {mode: timing.median for (name, _, mode), timing in times.items() if name == _BETWEEN}
    return {key: timing.less(around.get(key[2], 0.0)) for key, timing in times.items() if key[0] != _BETWEEN}


def _timed(
    entry: _Entry, times: Mapping[tuple[str, Part, Mode], RoundTimes], entrants: Field, chosen: str | None
) -> ContenderResult:
    """Adds the times to a result. Times the plan last, because a new plan invalidates a captured graph."""
    result = replace(entry.result, is_selected=entry.result.name == chosen)
    if entry.contender is None:
        return result
    own = {(part, mode): timing for (name, part, mode), timing in times.items() if name == result.name}
    if result.origin is Origin.OURS:
        around = {mode: timing for (name, _, mode), timing in times.items() if name == _SURROUNDINGS}
        own |= _differences(own, around)
    clock, plan, prepare = clock_of(entrants.device), entry.contender.plan, entry.contender.prepare
    device_work = None if prepare is None else {"": TimedTask(lambda count: [prepare() for _ in range(count)], 1)}
    return replace(
        result,
        times=own,
        plan=None if plan is None else host_seconds(plan, clock, _PLANS),
        prepare=None if device_work is None else time_in_turns(device_work, clock, entrants.effort)[""],
    )


def _differences(
    own: Mapping[tuple[Part, Mode], RoundTimes], around: Mapping[Mode, RoundTimes]
) -> dict[tuple[Part, Mode], RoundTimes]:
    """A backend's kernel times: the layer's minus those of the surroundings, if positive."""
    return {
        (Part.KERNEL, mode): timing.less(around[mode].median)
        for (_, mode), timing in own.items()
        if timing.median > around[mode].median
    }


def _described(raised: Exception) -> str:
    """The error with the line that raised it."""
    place = traceback.extract_tb(raised.__traceback__)[-1]
    return f"{type(raised).__name__}: {raised} (in {place.name}, {Path(place.filename).name}:{place.lineno})"


def _release(device: Device) -> None:
    """Frees the memory of a shape. Graphs and pools refer to each other, so that only a collection does."""
    gc.collect()
    if device.kind is DeviceKind.CUDA:
        torch.cuda.empty_cache()
