"""The oracle of recurrent layers and of convolutions: one row, token by token, in fp32, written to be read.

Every recurrent backend is compared with this. Takes a row's tokens and the state that it begins with, and returns the
state behind every token. Does not know slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.contract import ConvWeights, RecurrentInputs
from sightline.attention.spec import UNIT_EPSILON, ConvolutionSpec, RecurrentSpec


class ConvolvedRow(NamedTuple):
    """What a convolution gives for each token of a row."""

    out: Tensor
    """[num_tokens, channels] fp32."""
    tails: Tensor
    """[num_tokens, channels, width - 1] fp32: the last inputs behind each token, oldest first."""


class RecurrentRow(NamedTuple):
    """What a recurrent layer gives for each token of a row."""

    out: Tensor
    """[num_tokens, num_heads, value_dim] fp32."""
    states: Tensor
    """[num_tokens, num_heads, key_dim, value_dim] fp32: the state behind each token."""
    tails: Tensor | None
    """[num_tokens, channels, conv_width - 1] fp32; None if the layer has no convolution."""


def empty_tail(spec: RecurrentSpec | ConvolutionSpec) -> Tensor:
    """[channels, width - 1]: the inputs of a convolution before the first token."""
    planes = {plane.name: plane for plane in spec.states(1, torch.float32).planes}
    return torch.zeros(planes["tail"].shape)


def empty_state(spec: RecurrentSpec) -> Tensor:
    """[num_heads, key_dim, value_dim]: the state before the first token."""
    return torch.zeros(spec.num_heads, spec.key_dim, spec.value_dim)


def convolve_row(x: Tensor, conv: ConvWeights, tail: Tensor) -> ConvolvedRow:
    """Convolves the tokens of one row, x [num_tokens, channels], behind `tail` [channels, width - 1]."""
    weight = conv.weight.float()
    out, tails = [], []
    for token in x.float():
        window = torch.cat([tail, token[:, None]], dim=1)
        result = (window * weight).sum(dim=1)
        if conv.bias is not None:
            result = result + conv.bias.float()
        tail = window[:, 1:]
        out.append(result)
        tails.append(tail)
    channels, width = weight.shape
    empty = x.new_zeros(0, channels, width - 1, dtype=torch.float32)
    return ConvolvedRow(torch.stack(out) if out else empty[..., 0], torch.stack(tails) if tails else empty)


def recur_row(spec: RecurrentSpec, inputs: RecurrentInputs, state: Tensor, tail: Tensor | None) -> RecurrentRow:
    """Computes the tokens of one row, which begins with `state` [num_heads, key_dim, value_dim] and `tail` [channels,
    conv_width - 1]."""
    mixed, tails = inputs.mixed.float(), None
    if inputs.conv is not None:
        assert tail is not None, "a convolution begins with a tail"
        convolved, tails = convolve_row(mixed, inputs.conv, tail)
        mixed = torch.nn.functional.silu(convolved)
    queries, keys, values = _split(spec, mixed)
    if spec.unit_keys:
        queries, keys = _unit(queries), _unit(keys)
    left = torch.exp(inputs.decay if spec.channel_decay else inputs.decay[:, :, None])
    out = torch.empty_like(values)
    states = mixed.new_empty(len(mixed), *state.shape)
    for token, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        state = left[token, :, :, None] * state
        recalled = torch.einsum("hk,hkv->hv", key, state) if spec.delta_rule else 0.0
        stored = inputs.beta[token, :, None] * (value - recalled)
        state = state + key[:, :, None] * stored[:, None, :]
        states[token] = state
        out[token] = spec.scale * torch.einsum("hk,hkv->hv", query, state)
    if spec.skip:
        assert inputs.skip is not None, "the inputs of a spec with a skip have one"
        out = out + inputs.skip[:, None] * values
    return RecurrentRow(out, states, tails)


def _split(spec: RecurrentSpec, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all tokens: [num_tokens, num_heads, key_dim] twice, and [..., value_dim]."""
    size = spec.num_key_heads * spec.key_dim
    queries, keys, values = mixed.tensor_split((size, 2 * size), dim=1)
    shape = (len(mixed), spec.num_key_heads, spec.key_dim)
    # Neighbouring heads share a key head.
    queries, keys = (each.reshape(shape).repeat_interleave(spec.group_size, dim=1) for each in (queries, keys))
    return queries, keys, values.reshape(len(mixed), spec.num_heads, spec.value_dim)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + UNIT_EPSILON)
