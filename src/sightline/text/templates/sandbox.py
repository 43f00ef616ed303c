"""The sandbox in which a model's chat template is compiled and run.

Owns where the limits stand: compiled into each loop, macro and expression of the template, so that no part of
it runs or grows without being counted. Does not know messages, nor the sizes of the limits.

    template -- parser --> syntax tree -- MeteredCodeGenerator --> Python that calls MeteredContext
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
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_context
from markupsafe import Markup

from sightline.text.templates import limits
from sightline.text.templates.filters import TEMPLATE_GLOBALS, template_filters


class MeteredContext(Context):
    """The variables of one rendering, and its meter. Compiled templates call these methods."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.meter = limits.RenderMeter(limits.RENDER_SECONDS)

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        assert isinstance(context, MeteredContext)
        context.meter = self.meter
        return context

    def charged(self, value: Any) -> Any:
        """A value that holds no more than another one did."""
        self.meter.charge(limits.own_size(value))
        return value

    def weighed(self, value: Any) -> Any:
        """A value that was made from others."""
        limits.require_bounded(value)
        return self.charged(value)

    def concatenated(self, pieces: Iterable[Any]) -> str:
        """What `~` makes, and the output of a macro or block."""
        return str(self.charged(limits.joined("", map(limits.text_of, pieces))))

    def tick(self) -> bool:
        """True, unless the time is over."""
        self.meter.tick()
        return True


def _metered(context: Context) -> MeteredContext:
    assert isinstance(context, MeteredContext)
    return context


class MeteredCodeGenerator(CodeGenerator):
    """Jinja's compiler, with a call of the context around everything that makes a value or goes round."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("concat = context.concatenated")

    def blockvisit(self, body: Iterable[nodes.Node], frame: Frame) -> None:
        """The body of a loop, macro, branch or block."""
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
    """Jinja's sandbox, in which every value is counted and only listed methods can be called."""

    code_generator_class = MeteredCodeGenerator
    context_class = MeteredContext
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_written,
            # Constants would be worked out when the template is compiled, where nothing is counted.
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
        """For `map`, which takes a filter's name."""
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
        """For `select` and its kin, which take a test's name."""
        if context is not None:
            self.tick(context)
        return super().call_test(name, value, args, kwargs, context, eval_ctx)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kinds, names in limits.ALLOWED_METHODS:
            if isinstance(obj, kinds):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., Any] | None:
        """Jinja asks this of every attribute that a template reads; the answer takes the attribute's place."""
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
        """The pieces of a rendering that must end within `seconds`."""
        context = _metered(template.new_context(dict(variables)))
        context.meter = limits.RenderMeter(seconds)
        return template.root_render_func(context)


class _BoundedFormatter(SandboxedFormatter):
    """`str.format` with checked widths and a bound on all fields together."""

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
    """What an expression writes: a text as it is, anything else as its text."""
    if isinstance(value, str):
        return value
    return str(_metered(context).charged(limits.text_of(value)))


class _GenerationBlock(Extension):
    """`{% generation %}` marks, for training, what the assistant wrote.

    Rendering just passes its body through.
    """

    tags = {"generation"}  # noqa: RUF012 - declared as a plain set by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = TemplateEnvironment()


class SandboxedTemplate:
    """A compiled template. Each rendering is counted by itself, so several threads may render at once."""

    def __init__(self, source: str) -> None:
        self._template = _ENVIRONMENT.from_string(source)

    def render(self, variables: Mapping[str, object], *, seconds: float, max_characters: int) -> str:
        """The text, within the limits."""
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
