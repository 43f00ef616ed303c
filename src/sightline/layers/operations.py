"""The operations that layers name between their matrix products, and the greedy choice behind them. The device decides
the kernels.

    Layer ──names──▶ Operations ◀── TorchOperations (any device), TritonOperations (a GPU)

Norms, rotations and activations are data; an implementation reads them. It computes in fp32, and takes and writes the
dtype of the buffers. Does not know layers, nor where buffers come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor

from sightline.layers.activation import Activation, Gate
from sightline.layers.decay_rates import DecayRates
from sightline.layers.norm import GroupNorm, HeadNorms, LayerNorm, RmsNorm
from sightline.layers.rotary import Halves, Rotary, RotaryTable, WindowTable
from sightline.layers.stream_mix import StreamMix, StreamShares
from sightline.layers.time_steps import TimeSteps

HEAD_GATES = (Activation.SILU, Activation.SIGMOID)
"""The activations of the gates that heads are multiplied by."""


class TurnedHeads(NamedTuple):
    """Queries and keys on their way from the projection to attention. `q` and `k` may be overwritten."""

    q: Tensor
    """[num_tokens, num_q_heads, head_dim], as projected."""
    k: Tensor
    """[num_tokens, num_kv_heads, head_dim], as projected."""
    turned: Halves
    """Heads of `q` and `k` together, in the same memory."""
    rotated: Halves
    """The result, in memory of its own."""


class LatentRows(NamedTuple):
    """The parts of latent attention's inputs that are normalised or rotated. `turned` may be overwritten."""

    unnormed: Tensor
    """[num_tokens, latent_dim], as projected."""
    latent: Tensor
    """The normalised latent, in memory of its own."""
    k_rope: Tensor
    """[num_tokens, rope_dim]: the key's rope part, as projected."""
    turned: Halves
    """[num_tokens, num_q_heads + 1, rope_dim]: the rope parts of the queries, as projected, and room for the key's."""
    k_rope_room: Tensor | None
    """The last head of `turned`, if the key's rope part has to be copied there; None if it is there already."""
    rotated: Halves
    """The rotated parts of queries and key, in memory of their own."""


class IndexRows(NamedTuple):
    """Queries and key of an indexer on their way from the projections to the choice. `key` may be overwritten."""

    q: Tensor
    """[num_tokens, num_heads, head_dim], as projected."""
    key: Tensor
    """[num_tokens, head_dim], as projected."""
    turned: Tensor
    """[num_tokens, num_heads + 1, head_dim]: the results, queries then key, contiguous and in memory of their own."""


