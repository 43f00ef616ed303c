"""Options that commands share, and how their values are read. Imports nothing heavy, and does nothing but parse."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce, wraps
from pathlib import Path
from typing import TypeVar, cast

import click

_CommandT = TypeVar("_CommandT", bound=Callable[..., None])
_SUFFIXES = {"k": 1024, "m": 1024**2}


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


def collected(name: str, **options: Callable[[_CommandT], _CommandT]) -> Callable[[_CommandT], _CommandT]:
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


computing_options = {
    "model": click.option(
        "--model", "-m", help="A folder, a .gguf file or a Hugging Face id; the default model without it."
    ),
    "device": click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    "dtype": click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
    "quantization": click.option(
        "--quantization",
        type=click.Choice(["dequantise", "keep"]),
        default="dequantise",
        show_default=True,
        help="A file's quantised weights: exact, or kept small and multiplied as they are, with rounded inputs.",
    ),
    "max_model_len": count_option(
        "--max-model-len", "--context-length", "max_model_len", help="Longest sequence, in tokens."
    ),
    "max_num_seqs": count_option(
        "--max-num-seqs",
        "--max-running-requests",
        "max_num_seqs",
        help="Most sequences that run at once; without it 64, or 1024 that are embedded.",
    ),
    "max_num_batched_tokens": count_option(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        "max_num_batched_tokens",
        help="Most tokens in one step; without it 512, or 4096 where texts are embedded.",
    ),
    "page_size": count_option(
        "--page-size", "--block-size", "page_size", help="Tokens in a cache page; without it 16 on a CPU, 64 on a GPU."
    ),
    "cache_tokens": count_option(
        "--cache-tokens", help="Tokens that the cache holds; sized from free memory without it."
    ),
    "kv_cache_dtype": click.option(
        "--kv-cache-dtype",
        default="auto",
        show_default=True,
        help="Of the cache: auto (as --dtype), float32, bfloat16, float16 or fp8 (e4m3, with the checkpoint's scales).",
    ),
    "memory_fraction": click.option(
        "--memory-fraction",
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        "memory_fraction",
        type=float,
        default=0.5,
        show_default=True,
        help="The cache's share of free memory.",
    ),
    "async_scheduling": click.option(
        "--async-scheduling/--disable-overlap-schedule",
        "async_scheduling",
        default=False,
        show_default=True,
        help="Launch a step before the one before it is read.",
    ),
    "attention_backend": click.option(
        "--attention-backend", help="Force a backend, or one for each kind of layer: torch,torch-latent."
    ),
    "prefill_attention_backend": click.option(
        "--prefill-attention-backend", help="For rows of many new tokens, in place of --attention-backend."
    ),
    "decode_attention_backend": click.option(
        "--decode-attention-backend", help="For rows of one new token, in place of --attention-backend."
    ),
    "require_proof": click.option(
        "--require-proof", is_flag=True, help="Refuse backends that `sightline conformance` has not proven here."
    ),
    "chat_template": click.option(
        "--chat-template", metavar="FILE", help="A Jinja template in place of the model's own."
    ),
    "strict": click.option("--strict", is_flag=True, help="Every degradation is an error."),
    "paranoid": click.option("--paranoid", is_flag=True, help="Fingerprint plans' contents and poison unused cache."),
}
"""What an engine computes, and with what."""
prefix_caching_option = click.option(
    "--enable-prefix-caching/--disable-radix-cache",
    "prefix_caching",
    default=None,
    help="Keep what is computed of prompts and answers for requests that begin alike; so where it generates.",
)
engine_options = collected("settings", **computing_options, prefix_caching=prefix_caching_option)
task_option = click.option(
    "--task",
    type=click.Choice(["generate", "embed"]),
    default="generate",
    show_default=True,
    help="Go on with texts, or turn them into vectors.",
)
prove_option = click.option(
    "--prove",
    is_flag=True,
    help="Prove attention for exactly this engine first, unless that is done, and begin only if it passes.",
)
measured_engine_options = collected("settings", **computing_options)
"""For measurements, whose rounds repeat their prompts: nothing is kept between them."""
sampling_options = collected(
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
report_options = collected(
    "reported",
    n=count_option("--n", default=1, help="Continuations of the one TEXT; more than one needs --json."),
    logprobs=click.option("--logprobs", type=int, help="Tell so many of the likeliest tokens; needs --json."),
    prompt_logprobs=click.option("--prompt-logprobs", type=int, help="As --logprobs, of TEXT itself."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Say nothing on standard error but errors.")
