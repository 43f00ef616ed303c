"""Charts of attention's times over the size of the work, with the floor."""

from __future__ import annotations

from sightline.bench.attention.results import AttentionReport, Part, ShapeResult
from sightline.bench.attention.shapes import RowKind
from sightline.bench.plot import Panel, Series, draw


def plot_report(report: AttentionReport) -> str:
    """Draws one panel per family, over all cached tokens; for a sweep one per number of rows, over lengths."""
    is_sweep = any(result.shape.is_swept for result in report.shapes)
    grouped: dict[str, list[ShapeResult]] = {}
    for result in report.shapes:
        shape = result.shape
        title = f"{shape.family}, {f'{shape.num_rows} rows' if is_sweep else shape.row_kind.value}"
        if not is_sweep or shape.row_kind is RowKind.DECODE:
            grouped.setdefault(title, []).append(result)
    panels = [
        _panel(title, results, is_sweep=is_sweep)
        for title, results in grouped.items()
        if len(results) > 1 or not is_sweep
    ]
    return draw(f"{report.device}: µs of one layer, in a graph if possible", panels)


def _panel(title: str, results: list[ShapeResult], *, is_sweep: bool) -> Panel:
    curves: dict[str, list[tuple[float, float]]] = {}
    floor = []
    for result in results:
        place = float(result.shape.length * (1 if is_sweep else result.shape.num_rows))
        floor.append((place, result.floor(Part.LAYER) * 1e6))
        for contender in result.contenders:
            best = contender.best(Part.LAYER)
            if best is not None:
                curves.setdefault(contender.name, []).append((place, best * 1e6))
    series = [Series(name, tuple(sorted(points)), colour) for colour, (name, points) in enumerate(curves.items())]
    label = "tokens per row" if is_sweep else "tokens of all rows"
    floor_line = Series("floor", tuple(sorted(floor)), len(series), dashed=True)
    return Panel(title, label, "µs per layer", (*series, floor_line))
