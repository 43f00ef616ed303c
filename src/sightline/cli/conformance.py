"""`conformance`: proves backends on this machine. What is tried, and what it means, is in `sightline.testing`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import click
from rich.markup import escape

from sightline.cli.console import notes, print_distrusted
from sightline.cli.options import json_option, measure_option, parse_positive_count

if TYPE_CHECKING:
    from sightline.testing.kit import CheckResult
    from sightline.testing.report import ConformanceReport, Outcome, TriedRow
    from sightline.testing.rows import RowToTry
    from sightline.testing.trying import Watch

_CommandT = TypeVar("_CommandT", bound=Callable[..., None])


def _more_option(name: str, column: str) -> Callable[[_CommandT], _CommandT]:
    return click.option(
        name,
        type=parse_positive_count,
        multiple=True,
        metavar="NUMBER",
        help=f"Try this {column} too, in rows that declare any; may be repeated.",
    )


@click.command()
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--quick", is_flag=True, help="A few cases of each check: soon done, and proves nothing.")
@click.option(
    "--check", "names", multiple=True, metavar="NAME", help="Only this check; proves nothing; may be repeated."
)
@click.option("--verbose", "-v", is_flag=True, help="Show where in the code an unexpected error came from.")
@_more_option("--page-size", "page size")
@_more_option("--head-dim", "head dimension")
@_more_option("--group-size", "number of query heads on a key head")
@measure_option("--jobs", default=1, help="Processes that try checks side by side: up to one for each core.")
@json_option
def conformance(
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
    """Try attention backends against the oracle, row by row; a full run that passes is kept as a proof.

    Fails where any check fails, and where a backend or a check that is named could not be tried at all.
    `--require-proof` of the other commands asks for the proofs.
    """
    from sightline.attention.proof import ProofBook
    from sightline.core.environment import proof_folder
    from sightline.testing.report import more_samples, run_conformance
    from sightline.testing.trial import Effort

    book = ProofBook(proof_folder())
    print_distrusted(book)
    report = run_conformance(
        backends,
        device=device,
        effort=Effort.QUICK if quick else Effort.FULL,
        samples=more_samples(head_dim, group_size, page_size),
        only=names,
        book=book,
        watch=_watch_in_turn() if jobs == 1 else _watch_side_by_side(),
        jobs=jobs,
    )
    click.echo(json.dumps(report.to_data(), indent=2) if as_json else "\n".join(_lines(report, verbose=verbose)))
    sys.exit(1 if report.failed or report.untried else 0)


def _watch_in_turn() -> Watch:
    """A row, then its checks below it."""
    from sightline.testing.trying import Watch

    return Watch(
        lambda row: notes.print(f"[dim]{_told_row(row)} on {escape(row.subject.device.name)}[/]"),
        lambda _row, result: notes.print(f"[dim]  {_told_result(result)}[/]", soft_wrap=True),
    )


def _watch_side_by_side() -> Watch:
    """Each check with its row, as they come: those of many rows are under way at once."""
    from sightline.testing.trying import Watch

    return Watch(
        on_result=lambda row, result: notes.print(f"[dim]{_told_row(row)}: {_told_result(result)}[/]", soft_wrap=True)
    )


def _told_row(row: RowToTry) -> str:
    return f"{escape(row.candidate.name)} · {escape(row.label)}"


def _told_result(result: CheckResult) -> str:
    return f"{escape(result.check)}: {result.verdict.value} ({result.seconds:.1f} s)"


def _lines(report: ConformanceReport, *, verbose: bool) -> Iterator[str]:
    for outcome in report.outcomes:
        yield from _outcome_lines(report, outcome, verbose=verbose)
    if not report.tried:
        yield "nothing was tried, so that nothing is proven"
    if report.untried:
        yield f"asked for by name and not tried: {', '.join(report.untried)}"


def _outcome_lines(report: ConformanceReport, outcome: Outcome, *, verbose: bool) -> Iterator[str]:
    from sightline.testing.report import TriedRow
    from sightline.testing.rows import SkippedRow, Unloadable

    match outcome:
        case Unloadable(backend, reason):
            yield f"{backend}: FAILED: {reason}"
        case SkippedRow(backend, label, reasons):
            yield f"{backend} · {label} on {report.device.name}: skipped: {'; '.join(reasons)}"
        case TriedRow():
            yield from _row_lines(report, outcome, verbose=verbose)


def _row_lines(report: ConformanceReport, row: TriedRow, *, verbose: bool) -> Iterator[str]:
    """Counts, then whatever did not pass, then what is proven."""
    from sightline.testing.kit import Verdict

    counts = ", ".join(f"{len(row.of(verdict))} {verdict.value}" for verdict in Verdict if row.of(verdict))
    yield (
        f"{row.backend} · {row.label} on {report.device.name}: {counts or 'no checks'} "
        f"({row.num_steps} steps, {row.seconds:.1f} s)"
    )
    for result in row.of(Verdict.FAILED):
        yield f"  FAILED {result.check}, which proves: {report.proves[result.check]}"
        yield from (f"    {line}" for line in result.detail.splitlines())
        if result.case:
            yield f"    tried: {result.case}"
        if verbose:
            yield from (f"    {line}" for line in result.trace.splitlines())
    if row.of(Verdict.BLOCKED):
        yield f"  blocked by what failed: {', '.join(result.check for result in row.of(Verdict.BLOCKED))}"
    yield from (f"  excused {result.check}: {result.detail}" for result in row.of(Verdict.EXCUSED))
    yield from (f"  not tried: the row does not list {value}" for value in row.not_listed)
    yield f"  {_meaning(report, row)}"
    if row.proof is not None:
        yield from (f"    for {line}" for line in row.proof.coverage.lines())


def _meaning(report: ConformanceReport, row: TriedRow) -> str:
    from sightline.testing.trial import Effort

    if row.proof is not None:
        return "proven on this device with these versions"
    if not report.is_whole:
        return "a part of the checks proves nothing; leave out --check for a proof"
    if report.effort is Effort.QUICK:
        return "a quick run proves nothing; leave out --quick for a proof"
    return "not proven" + ("; the proof that there was is void" if row.voided else "")
