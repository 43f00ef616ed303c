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
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from rich.console import Console
from rich.markup import escape

from sightline.core.errors import RequestError, SightlineError
from sightline.version import __version__

if TYPE_CHECKING:
    from sightline.core.request import EffectiveParams, SamplingParams
    from sightline.llm import LLM, TextStream
    from sightline.tools.bench import Report
    from sightline.tools.bench_work import Works
    from sightline.tools.growth import GrowthReport
    from sightline.tools.profile_step import ProfileReport

_CommandT = TypeVar("_CommandT", bound=Callable[..., None])
_SUFFIXES = {"k": 1024, "m": 1024**2}

notes = Console(stderr=True, highlight=False)


def parse_count(text: str) -> int:
    """A whole number; `32k` is 32 × 1024."""
    digits, factor = text.strip().lower(), 1
    if digits[-1:] in _SUFFIXES:
        digits, factor = digits[:-1], _SUFFIXES[digits[-1]]
    if not digits.isdecimal():
        raise click.BadParameter(f"expected a whole number such as 4096 or 4k, got {text!r}")
    return int(digits) * factor


def parse_counts(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [parse_positive_count(part) for part in text.split(",")]


def parse_target(text: str) -> Path:
    """A file that can be written when the work is done: no measurement is lost for want of a folder."""
    path = Path(text)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise click.BadParameter(f"expected a file in a folder that exists, got {text!r}; make the folder first")
    return path


def counts_option(name: str, *, help: str, default: str) -> Callable[[_CommandT], _CommandT]:
    """An option whose value is a list of counts."""
    return click.option(name, type=parse_counts, metavar="NUMBERS", default=default, show_default=True, help=help)


def parse_positive_count(text: str) -> int:
    """A whole number of at least 1."""
    count = parse_count(text)
    if count < 1:
        raise click.BadParameter(f"expected a whole number of at least 1, got {text!r}")
    return count


def count_option(
    *names: str, help: str, default: int | None = None, parse: Callable[[str], int] = parse_count
) -> Callable[[_CommandT], _CommandT]:
    """An option whose value is a count."""
    shown = None if default is None else str(default)
    return click.option(
        *names, type=parse, metavar="NUMBER", default=shown, show_default=default is not None, help=help
    )


def measure_option(name: str, *, help: str, default: int) -> Callable[[_CommandT], _CommandT]:
    """An option of a measurement, of which nothing is no measurement."""
    return count_option(name, help=help, default=default, parse=parse_positive_count)


def _collected(name: str, **options: Callable[[_CommandT], _CommandT]) -> Callable[[_CommandT], _CommandT]:
    """Options that a command takes together, as one dictionary under `name`."""

    def decorate(command: _CommandT) -> _CommandT:
        @wraps(command)
        def collecting(**given: object) -> None:
            values = {option: given.pop(option) for option in options}
            command(**given, **{name: values})

        return reduce(
            lambda decorated, option: option(decorated), reversed(options.values()), cast("_CommandT", collecting)
        )

    return decorate


engine_options = _collected(
    "settings",
    model=click.option(
        "--model", "-m", help="A folder, a .gguf file or a Hugging Face id; the default model without it."
    ),
    device=click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    dtype=click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
    quantization=click.option(
        "--quantization",
        type=click.Choice(["dequantise", "keep"]),
        default="dequantise",
        show_default=True,
        help="A file's quantised weights: exact, or kept small and multiplied as they are, with rounded inputs.",
    ),
    max_model_len=count_option(
        "--max-model-len", "--context-length", "max_model_len", help="Longest sequence, in tokens."
    ),
    max_num_seqs=count_option(
        "--max-num-seqs", "--max-running-requests", "max_num_seqs", default=64, help="Most sequences that run at once."
    ),
    max_num_batched_tokens=count_option(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        "max_num_batched_tokens",
        default=512,
        help="Most tokens in one step.",
    ),
    page_size=count_option("--page-size", "--block-size", "page_size", default=16, help="Tokens in a cache page."),
    cache_tokens=count_option("--cache-tokens", help="Tokens that the cache holds; sized from free memory without it."),
    memory_fraction=click.option(
        "--memory-fraction",
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        "memory_fraction",
        type=float,
        default=0.5,
        show_default=True,
        help="The cache's share of free memory.",
    ),
    attention_backend=click.option("--attention-backend", help="Force a backend: torch or reference."),
    strict=click.option("--strict", is_flag=True, help="Every degradation is an error."),
    paranoid=click.option("--paranoid", is_flag=True, help="Fingerprint plans' contents and poison unused cache."),
)
sampling_options = _collected(
    "sampling",
    max_tokens=count_option("--max-tokens", default=128, help="Most tokens to generate."),
    temperature=click.option("--temperature", type=float, help="0 is greedy; the model's own default without it."),
    top_p=click.option("--top-p", type=float, help="Keep the likeliest tokens that make up this share."),
    top_k=click.option("--top-k", type=int, help="Keep so many of the likeliest tokens; 0 keeps all."),
    min_p=click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    seed=click.option("--seed", type=int, help="Makes sampling repeatable."),
    repetition_penalty=click.option(
        "--repetition-penalty", type=float, help="Above 1: tokens of the prompt and the answer become less likely."
    ),
    presence_penalty=click.option(
        "--presence-penalty", type=float, default=0.0, help="Above 0: tokens of the answer become less likely."
    ),
    frequency_penalty=click.option(
        "--frequency-penalty", type=float, default=0.0, help="As --presence-penalty, for each time a token came."
    ),
    stop=click.option("--stop", multiple=True, metavar="TEXT", help="Ends the answer before TEXT; may be repeated."),
    min_tokens=count_option("--min-tokens", help="Tokens before anything may end the answer."),
)
report_options = _collected(
    "reported",
    n=count_option("--n", default=1, help="Continuations of the one TEXT; more than one needs --json."),
    logprobs=click.option("--logprobs", type=int, help="Tell so many of the likeliest tokens; needs --json."),
    prompt_logprobs=click.option("--prompt-logprobs", type=int, help="As --logprobs, of TEXT itself."),
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
@report_options
@json_option
@quiet_option
@engine_options
def generate(
    text: str,
    as_json: bool,
    quiet: bool,
    sampling: dict[str, Any],
    reported: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Continue TEXT as it stands. Use `chat` to have it answered."""
    if not as_json and reported != {"n": 1, "logprobs": None, "prompt_logprobs": None}:
        raise click.UsageError("expected --json with --n, --logprobs and --prompt-logprobs, got none; add --json")
    params, llm = _load(sampling | reported, settings, quiet=quiet or as_json)
    if as_json:
        [output] = llm.generate(text, params, use_tqdm=False)
        if output.error is not None:
            raise RequestError(output.error)
        report = asdict(output) | {"degradations": [str(entry) for entry in llm.engine.ledger]}
        click.echo(json.dumps(report, default=_jsonable, ensure_ascii=False, indent=2))
        return
    stream = llm.stream(text, params)
    if not quiet:
        notes.print(f"[dim]{_describe(stream.params)}[/]")
    click.echo(text, nl=False)
    _print_stream(stream, quiet=quiet)


@app.command()
@click.argument("message", required=False)
@click.option("--system", help="What the model is told before the conversation.")
@sampling_options
@quiet_option
@engine_options
def chat(
    message: str | None, system: str | None, quiet: bool, sampling: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Answer MESSAGE; without one, talk until the end of input. Ctrl-C stops an answer, Ctrl-D leaves."""
    params, llm = _load(sampling, settings, quiet=quiet)
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
            _print_error(error)
            history.pop()
            continue
        history.append({"role": "assistant", "content": answer})


json_settings = {
    "as_json": json_option,
    "save_result": click.option(
        "--save-result", type=parse_target, metavar="FILE", help="Write the JSON object here too."
    ),
}
bench_options = _collected(
    "how",
    compare=click.option(
        "--compare", default="", metavar="NAMES", help="Other engines to run in turns: transformers,llama.cpp,vllm."
    ),
    num_iters=measure_option("--num-iters", default=5, help="Rounds that count; medians are told."),
    **json_settings,
)
report_file_options = _collected("how", **json_settings)


@app.group()
def bench() -> None:
    """Measure speed: engines in turns, after they have given the same tokens, with the floor."""


@bench.command()
@measure_option("--input-len", default=512, help="Tokens of the prompt that is read.")
@measure_option("--output-len", default=48, help="Tokens that each row generates.")
@measure_option("--batch-size", default=1, help="Rows that generate at once.")
@counts_option("--contexts", default="32", help="Tokens of the rows' prompts, in turns: 64,128,256,512 mixes them.")
@bench_options
@engine_options
def latency(
    input_len: int,
    output_len: int,
    batch_size: int,
    contexts: list[int],
    how: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Time the reading of a prompt, and the decoding of a batch of rows without the reading.

    Decoding is a run of --output-len tokens less a run of one token on the same prompts, in the same round.
    """
    from sightline.tools.bench_work import latency_works

    if output_len < 2:
        raise click.BadParameter(f"expected at least 2 tokens, got {output_len}", param_hint="--output-len")
    lengths = (input_len, output_len)
    _compare(how, settings, lambda floor, vocab: latency_works(floor, vocab, lengths, contexts, batch_size))


@bench.command()
@measure_option("--num-prompts", default=16, help="Prompts that run at once.")
@measure_option("--random-input-len", default=64, help="Random tokens of each prompt.")
@measure_option("--random-output-len", default=48, help="Tokens that each generates.")
@bench_options
@engine_options
def throughput(
    num_prompts: int, random_input_len: int, random_output_len: int, how: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Time many prompts, read and continued."""
    from sightline.tools.bench_work import throughput_works

    lengths = (random_input_len, random_output_len)
    _compare(how, settings, lambda floor, vocab: throughput_works(floor, vocab, lengths, num_prompts))


@bench.command()
@counts_option("--rows", default="1,2,4,8,16,32,64", help="Rows of a step, at the first of the contexts.")
@counts_option("--contexts", default="64,128,256,512,1k,2k,4k", help="Tokens that rows hold, with 1 row and with 8.")
@measure_option("--num-steps", default=8, help="Decode steps of each point; medians are told.")
@click.option("--plot", type=parse_target, metavar="FILE.svg", help="Draw the curves here.")
@report_file_options
@engine_options
def growth(
    rows: list[int],
    contexts: list[int],
    num_steps: int,
    plot: Path | None,
    how: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Time decode steps over rows and over contexts, with the floor."""
    from sightline.tools.bench_work import load_subject
    from sightline.tools.growth import measure_growth

    report = measure_growth(
        load_subject(settings),
        rows,
        contexts,
        num_steps,
        lambda timing: notes.print(
            f"[dim]{len(timing.held)} × context {timing.context}: {timing.step_seconds * 1e3:.2f} ms a step[/]"
        ),
    )
    if plot is not None:
        plot.write_text(report.svg())
    _print_report(report, how)


@bench.command()
@measure_option("--batch-size", default=1, help="Rows of a step.")
@measure_option("--input-len", default=64, help="Tokens that each row holds.")
@measure_option("--num-steps", default=16, help="Decode steps that are timed, and then taken apart.")
@report_file_options
@engine_options
def profile(batch_size: int, input_len: int, num_steps: int, how: dict[str, Any], settings: dict[str, Any]) -> None:
    """Tell where the time of a decode step goes."""
    from sightline.tools.bench_work import load_subject
    from sightline.tools.profile_step import profile_steps

    _print_report(profile_steps(load_subject(settings), batch_size, input_len, num_steps), how)


def _compare(how: dict[str, Any], settings: dict[str, Any], works: Works) -> None:
    from sightline.tools.bench_work import compare_engines

    compared = [name.strip() for name in how["compare"].split(",") if name.strip()]
    _print_report(compare_engines(settings, works, compared, how["num_iters"]), how)


def _print_report(report: Report | GrowthReport | ProfileReport, how: dict[str, Any]) -> None:
    """As text, or as one JSON object; the object also into a file where one is asked for."""
    text = json.dumps(asdict(report), indent=2)
    click.echo(text if how["as_json"] else "\n".join(report.lines()))
    if how["save_result"] is not None:
        how["save_result"].write_text(text + "\n")


def main() -> None:
    """The entry point: an error that Sightline raises on purpose is a message and exit code 1, not a traceback."""
    try:
        app.main(prog_name="sightline", standalone_mode=True)
    except SightlineError as error:
        _print_error(error)
        sys.exit(1)


def _load(sampling: dict[str, Any], settings: dict[str, Any], *, quiet: bool) -> tuple[SamplingParams, LLM]:
    """Checks the parameters, builds the engine, and says what was decided."""
    started = time.perf_counter()
    from sightline.core.request import SamplingParams
    from sightline.llm import LLM
    from sightline.tools.startup import startup_report

    params = SamplingParams(**sampling)
    llm = LLM(**settings)
    if not quiet:
        for line in startup_report(llm.engine):
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


def _print_error(error: SightlineError) -> None:
    notes.print(f"[bold red]error[/]: {escape(str(error))}", soft_wrap=True)


def _jsonable(value: object) -> object:
    match value:
        case frozenset():
            return sorted(value)
        case _:
            raise TypeError(f"expected a value that JSON has, got {type(value).__name__}")
