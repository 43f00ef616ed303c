"""The experts' kernels on random data, and the same one choice after another in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.kernels.packed_weights import FP8_BLOCK, WeightForm
from sightline.kernels.triton.expert_groups import TILE_FIELDS, bound_tiles, group_choices, tile_table
from sightline.kernels.triton.experts import (
    ExpertTiles,
    GroupedChoices,
    StackedWeights,
    choose_tiles,
    combine_parts,
    down_product,
    gate_up_product,
)
from sightline.kernels.triton.gates import GateKind, GateRule
from sightline.kernels.triton.routing import choose_experts
from sightline.layers.routing import Routing
from sightline.layers.stacked_experts import routing_rule
from sightline.models.loading.safetensors import fp8_blocks, mxfp4

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SILU = GateRule(GateKind.SILU)
CLAMPED = GateRule(GateKind.CLAMPED_SWIGLU, alpha=1.7, limit=0.8)


@dataclass(frozen=True, eq=False)
class ExpertCase:
    """Inputs of a layer of experts, on the CPU."""

    x: Tensor
    choices: Tensor
    weights: Tensor
    gate_up: StackedWeights
    down: StackedWeights
    gate: GateRule = SILU

    @property
    def num_experts(self) -> int:
        return self.gate_up.weight.shape[0]


def make_case(
    num_tokens: int,
    per_token: int,
    num_experts: int,
    hidden: int = 24,
    size: int = 20,
    *,
    dtype: torch.dtype = torch.float32,
    gate: GateRule = SILU,
    bias: bool = False,
) -> ExpertCase:
    generator = torch.Generator().manual_seed(num_tokens + hidden)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def stacked(outputs: int, inputs: int) -> StackedWeights:
        weight = (normal(num_experts, outputs, inputs) * inputs**-0.5).to(dtype)
        return StackedWeights(weight, normal(num_experts, outputs).to(dtype) if bias else None)

    choices = torch.rand(num_tokens, num_experts, generator=generator).topk(per_token).indices
    weights = torch.rand(num_tokens, per_token, generator=generator)
    x = normal(num_tokens, hidden).to(dtype)
    return ExpertCase(x, choices, weights, stacked(2 * size, hidden), stacked(hidden, size), gate)


def computed(
    case: ExpertCase, target: Tensor | None = None, config: ExpertTiles | None = None, *, gates_itself: bool = False
) -> Tensor:
    """What the kernels write for the case, on memory of NaN, or add to the target."""
    num_tokens, per_token = case.choices.shape
    num_choices, num_experts = num_tokens * per_token, case.num_experts
    config = config or choose_tiles(num_choices, case.down, case.x.dtype)
    choices = GroupedChoices(*grouped(case.choices, num_experts, config.rows), per_token)
    x, gate_up, down = case.x.to(DEVICE), on_device(case.gate_up), on_device(case.down)
    size = gate_up.weight.shape[1] // (1 if gates_itself else 2)
    inner = torch.full((num_choices, size), torch.nan, dtype=x.dtype, device=DEVICE)
    parts = torch.full((num_choices, x.shape[1]), torch.nan, dtype=x.dtype, device=DEVICE)
    gate_up_product(x, gate_up, case.gate, choices, inner, config, gates_itself=gates_itself)
    down_product(inner, down, choices, parts, config)
    out = torch.full_like(x, torch.nan) if target is None else target.to(DEVICE)
    combine_parts(parts, case.weights.to(DEVICE), out, adds=target is not None)
    return out.cpu()


def grouped(choices: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The order and the tiles, from memory that starts with places that do not exist."""
    num_choices = choices.numel()
    order = torch.full((num_choices,), -7, dtype=torch.int32, device=DEVICE)
    memory = torch.full((num_choices * TILE_FIELDS,), -7, dtype=torch.int32, device=DEVICE)
    tiles = tile_table(memory, num_choices, num_experts, rows)
    group_choices(choices.to(DEVICE), num_experts, rows, order, tiles)
    return order, tiles


