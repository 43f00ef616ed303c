"""Drafts on a rig: the same steps planned at once and planned one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.backends.triton.backend import TritonBackend
from sightline.attention.backends.triton.latent_backend import TritonLatentBackend
from sightline.attention.kinds import SpecKind
from sightline.attention.planner import PlannedBatch
from sightline.attention.rollout import following_steps
from sightline.attention.spec import AttentionSpec, LatentSpec, SoftmaxSpec
from sightline.core.batch import Batch, RowWork
from sightline.core.device import DeviceKind
from sightline.runner.batching import assemble
from sightline.testing.conformance.given_inputs import to_device
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject
from sightline.testing.conformance.steps import Step, bits
from support.attention_cases import CPU_DEVICE

SOFTMAX = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
LATENT = LatentSpec(num_q_heads=2, latent_dim=16, rope_dim=8, nope_dim=8, value_dim=8, scale=0.25)
SPECS: dict[SpecKind, AttentionSpec] = {SpecKind.SOFTMAX: SOFTMAX, SpecKind.LATENT: LATENT}


def cpu_subjects() -> list[Subject]:
    """Every built-in backend that computes fp32 on a CPU, and Triton's as its interpreter runs them."""
    found = []
    for candidate in BUILT_IN:
        rows = [row for row in candidate.rows() if DeviceKind.CPU in row.devices and torch.float32 in row.dtypes]
        for kind in sorted({kind for row in rows for kind in row.spec_kinds}, key=lambda kind: kind.value):
            row = next(row for row in rows if kind in row.spec_kinds)
            name = f"{candidate.name.removesuffix('-latent')} {kind.value}"
            found.append(Subject(name, candidate.load(), row, CPU_DEVICE, named_kind=kind))
    for backend in (TritonBackend, TritonLatentBackend):
        row = next(row for row in backend.capabilities if torch.float32 in row.dtypes)
        narrow = replace(row, devices=frozenset({DeviceKind.CPU}))
        found.append(Subject(f"triton {next(iter(row.spec_kinds)).value}", backend, narrow, CPU_DEVICE))
    return found


def rig_for(subject: Subject, **setting: object) -> AttentionRig:
    """One layer; NaN in unused slots, and poison in leases."""
    chosen = RigSetting(max_seq_len=64, max_rows=8, max_step_tokens=64, page_size=4, **setting)  # type: ignore[arg-type]
    return AttentionRig(subject, [SPECS[subject.kind]], chosen)


@dataclass(frozen=True, eq=False)
class Ran:
    """What the steps of a draft computed, and left behind."""

    outs: list[Tensor]
    tokens: list[list[int]]
    cache: list[Tensor]


class Draft:
    """Rows of a rig that are drafted for: a first step of any length, then steps of one token."""

    def __init__(self, rig: AttentionRig, rows: Sequence[Row], steps: int) -> None:
        self.rig = rig
        self.rows = tuple(rows)
        self.num_steps = steps
        self.first = Step(rig, rows)
        for row, table_row in zip(rows, self.first.table_rows, strict=True):
            rig.store.grow_row(table_row, row.seq_len + steps - 1)
        generator = torch.Generator().manual_seed(3)
        one = [
            rig.problem.random_inputs(
                self.first.spec,
                len(rows),
                lambda *shape: torch.randn(*shape, generator=generator).to(rig.setting.dtype),
            )
            for _ in range(1, steps)
        ]
        self.inputs: list[Any] = [self.first.inputs, *one]

    def chosen(self, step: int) -> Tensor:
        """The tokens that a step chooses, one per row."""
        return torch.arange(len(self.rows), device=self.rig.device) + 10 * (step + 1)

    def batches(self) -> tuple[Batch, ...]:
        return following_steps(self.first.batch, self.num_steps)

    def step_alone(self, step: int) -> Batch:
        """The batch of one step, with tokens that the host knows."""
        if step == 0:
            return self.first.batch
        tokens = self.chosen(step - 1).tolist()
        work = [
            RowWork(table_row, [token], row.seq_len + step - 1, 1)
            for token, row, table_row in zip(tokens, self.rows, self.first.table_rows, strict=True)
        ]
        return assemble(work, self.rig.store)

    def attend(self, planned: PlannedBatch, step: int) -> Tensor:
        """Runs a step as a runner does."""
        planner = self.rig.planner
        current = planner.ensure(planned)
        planner.launch(current)
        spec = self.first.spec
        shape = (current.batch.num_tokens, spec.num_q_heads, spec.out_dim)
        out = torch.full(shape, torch.nan, dtype=self.rig.setting.dtype, device=self.rig.device)
        with torch.inference_mode(), current.in_stream_order():
            current.prepare()
            current.attend(0, to_device(self.inputs[step], self.rig.device), out)
        return out

    def _ran(self, outs: list[Tensor], batches: Sequence[Batch]) -> Ran:
        [pool] = self.rig.store.pools
        cache = [bits(pool.plane(plane.name)).clone() for plane in pool.spec.planes]
        return Ran(outs, [batch.tokens.tolist() for batch in batches], cache)

    def one_by_one(self) -> Ran:
        """Each step is planned when it runs."""
        outs, batches = [], []
        for step in range(self.num_steps):
            batches.append(self.step_alone(step))
            outs.append(self.attend(self.rig.planner.plan(batches[-1]), step))
        return self._ran(outs, batches)

    def at_once(self) -> Ran:
        """All steps are planned before the first runs."""
        plans = self.rig.planner.rollout(self.batches())
        return self._ran([self.run(plans, step) for step in range(self.num_steps)], [each.batch for each in plans])

    def run(self, plans: Sequence[PlannedBatch], step: int) -> Tensor:
        """Runs one step of a rollout, and gives what it chose to the next."""
        out = self.attend(plans[step], step)
        if step + 1 < len(plans):
            plans[step + 1].batch.fill(self.chosen(step))
        return out
