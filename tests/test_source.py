"""Rules of the source that no linter holds: no probing, no hidden globals, files and functions that can be read."""

from __future__ import annotations

import ast

import pytest

from sightline.attention.backends.registry import BUILT_IN
from support.source_rules import (
    ROOT,
    Rule,
    class_checks,
    comparisons_with_names,
    modules,
    probes,
    violations,
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_USUAL_FUNCTION_LINES = 40
MAX_KERNEL_LINES = 130
REGISTRY = "attention/backends/registry.py"
compares_names = comparisons_with_names({candidate.name for candidate in BUILT_IN})


def lines(rule: Rule, snippet: str) -> list[int]:
    return rule(ast.parse(snippet))


def test_nothing_is_probed_for_attributes() -> None:
    assert violations(probes) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "hasattr(backend, 'init_mha_chunk_metadata')",
        "getattr(backend, 'plan', None)",
        "init = getattr(backend, 'plan', default)",
        "setattr(batch, 'planned', True)",
    ],
)
def test_a_probe_would_be_found(snippet: str) -> None:
    assert lines(probes, f"x = 1\n{snippet}") == [2]


def test_reading_an_attribute_by_a_name_that_must_be_there_is_no_probe() -> None:
    assert lines(probes, "getattr(params, name)\nself.getattr(a, b, c)") == []


def test_nothing_asks_an_object_which_backend_or_plan_it_is() -> None:
    assert violations(class_checks, excepted=[REGISTRY]) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "isinstance(backend, TorchBackend)",
        "isinstance(backend, (str, torch_backend.TorchBackend))",
        "isinstance(plan, AttentionPlan | None)",
        "issubclass(loaded, AttentionBackend)",
        "type(plan) is _TorchPlan",
        "type(plan) in (A, _TorchPlan)",
        "match plan:\n  case AttentionPlan(): pass",
        "match plan:\n  case (int() | backends.TorchBackend(pool=p)): pass",
    ],
)
def test_asking_for_a_backend_or_a_plan_by_class_would_be_found(snippet: str) -> None:
    assert len(lines(class_checks, snippet)) == 1


def test_asking_whether_a_batch_is_planned_is_allowed() -> None:
    assert lines(class_checks, "isinstance(work, PlannedBatch)\nmatch work:\n  case PlannedBatch(): pass") == []


def test_nothing_compares_a_backends_name() -> None:
    assert violations(compares_names, excepted=[REGISTRY]) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "name == 'torch'",
        "'reference' != self.kind",
        "name in ('flash', 'torch')",
        "name not in {'reference'}",
        "name is 'torch'",
        "selection.candidate.name == wanted",
        "wanted in self.backend.name",
        "candidate.name in fast",
        "config.attention_backend == preferred",
        "attention_backend in names",
        "match name:\n  case 'torch': pass",
        "match config.attention_backend:\n  case other: pass",
    ],
)
def test_comparing_a_backends_name_would_be_found(snippet: str) -> None:
    assert len(lines(compares_names, snippet)) == 1


def test_asking_whether_a_backend_was_asked_for_is_allowed() -> None:
    allowed = (
        "config.attention_backend is None\nNone is not attention_backend\nlayer.name == other\nx == 'torch.float32'"
    )
    assert lines(compares_names, allowed) == []


def test_no_function_rebinds_a_global() -> None:
    rebound = [
        f"{path}:{node.lineno}"
        for path, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Global)
    ]
    assert rebound == []


def is_kernel(node: ast.FunctionDef) -> bool:
    """Decorated with `triton.jit`."""
    return any("triton.jit" in ast.unparse(each) for each in node.decorator_list)


def test_files_and_functions_stay_readable() -> None:
    functions = [node for _, module in modules() for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    # Kernels have no objects: each number that they are given is a parameter, and only their bodies count.
    kernels = [(node.end_lineno or 0) - node.body[0].lineno + 1 for node in functions if is_kernel(node)]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions if not is_kernel(node))
    assert max(kernels) <= MAX_KERNEL_LINES
    assert lengths[-1] <= MAX_FUNCTION_LINES
    assert lengths[int(len(lengths) * 0.95)] <= MAX_USUAL_FUNCTION_LINES
    assert max(len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")) <= MAX_FILE_LINES


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_module_says_what_it_owns() -> None:
    assert [path for path, module in modules() if not ast.get_docstring(module)] == []
