"""Specs of compressed attention (DeepSeek V4): how tokens become entries, and what layers do with them.

    tokens    0  1  2  3 | 4  5  6  7 | 8  9         windows of `ratio` tokens, here 4
    entries        0     |     1      |  (open)      entry i is written by token (i + 1) * ratio - 1

A query at position t sees entry i if i < (t + 1) // ratio: its window of tokens is complete.

Knows the mathematics of a layer. Does not know who computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from sightline.attention.dimensions import Dimension, Value
from sightline.attention.kinds import Feature, SpecKind
from sightline.cache.spec import PlaneSpec, PoolSpec, ScalesByPlane, StateSpec


@dataclass(frozen=True)
class Compression:
    """How the tokens of a window become one entry.

    mixed  = sum over tokens j of softmax over j(gate[j]) * value[j]     per channel, in fp32
    entry  = rotated(mixed / sqrt(mean(mixed²) + norm_eps) * weight)     at the first position of the window

    Without overlap the tokens j are those of the entry's window. With overlap a token has values and gates [Ca | Cb]:
    an entry mixes Cb of its own window with Ca of the window before it, in one softmax; the first has no Ca.

    The tokens of a window that is not complete are kept as sums, of which a softmax is made: for each channel the
    maximum of the gates, the sum of exp(gate - maximum), and that sum weighted with values. See `num_sums`.
    """

    ratio: int
    """Tokens per entry."""
    overlap: bool
    """True if an entry also mixes the window before its own."""
    rope_dim: int
    """The last `rope_dim` channels of an entry are rotated, in pairs of neighbours."""
    norm_eps: float

    def __post_init__(self) -> None:
        if self.ratio < 2:
            raise ValueError(f"expected at least 2 tokens per entry, got {self.ratio}")
        if self.rope_dim < 0 or self.rope_dim % 2:
            raise ValueError(f"expected an even number of rotated channels, got {self.rope_dim}")

    @property
    def num_sums(self) -> int:
        """Triples of sums per sequence: of the open window's tokens for its own entry; with overlap, also its Ca for
        the next entry, and Ca of the window before it."""
        return 3 if self.overlap else 1

    def width(self, head_dim: int) -> int:
        """Numbers of values, and of gates, of a token."""
        return 2 * head_dim if self.overlap else head_dim

    def sums(self, head_dim: int) -> PlaneSpec:
        """What is kept of the open window: [num_sums, 3, head_dim], of each triple the maximum, the sum of
        exponentials and the weighted sum. A sum of 0 means no token, whatever the maximum is."""
        return PlaneSpec("sums", (self.num_sums, 3, head_dim), torch.float32)

    @property
    def proof_values(self) -> dict[Dimension, Value]:
        """Values that a proof must cover."""
        return {Dimension.RATIO: self.ratio, Dimension.OVERLAP: int(self.overlap)}


OWN, NEXT, BEFORE = 0, 1, 2
"""The triples of `Compression.sums`: for the open window's own entry; its Ca; Ca of the window before it."""
MAXIMUM, SUM, WEIGHTED = 0, 1, 2
"""The numbers of a triple."""


