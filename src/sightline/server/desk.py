"""Text to tokens in the front end: on a thread of its own, so that a long prompt holds up no stream."""

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
"""What a client's template switches may not replace."""


class TextDesk:
    """A model's tokenizer and template."""

    def __init__(self, data: TokenizerData, max_model_len: int) -> None:
        self._tokenizer = Tokenizer.from_data(data)
        self._max_characters = max_model_len * self._tokenizer.longest_token
        """A text with more has more tokens than any prompt may have."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By caller: each has one text on the thread at a time, so that nobody's many hold up another's one."""

    async def encode(self, caller: str, text: str) -> list[int]:
        """A raw prompt, with what the model wants around it."""
        self._check_length(len(text), "prompt")
        return await self._run(caller, lambda: self._tokenizer.encode_prompt(text))

    async def encode_text(self, caller: str, text: str, most: int | None, param: str) -> list[int]:
        """A text to embed, cut to `most` tokens where that is asked for; what the model wants at its end stays."""
        if most is None:
            self._check_length(len(text), param)
        tokens = await self._run(caller, lambda: self._tokenizer.encode_prompt(text), param)
        if most is None or len(tokens) <= most:
            return tokens
        end = list(self._tokenizer.suffix)[-most:] if most else []
        return [*tokens[: most - len(end)], *end]

    async def encode_bare(self, caller: str, text: str) -> list[int]:
        """A text's own tokens, without what a prompt has around it."""
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
        """A conversation through the model's template."""
        self._check_length(sum(message.num_characters for message in messages), "messages")
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
            caller,
            lambda: self._tokenizer.encode_rendered(
                template.render(turns, add_generation_prompt=add_generation_prompt, **(switches or {}))
            ),
            "messages",
        )

    async def decode(self, caller: str, tokens: Sequence[int]) -> str:
        return await self._run(caller, lambda: self._tokenizer.decode(tokens, skip_special_tokens=False), "tokens")

    def detokenizer(self, *, skip_special_tokens: bool) -> IncrementalDetokenizer:
        """For one text, token by token."""
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)

    async def offsets(self, caller: str, tokens: Sequence[int]) -> list[int]:
        """Where in the tokens' text each of them begins."""
        return await self._run(caller, lambda: TextOffsets(self.detokenizer(skip_special_tokens=False)).of(tokens))

    async def spell(self, caller: str, tokens: Sequence[int]) -> list[str | None]:
        """The vocabulary's own writing of each token."""
        return await self._run(caller, lambda: [self._tokenizer.token(token) for token in tokens], "tokens")

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_characters:
            raise invalid(
                f"expected at most {self._max_characters:,} characters, more than any prompt's tokens stand for, got "
                f"{num_characters:,}; shorten it",
                param,
            )

    async def _run(self, caller: str, work: Callable[[], _T], param: str = "prompt") -> _T:
        """`param` is the field that the text came in."""
        try:
            async with self._turns[caller]:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RequestError as error:
            raise invalid(str(error), param) from error


class TextOffsets:
    """Where in a text each of its tokens begins: one that goes on with a character, where the character does."""

    def __init__(self, detokenizer: IncrementalDetokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._length = start

    def of(self, tokens: Iterable[int]) -> list[int]:
        """Of the tokens that come next."""
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            self._length += len(self._detokenizer.push([token]))
        return offsets

    def take(self, entries: Iterable[PositionLogprobs]) -> list[int]:
        return self.of(next(iter(entry)) for entry in entries)
