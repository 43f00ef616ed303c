"""The softmax attention layer: projections and rotations around the attention that the plan computes.

Does not know pools, pages or backends: the planned batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sightline.attention.contract import SoftmaxInputs, SoftmaxQueries
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import SoftmaxSpec
from sightline.layers.activation import Activation
from sightline.layers.linear import Projection
from sightline.layers.norm import HeadNorms, RmsNorm
from sightline.layers.operations import TurnedHeads
from sightline.layers.rotary import Halves, RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source


class AttentionBuffers:
    """Buffers from the projections to the attention output, and views of them."""

    def __init__(
        self, scratch: Scratch, num_q_heads: int, num_kv_heads: int, head_dim: int, rotates: int, is_gated: int
    ) -> None:
        """Without `rotates`, the inputs of attention are the projections themselves. With `is_gated`, a gate for each
        head of the output follows the values."""
        num_turned = num_q_heads + num_kv_heads
        num_heads, num_tokens = num_turned + num_kv_heads, scratch.num_tokens
        size, num_gates = num_heads * head_dim, num_q_heads if is_gated else 0
        self.qkv = scratch.take("attention.qkv", size + num_gates * head_dim)
        # Attention needs each head contiguous. Taken even if unused, so that the largest step reserves it.
        rows = scratch.take_rows("attention.rows", size + num_gates * head_dim)
        self.is_row_major = self.qkv.is_contiguous()
        self.rows = self.qkv if self.is_row_major else rows
        self.gates = self.rows[:, size:]
        heads = self.rows[:, :size].view(num_tokens, num_heads, head_dim)
        turned = rotated = Halves.of(heads[:, :num_turned])
        if rotates:
            room = scratch.take_rows("attention.rotated", num_turned * head_dim)
            rotated = Halves.of(room.view(num_tokens, num_turned, head_dim))
        self.turned = TurnedHeads(heads[:, :num_q_heads], heads[:, num_q_heads:num_turned], turned, rotated)
        self.inputs = (rotated.whole[:, :num_q_heads], rotated.whole[:, num_q_heads:], heads[:, num_turned:])
        """Queries and keys, rotated if the layer rotates, and values."""
        self.attended = scratch.take_rows("attention.attended", num_q_heads * head_dim)
        self.attended_heads = self.attended.view(num_tokens, num_q_heads, head_dim)


@dataclass(frozen=True, eq=False)
class SoftmaxAttention:
    """One layer."""

    layer: int
    """The layer's number in the model."""
    spec: SoftmaxSpec
    qkv: Projection
    """Queries, keys and values side by side, and the gates of the output if it has some."""
    output: Projection
    norms: HeadNorms | None = None
    """Applied before the rotation."""
    sinks: Tensor | None = None
    """[num_q_heads] if the spec has sinks, otherwise None."""
    value_norm: RmsNorm | None = None
    """Over each head of the values."""
    rotates: bool = True
    """False in networks whose inputs already hold the positions. They have no norms of heads either."""
    is_gated: bool = False
    """True if each number of the output is multiplied by the sigmoid of its gate."""

    @property
    def turns(self) -> bool:
        return self.qkv.turns

    def buffers(self, scratch: Scratch) -> AttentionBuffers:
        spec = self.spec
        sizes = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        return scratch.of(AttentionBuffers, *sizes, self.rotates, self.is_gated)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink. `rotary` is None if the layer does not rotate."""
        assert self.rotates == (rotary is not None)
        buffers = self.buffers(scratch)
        source.give_product(self.qkv, buffers.qkv, scratch.operations)
        if not buffers.is_row_major:
            buffers.rows.copy_(buffers.qkv)
        if rotary is not None:
            scratch.operations.turn_heads(buffers.turned, self.norms, rotary)
        q, k, v = buffers.inputs
        if self.value_norm is not None:
            for head in v.unbind(1):
                scratch.operations.norm(head, self.value_norm, head)
        planned.attend(self.layer, SoftmaxInputs(q=q, k=k, v=v, sinks=self.sinks), buffers.attended_heads)
        if self.is_gated:
            scratch.operations.gate(Activation.SIGMOID, buffers.gates, buffers.attended, buffers.attended)
        sink.take_product(self.output, buffers.attended)


@dataclass(frozen=True, eq=False)
class BorrowedAttention:
    """One layer that has queries alone, and reads the keys and values of another."""

    layer: int
    """The layer's number in the model."""
    spec: SoftmaxSpec
    queries: Projection
    output: Projection
    norm: RmsNorm
    """Normalises queries before they are rotated."""

    @property
    def turns(self) -> bool:
        return self.queries.turns

    def buffers(self, scratch: Scratch) -> AttentionBuffers:
        return scratch.of(AttentionBuffers, self.spec.num_q_heads, 0, self.spec.head_dim, True, False)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        assert rotary is not None
        buffers = self.buffers(scratch)
        source.give_product(self.queries, buffers.qkv, scratch.operations)
        if not buffers.is_row_major:
            buffers.rows.copy_(buffers.qkv)
        scratch.operations.turn_heads(buffers.turned, HeadNorms(self.norm, self.norm), rotary)
        planned.attend(self.layer, SoftmaxQueries(q=buffers.inputs[0], sinks=None), buffers.attended_heads)
        sink.take_product(self.output, buffers.attended)
