"""Attention's times as curves over the size of the work, with the floor. Draws with `plot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sightline.bench.attention.results import AttentionReport, Part, ShapeResult
from sightline.bench.attention.shapes import RowKind, Shape
from sightline.bench.plot import Panel, Series, draw


def plot_report(report: AttentionReport) -> str:
    """One panel a family: over all cached tokens; of a sweep, one for each number of rows, over lengths."""
    is_sweep = any(result.shape.is_swept for result in report.shapes)
    panels = _swept_panels(report) if is_sweep else _listed_panels(report)
    return draw(f"{report.device}: µs of one layer, in a graph where there is one", panels)


def _listed_panels(report: AttentionReport) -> list[Panel]:
    grouped: dict[str, list[ShapeResult]] = {}
    for result in report.shapes:
        grouped.setdefault(f"{result.shape.family}, {result.shape.row_kind.value}", []).append(result)
    return [
        _panel(title, "tokens of all rows", results, lambda shape: shape.num_rows * shape.length)
        for title, results in grouped.items()
    ]


def _swept_panels(report: AttentionReport) -> list[Panel]:
    grouped: dict[str, list[ShapeResult]] = {}
    for result in report.shapes:
        shape = result.shape
        if shape.row_kind is RowKind.DECODE:
            grouped.setdefault(f"{shape.family}, {shape.num_rows} rows", []).append(result)
    return [
        _panel(title, "tokens of a row", results, lambda shape: shape.length)
        for title, results in grouped.items()
        if len(results) > 1
    ]


def _panel(title: str, label: str, results: Sequence[ShapeResult], place: Callable[[Shape], int]) -> Panel:
    curves: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for contender in result.contenders:
            best = contender.best(Part.LAYER)
            if best is not None:
                curves.setdefault(contender.name, []).append((float(place(result.shape)), best * 1e6))
    floor = tuple(sorted((float(place(result.shape)), result.floor(Part.LAYER) * 1e6) for result in results))
    series = [Series(name, tuple(sorted(points)), colour) for colour, (name, points) in enumerate(curves.items())]
    return Panel(title, label, "µs a layer", (*series, Series("floor", floor, len(series), dashed=True)))
