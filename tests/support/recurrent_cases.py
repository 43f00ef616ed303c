"""Random inputs of recurrent layers, strong enough that every feature shows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sightline.attention.contract import ConvolutionInputs, ConvWeights, RecurrentInputs
from sightline.attention.spec import ConvolutionSpec, RecurrentSpec

PLAIN = RecurrentSpec(
    num_heads=4,
    num_key_heads=4,
    key_dim=12,
    value_dim=20,
    scale=0.3,
    delta_rule=False,
    channel_decay=False,
    unit_keys=False,
    conv_width=0,
)
GATED_DELTA = replace(PLAIN, num_key_heads=2, delta_rule=True, unit_keys=True, conv_width=4)
KIMI_DELTA = replace(PLAIN, delta_rule=True, channel_decay=True, unit_keys=True, conv_width=4)
MAMBA = replace(PLAIN, num_key_heads=2, scale=1.0, conv_width=4, skip=True)
EVERYTHING = replace(KIMI_DELTA, num_key_heads=2, conv_width=3, skip=True)
SPECS = {
    "lightning": PLAIN,
    "gated delta": GATED_DELTA,
    "kimi delta": KIMI_DELTA,
    "mamba": MAMBA,
    "everything": EVERYTHING,
    "channels without the delta rule": replace(EVERYTHING, delta_rule=False, unit_keys=False),
    "delta rule alone": replace(PLAIN, delta_rule=True, unit_keys=True),
}
CONVOLUTION = ConvolutionSpec(channels=24, width=3)


def make_conv(
    channels: int, width: int, seed: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> ConvWeights:
    """Weights whose every column matters."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(channels, width, generator=generator).to(dtype)
    return ConvWeights(weight, torch.randn(channels, generator=generator).to(dtype) if bias else None)


def make_inputs(
    spec: RecurrentSpec,
    num_tokens: int,
    seed: int = 0,
    *,
    decay: float = 1.0,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> RecurrentInputs:
    """`decay` is the mean of the decays' absolute values."""
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads, spec.key_dim) if spec.channel_decay else (spec.num_heads,)
    return RecurrentInputs(
        mixed=torch.randn(num_tokens, spec.channels, generator=generator).to(dtype),
        decay=-decay * torch.rand(num_tokens, *heads, generator=generator) * 2,
        beta=torch.rand(num_tokens, spec.num_heads, generator=generator) * 0.8 + 0.2,
        conv=make_conv(spec.channels, spec.conv_width, seed + 1, bias=bias, dtype=dtype) if spec.conv_width else None,
        skip=torch.randn(spec.num_heads, generator=generator) if spec.skip else None,
    )


def make_states(spec: RecurrentSpec, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """A state and a tail to begin with."""
    generator = torch.Generator().manual_seed(seed + 100)
    state = torch.randn(spec.num_heads, spec.key_dim, spec.value_dim, generator=generator)
    if not spec.conv_width:
        return state, None
    return state, torch.randn(spec.channels, spec.conv_width - 1, generator=generator)


def make_convolution_inputs(
    spec: ConvolutionSpec, num_tokens: int, seed: int = 0, *, dtype: torch.dtype = torch.float32
) -> ConvolutionInputs:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, spec.channels, generator=generator).to(dtype)
    return ConvolutionInputs(x, make_conv(spec.channels, spec.width, seed + 1, dtype=dtype))
