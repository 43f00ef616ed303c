"""A report of attention for a terminal. Knows numbers and names; nothing of how they came to be."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

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
from sightline.bench.attention.timing import Rates, RoundTimes

_WIDTH = 190
"""Where there is no terminal to ask."""
_COLUMNS = (
    "contender",
    "error",
    "layer eager",
    "layer graph",
    "kernel eager",
    "kernel graph",
    "layer of floor",
    "kernel of floor",
    "rate",
    "× peer eager",
    "× peer graph",
    "plan",
    "prepare",
)


def one_line(result: ShapeResult) -> str:
    """A shape in short: who is right, and the layer's µs, launched and in a graph."""
    told = []
    for contender in result.contenders:
        if contender.state is ContenderState.RIGHT:
            taken = [contender.time(Part.LAYER, mode) for mode in Mode]
            told.append(
                f"{contender.name} {' / '.join('–' if each is None else f'{each * 1e6:.1f}' for each in taken)}"
            )
        elif contender.state is not ContenderState.SKIPPED:
            told.append(f"{contender.name} {contender.state.value}: {contender.detail}")
    return f"{result.shape.name}: {'; '.join(told)}"


def print_table(report: AttentionReport) -> None:
    """On standard output, in colour where that is a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(render(report))


def render(report: AttentionReport) -> RenderableType:
    """All shapes, then what was left out, then what the columns mean."""
    return Group(f"{escape(report.device)}: {describe_rates(report.rates)}", *_parts(report))


def describe_rates(rates: Rates) -> str:
    copy, product = rates.bytes_per_second / 1e12, rates.operations_per_second / 1e12
    return f"copy {copy:.3g} TB/s (read and written), product {product:.3g} TFLOP/s"


def _parts(report: AttentionReport) -> Iterator[RenderableType]:
    for result in report.shapes:
        yield ""
        yield _shape_table(result)
        yield from _remarks(result)
    yield from _summary(report)
    yield ""
    for name, reason in report.broken_shapes.items():
        yield f"[bold red]{name} could not be measured[/]: {escape(reason)}"
    for name, reason in report.skipped_shapes.items():
        yield f"[yellow]{name} was not measured[/]: {escape(reason)}"
    for name, reason in report.missing_peers.items():
        yield f"[yellow]{name} is not compared[/]: {escape(reason)}"
    yield "µs, ± the furthest sample; * is what an engine would select; plan is host time, a step's."
    for line in LEGEND:
        yield f"[dim]{line}[/]"


def _summary(report: AttentionReport) -> Iterator[RenderableType]:
    """What an engine would select, beside the fastest peer of each shape."""
    table = Table(title="selected, × the fastest peer", title_justify="left")
    for column in ("shape", "selected", *(f"{part.value} {mode.value}" for part in Part for mode in Mode)):
        table.add_column(column, justify="left" if column in ("shape", "selected") else "right")
    for result in report.shapes:
        for contender in result.contenders:
            if contender.is_selected:
                ratios = (_factor(result.ratio(contender, part, mode)) for part in Part for mode in Mode)
                table.add_row(result.shape.name, escape(contender.name), *ratios)
    if any(contender.origin is Origin.PEER for result in report.shapes for contender in result.contenders):
        yield ""
        yield table


def _shape_table(result: ShapeResult) -> Table:
    shape = result.shape
    bound = "bytes" if result.is_bound_by_bytes else "operations"
    floors = ", ".join(f"{part.value} {result.floor(part) * 1e6:.1f}" for part in (Part.KERNEL, Part.LAYER))
    table = Table(
        title=f"{shape.name} ({shape.row_kind.value}): floor, µs: {floors} ({bound}); {result.num_layers} layers",
        title_justify="left",
    )
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "contender" else "right", no_wrap=column == "contender")
    for contender in result.contenders:
        if contender.state is not ContenderState.SKIPPED:
            table.add_row(*_cells(result, contender), style="bold red" if contender.is_red else None)
    return table


def _cells(result: ShapeResult, contender: ContenderResult) -> list[str]:
    mark = "* " if contender.is_selected else ""
    name = f"{mark}{contender.name}{' (peer)' if contender.origin is Origin.PEER else ''}"
    if contender.state is not ContenderState.RIGHT:
        return [escape(name), contender.state.value.upper()]
    times = contender.times or {}
    return [
        escape(name),
        f"{contender.error:.1e}",
        *(_spread(times.get((part, mode))) for part in Part for mode in Mode),
        _percent(result.of_floor(contender, Part.LAYER)),
        _percent(result.of_floor(contender, Part.KERNEL)),
        _rate(result, contender),
        *(_factor(result.ratio(contender, Part.LAYER, mode)) for mode in Mode),
        _median(contender.plan),
        _median(contender.prepare),
    ]


def _remarks(result: ShapeResult) -> Iterator[str]:
    """What a table has no room for."""
    for contender in result.contenders:
        if contender.state in (ContenderState.WRONG, ContenderState.FAILED):
            colour = "red" if contender.is_red else "yellow"
            yield f"  [{colour}]{escape(contender.name)} {contender.state.value}[/]: {escape(contender.detail)}"
        elif contender.no_graph is not None:
            yield f"  [dim]{escape(contender.name)} in no graph: {escape(contender.no_graph)}[/]"
    skipped = [f"{each.name} ({each.detail})" for each in result.contenders if each.state is ContenderState.SKIPPED]
    if skipped:
        yield f"  [dim]skipped: {escape(', '.join(skipped))}[/]"


def _spread(timing: RoundTimes | None) -> str:
    """The median, and how far the furthest sample is from it."""
    if timing is None:
        return "–"
    away = max(timing.high - timing.median, timing.median - timing.low)
    return f"{timing.median * 1e6:.1f} ±{away / timing.median:.0%}"


def _median(timing: RoundTimes | None) -> str:
    return "–" if timing is None else f"{timing.median * 1e6:.1f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _factor(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _rate(result: ShapeResult, contender: ContenderResult) -> str:
    rate = result.rate(contender)
    if rate is None:
        return "–"
    return f"{rate / 1e12:.3g} {'TB/s' if result.is_bound_by_bytes else 'TFLOP/s'}"
