"""Backends were built before a coordinator that they need, so they kept the runner and looked the coordinator up in a
property at first use; whoever asked too early got None (SGLang PR 26012).

Here one function builds everything in a straight line, a backend's constructor is given one complete, frozen context,
and no attribute of anything that runs steps is created or replaced after construction.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import MISSING, FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.bindings import GroupBinding
from sightline.attention.contract import BackendContext, EntryCoordinator, StepLimits
from sightline.attention.groups import group_layers
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.sparse.hot_entries import HotEntries
from sightline.attention.spec import IndexSpec, LatentSpec, SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.pools import CacheLimits
from sightline.cache.store import CacheStore
from sightline.core.errors import ConfigError
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.hot_entries import fetch_entries
from sightline.runner.runtime import Runtime
from sightline.testing.simulator.simulation import simulate
from support import attention_cases as cases
from support.attention_cases import BACKENDS
from support.source_rules import ROOT, made_on_first_use, modules, violations
from support.tiny_models import random_prompts

MAY_CHANGE = {
    ("Planner", "num_rebuilt"),  # counters
    ("Planner", "num_plans"),
    ("Planner", "plan_seconds"),
    ("Runner", "num_replayed"),
    ("PlanMemory", "_block"),  # grows to what the largest step needs
    ("PlanMemory", "_used"),  # of the plan at hand
    ("PlanMemory", "_views"),
    ("PlanMemory", "epoch"),
    ("Activations", "_last"),  # the shapes of the last step
    ("Graphs", "buckets"),  # those that could be recorded, once, at the end of construction
    ("Workspace", "_sealed"),  # set once, at the end of construction
}
"""Attributes that are assigned again after construction, by class and name."""


def test_nothing_is_made_on_first_use() -> None:
    assert violations(made_on_first_use, "attention", "cache", "runner") == []


@pytest.mark.parametrize(
    "snippet",
    [
        "from functools import cached_property",
        "class A:\n  @functools.cached_property\n  def coordinator(self): ...",
        "class A:\n  @property\n  def c(self):\n    if self._c is None:\n      self._c = build()\n    return self._c",
        "class A:\n  def get(self):\n    if not self._c:\n      self._c = build()",
        "class A:\n  def get(self):\n    if self.ready and self._c is None:\n      with lock:\n        self._c = 1",
    ],
)
def test_something_made_on_first_use_would_be_found(snippet: str) -> None:
    assert len(made_on_first_use(ast.parse(snippet))) == 1


def test_counting_and_growing_are_not_making_on_first_use() -> None:
    allowed = """
class A:
  def step(self):
    if self.count == len(self.tokens):
      self.tokens = grown(self.tokens)
      self.count += 1
    self.last = self.limit is None
    if self.limit is None:
      return
"""
    assert made_on_first_use(ast.parse(allowed)) == []


def test_a_context_is_frozen_and_has_nothing_to_be_filled_in_later() -> None:
    for kind in (BackendContext, StepLimits, Runtime):
        assert all(field.default is MISSING and field.default_factory is MISSING for field in fields(kind)), kind
        assert not any("None" in str(hint) for hint in get_type_hints(kind).values()), kind
    context = StepLimits(1, 1, 1, (), 0)
    with pytest.raises(FrozenInstanceError):
        context.max_rows = 2  # type: ignore[misc]


def test_a_backend_is_built_from_its_context_and_from_nothing_else() -> None:
    taken = {
        backend.name: [argument.arg for argument in function.args.args]
        for _, module in modules("attention/backends")
        for backend in ast.walk(module)
        if isinstance(backend, ast.ClassDef) and backend.name.endswith("Backend")
        for function in backend.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
    }
    assert len(taken) == len(BUILT_IN)
    assert set(map(tuple, taken.values())) == {("self", "context")}


def test_attention_and_cache_know_nothing_of_who_builds_them() -> None:
    above = (
        "sightline.runner",
        "sightline.models",
        "sightline.layers",
        "sightline.engine.engine",
        "sightline.opening",
        "sightline.llm",
    )
    imported = [
        f"{path}: {name}"
        for path, module in modules("attention", "cache")
        for node in ast.walk(module)
        for name in _imports(node)
        if name.startswith(above)
    ]
    assert imported == []


def _imports(node: ast.AST) -> list[str]:
    match node:
        case ast.ImportFrom(module=str(name)):
            return [name]
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case _:
            return []


def crooked_lines(function: ast.FunctionDef) -> list[str]:
    """What keeps a function from being a straight line of constructions."""
    found = [
        f"line {node.lineno}: {type(node).__name__}"
        for node in ast.walk(function)
        if isinstance(node, (ast.If, ast.For, ast.While, ast.Try, ast.AugAssign, ast.NamedExpr, ast.Global))
    ]
    known = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
    made_here = set(_stored_names(function))
    for statement in _statements(function.body):
        loops = [node.target for node in ast.walk(statement) if isinstance(node, ast.comprehension)]
        inner = {name for target in loops for name in _stored_names(target)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.append(f"line {node.lineno}: an attribute is assigned")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in made_here - known - inner:
                found.append(f"line {node.lineno}: {node.id} is used before it is made")
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                names = set(_stored_names(target))
                found += [f"line {statement.lineno}: {name} is made twice" for name in sorted(names & known)]
                known |= names
    return found


def _stored_names(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """In order; what stands in a `with` counts as standing in the line."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


