"""The oracle of recurrent layers gives what transformers gives, and every feature of a spec shows in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import MiniMaxConfig
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from sightline.attention.contract import ConvWeights, RecurrentInputs
from sightline.attention.oracle.recurrent import convolve_row, empty_state, empty_tail, recur_row
from sightline.attention.spec import RecurrentSpec
from support.recurrent_cases import (
    EVERYTHING,
    GATED_DELTA,
    KIMI_DELTA,
    MAMBA,
    PLAIN,
    SPECS,
    make_conv,
    make_inputs,
    make_states,
)

TOLERANCE = 2e-5
TOKENS = 71
"""More than a chunk of any reference."""


def split(spec: RecurrentSpec, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all tokens, [1, num_tokens, heads, dim], as transformers takes them."""
    keys = spec.num_key_heads * spec.key_dim
    q, k, v = mixed.tensor_split((keys, 2 * keys), dim=1)
    q, k = (each.reshape(1, -1, spec.num_key_heads, spec.key_dim) for each in (q, k))
    return q, k, v.reshape(1, -1, spec.num_heads, spec.value_dim)


def convolved(inputs: RecurrentInputs) -> Tensor:
    """[num_tokens, channels]: transformers' convolution with SiLU, behind an empty tail."""
    assert inputs.conv is not None
    out: Tensor = qwen.causal_conv1d_fn(inputs.mixed.T[None], inputs.conv.weight, inputs.conv.bias, activation="silu")
    return out[0].T


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def from_nothing(spec: RecurrentSpec, inputs: RecurrentInputs) -> tuple[Tensor, Tensor]:
    tail = empty_tail(spec) if spec.conv_width else None
    row = recur_row(spec, inputs, empty_state(spec), tail)
    return row.out, row.states[-1]


