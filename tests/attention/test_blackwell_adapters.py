"""The adapters for Blackwell over stand-ins for their libraries: what they compute, draft and lease."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.shared.page_rows import PageRows
from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane, Workspace
from sightline.core.batch import FULL
from sightline.testing.conformance.rig import AttentionRig, Row
from sightline.testing.conformance.steps import Step
from support import blackwell_adapters as adapters
from support import fake_blackwell
from support.blackwell_adapters import ADAPTERS, CANDIDATES, LATENT_ADAPTERS, SPECS, Backend, rig_for, subject
from support.rollouts import Draft

Backends = dict[str, Backend]
LSE = frozenset({Feature.LSE})
TOLERANCE = 0.03
MIXED = (Row(40, 1), Row(0, 12), Row(70, 3), Row(33, 0), Row(31, 1))
"""Rows of all ways: absorbed, expanded with and without a context, and one without new tokens."""
DECODE = (Row(40, 1), Row(0, 1), Row(33, 0), Row(95, 1))
DRAFT = [Row(40, 1), Row(31, 1)]
EXTEND = [Row(40, 1), Row(33, 4), Row(0, 5)]
"""As the first step of a draft model, which reads the tokens that were accepted."""


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    with adapters.loaded() as found:
        yield found


def difference(step: Step, needs: frozenset[Feature] = frozenset()) -> float:
    """The largest difference to the oracle, of the output and of the LSE if it is needed."""
    answer, expected = step.run(needs), step.expected()
    errors = [(answer.out[: len(expected.out)].float() - expected.out.float()).abs().max()]
    if needs:
        assert answer.lse is not None
        assert expected.lse is not None
        errors.append((answer.lse[: len(expected.lse)] - expected.lse).abs().max())
    return float(torch.stack(errors).nan_to_num(nan=1e9).max())


def needs_of(name: str) -> frozenset[Feature]:
    return LSE & CANDIDATES[name].rows()[0].features


@pytest.mark.parametrize("page_size", [32, pytest.param(64, marks=pytest.mark.prove)])
@pytest.mark.parametrize("name", ADAPTERS)
def test_steps_are_the_oracles(backends: Backends, name: str, page_size: int) -> None:
    rig = rig_for(subject(name, backends[name]), page_size=page_size)
    for rows in (MIXED, DECODE):
        step = Step(rig, rows)
        assert difference(step, needs_of(name)) < TOLERANCE
        assert step.unwritten() is None
        for table_row in step.table_rows:
            rig.store.close_row(table_row)
    assert difference(Step(rig, [Row(0, 33), Row(0, 1)], transient=True), needs_of(name)) < TOLERANCE


@pytest.mark.parametrize("name", ADAPTERS)
def test_padding_keeps_its_output_and_a_step_without_tokens_runs(backends: Backends, name: str) -> None:
    rig = rig_for(subject(name, backends[name]))
    padded = Step(rig, DECODE)
    padded.pad(1, 2, torch.nan)
    answer, expected = padded.run(), padded.expected()
    assert torch.allclose(answer.out[:3].float(), expected.out.float(), atol=TOLERANCE)
    assert bool(answer.out[3:].isnan().all())
    assert Step(rig, [Row(33, 0)]).run().out.shape[0] == 0
    assert Step(rig, []).run().out.shape[0] == 0


@pytest.mark.parametrize("row", [Row(70, 40, FULL), Row(0, 40, FULL)], ids=["behind a context", "alone"])
def test_rows_that_see_all_are_computed_beside_causal_ones(backends: Backends, row: Row) -> None:
    step = Step(rig_for(subject("trtllm", backends["trtllm"])), [row, Row(40, 3), Row(3, 2, FULL)])
    assert difference(step) < TOLERANCE


def test_a_window_is_that_of_the_spec(backends: Backends) -> None:
    softmax = SPECS[SpecKind.SOFTMAX]
    assert isinstance(softmax, SoftmaxSpec)
    rig = rig_for(subject("trtllm", backends["trtllm"], 1), replace(softmax, window=33))
    for rows in (MIXED, DECODE):
        step = Step(rig, rows)
        assert difference(step) < TOLERANCE
        for table_row in step.table_rows:
            rig.store.close_row(table_row)


@pytest.mark.prove
@pytest.mark.parametrize(("name", "index"), [("trtllm", 0), ("trtllm", 1), *((name, 0) for name in LATENT_ADAPTERS)])
def test_rows_conform(backends: Backends, name: str, index: int) -> None:
    """All checks of the kit but the two slowest, which take minutes in half precision on a CPU."""
    from sightline.testing.conformance.checks import CHECKS
    from sightline.testing.conformance.kit import try_row
    from sightline.testing.conformance.trial import Effort

    fast = [check for check in CHECKS if check.name not in ("ways", "covering")]
    report = try_row(subject(name, backends[name], index), Effort.QUICK, checks=fast)
    assert len(report.results) > 50
    assert {result.check: f"{result.detail} {result.case}" for result in report.failed} == {}


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
def test_tokenspeed_composes_kernels_of_our_own_for_ragged_rows() -> None:
    with adapters.loaded(with_triton=True) as found:
        rig = rig_for(subject("tokenspeed-latent", found["tokenspeed-latent"]), max_seq_len=128)
        assert difference(Step(rig, [Row(33, 20), Row(40, 1)]), LSE) < TOLERANCE


# As a drafter's backend.


@pytest.mark.parametrize(
    "rows", [[Row(40, 1), Row(31, 1)], [Row(40, 1), Row(33, 4), Row(0, 5)]], ids=["decode", "extend"]
)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_draft_that_is_planned_at_once_is_that_of_single_steps(
    backends: Backends, name: str, rows: list[Row]
) -> None:
    drafts = [Draft(rig_for(subject(name, backends[name])), rows, 3) for _ in range(2)]
    found, expected = drafts[0].at_once(), drafts[1].one_by_one()
    for one, other in zip([*found.outs, *found.cache], [*expected.outs, *expected.cache], strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)
    assert found.tokens == expected.tokens
    assert drafts[0].rig.planner.num_rebuilt == 0


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_plan_lives_on_while_another_is_made_and_run(backends: Backends, name: str) -> None:
    """As the model's verification is planned while a draft runs: what a plan derives is in buffers of its own."""
    rig = rig_for(subject(name, backends[name]))
    draft = Draft(rig, [Row(40, 1), Row(9, 1)], 3)
    expected = Draft(rig_for(subject(name, backends[name])), [Row(40, 1), Row(9, 1)], 3).one_by_one()
    plans = rig.planner.rollout(draft.batches())
    for index in range(3):
        assert difference(Step(rig, [Row(20 + index, 5), Row(3, 1)], seed=index), needs_of(name)) < TOLERANCE
        torch.testing.assert_close(draft.run(plans, index), expected.outs[index], atol=0, rtol=0)


