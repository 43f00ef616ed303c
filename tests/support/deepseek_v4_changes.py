"""Features of DeepSeek V4 taken out, and mistakes planted in its layers. Each moves the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.kernels import residual_streams, tail_rotation
from sightline.layers import portable
from sightline.layers.activation import ClampedSilu
from sightline.layers.compressed import CompressedAttention, CompressedIndexer, CompressorWeights
from sightline.layers.linear import GroupedLinear
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import ExpertMlp, SeparateExperts
from sightline.layers.routing import Score
from sightline.layers.step_tokens import TokenBuffers
from sightline.models.compressed import CompressedAttentionDefinition
from sightline.models.decoder import DecoderDefinition, DecoderStates
from sightline.models.decoder_layer import StreamedLayer
from support.features import (
    Change,
    in_definition,
    in_expert_layers,
    in_mixers,
    in_rotary,
    in_routing,
    no_norm,
    without_shared,
)
from support.layers import experts_of

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def in_attention(name: str, change: Callable[[CompressedAttention], CompressedAttention]) -> Change:
    return in_mixers(name, CompressedAttention, change)


def in_compressors(name: str, change: Callable[[CompressorWeights], CompressorWeights]) -> Change:
    def changed(layer: CompressedAttention) -> CompressedAttention:
        return layer if layer.compressor is None else replace(layer, compressor=change(layer.compressor))

    return in_attention(name, changed)


def in_indexers(name: str, change: Callable[[CompressedIndexer], CompressedIndexer]) -> Change:
    def changed(layer: CompressedAttention) -> CompressedAttention:
        return layer if layer.indexer is None else replace(layer, indexer=change(layer.indexer))

    return in_attention(name, changed)


def in_attention_definition(
    name: str, change: Callable[[CompressedAttentionDefinition], CompressedAttentionDefinition]
) -> Change:
    def define(definition: DecoderDefinition) -> DecoderDefinition:
        layers = []
        for layer in definition.layers:
            assert isinstance(layer.attention, CompressedAttentionDefinition)
            layers.append(replace(layer, attention=change(layer.attention)))
        return replace(definition, layers=tuple(layers))

    return Change(name, define=define)


def in_spec(name: str, **fields: object) -> Change:
    return in_attention_definition(name, lambda x: replace(x, spec=replace(x.spec, **fields)))  # type: ignore[arg-type]


def in_streams(name: str, **fields: object) -> Change:
    def define(definition: DecoderDefinition) -> DecoderDefinition:
        assert definition.streams is not None
        return replace(definition, streams=replace(definition.streams, **fields))  # type: ignore[arg-type]

    return Change(name, define=define)


def with_another_count(change: int) -> Callable[[CompressedAttentionDefinition], CompressedAttentionDefinition]:
    def changed(definition: CompressedAttentionDefinition) -> CompressedAttentionDefinition:
        indexer = definition.indexer
        if indexer is None:
            return definition
        top_k = indexer.spec.top_k + change
        indexer = replace(indexer, spec=replace(indexer.spec, top_k=top_k))
        return replace(definition, spec=replace(definition.spec, top_k=top_k), indexer=indexer)

    return changed


def with_another_limit(mlp: ExpertMlp) -> ExpertMlp:
    """Nothing is clamped."""
    gate = ClampedSilu(1e9)
    assert isinstance(mlp.shared, GatedMlp)
    bank = SeparateExperts(tuple(replace(each, gate=gate) for each in experts_of(mlp)))
    return replace(mlp, bank=bank, shared=replace(mlp.shared, activation=gate))


def with_unclamped_shared(mlp: ExpertMlp) -> ExpertMlp:
    assert isinstance(mlp.shared, GatedMlp)
    return replace(mlp, shared=replace(mlp.shared, activation=ClampedSilu(1e9)))


def without_bias(compressor: CompressorWeights) -> CompressorWeights:
    return replace(compressor, bias=torch.zeros_like(compressor.bias))


def without_entry_norm(compressor: CompressorWeights) -> CompressorWeights:
    return replace(compressor, norm=replace_weight(compressor.norm))


def replace_weight(norm: Any) -> Any:
    """The norm without its weights."""
    return type(norm)(torch.ones_like(norm.weight), norm.epsilon)


def without_low_norm(layer: CompressedAttention) -> CompressedAttention:
    return replace(layer, query_up=replace(layer.query_up, norm=no_norm(layer.query_up.norm)))


def other_groups(layer: CompressedAttention) -> CompressedAttention:
    return replace(layer, grouped=GroupedLinear(layer.grouped.weight.flip(0)))


FEATURES = [
    in_rotary("rotary base", lambda rotary: replace(rotary, theta=rotary.theta * 10)),
    in_rotary("rope scaling", lambda rotary: replace(rotary, scaling=None)),
    in_definition("norm epsilon", norm_epsilon=0.5),
    in_spec("score scale", scale=1.0),
    in_spec("window by one", window=13),
    in_attention_definition("one entry fewer", with_another_count(-1)),
    in_attention_definition("one entry more", with_another_count(1)),
    in_streams("rounds of the mixing", num_rounds=1),
    in_streams("epsilon of the streams", epsilon=0.1),
    in_streams("norm of the streams", norm_epsilon=10.0),
    in_routing("scores of the router", lambda x: replace(x, score=Score.SIGMOID)),
    in_routing("scaling factor", lambda x: replace(x, scale=1.0)),
    in_expert_layers("correction", lambda x: replace(x, correction=None)),
    in_expert_layers("experts of each token", lambda x: replace(x, listed=None)),
    in_expert_layers("shared experts", without_shared),
    in_expert_layers("clamp limit", with_another_limit),
    in_expert_layers("clamp limit of shared experts", with_unclamped_shared),
    in_attention("sinks", lambda x: replace(x, sinks=torch.full_like(x.sinks, -math.inf))),
    in_attention("norm of heads", lambda x: replace(x, query_norm=no_norm(x.query_norm))),
    in_attention("norm of keys", lambda x: replace(x, key_norm=no_norm(x.key_norm))),
    in_attention("norm of low-rank queries", without_low_norm),
    in_attention("groups of heads", other_groups),
    in_compressors("bias of places", without_bias),
    in_compressors("weights of the norm of entries", without_entry_norm),
    in_indexers("bias of places of index keys", lambda x: replace(x, compressor=without_bias(x.compressor))),
    in_indexers("weights of the norm of index keys", lambda x: replace(x, compressor=without_entry_norm(x.compressor))),
]


def leave_the_output_rotated(patch: Patch) -> None:
    """A value is rotated with its key, and the sum of values stays so."""
    turn = portable.turn_tails

    def forward_only(*given: Any, back: bool) -> None:
        if not back:
            turn(*given, back=False)

    patch.setattr(portable, "turn_tails", forward_only)


def rotate_the_output_forwards(patch: Patch) -> None:
    turn = portable.turn_tails

    def forwards(*given: Any, back: bool) -> None:
        turn(*given, back=False)

    patch.setattr(portable, "turn_tails", forwards)


def list_the_experts_of_the_token_before(patch: Patch) -> None:
    begin = DecoderStates._begin

    def late(self: DecoderStates, planned: Any, tables: Any, scratch: Any) -> None:
        begin(self, planned, tables, scratch)
        tokens = scratch.of(TokenBuffers).tokens
        tokens.copy_(tokens.roll(1))

    patch.setattr(DecoderStates, "_begin", late)


def list_the_experts_of_the_position(patch: Patch) -> None:
    begin = DecoderStates._begin

    def by_position(self: DecoderStates, planned: Any, tables: Any, scratch: Any) -> None:
        begin(self, planned, tables, scratch)
        scratch.of(TokenBuffers).tokens.copy_(planned.batch.positions)

    patch.setattr(DecoderStates, "_begin", by_position)


def mix_streams_the_other_way(patch: Patch) -> None:
    expand = residual_streams.expand

    def turned(result: Tensor, shares: Tensor, mixing: Tensor, streams: Tensor) -> None:
        expand(result, shares, mixing.mT, streams)

    patch.setattr(residual_streams, "expand", turned)


def divide_by_sums_of_rows_last(patch: Patch) -> None:
    divide = residual_streams.doubly_stochastic
    patch.setattr(residual_streams, "doubly_stochastic", lambda x, *given: divide(x.mT, *given).mT)


def swap_the_connections_of_a_layer(patch: Patch) -> None:
    run = StreamedLayer.__call__

    def swapped(self: StreamedLayer, *given: Any) -> None:
        run(replace(self, attention_streams=self.mlp_streams, mlp_streams=self.attention_streams), *given)

    patch.setattr(StreamedLayer, "__call__", swapped)


def read_the_norm_of_no_streams(patch: Patch) -> None:
    patch.setattr(residual_streams, "normed_logits", lambda streams, logits, epsilon: logits)


def rotate_entries_at_their_last_position(patch: Patch) -> None:
    table = tail_rotation.window_table

    def last(positions: Tensor, size: int, *given: Any) -> None:
        table(positions, size, *given)
        places = given[2].clone()
        table(positions - places + size - 1, 1, *given)
        given[2].copy_(places)

    patch.setattr(tail_rotation, "window_table", last)


def begin_windows_one_token_late(patch: Patch) -> None:
    table = tail_rotation.window_table

    def late(positions: Tensor, size: int, frequencies: Any, amplitude: Any, places: Tensor, *given: Any) -> None:
        table(positions, size, frequencies, amplitude, places, *given)
        places.copy_((places - 1).remainder(size))

    patch.setattr(tail_rotation, "window_table", late)


def rotate_halves_instead_of_neighbours(patch: Patch) -> None:
    def halves(x: Tensor, cos: Tensor, sin: Tensor) -> None:
        tail = x[..., -2 * cos.shape[-1] :]
        first, second = tail.float().chunk(2, dim=-1)
        tail.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    patch.setattr(tail_rotation, "turn_tails", halves)


def rotate_the_first_dimensions(patch: Patch) -> None:
    turn = tail_rotation.turn_tails
    patch.setattr(tail_rotation, "turn_tails", lambda x, cos, sin: turn(x[..., : 2 * cos.shape[-1]], cos, sin))


MISTAKES: dict[str, Plant] = {
    "the output is not rotated back": leave_the_output_rotated,
    "the output is rotated forwards": rotate_the_output_forwards,
    "the experts of the token before": list_the_experts_of_the_token_before,
    "the experts of the position": list_the_experts_of_the_position,
    "streams are mixed the other way": mix_streams_the_other_way,
    "sums of rows last": divide_by_sums_of_rows_last,
    "connections of the other part": swap_the_connections_of_a_layer,
    "streams are not normalised": read_the_norm_of_no_streams,
    "entries at their last position": rotate_entries_at_their_last_position,
    "windows begin late": begin_windows_one_token_late,
    "halves instead of neighbours": rotate_halves_instead_of_neighbours,
    "the first dimensions": rotate_the_first_dimensions,
}
"""By name: mistakes in the code of the layers."""
