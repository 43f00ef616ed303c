"""The layers of DeepSeek V4 equal those of transformers, around attention that is computed from its definition."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sightline.attention.compressed.inputs import CompressedIndexInputs, CompressedInputs, CompressionInputs
from sightline.attention.compressed.spec import CompressedSpec, Compression
from sightline.attention.planner import PlannedBatch
from sightline.core.ledger import Ledger
from sightline.layers.compressed import CompressedAttention
from sightline.layers.rotary import Rotary
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Written
from sightline.layers.source import Given
from sightline.layers.step_tokens import TokenBuffers
from sightline.models.decoder import Decoder
from sightline.models.decoder_layer import StreamedLayer, TableBuffers
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from support.layers import scratch_for
from support.tiny_deepseek_v4 import make_v4

LENGTH, HIDDEN = 45, 48
Loaded = tuple[PreTrainedModel, Decoder]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model, and what is loaded of it."""
    folder, model = tmp_path_factory.mktemp("deepseek_v4"), make_v4("deepseek_v4")
    model.save_pretrained(folder)
    ledger = Ledger(strict=True)
    stored = open_checkpoint(folder, ledger)
    weights = WeightReader(stored, torch.float32, torch.device("cpu"), ledger, lambda _done, _all: None)
    return model, define_model(stored.config, ledger).load(weights)


def layer_of(loaded: Loaded, number: int) -> tuple[Any, StreamedLayer]:
    """The layer of transformers and ours."""
    model, decoder = loaded
    ours = decoder.states.layers[number]
    assert isinstance(ours, StreamedLayer)
    return model.model.layers[number], ours


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def entries_of(inputs: CompressionInputs, compression: Compression) -> Tensor:
    """The entries of one row without context."""
    ratio, found = compression.ratio, []
    for last in range(ratio - 1, len(inputs.values), ratio):
        own = slice(last + 1 - ratio, last + 1)
        values, gates = inputs.values[own], inputs.gates[own]
        if compression.overlap:
            before = slice(max(last + 1 - 2 * ratio, 0), last + 1 - ratio)
            # The first half of a token's numbers is for the next window.
            values = torch.cat((inputs.values[before].chunk(2, -1)[0], values.chunk(2, -1)[1]))
            gates = torch.cat((inputs.gates[before].chunk(2, -1)[0], gates.chunk(2, -1)[1]))
        mixed = (gates.softmax(dim=0) * values).sum(dim=0)
        entry = mixed * (mixed.square().mean() + compression.norm_eps).rsqrt() * inputs.norm
        first, second = entry[-compression.rope_dim :].view(-1, 2).unbind(-1)
        cos, sin = inputs.cos[last], inputs.sin[last]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten()
        found.append(torch.cat((entry[: -compression.rope_dim], turned)))
    return torch.stack(found)