class Operations(ABC):
    """One method per operation. Rows are tokens; any number of them is allowed, also none."""

    turns: ClassVar[bool]
    """True if buffers may be feature-major. Otherwise a row's features must be contiguous; rows may be strided."""

    @abstractmethod
    def embed(self, weight: Tensor, tokens: Tensor, scale: float, out: Tensor) -> None:
        """Writes the rows of weight [vocab_size, hidden] for tokens [num_tokens] int64, times `scale`.

        The scale is rounded to the dtype of `out`, as models were trained.
        """

    @abstractmethod
    def add_rows(self, table: Tensor, rows: Tensor, out: Tensor) -> None:
        """Adds the rows of table [num_rows, hidden] that `rows` [num_tokens] int64 names to `out`."""

    @abstractmethod
    def rotary_table(self, rotary: Rotary, positions: Tensor, out: RotaryTable) -> None:
        """Writes the cosines and sines for positions [num_tokens] int64. Angles are computed in fp32."""

    @abstractmethod
    def window_table(self, rotary: Rotary, positions: Tensor, size: int, out: WindowTable) -> None:
        """Writes what is known of each token's window of `size` tokens, for positions [num_tokens] int64."""

    @abstractmethod
    def norm(self, x: Tensor, norm: RmsNorm, out: Tensor) -> None:
        """Writes the norm of x [num_tokens, features] to `out`, which may be x itself."""

    @abstractmethod
    def norm_rows(self, x: Tensor, rows: Tensor, norm: RmsNorm, out: Tensor) -> None:
        """Writes the norm of the rows of x that `rows` [num_wanted] int64 names to `out` [num_wanted, features]."""

    @abstractmethod
    def add_normed(self, result: Tensor, norm: RmsNorm, stream: Tensor) -> None:
        """Adds the norm of `result` to the stream, both [num_tokens, features]. May overwrite the result."""

    @abstractmethod
    def add_normed_then_norm(
        self, result: Tensor, norm: RmsNorm, stream: Tensor, next_norm: RmsNorm, out: Tensor
    ) -> None:
        """`add_normed`, then the `next_norm` of the stream, written to `out`."""

    @abstractmethod
    def layer_norm(self, x: Tensor, norm: LayerNorm, out: Tensor) -> None:
        """Writes the norm of x [num_tokens, features] to `out`, which may be x itself."""

    @abstractmethod
    def turn_heads(self, heads: TurnedHeads, norms: HeadNorms | None, table: RotaryTable) -> None:
        """Normalises each head of queries and keys, if there are norms, and rotates them."""

    @abstractmethod
    def turn_latents(self, rows: LatentRows, norm: RmsNorm, table: RotaryTable) -> None:
        """Normalises the latent, and rotates the rope parts of queries and key."""

    @abstractmethod
    def turn_index(self, rows: IndexRows, norm: LayerNorm, table: RotaryTable) -> None:
        """Normalises the key, and rotates the first dimensions of queries and key, as many as the table has."""

    @abstractmethod
    def turn_tails(self, x: Tensor, norm: RmsNorm | None, table: RotaryTable, *, back: bool = False) -> None:
        """Normalises each head of x [num_tokens, heads, dim] in place, if there is a norm, and rotates its tail.

        The tail has as many dimensions as the table, and dimension 2i of it is paired with 2i + 1. With `back`, the
        rotation is undone. Each head is contiguous; the strides of tokens and heads are arbitrary.
        """

    @abstractmethod
    def add_places(self, x: Tensor, bias: Tensor, places: Tensor, out: Tensor) -> None:
        """Writes x [num_tokens, size] plus the row of bias [num_places, size] fp32 that `places` names to `out` fp32.

        `places` are [num_tokens] int64.
        """

    @abstractmethod
    def collapse_streams(
        self, streams: Tensor, logits: Tensor, mix: StreamMix, shares: StreamShares, out: Tensor
    ) -> None:
        """Writes what a part of the network reads of the streams to `out` [num_tokens, size], and fills the shares.

        Streams are [num_tokens, count, size], contiguous; `logits` [num_tokens, num_logits] fp32 is their projection as
        they are, and the shares come from the projection of their norm.

            reading  sigmoid + epsilon          the sum of the streams is weighted by it
            writing  2 * sigmoid
            mixing   softmax over k + epsilon, divided in turn by the sums of its columns and rows
        """

    @abstractmethod
    def expand_streams(self, result: Tensor, shares: StreamShares, streams: Tensor) -> None:
        """Makes stream k writing[k] * result + sum over j of mixing[j, k] * stream j, in place.

        The result is [num_tokens, size], the streams [num_tokens, count, size], contiguous.
        """

    @abstractmethod
    def join_streams(self, streams: Tensor, logits: Tensor, mix: StreamMix, out: Tensor) -> None:
        """Like `collapse_streams`, of logits [num_tokens, count], which are shares of reading alone."""

    @abstractmethod
    def gate(self, kind: Gate, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """Combines gate and up, [num_tokens, size] each, as `kind` says. `out` may be one of them."""

    @abstractmethod
    def activate(self, kind: Activation, x: Tensor) -> None:
        """Applies the activation to x [num_tokens, size] in place."""

    @abstractmethod
    def gated_norm(self, x: Tensor, gate: Tensor, norm: RmsNorm, activation: Activation, out: Tensor) -> None:
        """Writes the norm of each head of x, times the activation of the gate, to `out`, which may be x itself.

        The activation is one of `HEAD_GATES`. x, gate and out are [num_tokens, num_heads, dim]; the norm's weight is
        [dim], the same for all heads. Each head is contiguous unless buffers turn; the strides of tokens and heads are
        arbitrary.
        """

    @abstractmethod
    def delta_gates(self, x: Tensor, shares: Tensor, rates: DecayRates, decay: Tensor, beta: Tensor) -> None:
        """Writes the gates of a delta rule in fp32: the decays of x to `decay`, and sigmoid(shares) to `beta`.

        x and decay are [num_tokens, num_heads], or [num_tokens, num_heads, key_dim] with a decay per channel; shares
        and beta are [num_tokens, num_heads]. The numbers of a token are contiguous unless buffers turn.
        """

    @abstractmethod
    def time_steps(self, x: Tensor, steps: TimeSteps, times: Tensor, decays: Tensor) -> None:
        """Writes the time that each token takes to `times`, and the logarithm of what it leaves of a state to `decays`.

        x, times and decays are [num_tokens, num_heads]; the last two are fp32. decays = -exp(log_rates) * times.
        """

    @abstractmethod
    def norm_gated(self, x: Tensor, gate: Tensor, norm: GroupNorm, out: Tensor) -> None:
        """Writes the norm of x * SiLU(gate), group by group, to `out`, which may be x itself.

        x, gate and out are [num_tokens, num_groups * size]. In `gated_norm` the gate is behind the norm instead.
        """

    @abstractmethod
    def multiply(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Writes x * y, [num_tokens, size] each, to `out`, which may be one of them."""

    @abstractmethod
    def gate_heads(self, gate: Tensor, x: Tensor) -> None:
        """Multiplies each head of x [num_tokens, num_heads, dim] by the sigmoid of its gate [num_tokens, num_heads].

        Each head is contiguous; the strides of tokens and heads are arbitrary. The gates of a token are contiguous
        unless buffers turn.
        """

    @abstractmethod
    def copy(self, x: Tensor, out: Tensor) -> None:
        """Writes x [num_tokens, size] to `out`, which must not overlap x."""

    @abstractmethod
    def widened(self, x: Tensor) -> Tensor:
        """x [num_rows, size] row-major in fp32: x itself if it is that already, otherwise a copy."""

    @abstractmethod
    def scale(self, logits: Tensor, factor: float) -> None:
        """Multiplies the logits [num_rows, vocab_size] fp32 by `factor`."""

    @abstractmethod
    def softcap(self, logits: Tensor, cap: float) -> None:
        """Replaces the logits [num_rows, vocab_size] fp32 by cap * tanh(logits / cap)."""

    @abstractmethod
    def best_tokens(self, logits: Tensor, out: Tensor) -> None:
        """Writes the likeliest token of each row and whether its logits are finite, see `kernels.greedy`."""
