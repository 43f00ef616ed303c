"""The backends of recurrent layers and of convolutions on a CPU give what the oracle gives, and keep its states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from sightline.attention.backends.numba.recurrent_backend import NumbaRecurrentBackend
from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.backends.torch.recurrent_backend import TorchRecurrentBackend
from sightline.attention.contract import AttentionBackend, CachePolicy
from sightline.attention.declared_rows import not_here
from sightline.attention.kinds import SpecKind
from sightline.attention.oracle.recurrent import empty_state, empty_tail, recur_row
from sightline.attention.spec import RecurrentSpec
from support.attention_cases import CPU_DEVICE
from support.case_marks import proofs, routine
from support.recurrent_cases import (
    CONVOLUTION,
    EVERYTHING,
    GATED_DELTA,
    KIMI_DELTA,
    PLAIN,
    SPECS,
    make_convolution_inputs,
    make_inputs,
)
from support.recurrent_rig import StateCase, StateRig, StateStep, assert_step

TOLERANCE = 2e-5


class InPlace(TorchRecurrentBackend):
    """Never copies states to scratch memory when rows are short."""

    in_place_bytes: ClassVar[int] = 0


class Narrow(TorchRecurrentBackend):
    """Computes two rows at once, in chunks of 16 tokens."""

    chunk: ClassVar[int] = 16
    scratch_bytes: ClassVar[int] = 2 * 4 * PLAIN.num_heads * PLAIN.key_dim * PLAIN.value_dim


def backends(kind: SpecKind) -> list[Any]:
    """The built-in backends of one kind that run here."""
    return [
        pytest.param(candidate.load(), id=candidate.name)
        for candidate in BUILT_IN
        if any(kind in row.spec_kinds and not_here(row, CPU_DEVICE) == () for row in candidate.rows())
    ]


TORCH = [pytest.param(TorchRecurrentBackend, id="torch"), pytest.param(InPlace, id="torch in place")]
NUMBA = pytest.param(NumbaRecurrentBackend, id="numba")
SMALL = pytest.param(Narrow, id="torch in small tiles", marks=pytest.mark.prove)


def seldom_specs() -> list[Any]:
    """Every spec; most run only if slow tests are asked for."""
    proven, quick = ("mamba", "kimi delta"), ("gated delta", "everything")
    seldom = {name: pytest.mark.prove if name in proven else pytest.mark.slow for name in SPECS if name not in quick}
    return [pytest.param(spec, id=name, marks=seldom.get(name, ())) for name, spec in SPECS.items()]


Backend = type[AttentionBackend[Any, Any]]
every_backend = pytest.mark.parametrize("backend", [*backends(SpecKind.RECURRENT), TORCH[1], SMALL])
recurrent = pytest.mark.parametrize("backend", [*TORCH, NUMBA])
tiled = pytest.mark.parametrize("backend", [*TORCH, SMALL, NUMBA])
convolutional = pytest.mark.parametrize("backend", backends(SpecKind.CONVOLUTION))
main_specs = pytest.mark.parametrize("spec", routine(SPECS, "gated delta", "everything"))
# Compiled kernels take ten seconds for each.
few_specs = pytest.mark.parametrize("spec", seldom_specs())


def rows(*lengths: int, kept: tuple[int, ...] = (), begins: bool = False) -> list[StateCase]:
    return [StateCase(length, frozenset(kept), begins) for length in lengths]


STEPS = {
    "decode": rows(1, 1, 1),
    "verification": [StateCase(4, frozenset(range(4))), StateCase(1), StateCase(3, frozenset(range(3)))],
    "prompts": rows(70, 9, 33, 1, 130, begins=True),
    "chunks": rows(70, 9, 33, 12),
    "one": rows(100, begins=True),
    "mixed": [StateCase(1), StateCase(1), StateCase(90, frozenset({0, 1, 40, 63, 64})), StateCase(20), StateCase(2)],
    "guesses behind a chunk": [StateCase(30, frozenset(range(25, 30))), StateCase(40)],
    "empty rows": rows(1, 0, 17, 0),
    "nothing": [],
}


@every_backend
@few_specs
@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_oracle(backend: Backend, spec: RecurrentSpec, name: str) -> None:
    step = StateStep(StateRig(backend, spec), STEPS[name], padding=(2, 3))
    assert_step(step, make_inputs(spec, step.num_tokens), TOLERANCE)


@recurrent
@main_specs
@pytest.mark.parametrize("name", STEPS)
def test_a_step_without_a_cache_equals_the_oracle(backend: Backend, spec: RecurrentSpec, name: str) -> None:
    step = StateStep(StateRig(backend, spec), STEPS[name], transient=True)
    assert_step(step, make_inputs(spec, step.num_tokens), TOLERANCE)


@convolutional
@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_convolution_equals_the_oracle(backend: Backend, name: str, transient: bool) -> None:
    step = StateStep(
        StateRig(backend, CONVOLUTION), STEPS[name], padding=(0 if transient else 2, 3), transient=transient
    )
    assert_step(step, make_convolution_inputs(CONVOLUTION, step.num_tokens), TOLERANCE)


@recurrent
@main_specs
@pytest.mark.parametrize("size", [7, 64, *proofs(1, 100)])
def test_a_prompt_in_chunks_equals_the_oracle(backend: Backend, spec: RecurrentSpec, size: int) -> None:
    total = 100
    rig, inputs = StateRig(backend, spec), make_inputs(spec, total, decay=0.1)
    whole = recur_row(spec, inputs, empty_state(spec), empty_tail(spec) if spec.conv_width else None)
    found, slot = [], 0
    for index, start in enumerate(range(0, total, size)):
        step = StateStep(rig, rows(min(size, total - start), begins=True))
        # Each step reads the slot that the last one wrote, and writes another.
        step.slots.read, step.slots.written[-1] = [slot], 1 + index % 2
        found.append(step.run(inputs.part(slice(start, start + size))))
        slot = step.slots.written[-1]
    torch.testing.assert_close(torch.cat(found), whole.out, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(rig.pool.plane("state")[1, slot], whole.states[-1], atol=TOLERANCE, rtol=TOLERANCE)


@tiled
@pytest.mark.parametrize("spec", [GATED_DELTA, EVERYTHING])
@pytest.mark.parametrize("kept", [0, 1, 2, 15, 16, 62, 63, 64, 78])
def test_a_state_may_be_kept_behind_any_token(backend: Backend, spec: RecurrentSpec, kept: int) -> None:
    step = StateStep(StateRig(backend, spec), rows(80, 10, 79, kept=(kept,)))
    assert_step(step, make_inputs(spec, step.num_tokens, decay=0.1), TOLERANCE)


DECAYS = {"none": 0.0, "weak": 0.001, "strong": 20.0, "stronger": 500.0, "infinite": torch.inf}


@recurrent
@main_specs
@pytest.mark.parametrize("name", DECAYS)
def test_decays_of_any_strength_equal_the_oracle(backend: Backend, spec: RecurrentSpec, name: str) -> None:
    step = StateStep(StateRig(backend, spec), rows(70, 3, 1))
    inputs = make_inputs(spec, step.num_tokens, decay=0.0)
    assert_step(step, replace(inputs, decay=torch.full_like(inputs.decay, -DECAYS[name])), TOLERANCE)


@recurrent
@main_specs
def test_weak_decays_behind_strong_ones_equal_the_oracle(backend: Backend, spec: RecurrentSpec) -> None:
    """The sum of all decays before a token must not take the precision of the token's own."""
    step = StateStep(StateRig(backend, spec), rows(70, 5))
    inputs = make_inputs(spec, step.num_tokens, decay=0.01)
    inputs.decay[::3] = -60.0
    inputs.decay[20:64] = -0.0123
    assert_step(step, inputs, TOLERANCE)


