"""Masks take tokens away before one is chosen, from their own row alone, and leave the logits as they were."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from numpy.typing import NDArray

from sightline.core.request import EffectiveParams
from sightline.core.token_lists import LogitBias
from sightline.runner.sampling.adjust import TokenAdjustment
from sightline.runner.sampling.masks import masked, row_masks, unpacked
from sightline.runner.sampling.sampler import RowSampling, choose, choose_unread

VOCAB = 150
NEUTRAL = EffectiveParams(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    seed=1,
    max_tokens=16,
    stop_token_ids=frozenset(),
    skip_special_tokens=True,
)


def mask_of(*tokens: int) -> NDArray[numpy.int64]:
    bits = numpy.zeros(192, dtype=numpy.uint8)
    bits[list(tokens)] = 1
    return numpy.packbits(bits, bitorder="little").view(numpy.int64)


def greedy_rows() -> list[RowSampling]:
    params = replace(NEUTRAL, temperature=0.0)
    return [RowSampling(params, 0, mask=mask_of(3, 70, 149)), RowSampling(params, 0), RowSampling(params, 0)]


def drawn_rows(**changes: object) -> list[RowSampling]:
    params: EffectiveParams = replace(NEUTRAL, temperature=2.0, **changes)  # type: ignore[arg-type]
    return [RowSampling(params, place, mask=mask_of(3, 70, 149) if place % 2 else None) for place in range(8)]


def logits_of(num_rows: int) -> torch.Tensor:
    return torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(1))


def test_a_greedy_row_takes_the_likeliest_of_its_mask_and_others_are_left_alone() -> None:
    logits = logits_of(3)
    before = logits.clone()
    chosen = choose(logits, greedy_rows())
    likeliest = max((3, 70, 149), key=lambda token: float(logits[0, token]))
    assert chosen.tokens.tolist() == [likeliest, int(logits[1].argmax()), int(logits[2].argmax())]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_a_drawn_row_takes_one_of_its_mask_on_every_device(changes: dict[str, object]) -> None:
    logits, rows = logits_of(8), drawn_rows(**changes)
    before = logits.clone()
    tokens = choose(logits, rows).tokens.tolist()
    assert {token for row, token in zip(rows, tokens, strict=True) if row.mask is not None} <= {3, 70, 149}
    plain = choose(logits, [replace_mask(row) for row in rows]).tokens.tolist()
    assert [token for row, token in zip(rows, tokens, strict=True) if row.mask is None] == plain[::2]
    assert torch.equal(logits, before)

    def best(values: torch.Tensor, packed: torch.Tensor) -> None:
        packed[0], packed[1] = values.argmax(-1), 1

    # The way of a GPU, which reads nothing on the host.
    assert choose_unread(logits, rows, None, best)[0].tolist() == tokens
    assert (
        choose_unread(logits[:3], greedy_rows(), None, best)[0].tolist()
        == choose(logits[:3], greedy_rows()).tokens.tolist()
    )
    assert torch.equal(logits, before)


def replace_mask(row: RowSampling) -> RowSampling:
    return RowSampling(row.params, row.place)


def test_a_bias_counts_among_the_tokens_of_a_mask() -> None:
    params = replace(NEUTRAL, temperature=0.0, logit_bias=LogitBias([(5, 100.0), (70, 50.0)]))
    row = RowSampling(params, 0, TokenAdjustment(params, []), mask=mask_of(3, 70, 149))
    logits = logits_of(1)
    before = logits.clone()
    assert choose(logits, [row]).tokens.tolist() == [70]
    assert torch.equal(logits, before)


def test_no_mask_costs_nothing() -> None:
    logits = logits_of(2)
    assert row_masks([None, None]) is None
    with masked(logits, None) as values:
        assert values is logits


def test_bits_mean_the_same_wherever_they_are_unpacked() -> None:
    logits, masks = torch.zeros((2, VOCAB)), row_masks([mask_of(0, 63, 64, 149), None])
    assert masks is not None
    with masked(logits, masks) as values:
        assert (values[0] == 0.0).nonzero().squeeze(1).tolist() == [0, 63, 64, 149]
        assert (values[1] == 0.0).all()
    assert (logits == 0.0).all()


def test_a_device_unpacks_bits_as_the_host_does() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (3, 5), generator=torch.Generator().manual_seed(2))
    expected = numpy.unpackbits(words.numpy().view(numpy.uint8), axis=1, bitorder="little")
    assert numpy.array_equal(unpacked(words).numpy(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_masks_leave_the_same_tokens_on_a_gpu() -> None:
    logits, rows = logits_of(8), drawn_rows()
    expected = choose(logits, rows).tokens.tolist()
    on_device = logits.cuda()
    assert choose(on_device, rows).tokens.tolist() == expected
    assert torch.equal(on_device.cpu(), logits)
    assert choose(on_device[:3], greedy_rows()).tokens.tolist() == choose(logits[:3], greedy_rows()).tokens.tolist()
