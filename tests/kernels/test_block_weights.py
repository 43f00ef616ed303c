"""Block weights stand for the numbers that their fields spell out."""

from __future__ import annotations

import pytest
import torch

from sightline.kernels.block_weights import BLOCK_SIZE, BlockWeights, CodeBits, concatenate


def random_weights(bits: CodeBits, rows: int, columns: int, seed: int = 0) -> BlockWeights:
    generator = torch.Generator().manual_seed(seed)
    blocks = (rows, columns // BLOCK_SIZE)
    return BlockWeights(
        torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=generator),
        torch.rand(blocks, generator=generator),
        torch.randn(blocks, generator=generator),
        bits,
    )


@pytest.mark.parametrize("bits", CodeBits)
def test_each_element_is_its_blocks_minimum_plus_code_times_scale(bits: CodeBits) -> None:
    weights = random_weights(bits, 5, 96)
    dequantised = weights.dequantised()
    assert dequantised.dtype == torch.float32
    for row in range(5):
        for column in range(96):
            block = column // 32
            product = weights.codes[row, column].float() * weights.scales[row, block]
            assert dequantised[row, column] == product + weights.minima[row, block]


def test_dequantising_leaves_the_weights_as_they_are() -> None:
    weights = random_weights(CodeBits.FOUR, 4, 64)
    assert torch.equal(weights.dequantised(), weights.dequantised())


def test_rows_are_taken_in_the_order_that_is_asked_for() -> None:
    weights = random_weights(CodeBits.EIGHT, 6, 64)
    order = torch.tensor([5, 0, 0, 3])
    taken = weights.take_rows(order)
    assert taken.bits == CodeBits.EIGHT
    assert torch.equal(taken.dequantised(), weights.dequantised()[order])


@pytest.mark.parametrize("num_rows", [1, 4, 6, 7])
def test_pieces_cover_every_row_once(num_rows: int) -> None:
    weights = random_weights(CodeBits.FOUR, 6, 64)
    pieces = list(weights.row_pieces(num_rows))
    assert all(piece.out_features <= num_rows for piece in pieces)
    assert torch.equal(torch.cat([piece.dequantised() for piece in pieces]), weights.dequantised())


def test_parts_are_joined_along_their_outputs() -> None:
    parts = [random_weights(CodeBits.FOUR, rows, 64, seed=rows) for rows in (2, 5, 3)]
    joined = concatenate(parts)
    assert (joined.out_features, joined.in_features, joined.bits) == (10, 64, CodeBits.FOUR)
    assert torch.equal(joined.dequantised(), torch.cat([part.dequantised() for part in parts]))


def test_parts_that_do_not_go_together_are_refused() -> None:
    four, eight = random_weights(CodeBits.FOUR, 2, 64), random_weights(CodeBits.EIGHT, 2, 64)
    with pytest.raises(ValueError, match=r"same width.* got 4 bits over 64 inputs, 8 bits over 64 inputs"):
        concatenate([four, eight])
    with pytest.raises(ValueError, match="same inputs, got 4 bits over 64 inputs, 4 bits over 96 inputs"):
        concatenate([four, random_weights(CodeBits.FOUR, 2, 96)])
    with pytest.raises(ValueError, match="got none"):
        concatenate([])


@pytest.mark.parametrize(("columns", "blocks"), [(48, 1), (64, 1), (64, 3)])
def test_codes_without_their_scales_are_refused(columns: int, blocks: int) -> None:
    with pytest.raises(ValueError, match=r"expected a scale and a minimum for every 32 codes"):
        BlockWeights(
            torch.zeros(2, columns, dtype=torch.uint8), torch.zeros(2, blocks), torch.zeros(2, blocks), CodeBits.FOUR
        )
