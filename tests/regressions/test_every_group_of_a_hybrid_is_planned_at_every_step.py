"""A wrapper around two backends lacked an optional hook, so the guard that looks for it was False and prefill ran on
the plan of an earlier step: `q.shape[0] (8218) does not match qo_indptr[-1] (800)` (SGLang PR 27316).

Here a hybrid model is two groups and no wrapper, the planner plans every group of every step in one loop, and the
contract has no method that a backend may leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.backends.torch.recurrent_backend import TorchRecurrentBackend
from sightline.attention.contract import AttentionBackend, AttentionPlan
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases
from support.case_marks import proofs
from support.one_layer import check_forward
from support.recording_backend import Record, RecordingBackend, install, recording
from support.tiny_models import random_prompts

PLAIN = SoftmaxSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, scale=0.35)
HYBRID = [PLAIN, replace(PLAIN, window=6), PLAIN, replace(PLAIN, softcap=3.0), replace(PLAIN, window=6)]
NUM_GROUPS = 3


def recording_bench(**setting: Any) -> AttentionRig:
    subject = replace(cases.subject_for("torch", torch.float32), backend=RecordingBackend)
    return AttentionRig(subject, HYBRID, RigSetting(**setting))


def records(bench: AttentionRig) -> list[list[Record]]:
    """Plans by group. A step that had no room in the plan buffers is planned twice in a row, and counts once."""
    backends = [part.backend for binding in bench.planner._bindings for part in binding.parts]
    groups = [backend.records for backend in backends if isinstance(backend, RecordingBackend)]
    return [
        group[:1] + [record for before, record in pairwise(group) if record.step is not before.step] for group in groups
    ]


def test_every_group_is_planned_once_a_step_with_the_steps_own_lengths() -> None:
    bench = recording_bench()
    steps = [[Row(0, 30), Row(0, 7)], [Row(30, 1), Row(7, 1)], [], [Row(4, 2)], [Row(0, 1)] * 9, [Row(400, 100)]]
    for count, rows in enumerate(steps, start=1):
        step = Step(bench, rows)
        step.plan()
        lengths = tuple(row.context_len for row in rows), tuple(row.query_len for row in rows)
        groups = records(bench)
        assert [len(group) for group in groups] == [count] * NUM_GROUPS
        assert [group[-1].lengths for group in groups] == [lengths] * NUM_GROUPS
        assert {group[-1].step.batch.batch_id for group in groups} == {step.batch.batch_id}
        for table_row in step.table_rows:
            bench.store.close_row(table_row)


@pytest.mark.parametrize("sizes", [*proofs((800, 8218)), (8218, 800)])
def test_a_step_after_one_of_another_size_runs_all_its_own_tokens_in_every_layer(sizes: tuple[int, int]) -> None:
    bench = recording_bench(max_seq_len=8218, max_step_tokens=8218, max_rows=2)
    for size in sizes:
        for layer in range(len(HYBRID)):
            step = Step(bench, [Row(0, size)], layer=layer)
            out = step.run().out
            assert out.shape[0] == size
            assert out.isfinite().all(), "a token that no plan covers stays NaN"
            bench.store.close_row(step.table_rows[0])
    for group in records(bench):
        assert [record.lengths[1] for record in group] == [(size,) for size in sizes for _ in HYBRID]
        assert all(tokens == record.lengths[1][0] for record in group for _, tokens in record.runs)


def test_planning_again_inside_a_forward_plans_every_group_with_the_lengths_at_hand() -> None:
    bench = recording_bench()
    early = Step(bench, [Row(17, 1), Row(3, 4)], layer=1)
    late = Step(bench, [Row(30, 2)], layer=1, seed=1)
    planned = early.plan()
    late.plan()
    check_forward(early, planned)
    assert bench.planner.num_rebuilt == 1
    for group in records(bench):
        assert [record.lengths for record in group] == [((17, 3), (1, 4)), ((30,), (2,)), ((17, 3), (1, 4))]
        assert [record.prepared for record in group] == [[], [], [0]], "the stale plans are not even prepared"


def test_planning_in_another_lane_plans_every_group_there() -> None:
    bench = recording_bench(lanes=(MAIN_LANE, Lane(1)))
    step = Step(bench, [Row(3, 2)])
    step.plan(lane=Lane(1))
    assert [[record.step.lane for record in group] for group in records(bench)] == [[Lane(1)]] * NUM_GROUPS


def test_a_plan_has_a_place_for_every_layer_of_the_model() -> None:
    plan = Step(recording_bench(), [Row(3, 2)]).plan().plan
    assert len(plan.groups) == NUM_GROUPS
    assert plan.places == dict(enumerate([(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]))


RECORDED: dict[str, type[RecordingBackend]] = {
    "softmax": RecordingBackend,
    "latent": recording(TorchLatentBackend, TorchLatentBackend.capabilities),
    "recurrent": recording(TorchRecurrentBackend, TorchRecurrentBackend.capabilities),
}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gemma", "softmax"),
        ("gpt_oss", "softmax"),
        ("minimax", "softmax,recurrent"),
        # The kind of model that the report is about.
        ("kimi_linear", "latent,recurrent"),
        ("bailing_hybrid", "latent,recurrent"),
    ],
)
def test_every_step_of_an_engine_plans_each_group_once_and_runs_each_layer_on_it(
    family: str, names: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = request.getfixturevalue(family)
    install(monkeypatch, **RECORDED)
    llm = LLM(
        str(folder),
        attention_backend=names,
        skip_tokenizer_init=True,
        cache_tokens=512,
        max_num_batched_tokens=64,
        strict=True,
        enforce_eager=True,
    )
    runtime = llm.engine.runtime
    backends = [part.backend for binding in runtime.bindings for part in binding.parts]
    for backend in backends:
        assert isinstance(backend, RecordingBackend)
        backend.records.clear()  # of the warm-up
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for prompt in random_prompts([100, 3, 20]):
        llm.engine.submit(prompt, params)
    num_steps = 0
    while llm.engine.has_work:
        llm.engine.step()
        num_steps += 1
        for binding, backend in zip(runtime.bindings, backends, strict=True):
            assert isinstance(backend, RecordingBackend)
            assert len(backend.records) == num_steps
            record = backend.records[-1]
            assert record.prepared == [0]
            tokens = sum(record.lengths[1])
            assert record.runs == [(layer, tokens) for layer in range(len(binding.group.layers))]
        assert len({backend.records[-1].lengths for backend in backends if isinstance(backend, RecordingBackend)}) == 1
    assert num_steps > 5
    assert len(backends) == 2


def test_no_method_of_the_contract_is_optional() -> None:
    for contract in (AttentionBackend, AttentionPlan):
        methods = {name for name, value in vars(contract).items() if callable(value) and not name.startswith("_")}
        assert methods == {name for name in contract.__abstractmethods__ if name != "__init__"}
    assert AttentionBackend.__abstractmethods__ == {"__init__", "plan"}
    assert AttentionPlan.__abstractmethods__ == {"prepare", "run"}


def nothing(self: object, *args: object) -> None:
    """Stands for a method."""


@pytest.mark.parametrize(
    ("contract", "left_out"),
    [(AttentionBackend, "plan"), (AttentionBackend, "__init__"), (AttentionPlan, "prepare"), (AttentionPlan, "run")],
)
def test_a_class_that_leaves_a_method_out_cannot_be_made(contract: type, left_out: str) -> None:
    methods: dict[str, Callable[..., None]] = dict.fromkeys(contract.__abstractmethods__, nothing)  # type: ignore[attr-defined]
    assert type("Whole", (contract,), dict(methods))() is not None
    del methods[left_out]
    with pytest.raises(TypeError, match=f"abstract class Partial .*{left_out}"):
        type("Partial", (contract,), methods)()