def as_mxfp4(weights: StackedWeights) -> tuple[StackedWeights, StackedWeights]:
    """Random codes and scales in the shape of the weights, and what they decode to."""
    num_experts, outputs, inputs = weights.weight.shape
    generator = torch.Generator().manual_seed(inputs)
    codes = torch.randint(0, 256, (num_experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(117, 123, (num_experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    packed = replace(weights, weight=codes.flatten(2), form=WeightForm.MXFP4, scales=scales)
    return packed, replace(weights, weight=mxfp4.decode(codes, scales))


def as_fp8_blocks(
    weights: StackedWeights, *, halves: int, form: WeightForm = WeightForm.FP8_BLOCKS
) -> tuple[StackedWeights, StackedWeights]:
    """The weights rounded to fp8 with random scales, and what they decode to. Each half has blocks of its own."""
    codes = weights.weight.to(torch.float8_e4m3fn)
    blocks = [-(-size // FP8_BLOCK) for size in (codes.shape[1] // halves, codes.shape[2])]
    generator = torch.Generator().manual_seed(codes.shape[2])
    scales = torch.rand(codes.shape[0], halves, *blocks, generator=generator) + 0.5
    parts = codes.view(codes.shape[0], halves, -1, codes.shape[2])
    decoded = torch.stack(
        [
            torch.cat([fp8_blocks.decode(*part, (FP8_BLOCK, FP8_BLOCK)) for part in zip(*expert, strict=True)])
            for expert in zip(parts, scales, strict=True)
        ]
    )
    packed = replace(weights, weight=codes, form=form, scales=scales.flatten(1, 2))
    return packed, replace(weights, weight=decoded)


def rounded_to_fp8(x: Tensor) -> Tensor:
    """x as the products in fp8 see it: each group of 128 inputs of a row in e4m3, its largest number as 448."""
    groups = []
    for start in range(0, x.shape[1], FP8_BLOCK):
        group = x[:, start : start + FP8_BLOCK].float()
        scale = group.abs().amax(dim=1, keepdim=True) / 448.0
        groups.append((group / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(groups, dim=1)


def check_groups(choices: Tensor, num_experts: int, rows: int) -> None:
    """The order is the stable one, and the tiles that are not empty cover each expert's places once."""
    order, tiles = (table.tolist() for table in grouped(choices, num_experts, rows))
    flat = choices.flatten()
    assert order == flat.argsort(stable=True).tolist()
    assert len(tiles) == bound_tiles(flat.numel(), num_experts, rows)
    used = [tile for tile in tiles if tile[1] < tile[2]]
    assert all(end - first <= rows for _, first, end in used)
    assert all(0 <= expert < num_experts for expert, _, _ in tiles)
    covered = [(expert, place) for expert, first, end in used for place in range(first, end)]
    assert covered == list(zip(flat.sort().values.tolist(), range(flat.numel()), strict=True))


def check_alone(case: ExpertCase, tokens: Sequence[int], config: ExpertTiles) -> None:
    """With the same tiles a token has the same bits alone and among others, wherever its places are."""
    together = computed(case, config=config)
    for token in tokens:
        one = slice(token, token + 1)
        alone = replace(case, x=case.x[one], choices=case.choices[one], weights=case.weights[one])
        assert torch.equal(computed(alone, config=config)[0], together[token])


def expected(case: ExpertCase) -> Tensor:
    """One choice after another, in fp64."""
    result = torch.zeros(case.x.shape, dtype=torch.float64)
    for token, (chosen, weights) in enumerate(zip(case.choices.tolist(), case.weights.tolist(), strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            both = applied(case.gate_up, expert, case.x[token].double())
            result[token] += weight * applied(case.down, expert, gated(case.gate, *both.chunk(2)))
    return result


def applied(weights: StackedWeights, expert: int, x: Tensor) -> Tensor:
    outputs = weights.weight[expert].double() @ x
    return outputs if weights.bias is None else outputs + weights.bias[expert].double()


def gated(rule: GateRule, gate: Tensor, up: Tensor) -> Tensor:
    match rule.kind:
        case GateKind.SILU:
            return F.silu(gate) * up
        case GateKind.GELU:
            return F.gelu(gate) * up
        case GateKind.GELU_TANH:
            return F.gelu(gate, approximate="tanh") * up
        case GateKind.RELU:
            return F.relu(gate) * up
        case GateKind.SIGMOID:
            return torch.sigmoid(gate) * up
        case GateKind.CLAMPED_SWIGLU:
            gate = gate.clamp(max=rule.limit)
            return (up.clamp(-rule.limit, rule.limit) + 1.0) * gate * torch.sigmoid(rule.alpha * gate)
        case GateKind.CLAMPED_SILU:
            return F.silu(gate.clamp(max=rule.limit)) * up.clamp(-rule.limit, rule.limit)


def on_device(weights: StackedWeights) -> StackedWeights:
    bias, scales = (None if each is None else each.to(DEVICE) for each in (weights.bias, weights.scales))
    return replace(weights, weight=weights.weight.to(DEVICE), bias=bias, scales=scales)


def assert_right(case: ExpertCase, got: Tensor) -> None:
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[case.x.dtype]
    torch.testing.assert_close(got.double(), expected(case), atol=tolerance, rtol=tolerance)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def choices_of(routing: Routing, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], routing.experts_per_token)
    experts = torch.full(shape, -7, dtype=torch.int32, device=DEVICE)
    weights = torch.full(shape, torch.nan, device=DEVICE)
    on_device = None if correction is None else correction.to(DEVICE)
    choose_experts(logits.to(DEVICE), on_device, routing_rule(routing), experts, weights)
    return experts.cpu().long(), weights.cpu()


def check_routing(routing: Routing, logits: Tensor) -> None:
    """One launch chooses what `Routing.choose` does."""
    correction = normal(routing.num_experts, seed=9) if routing.corrected else None
    experts, weights = choices_of(routing, logits, correction)
    expected_experts, expected_weights = routing.choose(logits, correction)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected_weights)
