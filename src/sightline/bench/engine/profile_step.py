"""Where the time of a decode step goes: phases of the host, and operations or kernels of the device.

Phases and the time of a step are measured without torch's profiler, which slows down the host. On a CPU it names the
operations; use their shares. On a GPU it names the kernels, whose own times it does not change: the device is idle for
what they leave of a step.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

from sightline.bench.engine.measure import Report
from sightline.bench.engine.stepping import decoding_rows, step_seconds
from sightline.bench.tables import markdown_table
from sightline.core.device import DeviceKind
from sightline.core.metrics import StepPhase
from sightline.engine.engine import Engine

_ELEMENTWISE = (
    "add sub mul div pow addcmul addcdiv neg abs exp log rsqrt sqrt reciprocal sin cos tanh erf silu gelu relu sigmoid "
    "clamp minimum maximum where lerp roll mean sum amax amin rms_norm _fused_rms_norm native_layer_norm "
    "linalg_vector_norm hypot copy_ cat add_rms_norm layer_norm turn rotary_table gate activate softcap take_rows"
)
GROUPS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "attention kernel": re.compile(r"attention|softmax|logsumexp|^(attend|merge|locate)$"),
        "matrix products": re.compile(
            r"matmul|linear|^(dense|product|quantise)-|(^|_)(mm|mv|bmm|addmm|addmv|baddbmm|einsum)(_|$)"
        ),
        "cache gathers and writes": re.compile(
            r"^(index|index_select|index_copy|index_put|gather|scatter|take|write)_?$"
        ),
        "element-wise and norms": re.compile(rf"^_?({'|'.join(_ELEMENTWISE.split())})_?$"),
    }
)
"""Patterns for torch's operations, without their namespace, and for our CPU kernels. The first that matches counts."""
OTHER = "the rest of torch"
OUTSIDE = "outside torch"
KERNELS, COPIES, IDLE = "kernels", "copies and fills", "idle"
_COPY = re.compile(r"^(Memcpy|Memset)")
_SHOWN = 24
"""Operations in the text; a JSON report has all."""
_LONGEST_NAME = 80


class DeviceSpan(NamedTuple):
    """One kernel or copy on a device."""

    name: str
    start: float
    end: float
    """Seconds, on the clock of `start`."""


@dataclass(frozen=True)
class OperationTime:
    """An operation or kernel in a step."""

    name: str
    calls: float
    """Per step."""
    seconds: float
    """Per step, in all calls together."""


@dataclass(frozen=True)
class StepProfile:
    """Where the time of decode steps goes."""

    rows: int
    context: int
    num_steps: int
    num_layers: int
    step_seconds: float
    """Median without the profiler."""
    phases: Mapping[str, float]
    """Seconds of the host per step without the profiler, by phase."""
    groups: Mapping[str, float]
    """Seconds per step by group. On a CPU they are of a step with the profiler, on a GPU of one without."""
    operations: tuple[OperationTime, ...]
    """Operations by time, the longest first."""
    calls_per_layer: float = field(init=False)
    """Operations or kernels of a step over the number of layers; copies do not count."""

    def __post_init__(self) -> None:
        calls = sum(each.calls for each in self.operations if not _COPY.match(each.name))
        object.__setattr__(self, "calls_per_layer", calls / self.num_layers)

    def lines(self) -> list[str]:
        """The report as text."""
        whole = sum(self.groups.values())
        operations = [
            [each.name[:_LONGEST_NAME], f"{each.calls:.1f}", f"{each.seconds / whole:.1%}", _ms(each.seconds)]
            for each in self.operations[:_SHOWN]
        ]
        return [
            f"A decode step of {self.rows} × context {self.context}, {self.num_steps} times: {_ms(self.step_seconds)} "
            f"ms, {self.calls_per_layer:.1f} operations per layer ({self.num_layers} layers)",
            "",
            *markdown_table("phase of the host | share | ms per step", _shares(self.phases)),
            "",
            *markdown_table("part | share | ms per step", _shares(self.groups)),
            "",
            *markdown_table("operation | calls per step | share | ms per step", operations),
        ]


