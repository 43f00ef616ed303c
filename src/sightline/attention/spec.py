"""Attention specs: what a layer computes, as data.

Knows the mathematics of a layer. Does not know who computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec
from sightline.attention.dimensions import Dimension, Value
from sightline.attention.kinds import Feature, SpecKind
from sightline.cache.spec import NO_STATES, SCALED_DTYPES, PlaneSpec, PoolSpec, ScalesByPlane, StateSpec


@dataclass(frozen=True)
class SoftmaxSpec:
    """Softmax attention over keys and values with grouped queries."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """A query sees keys less than `window` positions away (itself counts); None sees all."""
    softcap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks: bool = False
    """Each head has a learned logit that adds to the softmax denominator and contributes no value."""
    top_k: ClassVar[None] = None
    tokens_per_entry: ClassVar[int] = 1
    """None: a query attends to every key that it sees."""
    proof_values: ClassVar[Mapping[Dimension, Value]] = {}
    """Values that a proof must cover, beyond heads and features: none."""

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"expected q heads in whole groups, got {self.num_q_heads} q heads on {self.num_kv_heads} kv heads"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"expected a window of at least 1, got {self.window}")
        if self.softcap is not None and not self.softcap > 0.0:
            raise ValueError(f"expected a softcap above 0, got {self.softcap}")

    @property
    def kind(self) -> SpecKind:
        return SpecKind.SOFTMAX

    @property
    def group_size(self) -> int:
        """Query heads that share a key head: head h reads key head h // group_size."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """Key and value dimensions of a head, as cached."""
        return self.head_dim, self.head_dim

    @property
    def label(self) -> str:
        """Human-readable name."""
        return "full attention" if self.window is None else f"window {self.window} attention"

    @property
    def out_dim(self) -> int:
        """Output dimension of a head."""
        return self.head_dim

    @property
    def features(self) -> frozenset[Feature]:
        """Features that a backend must have to compute this spec."""
        needed = {
            Feature.WINDOW: self.window is not None,
            Feature.SOFTCAP: self.softcap is not None,
            Feature.SINKS: self.sinks,
        }
        return frozenset(feature for feature, wanted in needed.items() if wanted)

    def step_costs(self) -> tuple[int, int]:
        """Multiplications of each token, and of each pair of a token and one before it. A window counts as full."""
        pair = self.num_q_heads * sum(self.expanded_dims)
        return (0, pair) if self.window is None else (pair * self.window, 0)

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """The cache that `num_layers` layers of this spec need; `dtype` is the cache's, `scales` are for these
        layers."""
        entry = (self.num_kv_heads, self.head_dim)
        planes = tuple(PlaneSpec.scaled(name, entry, dtype, scales) for name in ("k", "v"))
        return (PoolSpec("kv", planes, num_layers),)

    def states(self, num_layers: int, dtype: torch.dtype) -> StateSpec:
        """None: a token's entry never changes."""
        del num_layers, dtype
        return NO_STATES


@dataclass(frozen=True)
class LatentSpec:
    """Attention over one latent vector per token, from which every head's key and value are projected (DeepSeek's MLA).

    query   [ nope_dim | rope_dim ]            per head
    key     [ latent @ key_up | rope ]         nope_dim per head | rope_dim shared by all heads
    value   [ latent @ value_up ]              value_dim per head
    cached  [ latent_dim | rope_dim ]          per token, normalised and rotated
    """

    num_q_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    top_k: int | None = None
    """A query attends to at most this many entries, which an indexer chooses; None: to all that it sees."""
    window: ClassVar[None] = None
    """None: a query may see every key before it."""
    tokens_per_entry: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"expected at least 1 chosen entry, got a top_k of {self.top_k}")

    @property
    def kind(self) -> SpecKind:
        return SpecKind.LATENT

    @property
    def head_dim(self) -> int:
        """Dimension of a cached entry, which is also that of a query projected into latent space."""
        return self.latent_dim + self.rope_dim

    @property
    def group_size(self) -> int:
        """All query heads share the one entry of a token."""
        return self.num_q_heads

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """Key and value dimensions of a head, expanded from an entry."""
        return self.nope_dim + self.rope_dim, self.value_dim

    @property
    def label(self) -> str:
        """Human-readable name."""
        return "latent attention" if self.top_k is None else f"latent attention to {self.top_k} chosen tokens"

    @property
    def out_dim(self) -> int:
        return self.value_dim

    @property
    def features(self) -> frozenset[Feature]:
        """Features that a backend must have to compute this spec."""
        return frozenset() if self.top_k is None else frozenset({Feature.SPARSE})

    @property
    def proof_values(self) -> Mapping[Dimension, Value]:
        """Values that a proof must cover, beyond heads and features."""
        return {} if self.top_k is None else {Dimension.TOP_K: self.top_k}

    def step_costs(self) -> tuple[int, int]:
        """Multiplications of each token, and of each pair of a token and one before it. Chosen entries count as if a
        query had all of them."""
        pair = self.num_q_heads * sum(self.expanded_dims)
        return (0, pair) if self.top_k is None else (pair * self.top_k, 0)

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """One row [latent | rope] per token and layer; `dtype` is the cache's, `scales` are for these layers."""
        return (PoolSpec("latent", (PlaneSpec.scaled("entry", (self.head_dim,), dtype, scales),), num_layers),)

    def states(self, num_layers: int, dtype: torch.dtype) -> StateSpec:
        """None: a token's entry never changes."""
        del num_layers, dtype
        return NO_STATES


