"""A backend told its parent to skip the scratch memory, and the parent skipped the wrappers that its methods use too;
putting that back left two scratch buffers, parent's and child's, and a method that reads an attribute which some
configurations never create (SGLang PR 25488).

Here no backend has another as its parent, every attribute that a method uses is assigned in `__init__` outside of any
branch, and all scratch memory is leased by name from one arena, once, before the first step.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    SoftmaxInputs,
    StepView,
)
from sightline.attention.kinds import Feature
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane, LeaseEntry, Workspace
from sightline.core.batch import CAUSAL, FULL, MaskKind, RowMask
from sightline.core.config import EngineConfig
from sightline.core.errors import PlanError
from sightline.kernels.cpu.program import inline_launcher
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases
from support.attention_cases import BACKENDS, CPU
from support.source_rules import half_built_attributes, memory_of_modules, modules, violations
from support.tiny_models import load_runtime

PLAIN = SoftmaxSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, scale=0.35)
WINDOWED = replace(PLAIN, window=3)
SPECS = [
    replace(PLAIN, window=window, softcap=softcap, sinks=sinks)
    for window, softcap, sinks in itertools.product([None, 3], [None, 2.0], [False, True])
]
LANES = [(MAIN_LANE,), (MAIN_LANE, Lane(1))]
TREE = RowMask(MaskKind.TREE, torch.tensor([[True, False, False], [True, True, False], [True, False, True]]))
ROWS = [Row(5, 3, CAUSAL), Row(0, 4, FULL), Row(2, 3, TREE, (2, 3, 3)), Row(9, 1)]

HALF_BUILT = {
    "created by a branch": "def __init__(self, c):\n  if c.x:\n    self._wrapper = 1\ndef plan(self): self._wrapper",
    "created by a loop": "def __init__(self, c):\n  for x in c:\n    self._wrapper = 1\ndef plan(self): self._wrapper",
    "created by another method": "def start(self):\n  self._wrapper = 1",
    "left to a parent": "def __init__(self, c):\n  super().__init__(c)\ndef plan(self): self._wrapper",
    "read to assign another": "def __init__(self, c):\n  self._copy = self._wrapper",
}


def test_every_attribute_that_a_backend_or_a_plan_uses_is_there_in_every_configuration() -> None:
    assert violations(half_built_attributes, "attention/backends") == []


@pytest.mark.parametrize("body", HALF_BUILT.values(), ids=HALF_BUILT.keys())
def test_a_half_built_class_would_be_found(body: str) -> None:
    indented = "\n".join(f"  {line}" for line in body.splitlines())
    assert len(set(half_built_attributes(ast.parse(f"class Child(Parent):\n{indented}")))) >= 1


def test_a_class_that_assigns_what_it_uses_and_a_dataclass_are_whole() -> None:
    whole = """
class Backend:
  rows: int
  limit = 3
  def __init__(self, c):
    self._scratch = {lane: c.lease(lane) for lane in c.lanes} if c.lanes else {}
  def plan(self):
    return self._scratch, self.rows, self.limit, self._helper()
  def _helper(self): ...
