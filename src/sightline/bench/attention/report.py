"""The report of attention as text. Does not know how the numbers were measured."""

from __future__ import annotations

from collections.abc import Iterator

from sightline.bench.attention.contenders import Origin
from sightline.bench.attention.results import (
    LEGEND,
    AttentionReport,
    ContenderResult,
    ContenderState,
    Mode,
    Part,
    ShapeResult,
)
from sightline.bench.attention.timing import RoundTimes
from sightline.bench.tables import NONE, markdown_table

_COLUMNS = (
    "contender | error | layer eager | layer graph | kernel eager | kernel graph | layer of floor | kernel of floor | "
    "rate | × peer eager | × peer graph | plan | prepare"
)


def one_line(result: ShapeResult) -> str:
    """A shape in short: each right contender with the µs of a layer, eager and in a graph."""
    parts = []
    for contender in result.contenders:
        if contender.state is ContenderState.RIGHT:
            times = (contender.time(Part.LAYER, mode) for mode in Mode)
            parts.append(f"{contender.name} {' / '.join(_number(time, 1e6, '.1f') for time in times)}")
        elif contender.state is not ContenderState.SKIPPED:
            parts.append(f"{contender.name} {contender.state.value}: {contender.detail}")
    return f"{result.shape.name}: {'; '.join(parts)}"


def lines(report: AttentionReport) -> Iterator[str]:
    """All shapes, a summary, what was left out, and what the columns mean."""
    copy, product = report.rates.bytes_per_second / 1e12, report.rates.operations_per_second / 1e12
    yield f"{report.device}: copy {copy:.3g} TB/s (read and written), product {product:.3g} TFLOP/s"
    for result in report.shapes:
        yield from ("", *_shape_lines(result))
    yield from ("", *_summary(report))
    for name, reason in report.broken_shapes.items():
        yield f"{name} could not be measured: {reason}"
    for name, reason in report.skipped_shapes.items():
        yield f"{name} was not measured: {reason}"
    for name, reason in report.missing_peers.items():
        yield f"{name} is not compared: {reason}"
    yield "Times in µs, ± the most distant sample; * is what an engine would select; plan is host time per step."
    yield from LEGEND


def _summary(report: AttentionReport) -> list[str]:
    """What an engine would select, compared with the fastest peer of each shape."""
    if not any(contender.origin is Origin.PEER for result in report.shapes for contender in result.contenders):
        return []
    modes = [(part, mode) for part in Part for mode in Mode]
    rows = [
        [result.shape.name, contender.name, *(_number(result.ratio(contender, *each)) for each in modes)]
        for result in report.shapes
        for contender in result.contenders
        if contender.is_selected
    ]
    heading = ["shape", "selected, × the fastest peer", *(f"{part.value} {mode.value}" for part, mode in modes)]
    return [*markdown_table(" | ".join(heading), rows), ""]


def _shape_lines(result: ShapeResult) -> Iterator[str]:
    bound = "bytes" if result.is_bound_by_bytes else "operations"
    floors = ", ".join(f"{part.value} {result.floor(part) * 1e6:.1f}" for part in (Part.KERNEL, Part.LAYER))
    yield (
        f"{result.shape.name} ({result.shape.row_kind.value}): floor, µs: {floors} ({bound}); "
        f"{result.num_layers} layers"
    )
    tried = [each for each in result.contenders if each.state is not ContenderState.SKIPPED]
    yield from ("", *markdown_table(_COLUMNS, [_cells(result, each) for each in tried]))
    for contender in tried:
        if contender.state is not ContenderState.RIGHT:
            yield f"  {contender.name} {contender.state.value}: {contender.detail}"
        elif contender.no_graph is not None:
            yield f"  {contender.name} not in a graph: {contender.no_graph}"
    skipped = [f"{each.name} ({each.detail})" for each in result.contenders if each.state is ContenderState.SKIPPED]
    if skipped:
        yield f"  skipped: {', '.join(skipped)}"


def _cells(result: ShapeResult, contender: ContenderResult) -> list[str]:
    mark = "* " if contender.is_selected else ""
    name = f"{mark}{contender.name}{' (peer)' if contender.origin is Origin.PEER else ''}"
    if contender.state is not ContenderState.RIGHT:
        return [name, contender.state.value.upper()]
    times = contender.times or {}
    unit = "TB/s" if result.is_bound_by_bytes else "TFLOP/s"
    return [
        name,
        f"{contender.error:.1e}",
        *(_spread(times.get((part, mode))) for part in Part for mode in Mode),
        _number(result.of_floor(contender, Part.LAYER), 1, ".1%"),
        _number(result.of_floor(contender, Part.KERNEL), 1, ".1%"),
        _number(result.rate(contender), 1e-12, ".3g", f" {unit}"),
        *(_number(result.ratio(contender, Part.LAYER, mode)) for mode in Mode),
        *(_number(each.median, 1e6, ".1f") if each else NONE for each in (contender.plan, contender.prepare)),
    ]


def _spread(timing: RoundTimes | None) -> str:
    """The median, and the distance of the most distant sample."""
    if timing is None:
        return NONE
    away = max(timing.high - timing.median, timing.median - timing.low)
    return f"{timing.median * 1e6:.1f} ±{away / timing.median:.0%}"


def _number(value: float | None, factor: float = 1, form: str = ".2f", unit: str = "") -> str:
    return NONE if value is None else f"{value * factor:{form}}{unit}"
