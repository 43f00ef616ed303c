"""The FlashInfer backends over a stand-in for the library: index building, writes and reads, stale plans."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sightline.attention.backends.flashinfer.plans import (
    RowLists,
    fill_pages,
    last_page_lens,
    offsets,
    padded,
    row_sizes,
)
from sightline.attention.backends.flashinfer.rows import LATENT_ROWS, ROWS
from sightline.attention.capability import Capability
from sightline.attention.contract import BackendContext, CachePolicy, SoftmaxInputs, StepLimits, StepView
from sightline.attention.groups import LayerGroup, group_layers
from sightline.attention.kinds import Feature
from sightline.attention.oracle.attention import attend_row
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.layout import Layout
from sightline.cache.pools import CacheLimits
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec
from sightline.cache.store import CacheStore
from sightline.cache.table import PageTable
from sightline.core.batch import RowWork
from sightline.core.device import detect_device
from sightline.kernels.cpu.program import inline_launcher
from sightline.runner.batching import assemble
from sightline.testing.conformance.kit import try_row
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Effort
from support import fake_flashinfer, torch_kernels
from support.plan_buffers import plan_buffers, plan_memory

CPU = torch.device("cpu")
SOFTMAX_NAME = "sightline.attention.backends.flashinfer.backend"
LATENT_NAME = "sightline.attention.backends.flashinfer.latent_backend"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The backends' modules, loaded over the stand-in."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_flashinfer.install(monkeypatch)
        torch_kernels.install(monkeypatch)
        loaded = {name: importlib.import_module(name) for name in (SOFTMAX_NAME, LATENT_NAME)}
        yield loaded
        for name in loaded:
            sys.modules.pop(name)


def softmax_subject(modules: dict[str, ModuleType], row: Capability) -> Subject:
    return Subject("flashinfer", modules[SOFTMAX_NAME].FlashInferBackend, row, detect_device("cpu"))


def latent_subject(modules: dict[str, ModuleType], row: Capability) -> Subject:
    return Subject("flashinfer-latent", modules[LATENT_NAME].FlashInferLatentBackend, row, detect_device("cpu"))


def narrowed(row: Capability) -> Capability:
    """The row with fewer values: the stand-in computes all of them alike."""
    return replace(row, head_dims=frozenset({128}), group_sizes=frozenset({1, 4}))


@pytest.mark.prove
@pytest.mark.parametrize(
    "index",
    [0, *(pytest.param(index, marks=pytest.mark.slow) for index in (1, 2, 3))],
    ids=("plain", "window", "softcap", "8-bit"),
)
def test_softmax_rows_conform(modules: dict[str, ModuleType], index: int) -> None:
    report = try_row(softmax_subject(modules, narrowed(ROWS[index])), Effort.QUICK)
    assert {result.check: f"{result.detail} {result.case}" for result in report.failed} == {}


@pytest.mark.slow
def test_latent_rows_conform(modules: dict[str, ModuleType]) -> None:
    row = replace(LATENT_ROWS[0], group_sizes=frozenset({8}))
    report = try_row(latent_subject(modules, row), Effort.QUICK)
    assert {result.check: f"{result.detail} {result.case}" for result in report.failed} == {}


def spec(**changes: object) -> SoftmaxSpec:
    return replace(SoftmaxSpec(4, 2, 64, 64**-0.5), **changes)  # type: ignore[arg-type]


def bench(subject: Subject, *, layout: Layout = Layout.SHUFFLED) -> AttentionRig:
    return AttentionRig(subject, [spec()], RigSetting(dtype=torch.bfloat16, layout=layout, max_seq_len=128))


def planned(step: Step) -> Any:
    """The backend's own plan."""
    [group] = step.plan().plan.groups
    [part] = group.parts
    return part.plan


def test_a_captured_plan_keeps_its_addresses_and_serves_other_lengths(modules: dict[str, ModuleType]) -> None:
    """What a graph holds is the run of the first plan: it is run again, on what later plans put into its memory."""
    rig = bench(softmax_subject(modules, ROWS[0]))
    first = Step(rig, [Row(5 * index, 1) for index in range(8)])
    plan = planned(first)
    addresses = dict(rig.planner.buffer_addresses(MAIN_LANE))
    for seed, lengths in enumerate(([3, 40, 0, 17], [100], [1] * 8)):
        step = Step(rig, [Row(length, 1) for length in lengths], seed=seed)
        real = step.batch.num_tokens
        step.pad(8 - real, 8 - real, torch.nan)
        rig.planner.plan(step.batch)
        wrapper = plan.calls[0].wrapper
        # The stand-in checks sizes on the host, as the library does when it is captured.
        wrapper._qo_indptr_last = 8
        replayed = replace(plan, write_slots=step.batch.pools[step.pool.key].write_slots)
        out = step.empty_out()
        replayed.run(0, step.inputs, out)
        assert torch.allclose(out[:real].float(), step.expected().out.float(), atol=2e-2)
        assert bool(out[real:].isnan().all())
        assert dict(rig.planner.buffer_addresses(MAIN_LANE)) == addresses
        for table_row in step.table_rows:
            rig.store.close_row(table_row)


