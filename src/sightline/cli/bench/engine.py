"""Options of the `bench` commands that run engines. `sightline.bench` does the measuring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sightline.cli.bench.attention import attention
from sightline.cli.bench.serving import serve
from sightline.cli.console import notes
from sightline.cli.options import (
    collected,
    conversing_engine_options,
    counts_option,
    measure_option,
    measured_engine_options,
    parse_target,
)
from sightline.cli.reports import json_settings, print_report, report_file_options

if TYPE_CHECKING:
    from sightline.bench.engine.work import MeasuredEngine

_RANDOM = {
    "dummy_weights": click.option(
        "--dummy-weights", is_flag=True, help="Random weights, made on the device, for the model of --model-config."
    ),
    "model_config": click.option(
        "--model-config",
        metavar="NAME|FILE",
        help="llama-8b, qwen3-0.6b, deepseek-v2-lite, deepseek-v32-4-layers, deepseek-v32-small, "
        "deepseek-v4-4-layers, deepseek-v4-small, gpt-oss-20b, qwen3-next-12-layers, qwen3-next-small or a "
        "config.json, with --dummy-weights.",
    ),
}
"""A model without a checkpoint."""
bench_options = collected(
    "how",
    compare=click.option(
        "--compare",
        default="",
        metavar="NAMES",
        help="Other engines to compare with: transformers,llama.cpp,llama.cpp-flash,vllm.",
    ),
    num_iters=measure_option("--num-iters", default=5, help="Rounds that count; medians are reported."),
    **_RANDOM,
    **json_settings,
)
chat_options = collected("how", **_RANDOM, **json_settings)


@click.group()
def bench() -> None:
    """Measure speed, compared with other engines and with the least possible time (the floor)."""


bench.add_command(attention)
bench.add_command(serve)


@bench.command()
@measure_option("--input-len", default=512, help="Tokens of the prompt to read.")
@measure_option("--output-len", default=48, help="Tokens that each row generates.")
@measure_option("--batch-size", default=1, help="Rows that decode at once.")
@counts_option("--contexts", default="32", help="Prompt lengths of the rows, in turns: 64,128,256,512 mixes them.")
@click.option("--profile", is_flag=True, help="Also show where the time of a decode step goes.")
@bench_options
@measured_engine_options
def latency(
    input_len: int,
    output_len: int,
    batch_size: int,
    contexts: list[int],
    profile: bool,
    how: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Time the prefill of a prompt, and the decoding of a batch of rows without its prefill.

    The time of decoding is a run of --output-len tokens minus a run of one token on the same prompts.
    """
    from sightline.bench.engine.profile_step import ProfiledReport, profile_steps
    from sightline.bench.engine.work import compare_engines, latency_works

    if output_len < 2:
        raise click.BadParameter(f"expected at least 2 tokens, got {output_len}", param_hint="--output-len")
    if profile and len(contexts) > 1:
        raise click.UsageError(f"expected one of --contexts with --profile, got {len(contexts)}; leave one")
    lengths, compared = (input_len, output_len), _compared(how)
    subject = _load(how, settings, compared)
    report = compare_engines(
        subject,
        lambda floor, vocab: latency_works(floor, vocab, lengths, contexts, batch_size),
        compared,
        how["num_iters"],
    )
    if profile:
        profiled = profile_steps(subject.llm.engine, batch_size, contexts[0], output_len)
        report = ProfiledReport(**vars(report), profile=profiled)
    print_report(report, how)


