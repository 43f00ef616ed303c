"""Rules over a syntax tree. Each gives the lines that break it, in order, so that a rule can be shown to fail."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import sightline

ROOT = Path(sightline.__file__).parent
Rule = Callable[[ast.Module], list[int]]


def modules(*under: str) -> Iterator[tuple[str, ast.Module]]:
    """Every module below the named folders, or below the package, with its path."""
    for folder in under or (".",):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), _parsed(path)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def violations(rule: Rule, *under: str, excepted: Collection[str] = ()) -> list[str]:
    """Where the source breaks a rule."""
    return [
        f"{path}:{line}" for path, module in modules(*under) if path not in excepted for line in sorted(rule(module))
    ]


def probes(module: ast.Module) -> list[int]:
    """`hasattr`, `setattr`, and `getattr` with something to fall back on."""
    return [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (
            node.func.id in ("hasattr", "setattr")
            or (node.func.id == "getattr" and len(node.args) + len(node.keywords) > 2)
        )
    ]


def class_checks(module: ast.Module) -> list[int]:
    """Asking an object whether it is a certain backend or plan, in any of the ways that Python has."""
    return [
        asked.lineno
        for node in ast.walk(module)
        for asked in _classes_asked_for(node)
        if any(name.endswith(("Backend", "Plan")) for name in _names(asked))
    ]


def _classes_asked_for(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
            return [classes]
        case ast.match_case(pattern=pattern):
            return [part.cls for part in ast.walk(pattern) if isinstance(part, ast.MatchClass)]
        case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=classes):
            return classes
        case _:
            return []


def _names(expression: ast.expr) -> list[str]:
    """Every class that an expression names: alone, in a tuple, or joined by |."""
    return [
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(expression)
        if isinstance(node, (ast.Name, ast.Attribute))
    ]


def comparisons_with_names(names: Collection[str]) -> Rule:
    """Comparing anything with a backend's name, and a backend's name or the user's wish with anything but None."""

    def rule(module: ast.Module) -> list[int]:
        lines = []
        for node in ast.walk(module):
            match node:
                case ast.Compare(left=left, comparators=others):
                    sides = [left, *others]
                    if any(_mentions(side, names) for side in sides) or _compares_a_backend(sides):
                        lines.append(node.lineno)
                case ast.match_case(pattern=pattern):
                    values = [part.value for part in ast.walk(pattern) if isinstance(part, ast.MatchValue)]
                    lines += [value.lineno for value in values if _mentions(value, names)]
                case ast.Match(subject=subject) if _is_backends_name(subject):
                    lines.append(node.lineno)
        return lines

    return rule


def _mentions(side: ast.expr, names: Collection[str]) -> bool:
    """True where the expression is one of the names, or a collection with one of them in it."""
    parts = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
    return any(isinstance(part, ast.Constant) and part.value in names for part in parts)


def _compares_a_backend(sides: list[ast.expr]) -> bool:
    others = [side for side in sides if not (isinstance(side, ast.Constant) and side.value is None)]
    return len(others) > 1 and any(_is_backends_name(side) for side in sides)


def _is_backends_name(side: ast.expr) -> bool:
    text = ast.unparse(side)
    owner = text.removesuffix(".name").rpartition(".")[2] if text.endswith(".name") else None
    return owner in ("backend", "candidate") or text.rpartition(".")[2] == "attention_backend"


def half_built_attributes(module: ast.Module) -> list[int]:
    """Attributes of self that are used, and that `__init__` does not assign in every configuration.

    What a class declares in its body counts as there: fields of a dataclass, class variables, methods.
    """
    lines = []
    for owner in (node for node in ast.walk(module) if isinstance(node, ast.ClassDef)):
        whole = {name for statement in owner.body for name in _declared(statement)}
        lines += [
            node.lineno
            for method in owner.body
            if isinstance(method, ast.FunctionDef)
            for node in ast.walk(method)
            if _is_own(node) and node.attr not in whole
        ]
    return lines


def _declared(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name="__init__", body=body):
            always = [line for line in body if isinstance(line, (ast.Assign, ast.AnnAssign))]
            return [node.attr for line in always for node in ast.walk(line) if _is_own(node, ast.Store)]
        case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case _:
            return []


def _is_own(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> TypeGuard[ast.Attribute]:
    """True for an attribute of self."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
    )


def made_on_first_use(module: ast.Module) -> list[int]:
    """What is created when it is first asked for: cached properties, and attributes filled in where they are None."""
    lines = []
    for node in ast.walk(module):
        match node:
            case ast.Attribute(attr="cached_property") | ast.Name(id="cached_property"):
                lines.append(node.lineno)
            case ast.alias(name="cached_property"):
                lines.append(node.lineno)
            case ast.If(test=test, body=body):
                asked = {name for each in ast.walk(test) for name in _asked_whether_there(each)}
                lines += [
                    each.lineno
                    for statement in body
                    for each in ast.walk(statement)
                    if _is_own(each, ast.Store) and each.attr in asked
                ]
    return lines


def _asked_whether_there(node: ast.AST) -> list[str]:
    """The attribute of self that `self.x is None` or `not self.x` asks for."""
    match node:
        case ast.Compare(left=asked, ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            return [asked.attr] if _is_own(asked) else []
        case ast.UnaryOp(op=ast.Not(), operand=asked):
            return [asked.attr] if _is_own(asked) else []
        case _:
            return []


KEPT_BY_CACHES = frozenset({"CompiledKernel", "Processor", "str"})
"""What a cache may keep: compiled kernels, the processor that they are for, and text, which are the same for all."""
ALLOCATORS = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


def memory_of_modules(module: ast.Module) -> list[int]:
    """Memory that belongs to nobody: tensors made while a module is imported, globals, and results kept by a cache."""
    lines = [node.lineno for node in ast.walk(module) if isinstance(node, ast.Global)]
    for statement in module.body:
        lines += [node.lineno for node in _run_at_import(statement) if _allocates(node)]
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            is_allowed = node.returns is not None and ast.unparse(node.returns) in KEPT_BY_CACHES
            caches = [each for each in node.decorator_list if "cache" in ast.unparse(each).split("(")[0]]
            lines += [] if is_allowed else [each.lineno for each in caches]
    return lines


def _run_at_import(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes that run with the module: not those inside of functions."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            waiting += ast.iter_child_nodes(node)


def _allocates(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in ALLOCATORS}
