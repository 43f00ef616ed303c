"""`conformance --model`: proves one engine, with `sightline.testing.conformance.engine_proof`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from sightline.cli.console import notes, print_distrusted

if TYPE_CHECKING:
    from sightline.testing.conformance.engine_proof import Duty, DutyReport, EngineReport
    from sightline.testing.conformance.kit import CheckResult

_MOST_GAPS = 8
"""How many gaps of a backend are listed; the others are counted."""


def prove_model(settings: dict[str, Any], *, verbose: bool, as_json: bool) -> int:
    """Proves what the engine with these settings would ask for, prints the report, and returns the exit code."""
    from sightline.attention.proof import ProofBook
    from sightline.core.config import EngineConfig
    from sightline.core.environment import proof_folder
    from sightline.testing.conformance.engine_proof import EngineWatch, prove_engine

    again, budget = settings.pop("again"), settings.pop("budget")
    book = ProofBook(proof_folder())
    print_distrusted(book)
    report = prove_engine(
        EngineConfig(**settings),
        book=book,
        again=again,
        seconds=budget,
        watch=EngineWatch(_tell_duty, _tell_result),
    )
    click.echo(json.dumps(report.to_data(), indent=2) if as_json else "\n".join(_lines(report, verbose=verbose)))
    return 0 if report.is_proven else 1


def _tell_duty(duty: Duty) -> None:
    notes.print(f"[dim]{escape(_told_duty(duty))}[/]")


def _tell_result(result: CheckResult) -> None:
    notes.print(f"[dim]  {escape(str(result))}[/]")


def _told_duty(duty: Duty) -> str:
    return (
        f"{duty.candidate.name} · {duty.label} for {', '.join(work.value for work in duty.needs)} of {duty.group.name}"
    )


def _lines(report: EngineReport, *, verbose: bool) -> Iterator[str]:
    yield from _engine_lines(report)
    for each in report.duties:
        yield from _duty_lines(each, verbose=verbose)
    yield "proven for this engine" if report.is_proven else "not proven for this engine"


def _engine_lines(report: EngineReport) -> Iterator[str]:
    """Describes the engine."""
    config = report.blueprint.config
    dtype, cache = (str(each).removeprefix("torch.") for each in (config.dtype, config.cache_dtype))
    pool = f"{config.num_pages} pages of {config.page_size}" if config.num_pages else "no cache"
    yield (
        f"{config.device.name} · {report.blueprint.usage.value} · {dtype}, cache {cache} · up to {config.max_rows} "
        f"rows, {config.max_step_tokens} tokens a step, {config.max_model_len} a sequence · {pool}"
    )
    yield from (f"note: {note}" for note in report.notes)
    for group in report.blueprint.groups:
        spec = group.spec
        yield (
            f"{group.name}: {len(group.layers)} layers of {spec.label}, {spec.num_q_heads} query heads, "
            f"{spec.group_size} on a key head, head dimension {spec.head_dim}"
        )


def _duty_lines(report: DutyReport, *, verbose: bool) -> Iterator[str]:
    told = _told_duty(report.duty)
    if report.row is None:
        yield f"{told}: proven before; --again proves it once more"
        return
    yield f"{told}: {report.row.summary}"
    for work in report.works:
        yield f"  {work.work.value}: {work.num_cases} cases passed ({work.result.seconds:.1f} s)"
        yield from (f"    left out: {why}" for why in work.left_out)
    for result in report.failed:
        yield f"  FAILED {result.check}"
        yield from (f"    {line}" for line in result.lines(verbose=verbose))
    if report.failed:
        yield "  not proven" + ("; the earlier proof is void" if report.voided else "")
        return
    if not report.gaps:
        yield "  covered: " + "; ".join(_told_ranges(report))
    for gap in report.gaps[:_MOST_GAPS]:
        yield f"  not covered: {gap}"
    if len(report.gaps) > _MOST_GAPS:
        yield f"  and {len(report.gaps) - _MOST_GAPS} more that are not covered"


def _told_ranges(report: DutyReport) -> Iterator[str]:
    """Yields each dimension with the widest range that the engine will ask for."""
    from sightline.attention.dimensions import Span

    spans: dict[str, Span] = {}
    for demand in report.duty.demands:
        for dimension, span in demand.scales.items():
            known = spans.get(dimension.value, span)
            spans[dimension.value] = Span(min(known.low, span.low), max(known.high, span.high))
    yield from (f"{name} {span}" for name, span in spans.items())
