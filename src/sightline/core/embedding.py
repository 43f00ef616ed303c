"""The results of embedding texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddingOutput:
    """A text as a vector."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The result of embedding a text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    """Tokens of the text that an earlier one had left in the cache."""
    num_truncated_tokens: int = 0
    """Tokens that were cut off, as requested."""
    finished: bool = True
