"""Timing of tasks in turns: every task runs once per round, so that a drift of the machine affects all of them.

Each round starts with another task, because the first one finds an idle device. Does not know what the tasks do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from sightline.bench.attention.shapes import Cost
from sightline.core.device import Device, DeviceKind

_KeyT = TypeVar("_KeyT")
_SLOW_SECONDS = 1.0
"""Time limit for all rounds of a task; at least one round runs."""


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a run over all rounds."""

    median: float
    low: float
    high: float
    num_samples: int

    @staticmethod
    def of(samples: list[float]) -> RoundTimes:
        return RoundTimes(statistics.median(samples), min(samples), max(samples), len(samples))

    def less(self, seconds: float) -> RoundTimes:
        """Subtracts something that every run includes."""
        median, low, high = (max(each - seconds, 0.0) for each in (self.median, self.low, self.high))
        return RoundTimes(median, low, high, self.num_samples)


class Clock:
    """Times work on a device that has finished it when the call returns, such as a CPU."""

    def wait(self) -> None:
        """Waits until the device has finished all its work."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds from the start of the work to its end on the device."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


class CudaClock(Clock):
    """Times work with CUDA events on the current stream."""

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3


def clock_of(device: Device) -> Clock:
    return CudaClock() if device.kind is DeviceKind.CUDA else Clock()


@dataclass(frozen=True, eq=False)
class TimedTask:
    """Something to time that runs one layer after the other."""

    run: Callable[[int], object]
    """Runs that many layers, a multiple of `unit`."""
    unit: int


@dataclass(frozen=True)
class TimingBudget:
    """How long to measure."""

    rounds: int = 7
    sample_seconds: float = 0.02
    """Approximate duration of a task per round: enough layers to make the first launch negligible."""


def time_in_turns(tasks: Mapping[_KeyT, TimedTask], clock: Clock, effort: TimingBudget) -> dict[_KeyT, RoundTimes]:
    """Returns each task's seconds per layer. A first timing decides how many layers a sample runs."""
    counts: dict[_KeyT, int] = {}
    rounds: dict[_KeyT, int] = {}
    for key, task in tasks.items():
        task.run(task.unit)
        # Bounds the number of runs if the clock is too coarse to time one.
        first = max(clock.seconds(partial(task.run, task.unit)), 1e-7)
        counts[key] = task.unit * max(1, round(effort.sample_seconds / first))
        rounds[key] = max(1, min(effort.rounds, int(_SLOW_SECONDS / first)))
    samples: dict[_KeyT, list[float]] = {key: [] for key in tasks}
    keys = list(tasks)
    for number in range(effort.rounds):
        begin = number % max(len(keys), 1)
        for key in (*keys[begin:], *keys[:begin]):
            if number < rounds[key]:
                samples[key].append(clock.seconds(partial(tasks[key].run, counts[key])) / counts[key])
    return {key: RoundTimes.of(taken) for key, taken in samples.items()}


def eager_task(layer: Callable[[int], object], num_layers: int) -> TimedTask:
    """A task that launches layer after layer from the host."""

    def run(count: int) -> None:
        for index in range(count):
            layer(index % num_layers)

    return TimedTask(run, 1)


@dataclass(frozen=True, eq=False)
class Captured:
    """All layers in one CUDA graph."""

    graph: torch.cuda.CUDAGraph
    out: Tensor
    """The last layer's output."""
    num_layers: int
    layer: Callable[[int], Tensor]
    """What was captured. A graph holds addresses only: the memory that it reads lives as long as this does."""

    def task(self) -> TimedTask:
        def run(count: int) -> None:
            for _ in range(count // self.num_layers):
                self.graph.replay()

        return TimedTask(run, self.num_layers)


class Between:
    """The launch after each layer in a graph: an ordinary one, such as a norm, which waits for everything before it.

    Without it, kernels that may start early would overlap the previous layer, which cannot happen in a model.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros(1, device=device)

    def launch(self) -> None:
        self._count.add_(1)

    def no_layer(self, layer: int) -> Tensor:
        """An empty layer, to time the launches between layers alone."""
        del layer
        return self._count


def capture(layer: Callable[[int], Tensor], num_layers: int, between: Between) -> Captured:
    """Runs all layers once on a side stream, then captures them in a graph."""
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for index in range(num_layers):
            layer(index)
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_layers):
            out = layer(index)
            between.launch()
    return Captured(graph, out, num_layers, layer)


def host_seconds(work: Callable[[], object], clock: Clock, count: int) -> RoundTimes:
    """Times the host alone: the device is idle at the start, and is not waited for."""
    samples = []
    work()
    for _ in range(count):
        clock.wait()
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    clock.wait()
    return RoundTimes.of(samples)


@dataclass(frozen=True)
class Rates:
    """Rates of this machine, measured in the same run."""

    bytes_per_second: float
    """Rate of a copy, counting bytes read and bytes written."""
    operations_per_second: float
    """Rate of a square matrix product."""

    def floor(self, cost: Cost) -> float:
        """The least time, in seconds."""
        return max(cost.num_bytes / self.bytes_per_second, cost.operations / self.operations_per_second)

    def is_bound_by_bytes(self, cost: Cost) -> bool:
        return cost.num_bytes / self.bytes_per_second >= cost.operations / self.operations_per_second


def measure_rates(device: Device, dtype: torch.dtype) -> Rates:
    """Measures the rates with 1 GiB and 8192³ on a GPU, and with less on a CPU."""
    on_cuda = device.kind is DeviceKind.CUDA
    clock, target = clock_of(device), device.torch_device
    num_bytes, size = (1 << 30, 8192) if on_cuda else (1 << 26, 512)
    source, copy = (torch.zeros(num_bytes, dtype=torch.uint8, device=target) for _ in range(2))
    square = torch.randn(size, size, device=target).to(dtype)
    product = torch.empty_like(square)
    tasks = {
        "copy": eager_task(lambda _: copy.copy_(source), 1),
        "product": eager_task(lambda _: torch.mm(square, square, out=product), 1),
    }
    taken = time_in_turns(tasks, clock, TimingBudget(rounds=9, sample_seconds=0.02 if on_cuda else 0.002))
    return Rates(2 * num_bytes / taken["copy"].median, 2 * size**3 / taken["product"].median)
