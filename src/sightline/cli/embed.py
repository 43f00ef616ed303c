"""`embed`: texts in, vectors out. Files are read and written by `sightline.offline.embedding_files`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click
from rich.markup import escape

from sightline.cli.conformance.proving import prove_first
from sightline.cli.console import notes
from sightline.cli.options import (
    collected,
    count_option,
    embedding_options,
    options_given,
    parse_positive_count,
    parse_target,
    prove_option,
    quiet_option,
)
from sightline.cli.signals import ended_by
from sightline.core.errors import ConfigError

if TYPE_CHECKING:
    from sightline.engine.text_embedder import TextEmbedder
    from sightline.offline.embedding_files import OutputFormat, TextSource, VectorWriter
    from sightline.offline.embedding_run import EmbeddingJob, Totals

reading_options = collected(
    "reading",
    input_path=click.option(
        "--input",
        "-i",
        "input_path",
        type=click.Path(exists=True, dir_okay=False, allow_dash=True),
        metavar="FILE",
        help="Texts, one a line; standard input without it, or with -.",
    ),
    input_format=click.option(
        "--input-format",
        type=click.Choice(["text", "jsonl"]),
        help="What a line is: a text, or JSON. By the suffix .jsonl without it.",
    ),
    named_field=click.option(
        "--field",
        "named_field",
        metavar="NAME",
        help='Where the text is in objects of JSONL: "text" without it. Other fields go into JSONL results.',
    ),
)
writing_options = collected(
    "writing",
    output=click.option(
        "--output",
        "-o",
        type=lambda text: None if text == "-" else parse_target(text),
        metavar="FILE",
        help="Where vectors go, whole or not at all; standard output without it.",
    ),
    output_format=click.option(
        "--format",
        "output_format",
        type=click.Choice(["jsonl", "npy", "safetensors"]),
        help="By the suffix of --output without it, and jsonl without either.",
    ),
)
_OF_THE_CACHE = ("page_size", "cache_tokens", "memory_fraction", "kv_cache_dtype")
"""Settings that are refused where the model embeds without a cache."""


@click.command()
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@reading_options
@writing_options
@click.option("--truncate", is_flag=True, help="Cut texts that are too long, rather than refuse them.")
@count_option(
    "--dimensions", parse=parse_positive_count, help="Keep so many of a vector's first numbers, at length 1 again."
)
@quiet_option
@prove_option
@embedding_options
def embed(
    texts: tuple[str, ...],
    reading: dict[str, Any],
    writing: dict[str, Any],
    truncate: bool,
    dimensions: int | None,
    quiet: bool,
    prove: bool,
    settings: dict[str, Any],
) -> None:
    """Turn each TEXT, or each line of a file or of standard input, into a vector, in order.

    A line of JSONL is an object with the text in a field, a string, or a list of token ids. All lines are checked
    before the first is embedded. Vectors go out as JSONL, NumPy (.npy) or safetensors.
    """
    from sightline.offline.embedding_files import WRITERS

    if settings["model"] is None:
        raise click.UsageError("expected --model, got none: the default model does not embed; name one")
    with ExitStack() as stack:
        form = _output_format(**writing)
        source = stack.enter_context(_opened(texts, form, quiet=quiet, **reading))
        num_texts = source.count()
        stack.enter_context(ended_by(signal.SIGTERM))
        file = stack.enter_context(_target(writing["output"]))
        asked = _load(settings, truncate, dimensions, prove=prove, quiet=quiet)
        totals = _run(asked, source, WRITERS[form](file, num_texts, asked.dimension), quiet=quiet)
    if not quiet:
        for line in totals.lines(asked.embedder.max_tokens):
            notes.print(f"[dim]{line}[/]")


def _output_format(output: Path | None, output_format: str | None) -> OutputFormat:
    from sightline.offline.embedding_files import OutputFormat, output_format_of

    if output is None and output_format not in (None, OutputFormat.JSONL.value):
        raise click.UsageError(f"expected --output with --format {output_format}, got none; only jsonl can be printed")
    if output_format is not None:
        return OutputFormat(output_format)
    return OutputFormat.JSONL if output is None else output_format_of(output)


@contextmanager
def _opened(
    texts: tuple[str, ...],
    form: OutputFormat,
    *,
    quiet: bool,
    input_path: str | None,
    input_format: str | None,
    named_field: str | None,
) -> Iterator[TextSource]:
    """Opens the source of the texts: arguments, a file or standard input."""
    from sightline.offline import embedding_files as files

    if texts:
        if (input_path, input_format, named_field) != (None, None, None):
            raise click.UsageError("expected TEXT or --input, --input-format and --field, got both; leave one out")
        yield files.GivenTexts(texts)
        return
    name = "standard input" if input_path in (None, "-") else str(input_path)
    kind = files.InputFormat(input_format) if input_format is not None else files.input_format_of(name)
    if named_field is not None and kind is files.InputFormat.TEXT:
        raise click.UsageError("expected JSONL with --field, got plain text; add --input-format jsonl")
    reserved = files.OUTPUT_FIELDS if form is files.OutputFormat.JSONL else ()
    read = files.read_plain if kind is files.InputFormat.TEXT else files.JsonReader(named_field, reserved)
    with _stream(input_path, quiet=quiet) as stream, files.rereadable(stream) as lines:
        yield files.TextLines(lines, name, read)


@contextmanager
def _stream(input_path: str | None, *, quiet: bool) -> Iterator[BinaryIO]:
    if input_path not in (None, "-"):
        with Path(str(input_path)).open("rb") as file:
            yield file
        return
    if sys.stdin.isatty() and not quiet:
        notes.print("[dim]texts, one a line; Ctrl-D ends them[/]")
    yield sys.stdin.buffer


@contextmanager
def _target(output: Path | None) -> Iterator[BinaryIO]:
    from sightline.offline.embedding_files import whole_file

    if output is None:
        yield sys.stdout.buffer
        return
    with whole_file(output) as file:
        yield file


def _load(
    settings: dict[str, Any], truncate: bool, dimensions: int | None, *, prove: bool, quiet: bool
) -> EmbeddingJob:
    """Builds the embedder, and says what was decided. Degradations are logged by whoever finds them."""
    from sightline.llm import LLM
    from sightline.offline.embedding_run import EmbeddingJob

    embedder = LLM(task="embed", **(prove_first(settings, task="embed") if prove else settings)).embedder
    unused = [option for name in _OF_THE_CACHE for option in options_given(click.get_current_context(), name)]
    if unused and embedder.embedder.is_transient:
        raise ConfigError(
            f"expected no {', '.join(unused)}, got it: {settings['model']} embeds without a cache; leave it out"
        )
    if not quiet:
        _describe(str(settings["model"]), embedder)
    return EmbeddingJob(embedder, truncate, dimensions)


def _describe(model: str, embedder: TextEmbedder) -> None:
    from sightline.attention.capability import Work

    inner, config = embedder.embedder, embedder.embedder.runtime.config
    pooling = f"{inner.pooling.kind.value} pooling" + (", normalised" if inner.pooling.normalise else "")
    backends = ", ".join(selection[Work.PREFILL].candidate.name for selection in inner.runtime.selections)
    cache = "no cache" if inner.is_transient else f"cache of {config.cache_tokens:,} tokens"
    for line in (
        f"{model} · {config.device.name} · {str(config.dtype).removeprefix('torch.')} · attention on {backends}",
        f"{inner.definition.state_size:,} dimensions · {pooling} · texts of up to {embedder.max_tokens:,} tokens"
        f" · {cache}",
        *(f"note: {note}" for note in embedder.ledger.notes),
    ):
        notes.print(f"[dim]{escape(line)}[/]")


def _run(asked: EmbeddingJob, source: TextSource, writer: VectorWriter, *, quiet: bool) -> Totals:
    """Checks every text, then embeds them, with a bar on a terminal."""
    from rich.progress import MofNCompleteColumn, Progress

    from sightline.offline.embedding_run import check_texts, embed_texts

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=notes, disable=quiet or not notes.is_terminal, transient=True) as bar:
        checking = bar.add_task("Checking", total=writer.num_texts)
        check_texts(asked, source, lambda count: bar.advance(checking, count))
        bar.remove_task(checking)
        embedding = bar.add_task("Embedding", total=writer.num_texts)
        return embed_texts(asked, source, writer, lambda count: bar.advance(embedding, count))
