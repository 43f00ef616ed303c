"""The parts of Jinja that the template sandbox rests on, which Jinja does not document as an interface."""

from __future__ import annotations

import inspect

import pytest
from jinja2 import filters, nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from sightline.core.errors import RequestError
from sightline.text.templates import limits
from sightline.text.templates.chat_template import ChatTemplate
from sightline.text.templates.filters import TemplateNamespace
from sightline.text.templates.sandbox import (
    MeteredCodeGenerator,
    MeteredContext,
    TemplateEnvironment,
    _BoundedFormatter,
)
from support.pinned import check_range, check_signatures, overridden

ADVICE = (
    "The limits of sightline/text/templates on time and memory are compiled into templates by this. Adapt sandbox.py, "
    "run tests/text/templates, then change the bounds of jinja2 in pyproject.toml."
)
GENERATOR = {
    "write_commons": "",
    "blockvisit": "nodes, frame",
    **{f"visit_{node}": "node, frame" for node in ("For", "Concat", "List", "Dict", "Tuple", "Filter", "Getitem")},
}
COMMON = "name, value, args=None, kwargs=None, context=None, eval_ctx=None"
ENVIRONMENT = {
    "call_binop": "context, operator, left, right",
    "call_filter": COMMON,
    "call_test": COMMON,
    "is_safe_attribute": "obj, attr, value",
    "wrap_str_format": "value",
}
KNOWN_NODES = """
    Add And Assign AssignBlock BinExpr Block Break Call CallBlock Compare Concat CondExpr Const ContextReference
    Continue DerivedContextReference Dict Div EnvironmentAttribute EvalContextModifier Expr ExprStmt Extends
    ExtensionAttribute Filter FilterBlock FloorDiv For FromImport Getattr Getitem Helper If Import ImportedName
    Include InternalName Keyword List Literal Macro MarkSafe MarkSafeIfAutoescape Mod Mul NSRef Name Neg Node Not
    Operand Or Output OverlayScope Pair Pos Pow Scope ScopedEvalContextModifier Slice Stmt Sub Template TemplateData
    Test Tuple UnaryExpr With _FilterTestCommon
"""


def test_the_version_is_bounded() -> None:
    check_range("jinja2", ADVICE)


def test_the_methods_that_are_replaced_are_there() -> None:
    assert overridden(MeteredCodeGenerator, CodeGenerator) == set(GENERATOR), ADVICE
    check_signatures(CodeGenerator, GENERATOR | {"writeline": "x, node=None, extra=0", "write": "x"}, ADVICE)
    attributes = {"code_generator_class", "context_class", "intercepted_binops", "call"}
    assert overridden(TemplateEnvironment, ImmutableSandboxedEnvironment) == {*ENVIRONMENT, *attributes}, ADVICE
    check_signatures(ImmutableSandboxedEnvironment, ENVIRONMENT, ADVICE)
    assert overridden(MeteredContext, Context) == {"derived"}, ADVICE
    check_signatures(Context, {"derived": "locals=None"}, ADVICE)
    assert overridden(_BoundedFormatter, SandboxedFormatter) == {"convert_field", "format_field"}, ADVICE
    check_signatures(
        SandboxedFormatter, {"convert_field": "value, conversion", "format_field": "value, format_spec"}, ADVICE
    )
    check_signatures(Namespace, {"__setitem__": "name, value"}, ADVICE)
    assert issubclass(TemplateNamespace, Namespace)
    for name, parameters in (
        ("do_indent", ["s", "width", "first", "blank"]),
        ("do_round", ["value", "precision", "method"]),
        ("make_attrgetter", ["environment", "attribute", "postprocess", "default"]),
    ):
        assert list(inspect.signature(getattr(filters, name)).parameters) == parameters, ADVICE
    assert MAX_RANGE * limits.VALUE_OVERHEAD <= limits.MAX_VALUE, ADVICE


def test_every_kind_of_node_is_known() -> None:
    """A new kind of expression or loop would run without being counted."""

    def kinds(kind: type[nodes.Node]) -> set[str]:
        return {kind.__name__}.union(*map(kinds, kind.__subclasses__()))

    found = {name for name in kinds(nodes.Node) if not name.endswith("Extension")}
    assert found == set(KNOWN_NODES.split()), ADVICE


