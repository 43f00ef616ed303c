"""The softmax attention layer: projections and positions around what the plan computes.

Knows its own spec and its layer number. Does not know pools, pages or backends: the planned batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.contract import SoftmaxInputs
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import SoftmaxSpec
from sightline.layers.linear import Linear
from sightline.layers.norm import RmsNorm
from sightline.layers.rotary import RotaryTable


@dataclass(frozen=True, eq=False)
class SoftmaxAttention:
    """One layer."""

    layer: int
    """In the model."""
    spec: SoftmaxSpec
    qkv: Linear
    """Queries, keys and values side by side."""
    output: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    sinks: Tensor | None
    """[num_q_heads] exactly where the spec has sinks."""

    def __call__(self, hidden: Tensor, planned: PlannedBatch, rotary: RotaryTable) -> Tensor:
        spec = self.spec
        num_tokens = hidden.shape[0]
        heads = self.qkv(hidden).view(num_tokens, spec.num_q_heads + 2 * spec.num_kv_heads, spec.head_dim)
        turned, v = torch.split(heads, [spec.num_q_heads + spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(turned, [spec.num_q_heads, spec.num_kv_heads], dim=1)
            turned = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        # One rotation for queries and keys together: with few tokens, operations cost more than their elements.
        q, k = torch.split(rotary.rotate(turned), [spec.num_q_heads, spec.num_kv_heads], dim=1)
        attended = q.new_empty(q.shape)
        planned.attend(self.layer, SoftmaxInputs(q, k, v, self.sinks), attended)
        return self.output(attended.view(num_tokens, spec.num_q_heads * spec.head_dim))
