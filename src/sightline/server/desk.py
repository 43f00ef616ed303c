"""Text to tokens in the front end: on a thread of its own, so that a long prompt holds up no stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from sightline.core.errors import RequestError
from sightline.server.errors import invalid
from sightline.server.schema import Message
from sightline.text.tokenizer import Tokenizer, TokenizerData

_T = TypeVar("_T")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""What a client's template switches may not replace."""


class TextDesk:
    """A model's tokenizer and template."""

    def __init__(self, data: TokenizerData) -> None:
        self.data = data
        self._tokenizer = Tokenizer.from_data(data)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str) -> list[int]:
        """A raw prompt, with what the model wants around it."""
        return await self._run(lambda: self._tokenizer.encode_prompt(text))

    async def encode_bare(self, text: str) -> list[int]:
        """A text's own tokens, without what a prompt has around it."""
        return await self._run(lambda: self._tokenizer.encode_text(text))

    async def encode_chat(
        self, messages: Sequence[Message], switches: Mapping[str, Any] | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """A conversation through the model's template."""
        template = self._tokenizer.chat_template
        if template is None:
            raise invalid("expected a model with a chat template, got one without; use /v1/completions", "messages")
        reserved = sorted(_RESERVED & set(switches or {}))
        if reserved:
            raise invalid(f"expected a template's own switches, got {reserved[0]}", "chat_template_kwargs")
        turns = [
            {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
            for message in messages
        ]
        return await self._run(
            lambda: self._tokenizer.encode_rendered(
                template.render(turns, add_generation_prompt=add_generation_prompt, **(switches or {}))
            ),
            "messages",
        )

    async def decode(self, tokens: Sequence[int]) -> str:
        return await self._run(lambda: self._tokenizer.decode(tokens, skip_special_tokens=False))

    def spelling(self, token: int) -> str | None:
        """The vocabulary's own writing of a token."""
        return self._tokenizer.token(token)

    async def _run(self, work: Callable[[], _T], param: str = "prompt") -> _T:
        """`param` is the field that the text came in."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RequestError as error:
            raise invalid(str(error), param) from error