@pytest.mark.parametrize("name", ["build_runtime", "assemble_runtime", "select_backends"])
def test_construction_is_a_straight_line(name: str) -> None:
    [function] = [
        node
        for node in ast.parse((ROOT / "runner/build.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert crooked_lines(function) == []


@pytest.mark.parametrize(
    "body",
    [
        "backend = Backend(coordinator)\n  coordinator = Coordinator()",
        "if config.sparse:\n    coordinator = Coordinator()",
        "planner = Planner()\n  planner.runner = Runner(planner)",
        "planner = Planner()\n  planner = Graphs(planner)",
        "config = 3",
        "while config:\n    build(config)",
        "with memory():\n    backend = Backend(coordinator)\n  coordinator = Coordinator()",
    ],
)
def test_a_crooked_construction_would_be_found(body: str) -> None:
    [function] = ast.parse(f"def build(config):\n  {body}").body
    assert isinstance(function, ast.FunctionDef)
    assert len(crooked_lines(function)) == 1


def test_a_straight_construction_is_left_alone() -> None:
    [function] = ast.parse(
        "def build(c):\n  a = A(c)\n  with t():\n    b = [B(a, x) for x in a]\n  return C(a, b)"
    ).body
    assert isinstance(function, ast.FunctionDef)
    assert crooked_lines(function) == []


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[BackendContext[Any]]:
    """Every context that a backend is built from, in order. Each is complete when it is made."""
    made: list[BackendContext[Any]] = []
    check = BackendContext.__post_init__

    def note(context: BackendContext[Any]) -> None:
        check(context)
        assert context.coordinator.cache is context.cache
        assert context.coordinator.counts() == (0, 0), "nothing was read yet"
        made.append(context)

    monkeypatch.setattr(BackendContext, "__post_init__", note)
    return made


def build_llm(folder: Path) -> None:
    LLM(str(folder), skip_tokenizer_init=True, cache_tokens=512)


def build_drafter(folder: Path) -> None:
    guesses = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    LLM(str(folder), skip_tokenizer_init=True, cache_tokens=512, speculative_config=guesses)


def build_embedder(folder: Path) -> None:
    LLM(str(folder), skip_tokenizer_init=True, task="embed")


def build_kit(folder: Path) -> None:
    cases.bench([SoftmaxSpec(2, 1, 8, 1.0)])


def build_simulator(folder: Path) -> None:
    simulate(3, 4)


@pytest.mark.parametrize(
    "build", [build_llm, build_drafter, build_embedder, build_kit, build_simulator], ids=lambda build: build.__name__
)
def test_backends_get_their_coordinator_whoever_builds_them(
    build: Callable[[Path], None], gemma: Path, contexts: list[BackendContext[Any]]
) -> None:
    build(gemma)
    assert contexts
    assert all(isinstance(each.coordinator, EntryCoordinator) for each in contexts)


def test_every_site_that_makes_a_context_gives_it_a_coordinator() -> None:
    """Those of the server, of benchmarks and of tools too: they are all in the package."""
    names = [field.name for field in fields(BackendContext)]
    calls = [
        (path, node)
        for path, module in modules("")
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "BackendContext"
    ]
    assert len(calls) >= 3
    for path, call in calls:
        given = {*names[: len(call.args)], *[word.arg for word in call.keywords]}
        assert "coordinator" in given, f"{path}:{call.lineno}"


def test_a_configuration_without_its_coordinator_is_refused_at_start() -> None:
    groups = group_layers([LatentSpec(2, 8, 4, 6, 6, 1.0, top_k=2)], indexers={0: IndexSpec(2, 4, top_k=2)})
    specs = [group.cache_spec(torch.float32, with_hot_entries=True) for group in groups]
    store = CacheStore(specs, CacheLimits(5, 4, 2, 16), torch.device("cpu"))
    on_host, on_device = store.groups
    limits, workspace = StepLimits(2, 8, 16, (MAIN_LANE,), 0), Workspace(torch.device("cpu"), 1 << 26)
    made = HotEntries(on_host, 2, limits, 2, fetch_entries)

    def context(coordinator: EntryCoordinator) -> BackendContext[Any]:
        return BackendContext(
            "group0",
            groups[0].spec,
            on_host,
            workspace,
            limits,
            torch.float32,
            torch.device("cpu"),
            inline_launcher(),
            coordinator,
        )

    backend = TorchLatentBackend(context(made))
    GroupBinding.alone(groups[0], on_host, backend, TorchLatentBackend.capabilities[0])
    with pytest.raises(ConfigError, match="expected a coordinator with a buffer on the device for group0"):
        ResidentEntries(on_host)
    with pytest.raises(ConfigError, match="use ResidentEntries"):
        HotEntries(on_device, 2, limits, 2, fetch_entries)
    with pytest.raises(ConfigError, match="expected a buffer of at least 2 entries"):
        HotEntries(on_host, 2, limits, 1, fetch_entries)
    with pytest.raises(ConfigError, match="expected the coordinator of group0's own cache"):
        context(ResidentEntries(on_device))
    with pytest.raises(ConfigError, match="expected backends that read entries in host memory"):
        GroupBinding.alone(groups[0], on_host, backend, replace(TorchLatentBackend.capabilities[0], hot_entries=False))


def parts(llm: LLM) -> Iterator[object]:
    """Everything that runs steps."""
    runtime = llm.engine.runtime
    yield from (llm.engine, runtime, runtime.runner, runtime.planner, runtime.workspace, runtime.store)
    yield from (runtime.runner._model, *runtime.runner._activations.values())
    yield from (part.backend for binding in runtime.bindings for part in binding.parts)
    yield from runtime.coordinators
    yield from runtime.planner._memory.values()
    for pool in runtime.store.pools:
        yield from (pool, pool.allocator, pool.table)


def attributes(llm: LLM) -> dict[tuple[int, str, str], int]:
    """The identity of every attribute, by object, class and name."""
    return {
        (index, type(part).__name__, name): id(value)
        for index, part in enumerate(parts(llm))
        for name, value in vars(part).items()
    }


def changed(before: dict[tuple[int, str, str], int], after: dict[tuple[int, str, str], int]) -> set[tuple[str, str]]:
    return {key[1:] for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def test_no_attribute_is_created_or_replaced_once_the_engine_is_built(gemma: Path) -> None:
    for backend in BACKENDS:
        llm = LLM(str(gemma), skip_tokenizer_init=True, cache_tokens=512, attention_backend=backend)
        before = attributes(llm)
        assert len(before) > 60
        prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts([3, 40, 1])]
        llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))  # type: ignore[arg-type]
        assert changed(before, attributes(llm)) <= MAY_CHANGE


def test_an_attribute_that_is_bound_late_would_be_noticed(gemma: Path) -> None:
    llm = LLM(str(gemma), skip_tokenizer_init=True, cache_tokens=512)
    before = attributes(llm)
    backend = llm.engine.runtime.bindings[0].parts[0].backend
    backend.coordinator = object()  # type: ignore[attr-defined]
    llm.engine.runtime.planner._places = {}
    assert changed(before, attributes(llm)) == {("NumbaBackend", "coordinator"), ("Planner", "_places")}
