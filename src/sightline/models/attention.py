"""Definitions of attention layers, and how checkpoints store them.

Owns the tensor names, and the order in which the rows of weights are kept. Does not know model families.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.distributed.ranks import Rank
from sightline.layers.absent import AbsentAttention
from sightline.layers.attention import BorrowedAttention, SoftmaxAttention
from sightline.layers.compressed import CompressedAttention
from sightline.layers.latent import LatentAttention, QueryUp
from sightline.layers.linear import Linear, Projection
from sightline.layers.norm import HeadNorms, RmsNorm
from sightline.layers.recurrent.gated_delta import GatedDelta
from sightline.layers.recurrent.kimi_delta import KimiDelta
from sightline.layers.recurrent.lightning import LightningAttention
from sightline.layers.recurrent.mamba import Mamba
from sightline.layers.recurrent.short_convolution import ShortConvolution
from sightline.models.compressed import CompressedAttentionDefinition
from sightline.models.head_parts import heads_of_rank, heads_refusal
from sightline.models.indexer import IndexerDefinition, half_split_order
from sightline.models.norms import NormDefinition
from sightline.models.parts import RankPart, Slices, TensorCut, columns, rows, scaled
from sightline.models.recurrent.gated_delta import GatedDeltaDefinition
from sightline.models.recurrent.kimi_delta import KimiDeltaDefinition
from sightline.models.recurrent.lightning import LightningDefinition
from sightline.models.recurrent.mamba import MambaDefinition
from sightline.models.recurrent.short_convolution import ShortConvolutionDefinition
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class AttentionTensors:
    """The tensors that a layer stores in addition to the weights of its projections."""

    qk_norm: NormDefinition | None = None
    """The norm of queries and keys, per head, before the rotation."""
    qkv_bias: bool = False
    output_bias: bool = False
    rotated_dim: int | None = None
    """The number of dimensions of a head that are rotated: the first ones as stored; None if all are."""
    value_norm: NormDefinition | None = None
    """The norm of each head of the values, which has no weights."""
    values_are_keys: bool = False
    """True if the projection of the keys is that of the values too."""
    gated: bool = False
    """True if the projection of the queries also gives a gate for each head of the output, behind each query."""
    rotates: bool = True
    """False if queries and keys know no positions. Such layers have no norms of heads either."""


@dataclass(frozen=True)
class SoftmaxAttentionDefinition:
    """Softmax attention with a projection each for queries, keys and values."""

    stored_as: ClassVar[str] = "self_attn"
    indexer: ClassVar[None] = None
    spec: SoftmaxSpec
    tensors: AttentionTensors = AttentionTensors()

    def num_weights(self, hidden_size: int) -> int:
        spec = self.spec
        gates = spec.num_q_heads if self.tensors.gated else 0
        return hidden_size * (2 * (spec.num_q_heads + spec.num_kv_heads) + gates) * spec.head_dim

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[SoftmaxAttentionDefinition]:
        """Some of the heads, and of the outputs that they add to."""
        part = heads_of_rank(self.spec, rank)
        if part is None:
            return RankPart(self, whole=(heads_refusal(self.spec, rank),))
        dim, queries = self.spec.head_dim, part.queries
        cuts = {
            **rows([f"{prefix}.q_proj"], scaled(queries, dim * (2 if self.tensors.gated else 1))),
            **rows([f"{prefix}.{name}_proj" for name in "kv"], scaled(part.keys, dim)),
            **columns(f"{prefix}.o_proj", rank, scaled(queries, dim)),
            f"{prefix}.sinks": Slices(0, (queries,)),
        }
        return RankPart(replace(self, spec=part.of(self.spec)), cuts, is_summed=True)

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> SoftmaxAttention:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        spec = self.spec
        output_size = spec.num_q_heads * spec.head_dim
        return SoftmaxAttention(
            layer=layer,
            spec=spec,
            qkv=self._load_qkv(weights, prefix, in_features or hidden_size),
            output=weights.projection({f"{prefix}.o_proj": hidden_size}, output_size, bias=self.tensors.output_bias),
            norms=self._load_norms(weights, prefix),
            sinks=weights.take(f"{prefix}.sinks", (spec.num_q_heads,)) if spec.sinks else None,
            value_norm=self._value_norm(weights),
            is_gated=self.tensors.gated,
            rotates=self.tensors.rotates,
        )

    def _value_norm(self, weights: WeightReader) -> RmsNorm | None:
        norm = self.tensors.value_norm
        if norm is None:
            return None
        return RmsNorm(torch.ones(self.spec.head_dim, dtype=torch.float32, device=weights.device), norm.epsilon)

    def _load_qkv(self, weights: WeightReader, prefix: str, hidden_size: int) -> Projection:
        spec, bias = self.spec, self.tensors.qkv_bias
        heads = {"q_proj": spec.num_q_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
        if self.tensors.values_are_keys:
            return self._load_shared_keys(weights, prefix, hidden_size)
        if self.tensors.rotated_dim is None and not self.tensors.gated:
            sizes = {f"{prefix}.{name}": count * spec.head_dim for name, count in heads.items()}
            return weights.projection(sizes, hidden_size, bias=bias)
        parts, biases = [], []
        for name, count in heads.items():
            rows = count * spec.head_dim * (2 if name == "q_proj" and self.tensors.gated else 1)
            part = weights.matrix(f"{prefix}.{name}.weight", (rows, hidden_size), "rows in another order")
            shift = weights.take(f"{prefix}.{name}.bias", (rows,)) if bias else part.new_zeros(rows)
            parts.append(part.view(count, -1, hidden_size))
            biases.append(shift.view(count, -1))
        order = self._head_order().to(parts[0].device)
        joined = torch.cat(self._ordered(parts, order))
        return weights.make_linear(joined, torch.cat(self._ordered(biases, order)) if bias else None)

    def _ordered(self, stored: Sequence[Tensor], order: Tensor) -> list[Tensor]:
        """The rows of queries, keys, values and gates, each [rows, ...], from those that are stored.

        Stored are queries with their gates, keys and values, each [heads, rows of a head, ...].
        """
        q, k, v = stored
        dim = self.spec.head_dim
        parts = [q[:, :dim][:, order], k[:, order], v, q[:, dim:]]
        return [part.flatten(0, 1) for part in parts]

    def _load_shared_keys(self, weights: WeightReader, prefix: str, hidden_size: int) -> Projection:
        """Queries, keys and values, of which the last two are projected alike."""
        heads, use = {"q_proj": self.spec.num_q_heads, "k_proj": self.spec.num_kv_heads}, "rows that are used twice"
        sizes = {f"{prefix}.{name}": count * self.spec.head_dim for name, count in heads.items()}
        q, k = (weights.matrix(f"{name}.weight", (rows, hidden_size), use) for name, rows in sizes.items())
        if not self.tensors.qkv_bias:
            return weights.make_linear(torch.cat((q, k, k)), None)
        q_bias, k_bias = (weights.take(f"{name}.bias", (rows,)) for name, rows in sizes.items())
        return weights.make_linear(torch.cat((q, k, k)), torch.cat((q_bias, k_bias, k_bias)))

    def _load_norms(self, weights: WeightReader, prefix: str) -> HeadNorms | None:
        if self.tensors.qk_norm is None:
            return None
        norms = [self.tensors.qk_norm.load(weights, f"{prefix}.{name}_norm", self.spec.head_dim) for name in "qk"]
        if self.tensors.rotated_dim is not None:
            norms = [RmsNorm(norm.weight[self._head_order().to(norm.weight.device)], norm.epsilon) for norm in norms]
        return HeadNorms(*norms)

    def _head_order(self) -> Tensor:
        """The stored dimension for each kept dimension of a query or key.

        A rotation pairs dimension i with i + head_dim / 2. Of a head that is rotated in part, the first and second
        partners of the pairs that turn are stored before the dimensions that do not. Kept are both kinds in each half,
        those that turn first. Queries and keys share the order, so scores are the same.
        """
        dims = torch.arange(self.spec.head_dim)
        if self.tensors.rotated_dim is None:
            return dims
        turning, still = dims[: self.tensors.rotated_dim].chunk(2), dims[self.tensors.rotated_dim :].chunk(2)
        return torch.cat((turning[0], still[0], turning[1], still[1]))


@dataclass(frozen=True)
class BorrowedAttentionDefinition:
    """Softmax attention over the keys and values of another layer."""

    stored_as: ClassVar[str] = "self_attn"
    indexer: ClassVar[None] = None
    spec: SoftmaxSpec
    norm: NormDefinition
    """The norm of queries, per head, before the rotation."""
    bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        return 2 * hidden_size * self.spec.num_q_heads * self.spec.head_dim

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[BorrowedAttentionDefinition]:
        """Some of the heads, and of the outputs that they add to."""
        part = heads_of_rank(self.spec, rank)
        if part is None:
            return RankPart(self, whole=(heads_refusal(self.spec, rank),))
        queries = scaled(part.queries, self.spec.head_dim)
        cuts = rows([f"{prefix}.q_proj"], queries) | columns(f"{prefix}.o_proj", rank, queries)
        return RankPart(replace(self, spec=part.of(self.spec)), cuts, is_summed=True)

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> BorrowedAttention:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        size = self.spec.num_q_heads * self.spec.head_dim
        own = {f"{prefix}.{name}" for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")}
        own |= {f"{prefix}.k_norm.weight", f"{prefix}.v_norm.weight"}
        weights.leave_tensors(
            sorted(own & set(weights.names)),
            f"keys and values of layer {layer}",
            "the layer reads those of another, so nothing is lost",
        )
        return BorrowedAttention(
            layer=layer,
            spec=self.spec,
            queries=weights.projection({f"{prefix}.q_proj": size}, in_features or hidden_size, bias=self.bias),
            output=weights.projection({f"{prefix}.o_proj": hidden_size}, size, bias=self.bias),
            norm=self.norm.load(weights, f"{prefix}.q_norm", self.spec.head_dim),
        )


@dataclass(frozen=True)
class LatentAttentionDefinition:
    """Latent attention (MLA): keys and values are computed from one latent per token."""

    stored_as: ClassVar[str] = "self_attn"
    spec: LatentSpec
    query_rank: int | None
    """The rank of the query projection; None if queries are projected from the input directly."""
    paired_neighbours: bool
    """True if the stored rotation pairs dimension 2i with 2i + 1 instead of i with i + rope_dim / 2."""
    norms: NormDefinition
    """The norm of the latent and of the low-rank queries."""
    bias: bool = False
    """True if the input and output projections have biases. A full-rank query projection never has one."""
    gated: bool = False
    """True if each head of the output is multiplied by the sigmoid of a number that is projected from the input."""
    indexer: IndexerDefinition | None = None
    """Chooses what this layer, and sparse layers behind it without an indexer, attend to."""

    def __post_init__(self) -> None:
        if self.indexer is not None and self.query_rank is None:
            raise ValueError(
                "expected a q_lora_rank, because an indexer makes its queries from low-rank ones, got none"
            )

    def num_weights(self, hidden_size: int) -> int:
        spec, queries = self.spec, self._num_query_rows * (self.query_rank or hidden_size)
        down = hidden_size * ((self.query_rank or 0) + spec.head_dim + self._num_gates)
        heads = spec.latent_dim * (spec.nope_dim + spec.value_dim) + spec.value_dim * hidden_size
        index = 0 if self.indexer is None else self.indexer.num_weights(hidden_size, self.query_rank or 0)
        return queries + down + spec.num_q_heads * heads + index

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[LatentAttentionDefinition]:
        """Some of the heads, and of the outputs that they add to. The latent, which all heads read, is whole."""
        spec = self.spec
        if spec.num_q_heads % rank.size:
            return RankPart(self, whole=(f"{spec.num_q_heads} heads cannot be divided among {rank.size} ranks",))
        heads = rank.share(spec.num_q_heads)
        queries = "q_proj" if self.query_rank is None else "q_b_proj"
        cuts: dict[str, TensorCut] = {
            **rows([f"{prefix}.{queries}"], scaled(heads, spec.nope_dim + spec.rope_dim)),
            **rows([f"{prefix}.kv_b_proj"], scaled(heads, spec.nope_dim + spec.value_dim)),
            **rows([f"{prefix}.g_proj"], heads),
            **columns(f"{prefix}.o_proj", rank, scaled(heads, spec.value_dim)),
        }
        return RankPart(replace(self, spec=replace(spec, num_q_heads=len(heads))), cuts, is_summed=True)

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> LatentAttention:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        spec = self.spec
        key_up, value_up = self._load_ups(weights, prefix)
        output_size = spec.num_q_heads * spec.value_dim
        return LatentAttention(
            layer=layer,
            spec=spec,
            down=self._load_down(weights, prefix, in_features or hidden_size),
            query_up=self._load_query_up(weights, prefix),
            latent_norm=self.norms.load(weights, f"{prefix}.kv_a_layernorm", spec.latent_dim),
            key_up=key_up,
            value_up=value_up,
            output=weights.projection({f"{prefix}.o_proj": hidden_size}, output_size, bias=self.bias),
            gated=self.gated,
            indexer=None if self.indexer is None else self.indexer.load(weights, prefix),
        )

    @property
    def _num_gates(self) -> int:
        return self.spec.num_q_heads if self.gated else 0

    def _load_down(self, weights: WeightReader, prefix: str, in_features: int) -> Linear:
        """Joins the projections to queries (or their low-rank form), rope key, latent, gates and what the indexer
        reads into one."""
        side = (f"{prefix}.q_proj", self._num_query_rows, self._query_order, False)
        if (rank := self.query_rank) is not None:
            side = (f"{prefix}.q_a_proj", rank, lambda: torch.arange(rank), self.bias)
        key = (f"{prefix}.kv_a_proj_with_mqa", self.spec.head_dim, self._key_order, self.bias)
        parts, biases = [], []
        for name, num_rows, make_order, bias in (side, key):
            stored = weights.matrix(f"{name}.weight", (num_rows, in_features), "rows in another order")
            order = make_order().to(stored.device)  # created after the check: a hostile config may ask for huge ones
            parts.append(stored[order])
            shift = weights.take(f"{name}.bias", (num_rows,)) if bias else stored.new_zeros(num_rows)
            biases.append(shift[order])
        if self.gated:
            parts.append(
                weights.matrix(f"{prefix}.g_proj.weight", (self._num_gates, in_features), "a joint projection")
            )
            biases.append(parts[0].new_zeros(self._num_gates))
        if self.indexer is not None:
            parts.append(self.indexer.input_rows(weights, prefix, in_features))
            biases.append(parts[0].new_zeros(len(parts[-1])))
        return weights.make_linear(torch.cat(parts), torch.cat(biases) if self.bias else None)

    def _load_query_up(self, weights: WeightReader, prefix: str) -> QueryUp | None:
        if self.query_rank is None:
            return None
        shape = (self._num_query_rows, self.query_rank)
        stored = weights.matrix(f"{prefix}.q_b_proj.weight", shape, "rows in another order")
        up = stored[self._query_order().to(stored.device)]
        if self.indexer is not None:
            up = torch.cat((self.indexer.query_rows(weights, prefix, self.query_rank), up))
        norm = self.norms.load(weights, f"{prefix}.q_a_layernorm", self.query_rank)
        return QueryUp(norm, weights.make_linear(up, None))

    def _load_ups(self, weights: WeightReader, prefix: str) -> tuple[Tensor, Tensor]:
        """The weights from the latent to each head's key [heads, nope, latent] and value [heads, value, latent]."""
        spec = self.spec
        head_rows = spec.nope_dim + spec.value_dim
        shape = (spec.num_q_heads * head_rows, spec.latent_dim)
        stored = weights.matrix(f"{prefix}.kv_b_proj.weight", shape, "parts of heads")
        heads = stored.view(spec.num_q_heads, head_rows, spec.latent_dim)
        return heads[:, : spec.nope_dim].contiguous(), heads[:, spec.nope_dim :].contiguous()

    @property
    def _num_query_rows(self) -> int:
        return self.spec.num_q_heads * (self.spec.nope_dim + self.spec.rope_dim)

    def _query_order(self) -> Tensor:
        """The index of the stored row for each kept row.

        Stored head by head; kept as the nope parts of all heads, then the rope parts of all heads.
        """
        spec = self.spec
        stored = torch.arange(self._num_query_rows).view(spec.num_q_heads, -1)
        nope, rope = stored[:, : spec.nope_dim], stored[:, spec.nope_dim :]
        return torch.cat((nope.flatten(), rope[:, self._rope_order()].flatten()))

    def _key_order(self) -> Tensor:
        """The index of the stored row for each kept row. Stored as latent, rope key; kept as rope key, latent."""
        latent_dim = self.spec.latent_dim
        return torch.cat((latent_dim + self._rope_order(), torch.arange(latent_dim)))

    def _rope_order(self) -> Tensor:
        """The order of rope dimensions for a half-split rotation. Queries and keys share it, so scores are the same."""
        return half_split_order(self.spec.rope_dim, paired_neighbours=self.paired_neighbours)


