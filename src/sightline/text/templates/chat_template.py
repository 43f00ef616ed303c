"""Renders a conversation to the prompt format that a model was trained on.

Checks messages, and decides in which form a template gets their contents. A template comes with the model's files and
never with a request. Does not know tokens, nor how a template is kept within its limits: that is `sandbox`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import jinja2

from sightline.core.errors import CheckpointError, ConfigError, RequestError
from sightline.text.templates.limits import MAX_OUTPUT_CHARACTERS, RENDER_SECONDS
from sightline.text.templates.sandbox import SandboxedTemplate

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_SHOWN_CHARACTERS = 500
"""The longest part of a template's own error message that is passed on."""
PROBE_SECONDS = 1.0
"""Time limit for each rendering at load that finds out which roles' content parts a template reads."""


class Ending(Enum):
    """How a rendered conversation ends."""

    NEXT_TURN = "next turn"
    """With the assistant's turn opened."""
    CLOSED = "closed"
    """With the last message."""
    CONTINUED = "continued"
    """In the middle of the last message, for the answer to continue it."""

    @classmethod
    def asked(cls, add_generation_prompt: bool | None, continue_final_message: bool | None) -> Ending:
        """The ending that two switches of other engines mean. Raises `RequestError` if both are on."""
        match add_generation_prompt, continue_final_message:
            case True, True:
                raise RequestError(
                    "expected add_generation_prompt or continue_final_message, got both; the last message is continued "
                    "or the next one is begun: leave one out"
                )
            case _, True:
                return cls.CONTINUED
            case False, _:
                return cls.CLOSED
            case _:
                return cls.NEXT_TURN


class ChatTemplate:
    """A compiled template. Rendering is safe to call from several threads."""

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(
                f"expected a chat template of at most {MAX_TEMPLATE_CHARACTERS} characters, got {len(source)}."
            )
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._special = {
            name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
        }
        try:
            self._template = SandboxedTemplate(source)
        except (jinja2.TemplateSyntaxError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise CheckpointError(
                "expected a chat template in Jinja syntax, with the filters that chat templates use, got a fault: "
                f"{str(error)[:MAX_SHOWN_CHARACTERS]} Get the model's files again."
            ) from error
        self.variables = self._template.variables
        """The names of the variables that it reads."""
        self._part_roles = frozenset(role for role, messages in _PROBES.items() if self._reads_parts(messages))
        """Roles whose content parts the template reads itself."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        ending: Ending = Ending.NEXT_TURN,
        /,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt for `messages`; `variables` are extra variables of the template.

        Raises `RequestError` if the messages are malformed or the template refuses them.
        """
        checked = [self._in_form(message) for message in check_messages(messages)]
        context = {**variables, "tools": tools, "documents": variables.get("documents")}
        context["add_generation_prompt"] = ending is Ending.NEXT_TURN
        if ending is not Ending.CONTINUED:
            return self._rendered(checked, context, RENDER_SECONDS)
        checked[-1], text = _marked(checked[-1])
        return _cut_at_mark(self._rendered(checked, context, RENDER_SECONDS), text)

    def _rendered(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object], seconds: float
    ) -> str:
        context = {**variables, **self._special, "messages": messages}
        try:
            return self._template.render(context, seconds=seconds, max_characters=MAX_OUTPUT_CHARACTERS)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            said = str(error)[:MAX_SHOWN_CHARACTERS]
            raise RequestError(f"the model's chat template refused the conversation: {said}") from error
        except (RecursionError, MemoryError) as error:
            raise RequestError("the model's chat template ran out of memory or nested too deep") from error

    def _in_form(self, message: dict[str, object]) -> dict[str, object]:
        """The message in the form that the template reads: most templates read only plain text."""
        content = message.get("content")
        if not isinstance(content, list) or message["role"] in self._part_roles:
            return message
        return {**message, "content": "\n".join(part["text"] for part in content)}

    def _reads_parts(self, messages: Sequence[Mapping[str, object]]) -> bool:
        """Whether a rendering contains the texts of the probe's parts, and nothing else of the parts.

        A template that reads only plain text fails on a list, or writes all of it.
        """
        try:
            rendered = self._rendered(messages, _PROBE_VARIABLES, PROBE_SECONDS)
        except RequestError:
            return False
        return all(text in rendered for text in _PROBE_TEXTS) and _PROBE_KEY not in rendered