@bench.command()
@measure_option("--num-prompts", default=16, help="Prompts that run at once.")
@measure_option("--random-input-len", default=64, help="Random tokens per prompt.")
@measure_option("--random-output-len", default=48, help="Tokens that each prompt generates.")
@bench_options
@measured_engine_options
def throughput(
    num_prompts: int, random_input_len: int, random_output_len: int, how: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Time many prompts at once: the whole, the prefill alone, and decoding without it."""
    from sightline.bench.engine.work import compare_engines, throughput_works

    lengths, compared = (random_input_len, random_output_len), _compared(how)
    report = compare_engines(
        _load(how, settings, compared),
        lambda floor, vocab: throughput_works(floor, vocab, lengths, num_prompts),
        compared,
        how["num_iters"],
    )
    print_report(report, how)


@bench.command()
@counts_option("--rows", default="1,2,4,8,16,32,64", help="Numbers of rows, at the first context.")
@counts_option(
    "--contexts", default="64,128,256,512,1k,2k,4k", help="Tokens in each row's cache, with 1 row and with 8."
)
@measure_option("--num-steps", default=8, help="Decode steps per point; medians are reported.")
@click.option("--plot", type=parse_target, metavar="FILE.svg", help="Draw the curves in this file.")
@report_file_options
@measured_engine_options
def growth(
    rows: list[int],
    contexts: list[int],
    num_steps: int,
    plot: Path | None,
    how: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Time decode steps by number of rows and by context, with the floor."""
    from sightline.bench.engine.growth import measure_growth
    from sightline.bench.engine.work import load_subject

    report = measure_growth(
        load_subject(settings),
        rows,
        contexts,
        num_steps,
        lambda count, context, seconds: notes.print(
            f"[dim]{count} × context {context}: {seconds * 1e3:.2f} ms per step[/]"
        ),
    )
    if plot is not None:
        plot.write_text(report.svg())
    print_report(report, how)


@bench.command()
@measure_option("--users", default=8, help="Users that ask at once and share a system prompt.")
@measure_option("--turns", default=6, help="Questions per user; every prompt contains the whole history.")
@measure_option("--system-len", default=256, help="Tokens of the system prompt.")
@measure_option("--question-len", default=48, help="Tokens of each question.")
@measure_option("--answer-len", default=32, help="Tokens of each answer.")
@chat_options
@conversing_engine_options
def multiturn(how: dict[str, Any], settings: dict[str, Any], **lengths: int) -> None:
    """Run a chat with the prefix cache and without: reused tokens, and how much sooner first tokens come.

    With --host-cache-gib, both engines have the prefix cache, and one has the host cache too.
    """
    from sightline.bench.engine.multiturn import Chat, measure_multiturn

    if lengths["turns"] < 2:
        raise click.BadParameter(
            "expected at least 2 turns, got 1, in which nothing can be reused", param_hint="--turns"
        )
    chat = Chat(**lengths)
    _check_random(how, settings, [])
    report = measure_multiturn(
        settings, chat, lambda turn: notes.print(f"[dim]turn {turn} of {chat.turns}[/]"), how["model_config"]
    )
    print_report(report, how)


@bench.command()
@measure_option("--rows", default=8, help="Rows that decode when the long prompt arrives.")
@measure_option("--row-len", default=32, help="Tokens of each row's prompt.")
@measure_option("--prompt-len", default=4000, help="Tokens of the long prompt.")
@measure_option("--num-iters", default=3, help="Rounds that count.")
@report_file_options
@measured_engine_options
def interference(num_iters: int, how: dict[str, Any], settings: dict[str, Any], **lengths: int) -> None:
    """Let a long prompt arrive while rows decode: gaps between their tokens, and the time to its first token."""
    from sightline.bench.engine.interference import Traffic, measure_interference

    report = measure_interference(
        settings,
        Traffic(**lengths),
        num_iters,
        lambda number, measured: notes.print(
            f"[dim]round {number} of {num_iters}: largest gap {measured.ratio:.2f} budgeted steps[/]"
        ),
    )
    print_report(report, how)


@bench.command()
@measure_option("--output-len", default=96, help="Tokens of each answer.")
@measure_option("--num-iters", default=3, help="Rounds that count; the best is reported.")
@report_file_options
@measured_engine_options
def speculation(output_len: int, num_iters: int, how: dict[str, Any], settings: dict[str, Any]) -> None:
    """Answer prompts with the guesses of --speculative-config and without: speed-up, and how many guesses are right."""
    from sightline.bench.engine.speculation import measure_speculation

    if output_len < 2:
        raise click.BadParameter(f"expected at least 2 tokens, got {output_len}", param_hint="--output-len")
    report = measure_speculation(
        settings,
        output_len,
        num_iters,
        lambda work: notes.print(f"[dim]{work.name} at {work.temperature:g}: {work.speedup:.2f}×[/]"),
    )
    print_report(report, how)


@bench.command()
@counts_option("--rows", default="1,16", help="Numbers of rows that answer at once.")
@measure_option("--num-steps", default=16, help="Decode steps per round that are timed.")
@measure_option("--output-len", default=160, help="Most tokens of each answer.")
@measure_option("--num-iters", default=3, help="Rounds that count; medians are reported.")
@report_file_options
@conversing_engine_options
def structured(rows: list[int], how: dict[str, Any], settings: dict[str, Any], **counts: int) -> None:
    """Answer under a JSON schema and without one: the cost of masks, the share that is hidden, and validity."""
    from sightline.bench.engine.structured import measure_structured

    report = measure_structured(
        settings,
        rows,
        counts["num_steps"],
        counts["output_len"],
        counts["num_iters"],
        lambda work: notes.print(f"[dim]{work.rows} rows: a step is {work.longer:.1%} longer with masks[/]"),
    )
    print_report(report, how)


@bench.command()
@counts_option(
    "--rows", default="16,64,256,1024", help="Running rows, at 10,000 prefixes or at the first number given."
)
@counts_option(
    "--prefixes", default="1000,10000,100000", help="Cached prefixes, at 256 rows or at the first number given."
)
@measure_option("--num-steps", default=128, help="Decode steps per point; medians are reported.")
@report_file_options
def scheduler(rows: list[int], prefixes: list[int], num_steps: int, how: dict[str, Any]) -> None:
    """Time the scheduler without a model: a step's scheduling and bookkeeping, and the lookup of a long prompt."""
    from sightline.bench.host.scheduling import measure_scheduling

    report = measure_scheduling(
        rows,
        prefixes,
        num_steps,
        lambda load: notes.print(f"[dim]built: {load.rows} rows, {load.prefixes} prefixes[/]"),
    )
    print_report(report, how)


def _compared(how: dict[str, Any]) -> list[str]:
    """The other engines, which are known and installed."""
    from sightline.bench.engine.peers import check_peers

    compared = [name.strip() for name in how["compare"].split(",") if name.strip()]
    check_peers(compared)
    return compared


def _load(how: dict[str, Any], settings: dict[str, Any], compared: list[str]) -> MeasuredEngine:
    """Loads the model that the options name."""
    from sightline.bench.engine.work import load_subject

    _check_random(how, settings, compared)
    return load_subject(settings, how["model_config"])


def _check_random(how: dict[str, Any], settings: dict[str, Any], compared: list[str]) -> None:
    """Raises if options name a model in two ways or in none, or engines that read weights from files."""
    if not how["dummy_weights"]:
        if how["model_config"] is not None:
            raise click.UsageError("expected --model-config with --dummy-weights, got it alone; add --dummy-weights")
        return
    if how["model_config"] is None:
        raise click.UsageError("expected --model-config with --dummy-weights, got none; name a config")
    if settings["model"] is not None:
        raise click.UsageError(
            f"expected --model or --dummy-weights, got both, with {settings['model']!r}; leave one out"
        )
    if compared:
        raise click.UsageError(
            f"expected no --compare with --dummy-weights, got {', '.join(compared)}: other engines read weights from "
            "files; leave one out"
        )
