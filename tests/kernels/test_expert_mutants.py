"""Faults planted in the source of the experts' kernels, each caught by a check that is named for it."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sightline.kernels.triton import expert_groups, experts, routing
from sightline.kernels.triton.experts import ExpertTiles
from sightline.layers.routing import Groups, Routing, Score, Share
from support import expert_cases
from support.expert_cases import as_mxfp4, assert_right, check_alone, check_groups, check_routing, computed, make_case

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a wrong kernel may end the device's context"),
]
SMALL = ExpertTiles(16, 32, 32, num_warps=4, num_stages=2)


def several_tiles() -> None:
    """One expert has more choices than a tile, and one has none."""
    case = replace(make_case(20, 1, 4, bias=True), choices=torch.tensor([0] * 17 + [1, 3, 3]).view(-1, 1))
    assert_right(case, computed(case, config=SMALL))


def every_tile() -> None:
    """As many tiles as the bound."""
    case = replace(make_case(4, 1, 4), choices=torch.arange(4).view(-1, 1))
    assert_right(case, computed(case, config=SMALL))


def several_choices() -> None:
    case = make_case(6, 3, 5, bias=True)
    assert_right(case, computed(case, config=SMALL))


def added() -> None:
    case = make_case(3, 2, 4)
    before = torch.randn(case.x.shape)
    torch.testing.assert_close(computed(case, before.clone()), before + computed(case), atol=1e-5, rtol=1e-5)


def mxfp4() -> None:
    case = make_case(3, 2, 3, 64, 64)
    (packed_gate_up, gate_up), (packed_down, down) = as_mxfp4(case.gate_up), as_mxfp4(case.down)
    got = computed(replace(case, gate_up=packed_gate_up, down=packed_down))
    assert_right(replace(case, gate_up=gate_up, down=down), got)


def same_bits() -> None:
    check_alone(make_case(17, 3, 4), (11, 13, 16), SMALL)


def stable_order() -> None:
    check_groups(torch.randint(0, 5, (40, 1), generator=torch.Generator().manual_seed(1)), 5, 16)


def ties() -> None:
    check_routing(Routing(8, 3, Share.OF_CHOSEN), torch.zeros(2, 8))


def groups() -> None:
    routing = Routing(12, 4, Share.OF_CHOSEN, Score.SIGMOID, Groups(4, 2, ranked_by=2), corrected=True)
    check_routing(routing, torch.randn(8, 12, generator=torch.Generator().manual_seed(2)))


@dataclass(frozen=True)
class Mutant:
    """A text of a module's source, and what stands there instead."""

    module: ModuleType
    original: str
    planted: str
    caught_by: Callable[[], None]


MUTANTS = {
    "expert offset off by one": Mutant(
        expert_groups,
        "tl.minimum(first + (slot - tile) * rows, end)",
        "tl.minimum(first + 1 + (slot - tile) * rows, end)",
        several_choices,
    ),
    "order by expert only": Mutant(
        expert_groups, "tl.cumsum(ours, axis=0) - 1", "tl.sum(ours, axis=0) - tl.cumsum(ours, axis=0)", stable_order
    ),
    "a capacity of one tile": Mutant(
        expert_groups, "inside = slot < next_tile", "inside = slot < tl.minimum(next_tile, tile + 1)", several_tiles
    ),
    "last tile dropped": Mutant(
        experts, "choices.tiles.shape[0] * blocks", "(choices.tiles.shape[0] - 1) * blocks", every_tile
    ),
    "last outputs dropped": Mutant(
        experts, "is_output = output < OUTPUTS", "is_output = output < OUTPUTS - 1", several_choices
    ),
    "weight of the wrong expert": Mutant(
        experts, "expert * weight_expert", "tl.maximum(expert - 1, 0) * weight_expert", several_choices
    ),
    "bias of the wrong expert": Mutant(
        experts, "expert * bias_expert", "tl.maximum(expert - 1, 0) * bias_expert", several_choices
    ),
    "token of another row": Mutant(
        experts, "choice // PER_TOKEN if", "tl.maximum(choice - 1, 0) // PER_TOKEN if", several_choices
    ),
    "result of another choice": Mutant(
        experts, "target = place if GATE >= 0 else choice", "target = place", several_choices
    ),
    "weight of another choice": Mutant(
        experts, "tl.load(weights + choice)", "tl.load(weights + token * PER_TOKEN)", several_choices
    ),
    "sum not in a fixed order": Mutant(
        experts,
        "choice = token * PER_TOKEN + number",
        "choice = token * PER_TOKEN + (number + token) % PER_TOKEN",
        same_bits,
    ),
    "gate and up swapped": Mutant(experts, "gate, up = tl.split", "up, gate = tl.split", several_choices),
    "target overwritten": Mutant(experts, "if ADDS:", "if not ADDS:", added),
    "higher bits first": Mutant(
        experts,
        "tl.interleave(_e2m1(codes & 15), _e2m1(codes >> 4))",
        "tl.interleave(_e2m1(codes >> 4), _e2m1(codes & 15))",
        mxfp4,
    ),
    "scale of another block": Mutant(
        experts,
        "group = start // 32 + tl.arange(0, INPUT_BLOCK // 32)",
        "group = tl.arange(0, INPUT_BLOCK // 32) * 0",
        mxfp4,
    ),
    "higher expert of a tie": Mutant(
        routing,
        "tl.min(tl.min(tl.where(is_best, index, NUM_GROUPS * GROUP_SIZE - 1), axis=1), axis=0)",
        "tl.max(tl.max(tl.where(is_best, index, 0), axis=1), axis=0)",
        ties,
    ),
    "weighed by the corrected score": Mutant(
        routing, "tl.where(taken & is_expert, scores, 0.0)", "tl.where(taken & is_expert, ranks, 0.0)", groups
    ),
    "groups ranked by one expert": Mutant(routing, "range(RANKED_BY - 1)", "range(RANKED_BY - RANKED_BY)", groups),
}
LAUNCHES = ("group_choices", "gate_up_product", "down_product", "combine_parts", "choose_experts")
CHECKS = {mutant.caught_by.__name__: mutant.caught_by for mutant in MUTANTS.values()}


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_pass_the_checks(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_catches_the_planted_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    planted = plant(mutant, tmp_path / "planted.py")
    for launch in LAUNCHES:
        if launch in vars(mutant.module):
            monkeypatch.setattr(expert_cases, launch, vars(planted)[launch])
    with pytest.raises(AssertionError):
        mutant.caught_by()


def plant(mutant: Mutant, path: Path) -> ModuleType:
    """The module with the fault, from a file: Triton reads the source of its kernels."""
    source = inspect.getsource(mutant.module)
    assert source.count(mutant.original) == 1
    path.write_text(source.replace(mutant.original, mutant.planted))
    spec = importlib.util.spec_from_file_location(f"planted_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