UNIT_EPSILON = 1e-6
"""Added to the sum of squares of a vector that is divided by its length."""


@dataclass(frozen=True)
class RecurrentSpec:
    """A state per head that each token updates, instead of entries per token (linear attention, Mamba-2).

    mixed   [ queries | keys | values ]             per token; queries and keys of key heads, values of heads
            a causal convolution over the last `conv_width` tokens, then SiLU, if the layer has one
    state   = exp(decay) * state                    [key_dim, value_dim] per head, fp32
    state  += key ⊗ beta * (value - recalled)       recalled = key @ state with the delta rule, otherwise 0
    output  = scale * query @ state + skip * value

    Head h has the query and the key of key head h // group_size.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    delta_rule: bool
    channel_decay: bool
    """True if every key dimension has its own decay; otherwise a head has one."""
    unit_keys: bool
    """True if queries and keys are divided by their lengths, sqrt(sum of squares + `UNIT_EPSILON`)."""
    conv_width: int
    """Tokens that the convolution sees, the current one included; 0: there is none."""
    skip: bool = False
    """True if `skip` times each head's value is added to the output."""
    window: ClassVar[None] = None
    """None: a token sees the state, not keys."""
    top_k: ClassVar[None] = None
    tokens_per_entry: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"expected heads in whole groups, got {self.num_heads} heads on {self.num_key_heads} key heads"
            )
        if self.conv_width == 1 or self.conv_width < 0:
            raise ValueError(f"expected a convolution over at least 2 tokens, or 0 for none, got {self.conv_width}")

    @property
    def kind(self) -> SpecKind:
        return SpecKind.RECURRENT

    @property
    def num_q_heads(self) -> int:
        """Heads of the output."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.key_dim

    @property
    def out_dim(self) -> int:
        return self.value_dim

    @property
    def group_size(self) -> int:
        """Heads that share a key head."""
        return self.num_heads // self.num_key_heads

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """Key and value dimensions of a head."""
        return self.key_dim, self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token, side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def label(self) -> str:
        """Human-readable name."""
        rule = "delta rule" if self.delta_rule else "linear attention"
        return f"{rule} with decay per {'channel' if self.channel_decay else 'head'}"

    @property
    def features(self) -> frozenset[Feature]:
        """Features that a backend must have to compute this spec."""
        needed = {
            Feature.DELTA_RULE: self.delta_rule,
            Feature.CHANNEL_DECAY: self.channel_decay,
            Feature.SKIP: self.skip,
        }
        return frozenset(feature for feature, wanted in needed.items() if wanted)

    def step_costs(self) -> tuple[int, int]:
        """Multiplications of each token: decay, update and query of the state, and the convolution."""
        times = 4 if self.delta_rule else 3
        return times * self.num_heads * self.key_dim * self.value_dim + self.channels * self.conv_width, 0

    @property
    def proof_values(self) -> Mapping[Dimension, Value]:
        """Values that a proof must cover, beyond heads and features."""
        return {
            Dimension.VALUE_DIM: self.value_dim,
            Dimension.CONV_WIDTH: self.conv_width,
            Dimension.UNIT_KEYS: int(self.unit_keys),
        }

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """None: no entry is kept per token."""
        del num_layers, dtype, scales
        return ()

    def states(self, num_layers: int, dtype: torch.dtype) -> StateSpec:
        """What is kept of each sequence: the state of every head, and the last inputs of the convolution."""
        del dtype
        state = PlaneSpec("state", (self.num_heads, self.key_dim, self.value_dim), torch.float32)
        tail = PlaneSpec("tail", (self.channels, self.conv_width - 1), torch.float32)
        return StateSpec((state, tail) if self.conv_width else (state,), num_layers)


@dataclass(frozen=True)
class ConvolutionSpec:
    """A causal convolution of every channel over the last tokens, without an activation (LFM2).

    output = sum over i of weight[i] * input[t - width + 1 + i] + bias, with inputs of 0 before the first token.
    """

    channels: int
    width: int
    num_q_heads: ClassVar[int] = 1
    """The channels are one head."""
    group_size: ClassVar[int] = 1
    window: ClassVar[None] = None
    """None: the width is part of the computation."""
    top_k: ClassVar[None] = None
    tokens_per_entry: ClassVar[int] = 1
    features: ClassVar[frozenset[Feature]] = frozenset()

    def __post_init__(self) -> None:
        if self.width < 2:
            raise ValueError(f"expected a convolution over at least 2 tokens, got {self.width}")

    @property
    def kind(self) -> SpecKind:
        return SpecKind.CONVOLUTION

    @property
    def head_dim(self) -> int:
        return self.channels

    @property
    def out_dim(self) -> int:
        return self.channels

    @property
    def expanded_dims(self) -> tuple[int, int]:
        return self.channels, self.channels

    @property
    def label(self) -> str:
        """Human-readable name."""
        return f"convolution over {self.width} tokens"

    def step_costs(self) -> tuple[int, int]:
        """Multiplications of each token."""
        return self.channels * self.width, 0

    @property
    def proof_values(self) -> Mapping[Dimension, Value]:
        """Values that a proof must cover, beyond heads and features."""
        return {Dimension.CONV_WIDTH: self.width}

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """None: no entry is kept per token."""
        del num_layers, dtype, scales
        return ()

    def states(self, num_layers: int, dtype: torch.dtype) -> StateSpec:
        """What is kept of each sequence: its last inputs."""
        del dtype
        return StateSpec((PlaneSpec("tail", (self.channels, self.width - 1), torch.float32),), num_layers)


@dataclass(frozen=True)
class IndexSpec:
    """An indexer: scores every token that a query sees with small heads, and chooses the `top_k` best (DeepSeek's DSA).

    score    = sum over heads h of weight[h] * max(0, query[h] . key)       one key a token, for all heads
    chosen   the tokens with the highest scores, of equal ones those at lower positions; all if there are no more

    Models also scale the scores, which changes no choice.
    """

    num_q_heads: int
    head_dim: int
    top_k: int
    window: ClassVar[None] = None
    """None: a query sees every key before it."""
    tokens_per_entry: ClassVar[int] = 1
    features: ClassVar[frozenset[Feature]] = frozenset({Feature.SPARSE})

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"expected at least 1 chosen token, got a top_k of {self.top_k}")

    @property
    def kind(self) -> SpecKind:
        return SpecKind.INDEX

    @property
    def group_size(self) -> int:
        """All heads share the one key of a token."""
        return self.num_q_heads

    @property
    def out_dim(self) -> int:
        """Tokens that are chosen for a query."""
        return self.top_k

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """The dimension of a key; there are no values."""
        return self.head_dim, 0

    @property
    def label(self) -> str:
        """Human-readable name."""
        return f"choice of {self.top_k} tokens"

    def step_costs(self) -> tuple[int, int]:
        """Multiplications of each token, and of each pair of a token and one before it."""
        return 0, self.num_q_heads * (self.head_dim + 1)

    @property
    def proof_values(self) -> Mapping[Dimension, Value]:
        """Values that a proof must cover, beyond heads and features."""
        return {Dimension.TOP_K: self.top_k}

    def pools(self, num_layers: int, dtype: torch.dtype, scales: ScalesByPlane | None = None) -> tuple[PoolSpec, ...]:
        """One key per token and layer; `dtype` is the cache's. Keys of 8-bit floats have a scale each."""
        del scales
        planes = [PlaneSpec("key", (self.head_dim,), dtype)]
        if dtype in SCALED_DTYPES:
            planes.append(PlaneSpec("scale", (1,), torch.float32))
        return (PoolSpec("index", tuple(planes), num_layers),)

    def states(self, num_layers: int, dtype: torch.dtype) -> StateSpec:
        """None: a token's key never changes."""
        del num_layers, dtype
        return NO_STATES


EntrySpec: TypeAlias = SoftmaxSpec | LatentSpec
"""Layers that attend to an entry of each token."""
IndexingSpec: TypeAlias = IndexSpec | CompressedIndexSpec
"""Indexers."""
AttentionSpec: TypeAlias = EntrySpec | RecurrentSpec | ConvolutionSpec | CompressedSpec | IndexingSpec
