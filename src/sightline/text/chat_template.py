"""Rendering of a conversation to the prompt that a model was trained on.

Owns the sandbox in which a model's template runs, the limits on it, and the checks on messages. A template
comes with the model's files and never with a request. Does not know tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from sightline.core.errors import CheckpointError, RequestError

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_OUTPUT_CHARACTERS = 1 << 24
RENDER_SECONDS = 10.0
"""Checked whenever the template writes or asks for a range; the sandbox caps ranges at 100,000 steps."""


class ChatTemplate:
    """A compiled template. Rendering is safe to call from several threads."""

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(
                f"expected a chat template of at most {MAX_TEMPLATE_CHARACTERS} characters, got {len(source)}."
            )
        self.source = source
        self._special = {
            name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
        }
        try:
            self._reads_parts = _reads_parts(_ENVIRONMENT.parse(source))
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise CheckpointError(
                f"expected a chat template in Jinja syntax, got a fault: {error}. Get the model's files again."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt for `messages`; `variables` are the template's own switches.

        `RequestError` if it refuses them.
        """
        checked = check_messages(messages)
        if not self._reads_parts:
            checked = [_with_joined_parts(message) for message in checked]
        context: dict[str, object] = {
            **variables,
            **self._special,
            "messages": checked,
            "tools": tools,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render_within_limits(context)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise RequestError(f"the model's chat template refused the conversation: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise RequestError("the model's chat template ran out of memory or nested too deep") from error

    def _render_within_limits(self, context: Mapping[str, object]) -> str:
        deadline = time.monotonic() + RENDER_SECONDS

        def limited_range(*bounds: int) -> range:
            _check_deadline(deadline)
            return safe_range(*bounds)

        pieces: list[str] = []
        written = 0
        for piece in self._template.generate({**context, "range": limited_range}):
            written += len(piece)
            if written > MAX_OUTPUT_CHARACTERS:
                raise RequestError(
                    f"expected a rendered conversation of at most {MAX_OUTPUT_CHARACTERS} characters, got more"
                )
            _check_deadline(deadline)
            pieces.append(piece)
        return "".join(pieces)


def check_messages(messages: object) -> list[dict[str, object]]:
    """The messages, if they are a conversation: roles, and contents of text.

    `RequestError` names what is not.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"messages: expected a non-empty list, got {_shown(messages)}")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected an object with 'role' and 'content', got {_shown(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role: expected a non-empty string, got {_shown(role)}")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{where}.content[{index}]")
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(f"{where}.content: expected a string or a list of text parts, got {_shown(content)}")
    return dict(message)


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestError(f'{where}: expected {{"type": "text", "text": a string}}, got {_shown(part)}')


def _shown(value: object) -> str:
    return repr(value)[:80]


def _with_joined_parts(message: dict[str, object]) -> dict[str, object]:
    """For templates that know only plain text, which is most of them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether the template looks into content parts itself: whether it reads something's `type` or `text`."""
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    items = {node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    return not {"type", "text"}.isdisjoint(attributes | items)


def _check_deadline(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RequestError(f"expected the model's chat template to finish within {RENDER_SECONDS} s, got no end")


class _GenerationBlock(Extension):
    """`{% generation %}` marks, for training, what the assistant wrote.

    Rendering just passes its body through.
    """

    tags = {"generation"}  # noqa: RUF012 - declared as a plain set by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(Namespace):
    """`namespace()` without underscored names, which could shadow Python's own attributes."""

    # Without a named `self`, so that a template may write namespace(self=...).
    def __init__(*arguments: Any, **attributes: Any) -> None:
        for name in dict(*arguments[1:], **attributes):
            _refuse_underscore(name)
        Namespace.__init__(*arguments, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"expected a namespace name without leading underscore, got {name!r}")


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, also for the operators that make a short template use much memory."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.exceptions.SecurityError(f"expected a chat template without {operator!r} on these values")
        if operator == "*":
            _check_product(left, right)
        return super().call_binop(context, operator, left, right)


def _check_product(left: object, right: object) -> None:
    for sequence, count in ((left, right), (right, left)):
        if (
            isinstance(sequence, str | bytes | list | tuple)
            and isinstance(count, int)
            and len(sequence) * count > MAX_OUTPUT_CHARACTERS
        ):
            raise jinja2.exceptions.SecurityError("expected a shorter repetition in the chat template")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _build_environment() -> _TemplateEnvironment:
    environment = _TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _TemplateNamespace
    return environment


_ENVIRONMENT = _build_environment()
