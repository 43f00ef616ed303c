"""The products of experts and their weighted sums, in Triton's interpreter or on the card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.kernels.packed_weights import WeightForm
from sightline.kernels.triton.experts import ExpertTiles, StackedWeights, choose_tiles
from sightline.kernels.triton.gates import GateKind, GateRule
from support.expert_cases import (
    CLAMPED,
    SILU,
    as_fp8_blocks,
    as_mxfp4,
    assert_right,
    check_alone,
    computed,
    expected,
    make_case,
    rounded_to_fp8,
)

IN_FP8 = ExpertTiles(16, 32, 128, num_warps=4, num_stages=2)
TILES = {rows: ExpertTiles(rows, 32, 32, num_warps=4, num_stages=2) for rows in (16, 32, 64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "per_token", "num_experts", "hidden", "size"),
    [(1, 2, 4, 24, 20), (5, 3, 6, 33, 17), (3, 1, 1, 16, 130), pytest.param(40, 2, 4, 40, 36, marks=pytest.mark.prove)],
)
def test_experts_equal_one_choice_after_another(
    num_tokens: int, per_token: int, num_experts: int, hidden: int, size: int, dtype: torch.dtype
) -> None:
    case = make_case(num_tokens, per_token, num_experts, hidden, size, dtype=dtype)
    assert_right(case, computed(case))


@pytest.mark.parametrize(
    "gate", [CLAMPED, *(GateRule(kind) for kind in GateKind if kind is not CLAMPED.kind)], ids=lambda x: x.kind.name
)
def test_every_gate_and_biases(gate: GateRule) -> None:
    case = make_case(4, 2, 3, gate=gate, bias=True)
    assert_right(case, computed(case))
    far = replace(case, x=case.x * 200)
    torch.testing.assert_close(computed(far).double(), expected(far), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_gate_themselves_are_those_whose_gates_are_their_ups(dtype: torch.dtype, *, bias: bool) -> None:
    case = make_case(5, 2, 3, 33, 17, dtype=dtype, gate=GateRule(GateKind.RELU), bias=bias)
    up = case.gate_up.weight[:, 17:]
    shift = None if case.gate_up.bias is None else case.gate_up.bias[:, 17:]
    twice = replace(
        case,
        gate_up=StackedWeights(torch.cat((up, up), dim=1), None if shift is None else torch.cat((shift, shift), dim=1)),
    )
    once = replace(case, gate_up=StackedWeights(up, shift))
    assert_right(twice, computed(once, gates_itself=True))


def test_experts_that_gate_themselves_may_stay_in_fp8() -> None:
    case = make_case(3, 2, 3, 256, 160, dtype=torch.bfloat16, gate=GateRule(GateKind.RELU))
    packed, decoded = as_fp8_blocks(StackedWeights(case.gate_up.weight[:, 160:]), halves=1)
    twice = StackedWeights(torch.cat((decoded.weight, decoded.weight), dim=1).to(torch.bfloat16))
    got = computed(replace(case, gate_up=packed), config=IN_FP8, gates_itself=True)
    assert_right(replace(case, gate_up=twice), got)


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(1, 16), (17, 16), (70, 64), *(pytest.param(70, each, marks=pytest.mark.prove) for each in (16, 32))],
)
def test_all_tokens_may_choose_the_same_experts(num_tokens: int, rows: int) -> None:
    case = make_case(num_tokens, 2, 5)
    case = replace(case, choices=torch.tensor([[4, 1]]).expand(num_tokens, 2).contiguous())
    assert_right(case, computed(case, config=TILES[rows]))


def test_the_sum_is_added_to_the_target_or_written() -> None:
    case = make_case(9, 3, 6)
    before = torch.randn(9, 24)
    torch.testing.assert_close(computed(case, before.clone()), before + computed(case), atol=1e-5, rtol=1e-5)


def test_inputs_targets_and_weights_may_have_any_layout() -> None:
    case = make_case(9, 3, 6)
    target = torch.zeros(24, 9).t()
    other = replace(
        case,
        x=case.x.t().contiguous().t(),
        gate_up=StackedWeights(case.gate_up.weight.mT.contiguous().mT),
        down=StackedWeights(torch.cat([case.down.weight, case.down.weight], dim=2)[..., :20]),
    )
    assert_right(case, computed(other, target))


@pytest.mark.parametrize("num_tokens", [9, pytest.param(40, marks=pytest.mark.prove)])
def test_a_token_that_is_not_finite_reaches_no_other(num_tokens: int) -> None:
    """The same bits: the others' products do not change, wherever their rows lie in tiles."""
    case = make_case(num_tokens, 2, 3)
    x = case.x.clone()
    poisoned = torch.arange(num_tokens) % 4 == 2
    x[poisoned] = torch.nan
    got, clean = computed(replace(case, x=x)), computed(case)
    assert torch.equal(got[~poisoned], clean[~poisoned])
    assert got[poisoned].isnan().all()