class OneRow:
    """Stands in for a planned batch of one row without context, whose attention follows the definition."""

    def __init__(self, spec: CompressedSpec) -> None:
        self.spec = spec

    def choose(self, layer: int, inputs: CompressedIndexInputs) -> Tensor:
        assert self.spec.compression is not None
        assert self.spec.top_k is not None
        keys = entries_of(inputs.entries, self.spec.compression)
        scores = ((inputs.q @ keys.mT).relu() * inputs.weights.unsqueeze(-1)).sum(dim=1)
        chosen = torch.full((len(scores), self.spec.top_k), -1, dtype=torch.int32)
        for token, score in enumerate(scores):
            seen = (token + 1) // self.spec.compression.ratio
            best = score[:seen].topk(min(seen, self.spec.top_k)).indices.sort().values
            chosen[token, : len(best)] = best
        return chosen

    def attend(self, layer: int, inputs: CompressedInputs, out: Tensor) -> None:
        assert out.is_contiguous()
        keys = entries_of(inputs.entries, self.spec.compression) if inputs.entries and self.spec.compression else None
        for token, q in enumerate(inputs.q):
            seen = [inputs.key[max(token + 1 - self.spec.window, 0) : token + 1]]
            if keys is not None and self.spec.compression is not None:
                visible = torch.arange((token + 1) // self.spec.compression.ratio)
                if inputs.chosen is not None:
                    visible = inputs.chosen[token][inputs.chosen[token] >= 0].long()
                seen.append(keys[visible])
            all_keys = torch.cat(seen)
            scores = torch.cat((q @ all_keys.mT * self.spec.scale, inputs.sinks.unsqueeze(1)), dim=1)
            out[token] = scores.softmax(dim=-1)[:, :-1] @ all_keys


def attended(layer: CompressedAttention, rotary_of: Any, x: Tensor) -> Tensor:
    """What our layer gives for one row without context."""
    scratch = scratch_for(x)
    table = scratch.of(TableBuffers, 0, rotary_of.head_dim, rotary_of.window is not None).table
    rotary, positions = Rotary(rotary_of, x.device), torch.arange(len(x))
    scratch.operations.rotary_table(rotary, positions, table)
    if rotary_of.window is not None and table.windows is not None:
        scratch.operations.window_table(rotary, positions, rotary_of.window, table.windows)
    out = torch.full_like(x, math.nan)
    layer(Given(x), Written(out), cast(PlannedBatch, OneRow(layer.spec)), table, scratch)
    return out


@pytest.mark.parametrize("number", [0, 1, 2], ids=["window", "sparse", "heavy"])
@torch.no_grad()
def test_attention_equals_that_of_transformers(loaded: Loaded, number: int) -> None:
    model, _ = loaded
    theirs, ours = layer_of(loaded, number)
    x, positions = normal(LENGTH, HIDDEN, seed=1), torch.arange(LENGTH).unsqueeze(0)
    tables = {name: model.model.rotary_emb(x, positions, layer_type=name) for name in ("main", "compress")}
    distance = positions[0].unsqueeze(1) - positions
    visible = (distance >= 0) & (distance < model.config.sliding_window)
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~visible, -math.inf)
    expected, _ = theirs.self_attn(x.unsqueeze(0), tables, positions, mask)
    assert isinstance(ours.attention, CompressedAttention)
    torch.testing.assert_close(attended(ours.attention, ours.rotary, x), expected[0], rtol=1e-5, atol=1e-5)


def test_the_tiny_model_leaves_entries_out() -> None:
    """Otherwise no choice would be seen."""
    config = make_v4("deepseek_v4").config
    assert LENGTH // config.compress_rates["compressed_sparse_attention"] > config.index_topk


def fed(layer: StreamedLayer, x: Tensor, tokens: Tensor) -> Tensor:
    scratch: Scratch = scratch_for(x)
    layer.mlp.buffers(scratch)
    scratch.of(TokenBuffers).tokens.copy_(tokens)
    out = torch.full_like(x, math.nan)
    layer.mlp(Given(x), Written(out), scratch)
    return out


@pytest.mark.parametrize("number", [0, 2], ids=["listed", "routed"])
@torch.no_grad()
def test_experts_equal_those_of_transformers(loaded: Loaded, number: int) -> None:
    theirs, ours = layer_of(loaded, number)
    x, tokens = normal(LENGTH, HIDDEN, seed=2), torch.randint(0, 101, (LENGTH,))
    expected = theirs.mlp(x.unsqueeze(0), input_ids=tokens)[0]
    torch.testing.assert_close(fed(ours, x, tokens), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_listed_experts_depend_on_the_token(loaded: Loaded) -> None:
    _, ours = layer_of(loaded, 0)
    x, tokens = normal(6, HIDDEN, seed=2), torch.tensor([3, 4, 5, 6, 7, 8])
    one, other = fed(ours, x, tokens), fed(ours, x, tokens.roll(1))
    assert not torch.isclose(one, other, rtol=0.1).all(dim=-1).any()
