"""Converts text to token ids and back.

Owns the rules for the tokens around a prompt: which are added, and that none is added twice. Does not know where the
vocabulary came from: `folder` and `gguf` build tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, overload

import tokenizers

from sightline.core.answer_format import NOTHING_CHOSEN, AnswerFormat, ChosenFormat
from sightline.core.errors import RequestError
from sightline.text.templates.chat_template import ChatTemplate, Ending


@dataclass(frozen=True)
class PromptTokens:
    """The special tokens of a model, and which of them go around a prompt."""

    bos_id: int | None
    eos_ids: frozenset[int]
    """Tokens that end the model's turn."""
    prefix: tuple[int, ...] = ()
    """Tokens before every prompt: usually BOS, or none."""
    suffix: tuple[int, ...] = ()
    """Tokens after a raw prompt; empty for nearly all models."""


@dataclass(frozen=True)
class TokenizerData:
    """A tokenizer as plain values, from which another process builds the same one."""

    vocabulary: str
    """JSON of the `tokenizers` library."""
    prompt_tokens: PromptTokens
    template: str | None
    """The chat template's source."""
    template_bos: str | None
    template_eos: str | None
    answers: ChosenFormat = NOTHING_CHOSEN
    """How the model writes its answers."""


class Tokenizer:
    """A model's vocabulary, its prompt rules and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt_tokens: PromptTokens,
        chat_template: ChatTemplate | None,
        answers: ChosenFormat = NOTHING_CHOSEN,
        response_template: Mapping[str, object] | None = None,
    ) -> None:
        self._backend = backend
        self._prompt_tokens = prompt_tokens
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._token_texts: dict[int, str] = {}
        """Texts of single tokens, as far as they were asked for."""
        self.chat_template = chat_template
        self.answers = answers
        """How the model writes its answers."""
        self.response_template = response_template
        """What the checkpoint declares of its answers, if it does."""
        self._marker_ids: dict[AnswerFormat, frozenset[int]] = {}

    @classmethod
    def from_data(cls, data: TokenizerData) -> Tokenizer:
        template = None
        if data.template is not None:
            template = ChatTemplate(data.template, data.template_bos, data.template_eos)
        return cls(tokenizers.Tokenizer.from_str(data.vocabulary), data.prompt_tokens, template, data.answers)

    def to_data(self) -> TokenizerData:
        template = self.chat_template
        return TokenizerData(
            vocabulary=self._backend.to_str(),
            prompt_tokens=self._prompt_tokens,
            template=None if template is None else template.source,
            template_bos=None if template is None else template.bos_token,
            template_eos=None if template is None else template.eos_token,
            answers=self.answers,
        )

    @cached_property
    def longest_token(self) -> int:
        """Length of the vocabulary's longest entry: the most characters that one token can stand for."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def with_template(self, source: str) -> Tokenizer:
        """A tokenizer with the same vocabulary and another chat template."""
        bos, eos = self.bos_id, min(self.eos_ids, default=None)
        template = ChatTemplate(
            source,
            None if bos is None else self.token(bos),
            None if eos is None else self.token(eos),
        )
        return Tokenizer(self._backend, self._prompt_tokens, template, response_template=self.response_template)

    def with_answers(self, answers: ChosenFormat) -> Tokenizer:
        """The same tokenizer, for a model that writes its answers so."""
        return Tokenizer(self._backend, self._prompt_tokens, self.chat_template, answers, self.response_template)

    def marker_ids(self, form: AnswerFormat) -> frozenset[int]:
        """Special tokens that occur in the markers of a format: they are needed to read an answer."""
        found = self._marker_ids.get(form)
        if found is None:
            spelled = {token: self.token(token) or "" for token in self._special_ids}
            found = frozenset(
                token for token, text in spelled.items() if text and any(text in marker for marker in form.markers)
            )
            self._marker_ids[form] = found
        return found

    @property
    def bos_id(self) -> int | None:
        return self._prompt_tokens.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._prompt_tokens.eos_ids

    @property
    def suffix(self) -> tuple[int, ...]:
        """Tokens after a raw prompt."""
        return self._prompt_tokens.suffix

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out."""
        return self._special_ids

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows, as padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a prompt as `generate` does; without `add_special_tokens`, the text alone.

        Unlike transformers' tokenizers, never adds a BOS to a text that begins with it.
        """
        return self.encode_prompt(text) if add_special_tokens else self.encode_text(text)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> list[int] | str:
        """The prompt for a conversation, as token ids or, without `tokenize`, as text.

        `add_generation_prompt` begins the model's answer, `continue_final_message` leaves the last message open, and
        `variables` are the template's own. Raises `RequestError` without a chat template.
        """
        if self.chat_template is None:
            raise RequestError("expected a model with a chat template, got one without; use generate")
        ending = Ending.asked(add_generation_prompt, continue_final_message)
        rendered = self.chat_template.render(messages, ending, tools=tools, **variables)
        return self.encode_rendered(rendered) if tokenize else rendered

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a raw prompt.

        Special tokens in the text are parsed. BOS is added only if the text does not begin with it.
        """
        return self.encode_rendered(text) + list(self._prompt_tokens.suffix)

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many prompts at once, as `encode_prompt` does: on all cores, and without computing offsets."""
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            # Encode one by one, for an error that names the fault.
            return [self.encode_prompt(text) for text in texts]
        return [self._after_prefix(each.ids) + list(self._prompt_tokens.suffix) for each in found]

    def encode_rendered(self, text: str) -> list[int]:
        """Encodes the output of a chat template: like a raw prompt, but without the suffix."""
        return self._after_prefix(self.encode_text(text))

    def _after_prefix(self, ids: list[int]) -> list[int]:
        prefix = list(self._prompt_tokens.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def encode_text(self, text: str) -> list[int]:
        """Encodes a text without the tokens around a prompt."""
        try:
            # A batch of one: unlike `encode`, it lets other threads run, and computes no offsets.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"expected text of valid Unicode, got a lone surrogate or no text: {error}") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids beyond the vocabulary have no text; spaces are left as they are."""
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise RequestError(f"expected token ids from 0, got {min(ids)} to {max(ids)}") from error

    def token_text(self, token_id: int) -> str:
        """The text of a token on its own."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, or None beyond the vocabulary."""
        return self._backend.id_to_token(token_id)

    @property
    def decoder_state(self) -> bytes:
        """The decoder's settings as JSON, or `null` if the vocabulary has none."""
        decoder = self._backend.decoder
        return b"null" if decoder is None else bytes(decoder.__getstate__())