# With the prefix in one piece, and in chunks.


def attribute_names(value: object) -> object:
    """The attributes of an object of ours, and of those that it holds."""
    if not type(value).__module__.startswith("sightline.attention"):
        return None
    return {name: attribute_names(each) for name, each in vars(value).items() if name != "_limits"}


@pytest.mark.parametrize("name", LATENT_ADAPTERS)
def test_every_object_exists_whether_or_not_prefixes_are_chunked(
    backends: Backends, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for all keys turns chunks off: a prefix is one piece. SGLang's adapter lacked an attribute then."""
    spec = SPECS[SpecKind.LATENT]
    assert isinstance(spec, LatentSpec)
    key_bytes = spec.num_q_heads * (192 + 128) * 2
    shapes, ways = [], []
    for room, max_rollout in ((24, 4), (512, 4), (512, 0)):
        monkeypatch.setattr(backends[name], "room_bytes", room * key_bytes)
        rig = rig_for(subject(name, backends[name]), max_rollout=max_rollout)
        [part] = rig.planner._bindings[0].parts
        shapes.append(attribute_names(part.backend))
        step = Step(rig, [Row(8, 40), Row(0, 20), Row(60, 1)])
        [group] = step.plan().plan.groups
        plan: Any = group.parts[0].plan
        ways.append(len(plan.expanded.phases))
        assert difference(step, LSE) < TOLERANCE
    assert shapes[0] == shapes[1] == shapes[2]
    assert ways[0] > ways[1] == ways[2] == 1, "the prefix was chunked, and then it was not"


@pytest.mark.parametrize("name", ADAPTERS)
def test_leases_belong_to_a_lane_and_those_of_the_library_are_zeroed(backends: Backends, name: str) -> None:
    rig = rig_for(subject(name, backends[name]), lanes=(MAIN_LANE, Lane(1)))
    entries = [entry for entry in rig.workspace.ledger() if entry.name.endswith(("workspace", "counters"))]
    assert {entry.lane for entry in entries} == {MAIN_LANE, Lane(1)}
    assert len(entries) >= 2
    for lane in (MAIN_LANE, Lane(1)):
        step = Step(rig, [Row(40, 1), Row(9, 1)], seed=int(lane))
        answer = step.run(frozenset(), lane)
        assert torch.allclose(answer.out.float(), step.expected().out.float(), atol=TOLERANCE)


# Planted faults: each must be caught.


def _wrong_stride(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    del backend
    planned = PageRows.planned

    def wrong(*given: Any, **named: Any) -> PageRows:
        rows = planned(*given, **named)
        flat = rows.pages.flatten()
        step = rows.pages.shape[1] - 1 or 1
        strided = [flat[row * step : row * step + rows.pages.shape[1]] for row in range(len(rows.pages))]
        return rows._replace(pages=torch.stack(strided)) if strided else rows

    monkeypatch.setattr(PageRows, "planned", staticmethod(wrong))


def _lens_off_by_one(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    del backend
    planned = PageRows.planned

    def wrong(*given: Any, **named: Any) -> PageRows:
        rows = planned(*given, **named)
        return rows._replace(lens=(rows.lens - 1).clamp(min=1))

    monkeypatch.setattr(PageRows, "planned", staticmethod(wrong))


def _changed_argument(argument: str, value: object) -> Callable[[pytest.MonkeyPatch, Backend], None]:
    def plant(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
        module = sys.modules[backend.__module__]
        for name, function in list(vars(module).items()):
            if function in vars(fake_blackwell).values() and callable(function):
                monkeypatch.setattr(module, name, _given(function, argument, value))

    return plant


def _given(function: Callable[..., Any], argument: str, value: object) -> Callable[..., Any]:
    def changed(**named: Any) -> Any:
        return function(**named | ({argument: value} if argument in named else {}))

    return changed


class _Forgetful:
    """A workspace of which nobody gets zeros."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def lease(self, *given: Any, zeroed: bool = False) -> Tensor:
        del zeroed
        return self._workspace.lease(*given)


def _not_zeroed(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    build: Callable[..., None] = vars(backend)["__init__"]

    def wrong(self: object, context: Any) -> None:
        build(self, replace(context, workspace=_Forgetful(context.workspace)))

    monkeypatch.setattr(backend, "__init__", wrong)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, Backend], None]] = {
    "wrong stride of the page table": _wrong_stride,
    "lengths off by one": _lens_off_by_one,
    "no scale": _changed_argument("bmm1_scale", 1.0),
    "workspace not zeroed": _not_zeroed,
}


def is_caught(tried: Callable[[], AttentionRig], name: str) -> bool:
    """Whether steps that a right adapter passes fail."""
    try:
        rig = tried()
        return any(difference(Step(rig, rows), needs_of(name)) >= TOLERANCE for rows in ((*DECODE,), (*MIXED[:3],)))
    except ValueError:
        # The stand-ins refuse it.
        return True


@pytest.mark.parametrize("name", ADAPTERS)
def test_no_fault_is_found_where_none_was_planted(backends: Backends, name: str) -> None:
    assert not is_caught(lambda: rig_for(subject(name, backends[name])), name)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_planted_fault_is_caught(backends: Backends, name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = FAULTS[fault]
    if fault == "no scale" and name == "tokenspeed-latent":
        plant = _changed_argument("softmax_scale", 1.0)
    plant(monkeypatch, backends[name])
    assert is_caught(lambda: rig_for(subject(name, backends[name])), name)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("fault", "check"),
    [*zip(FAULTS, ["ragged", "cache-write", "causal", "zeroed-leases"], strict=True)],
    ids=FAULTS,
)
def test_the_kit_names_a_planted_fault(
    backends: Backends, fault: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sightline.testing.conformance.kit import try_row
    from sightline.testing.conformance.trial import Effort

    FAULTS[fault](monkeypatch, backends["trtllm"])
    report = try_row(subject("trtllm", backends["trtllm"]), Effort.QUICK)
    assert check in {result.check for result in report.failed}


@pytest.mark.parametrize("name", ["trtllm-latent", "cutedsl-latent"])
def test_an_lse_to_the_base_2_is_caught(backends: Backends, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _changed_argument("return_lse_base", "base2")(monkeypatch, backends[name])
    assert is_caught(lambda: rig_for(subject(name, backends[name])), name)
