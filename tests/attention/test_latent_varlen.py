"""Latent attention on a kernel for ragged rows: what the oracle gives, whatever the room, the masks and the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    LatentInputs,
    StepLimits,
    StepView,
)
from sightline.attention.groups import group_layers
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.latent.phases import plan_phases
from sightline.attention.latent.varlen import LatentVarlen, VarlenPhases, never_absorbed
from sightline.attention.oracle.attention import attend_latent_row
from sightline.attention.shared.tiles import row_spans
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.pools import CacheLimits
from sightline.cache.store import CacheStore
from sightline.core.batch import CAUSAL, FULL, RowMask, RowWork
from sightline.core.device import Device, DeviceKind
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.paging import write_entries
from sightline.kernels.softmax_attention import composed_attention
from sightline.runner.batching import assemble
from sightline.testing.conformance.kit import try_row
from sightline.testing.conformance.problems import PROBLEMS
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Effort, Trial
from support.plan_buffers import plan_buffers

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)


@dataclass(frozen=True)
class TorchVarlenCall:
    """Row after row, in fp32."""

    scale: float
    rows: tuple[tuple[int, int], ...]
    causal: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        assert all(each.is_contiguous() for each in (q, k, v, out))
        assert (q.shape[0], k.shape[0]) == tuple(map(sum, zip(*self.rows, strict=True)))
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan).transpose(0, 1)
        query = key = 0
        for num_queries, num_keys in self.rows:
            queries, keys = slice(query, query + num_queries), slice(key, key + num_keys)
            bias = None
            if self.causal:
                seen = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
                bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            row_k, row_v = (each[keys].transpose(0, 1).unsqueeze(0) for each in (k, v))
            found = composed_attention(q[queries][None], row_k, row_v, bias, scale=self.scale, softcap=None, sinks=None)
            out[queries], lse[queries] = found[0][0], found[1][0]
            query, key = queries.stop, keys.stop
        return lse


@dataclass(frozen=True)
class TorchVarlenKernel:
    """Keeps what it was asked to plan."""

    scale: float
    planned: list[TorchVarlenCall]

    def plan(
        self, name: str, query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool, buffers: PlanBuffers
    ) -> TorchVarlenCall:
        del name, buffers
        rows = tuple(zip(query_lens, key_lens, strict=True))
        assert min(map(min, rows)) > 0
        assert not causal or all(num_queries <= num_keys for num_queries, num_keys in rows)
        call = TorchVarlenCall(self.scale, rows, causal)
        self.planned.append(call)
        return call


@dataclass(frozen=True, eq=False)
class _Plan(AttentionPlan[LatentInputs]):
    spec: LatentSpec
    entries: tuple[Tensor, ...]
    write_slots: Tensor | None
    phases: VarlenPhases
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing."""

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Tensor | None:
        if self.write_slots is not None:
            step = torch.cat((inputs.latent, inputs.k_rope), dim=-1)
            write_entries(self.entries[layer], self.write_slots, step.to(self.entries[layer].dtype))
        lse = torch.empty(out.shape[:2]) if self.needs_lse else None
        self.phases.run(layer, inputs, out, lse)
        return lse


class VarlenBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """The composition under test over torch."""

    capabilities: ClassVar[tuple[Capability, ...]] = tuple(
        # It writes as torch does, which does not copy 8-bit floats.
        replace(row, features=row.features - {Feature.TREE_MASK, Feature.SPARSE}, cache_dtypes=row.dtypes)
        for row in TorchLatentBackend.capabilities
    )
    room: ClassVar[int] = 1 << 20
    planned: ClassVar[list[TorchVarlenCall]] = []

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        spec = self._spec = context.spec
        self._pool = context.cache.pools["latent"]
        key_bytes = spec.num_q_heads * (spec.nope_dim + spec.rope_dim + spec.value_dim) * context.dtype.itemsize
        self._varlen = LatentVarlen(
            context,
            {lane: TorchVarlenKernel(spec.scale, self.planned) for lane in context.limits.lanes},
            entry_scales=(1.0,) * self._pool.spec.num_layers,
            room_bytes=self.room * key_bytes,
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> _Plan:
        phases = plan_phases(row_spans(step.batch, None), self._spec, self._varlen.room, never_absorbed)
        paged = step.policy is CachePolicy.PAGED
        return _Plan(
            spec=self._spec,
            entries=self._pool.plane("entry").unbind(0),
            write_slots=step.batch.pools[self._pool.key].write_slots if paged else None,
            phases=self._varlen.plan(phases, step, buffers),
            needs_lse=Feature.LSE in step.needs,
        )


def with_room(room: int) -> type[VarlenBackend]:
    """The backend with room for so many keys at once."""
    return type("Roomed", (VarlenBackend,), {"room": room, "planned": []})


def subject(room: int, dtype: torch.dtype = torch.float32) -> Subject:
    row = next(row for row in VarlenBackend.capabilities if dtype in row.dtypes)
    return Subject("varlen", with_room(room), row, CPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "dtype"),
    [(7, torch.float32), (40, torch.float32), (1 << 20, torch.float32), (7, torch.bfloat16), (1 << 20, torch.bfloat16)],
    ids=str,
)
def test_the_kit_passes_with_room_for_so_many_keys(room: int, dtype: torch.dtype) -> None:
    report = try_row(subject(room, dtype), Effort.QUICK)
    assert {result.check: (result.detail, result.case, result.trace) for result in report.failed} == {}


SPEC = LatentSpec(num_q_heads=3, latent_dim=16, rope_dim=4, nope_dim=8, value_dim=6, scale=0.31)


