"""The operations in torch are their definitions: the other implementations are compared with them."""

from __future__ import annotations

import pytest
import torch

from sightline.layers.activation import Activation
from sightline.layers.decay_rates import DecayRates
from sightline.layers.norm import GroupNorm, RmsNorm
from sightline.layers.time_steps import TimeSteps
from support.layers import TORCH


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_delta_gates_are_their_definition(shape: tuple[int, ...]) -> None:
    x, rates, bias, out = torch.randn(5, *shape) * 8, torch.randn(3), torch.randn(shape), torch.empty(5, *shape)
    shares, beta = torch.randn(5, 3), torch.empty(5, 3)
    TORCH.delta_gates(x, shares, DecayRates(rates, bias), out, beta)
    torch.testing.assert_close(beta.double(), 1.0 / (1.0 + (-shares.double()).exp()), atol=1e-6, rtol=1e-6)
    factors = -rates.double().exp()
    for head in range(3):
        expected = factors[head] * torch.log1p((x + bias)[:, head].double().exp())
        torch.testing.assert_close(out[:, head].double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_norm_is_the_norm_of_each_head_times_the_gate(dtype: torch.dtype) -> None:
    x, gate, weight = torch.randn(4, 3, 8).to(dtype), torch.randn(4, 3, 8).to(dtype), torch.randn(8)
    for activation, opened in (
        (Activation.SILU, gate.double() * gate.double().sigmoid()),
        (Activation.SIGMOID, gate.double().sigmoid()),
    ):
        out = torch.empty_like(x)
        TORCH.gated_norm(x, gate, RmsNorm(weight, 1e-3), activation, out)
        scale = (x.double().square().mean(dim=-1, keepdim=True) + 1e-3).rsqrt()
        tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
        torch.testing.assert_close(out.double(), x.double() * scale * weight * opened, atol=tolerance, rtol=tolerance)


def test_time_steps_are_their_definition() -> None:
    x, bias, rates = torch.randn(5, 3) * 4, torch.randn(3), torch.randn(3)
    times, decays = torch.empty(5, 3), torch.empty(5, 3)
    TORCH.time_steps(x, TimeSteps(bias, rates, 0.1, 2.0), times, decays)
    expected = torch.log1p((x + bias).double().exp()).clamp(0.1, 2.0)
    assert (expected == 0.1).any()
    assert (expected == 2.0).any()
    torch.testing.assert_close(times.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(decays.double(), -rates.double().exp() * expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_gated_groups_has_the_gate_before_it(dtype: torch.dtype) -> None:
    x, gate, weight = torch.randn(4, 24).to(dtype), torch.randn(4, 24).to(dtype), torch.randn(3, 8)
    out = torch.empty_like(x)
    TORCH.norm_gated(x, gate, GroupNorm(weight, 1e-3), out)
    gated = (x.double() * gate.double() * gate.double().sigmoid()).view(4, 3, 8)
    expected = gated * (gated.square().mean(dim=-1, keepdim=True) + 1e-3).rsqrt() * weight
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(out.double(), expected.view(4, 24), atol=tolerance, rtol=tolerance)
