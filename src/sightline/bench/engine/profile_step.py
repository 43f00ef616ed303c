"""Where the time of a decode step goes, by torch's profiler.

The profiler makes small operations and Python slower than they are: read the shares, and the step's time without it.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch.autograd.profiler import profile

from sightline.bench.engine.measure import Conditions
from sightline.bench.engine.stepping import decoding_rows
from sightline.bench.engine.work import MeasuredEngine
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
"""By name, in the order in which they are tried: operations without their namespace."""
OTHER = "the rest of torch"
OUTSIDE = "outside torch"


@dataclass(frozen=True)
class ProfileReport:
    """Decode steps, taken apart."""

    conditions: Conditions
    rows: int
    context: int
    num_steps: int
    step_seconds: float
    """The median without the profiler."""
    profiled_seconds: float
    """The mean with it, of which `groups` are the parts."""
    groups: Mapping[str, float]
    """By name: seconds of a profiled step."""

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            f"{self.conditions}, {self.rows} × context {self.context}, {self.num_steps} decode steps: "
            f"{self.step_seconds * 1e3:.2f} ms a step, {self.profiled_seconds * 1e3:.2f} ms with the profiler",
            "",
            "| part | share | ms a profiled step |",
            "| --- | --- | --- |",
            *(
                f"| {name} | {seconds / self.profiled_seconds:.1%} | {seconds * 1e3:.2f} |"
                for name, seconds in self.groups.items()
            ),
        ]


def profile_steps(subject: MeasuredEngine, rows: int, context: int, num_steps: int) -> ProfileReport:
    """Times `num_steps` decode steps, then takes as many apart."""
    engine = subject.llm.engine
    device = engine.runtime.config.device.torch_device
    if device.type != "cpu":
        raise ConfigError(f"expected device cpu, got {device}, whose kernels' time torch does not count; use --device")
    plain = []
    with decoding_rows(engine, rows, context, 2 * num_steps):
        for _ in range(num_steps):
            start = time.perf_counter()
            engine.step()
            plain.append(time.perf_counter() - start)
        with profile(use_kineto=False) as recorded:
            start = time.perf_counter()
            for _ in range(num_steps):
                engine.step()
            wall = time.perf_counter() - start
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