@recurrent
@main_specs
def test_inputs_may_be_slices_and_shared_numbers(backend: Backend, spec: RecurrentSpec) -> None:
    step = StateStep(StateRig(backend, spec), rows(1, 1, 3, 20, 90))
    inputs = make_inputs(spec, step.num_tokens)
    wide = torch.full((step.num_tokens, spec.channels + 5), torch.nan)
    wide[:, 2:-3] = inputs.mixed
    shared = replace(
        inputs,
        mixed=wide[:, 2:-3],
        decay=inputs.decay[:1].expand_as(inputs.decay),
        beta=torch.ones(1, 1).expand(step.num_tokens, spec.num_heads),
    )
    before = wide.clone()
    assert_step(step, shared, TOLERANCE)
    torch.testing.assert_close(wide, before, equal_nan=True, rtol=0, atol=0)


@recurrent
@main_specs
def test_padding_may_hold_anything(backend: Backend, spec: RecurrentSpec) -> None:
    step = StateStep(StateRig(backend, spec), rows(1, 1, 5, 20), padding=(3, 9))
    inputs = make_inputs(spec, step.num_tokens)
    for each in (inputs.mixed, inputs.decay, inputs.beta):
        each[-9:] = torch.nan
    assert_step(step, inputs, TOLERANCE)


