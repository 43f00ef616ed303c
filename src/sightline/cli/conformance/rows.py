"""`conformance`: proves backends on this machine, with `sightline.testing`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from rich.markup import escape

from sightline.cli.conformance.model import prove_model
from sightline.cli.console import notes, print_distrusted
from sightline.cli.options import (
    collected,
    computing_options,
    json_option,
    measure_option,
    parse_positive_count,
)
from sightline.core.command_line import WITHOUT_ATTENTION
from sightline.core.config import EngineConfig, EngineKeywords
from sightline.core.settings import aliases_of, stated

if TYPE_CHECKING:
    from sightline.testing.conformance.report import ConformanceReport, Outcome, TriedRow
    from sightline.testing.conformance.rows import RowToTry, Watch

_CommandT = TypeVar("_CommandT", bound=Callable[..., None])


def _more_option(name: str, column: str) -> Callable[[_CommandT], _CommandT]:
    return click.option(
        name,
        type=parse_positive_count,
        multiple=True,
        metavar="NUMBER",
        help=f"Try this {column} too, in rows that declare any; may be repeated.",
    )


_OF_AN_ENGINE = tuple(name for name in stated(EngineConfig) if name not in {*WITHOUT_ATTENTION, "device", "page_size"})
"""Settings of an engine that change what it asks of attention, besides --device and --page-size."""
_ENGINE_ALONE = (*_OF_AN_ENGINE, *aliases_of(EngineKeywords), "again", "budget")
_KIT_ALONE = ("backends", "quick", "names", "head_dim", "group_size", "jobs")
engine_wishes = collected(
    "engine",
    **{name: computing_options[name] for name in _OF_AN_ENGINE},
    again=click.option("--again", is_flag=True, help="With --model: prove even what is already proven."),
    budget=click.option(
        "--budget",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="With --model: try the cases that cover most in this time, and report what they leave.",
    ),
)


@click.command()
@click.option(
    "--model",
    "-m",
    metavar="MODEL",
    help="Prove exactly what serving this model here would ask for: a folder, a .gguf file, a Hugging Face id or a "
    "config.json. The options of an engine say how it would be served.",
)
@engine_wishes
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Only this backend; may be repeated.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--quick", is_flag=True, help="Try a few cases of each check. Proves nothing.")
@click.option(
    "--check", "names", multiple=True, metavar="NAME", help="Only this check; may be repeated. Proves nothing."
)
@click.option("--verbose", "-v", is_flag=True, help="Show where in the code an unexpected error came from.")
@_more_option("--page-size", "page size")
@_more_option("--head-dim", "head dimension")
@_more_option("--group-size", "number of query heads on a key head")
@measure_option("--jobs", default=1, help="Processes that try checks in parallel: up to one per core.")
@json_option
@click.pass_context
def conformance(
    context: click.Context,
    model: str | None,
    engine: dict[str, Any],
    backends: tuple[str, ...],
    device: str,
    quick: bool,
    names: tuple[str, ...],
    verbose: bool,
    page_size: tuple[int, ...],
    head_dim: tuple[int, ...],
    group_size: tuple[int, ...],
    jobs: int,
    as_json: bool,
) -> None:
    """Compare attention backends with the oracle, row by row; a full run that passes is recorded as a proof.

    Fails if any check fails, or if a named backend or check could not be tried at all. Other commands ask for the
    proofs with `--require-proof`. `--model` proves one engine instead: its groups of layers, with the backends,
    lengths, rows and dtypes that it would have here.
    """
    _refuse_mixtures(context, model)
    if model is not None:
        if len(page_size) > 1:
            raise click.UsageError(f"expected one --page-size with --model, got {len(page_size)}; an engine has one")
        settings = engine | {"model": model, "device": device, "page_size": page_size[0] if page_size else None}
        sys.exit(prove_model(settings, verbose=verbose, as_json=as_json))
    from sightline.attention.proof import ProofBook
    from sightline.core.environment import proof_folder
    from sightline.testing.conformance.report import run_conformance
    from sightline.testing.conformance.samples import Samples
    from sightline.testing.conformance.trial import Effort

    book = ProofBook(proof_folder())
    print_distrusted(book)
    report = run_conformance(
        backends,
        device=device,
        effort=Effort.QUICK if quick else Effort.FULL,
        samples=Samples().and_more(head_dim, group_size, page_size),
        only=names,
        book=book,
        watch=_watch_in_turn() if jobs == 1 else _watch_side_by_side(),
        jobs=jobs,
    )
    click.echo(json.dumps(report.to_data(), indent=2) if as_json else "\n".join(_lines(report, verbose=verbose)))
    sys.exit(1 if report.failed or report.untried else 0)


def _refuse_mixtures(context: click.Context, model: str | None) -> None:
    """Refuses options that would have no effect."""
    given = [
        option
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]
    useless = [option.opts[0] for option in given if option.name in (_ENGINE_ALONE if model is None else _KIT_ALONE)]
    if useless:
        raise click.UsageError(
            f"expected {', '.join(useless)} {'with' if model is None else 'without'} --model alone, got it "
            f"{'without' if model is None else 'with one'}; leave it out"
        )


def _watch_in_turn() -> Watch:
    """Prints each row, then its checks below it."""
    from sightline.testing.conformance.rows import Watch

    return Watch(
        lambda row: notes.print(f"[dim]{_told_row(row)} on {escape(row.subject.device.name)}[/]"),
        lambda _row, result: notes.print(f"[dim]  {escape(str(result))}[/]"),
    )


def _watch_side_by_side() -> Watch:
    """Prints each check with its row, because checks of several rows run at once."""
    from sightline.testing.conformance.rows import Watch

    return Watch(on_result=lambda row, result: notes.print(f"[dim]{_told_row(row)}: {escape(str(result))}[/]"))


def _told_row(row: RowToTry) -> str:
    return f"{escape(row.candidate.name)} · {escape(row.label)}"


def _lines(report: ConformanceReport, *, verbose: bool) -> Iterator[str]:
    for outcome in report.outcomes:
        yield from _outcome_lines(report, outcome, verbose=verbose)
    if not report.tried:
        yield "nothing was tried, so nothing is proven"
    if report.untried:
        yield f"asked for by name and not tried: {', '.join(report.untried)}"


def _outcome_lines(report: ConformanceReport, outcome: Outcome, *, verbose: bool) -> Iterator[str]:
    from sightline.attention.declared_rows import Unloadable
    from sightline.testing.conformance.report import TriedRow
    from sightline.testing.conformance.rows import SkippedRow

    match outcome:
        case Unloadable(backend, reason):
            yield f"{backend}: FAILED: {reason}"
        case SkippedRow(backend, label, reasons):
            yield f"{backend} · {label} on {report.device.name}: skipped: {'; '.join(reasons)}"
        case TriedRow():
            yield from _row_lines(report, outcome, verbose=verbose)


def _row_lines(report: ConformanceReport, row: TriedRow, *, verbose: bool) -> Iterator[str]:
    """Yields counts, then the checks that did not pass, then what is proven."""
    from sightline.testing.conformance.kit import Verdict

    yield f"{row.backend} · {row.label} on {report.device.name}: {row.report.summary}"
    for result in row.report.failed:
        yield f"  FAILED {result.check}, which proves: {report.proves[result.check]}"
        yield from (f"    {line}" for line in result.lines(verbose=verbose))
    blocked = [result.check for result in row.report.of(Verdict.BLOCKED)]
    if blocked:
        yield f"  blocked by what failed: {', '.join(blocked)}"
    yield from (f"  excused {result.check}: {result.detail}" for result in row.report.of(Verdict.EXCUSED))
    yield from (f"  not tried: the row does not list {value}" for value in row.not_listed)
    yield f"  {_meaning(report, row)}"
    if row.proof is not None:
        yield from (f"    for {line}" for line in row.proof.coverage.lines())


def _meaning(report: ConformanceReport, row: TriedRow) -> str:
    from sightline.testing.conformance.trial import Effort

    if row.proof is not None:
        return "proven on this device with these versions"
    if not report.is_whole:
        return "a run of some checks proves nothing; leave out --check for a proof"
    if report.effort is Effort.QUICK:
        return "a quick run proves nothing; leave out --quick for a proof"
    return "not proven" + ("; the earlier proof is void" if row.voided else "")
