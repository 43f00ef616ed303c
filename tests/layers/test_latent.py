"""The latent layer gives attention what its words say, in either order of memory, and projects what comes back."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from sightline.attention.contract import LatentInputs
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import LatentSpec
from sightline.layers.latent import LatentAttention, QueryUp
from sightline.layers.linear import Linear
from sightline.layers.norm import RmsNorm
from sightline.layers.rotary import RotarySpec
from sightline.layers.sink import Written
from sightline.layers.source import Given
from support.layers import dense, make_table, rotate, scratch_for

HIDDEN, HEADS, NOPE, ROPE, LATENT, VALUE, RANK = 16, 3, 5, 4, 6, 7, 9
SPEC = LatentSpec(HEADS, LATENT, ROPE, NOPE, VALUE, scale=1.0)
Q_SIZE = HEADS * (NOPE + ROPE)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_layer(rank: int | None) -> LatentAttention:
    query_up = None
    if rank is not None:
        query_up = QueryUp(RmsNorm(normal(rank, seed=1), 1e-6), Linear(normal(Q_SIZE, rank, seed=2)))
    return LatentAttention(
        layer=4,
        spec=SPEC,
        down=Linear(normal((rank or Q_SIZE) + ROPE + LATENT, HIDDEN, seed=3)),
        query_up=query_up,
        latent_norm=RmsNorm(normal(LATENT, seed=4), 1e-6),
        key_up=normal(HEADS, NOPE, LATENT, seed=5),
        value_up=normal(HEADS, VALUE, LATENT, seed=6),
        output=Linear(normal(HIDDEN, HEADS * VALUE, seed=7)),
    )


class Recording:
    """Stands in for a planned batch: keeps what it is asked, and answers with fixed numbers."""

    def __init__(self, answer: Tensor) -> None:
        self.answer = answer
        self.asked: list[tuple[int, LatentInputs]] = []

    def attend(self, layer: int, inputs: LatentInputs, out: Tensor) -> None:
        self.asked.append((layer, inputs))
        assert out.is_contiguous()
        out.copy_(self.answer)


def normed(norm: RmsNorm, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.weight


@pytest.mark.parametrize("rank", [None, RANK])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 20, 64])
def test_inputs_and_output(rank: int | None, num_tokens: int) -> None:
    layer, x = make_layer(rank), normal(num_tokens, HIDDEN, seed=8)
    table = make_table(RotarySpec(ROPE, 50.0), torch.arange(3, 3 + num_tokens), x.dtype)
    planned, out = Recording(normal(num_tokens, HEADS, VALUE, seed=9)), torch.full_like(x, torch.nan)
    layer(Given(x), Written(out), cast(PlannedBatch, planned), table, scratch_for(x))
    [(number, inputs)] = planned.asked

    side, k_rope, latent = (x @ dense(layer.down).weight.T).split((rank or Q_SIZE, ROPE, LATENT), dim=1)  # type: ignore[no-untyped-call]
    if layer.query_up is not None:
        side = normed(layer.query_up.norm, side) @ dense(layer.query_up.projection).weight.T
    unturned = torch.cat((side[:, HEADS * NOPE :], k_rope), dim=1).view(num_tokens, HEADS + 1, ROPE)
    rotated = rotate(table, unturned)
    expected = LatentInputs(
        q_nope=side[:, : HEADS * NOPE].view(num_tokens, HEADS, NOPE),
        q_rope=rotated[:, :HEADS],
        latent=normed(layer.latent_norm, latent),
        k_rope=rotated[:, HEADS],
        key_up=layer.key_up,
        value_up=layer.value_up,
    )
    assert number == 4
    assert inputs.chosen is None, "a dense layer has no choice"
    for name, value in [(name, value) for name, value in vars(expected).items() if name != "chosen"]:
        got = getattr(inputs, name)
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
        assert got.stride(-1) == 1, "a head is one run of numbers"
    torch.testing.assert_close(out, planned.answer.flatten(1) @ dense(layer.output).weight.T, rtol=1e-5, atol=1e-5)