"""
    assert half_built_attributes(ast.parse(whole)) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lanes", LANES, ids=["one lane", "two lanes"])
def test_a_backend_has_the_same_attributes_in_every_configuration_and_serves_each(
    backend: str, lanes: tuple[Lane, ...]
) -> None:
    attributes = set()
    for spec in SPECS:
        bench = cases.bench([spec], backend, lanes=lanes, max_seq_len=64, max_rows=16, page_size=4)
        attributes.add(frozenset(vars(bench.planner._bindings[0].parts[0].backend)))
        fresh = [replace(row, context_len=0, positions=None if row.mask is not TREE else (0, 1, 1)) for row in ROWS]
        for lane, needs in itertools.product(lanes, [frozenset[Feature](), frozenset({Feature.LSE})]):
            for step in (Step(bench, ROWS), Step(bench, fresh, transient=True)):
                answer, expected = step.run(needs, lane), step.expected()
                torch.testing.assert_close(answer.out, expected.out, atol=3e-5, rtol=3e-5)
                assert (answer.lse is not None) == bool(needs)
                for table_row in step.table_rows:
                    if table_row:
                        bench.store.close_row(table_row)
    assert len(attributes) == 1


def test_no_backend_and_no_plan_inherits_from_another() -> None:
    bases = {
        ast.unparse(base).split("[")[0]
        for _, module in modules("attention/backends")
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Backend", "Plan"))
        for base in node.bases
    }
    assert bases == {"AttentionBackend", "AttentionPlan"}


def test_no_module_of_backends_or_kernels_owns_memory() -> None:
    assert violations(memory_of_modules, "attention/backends", "kernels") == []


@pytest.mark.parametrize(
    "snippet",
    [
        "buffer = torch.empty(1024)",
        "buffers = {'zero': torch.zeros(4)}",
        "class Backend:\n  workspace = torch.full((4,), 0)",
        "def get():\n  global workspace\n  workspace = 1",
        "@functools.cache\ndef workspace(size): ...",
        "@lru_cache(maxsize=1)\ndef workspace(size): ...",
        "if cuda:\n  buffer = torch.empty(1)",
    ],
)
def test_memory_of_a_module_would_be_found(snippet: str) -> None:
    assert len(memory_of_modules(ast.parse(snippet))) == 1


def test_memory_that_a_function_makes_for_its_caller_is_allowed() -> None:
    assert memory_of_modules(ast.parse("def zeros(n):\n  return torch.zeros(n)\nDTYPE = torch.float32")) == []


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(tensors_in, value.values()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from itertools.chain.from_iterable(map(tensors_in, value))


def test_no_module_holds_a_tensor_after_steps_have_run() -> None:
    for backend in BACKENDS:
        Step(cases.bench([PLAIN, WINDOWED], backend), ROWS).run()
    held = [
        f"{name}.{attribute}"
        for name, module in sys.modules.items()
        if name.startswith(("sightline.attention", "sightline.kernels"))
        for attribute, value in vars(module).items()
        if any(True for _ in tensors_in(value))
    ]
    assert held == []
    assert list(tensors_in({"a": [torch.zeros(1)]})) != [], "one would be found"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lanes", LANES, ids=["one lane", "two lanes"])
def test_every_lease_of_every_group_is_in_the_ledger_once(backend: str, lanes: tuple[Lane, ...]) -> None:
    workspace = cases.bench([PLAIN, WINDOWED, PLAIN], backend, lanes=lanes).workspace
    entries = workspace.ledger()
    keys = [(entry.owner, entry.name, entry.lane) for entry in entries]
    assert len(set(keys)) == len(keys)
    assert {entry.owner for entry in entries} <= {"group0", "group1", "planner"}
    assert {entry.lane for entry in entries} <= set(lanes)
    assert workspace.num_bytes == sum(entry.num_bytes for entry in entries)


def leased(*specs: SoftmaxSpec, lanes: tuple[Lane, ...] = (MAIN_LANE,)) -> int:
    entries = cases.bench(specs, lanes=lanes).workspace.ledger()
    return sum(entry.num_bytes for entry in entries if entry.owner != "planner")


def test_a_second_group_and_a_second_lane_take_their_own_and_no_more() -> None:
    first, second = leased(PLAIN), leased(WINDOWED)
    assert first > 0
    assert second > 0
    assert leased(PLAIN, WINDOWED) == first + second
    assert leased(PLAIN, WINDOWED, PLAIN) == first + second, "a layer more in a group takes no scratch memory"
    assert leased(PLAIN, lanes=LANES[1]) == 2 * first


def context_of(workspace: Workspace) -> BackendContext[SoftmaxSpec]:
    """A context that nobody has built a backend from."""
    bench = cases.bench([PLAIN])
    limits, cache = bench.planner._limits, bench.store.groups[0]
    return BackendContext(
        "group0", PLAIN, cache, workspace, limits, torch.float32, CPU, inline_launcher(), ResidentEntries(cache)
    )


def test_a_parent_and_a_child_cannot_both_lease_the_groups_memory() -> None:
    workspace = Workspace(CPU, 1 << 30)
    TorchBackend(context_of(workspace))
    before = workspace.ledger()
    with pytest.raises(ValueError, match="was taken already"):
        TorchBackend(context_of(workspace))
    assert workspace.ledger() == before


class LateBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Takes its memory when it first needs it."""

    capabilities: ClassVar[tuple[Capability, ...]] = TorchBackend.capabilities

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._workspace = context.workspace

    def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[SoftmaxInputs]:
        self._workspace.lease("group0", "late", step.lane, (4,), torch.float32)
        raise AssertionError("a lease was given out during a step")


def test_a_backend_that_leases_during_a_step_is_stopped() -> None:
    subject = replace(cases.subject_for("torch", torch.float32), backend=LateBackend)
    step = Step(AttentionRig(subject, [PLAIN], RigSetting()), [Row(0, 1)])
    with pytest.raises(PlanError, match=r"before the first step, got group0\.late"):
        step.plan()


def test_a_built_runtime_has_one_sealed_arena_with_every_lease_in_it(gemma: Path) -> None:
    runtime = load_runtime(
        gemma,
        EngineConfig(
            cache_tokens=256, max_num_batched_tokens=64, attention_backend="torch", decode_attention_backend="numba"
        ),
    )
    entries = runtime.workspace.ledger()
    backends = {f"group{number}.{name}" for number in (0, 1) for name in ("torch", "numba")}
    assert {entry.owner for entry in entries} == backends | {"planner", "activations"}
    assert len({(entry.owner, entry.name, entry.lane) for entry in entries}) == len(entries)
    assert runtime.workspace.num_bytes == sum(entry.num_bytes for entry in entries)
    assert LeaseEntry("group0.torch", "k", MAIN_LANE, entries[0].num_bytes) == entries[0]
    with pytest.raises(PlanError, match="before the first step"):
        runtime.workspace.lease("group2", "more", MAIN_LANE, (1,), torch.float32)
