"""Where the time of a decode step goes, according to torch's profiler.

The profiler slows down small operations and Python. Use the shares, and the time of a step without the profiler.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch.autograd.profiler import profile

from sightline.bench.engine.measure import Conditions
from sightline.bench.engine.stepping import decoding_rows, step_seconds
from sightline.bench.engine.work import MeasuredEngine
from sightline.bench.tables import markdown_table
from sightline.core.errors import ConfigError

_ELEMENTWISE = (
    "add sub mul div pow addcmul addcdiv neg abs exp log rsqrt sqrt reciprocal sin cos tanh erf silu gelu relu sigmoid "
    "clamp minimum maximum where lerp roll mean sum amax amin rms_norm _fused_rms_norm native_layer_norm "
    "linalg_vector_norm hypot copy_ cat"
)
GROUPS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "attention kernel": re.compile(r"attention|softmax|logsumexp"),
        "matrix products": re.compile(r"matmul|linear|(^|_)(mm|mv|bmm|addmm|addmv|baddbmm|einsum)(_|$)"),
        "cache gathers and writes": re.compile(r"^(index|index_select|index_copy|index_put|gather|scatter|take)_?$"),
        "element-wise and norms": re.compile(rf"^_?({'|'.join(_ELEMENTWISE.split())})_?$"),
    }
)
"""Patterns for operations without their namespace, by group, in the order in which they are tried."""
OTHER = "the rest of torch"
OUTSIDE = "outside torch"


@dataclass(frozen=True)
class ProfileReport:
    """The time of decode steps by group of operations."""

    conditions: Conditions
    rows: int
    context: int
    num_steps: int
    step_seconds: float
    """Median without the profiler."""
    profiled_seconds: float
    """Mean with the profiler; the sum of `groups`."""
    groups: Mapping[str, float]
    """Seconds per profiled step, by group."""

    def lines(self) -> list[str]:
        """The report as text."""
        rows = [
            [name, f"{seconds / self.profiled_seconds:.1%}", f"{seconds * 1e3:.2f}"]
            for name, seconds in self.groups.items()
        ]
        return [
            f"{self.conditions}, {self.rows} × context {self.context}, {self.num_steps} decode steps: "
            f"{self.step_seconds * 1e3:.2f} ms per step, {self.profiled_seconds * 1e3:.2f} ms with the profiler",
            "",
            *markdown_table("part | share | ms per profiled step", rows),
        ]


def profile_steps(subject: MeasuredEngine, rows: int, context: int, num_steps: int) -> ProfileReport:
    """Times `num_steps` decode steps, then profiles as many."""
    engine = subject.llm.engine
    device = engine.runtime.config.device.torch_device
    if device.type != "cpu":
        raise ConfigError(
            f"expected device cpu, got {device}, on which the profiler does not time kernels; use --device cpu"
        )
    with decoding_rows(engine, rows, context, 2 * num_steps):
        plain = step_seconds(engine, num_steps)
        with profile(use_kineto=False) as recorded:
            wall = sum(step_seconds(engine, num_steps))
    groups = dict.fromkeys([*GROUPS, OTHER], 0.0)
    for event in recorded.key_averages():
        groups[group_of(event.key)] += event.self_cpu_time_total / 1e6 / num_steps
    groups[OUTSIDE] = wall / num_steps - sum(groups.values())
    return ProfileReport(
        conditions=subject.conditions,
        rows=rows,
        context=context,
        num_steps=num_steps,
        step_seconds=statistics.median(plain),
        profiled_seconds=wall / num_steps,
        groups=groups,
    )


def group_of(operation: str) -> str:
    """The group of an operation such as "aten::mm"."""
    name = operation.rpartition("::")[2]
    return next((group for group, pattern in GROUPS.items() if pattern.search(name)), OTHER)
