"""The definition of compressed attention, and how checkpoints store it.

    self_attn.q_a_proj, q_a_norm, q_b_proj                   low-rank queries
    self_attn.kv_proj, kv_norm                               the key, which is the value too
    self_attn.sinks                                          a logit for each head
    self_attn.o_a_proj [groups * rank, inputs of a group]    each group of heads to a few features
    self_attn.o_b_proj                                       those of all groups to the output
    self_attn.compressor.kv_proj, gate_proj                  values and gates of tokens that become entries
    self_attn.compressor.position_bias [ratio, width], kv_norm
    self_attn.compressor.indexer.…                           the same four for index keys, and
    self_attn.compressor.indexer.q_b_proj                    queries, from the low-rank ones
    self_attn.compressor.indexer.scorer.weights_proj         how much each head counts

Projections of the same input are joined. Does not know model families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.distributed.ranks import Rank
from sightline.layers.compressed import CompressedAttention, CompressedIndexer, CompressorWeights
from sightline.layers.latent import QueryUp
from sightline.layers.linear import GroupedLinear, Linear
from sightline.layers.norm import RmsNorm
from sightline.models.indexer import JOINED
from sightline.models.norms import NormDefinition
from sightline.models.parts import RankPart, Slices, columns, rows, scaled
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class CompressedIndexerDefinition:
    """The indexer of a layer with compressed attention."""

    spec: CompressedIndexSpec

    def num_weights(self, hidden_size: int, query_rank: int) -> int:
        """Weights that each token is multiplied with."""
        heads, dim = self.spec.num_q_heads, self.spec.head_dim
        return heads * dim * query_rank + (2 * self.spec.compression.width(dim) + heads) * hidden_size


@dataclass(frozen=True)
class CompressedAttentionDefinition:
    """Attention to a window and to compressed entries, with one key head."""

    stored_as: ClassVar[str] = "self_attn"
    spec: CompressedSpec
    query_rank: int
    num_groups: int
    """The number of groups of heads that are projected on their own before the output."""
    group_rank: int
    """The number of features of a group."""
    norms: NormDefinition
    """The norms of low-rank queries, heads of queries, keys and entries."""
    indexer: CompressedIndexerDefinition | None = None

    def __post_init__(self) -> None:
        if self.spec.num_q_heads % self.num_groups:
            raise ValueError(
                f"expected {self.spec.num_q_heads} heads in equal groups (o_groups), got {self.num_groups} groups"
            )

    def num_weights(self, hidden_size: int) -> int:
        spec = self.spec
        heads, grouped = spec.num_q_heads * spec.head_dim, self.num_groups * self.group_rank
        width = 0 if spec.compression is None else spec.compression.width(spec.head_dim)
        index = 0 if self.indexer is None else self.indexer.num_weights(hidden_size, self.query_rank)
        down = hidden_size * (self.query_rank + spec.head_dim + 2 * width)
        return down + heads * self.query_rank + heads * self.group_rank + grouped * hidden_size + index

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[CompressedAttentionDefinition]:
        """Some of the groups of heads, and of the outputs that they add to. Key, entries and indexer are whole."""
        if self.num_groups % rank.size:
            return RankPart(
                self, whole=(f"{self.num_groups} groups of heads cannot be divided among {rank.size} ranks",)
            )
        heads, groups = rank.share(self.spec.num_q_heads), rank.share(self.num_groups)
        features = scaled(groups, self.group_rank)
        cuts = {
            **rows([f"{prefix}.q_b_proj"], scaled(heads, self.spec.head_dim)),
            f"{prefix}.sinks": Slices(0, (heads,)),
            **rows([f"{prefix}.o_a_proj"], features),
            **columns(f"{prefix}.o_b_proj", rank, features),
        }
        part = replace(self, spec=replace(self.spec, num_q_heads=len(heads)), num_groups=len(groups))
        return RankPart(part, cuts, is_summed=True)

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> CompressedAttention:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        spec, grouped = self.spec, self.num_groups * self.group_rank
        unit = torch.ones(spec.head_dim, dtype=torch.float32, device=weights.device)
        return CompressedAttention(
            layer=layer,
            spec=spec,
            down=self._load_down(weights, prefix, in_features or hidden_size),
            query_up=self._load_query_up(weights, prefix),
            query_norm=RmsNorm(unit, self.norms.epsilon),
            key_norm=self.norms.load(weights, f"{prefix}.kv_norm", spec.head_dim),
            sinks=weights.take(f"{prefix}.sinks", (spec.num_q_heads,), torch.float32),
            compressor=self._load_compressor(weights, prefix, spec.compression, spec.head_dim),
            indexer=self._load_indexer(weights, prefix),
            grouped=self._load_grouped(weights, prefix),
            output=weights.projection({f"{prefix}.o_b_proj": hidden_size}, grouped, bias=False),
        )

    def _load_down(self, weights: WeightReader, prefix: str, in_features: int) -> Linear:
        """Joins the projections to low-rank queries, key, values and gates, and those of the indexer."""
        spec = self.spec
        rows = {f"{prefix}.q_a_proj": self.query_rank, f"{prefix}.kv_proj": spec.head_dim}
        compressor = _compressor(prefix)
        if spec.compression is not None:
            rows |= _entry_projections(compressor, spec.compression.width(spec.head_dim))
        if self.indexer is not None:
            its = self.indexer.spec
            rows |= _entry_projections(_indexer(prefix), its.compression.width(its.head_dim))
            rows[f"{_indexer(prefix)}.scorer.weights_proj"] = its.num_q_heads
        return _joined(weights, rows, in_features)

    def _load_query_up(self, weights: WeightReader, prefix: str) -> QueryUp:
        rows = {f"{prefix}.q_b_proj": self.spec.num_q_heads * self.spec.head_dim}
        if self.indexer is not None:
            its = self.indexer.spec
            rows = {f"{_indexer(prefix)}.q_b_proj": its.num_q_heads * its.head_dim, **rows}
        norm = self.norms.load(weights, f"{prefix}.q_a_norm", self.query_rank)
        return QueryUp(norm, _joined(weights, rows, self.query_rank))

    def _load_grouped(self, weights: WeightReader, prefix: str) -> GroupedLinear:
        inputs = self.spec.num_q_heads * self.spec.head_dim // self.num_groups
        shape = (self.num_groups * self.group_rank, inputs)
        stored = weights.matrix(f"{prefix}.o_a_proj.weight", shape, "a projection of each group of heads")
        return GroupedLinear(stored.view(self.num_groups, self.group_rank, inputs))

    def _load_compressor(
        self, weights: WeightReader, prefix: str, compression: Compression | None, head_dim: int
    ) -> CompressorWeights | None:
        return None if compression is None else self._compressor_at(weights, _compressor(prefix), compression, head_dim)

    def _load_indexer(self, weights: WeightReader, prefix: str) -> CompressedIndexer | None:
        if self.indexer is None:
            return None
        spec = self.indexer.spec
        return CompressedIndexer(spec, self._compressor_at(weights, _indexer(prefix), spec.compression, spec.head_dim))

    def _compressor_at(
        self, weights: WeightReader, prefix: str, compression: Compression, head_dim: int
    ) -> CompressorWeights:
        """The compressor that is stored under this prefix."""
        shape = (compression.ratio, compression.width(head_dim))
        return CompressorWeights(
            weights.take(f"{prefix}.position_bias", shape, torch.float32),
            self.norms.load(weights, f"{prefix}.kv_norm", head_dim),
        )


def _compressor(prefix: str) -> str:
    return f"{prefix}.compressor"


def _indexer(prefix: str) -> str:
    return f"{prefix}.compressor.indexer"


def _entry_projections(prefix: str, width: int) -> dict[str, int]:
    """The projections to values and gates, with the rows of each."""
    return {f"{prefix}.kv_proj": width, f"{prefix}.gate_proj": width}


def _joined(weights: WeightReader, rows: dict[str, int], in_features: int) -> Linear:
    """Projections of the same input, joined in this order."""
    parts: list[Tensor] = [
        weights.matrix(f"{name}.weight", (count, in_features), JOINED) for name, count in rows.items()
    ]
    return weights.make_linear(torch.cat(parts), None)
