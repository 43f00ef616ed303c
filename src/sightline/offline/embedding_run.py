"""Embeds a whole source of texts, slice by slice, after checking every text.

Does not know file formats or the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sightline.core.errors import RequestError
from sightline.engine.text_embedder import TextEmbedder
from sightline.offline.embedding_files import TextSource, VectorWriter

SLICE_TEXTS = 4096
SLICE_SIZE = 1 << 22
"""Characters or token ids at which a slice ends."""


@dataclass(frozen=True)
class EmbeddingJob:
    """The embedder and its settings."""

    embedder: TextEmbedder
    truncate: bool
    dimensions: int | None

    @property
    def dimension(self) -> int:
        """Dimension of the written vectors."""
        return self.embedder.embedder.definition.state_size if self.dimensions is None else self.dimensions


@dataclass(frozen=True)
class Totals:
    """Counts and time of a finished job."""

    num_texts: int = 0
    num_tokens: int = 0
    """Embedded tokens."""
    num_truncated_texts: int = 0
    num_truncated_tokens: int = 0
    """Tokens that truncation removed."""
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache."""
    seconds: float = 0.0

    def lines(self, max_tokens: int) -> list[str]:
        """The totals as text."""
        lines = [
            f"{_counted(self.num_texts, 'text')}, {_counted(self.num_tokens, 'token')} in {self.seconds:.1f} s"
            f" · {self.num_texts / self.seconds:,.0f} texts/s · {self.num_tokens / self.seconds:,.0f} tokens/s"
        ]
        if self.num_truncated_texts:
            lines.append(
                f"{_counted(self.num_truncated_texts, 'text')} cut to {_counted(max_tokens, 'token')}: "
                f"{_counted(self.num_truncated_tokens, 'token')} left out"
            )
        if self.num_cached_tokens:
            lines.append(f"{_counted(self.num_cached_tokens, 'token')} found in the prefix cache")
        return lines


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def check_texts(asked: EmbeddingJob, source: TextSource, on_progress: Callable[[int], None]) -> None:
    """Raises `RequestError` with the place of the first text that the model cannot embed."""
    asked.embedder.check_dimensions(asked.dimensions)
    for item in source:
        try:
            [(tokens, _)] = asked.embedder.tokens([item.text], truncate=asked.truncate)
            asked.embedder.embedder.check(tokens)
        except RequestError as error:
            raise RequestError(f"{source.place(item.number)}: {error}") from error
        on_progress(1)


def embed_texts(
    asked: EmbeddingJob, source: TextSource, writer: VectorWriter, on_progress: Callable[[int], None]
) -> Totals:
    """Embeds and writes all texts. The source must have as many texts as the writer expects."""
    started, totals = time.perf_counter(), Totals()
    writer.start()
    for items in source.slices(SLICE_TEXTS, SLICE_SIZE):
        outputs = asked.embedder.embed(
            [item.text for item in items],
            truncate=asked.truncate,
            dimensions=asked.dimensions,
            on_progress=on_progress,
        )
        writer.write(list(zip(items, outputs, strict=True)))
        totals = Totals(
            totals.num_texts + len(outputs),
            totals.num_tokens + sum(len(each.prompt_token_ids) for each in outputs),
            totals.num_truncated_texts + sum(each.num_truncated_tokens > 0 for each in outputs),
            totals.num_truncated_tokens + sum(each.num_truncated_tokens for each in outputs),
            totals.num_cached_tokens + sum(each.num_cached_tokens for each in outputs),
            time.perf_counter() - started,
        )
    if totals.num_texts != writer.num_texts:
        raise RequestError(
            f"expected {writer.num_texts} texts in {source.place(0)}, got {totals.num_texts}: "
            "it changed while it was read; run it again"
        )
    writer.finish()
    return totals
