"""EAGLE-3 heads in plain torch, written for clarity: what the network is compared with.

`tests/models/test_eagle3_oracle.py` compares it with speculators, which is not installed for the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class ReferenceStep(NamedTuple):
    """What a head gives for the tokens of a step."""

    logits: Tensor
    """[num_tokens, draft_vocab_size]."""
    states: Tensor
    """[num_tokens, hidden_size]: what the next step continues from."""


@dataclass(frozen=True)
class ReferenceOptions:
    """The options of a head that its layer's config does not have."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Reference:
    """A head. Keys and values are kept from step to step, and positions count from 1."""

    def __init__(self, layer: PretrainedConfig, weights: Mapping[str, Tensor], options: ReferenceOptions) -> None:
        """`weights` have the names of speculators."""
        self._layer = layer
        self._weights = weights
        self._options = options
        self._rotary = LlamaRotaryEmbedding(layer)

    def fuse(self, states: Tensor) -> Tensor:
        """The head's states [num_tokens, hidden] from the target's [num_tokens, taps * hidden]."""
        if self._options.norm_before_fc:
            states = self._norm(states, "input_norm")
        if self._options.fc_norm:
            count = sum(name.startswith("fc_norm.") for name in self._weights)
            parts = states.chunk(count, dim=1)
            states = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=1)
        return states @ self._weights["fc.weight"].T

    def run(self, tokens: Sequence[int], states: Tensor, later: Sequence[int]) -> list[ReferenceStep]:
        """A step for `tokens` and the target's states of the tokens before them, then one for each `later` token."""
        steps, keys, values = [], Tensor(), Tensor()
        state = self.fuse(states)
        for new in (list(tokens), *([token] for token in later)):
            positions = torch.arange(len(new)) + len(keys) + 1
            step, keys, values = self._step(torch.tensor(new), state, positions, keys, values)
            steps.append(step)
            state = step.states[-1:]
        return steps

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """The target's tokens for tokens of the head's own vocabulary."""
        return drafted + self._weights["d2t"][drafted] if "d2t" in self._weights else drafted

    def _step(
        self, tokens: Tensor, state: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[ReferenceStep, Tensor, Tensor]:
        embedded = self._norm(self._weights["embed_tokens.weight"][tokens], "layers.0.input_layernorm")
        normed = self._norm(state, "layers.0.hidden_norm")
        residual = normed if self._options.norm_before_residual else state
        joined = torch.cat((embedded, normed), dim=1)
        q, k, v = (self._heads(joined, name) for name in ("q", "k", "v"))
        cos, sin = (each[0][:, None] for each in self._rotary(q, positions[None]))
        q, k = (each * cos + _turned(each) * sin for each in (q, k))
        keys, values = torch.cat((keys, k)), torch.cat((values, v))
        hidden = residual + self._project(self._attend(q, keys, values, positions), "self_attn.o_proj")
        inner = self._norm(hidden, "layers.0.post_attention_layernorm")
        gated = F.silu(self._project(inner, "mlp.gate_proj")) * self._project(inner, "mlp.up_proj")
        hidden = hidden + self._project(gated, "mlp.down_proj")
        normed = self._norm(hidden, "norm")
        logits = normed @ self._weights["lm_head.weight"].T
        return ReferenceStep(logits, normed if self._options.norm_output else hidden), keys, values

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """[num_tokens, heads, head_dim], normalised if the layer has such norms."""
        heads = self._project(x, f"self_attn.{name}_proj").view(len(x), -1, self._layer.head_dim)
        norm = f"layers.0.self_attn.{name}_norm"
        return self._norm(heads, norm) if f"{norm}.weight" in self._weights else heads

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Each token attends to all tokens up to itself. The keys begin at position 1."""
        group = q.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) * self._layer.head_dim**-0.5
        hidden = torch.arange(len(keys))[None] + 1 > positions[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)).flatten(1)

    def _project(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"layers.0.{name}.weight"], self._weights.get(f"layers.0.{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self._layer.rms_norm_eps) * self._weights[f"{name}.weight"]


def _turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
