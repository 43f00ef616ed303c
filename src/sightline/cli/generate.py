"""`generate`: text in, text out, printed as it comes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from sightline.cli.answers import print_answer, streamed_answer
from sightline.cli.conformance.proving import prove_first
from sightline.cli.console import notes, print_text
from sightline.cli.loading import load_llm
from sightline.cli.options import (
    engine_options,
    json_option,
    prove_option,
    quiet_option,
    report_options,
    sampling_options,
)
from sightline.core.errors import RequestError
from sightline.core.request import SamplingParams


@click.command()
@click.argument("text")
@sampling_options
@report_options
@json_option
@quiet_option
@prove_option
@engine_options
def generate(
    text: str,
    as_json: bool,
    quiet: bool,
    prove: bool,
    sampling: dict[str, Any],
    reported: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Continue TEXT as it stands. Use `chat` to have it answered."""
    if not as_json and SamplingParams(**reported) != SamplingParams():
        raise click.UsageError("expected --json with --n, --logprobs and --prompt-logprobs, got none; add --json")
    params = SamplingParams(**sampling, **reported)
    llm = load_llm(prove_first(settings) if prove else settings, quiet=quiet or as_json)
    if as_json:
        [output] = llm.generate(text, params, use_tqdm=False)
        if output.error is not None:
            raise RequestError(output.error)
        report = asdict(output) | {
            "degradations": [str(entry) for entry in llm.engine.ledger.degradations],
            "notes": [str(entry) for entry in llm.engine.ledger.notes],
        }
        click.echo(json.dumps(report, default=_jsonable, ensure_ascii=False, indent=2))
        return
    answer = streamed_answer(llm.stream(text, params))
    if not quiet:
        notes.print(f"[dim]{answer.how}[/]")
    print_text(text, ends_line=False)
    print_answer(answer, quiet=quiet)


def _jsonable(value: object) -> object:
    match value:
        case frozenset():
            return sorted(value)
        case _:
            raise TypeError(f"expected a value that JSON has, got {type(value).__name__}")
