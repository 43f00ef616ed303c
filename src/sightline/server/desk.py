"""Tokenization in the front end, on a separate thread, so that a long prompt does not block the event loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from sightline.core.errors import RequestError
from sightline.core.request import PositionLogprobs
from sightline.server.api.schema import Message
from sightline.server.http.errors import invalid
from sightline.text.detokenizer import IncrementalDetokenizer
from sightline.text.tokenizers.tokenizer import Tokenizer, TokenizerData

_T = TypeVar("_T")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""Template variables that a request may not set."""


class TextDesk:
    """A model's tokenizer and chat template, for handlers."""

    def __init__(self, data: TokenizerData, max_model_len: int) -> None:
        self._tokenizer = Tokenizer.from_data(data)
        self._max_characters = max_model_len * self._tokenizer.longest_token
        """A longer text has more tokens than any prompt may have."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """A lock for each caller: one text at a time, so that one caller's many texts do not block another's."""

    async def encode(self, caller: str, text: str) -> list[int]:
        """Encodes a raw prompt, with the special tokens that the model wants around it."""
        self._check_length(len(text), "prompt")
        return await self._run(caller, lambda: self._tokenizer.encode_prompt(text))

    async def encode_text(self, caller: str, text: str, most: int | None, param: str) -> list[int]:
        """Encodes a text to embed. If `most` is given, cuts it to that many tokens but keeps the model's suffix."""
        if most is None:
            self._check_length(len(text), param)
        tokens = await self._run(caller, lambda: self._tokenizer.encode_prompt(text), param)
        if most is None or len(tokens) <= most:
            return tokens
        end = list(self._tokenizer.suffix)[-most:] if most else []
        return [*tokens[: most - len(end)], *end]

    async def encode_bare(self, caller: str, text: str) -> list[int]:
        """Encodes a text without the special tokens around a prompt."""
        self._check_length(len(text), "prompt")
        return await self._run(caller, lambda: self._tokenizer.encode_text(text))

    async def encode_chat(
        self,
        caller: str,
        messages: Sequence[Message],
        switches: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Renders a conversation with the model's template and encodes the result."""
        self._check_length(sum(message.num_characters for message in messages), "messages")
        template = self._tokenizer.chat_template
        if template is None:
            raise invalid("the model has no chat template; use /v1/completions", "messages")
        reserved = sorted(_RESERVED & set(switches or {}))
        if reserved:
            raise invalid(f"a request may not set the template variable {reserved[0]}", "chat_template_kwargs")
        turns = [
            {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
            for message in messages
        ]
        return await self._run(
            caller,
            lambda: self._tokenizer.encode_rendered(
                template.render(turns, add_generation_prompt=add_generation_prompt, **(switches or {}))
            ),
            "messages",
        )

    async def decode(self, caller: str, tokens: Sequence[int]) -> str:
        return await self._run(caller, lambda: self._tokenizer.decode(tokens, skip_special_tokens=False), "tokens")

    def detokenizer(self, *, skip_special_tokens: bool) -> IncrementalDetokenizer:
        """A detokenizer for one sequence."""
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)

    async def offsets(self, caller: str, tokens: Sequence[int]) -> list[int]:
        """The offset of each token in the text of all tokens."""
        return await self._run(caller, lambda: TextOffsets(self.detokenizer(skip_special_tokens=False)).of(tokens))

    async def spell(self, caller: str, tokens: Sequence[int]) -> list[str | None]:
        """The vocabulary's spelling of each token."""
        return await self._run(caller, lambda: [self._tokenizer.token(token) for token in tokens], "tokens")

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_characters:
            raise invalid(
                f"expected at most {self._max_characters:,} characters, which is more than the context holds, got "
                f"{num_characters:,}; shorten it",
                param,
            )

    async def _run(self, caller: str, work: Callable[[], _T], param: str = "prompt") -> _T:
        """Runs `work` on the text thread when it is the caller's turn; `param` is the field that the text came in."""
        try:
            async with self._turns[caller]:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RequestError as error:
            raise invalid(str(error), param) from error


class TextOffsets:
    """Offsets of tokens in their text. A token that continues a character has the offset of that character."""

    def __init__(self, detokenizer: IncrementalDetokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._length = start

    def of(self, tokens: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            self._length += len(self._detokenizer.push([token]))
        return offsets

    def take(self, entries: Iterable[PositionLogprobs]) -> list[int]:
        """The offsets of the next tokens, given as the first token of each entry."""
        return self.of(next(iter(entry)) for entry in entries)