@pytest.mark.parametrize("rule", [qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule])
def test_a_gated_delta_rule_is_that_of_qwen3_next(rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    spec = replace(GATED_DELTA, scale=GATED_DELTA.key_dim**-0.5)
    inputs = make_inputs(spec, TOKENS, decay=0.1)
    q, k, v = split(spec, convolved(inputs))
    q, k = (each.repeat_interleave(spec.group_size, dim=2) for each in (q, k))
    out, state = rule(
        q, k, v, inputs.decay[None], inputs.beta[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    found, found_state = from_nothing(spec, inputs)
    assert_near(found, out[0])
    assert_near(found_state, state[0])


@pytest.mark.parametrize("rule", [kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention])
def test_a_delta_rule_with_decay_per_channel_is_that_of_kimi_linear(rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    spec = replace(KIMI_DELTA, scale=KIMI_DELTA.key_dim**-0.5)
    inputs = make_inputs(spec, TOKENS, decay=0.1)
    q, k, v = split(spec, convolved(inputs))
    beginning, _ = make_states(spec)
    out, state = rule(
        q,
        k,
        v,
        inputs.decay[None],
        inputs.beta[None],
        initial_state=beginning[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    row = recur_row(spec, inputs, beginning, empty_tail(spec))
    assert_near(row.out, out[0])
    assert_near(row.states[-1], state[0])


def test_a_mamba_layer_is_that_of_nemotron_h() -> None:
    spec = MAMBA
    rates = -torch.rand(spec.num_heads) - 0.1
    inputs = make_inputs(spec, TOKENS)
    inputs = replace(inputs, decay=inputs.beta * rates)
    c, b, x = split(spec, convolved(inputs))
    out, state = nemotron.mamba2_chunk_scan(
        x, inputs.beta[None], rates, b, c, chunk_size=16, D=inputs.skip, return_final_states=True
    )
    found, found_state = from_nothing(spec, inputs)
    assert_near(found, out[0])
    assert_near(found_state, state[0].transpose(1, 2))


def test_a_step_of_a_mamba_layer_is_that_of_nemotron_h() -> None:
    spec = MAMBA
    rates = -torch.rand(spec.num_heads) - 0.1
    inputs = make_inputs(spec, 1)
    inputs = replace(inputs, decay=inputs.beta * rates)
    beginning, tail = make_states(spec)
    assert tail is not None
    assert inputs.conv is not None
    conv_state = tail[None].clone()
    mixed = nemotron.causal_conv1d_update(inputs.mixed[:, :, None], conv_state, *inputs.conv, activation="silu")
    c, b, x = (each[0] for each in split(spec, mixed[:, :, 0]))
    state = beginning.transpose(1, 2)[None].clone()
    size = (spec.num_heads, spec.value_dim)
    out = nemotron.mamba2_selective_state_update(
        state,
        x,
        inputs.beta.T[None, :, 0, None].expand(1, *size),
        rates[:, None, None].expand(*size, spec.key_dim),
        b,
        c,
        D=None if inputs.skip is None else inputs.skip[:, None].expand(size),
    )
    row = recur_row(spec, inputs, beginning, tail)
    assert_near(row.out, out)
    assert_near(row.states[-1], state[0].transpose(1, 2))
    assert row.tails is not None
    assert_near(row.tails[-1], conv_state[0])


def test_lightning_attention_is_that_of_minimax() -> None:
    heads, dim = 4, 8
    config = MiniMaxConfig(
        hidden_size=heads * dim, num_attention_heads=heads, head_dim=dim, num_hidden_layers=3, block_size=16
    )
    config.layer_types = ["linear_attention"] * 3
    layer = MiniMaxLightningAttention(config, 1)
    torch.manual_seed(1)
    with torch.no_grad():
        layer.qkv_proj.weight.normal_(std=0.3)
        hidden = torch.randn(1, TOKENS, heads * dim)
        qkv = torch.nn.functional.silu(layer.qkv_proj(hidden)).view(TOKENS, heads, 3, dim)
        _, state = layer(hidden, None, None)
    spec = replace(PLAIN, num_heads=heads, num_key_heads=heads, key_dim=dim, value_dim=dim, scale=1.0)
    inputs = RecurrentInputs(
        mixed=qkv.transpose(1, 2).reshape(TOKENS, -1),
        decay=-layer.slope_rate.view(heads).expand(TOKENS, heads),
        beta=torch.ones(1, 1).expand(TOKENS, heads),
        conv=None,
        skip=None,
    )
    _, found = from_nothing(spec, inputs)
    assert_near(found, state[0].detach())


def test_a_convolution_is_that_of_lfm2() -> None:
    channels, width = 24, 3
    conv = make_conv(channels, width, seed=3)
    x = torch.randn(TOKENS, channels, generator=torch.Generator().manual_seed(4))
    expected = lfm2.causal_conv1d_fn(x.T[None], conv.weight, conv.bias)[0].T
    assert_near(convolve_row(x, conv, torch.zeros(channels, width - 1)).out, expected)


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_row_may_be_cut_anywhere(spec: RecurrentSpec, cut: int) -> None:
    inputs = make_inputs(spec, 7)
    state, tail = make_states(spec)
    whole = recur_row(spec, inputs, state, tail)
    first = recur_row(spec, inputs.part(slice(0, cut)), state, tail)
    second = recur_row(
        spec, inputs.part(slice(cut, 7)), first.states[-1], None if first.tails is None else first.tails[-1]
    )
    assert torch.equal(torch.cat([first.out, second.out]), whole.out)
    assert torch.equal(torch.cat([first.states, second.states]), whole.states)
    if first.tails is not None and second.tails is not None and whole.tails is not None:
        assert torch.equal(torch.cat([first.tails, second.tails]), whole.tails)


def without_bias(inputs: RecurrentInputs) -> RecurrentInputs:
    assert inputs.conv is not None
    return replace(inputs, conv=ConvWeights(inputs.conv.weight, None))


CHANGES: dict[str, tuple[RecurrentSpec, Callable[[RecurrentInputs], RecurrentInputs]]] = {
    "scale": (replace(EVERYTHING, scale=EVERYTHING.scale * 1.01), lambda inputs: inputs),
    "delta rule": (replace(EVERYTHING, delta_rule=False), lambda inputs: inputs),
    "unit length": (replace(EVERYTHING, unit_keys=False), lambda inputs: inputs),
    "skip": (replace(EVERYTHING, skip=False), lambda inputs: inputs),
    "decay": (EVERYTHING, lambda inputs: replace(inputs, decay=inputs.decay * 0)),
    "decay per channel": (
        EVERYTHING,
        lambda inputs: replace(inputs, decay=inputs.decay.mean(-1, keepdim=True).expand_as(inputs.decay)),
    ),
    "beta": (EVERYTHING, lambda inputs: replace(inputs, beta=torch.ones_like(inputs.beta))),
    "bias of the convolution": (EVERYTHING, without_bias),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_feature_moves_the_result(name: str) -> None:
    spec, change = CHANGES[name]
    inputs = make_inputs(EVERYTHING, 12)
    state, tail = make_states(EVERYTHING)
    right, wrong = recur_row(EVERYTHING, inputs, state, tail), recur_row(spec, change(inputs), state, tail)
    assert (right.out - wrong.out).abs().max() > 100 * TOLERANCE
