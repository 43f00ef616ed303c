"""A step of one recurrent group with chosen slots: what a backend makes of it, and what the oracle does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from sightline.attention.buffers import PlanMemory
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    ConvolutionInputs,
    ConvWeights,
    RecurrentInputs,
    StepLimits,
    StepView,
)
from sightline.attention.oracle.recurrent import convolve_row, empty_state, empty_tail, recur_row
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import ConvolutionSpec, RecurrentSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.pools import GroupCache
from sightline.cache.states import STATES, StatePool
from sightline.core.batch import Batch, RowWork, StepWork
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.cpu.record import Launcher

CPU = torch.device("cpu")
MAX_ROWS, MAX_TOKENS = 32, 1024
LAYERS = 2


@dataclass(frozen=True)
class StateCase:
    """One row of a step."""

    length: int
    """New tokens."""
    kept: frozenset[int] = frozenset()
    """Tokens behind which the state is kept, beside the last one."""
    begins: bool = False
    """True if the row has no context, and begins with an empty state."""


@dataclass(eq=False)
class ChosenSlots:
    """The states of a batch: the slots are chosen by the test."""

    read: list[int]
    written: list[int]
    key: str = STATES
    table_id: int = 7
    num_table_rows: int = 64

    def versions(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(0 for _ in rows)

    def slots_of(self, rows: Tensor, entries: Tensor) -> Tensor:
        raise NotImplementedError

    def slots_to_read(self, rows: Sequence[int], contexts: Sequence[int]) -> list[int]:
        del rows, contexts
        return self.read

    def slots_to_write(
        self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int], candidates: Sequence[int]
    ) -> list[int]:
        del rows, firsts, counts, candidates
        return self.written


@dataclass(eq=False)
class StateRig:
    """A backend with its states: all of them NaN, except slot 0 and those that a step reads."""

    backend: type[AttentionBackend[Any, Any]]
    spec: RecurrentSpec | ConvolutionSpec
    dtype: torch.dtype = torch.float32
    num_slots: int = 400
    device: torch.device = CPU
    launcher: Launcher = field(default_factory=inline_launcher)
    pool: StatePool = field(init=False)
    made: AttentionBackend[Any, Any] = field(init=False)
    memory: PlanMemory = field(init=False)

    def __post_init__(self) -> None:
        self.pool = StatePool(self.spec.states(LAYERS, torch.float32), self.num_slots, self.device)
        self.pool.fill(range(1, self.num_slots), torch.nan)
        workspace = Workspace(self.device, 1 << 34, poison=True)
        limits = StepLimits(MAX_ROWS, MAX_TOKENS, MAX_TOKENS, (MAIN_LANE,), 0)
        cache = GroupCache("group0", {}, self.pool)
        self.made = self.backend(
            BackendContext(
                "group0",
                self.spec,
                cache,
                workspace,
                limits,
                self.dtype,
                self.device,
                self.launcher,
                ResidentEntries(cache),
            )
        )
        self.memory = PlanMemory(workspace.elastic("test", "plans", MAIN_LANE), poison=True)
        workspace.seal()

    def plan(self, batch: Batch, policy: CachePolicy) -> AttentionPlan[Any]:
        self.memory.begin()
        return self.made.plan(StepView(batch, policy, MAIN_LANE, frozenset()), self.memory.part("group0"))


@dataclass(eq=False)
class StateStep:
    """Rows over slots in random order, with a state for each row that has a context."""

    rig: StateRig
    rows: Sequence[StateCase]
    seed: int = 0
    padding: tuple[int, int] = (0, 0)
    """Rows and tokens of padding."""
    transient: bool = False
    slots: ChosenSlots = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        free = iter((torch.randperm(self.rig.num_slots - 1, generator=generator) + 1).tolist())
        begins = [row.begins or self.transient for row in self.rows]
        read = [0 if begin else next(free) for begin in begins]
        written = [
            next(free) if token in row.kept or token == row.length - 1 else 0
            for row in self.rows
            for token in range(row.length)
        ]
        self.slots = ChosenSlots(read, written)
        for plane in self.rig.pool.spec.planes:
            values = self.rig.pool.plane(plane.name)
            for slot in filter(None, read):
                values[:, slot] = torch.randn(LAYERS, *plane.shape, generator=generator).to(values.device)

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows) + self.padding[1]

    def batch(self) -> Batch:
        work = [
            RowWork(index + 1, [1] * row.length, 0 if row.begins or self.transient else 3, int(row.length > 0))
            for index, row in enumerate(self.rows)
        ]
        batch = Batch(StepWork.of(work), () if self.transient else (self.slots,), self.rig.device)
        if any(self.padding):
            batch = batch.pad(len(self.rows) + self.padding[0], self.num_tokens)
        return batch

    def plan(self) -> AttentionPlan[Any]:
        plan = self.rig.plan(self.batch(), CachePolicy.TRANSIENT if self.transient else CachePolicy.PAGED)
        plan.prepare()
        return plan

    def run(self, inputs: RecurrentInputs | ConvolutionInputs, layer: int = 1) -> Tensor:
        """The output, which is NaN where nothing was written."""
        spec = self.rig.spec
        shape, device = (self.num_tokens, spec.num_q_heads, spec.out_dim), self.rig.device
        out = torch.full(shape, torch.nan, dtype=self.rig.dtype, device=device)
        assert self.plan().run(layer, on_device(inputs, device), out) is None
        return out.cpu()


def on_device(inputs: Any, device: torch.device) -> Any:
    """The inputs on another device."""

    def moved(value: Any) -> Any:
        if isinstance(value, ConvWeights):
            return ConvWeights(moved(value.weight), moved(value.bias))
        return None if value is None else value.to(device)

    return replace(inputs, **{each.name: moved(getattr(inputs, each.name)) for each in fields(inputs)})


@dataclass(frozen=True, eq=False)
class ExpectedStep:
    """What the oracle gives for a step."""

    out: Tensor
    """[num_tokens, heads, dim]; NaN for padding."""
    kept: dict[int, dict[str, Tensor]]
    """For each slot that is written, the planes' contents."""


