"""The results of a measurement: times, floors and ratios. Does not know how they were measured or are printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sightline.bench.attention.contenders import Origin
from sightline.bench.attention.shapes import Cost, Shape
from sightline.bench.attention.timing import Rates, RoundTimes

LEGEND = (
    "Times are per layer: medians of rounds in which all contenders take turns, layer after layer, over pools of at "
    "least twice the device's cache. The cache is not flushed.",
    "In a graph, an ordinary launch follows each layer, as in a model. Its time is measured alone and subtracted.",
    "layer: the cache write, the projections of latents, and attention. A peer's kernel has the same write and "
    "projections around it.",
    "kernel: attention alone. For a backend it is its layer minus the write and projections, timed alone the same way.",
    "floor: the larger of bytes over the copy rate and operations over the product rate, both measured in this run. "
    "For a kernel it counts the cache (in prefill: queries, keys, values and outputs); for a layer also the written "
    "entries, the projections and their weights.",
    "× peer: the fastest peer's time over the contender's, for whole layers in the same mode; above 1 is faster.",
)


class ContenderState(Enum):
    """How a contender did."""

    RIGHT = "right"
    WRONG = "wrong"
    """Its answer differs from the oracle's; it gets no times."""
    FAILED = "failed"
    """It raised."""
    SKIPPED = "skipped"
    """It does not serve the shape."""


class Part(Enum):
    """What is timed."""

    LAYER = "layer"
    KERNEL = "kernel"


class Mode(Enum):
    """How it is launched."""

    EAGER = "eager"
    GRAPH = "graph"


@dataclass(frozen=True, eq=False)
class ContenderResult:
    """One contender on one shape."""

    name: str
    origin: Origin
    state: ContenderState
    detail: str = ""
    """Why its state is not `RIGHT`."""
    trace: str = ""
    """Traceback of what it raised."""
    error: float | None = None
    """Relative error of its worst output vector."""
    is_selected: bool = False
    """Whether an engine would use it for such rows."""
    times: Mapping[tuple[Part, Mode], RoundTimes] | None = None
    plan: RoundTimes | None = None
    """Host time."""
    prepare: RoundTimes | None = None
    no_graph: str | None = None
    """Why it was not timed in a graph."""

    def time(self, part: Part, mode: Mode) -> float | None:
        """Median seconds."""
        timing = (self.times or {}).get((part, mode))
        return None if timing is None else timing.median

    def best(self, part: Part) -> float | None:
        """Median seconds in the faster mode."""
        return min((taken for mode in Mode if (taken := self.time(part, mode)) is not None), default=None)

    @property
    def is_red(self) -> bool:
        """A wrong answer, or a backend of Sightline that raised. A peer that raised is not an error."""
        return self.state is ContenderState.WRONG or (
            self.state is ContenderState.FAILED and self.origin is Origin.OURS
        )


@dataclass(frozen=True, eq=False)
class ShapeResult:
    """All contenders on one shape."""

    shape: Shape
    num_layers: int
    rates: Rates
    tolerance: float
    contenders: tuple[ContenderResult, ...]

    def cost(self, part: Part) -> Cost:
        return self.shape.attention if part is Part.KERNEL else self.shape.layer

    def floor(self, part: Part) -> float:
        """The floor in seconds."""
        return self.rates.floor(self.cost(part))

    @property
    def is_bound_by_bytes(self) -> bool:
        return self.rates.is_bound_by_bytes(self.shape.attention)

    def of_floor(self, contender: ContenderResult, part: Part) -> float | None:
        """The floor over the time in the faster mode."""
        best = contender.best(part)
        return None if best is None else self.floor(part) / best

    def rate(self, contender: ContenderResult) -> float | None:
        """Bytes or operations per second of attention alone, whichever bounds it, in the faster mode."""
        best = contender.best(Part.KERNEL)
        cost = self.shape.attention
        return None if best is None else (cost.num_bytes if self.is_bound_by_bytes else cost.operations) / best

    def ratio(self, contender: ContenderResult, part: Part, mode: Mode) -> float | None:
        """The fastest peer's time over this one's."""
        peers = [other for other in self.contenders if other.origin is Origin.PEER]
        fastest = min((taken for peer in peers if (taken := peer.time(part, mode)) is not None), default=None)
        own = contender.time(part, mode)
        return None if fastest is None or own is None else fastest / own

    def to_data(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "shape": shape.name,
            "family": shape.family,
            "kind": shape.row_kind.value,
            "num_rows": shape.num_rows,
            "length": shape.length,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "page_size": shape.page_size,
            "num_layers": self.num_layers,
            "bound": "bytes" if self.is_bound_by_bytes else "operations",
            "tolerance": self.tolerance,
            **{
                part.value: {
                    "bytes": self.cost(part).num_bytes,
                    "operations": self.cost(part).operations,
                    "floor_us": self.floor(part) * 1e6,
                }
                for part in Part
            },
            "contenders": [self._contender_data(contender) for contender in self.contenders],
        }

    def _contender_data(self, contender: ContenderResult) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": contender.name,
            "origin": contender.origin.value,
            "state": contender.state.value,
            "detail": contender.detail,
            "trace": contender.trace,
            "error": contender.error,
            "selected": contender.is_selected,
            "no_graph": contender.no_graph,
            "plan": _timing_data(contender.plan),
            "prepare": _timing_data(contender.prepare),
            "rate": self.rate(contender),
        }
        for part in Part:
            data[part.value] = {
                **{mode.value: _timing_data((contender.times or {}).get((part, mode))) for mode in Mode},
                "of_floor": self.of_floor(contender, part),
                "ratio_to_best_peer": {mode.value: self.ratio(contender, part, mode) for mode in Mode},
            }
        return data


@dataclass(frozen=True, eq=False)
class AttentionReport:
    """A whole run."""

    environment: Mapping[str, str]
    device: str
    rates: Rates
    shapes: tuple[ShapeResult, ...]
    skipped_shapes: Mapping[str, str]
    """By name: why a shape was not measured."""
    broken_shapes: Mapping[str, str]
    """By name: the error of the device."""
    missing_peers: Mapping[str, str]
    """By name: what is not installed."""
    is_interrupted: bool
    """Whether shapes are left, because of Ctrl-C or because the run is not over."""
    seconds: float

    @property
    def is_measured(self) -> bool:
        """Whether any contender was timed on any shape."""
        return any(contender.times for result in self.shapes for contender in result.contenders)

    @property
    def is_red(self) -> bool:
        wrong = any(contender.is_red for result in self.shapes for contender in result.contenders)
        return wrong or bool(self.broken_shapes)

    def to_data(self) -> dict[str, Any]:
        return {
            "version": 1,
            "device": self.device,
            "environment": dict(self.environment),
            "rates": {
                "copy_bytes_per_second": self.rates.bytes_per_second,
                "product_operations_per_second": self.rates.operations_per_second,
            },
            "legend": list(LEGEND),
            "is_red": self.is_red,
            "is_interrupted": self.is_interrupted,
            "seconds": self.seconds,
            "skipped_shapes": dict(self.skipped_shapes),
            "broken_shapes": dict(self.broken_shapes),
            "missing_peers": dict(self.missing_peers),
            "shapes": [result.to_data() for result in self.shapes],
        }


def _timing_data(timing: RoundTimes | None) -> dict[str, float] | None:
    if timing is None:
        return None
    return {
        "median_us": timing.median * 1e6,
        "low_us": timing.low * 1e6,
        "high_us": timing.high * 1e6,
        "num_samples": timing.num_samples,
    }
