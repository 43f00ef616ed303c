"""A model's tokenizer and chat template, with the checks that come before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sightline.core.answer_format import AnswerReading
from sightline.core.conversation import Conversation
from sightline.core.errors import RequestError
from sightline.server.http.errors import invalid, too_long
from sightline.text.answers.opening import check_tools, num_characters, reading_of, render_conversation, unread_switches
from sightline.text.detokenizer import IncrementalDetokenizer
from sightline.text.templates.chat_template import Ending
from sightline.text.tokenizers.tokenizer import Tokenizer, TokenizerData

MAX_CHARACTER_BYTES = 4
TURN_BYTES = 64
"""What a template writes around a turn, about."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""Template variables that a request may not set."""


@dataclass(frozen=True)
class OpenedConversation:
    """A conversation as a prompt."""

    token_ids: list[int]
    reading: AnswerReading | None
    """How its answers are read; None: they are text."""


class TextDesk:
    """Converts the texts of requests to tokens and back. Checks every length first; raises `ApiError`."""

    def __init__(self, data: TokenizerData, max_model_len: int) -> None:
        self._tokenizer = Tokenizer.from_data(data)
        self._max_model_len = max_model_len
        self._max_characters = max_model_len * self._tokenizer.longest_token
        """A longer text has more tokens than any prompt may have."""

    def encode(self, text: str, param: str = "prompt", *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a raw prompt, with or without the special tokens that the model wants around it."""
        self._check_length(len(text), param)
        with _naming(param):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_cut(self, text: str, most: int | None, param: str) -> list[int]:
        """Encodes a text to embed. If `most` is given, cuts it to that many tokens but keeps the model's suffix."""
        tokens = self.encode(text, param)
        if most is None or len(tokens) <= most:
            return tokens
        end = list(self._tokenizer.suffix)[-most:] if most else []
        return [*tokens[: most - len(end)], *end]

    def open(self, conversation: Conversation, ending: Ending = Ending.NEXT_TURN) -> OpenedConversation:
        """Renders a conversation with the model's template and encodes the result. Says how its answers are read."""
        self._check_length(num_characters(conversation), "messages")
        template = self._tokenizer.chat_template
        if template is None:
            raise invalid("the model has no chat template; use /v1/completions", "messages")
        reserved = sorted(_RESERVED & set(conversation.switches))
        if reserved:
            raise invalid(
                f"expected chat_template_kwargs without {reserved[0]}, which the server sets, got it; leave it out",
                "chat_template_kwargs",
            )
        with _naming("tools"):
            check_tools(self._tokenizer, conversation)
        with _naming("messages"):
            rendered = render_conversation(self._tokenizer, conversation, ending)
            self._check_length(len(rendered), "messages")
            token_ids = self._tokenizer.encode_rendered(rendered)
        with _naming("thinking_token_budget"):
            return OpenedConversation(token_ids, reading_of(self._tokenizer, conversation, rendered))

    def num_bytes(self, conversation: Conversation) -> int:
        """The most bytes that a conversation's texts have, which bounds the number of its tokens."""
        return MAX_CHARACTER_BYTES * num_characters(conversation) + TURN_BYTES * len(conversation.turns)

    def unread(self, conversation: Conversation) -> list[str]:
        """The paths of what the model's template never reads: clients send them to every model."""
        return unread_switches(self._tokenizer, conversation)

    def decode(self, tokens: Sequence[int]) -> str:
        with _naming("tokens"):
            return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """The offset of each token in the text of all. A token that continues a character has that one's offset."""
        detokenizer, offsets, length = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False), [], 0
        for token in tokens:
            offsets.append(length)
            length += len(detokenizer.push([token]))
        return offsets

    def token_text(self, token: int) -> str:
        """The text of a token on its own."""
        return self._tokenizer.token_text(token)

    def spell(self, tokens: Sequence[int]) -> list[str | None]:
        """The vocabulary's spelling of each token."""
        return [self._tokenizer.token(token) for token in tokens]

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_characters:
            raise too_long(
                f"expected at most {self._max_characters:,} characters, which is more than the context holds, got "
                f"{num_characters:,}; shorten it",
                self._max_model_len,
                param,
            )


def ending_of(add_generation_prompt: bool | None, continue_final_message: bool | None) -> Ending:
    """How a conversation is to end. Raises `ApiError` for two endings."""
    with _naming("continue_final_message"):
        return Ending.asked(add_generation_prompt, continue_final_message)


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Turns a `RequestError` into an `ApiError` about the field that the text came in."""
    try:
        yield
    except RequestError as error:
        raise invalid(str(error), param) from error