@pytest.mark.parametrize("gate", [SILU, CLAMPED, GateRule(GateKind.RELU)], ids=lambda x: x.kind.name)
def test_a_token_that_is_not_finite_stays_so(gate: GateRule) -> None:
    case = make_case(2, 2, 3, gate=gate)
    assert computed(replace(case, x=torch.full_like(case.x, torch.nan))).isnan().all()


def test_a_token_alone_has_the_result_that_it_has_among_others() -> None:
    check_alone(make_case(17, 3, 4), (0, 11, 16), TILES[16])


def test_no_token_gives_no_output() -> None:
    case = make_case(1, 2, 3)
    none = replace(case, x=case.x[:0], choices=case.choices[:0], weights=case.weights[:0])
    assert computed(none).shape == (0, 24)


def test_few_choices_per_expert_have_small_tiles() -> None:
    weights = StackedWeights(torch.empty(64, 1, 1))
    rows = [choose_tiles(num_choices, weights, torch.bfloat16).rows for num_choices in (6, 96, 1024, 2048, 4096, 49152)]
    assert rows == [16, 16, 16, 32, 64, 128]
    assert choose_tiles(49152, weights, torch.float32).rows == 16
    assert choose_tiles(49152, replace(weights, form=WeightForm.MXFP4), torch.bfloat16).num_warps == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("hidden", "size", "gate"), [(64, 32, CLAMPED), pytest.param(96, 160, SILU, marks=pytest.mark.prove)]
)
def test_mxfp4_weights_are_decoded_as_they_are_read(hidden: int, size: int, gate: GateRule, dtype: torch.dtype) -> None:
    case = make_case(5, 2, 3, hidden, size, dtype=dtype, bias=True, gate=gate)
    packed_gate_up, gate_up = as_mxfp4(case.gate_up)
    packed_down, down = as_mxfp4(case.down)
    got = computed(replace(case, gate_up=packed_gate_up, down=packed_down))
    assert_right(replace(case, gate_up=gate_up, down=down), got)


@pytest.mark.parametrize(("hidden", "size"), [(24, 20), pytest.param(300, 136, marks=pytest.mark.prove)])
def test_products_in_fp8_round_each_row_and_group_of_inputs(hidden: int, size: int) -> None:
    case = make_case(5, 2, 3, hidden, size)
    packed_gate_up, gate_up = as_fp8_blocks(case.gate_up, halves=2, form=WeightForm.FP8_PRODUCTS)
    scaled = replace(case, x=case.x * torch.logspace(-3, 3, 5)[:, None])
    got = computed(replace(scaled, gate_up=packed_gate_up), config=IN_FP8)
    wanted = expected(replace(scaled, x=rounded_to_fp8(scaled.x), gate_up=gate_up))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-5)
    # What lies between the products is rounded too.
    packed_down, down = as_fp8_blocks(case.down, halves=1, form=WeightForm.FP8_PRODUCTS)
    got = computed(replace(case, gate_up=packed_gate_up, down=packed_down), config=IN_FP8)
    wanted = expected(replace(case, x=rounded_to_fp8(case.x), gate_up=gate_up, down=down))
    assert 1e-4 < float((got - wanted).norm() / wanted.norm()) < 0.05


def test_a_row_of_zeros_and_one_that_is_not_finite_in_fp8() -> None:
    case = make_case(4, 2, 3)
    x = case.x.clone()
    x[1], x[2] = 0.0, torch.nan
    packed, _ = as_fp8_blocks(case.gate_up, halves=2, form=WeightForm.FP8_PRODUCTS)
    got = computed(replace(case, x=x, gate_up=packed), config=IN_FP8)
    assert torch.equal(got[1], torch.zeros(24))
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 3]], computed(replace(case, gate_up=packed), config=IN_FP8)[[0, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "size"), [(24, 20), pytest.param(130, 136, marks=pytest.mark.prove)])
def test_fp8_weights_are_scaled_by_their_blocks(hidden: int, size: int, dtype: torch.dtype) -> None:
    case = make_case(5, 2, 3, hidden, size, dtype=dtype)
    packed_gate_up, gate_up = as_fp8_blocks(case.gate_up, halves=2)
    packed_down, down = as_fp8_blocks(case.down, halves=1)
    got = computed(replace(case, gate_up=packed_gate_up, down=packed_down))
    assert_right(replace(case, gate_up=gate_up, down=down), got)