def run_step(rows: Sequence[Row], room: int) -> list[TorchVarlenCall]:
    """Holds a step against the oracle, and tells the calls that it took."""
    tried = subject(room)
    bench = AttentionRig(tried, [SPEC], RigSetting(page_size=4, max_seq_len=128, max_step_tokens=128))
    trial = Trial(tried, Effort.QUICK, Samples())
    trial.try_step(Step(bench, rows), frozenset({Feature.LSE}))
    assert issubclass(tried.backend, VarlenBackend)
    return tried.backend.planned


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 12), st.sampled_from([CAUSAL, FULL])), min_size=1, max_size=6
    ),
    room=st.integers(1, 60),
)
def test_any_rows_in_any_room(rows: list[tuple[int, int, RowMask]], room: int) -> None:
    for call in run_step([Row(*row) for row in rows], room):
        assert sum(num_keys for _, num_keys in call.rows) <= max(room, 1)


def test_all_causal_rows_take_one_call() -> None:
    calls = run_step([Row(9, 1), Row(0, 5), Row(17, 4), Row(3, 1)], 1 << 20)
    assert calls == [TorchVarlenCall(SPEC.scale, ((1, 10), (5, 5), (4, 21), (1, 4)), True)]


def test_rows_of_two_masks_take_two_calls_over_one_phase() -> None:
    calls = run_step([Row(9, 2), Row(4, 3, FULL), Row(0, 5)], 1 << 20)
    assert [call.causal for call in calls] == [False, True]
    assert [call.rows for call in calls] == [((3, 7),), ((2, 11), (5, 5))]


def test_a_row_without_context_has_no_prefix_to_merge() -> None:
    calls = run_step([Row(0, 9), Row(0, 3)], 12)
    assert [call.rows for call in calls] == [((9, 9), (3, 3))]


def test_new_tokens_that_do_not_fit_are_causal_first_and_then_seen_in_full() -> None:
    calls = run_step([Row(0, 9)], 4)
    assert [(call.causal, call.rows) for call in calls] == [
        (False, ((5, 4),)),
        (True, ((4, 4),)),
        (False, ((1, 4),)),
        (True, ((4, 4),)),
        (True, ((1, 1),)),
    ]


@pytest.mark.parametrize("room", [1 << 20, 5])
def test_what_is_kept_in_fewer_bits_is_read_times_its_scale(room: int) -> None:
    scale, context, new = 0.5, 11, 6
    cache = torch.float8_e4m3fn
    store = CacheStore(
        [group.cache_spec(cache) for group in group_layers([SPEC])], CacheLimits(9, 4, 2, 32), CPU.torch_device
    )
    [group_cache] = store.groups
    [pool] = store.pools
    pool.plane("entry").view(torch.uint8).fill_(0x7F)  # NaN
    limits = StepLimits(2, 32, 32, (MAIN_LANE,), max_rollout=0)
    workspace = Workspace(CPU.torch_device, 1 << 24, poison=True)
    made = BackendContext(
        "group0",
        SPEC,
        group_cache,
        workspace,
        limits,
        torch.float32,
        CPU.torch_device,
        inline_launcher(),
        ResidentEntries(group_cache),
    )
    kernel = TorchVarlenKernel(SPEC.scale, [])
    key_bytes = SPEC.num_q_heads * (SPEC.nope_dim + SPEC.rope_dim + SPEC.value_dim) * 4
    varlen = LatentVarlen(made, {MAIN_LANE: kernel}, entry_scales=(scale,), room_bytes=room * key_bytes)
    row = store.open_row()
    store.grow_row(row, context + new)
    generator = torch.Generator().manual_seed(2)
    kept = torch.randn(context + new, SPEC.head_dim, generator=generator).div(scale).to(cache)
    slots = pool.table.slots(torch.full((context + new,), row), torch.arange(context + new), 4)
    pool.plane("entry").view(torch.uint8)[0, slots] = kept.view(torch.uint8)
    inputs = PROBLEMS[SpecKind.LATENT].random_inputs(SPEC, new, lambda *shape: torch.randn(*shape, generator=generator))
    batch = assemble([RowWork(row, [1] * new, context, 0)], store)
    step = StepView(batch, CachePolicy.PAGED, MAIN_LANE, frozenset())
    phases = plan_phases(row_spans(batch, None), SPEC, varlen.room, never_absorbed)
    out = torch.full((new, SPEC.num_q_heads, SPEC.value_dim), torch.nan)
    varlen.plan(phases, step, plan_buffers(poison=True)).run(0, inputs, out, None)
    visible = torch.ones(new, context + new, dtype=torch.bool).tril(context)
    projections = (inputs.key_up, inputs.value_up)
    wanted, _ = attend_latent_row(SPEC, inputs.q_nope, inputs.q_rope, kept.float() * scale, *projections, visible)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


def test_queries_that_are_whole_heads_are_taken_as_they_lie() -> None:
    whole = torch.randn(5, 3, 12 + 4)
    rest = (torch.zeros(5, 8), torch.zeros(5, 4), torch.zeros(3, 12, 8), torch.zeros(3, 6, 8))
    found = LatentInputs(whole[..., :12], whole[..., 12:], *rest).whole_queries()
    assert found is not None
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(found, whole)
    wider = torch.randn(5, 3, 20)
    for q_nope, q_rope in (
        (whole[..., :12].contiguous(), whole[..., 12:].contiguous()),
        (wider[..., :12], wider[..., 12:16]),
        (wider[..., :12], wider[..., 16:]),
        (whole[..., 4:], whole[..., :4]),
    ):
        assert LatentInputs(q_nope, q_rope, *rest).whole_queries() is None