@pytest.mark.parametrize(
    ("source", "compiled"),
    [
        ("{% for x in a %}y{% endfor %}", "context.tick()"),
        ("{% for x in a if x %}y{% endfor %}", "(environment.call(context, environment.tick, context) and l_1_x)"),
        ("{% for x in a %}{% else %}y{% endfor %}", "context.tick()"),
        ("{% for x in a recursive %}{{ loop(x) }}{% endfor %}", "context.tick()"),
        ("{% if a %}y{% endif %}", "context.tick()"),
        ("{% macro m() %}y{% endmacro %}", "context.tick()"),
        ("{% call a() %}y{% endcall %}", "context.tick()"),
        ("{% filter upper %}y{% endfilter %}", "context.tick()"),
        ("{% set x %}y{% endset %}", "context.tick()"),
        ("{% with %}y{% endwith %}", "context.tick()"),
    ],
)
def test_each_body_is_ticked(source: str, compiled: str) -> None:
    generated = TemplateEnvironment().compile(source, raw=True)
    bodies, plain = generated.count(compiled), TemplateEnvironment().compile("y", raw=True).count(compiled)
    assert bodies > plain, f"{ADVICE} Compiled:\n{generated}"


@pytest.mark.parametrize(
    ("source", "compiled"),
    [
        ("{{ a ~ b }}", "context.concatenated(("),
        ("{{ [a] }}", "context.weighed(["),
        ("{{ {a: b} }}", "context.weighed({"),
        ("{{ (a, b) }}", "context.weighed(("),
        ("{{ a | upper }}", "context.weighed(t_1("),
        ("{{ a[1:] }}", "context.charged("),
        ("{{ a() }}", "environment.call(context, "),
        ("{{ a.b }}", "environment.getattr("),
        ("{{ a['b'] }}", "environment.getitem("),
        ("{{ a + b }}", "environment.call_binop(context, '+', "),
        ("{{ a * b }}", "environment.call_binop(context, '*', "),
        ("{{ a ** b }}", "environment.call_binop(context, '**', "),
        ("{{ a % b }}", "environment.call_binop(context, '%', "),
        ("{{ a }}", "environment.finalize(context, "),
        ("{{ 2 * 3 }}", "environment.call_binop(context, '*', 2, 3)"),
        ("{% macro m() %}y{% endmacro %}", "return concat("),
        ("{% set x %}y{% endset %}", "(concat("),
        ("{% filter upper %}y{% endfilter %}", "(concat("),
    ],
)
def test_whatever_makes_a_value_goes_through_the_context(source: str, compiled: str) -> None:
    generated = TemplateEnvironment().compile(source, raw=True)
    assert compiled in generated, f"{ADVICE} Compiled:\n{generated}"
    assert "    concat = context.concatenated\n" in generated, ADVICE


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('a' * 20000000) | length }}",
        "{{ 'a'.ljust(20000000) | length }}",
        "{{ ('%020000000d' % 1) | length }}",
        "{{ '{:>20000000}'.format(1) | length }}",
        "{{ ('ab' * 100).replace('a', 'x' * 200000) | length }}",
        "{{ ([0] * 20000000) | length }}",
    ],
)
def test_jinjas_own_sandbox_lets_a_value_grow_and_ours_does_not(source: str) -> None:
    """If Jinja comes to stop these, the reasons of ADR 31 should be looked at again."""
    assert int(ImmutableSandboxedEnvironment().from_string(source).render()) >= 20_000_000
    with pytest.raises(RequestError, match="refused"):
        ChatTemplate(source, None, None).render([{"role": "user", "content": "x"}])


def test_jinjas_own_sandbox_bounds_a_loop_and_not_a_loop_in_a_loop() -> None:
    loops = "{% for i in range(900) %}{% for j in range(900) %}{% set x = j %}{% endfor %}{% endfor %}done"
    assert ImmutableSandboxedEnvironment().from_string(loops).render() == "done"
    with pytest.raises(OverflowError):
        ImmutableSandboxedEnvironment().from_string("{{ range(many) }}").render(many=MAX_RANGE + 1)
