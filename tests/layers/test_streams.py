"""Several residual streams are read, mixed and joined as those of transformers' DeepSeek V4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from sightline.layers.linear import Linear
from sightline.layers.scratch import Scratch
from sightline.layers.stream_mix import StreamMix, StreamRule
from sightline.layers.streams import ResidualStreams, StreamConnection, StreamHead
from support.layers import scratch_for
from support.tiny_models import scale_weights

HIDDEN, COUNT, NUM_TOKENS = 12, 3, 9
RULE = StreamRule(COUNT, num_rounds=4, epsilon=1e-3, norm_epsilon=0.05)


def config() -> DeepseekV4Config:
    sizes = {"hc_mult": COUNT, "hc_sinkhorn_iters": RULE.num_rounds, "hc_eps": RULE.epsilon}
    return DeepseekV4Config(hidden_size=HIDDEN, rms_norm_eps=RULE.norm_epsilon, **sizes)


def filled(streams: Tensor) -> tuple[ResidualStreams, Scratch]:
    scratch = scratch_for(streams[:, 0])
    rooms = scratch.of(ResidualStreams, COUNT, HIDDEN)
    rooms.streams.copy_(streams)
    return rooms, scratch


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_a_part_reads_and_writes_the_streams_as_in_transformers() -> None:
    theirs = DeepseekV4HyperConnection(config())
    scale_weights(theirs, seed=1)
    streams, result = normal(NUM_TOKENS, COUNT, HIDDEN, seed=2), normal(NUM_TOKENS, HIDDEN, seed=3)
    post, comb, collapsed = theirs(streams.unsqueeze(0))
    expected = post[0].unsqueeze(-1) * result.unsqueeze(1) + comb[0].mT @ streams
    ours = StreamConnection(Linear(theirs.fn), StreamMix(RULE, theirs.scale, theirs.base))
    rooms, scratch = filled(streams)
    out = torch.full_like(result, torch.nan)
    ours.collapse(rooms, out, scratch)
    torch.testing.assert_close(out, collapsed[0])
    ours.expand(result, rooms, scratch)
    torch.testing.assert_close(rooms.streams, expected)


@torch.no_grad()
def test_streams_are_joined_as_in_transformers() -> None:
    theirs = DeepseekV4HyperHead(config())
    scale_weights(theirs, seed=1)
    streams = normal(NUM_TOKENS, COUNT, HIDDEN, seed=2)
    rooms, scratch = filled(streams)
    head = StreamHead(Linear(theirs.hc_fn), StreamMix(RULE, theirs.hc_scale, theirs.hc_base))
    out = torch.full((NUM_TOKENS, HIDDEN), torch.nan)
    assert head.rooms(scratch) is rooms
    head.join(out, scratch)
    torch.testing.assert_close(out, theirs(streams.unsqueeze(0))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stream_begins_as_the_embedding(dtype: torch.dtype) -> None:
    hidden = normal(NUM_TOKENS, HIDDEN, seed=4).to(dtype)
    scratch = scratch_for(hidden)
    rooms = scratch.of(ResidualStreams, COUNT, HIDDEN)
    rooms.fill(hidden, scratch)
    assert torch.equal(rooms.streams, hidden.unsqueeze(1).expand(-1, COUNT, -1))
