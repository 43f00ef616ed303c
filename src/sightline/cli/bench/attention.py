"""Options of `bench attention`. `sightline.bench.attention` does the measuring."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from sightline.cli.console import notes
from sightline.cli.options import measure_option, parse_target

if TYPE_CHECKING:
    from sightline.attention.selection import Candidate
    from sightline.bench.attention.results import AttentionReport
    from sightline.bench.attention.shapes import Shape
    from sightline.core.device import Device

_STANDARD_OUTPUT = "-"
_INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended, as shells use it."""


def _parse_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise click.BadParameter(f"expected names with commas between them, got {text!r}; leave the option out for all")
    return names


def _parse_drawing(text: str) -> Path:
    if not text.endswith(".svg"):
        raise click.BadParameter(f"expected a file that ends in .svg, got {text!r}")
    return parse_target(text)


def _parse_json_target(text: str) -> Path | None:
    """Parses a file; None is standard output."""
    try:
        return None if text == _STANDARD_OUTPUT else parse_target(text)
    except click.BadParameter as error:
        raise click.BadParameter(error.message, param_hint="'--json'") from error


@click.command()
@click.option("--peers", is_flag=True, help="Also measure the kernels of other installed libraries.")
@click.option(
    "--json",
    "json_target",
    is_flag=False,
    flag_value=_STANDARD_OUTPUT,
    metavar="[FILE]",
    help="Write a JSON object to FILE after every shape, or without FILE print it instead of the table.",
)
@click.option("--plot", type=_parse_drawing, metavar="FILE.svg", help="Draw the curves in this file.")
@click.option(
    "--shapes",
    type=_parse_names,
    metavar="NAMES",
    help="Sets or single shapes, such as decode,prefill,tiny,gqa-64x4096. Default: tiny on a CPU, else decode,prefill.",
)
@click.option(
    "--backends",
    type=_parse_names,
    metavar="NAMES",
    help="Only these backends, including those that serve only by name.",
)
@click.option("--sweep", is_flag=True, help="Add a sweep over rows and lengths (on a CPU: of tiny shapes).")
@measure_option("--rounds", default=7, help="Rounds that count; medians are reported.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
def attention(
    peers: bool,
    json_target: str | None,
    plot: Path | None,
    shapes: list[str] | None,
    backends: list[str] | None,
    sweep: bool,
    rounds: int,
    device: str,
) -> None:
    """Time the cache write and attention of one layer on fixed shapes, for each backend, with the floor.

    Each answer is first compared with the oracle; a wrong one gets no times. Exits with 1 if an answer is wrong, if
    nothing could be measured or if a file could not be written. Ctrl-C ends it with the results until then, and 130.
    """
    from sightline.attention.backends.registry import installed
    from sightline.bench.attention.flashinfer_peers import PEERS
    from sightline.bench.attention.measure import Field, measure_attention
    from sightline.bench.attention.timing import TimingBudget
    from sightline.core.device import detect_device

    target = None if json_target is None else _parse_json_target(json_target)
    found = detect_device(device)
    report = measure_attention(
        _shapes(shapes, found, sweep=sweep),
        Field(found, _backends(backends), installed(), PEERS if peers else (), TimingBudget(rounds)),
        partial(_say_shape, target),
    )
    is_saved = _tell(report, in_place=json_target == _STANDARD_OUTPUT, target=target, plot=plot)
    if not report.is_measured:
        notes.print("[yellow]nothing was measured: see the table for the reasons[/]")
    is_good = is_saved and report.is_measured and not report.is_red
    sys.exit(_INTERRUPTED if report.is_interrupted else 0 if is_good else 1)


def _shapes(names: list[str] | None, device: Device, *, sweep: bool) -> tuple[Shape, ...]:
    from sightline.bench.attention.shapes import SWEEP_SETS, TINY_SWEEP, find_shapes
    from sightline.core.device import DeviceKind

    on_cpu = device.kind is DeviceKind.CPU
    by_default = ["tiny"] if on_cpu else ["decode", "prefill"]
    sweeps = (TINY_SWEEP,) if on_cpu else SWEEP_SETS
    return find_shapes([*(names or by_default), *(sweeps if sweep else ())])


def _backends(names: list[str] | None) -> tuple[Candidate, ...]:
    from sightline.attention.backends.registry import find, installed

    candidates = installed()
    if names is None:
        return tuple(candidate for candidate in candidates if candidate.by_default)
    return tuple(find(name, candidates) for name in names)


def _say_shape(target: Path | None, report: AttentionReport, shape: Shape, seconds: float) -> None:
    from sightline.bench.attention.report import one_line

    unmeasured = {**report.skipped_shapes, **report.broken_shapes}
    said = f"{shape.name}: {unmeasured[shape.name]}" if shape.name in unmeasured else one_line(report.shapes[-1])
    notes.print(f"[dim]{escape(said)} ({seconds:.1f} s)[/]")
    if target is not None:
        _save(_as_text(report), target)


def _as_text(report: AttentionReport) -> str:
    return json.dumps(report.to_data(), indent=2) + "\n"


def _save(text: str, target: Path) -> bool:
    """Replaces a file atomically. Returns False if it cannot be written."""
    try:
        if target.exists() and not target.is_file():
            target.write_text(text)
            return True
        place = target.resolve()
        unfinished = place.with_name(f".{place.name}.unfinished")
        unfinished.write_text(text)
        unfinished.replace(place)
    except OSError as error:
        notes.print(f"[yellow]could not write {escape(str(target))}: {escape(str(error))}[/]")
        return False
    return True


def _tell(report: AttentionReport, *, in_place: bool, target: Path | None, plot: Path | None) -> bool:
    """Prints the report and writes the files. Returns False if a file could not be written."""
    from sightline.bench.attention.plot import plot_report
    from sightline.bench.attention.report import lines

    if in_place:
        click.echo(_as_text(report), nl=False)
    else:
        click.echo("\n".join(lines(report)))
    is_saved = target is None or _save(_as_text(report), target)
    is_drawn = plot is None or _save(plot_report(report), plot)
    return is_saved and is_drawn
