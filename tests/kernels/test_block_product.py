"""Products with block weights, against the fp32 product of the weights that they stand for.

Every product runs on every CPU, if slowly on those that it is not chosen for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sightline.kernels.block_product import (
    BlockProduct,
    CpuFeatures,
    DynamicInt4Product,
    Int4PackProduct,
    ProductShape,
    choose_product,
)
from sightline.kernels.block_weights import BLOCK_SIZE, BlockWeights, CodeBits

OUT, IN = 208, 256
"""Three whole runs of 64 outputs, in which one op packs, and a part of one."""

TOLERANCE = 0.03
"""Of the largest error, as a share of the outputs' root mean square.

bf16 keeps 8 bits of the inputs, the scales and the outputs, of which the largest is about four times the mean: 0.016.
Inputs in 8 bits have steps of 1/255 of their range, here 8 times their deviation from a mean of 2: 0.004 of their size
on average, and about five times that in the largest error of thousands.
"""
MARGIN = 5.0
"""How many times the tolerance a fault is off by, at least."""

PRODUCTS = pytest.mark.parametrize("product", [Int4PackProduct, DynamicInt4Product])
BITS = pytest.mark.parametrize("bits", CodeBits)
X86 = CpuFeatures("AVX512", kleidiai=False)
ARM = CpuFeatures("DEFAULT", kleidiai=True)


def random_weights(bits: CodeBits, *, symmetric: bool, rows: int = OUT, columns: int = IN) -> BlockWeights:
    """Scales that differ from block to block; `symmetric` ones have the minimum that makes the middle code 0."""
    generator = torch.Generator().manual_seed(1)
    blocks = (rows, columns // BLOCK_SIZE)
    levels = 1 << bits
    scales = (torch.rand(blocks, generator=generator) + 0.25) / levels
    drift = 0.0 if symmetric else torch.randn(blocks, generator=generator) * 0.05
    return BlockWeights(
        torch.randint(0, levels, (rows, columns), dtype=torch.uint8, generator=generator),
        scales,
        scales * (-levels / 2) + drift,
        bits,
    )


def random_inputs(rows: int, columns: int = IN) -> Tensor:
    """With a mean, so that what is added to every weight shows."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)) + 2.0


def largest_error(actual: Tensor, weights: BlockWeights, x: Tensor) -> float:
    expected = x.double() @ weights.dequantised().double().t()
    return float((actual.double() - expected).abs().max() / expected.square().mean().sqrt())


@PRODUCTS
@BITS
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_products_equal_those_of_the_dequantised_weights(
    product: type[BlockProduct], bits: CodeBits, symmetric: bool, dtype: torch.dtype, rows: int
) -> None:
    weights, x = random_weights(bits, symmetric=symmetric), random_inputs(rows).to(dtype)
    out = product(weights)(x)
    assert (out.shape, out.is_contiguous()) == ((rows, OUT), True)
    assert largest_error(out, weights, x) < TOLERANCE


def swapped_neighbours(weights: BlockWeights) -> BlockWeights:
    return replace(weights, codes=weights.codes.view(OUT, -1, 2).flip(2).reshape(OUT, IN))