@dataclass(frozen=True)
class CompressedSpec:
    """Attention of all heads to one vector a key, which is its value too: those of the last `window` tokens, and
    entries of compressed tokens, in one softmax with a sink per head.

    out = sum over keys of softmax(scale * query . key) * key      the denominator also has exp(sink)

    A token of the window is a key on its own even if a visible entry stands for it too. The output is rotated as the
    keys are; the layer rotates it back.
    """

    num_q_heads: int
    head_dim: int
    scale: float
    window: int
    """A query sees tokens less than `window` positions away, itself included."""
    compression: Compression | None
    """None: there are no entries."""
    top_k: int | None = None
    """A query attends to at most this many entries, which an indexer chooses; None: to all that it sees."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"expected a window of at least 1, got {self.window}")
        if self.top_k is not None and (self.top_k < 1 or self.compression is None):
            raise ValueError(f"expected a choice of at least 1 among entries, got a top_k of {self.top_k} in {self}")
        _check_rotation(self.compression, self.head_dim)

    @property
    def kind(self) -> SpecKind:
        return SpecKind.COMPRESSED

    @property
    def group_size(self) -> int:
        """All query heads share the one key head."""
        return self.num_q_heads

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """Key and value dimensions of a head."""
        return self.head_dim, self.head_dim

    @property
    def out_dim(self) -> int:
        return self.head_dim

    @property
    def tokens_per_entry(self) -> int:
        return 1 if self.compression is None else self.compression.ratio

    @property
    def label(self) -> str:
        """Human-readable name."""
        if self.compression is None:
            return f"window {self.window} attention with one key head"
        which = "" if self.top_k is None else f"{self.top_k} chosen "
        return f"window {self.window} attention with {which}entries of {self.compression.ratio} tokens"

    @property
    def features(self) -> frozenset[Feature]:
        """Features that a backend must have to compute this spec."""
        return frozenset({Feature.WINDOW} if self.top_k is None else {Feature.WINDOW, Feature.SPARSE})

    @property
    def proof_values(self) -> Mapping[Dimension, Value]:
        """Values that a proof must cover, beyond heads and features."""
        chosen: dict[Dimension, Value] = {} if self.top_k is None else {Dimension.TOP_K: self.top_k}
        if self.compression is None:
            return {Dimension.RATIO: 0, Dimension.OVERLAP: 0}
        return self.compression.proof_values | chosen

    def step_costs(self) -> tuple[int, float]:
        """Multiplications of each token, and of each pair of a token and one before it. A window counts as full, and
        so do chosen entries."""
        pair = 2 * self.num_q_heads * self.head_dim
        if self.compression is None:
            return pair * self.window, 0
        if self.top_k is not None:
            return pair * (self.window + self.top_k), 0
        return pair * self.window, pair / self.compression.ratio

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """One vector per entry and layer; none without compression. `dtype` is the cache's."""
        if self.compression is None:
            return ()
        plane = PlaneSpec.scaled("entry", (self.head_dim,), dtype, scales)
        return (PoolSpec("entry", (plane,), num_layers, self.compression.ratio),)

    def states(self, num_layers: int, dtype: torch.dtype) -> StateSpec:
        """What is kept of each sequence: the keys of its last tokens, that of position p at p % window, and the sums of
        the open window. `dtype` is the cache's."""
        window = PlaneSpec("window", (self.window, self.head_dim), dtype)
        if self.compression is None:
            return StateSpec((window,), num_layers)
        return StateSpec((window, self.compression.sums(self.head_dim)), num_layers)


@dataclass(frozen=True)
class CompressedIndexSpec:
    """An indexer over compressed keys: scores every entry that a query sees, and chooses the `top_k` best.

    score    = sum over heads h of weight[h] * max(0, query[h] . key)       one key an entry, for all heads
    chosen   the entries with the highest scores, of equal ones the earlier; all if there are no more
    """

    num_q_heads: int
    head_dim: int
    top_k: int
    compression: Compression
    window: ClassVar[None] = None
    features: ClassVar[frozenset[Feature]] = frozenset({Feature.SPARSE})

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"expected at least 1 chosen entry, got a top_k of {self.top_k}")
        _check_rotation(self.compression, self.head_dim)

    @property
    def kind(self) -> SpecKind:
        return SpecKind.COMPRESSED_INDEX

    @property
    def group_size(self) -> int:
        """All heads share the one key of an entry."""
        return self.num_q_heads

    @property
    def out_dim(self) -> int:
        """Entries that are chosen for a query."""
        return self.top_k

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """The dimension of a key; there are no values."""
        return self.head_dim, 0

    @property
    def tokens_per_entry(self) -> int:
        return self.compression.ratio

    @property
    def label(self) -> str:
        """Human-readable name."""
        return f"choice of {self.top_k} entries of {self.compression.ratio} tokens"

    def step_costs(self) -> tuple[int, float]:
        """Multiplications of each token, and of each pair of a token and one before it."""
        return 0, self.num_q_heads * (self.head_dim + 1) / self.compression.ratio

    @property
    def proof_values(self) -> Mapping[Dimension, Value]:
        """Values that a proof must cover, beyond heads and features."""
        return self.compression.proof_values | {Dimension.TOP_K: self.top_k}

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """One key per entry and layer; `dtype` is the cache's."""
        del scales
        plane = PlaneSpec("key", (self.head_dim,), dtype)
        return (PoolSpec("index", (plane,), num_layers, self.compression.ratio),)

    def states(self, num_layers: int, dtype: torch.dtype) -> StateSpec:
        """What is kept of each sequence: the sums of the open window."""
        del dtype
        return StateSpec((self.compression.sums(self.head_dim),), num_layers)


def _check_rotation(compression: Compression | None, head_dim: int) -> None:
    if compression is not None and compression.rope_dim > head_dim:
        raise ValueError(f"expected at most {head_dim} rotated channels, as many as there are, got {compression}")
