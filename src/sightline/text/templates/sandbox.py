"""The sandbox in which a model's chat template is compiled and run.

Compiles checks into each loop, macro and expression of the template, so that no part of it runs or grows without being
counted. Does not know messages, nor the sizes of the limits. ADR 31 says why Jinja's own sandbox is not enough.

    template -- parser --> syntax tree -- MeteredCodeGenerator --> Python that calls MeteredContext

Jinja does not document its code generator as an interface. pyproject.toml bounds its version, and
`tests/text/templates/test_jinja_interface.py` names everything that is used here.
"""

# ruff: noqa: N802 - Jinja names its visitors after its nodes

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_context
from markupsafe import Markup

from sightline.text.templates import limits
from sightline.text.templates.filters import TEMPLATE_GLOBALS, template_filters


class MeteredContext(Context):
    """The variables of one rendering, and its meter. Compiled templates call the methods below."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.meter = limits.RenderMeter(limits.RENDER_SECONDS)

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        assert isinstance(context, MeteredContext)
        context.meter = self.meter
        return context

    def charged(self, value: Any) -> Any:
        """Counts a new value that holds no more than an existing one."""
        self.meter.charge(limits.own_size(value))
        return value

    def weighed(self, value: Any) -> Any:
        """Checks and counts a new value that was made from others."""
        limits.require_bounded(value)
        return self.charged(value)

    def concatenated(self, pieces: Iterable[Any]) -> str:
        """The result of `~`, or the output of a macro or block."""
        return str(self.charged(limits.joined("", map(limits.text_of, pieces))))

    def tick(self) -> bool:
        """Returns True. Raises `RequestError` after the deadline."""
        self.meter.tick()
        return True


def _metered(context: Context) -> MeteredContext:
    assert isinstance(context, MeteredContext)
    return context


class MeteredCodeGenerator(CodeGenerator):
    """Jinja's compiler, with a call of the context in every loop and around everything that makes a value."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("concat = context.concatenated")

    def blockvisit(self, body: Iterable[nodes.Node], frame: Frame) -> None:
        """Compiles the body of a loop, macro, branch or block."""
        self.writeline("context.tick()")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [nodes.ContextReference()], [], None, None)
            node.test = nodes.And(tick, node.test, lineno=node.test.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.concatenated((")
        for piece in node.nodes:
            self.visit(piece, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._around("weighed", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._around("weighed", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._around("weighed", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:
        self._around("weighed", super().visit_Filter, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._around("charged", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _around(self, method: str, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write(f"context.{method}(")
        visit(node, frame)
        self.write(")")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which every value is counted and only listed methods may be called."""

    code_generator_class = MeteredCodeGenerator
    context_class = MeteredContext
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_written,
            # The optimizer would compute constants when the template is compiled, where nothing is counted.
            optimized=False,
        )
        self.filters = template_filters()
        self.globals = dict(TEMPLATE_GLOBALS)

    def tick(self, context: Context) -> bool:
        return _metered(context).tick()

    def call(self, context: Context, function: Any, /, *arguments: Any, **options: Any) -> Any:
        return _metered(context).weighed(super().call(context, function, *arguments, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check = {"*": limits.check_product, "**": limits.check_power, "%": limits.check_remainder}.get(operator)
        if check is not None:
            check(left, right)
        return _metered(context).weighed(super().call_binop(context, operator, left, right))

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Context | None = None,
        eval_ctx: nodes.EvalContext | None = None,
    ) -> Any:
        """Called by `map`, which takes the name of a filter."""
        result = super().call_filter(name, value, args, kwargs, context, eval_ctx)
        return result if context is None else _metered(context).weighed(result)

    def call_test(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Context | None = None,
        eval_ctx: nodes.EvalContext | None = None,
    ) -> Any:
        """Called by `select`, `reject` and the like, which take the name of a test."""
        if context is not None:
            self.tick(context)
        return super().call_test(name, value, args, kwargs, context, eval_ctx)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kinds, names in limits.ALLOWED_METHODS:
            if isinstance(obj, kinds):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., Any] | None:
        """Called by Jinja for every attribute that a template reads; a result replaces the attribute."""
        if not isinstance(value, MethodType | BuiltinMethodType) or not isinstance(value.__self__, str):
            return None
        text, name = value.__self__, value.__name__
        if name == "format" and not isinstance(text, Markup):
            return functools.partial(self._format, text)
        guarded = limits.GUARDED_METHODS.get(name)
        return None if guarded is None else functools.partial(guarded, str(text))

    def _format(self, text: str, /, *values: Any, **named: Any) -> str:
        return _BoundedFormatter(self).vformat(text, values, named)

    def rendered(self, template: jinja2.Template, variables: Mapping[str, object], seconds: float) -> Iterator[str]:
        """Renders a template piece by piece, within `seconds`."""
        context = _metered(template.new_context(dict(variables)))
        context.meter = limits.RenderMeter(seconds)
        return template.root_render_func(context)


class _BoundedFormatter(SandboxedFormatter):
    """`str.format` with limits on widths and on the length of all fields together."""

    _size = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        limits.require_bounded(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        for digits in "".join(letter if letter.isdecimal() else " " for letter in format_spec).split():
            limits.check_width(digits)
        text = super().format_field(value, format_spec)
        self._size += len(text)
        limits.require(self._size)
        return text


@pass_context
def _written(context: Context, value: Any) -> str:
    """The text that an expression writes."""
    if isinstance(value, str):
        return value
    return str(_metered(context).charged(limits.text_of(value)))


class _GenerationBlock(Extension):
    """The block `{% generation %}`, which marks the assistant's text for training. Renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - declared as a plain set by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = TemplateEnvironment()


class SandboxedTemplate:
    """A compiled template. Each rendering has its own limits, and several threads may render at once."""

    def __init__(self, source: str) -> None:
        self._template = _ENVIRONMENT.from_string(source)
        self.variables = frozenset(find_undeclared_variables(_ENVIRONMENT.parse(source)))
        """The names of all variables that it reads and does not set itself."""

    def render(self, variables: Mapping[str, object], *, seconds: float, max_characters: int) -> str:
        """The rendered text. Raises `SecurityError` or `RequestError` if a limit is exceeded."""
        pieces: list[str] = []
        written = 0
        for piece in _ENVIRONMENT.rendered(self._template, variables, seconds):
            written += len(piece)
            if written > max_characters:
                raise SecurityError(
                    f"expected a rendered conversation of at most {max_characters} characters, got more"
                )
            pieces.append(piece)
        return "".join(pieces)