def expected(step: StateStep, inputs: Any, layer: int = 1) -> ExpectedStep:
    """Computes every row of a step by the oracle, from the states in the rig."""
    spec, pool = step.rig.spec, step.rig.pool
    out = torch.full((step.num_tokens, spec.num_q_heads, spec.out_dim), torch.nan)
    kept: dict[int, dict[str, Tensor]] = {}
    first = 0
    for row, read in zip(step.rows, step.slots.read, strict=True):
        tokens = slice(first, first + row.length)
        first += row.length
        found = _row(spec, inputs.part(tokens), pool, layer, read)
        out[tokens] = found.pop("out")
        for token in range(row.length):
            slot = step.slots.written[tokens.start + token]
            if slot and not step.transient:
                kept[slot] = {name: planes[token] for name, planes in found.items()}
    return ExpectedStep(out, kept)


def _row(
    spec: RecurrentSpec | ConvolutionSpec, inputs: Any, pool: StatePool, layer: int, slot: int
) -> dict[str, Tensor]:
    names = [plane.name for plane in pool.spec.planes]
    planes = {name: pool.plane(name)[layer, slot].cpu() for name in names}
    if names == ["tail"]:
        found = convolve_row(inputs.x, inputs.conv, planes["tail"] if slot else empty_tail(spec))
        return {"out": found.out.unsqueeze(1), "tail": found.tails}
    assert isinstance(spec, RecurrentSpec)
    state = planes["state"] if slot else empty_state(spec)
    tail = None if "tail" not in names else planes["tail"] if slot else empty_tail(spec)
    row = recur_row(spec, inputs, state, tail)
    whole = {"out": row.out, "state": row.states}
    return whole if row.tails is None else {**whole, "tail": row.tails}


def assert_step(step: StateStep, inputs: Any, tolerance: float, layer: int = 1) -> None:
    """The backend's output and states are the oracle's, and no other slot was touched."""
    pool = step.rig.pool
    answer = expected(step, inputs, layer)
    before = {plane.name: pool.plane(plane.name).clone() for plane in pool.spec.planes}
    out = step.run(inputs, layer)
    torch.testing.assert_close(out.float(), answer.out, atol=tolerance, rtol=tolerance, equal_nan=True)
    for name, plane in before.items():
        for slot, planes in answer.kept.items():
            plane[layer, slot] = planes[name].to(plane.device)
        torch.testing.assert_close(pool.plane(name), plane, atol=tolerance, rtol=tolerance, equal_nan=True)
        assert not pool.plane(name)[:, 0].any()