@dataclass(frozen=True)
class AbsentAttentionDefinition:
    """Stands for no attention: the layer is only a feed-forward."""

    stored_as: ClassVar[str] = "self_attn"
    indexer: ClassVar[None] = None
    spec: None = None

    def num_weights(self, hidden_size: int) -> int:
        del hidden_size
        return 0

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[AbsentAttentionDefinition]:
        del prefix, rank
        return RankPart(self)

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> AbsentAttention:
        del weights, layer, prefix, hidden_size, in_features
        return AbsentAttention()


AttentionLayer = (
    SoftmaxAttention
    | BorrowedAttention
    | LatentAttention
    | CompressedAttention
    | GatedDelta
    | KimiDelta
    | LightningAttention
    | Mamba
    | ShortConvolution
    | AbsentAttention
)
AttentionDefinition = (
    SoftmaxAttentionDefinition
    | BorrowedAttentionDefinition
    | LatentAttentionDefinition
    | CompressedAttentionDefinition
    | MambaDefinition
    | ShortConvolutionDefinition
    | GatedDeltaDefinition
    | KimiDeltaDefinition
    | LightningDefinition
    | AbsentAttentionDefinition
)
"""How a layer mixes tokens. `stored_as` is what the names of its tensors begin with, inside the layer."""