@recurrent
@pytest.mark.parametrize("spec", [GATED_DELTA, KIMI_DELTA])
def test_a_row_that_is_not_a_number_spoils_no_other(backend: Backend, spec: RecurrentSpec) -> None:
    cases = rows(1, 4, 70, 1, 4, 20, 71)
    step = StateStep(StateRig(backend, spec), cases)
    inputs = make_inputs(spec, step.num_tokens)
    right = step.run(inputs)
    for spoilt in range(len(cases)):
        first = sum(row.length for row in cases[:spoilt])
        mixed = inputs.mixed.clone()
        mixed[first : first + cases[spoilt].length] = torch.nan
        found = step.run(replace(inputs, mixed=mixed))
        others = torch.ones(step.num_tokens, dtype=torch.bool)
        others[first : first + cases[spoilt].length] = False
        torch.testing.assert_close(found[others], right[others], atol=TOLERANCE, rtol=TOLERANCE)
        assert found[~others].isnan().all()


@tiled
@pytest.mark.parametrize("spec", [GATED_DELTA, EVERYTHING])
def test_rows_may_stand_in_any_order(backend: Backend, spec: RecurrentSpec) -> None:
    cases = [
        StateCase(1),
        StateCase(70, frozenset({9})),
        StateCase(3, frozenset(range(3))),
        StateCase(12),
        StateCase(1),
    ]
    for seed, order in enumerate(([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3])):
        step = StateStep(StateRig(backend, spec), [cases[index] for index in order], seed=seed)
        assert_step(step, make_inputs(spec, step.num_tokens, seed=seed), TOLERANCE)


@recurrent
@pytest.mark.parametrize("spec", [GATED_DELTA, EVERYTHING])
def test_a_step_that_runs_again_gives_the_same_bits(backend: Backend, spec: RecurrentSpec) -> None:
    step = StateStep(StateRig(backend, spec), STEPS["mixed"])
    inputs = make_inputs(spec, step.num_tokens)
    first = step.run(inputs)
    states = step.rig.pool.plane("state").clone()
    assert torch.equal(step.run(inputs), first)
    torch.testing.assert_close(step.rig.pool.plane("state"), states, rtol=0, atol=0, equal_nan=True)


@recurrent
def test_two_plans_may_be_alive(backend: Backend) -> None:
    rig = StateRig(backend, GATED_DELTA)
    first, second = StateStep(rig, STEPS["mixed"], seed=1), StateStep(rig, STEPS["chunks"], seed=2)
    inputs = [make_inputs(GATED_DELTA, each.num_tokens) for each in (first, second)]
    right = [each.run(given) for each, given in zip((first, second), inputs, strict=True)]
    plans = [rig.plan(each.batch(), CachePolicy.PAGED) for each in (first, second)]
    for plan, given, expected in zip(plans, inputs, right, strict=True):
        out = torch.empty_like(expected)
        plan.run(1, given, out)
        assert torch.equal(out, expected)


@pytest.mark.prove
@recurrent
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision_is_rounded_at_the_end_only(backend: Backend, dtype: torch.dtype) -> None:
    step = StateStep(StateRig(backend, EVERYTHING, dtype), STEPS["mixed"])
    inputs = make_inputs(EVERYTHING, step.num_tokens, dtype=dtype)
    assert_step(step, inputs, torch.finfo(dtype).eps)


@convolutional
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 2, 2), (1, 2, 5), (40, 1, 0, 3)])
def test_a_convolution_keeps_the_tail_behind_every_token(
    backend: Backend, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    step = StateStep(StateRig(backend, CONVOLUTION, dtype), rows(*lengths, kept=(0, 1, 3)), padding=(1, 4))
    inputs = make_convolution_inputs(CONVOLUTION, step.num_tokens, dtype=dtype)
    inputs.x[-4:] = torch.nan
    assert_step(step, inputs, TOLERANCE if dtype is torch.float32 else torch.finfo(dtype).eps)
