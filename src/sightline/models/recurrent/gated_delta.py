"""The definition of gated delta rule layers, and the two ways in which checkpoints store their projections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.contract import ConvWeights
from sightline.attention.spec import RecurrentSpec
from sightline.distributed.ranks import Rank
from sightline.layers.linear import Projection
from sightline.layers.recurrent.gated_delta import GatedDelta
from sightline.models.norms import NormDefinition
from sightline.models.parts import RankPart, Slices, columns, moved, rows, scaled
from sightline.models.weights import WeightReader


class DeltaStorage(Enum):
    """How a checkpoint lays out the rows of the input projections."""

    BY_KEY_HEAD = "by key head"
    """Two tensors, key head by key head: `in_proj_qkvz` has its query, its key, and the values and gates of its heads,
    `in_proj_ba` the rows for the shares and the decays of its heads (Qwen3-Next)."""
    SEPARATE = "separate"
    """`in_proj_qkv` (all queries, all keys, all values), `in_proj_z`, `in_proj_b` and `in_proj_a` (Qwen3.5)."""


@dataclass(frozen=True)
class GatedDeltaDefinition:
    """The gated delta rule, with a convolution before it and a gated norm behind it."""

    stored_as: ClassVar[str] = "linear_attn"
    indexer: ClassVar[None] = None
    spec: RecurrentSpec
    storage: DeltaStorage
    norm: NormDefinition
    """The norm of each head of the output. Its weight is stored as it is."""

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (self._num_input_rows + self._out_size)

    def of_rank(self, prefix: str, rank: Rank) -> RankPart[GatedDeltaDefinition]:
        """Some of the key heads with their heads, and of the outputs that they add to."""
        spec = self.spec
        if spec.num_key_heads % rank.size:
            return RankPart(self, whole=(f"{spec.num_key_heads} key heads cannot be divided among {rank.size} ranks",))
        keys, heads = rank.share(spec.num_key_heads), rank.share(spec.num_heads)
        values, all_keys = scaled(heads, spec.value_dim), spec.num_key_heads * spec.key_dim
        own_keys = scaled(keys, spec.key_dim)
        mixed = (own_keys, moved(own_keys, all_keys), moved(values, 2 * all_keys))
        cuts = {
            **rows([f"{prefix}.in_proj_qkv", f"{prefix}.conv1d"], *mixed),
            **rows([f"{prefix}.in_proj_z"], values),
            **rows([f"{prefix}.in_proj_b", f"{prefix}.in_proj_a"], heads),
            **rows([f"{prefix}.in_proj_qkvz"], scaled(keys, 2 * (spec.key_dim + spec.group_size * spec.value_dim))),
            **rows([f"{prefix}.in_proj_ba"], scaled(keys, 2 * spec.group_size)),
            f"{prefix}.A_log": Slices(0, (heads,)),
            f"{prefix}.dt_bias": Slices(0, (heads,)),
            **columns(f"{prefix}.out_proj", rank, values),
        }
        return RankPart(
            replace(self, spec=replace(spec, num_heads=len(heads), num_key_heads=len(keys))), cuts, is_summed=True
        )

    def load(
        self, weights: WeightReader, layer: int, prefix: str, hidden_size: int, *, in_features: int | None = None
    ) -> GatedDelta:
        """Loads the layer. `in_features` is the width of its input, if that is not the hidden size."""
        spec, per_head = self.spec, (self.spec.num_heads,)
        kernel = weights.take(f"{prefix}.conv1d.weight", (spec.channels, 1, spec.conv_width))
        return GatedDelta(
            layer=layer,
            spec=spec,
            inputs=self._load_inputs(weights, prefix, in_features or hidden_size),
            conv=ConvWeights(kernel.squeeze(1), None),
            log_rates=weights.take(f"{prefix}.A_log", per_head, dtype=torch.float32),
            step_bias=weights.take(f"{prefix}.dt_bias", per_head, dtype=torch.float32),
            norm=self.norm.load(weights, f"{prefix}.norm", spec.value_dim),
            output=weights.projection({f"{prefix}.out_proj": hidden_size}, self._out_size, bias=False),
        )

    def _load_inputs(self, weights: WeightReader, prefix: str, in_features: int) -> Projection:
        spec = self.spec
        if self.storage is DeltaStorage.SEPARATE:
            rows = {"qkv": spec.channels, "z": self._out_size, "b": spec.num_heads, "a": spec.num_heads}
            return weights.projection(
                {f"{prefix}.in_proj_{name}": size for name, size in rows.items()}, in_features, bias=False
            )
        of_heads, use = 2 * spec.num_heads, "rows in another order"
        qkvz = weights.matrix(f"{prefix}.in_proj_qkvz.weight", (self._num_input_rows - of_heads, in_features), use)
        ba = weights.matrix(f"{prefix}.in_proj_ba.weight", (of_heads, in_features), use)
        return weights.make_linear(torch.cat((*self._parts(qkvz), *self._parts_of_heads(ba))), None)

    def _parts(self, stored: Tensor) -> list[Tensor]:
        """The rows of all queries, keys, values and gates, from rows that are stored key head by key head."""
        spec = self.spec
        values = spec.group_size * spec.value_dim
        by_head = stored.view(spec.num_key_heads, -1, stored.shape[1])
        parts = torch.split(by_head, [spec.key_dim, spec.key_dim, values, values], dim=1)
        return [part.flatten(0, 1) for part in parts]

    def _parts_of_heads(self, stored: Tensor) -> list[Tensor]:
        """The rows of all shares, then those of all decays."""
        by_head = stored.view(self.spec.num_key_heads, -1, stored.shape[1])
        return [part.flatten(0, 1) for part in by_head.chunk(2, dim=1)]

    @property
    def _out_size(self) -> int:
        return self.spec.num_heads * self.spec.value_dim

    @property
    def _num_input_rows(self) -> int:
        return self.spec.channels + self._out_size + 2 * self.spec.num_heads
