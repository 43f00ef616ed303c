"""Inputs of compressed attention, read-only. Padding tokens come last, belong to no row and may hold anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, eq=False)
class CompressionInputs:
    """What becomes entries; see `Compression`. The numbers of a token are contiguous; the strides of tokens are
    arbitrary."""

    values: Tensor
    """[num_tokens, width]; with overlap [Ca | Cb]."""
    gates: Tensor
    """[num_tokens, width], like `values`; the bias of a token's place in its window is added."""
    norm: Tensor
    """[head_dim]: the weight of the norm. A weight: no step writes it."""
    cos: Tensor
    """[num_tokens, rope_dim // 2] fp32: the rotation at the first position of each token's window. Read only for tokens
    that complete a window."""
    sin: Tensor
    """[num_tokens, rope_dim // 2] fp32, like `cos`."""

    def part(self, tokens: slice) -> CompressionInputs:
        """A view of the inputs for a slice of tokens."""
        return replace(
            self, values=self.values[tokens], gates=self.gates[tokens], cos=self.cos[tokens], sin=self.sin[tokens]
        )


@dataclass(frozen=True, eq=False)
class CompressedInputs:
    """One layer's inputs; see `CompressedSpec`. Queries and keys are rotated and keys are normalised, ready to be
    cached. Each head and key is contiguous; the strides of tokens and heads are arbitrary."""

    q: Tensor
    """[num_tokens, num_q_heads, head_dim]."""
    key: Tensor
    """[num_tokens, head_dim]."""
    sinks: Tensor
    """[num_q_heads]: a logit per head that adds to the denominator alone."""
    entries: CompressionInputs | None
    """None if the layer has no compression."""
    chosen: Tensor | None = None
    """[num_tokens, top_k] int32 if the step is sparse: the numbers of the entries that each query attends to, in
    increasing order, -1 behind the last. There are min(top_k, as many as the query sees) of them."""

    def part(self, tokens: slice) -> CompressedInputs:
        """A view of the inputs for a slice of tokens."""
        return replace(
            self,
            q=self.q[tokens],
            key=self.key[tokens],
            entries=None if self.entries is None else self.entries.part(tokens),
            chosen=None if self.chosen is None else self.chosen[tokens],
        )


@dataclass(frozen=True, eq=False)
class CompressedIndexInputs:
    """The inputs of one layer's indexer; see `CompressedIndexSpec`. Queries are rotated. Each head is contiguous; the
    strides of tokens and heads are arbitrary."""

    q: Tensor
    """[num_tokens, num_q_heads, head_dim]."""
    weights: Tensor
    """[num_tokens, num_q_heads]: how much each head counts, of either sign. A score that is NaN counts as the
    highest."""
    entries: CompressionInputs

    def part(self, tokens: slice) -> CompressedIndexInputs:
        """A view of the inputs for a slice of tokens."""
        return CompressedIndexInputs(self.q[tokens], self.weights[tokens], self.entries.part(tokens))
