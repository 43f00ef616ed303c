"""Recurrent layers with Sightline's own Triton kernels.

    at most one token a row     one launch: convolution and recurrence, unless there are many rows
    at most `TOKEN_ROWS`        two: a convolution of all tokens, and the recurrence token by token
    longer rows                 three: the convolution, what tokens of a chunk see of each other, and chunk after chunk

The first two are planned on the device, so that a captured step serves any lengths and slots. Chunks are cut on the
host, where a state is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.triton.rows import RECURRENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    RecurrentInputs,
    StepView,
)
from sightline.attention.recurrent.planes import LayerStates, states_by_layer
from sightline.attention.recurrent.planned_tokens import PlannedTokens
from sightline.attention.recurrent.segments import cut_row, rows_of
from sightline.attention.spec import RecurrentSpec
from sightline.core.lengths import Lengths
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.recurrent_chunks import CHUNK, ChunkedLayer, CutRows, Faded, recur_chunks, serves_chunks
from sightline.kernels.triton.recurrent_steps import RecurrentLayer, RecurrentRule, recurrent_steps
from sightline.kernels.triton.short_convolution import Convolution, Split, split_mixed

TOKEN_ROWS = 16
"""Rows of at most this many tokens are computed token by token: a chunk takes as long."""
FUSED_ROWS = 128
"""Decode steps of fewer rows convolve within the recurrence; with more rows, a launch of its own costs less."""


@dataclass(frozen=True, eq=False)
class _Layers:
    """The rule and the states of all layers, which every plan of a backend shares."""

    rule: RecurrentRule
    planes: tuple[LayerStates, ...]
    shared_bytes: int
    """Shared memory of a program."""
    overlaps: bool

    def of(self, layer: int, tokens: PlannedTokens) -> tuple[Tensor | None, Tensor | None]:
        """States and tails of a layer; None if the step keeps none."""
        return (None, None) if tokens.slots is None else self.planes[layer]

    def split(self, layer: int, inputs: RecurrentInputs, tokens: PlannedTokens, to: Split) -> None:
        """Convolves all tokens, and divides queries and keys by their lengths."""
        _, tails = self.of(layer, tokens)
        convolution = None if inputs.conv is None else Convolution(*inputs.conv, tails)
        unit, overlaps = self.rule.unit_keys, self.overlaps
        split_mixed(inputs.mixed, convolution, tokens.slots, tokens.rows, to, unit=unit, overlaps=overlaps)


@dataclass(frozen=True, eq=False)
class _TokenPlan(AttentionPlan[RecurrentInputs]):
    """A step whose rows are computed token by token."""

    layers: _Layers
    tokens: PlannedTokens
    flat: Tensor | None
    """[num_tokens, channels]: where inputs are convolved first; None if the recurrence convolves."""

    def prepare(self) -> None:
        self.tokens.prepare()

    def run(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> Lse | None:
        rule, mixed, tokens = self.layers.rule, inputs.mixed, self.tokens
        states, tails = self.layers.of(layer, tokens)
        weight, bias = (None, None) if inputs.conv is None else inputs.conv
        if self.flat is not None:
            self.layers.split(layer, inputs, tokens, _side_by_side(rule, self.flat))
            mixed, weight, bias, tails = self.flat, None, None, None
            rule = replace(rule, unit_keys=False, conv_width=0)
        given = RecurrentLayer(mixed, inputs.decay, inputs.beta, weight, bias, inputs.skip, states, tails)
        overlaps, longest = self.layers.overlaps, tokens.longest
        recurrent_steps(rule, given, tokens.slots, tokens.rows, out, longest=longest, overlaps=overlaps)
        return None


@dataclass(frozen=True, eq=False)
class _ChunkPlan(AttentionPlan[RecurrentInputs]):
    """A step whose rows are computed chunk by chunk."""

    layers: _Layers
    tokens: PlannedTokens
    split: Split
    chunks: CutRows

    def prepare(self) -> None:
        self.tokens.prepare()

    def run(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> Lse | None:
        self.layers.split(layer, inputs, self.tokens, self.split)
        states, _ = self.layers.of(layer, self.tokens)
        given = ChunkedLayer(self.split, inputs.decay, inputs.beta, inputs.skip, states)
        shared_bytes = self.layers.shared_bytes
        recur_chunks(self.layers.rule, given, self.tokens.slots, self.chunks, out, shared_bytes=shared_bytes)
        return None


class TritonRecurrentBackend(AttentionBackend[RecurrentSpec, RecurrentInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = RECURRENT_ROWS

    def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
        spec = context.spec
        rule = RecurrentRule(
            num_heads=spec.num_heads,
            num_key_heads=spec.num_key_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            scale=spec.scale,
            delta_rule=spec.delta_rule,
            channel_decay=spec.channel_decay,
            unit_keys=spec.unit_keys,
            conv_width=spec.conv_width,
        )
        planes, chip = states_by_layer(spec, context.cache.states), Chip.of(context.device)
        self._layers = _Layers(rule, planes, chip.shared_bytes, chip.overlaps)
        self._dtype = context.dtype
        shape = (context.limits.max_step_tokens, spec.channels)
        self._scratch = {
            lane: context.workspace.lease(context.group, "triton convolved", lane, shape, context.dtype)
            for lane in context.limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TokenPlan | _ChunkPlan:
        tokens, rule = PlannedTokens.of(step, buffers), self._layers.rule
        lens, flat = step.batch.query_lens, self._scratch[step.lane][: step.batch.num_tokens]
        if tokens.longest > TOKEN_ROWS and _is_exact(lens) and serves_chunks(rule):
            kept = () if step.states is None else step.states.kept_host
            chunks = self._chunks(lens.exact(), kept, buffers)
            return _ChunkPlan(self._layers, tokens, _one_by_one(rule, flat), chunks)
        is_split = rule.conv_width > 0 and (tokens.longest > 1 or tokens.num_rows >= FUSED_ROWS)
        return _TokenPlan(self._layers, tokens, flat if is_split else None)

    def _chunks(self, lens: Sequence[int], kept: Sequence[int], buffers: PlanBuffers) -> CutRows:
        """Cuts rows where states are kept, and the segments between into chunks."""
        table: list[int] = []
        segments: list[int] = []
        rows: list[int] = []
        for row in rows_of(lens):
            cut = cut_row(row, kept, row.length)
            rows += (row.row, len(segments) // 3, len(cut))
            for segment in cut:
                segments += (segment.first, segment.length, len(table) // 2)
                for done in range(0, segment.length, CHUNK):
                    table += (segment.first + done, min(CHUNK, segment.length - done))
        numbers = buffers.take("chunks", (len(table) + len(segments) + len(rows),), torch.int64)
        numbers.copy_(torch.tensor(table + segments + rows, dtype=torch.int64), non_blocking=True)
        of_table, of_segments, of_rows = torch.split(numbers, [len(table), len(segments), len(rows)])
        rule = self._layers.rule
        squares = (len(table) // 2, rule.num_heads, CHUNK, CHUNK)
        nothing, has_scores = (0,), rule.delta_rule or rule.channel_decay
        return CutRows(
            table=of_table.view(-1, 2),
            segments=of_segments.view(-1, 3),
            rows=of_rows.view(-1, 3),
            solved=buffers.take("solved", squares if rule.delta_rule else nothing, self._dtype),
            scores=buffers.take("scores", squares if has_scores else nothing, self._dtype),
            seen=buffers.take("seen", squares if has_scores else nothing, torch.float32),
            sums=buffers.take("sums", nothing if rule.channel_decay else squares[:3], torch.float32),
            faded=self._faded(sum(lens), squares[0], buffers) if rule.channel_decay else None,
        )

    def _faded(self, num_tokens: int, num_chunks: int, buffers: PlanBuffers) -> Faded:
        rule, dtype = self._layers.rule, self._dtype
        size = (num_tokens, rule.num_heads, rule.key_dim)
        return Faded(
            q=buffers.take("faded queries", size, dtype),
            k=buffers.take("faded keys", size, dtype),
            kept=buffers.take("kept keys", size, dtype),
            left=buffers.take("left", (num_chunks, rule.num_heads, rule.key_dim), torch.float32),
            sums=buffers.take("channel sums", size, torch.float32),
        )


def _is_exact(lens: Lengths) -> bool:
    """True if the bounds are the lengths. Otherwise the step may be captured, and replayed with other lengths."""
    return lens.host is not None and lens.host == lens.bound


def _side_by_side(rule: RecurrentRule, flat: Tensor) -> Split:
    """Views of the queries, keys and values of tokens, in rows [num_tokens, channels]."""
    keys = rule.num_key_heads * rule.key_dim
    q, k, v = torch.split(flat, [keys, keys, rule.num_heads * rule.value_dim], dim=1)
    by_key_head = (flat.shape[0], rule.num_key_heads, rule.key_dim)
    return Split(q.view(by_key_head), k.view(by_key_head), v.view(flat.shape[0], rule.num_heads, rule.value_dim))


def _one_by_one(rule: RecurrentRule, flat: Tensor) -> Split:
    """The same memory as one contiguous tensor each."""
    num_tokens, keys = flat.shape[0], flat.shape[0] * rule.num_key_heads * rule.key_dim
    q, k, v = torch.split(flat.view(-1), [keys, keys, num_tokens * rule.num_heads * rule.value_dim])
    by_key_head = (num_tokens, rule.num_key_heads, rule.key_dim)
    return Split(q.view(by_key_head), k.view(by_key_head), v.view(num_tokens, rule.num_heads, rule.value_dim))
