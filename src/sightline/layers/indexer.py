"""The indexer of a sparse attention layer: norm and rotation around the choice that the plan computes.

    x ──────────────down──▶ [ ... | index key | weights of the index heads ]
                                      └─norm, rotation──▶ index key, cached, the same for all heads
    normalised low-rank query ──query_up──▶ [ queries of the index heads | ... ]
                                      └─rotation

The products are those of the attention layer, because they read the same rows. Of each query and key the first
dimensions are rotated, by the table that attention uses, ordered for the half-split rotation: the loader reorders the
rows of the weights. Does not know pools, pages or backends.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sightline.attention.contract import IndexInputs
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import IndexSpec
from sightline.layers.norm import LayerNorm
from sightline.layers.operations import IndexRows, Operations
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch


class IndexBuffers:
    """The inputs of an indexer, from the projections on."""

    def __init__(self, scratch: Scratch, q: Tensor, key: Tensor, weights: Tensor) -> None:
        """`q` is [num_tokens, heads * head_dim], `key` [num_tokens, head_dim], `weights` [num_tokens, heads]: views of
        what the layer projects, in any memory order."""
        num_tokens, num_heads = weights.shape
        head_dim = key.shape[1]
        self.projected_weights = weights
        # Taken even if unused, so that the largest step reserves it.
        ordered = scratch.take_rows("index.weights", num_heads)
        self.is_row_major = weights.stride(1) == 1
        turned = scratch.take_rows("index.turned", (num_heads + 1) * head_dim).view(num_tokens, num_heads + 1, head_dim)
        self.rows = IndexRows(q.view(num_tokens, num_heads, head_dim), key, turned)
        self.inputs = IndexInputs(
            turned[:, :num_heads], turned[:, num_heads], weights if self.is_row_major else ordered
        )


@dataclass(frozen=True, eq=False)
class Indexer:
    """The indexer of one layer."""

    spec: IndexSpec
    key_norm: LayerNorm

    def choose(
        self,
        layer: int,
        buffers: IndexBuffers,
        planned: PlannedBatch,
        rotary: RotaryTable,
        operations: Operations,
    ) -> Tensor | None:
        """Keeps the keys of a model layer, and returns what it chose; None if the step is not sparse."""
        operations.turn_index(buffers.rows, self.key_norm, rotary)
        if not buffers.is_row_major:
            buffers.inputs.weights.copy_(buffers.projected_weights)
        return planned.choose(layer, buffers.inputs)
