"""The command line. Parses, prints, and sets exit codes; everything else is elsewhere.

Text that was asked for goes to standard output; everything said about it goes to standard error. Heavy imports wait
until a command needs them, so that `--help` is quick.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import reduce
from typing import TYPE_CHECKING, TypeVar, Unpack

import click
from rich.console import Console
from rich.markup import escape

from sightline.core.errors import RequestError, SightlineError
from sightline.version import __version__

if TYPE_CHECKING:
    from sightline.core.request import EffectiveParams, SamplingParams
    from sightline.llm import LLM, EngineSettings, TextStream

_CommandT = TypeVar("_CommandT", bound=Callable[..., None])
_SUFFIXES = {"k": 1024, "m": 1024**2}

notes = Console(stderr=True, highlight=False)


class Count(click.ParamType[int]):
    """A whole number; `32k` is 32 × 1024."""

    name = "number"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        digits, factor = str(value).strip().lower(), 1
        if digits[-1:] in _SUFFIXES:
            digits, factor = digits[:-1], _SUFFIXES[digits[-1]]
        if not digits.isdecimal():
            self.fail(f"expected a whole number such as 4096 or 4k, got {value!r}", param, ctx)
        return int(digits) * factor


def _apply(*options: Callable[[_CommandT], _CommandT]) -> Callable[[_CommandT], _CommandT]:
    """One decorator out of several options, shown in the order given."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


engine_options = _apply(
    click.option("--model", "-m", help="A folder or a .gguf file; the default model without it."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
    click.option(
        "--max-model-len",
        "--context-length",
        "max_model_len",
        type=Count(),
        help="Longest sequence, in tokens.",
    ),
    click.option(
        "--max-num-seqs",
        "--max-running-requests",
        "max_num_seqs",
        type=Count(),
        default=64,
        show_default=True,
        help="Most sequences that run at once.",
    ),
    click.option(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        "max_num_batched_tokens",
        type=Count(),
        default=512,
        show_default=True,
        help="Most tokens in one step.",
    ),
    click.option(
        "--page-size",
        "--block-size",
        "page_size",
        type=Count(),
        default=16,
        show_default=True,
        help="Tokens in a cache page.",
    ),
    click.option(
        "--cache-tokens", type=Count(), help="Tokens that the cache holds; sized from free memory without it."
    ),
    click.option(
        "--memory-fraction",
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        "memory_fraction",
        type=float,
        default=0.5,
        show_default=True,
        help="The cache's share of free memory.",
    ),
    click.option("--attention-backend", help="Force a backend: torch or reference."),
    click.option("--strict", is_flag=True, help="Every degradation is an error."),
    click.option("--paranoid", is_flag=True, help="Fingerprint plans' contents and poison unused cache."),
)
sampling_options = _apply(
    click.option("--max-tokens", type=Count(), default=128, show_default=True, help="Most tokens to generate."),
    click.option("--temperature", type=float, help="0 is greedy; the model's own default without it."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens that make up this share."),
    click.option("--top-k", type=int, help="Keep so many of the likeliest tokens; 0 keeps all."),
    click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    click.option("--seed", "sampling_seed", type=int, help="Makes sampling repeatable."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Say nothing on standard error but errors.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def app() -> None:
    """An LLM inference engine in which attention cannot be silently wrong."""


@app.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


@app.command()
@json_option
def collect_env(as_json: bool) -> None:
    """Print what a bug report needs to say about this machine."""
    from sightline.tools.environment import collect_environment

    facts = collect_environment()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {value}")


@app.command()
@click.argument("text")
@sampling_options
@json_option
@quiet_option
@engine_options
def generate(
    text: str,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    sampling_seed: int | None,
    as_json: bool,
    quiet: bool,
    model: str | None,
    **settings: Unpack[EngineSettings],
) -> None:
    """Continue TEXT as it stands. Use `chat` to have it answered."""
    params = _sampling_params(temperature, top_p, top_k, min_p, sampling_seed, max_tokens)
    llm = _load(model, quiet=quiet or as_json, **settings)
    if as_json:
        [output] = llm.generate(text, params, use_tqdm=False)
        if output.error is not None:
            raise RequestError(output.error)
        click.echo(json.dumps(asdict(output), default=_jsonable, ensure_ascii=False, indent=2))
        return
    _print_stream(llm.stream(text, params), quiet=quiet, before=text)


@app.command()
@click.argument("message", required=False)
@click.option("--system", help="What the model is told before the conversation.")
@sampling_options
@quiet_option
@engine_options
def chat(
    message: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    sampling_seed: int | None,
    quiet: bool,
    model: str | None,
    **settings: Unpack[EngineSettings],
) -> None:
    """Answer MESSAGE; without one, talk until the end of input. Ctrl-C stops an answer, Ctrl-D leaves."""
    params = _sampling_params(temperature, top_p, top_k, min_p, sampling_seed, max_tokens)
    llm = _load(model, quiet=quiet, **settings)
    history: list[dict[str, object]] = [{"role": "system", "content": system}] if system is not None else []
    for said in _messages(message):
        history.append({"role": "user", "content": said})
        try:
            answer = _print_stream(llm.stream_chat(history, params), quiet=quiet)
        except RequestError as error:
            if message is not None:
                raise
            _print_error(error)
            history.pop()
            continue
        history.append({"role": "assistant", "content": answer})


def main() -> None:
    """The entry point: an error that Sightline raises on purpose is a message and exit code 1, not a traceback."""
    try:
        app.main(prog_name="sightline", standalone_mode=True)
    except SightlineError as error:
        _print_error(error)
        sys.exit(1)


def _load(model: str | None, *, quiet: bool, **settings: Unpack[EngineSettings]) -> LLM:
    """Builds the engine, with a progress line on a terminal, and says what was decided."""
    started = time.perf_counter()
    from sightline.llm import LLM
    from sightline.tools.startup import startup_report

    llm = LLM(model, **settings)
    if not quiet:
        for line in startup_report(llm.engine):
            notes.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
        notes.print(f"[dim]ready in {time.perf_counter() - started:.1f} s[/]")
    return llm


def _sampling_params(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
    max_tokens: int,
) -> SamplingParams:
    from sightline.core.request import SamplingParams

    return SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )


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


def _print_stream(stream: TextStream, *, quiet: bool, before: str = "") -> str:
    """Prints `before`, then pieces as they come, and returns what came; Ctrl-C ends the stream and keeps what came."""
    if not quiet:
        notes.print(f"[dim]{_describe(stream.params)}[/]")
    click.echo(before, nl=False)
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
    if params.temperature == 0.0:
        return f"greedy (temperature 0) · max_tokens {params.max_tokens}"
    return (
        f"temperature {params.temperature:g} · top_p {params.top_p:g} · top_k {params.top_k} · "
        f"min_p {params.min_p:g} · seed {params.seed} · max_tokens {params.max_tokens}"
    )


def _print_error(error: SightlineError) -> None:
    notes.print(f"[bold red]error[/]: {escape(str(error))}", soft_wrap=True)


def _jsonable(value: object) -> object:
    match value:
        case frozenset():
            return sorted(value)
        case _:
            raise TypeError(f"expected a value that JSON has, got {type(value).__name__}")