def read_template(path: Path) -> str:
    """The source of a template from its own file. Raises `ConfigError` if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected a file with a chat template, got {path}: {error}; name one that exists") from error


_MARK = "END_OF_THE_CONTINUED_TEXT "
"""Finds the end of a message in a rendering: the text itself may occur in what a template writes behind it. Ends with a
space, which is gone where the template strips the text."""
_PROBE_TEXTS = ("first probed text", "second probed text")
_PROBE_KEY = "probed_key"
_PROBE_VARIABLES: Mapping[str, object] = MappingProxyType(
    {"tools": None, "documents": None, "add_generation_prompt": True}
)
_PROBE_PARTS = [{"type": "text", "text": text, _PROBE_KEY: _PROBE_KEY} for text in _PROBE_TEXTS]
_QUESTION: dict[str, object] = {"role": "user", "content": "question"}
_PROBES: Mapping[str, list[dict[str, object]]] = MappingProxyType(
    {
        "user": [{"role": "user", "content": _PROBE_PARTS}],
        "system": [{"role": "system", "content": _PROBE_PARTS}, _QUESTION],
        "developer": [{"role": "developer", "content": _PROBE_PARTS}, _QUESTION],
        "assistant": [_QUESTION, {"role": "assistant", "content": _PROBE_PARTS}],
        "tool": [
            _QUESTION,
            {"role": "assistant", "content": "answer"},
            {"role": "tool", "name": "function", "tool_call_id": "call00001", "content": _PROBE_PARTS},
        ],
    }
)
"""For each role, a conversation in which a message of that role has its content in parts."""


def check_messages(messages: object) -> list[dict[str, object]]:
    """Returns the messages as dicts. Raises `RequestError`, with the place, if one has no role or no text content."""
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
    elif content is None and role == "assistant":
        # A template may put any content into a sentence: nothing is said with an empty one.
        return dict(message) if message.get("tool_calls") else {**message, "content": ""}
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content: expected a string or a list of text parts, got {_shown(content)}")
    return dict(message)


def _marked(message: Mapping[str, object]) -> tuple[dict[str, object], str]:
    """A message with `_MARK` behind its text, and the text. Raises `RequestError` if an answer cannot continue it."""
    match message.get("content"):
        case str(text) if text.strip() and message["role"] == "assistant":
            return {**message, "content": text + _MARK}, text
        case [*others, {"text": str(text), **more}] if text.strip() and message["role"] == "assistant":
            return {**message, "content": [*others, {**more, "text": text + _MARK}]}, text
        case _:
            raise RequestError(
                "continue_final_message: expected a last message of the assistant with some text, got another; "
                "leave it out"
            )


def _cut_at_mark(rendered: str, text: str) -> str:
    """A rendered conversation up to the end of its last message's text, which templates may strip of spaces."""
    place = rendered.rfind(_MARK.rstrip())
    kept = rendered[: max(place, 0)]
    # A template that strips the text has stripped the mark.
    kept = kept if rendered.startswith(_MARK, place) else kept.rstrip()
    if place < 0 or not kept.rstrip().endswith(text.strip()):
        raise RequestError(
            "continue_final_message: expected a template that repeats the last message, got one that changes it; leave "
            "it out"
        )
    return kept


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestError(f'{where}: expected {{"type": "text", "text": a string}}, got {_shown(part)}')


def _shown(value: object) -> str:
    return repr(value)[:80]
