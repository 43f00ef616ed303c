"""`generate` and `chat`: text in, text out, printed as it comes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from sightline.cli.conformance.proving import prove_first
from sightline.cli.console import notes, print_error
from sightline.cli.options import (
    engine_options,
    json_option,
    prove_option,
    quiet_option,
    report_options,
    sampling_options,
)
from sightline.core.errors import RequestError
from sightline.core.request import EffectiveParams, SamplingParams

if TYPE_CHECKING:
    from sightline.engine.calls import TextStream
    from sightline.llm import LLM


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
    params, llm = _load(sampling | reported, settings, prove=prove, quiet=quiet or as_json)
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
    stream = llm.stream(text, params)
    if not quiet:
        notes.print(f"[dim]{_describe(stream.params)}[/]")
    click.echo(text, nl=False)
    _print_stream(stream, quiet=quiet)


@click.command()
@click.argument("message", required=False)
@click.option("--system", help="What the model is told before the conversation.")
@sampling_options
@quiet_option
@prove_option
@engine_options
def chat(
    message: str | None,
    system: str | None,
    quiet: bool,
    prove: bool,
    sampling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Answer MESSAGE; without one, talk until the end of input. Ctrl-C stops an answer, Ctrl-D leaves."""
    params, llm = _load(sampling, settings, prove=prove, quiet=quiet)
    history: list[dict[str, object]] = [{"role": "system", "content": system}] if system is not None else []
    for said in _messages(message):
        history.append({"role": "user", "content": said})
        try:
            stream = llm.stream_chat(history, params)
            if not quiet and len(history) <= 2:
                notes.print(f"[dim]{_describe(stream.params)}[/]")
            answer = _print_stream(stream, quiet=quiet)
        except RequestError as error:
            if message is not None:
                raise
            print_error(error)
            history.pop()
            continue
        history.append({"role": "assistant", "content": answer})


def _load(
    sampling: dict[str, Any], settings: dict[str, Any], *, prove: bool, quiet: bool
) -> tuple[SamplingParams, LLM]:
    """Checks the parameters, builds the engine, and says what was decided."""
    started = time.perf_counter()
    from sightline.llm import LLM
    from sightline.runner.startup import startup_report

    params = SamplingParams(**sampling)
    llm = LLM(**(prove_first(settings) if prove else settings))
    if not quiet:
        for line in startup_report(llm.engine.runtime, llm.engine.ledger.notes):
            notes.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
        notes.print(f"[dim]ready in {time.perf_counter() - started:.1f} s[/]")
    return params, llm


def _messages(first: str | None) -> Iterator[str]:
    """The one message of the command line, or lines of standard input."""
    if first is not None:
        yield first
        return
    while True:
        try:
            said = input("\n> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if said.strip():
            yield said


def _print_stream(stream: TextStream, *, quiet: bool) -> str:
    """Prints pieces as they come and returns the whole; Ctrl-C ends the stream and keeps what came."""
    started, first, pieces, num_tokens = time.perf_counter(), 0.0, list[str](), 0
    error: str | None = None
    try:
        for delta in stream:
            first = first or time.perf_counter()
            click.echo(delta.text, nl=False)
            pieces.append(delta.text)
            num_tokens += len(delta.token_ids)
            error = delta.error
    except KeyboardInterrupt:
        stream.close()
    click.echo()
    if error is not None:
        raise RequestError(error)
    if not quiet and num_tokens:
        rate = (num_tokens - 1) / max(time.perf_counter() - first, 1e-9)
        notes.print(f"[dim]{num_tokens} tokens · first after {first - started:.2f} s · then {rate:.1f} tokens/s[/]")
    return "".join(pieces)


def _describe(params: EffectiveParams) -> str:
    """What the answer is sampled with, as the model or the caller asked."""
    how = [f"temperature {params.temperature:g}", f"top_p {params.top_p:g}", f"top_k {params.top_k}"]
    how += [f"min_p {params.min_p:g}", f"seed {params.seed}"]
    if params.temperature == 0.0:
        how = ["greedy (temperature 0)"]
    how += [
        f"{name} {value:g}"
        for name, value, neutral in (
            ("repetition_penalty", params.repetition_penalty, 1.0),
            ("presence_penalty", params.presence_penalty, 0.0),
            ("frequency_penalty", params.frequency_penalty, 0.0),
            ("min_tokens", params.min_tokens, 0),
        )
        if value != neutral
    ]
    how += [f"stop {escape(repr(text))}" for text in params.stop]
    return " · ".join([*how, f"max_tokens {params.max_tokens}"])


def _jsonable(value: object) -> object:
    match value:
        case frozenset():
            return sorted(value)
        case _:
            raise TypeError(f"expected a value that JSON has, got {type(value).__name__}")
