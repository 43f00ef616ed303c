"""Offline embeddings: texts in, vectors out.

Owns what happens to a text before and after the `Embedder`: its tokens, truncated on request, and the vector's length.
Knows no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from sightline.core.batch import MaskKind
from sightline.core.config import EngineConfig
from sightline.core.embedding import EmbeddingOutput, EmbeddingRequestOutput
from sightline.core.errors import RequestError
from sightline.core.ledger import Ledger
from sightline.core.request import Terms, new_request_id
from sightline.engine.calls import BatchCall, SharedEngine
from sightline.engine.embedder import Embedder, TextResult
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.pooling import Pooling, PoolingKind, read_pooling
from sightline.models.registry import define_embedder
from sightline.runner.build import build_embedding_runtime
from sightline.runner.progress import OnBuildStep, ignore
from sightline.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("sightline")


@dataclass(frozen=True, eq=False)
class Embedded:
    """One text's vector."""

    vector: Tensor
    """[state_size] fp32 on the CPU."""
    num_cached: int
    """Tokens of the text that were in the cache already."""


class TextEmbedder:
    """An embedder with its tokenizer. Several threads may call `embed`: their texts share steps."""

    def __init__(self, embedder: Embedder, tokenizer: Tokenizer | None, ledger: Ledger) -> None:
        self.embedder = embedder
        self.tokenizer = tokenizer
        self.ledger = ledger
        self._shared = SharedEngine(embedder)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one text."""
        return self.embedder.runtime.config.max_model_len

    def tokens(self, texts: Sequence[str | Sequence[int]], *, truncate: bool) -> list[tuple[list[int], int]]:
        """Each text's tokens, and how many were left out of its end."""
        as_text = [text for text in texts if isinstance(text, str)]
        if as_text and self.tokenizer is None:
            raise RequestError("expected token ids, got text: the tokenizer was not loaded (skip_tokenizer_init)")
        encoded = iter(self.tokenizer.encode_prompts(as_text) if self.tokenizer is not None else ())
        end = () if self.tokenizer is None else self.tokenizer.suffix
        return [
            self._cut(next(encoded), end, truncate=truncate)
            if isinstance(text, str)
            else self._cut(list(text), (), truncate=truncate)
            for text in texts
        ]

    def _cut(self, tokens: list[int], end: Sequence[int], *, truncate: bool) -> tuple[list[int], int]:
        """Cuts a text to the most tokens, if asked to, but keeps its `end`. Returns it, and how many were cut."""
        excess = len(tokens) - self.max_tokens
        if excess <= 0 or not truncate:
            return tokens, 0
        return [*tokens[: self.max_tokens - len(end)], *end], excess

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        truncate: bool = False,
        dimensions: int | None = None,
        terms: Terms = Terms(),  # noqa: B008 - frozen
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each text, in order. Raises `RequestError` for texts that cannot be embedded.

        `truncate` cuts what is too long; `dimensions` keeps so many of a vector's first numbers.
        """
        self.check_dimensions(dimensions)
        cut = self.tokens(texts, truncate=truncate)
        embedded = self.embed_tokens([tokens for tokens, _ in cut], terms, on_progress)
        return [
            EmbeddingRequestOutput(
                new_request_id(),
                text if isinstance(text, str) else None,
                tuple(tokens),
                EmbeddingOutput(shortened(each.vector, dimensions).tolist()),
                each.num_cached,
                num_truncated,
            )
            for text, (tokens, num_truncated), each in zip(texts, cut, embedded, strict=True)
        ]

    def embed_tokens(
        self,
        texts: Sequence[Sequence[int]],
        terms: Terms = Terms(),  # noqa: B008 - frozen
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> list[Embedded]:
        """A vector for each text, in order. `on_progress` is told how many more there are, as they come.

        Raises `RequestError` before the first step if a text cannot be embedded, and after the last if one failed.
        """
        for tokens in texts:
            self.embedder.check(tokens)
        count = len(texts)
        # Texts of one length share steps.
        order = sorted(range(count), key=lambda index: len(texts[index]), reverse=True)
        call = BatchCall(
            self._shared,
            self.embedder,
            order,
            lambda index: (None, texts[index]),
            [None] * count,
            [terms] * count,
            [1] * count,
            _refused,
        )
        num_told = 0

        def tell(num_done: int) -> None:
            nonlocal num_told
            if num_done > num_told:
                on_progress(num_done - num_told)
                num_told = num_done

        found: dict[int, Embedded] = {}
        for index, result in zip(order, call.run(tell), strict=True):
            if result.vector is None:
                raise RequestError(f"text {index} could not be embedded: {result.error}")
            found[index] = Embedded(result.vector, result.num_cached)
        return [found[index] for index in range(count)]

    def close(self) -> None:
        """Ends everything; a closed embedder refuses work."""
        self._shared.run(lambda _: self.embedder.close())

    def check_dimensions(self, dimensions: int | None) -> None:
        size = self.embedder.definition.state_size
        if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= size):
            raise RequestError(f"expected dimensions from 1 to {size}, what a vector has, got {dimensions!r}")


def _refused(_index: int, _count: int, error: RequestError) -> TextResult:
    """A text that passed the checks is refused for a reason that ends the call."""
    raise error


def shortened(vector: Tensor, dimensions: int | None) -> Tensor:
    """The first numbers of a vector, at length 1 again."""
    if dimensions is None or dimensions == vector.shape[0]:
        return vector
    return F.normalize(vector[:dimensions], dim=-1)


def log_ledger(ledger: Ledger) -> None:
    """Logs degradations as warnings and notes as information."""
    for degradation in ledger.degradations:
        logger.warning("degraded: %s", degradation)
    for note in ledger.notes:
        logger.info("note: %s", note)


def embedder_config(config: EngineConfig, checkpoint: Checkpoint, ledger: Ledger) -> tuple[EngineConfig, Pooling]:
    """The config with what the model's own files say of texts' lengths, and how states become vectors."""
    sees_all = define_embedder(checkpoint.config, Ledger()).mask.kind is MaskKind.FULL
    pooling = read_pooling(checkpoint.location, PoolingKind.MEAN if sees_all else PoolingKind.LAST, ledger)
    if config.max_model_len is None and pooling.max_tokens is not None:
        config = replace(config, max_model_len=pooling.max_tokens)
    return config, pooling


def build_embedder(
    config: EngineConfig, checkpoint: Checkpoint, ledger: Ledger, on_step: OnBuildStep = ignore
) -> TextEmbedder:
    """Builds an embedder for an opened model, as its own files say."""
    config, pooling = embedder_config(config, checkpoint, ledger)
    runtime, definition = build_embedding_runtime(config, checkpoint, ledger, on_step)
    if runtime.config.prefix_caching and pooling.kind is not PoolingKind.LAST:
        ledger.degrade(
            "prefix_caching",
            f"changes nothing: {pooling.kind.value} pooling needs the states of all tokens, which are not cached",
            "leave it out",
        )
    log_ledger(ledger)
    tokenizer = None if config.skip_tokenizer_init else checkpoint.load_tokenizer()
    embedder = Embedder(runtime, definition, pooling, ledger)
    # Steps of the warm-up do not count.
    embedder.reset_counts()
    return TextEmbedder(embedder, tokenizer, ledger)