def swapped_halves_of_blocks(weights: BlockWeights) -> BlockWeights:
    return replace(weights, codes=weights.codes.view(OUT, -1, 2, BLOCK_SIZE // 2).flip(2).reshape(OUT, IN))


def swapped_nibbles(weights: BlockWeights) -> BlockWeights:
    half = weights.bits // 2
    codes = (weights.codes >> half) | (weights.codes << half)
    return replace(weights, codes=codes & ((1 << weights.bits) - 1))


def zero_point_off_by_one(weights: BlockWeights) -> BlockWeights:
    return replace(weights, minima=weights.minima + weights.scales)


def scales_of_the_next_block(weights: BlockWeights) -> BlockWeights:
    return replace(weights, scales=weights.scales.roll(1, dims=1))


def scales_of_the_next_output(weights: BlockWeights) -> BlockWeights:
    return replace(weights, scales=weights.scales.roll(1, dims=0))


def minima_of_the_next_block(weights: BlockWeights) -> BlockWeights:
    return replace(weights, minima=weights.minima.roll(1, dims=1))


def dropped_minima(weights: BlockWeights) -> BlockWeights:
    return replace(weights, minima=weights.scales * (-(1 << weights.bits) / 2))


def one_output_elsewhere(weights: BlockWeights) -> BlockWeights:
    order = torch.arange(OUT)
    order[[0, 1]] = order[[1, 0]]
    return weights.take_rows(order)


@PRODUCTS
@BITS
@pytest.mark.parametrize(
    "fault",
    [
        swapped_neighbours,
        swapped_halves_of_blocks,
        swapped_nibbles,
        zero_point_off_by_one,
        scales_of_the_next_block,
        scales_of_the_next_output,
        minima_of_the_next_block,
        dropped_minima,
        one_output_elsewhere,
    ],
)
def test_a_fault_exceeds_the_tolerance_by_far(
    product: type[BlockProduct], bits: CodeBits, fault: Callable[[BlockWeights], BlockWeights]
) -> None:
    weights, x = random_weights(bits, symmetric=False), random_inputs(16)
    assert largest_error(product(fault(weights))(x), weights, x) > MARGIN * TOLERANCE


@PRODUCTS
@BITS
def test_no_rows_give_no_rows(product: type[BlockProduct], bits: CodeBits) -> None:
    assert product(random_weights(bits, symmetric=False))(torch.empty(0, IN)).shape == (0, OUT)


@PRODUCTS
@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_need_not_be_contiguous(product: type[BlockProduct], bits: CodeBits, dtype: torch.dtype) -> None:
    multiply = product(random_weights(bits, symmetric=False))
    x = random_inputs(3).to(dtype)
    apart = torch.cat((x, x), dim=1)[:, :IN]
    assert not apart.is_contiguous()
    assert torch.equal(multiply(apart), multiply(x))
    assert torch.equal(multiply(x.t().contiguous().t()), multiply(x))


@PRODUCTS
@BITS
def test_inputs_are_left_as_they_are(product: type[BlockProduct], bits: CodeBits) -> None:
    x = random_inputs(3)
    before = x.clone()
    product(random_weights(bits, symmetric=False))(x)
    assert torch.equal(x, before)


@BITS
def test_a_rows_result_does_not_depend_on_the_rows_beside_it(bits: CodeBits) -> None:
    multiply, x = Int4PackProduct(random_weights(bits, symmetric=False)), random_inputs(11)
    assert torch.equal(multiply(x), torch.cat([multiply(row.unsqueeze(0)) for row in x]))


@BITS
def test_packing_in_pieces_gives_the_product_of_the_whole(monkeypatch: pytest.MonkeyPatch, bits: CodeBits) -> None:
    weights, x = random_weights(bits, symmetric=False), random_inputs(3)
    whole = Int4PackProduct(weights)(x)
    monkeypatch.setattr("sightline.kernels.block_product._PIECE_ELEMENTS", 1)
    assert torch.equal(Int4PackProduct(weights)(x), whole)


@pytest.mark.parametrize(("bits", "bits_per_weight"), [(CodeBits.FOUR, 5), (CodeBits.EIGHT, 10)])
def test_packed_weights_take_a_fraction_of_dense_ones(bits: CodeBits, bits_per_weight: int) -> None:
    """The codes, and two bf16 numbers for every block of every plane."""
    assert Int4PackProduct(random_weights(bits, symmetric=False)).num_bytes * 8 == OUT * IN * bits_per_weight


def test_offsets_are_kept_only_where_there_are_any() -> None:
    offsets = OUT * IN // BLOCK_SIZE * 4
    plain = DynamicInt4Product(random_weights(CodeBits.FOUR, symmetric=True))
    assert DynamicInt4Product(random_weights(CodeBits.FOUR, symmetric=False)).num_bytes == plain.num_bytes + offsets


@BITS
@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        (X86, Int4PackProduct),
        (CpuFeatures("AVX2", kleidiai=False), Int4PackProduct),
        (ARM, DynamicInt4Product),
        (CpuFeatures("SVE256", kleidiai=True), DynamicInt4Product),
    ],
)
def test_the_cpu_decides_which_product_serves(bits: CodeBits, cpu: CpuFeatures, expected: type[BlockProduct]) -> None:
    weights = random_weights(bits, symmetric=True)
    choice = choose_product(ProductShape(OUT, IN, bits), cpu)
    assert choice == (expected, "")
    x = random_inputs(3)
    assert largest_error(expected(weights)(x), weights, x) < TOLERANCE


@pytest.mark.parametrize(
    ("shape", "cpu", "reasons"),
    [
        (
            ProductShape(64, 64, CodeBits.FOUR),
            CpuFeatures("DEFAULT", kleidiai=False),
            ("a CPU with AVX2 or AVX512, got DEFAULT", "KleidiAI on an aarch64 CPU with dot products, got none"),
        ),
        (ProductShape(64, 64, CodeBits.FOUR), replace(X86, windows=True), ("got one for Windows",)),
        (ProductShape(24, 64, CodeBits.EIGHT), X86, ("a multiple of 16 outputs, got 24",)),
        (ProductShape(12, 64, CodeBits.EIGHT), ARM, ("a multiple of 8 outputs, got 12",)),
        (ProductShape(16, 32, CodeBits.FOUR), ARM, ("more than one block of 32 inputs, got one",)),
    ],
)
def test_every_product_says_why_it_does_not_serve(
    shape: ProductShape, cpu: CpuFeatures, reasons: tuple[str, ...]
) -> None:
    product, refusals = choose_product(shape, cpu)
    assert product is None
    assert all(reason in refusals for reason in (*reasons, "Int4PackProduct: ", "DynamicInt4Product: "))


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (1008, 64)])
@BITS
def test_the_smallest_and_odd_shapes_that_are_served(shape: tuple[int, int], bits: CodeBits) -> None:
    rows, columns = shape
    weights = random_weights(bits, symmetric=False, rows=rows, columns=columns)
    assert choose_product(ProductShape(rows, columns, bits), X86).product is Int4PackProduct
    x = random_inputs(5, columns)
    assert largest_error(Int4PackProduct(weights)(x), weights, x) < TOLERANCE


def test_this_cpus_features_are_those_that_torch_reports() -> None:
    features = CpuFeatures.detect()
    assert features.vectors == torch.backends.cpu.get_cpu_capability()
    # The op that packs for KleidiAI exists in every build, and falls back to fp32 where it cannot.
    assert features.kleidiai <= torch.backends.kleidiai.is_available()  # type: ignore[no-untyped-call]