def test_a_latent_step_may_be_replayed_with_fewer_rows(modules: dict[str, ModuleType]) -> None:
    """The launch is one of two, by the average of queries: rows that stand for nobody must not change it."""
    subject = latent_subject(modules, replace(LATENT_ROWS[0], group_sizes=frozenset({128})))
    latent = subject.problem.spec(576, 128, 1)
    rig = AttentionRig(subject, [latent], RigSetting(dtype=torch.bfloat16, max_seq_len=64))
    for rows in ([Row(3, 1)] * 4, [Row(20, 1)], [], [Row(5, 0), Row(7, 1)]):
        step = Step(rig, rows)
        real = step.batch.num_tokens
        step.pad(4 - len(rows), 4 - real, torch.nan)
        answer = step.run(frozenset({Feature.LSE}))
        expected = step.expected()
        assert torch.allclose(answer.out[:real].float(), expected.out.float(), atol=3e-2)
        assert answer.lse is not None
        assert expected.lse is not None
        assert torch.allclose(answer.lse[:real], expected.lse, atol=3e-2)
        assert bool(answer.out[real:].isnan().all())
        for table_row in step.table_rows:
            rig.store.close_row(table_row)


def test_prompts_without_a_context_do_not_read_the_pool(modules: dict[str, ModuleType]) -> None:
    rig = bench(softmax_subject(modules, ROWS[0]))
    step = Step(rig, [Row(0, 5), Row(0, 2)])
    assert [call.paged for call in planned(step).calls] == [False]
    continued = Step(rig, [Row(1, 5), Row(0, 2)])
    assert [call.paged for call in planned(continued).calls] == [True]


def fp8_store(group: LayerGroup, scale: float) -> CacheStore:
    planes = tuple(PlaneSpec(name, (2, 64), torch.float8_e4m3fn, (scale,)) for name in ("k", "v"))
    cache = GroupCacheSpec(group.name, (PoolSpec("kv", planes, 1),))
    return CacheStore([cache], CacheLimits(64, 16, 8, 128), CPU)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 1, 3)], ids=("decode", "prefill"))
def test_a_narrow_cache_is_read_with_its_scales(
    modules: dict[str, ModuleType], scale: float, lengths: tuple[int, ...]
) -> None:
    [group] = group_layers([spec()])
    store = fp8_store(group, scale)
    workspace, limits = Workspace(CPU, 1 << 30), StepLimits(8, 64, 128, (MAIN_LANE,), max_rollout=0)
    context = BackendContext(
        group.name,
        spec(),
        store.groups[0],
        workspace,
        limits,
        torch.bfloat16,
        CPU,
        inline_launcher(),
        ResidentEntries(store.groups[0]),
    )
    backend = modules[SOFTMAX_NAME].FlashInferBackend(context)
    rows = [store.open_row() for _ in lengths]
    for row in rows:
        store.grow_row(row, 20)
    work = [RowWork(row, [1] * length, 0, 1) for row, length in zip(rows, lengths, strict=True)]
    batch = assemble(work, store).pad(4, sum(lengths) + 2)
    buffers = plan_buffers()
    plan = backend.plan(StepView(batch, CachePolicy.PAGED, MAIN_LANE, frozenset()), buffers)
    q, k, v = (torch.randn(batch.num_tokens, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out = torch.full((batch.num_tokens, 4, 64), torch.nan, dtype=torch.bfloat16)
    plan.run(0, SoftmaxInputs(q=q, k=k, v=v, sinks=None), out)
    kept_k, kept_v = ((each.float() / scale).to(torch.float8_e4m3fn).float() * scale for each in (k, v))
    start = 0
    for length in lengths:
        tokens = slice(start, start + length)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        expected, _ = attend_row(spec(), q[tokens], kept_k[tokens], kept_v[tokens], visible, None)
        assert torch.allclose(out[tokens].float(), expected.float(), atol=2e-2)
        start += length
    assert bool(out[start:].isnan().all())


@pytest.mark.parametrize(("rows", "sizes"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))])
def test_captured_sizes_are_powers_of_two_and_the_largest(rows: int, sizes: tuple[int, ...]) -> None:
    assert row_sizes(rows) == sizes


def test_pages_are_listed_row_after_row() -> None:
    table = PageTable(3, 4, CPU)
    table.append(1, [7, 5])
    table.append(2, [9, 3, 4])
    memory = plan_memory(poison=True)
    out = torch.zeros(8, dtype=torch.int32)
    rows, pages = np.array([2, 0, 1], dtype=np.int32), np.array([3, 0, 2], dtype=np.int32)
    assert fill_pages("rows", table, rows, pages, memory.part("a"), out).tolist() == [9, 3, 4, 7, 5]
    assert fill_pages("rows", table, rows[:0], pages[:0], memory.part("b"), out).tolist() == []


def test_offsets_and_last_pages_of_empty_rows() -> None:
    lens = np.array([1, 0, 16, 17], dtype=np.int32)
    assert offsets(lens, 6).tolist() == [0, 1, 1, 17, 34, 34, 34]
    assert last_page_lens(lens, 16).tolist() == [1, 0, 16, 1]
    assert padded(lens, 5, 9).tolist() == [1, 0, 16, 17, 9]


def test_rows_without_new_tokens_are_left_out(modules: dict[str, ModuleType]) -> None:
    rig = bench(softmax_subject(modules, ROWS[0]))
    step = Step(rig, [Row(5, 0), Row(3, 2), Row(0, 0), Row(4, 1)])
    rows = RowLists.of(step.batch)
    assert rows.rows.tolist() == [1, 3]
    assert rows.seq_lens.tolist() == [5, 5]
    assert rows.table_rows.tolist() == [step.table_rows[1], step.table_rows[3]]