@dataclass(frozen=True)
class ProfiledReport(Report):
    """A run, and where its decode steps go."""

    profile: StepProfile

    def lines(self) -> list[str]:
        return [*super().lines(), "", *self.profile.lines()]


def profile_steps(engine: Engine, rows: int, context: int, num_steps: int) -> StepProfile:
    """Times `num_steps` decode steps, then profiles as many."""
    with decoding_rows(engine, rows, context, 2 * num_steps):
        before = dict(engine.phases.seconds)
        plain = step_seconds(engine, num_steps)
        phases = {each.value: (engine.phases.seconds[each] - before[each]) / num_steps for each in StepPhase}
        if engine.runtime.config.device.kind is DeviceKind.CUDA:
            operations, groups = _profile_card(engine, num_steps, statistics.median(plain))
        else:
            operations, groups = _profile_cpu(engine, num_steps)
    return StepProfile(
        rows=rows,
        context=context,
        num_steps=num_steps,
        num_layers=sum(len(binding.group.layers) for binding in engine.runtime.bindings),
        step_seconds=statistics.median(plain),
        phases=phases,
        groups=groups,
        operations=tuple(sorted(operations, key=lambda each: -each.seconds)),
    )


def _profile_cpu(engine: Engine, num_steps: int) -> tuple[list[OperationTime], dict[str, float]]:
    with profile(use_kineto=False) as recorded:
        wall = sum(step_seconds(engine, num_steps))
    operations = [
        OperationTime(event.key, event.count / num_steps, event.self_cpu_time_total / 1e6 / num_steps)
        for event in recorded.key_averages()
    ]
    groups = dict.fromkeys([*GROUPS, OTHER], 0.0)
    for each in operations:
        groups[group_of(each.name)] += each.seconds
    return operations, groups | {OUTSIDE: wall / num_steps - sum(groups.values())}


def _profile_card(engine: Engine, num_steps: int, plain: float) -> tuple[list[OperationTime], dict[str, float]]:
    spans = card_spans(lambda: step_seconds(engine, num_steps))
    return kernel_times(spans, num_steps), card_groups(spans, num_steps, plain)


def card_spans(run: Callable[[], object]) -> list[DeviceSpan]:
    """What a card does while `run` is called, and until it has done all of it."""
    # Nothing of an earlier step may run while the profiler records.
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        run()
        torch.cuda.synchronize()
    return [
        DeviceSpan(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def kernel_times(spans: Iterable[DeviceSpan], num_steps: int) -> list[OperationTime]:
    """Calls and time per step of each kernel, by name."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span.end - span.start)
    return [OperationTime(name, len(each) / num_steps, sum(each) / num_steps) for name, each in by_name.items()]


def card_groups(spans: Sequence[DeviceSpan], num_steps: int, plain: float) -> dict[str, float]:
    """What a card does in a step of `plain` seconds: kernels, copies beside no kernel, and nothing."""
    kernels = busy_seconds([span for span in spans if not _COPY.match(span.name)]) / num_steps
    busy = busy_seconds(spans) / num_steps
    return {KERNELS: kernels, COPIES: busy - kernels, IDLE: max(0.0, plain - busy)}


def busy_seconds(spans: Iterable[DeviceSpan]) -> float:
    """The time in which at least one of the spans runs."""
    busy, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return busy


def group_of(operation: str) -> str:
    """The group of an operation such as "aten::mm"."""
    name = operation.rpartition("::")[2]
    return next((group for group, pattern in GROUPS.items() if pattern.search(name)), OTHER)


def _shares(parts: Mapping[str, float]) -> list[list[str]]:
    """Rows of a table: each part with its share of all."""
    whole = sum(parts.values())
    return [[name, f"{seconds / whole:.1%}", _ms(seconds)] for name, seconds in parts.items()]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
