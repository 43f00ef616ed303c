"""Text to tokens and back, without the engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sightline.core.conversation import Conversation
from sightline.server.api.answers import Detokenized, Tokens
from sightline.server.api.fields import also_unused
from sightline.server.api.schema import DetokenizeRequest, Message, TokenizeRequest
from sightline.server.desks.forms.form import Form, ServedModel
from sightline.server.desks.forms.turns import conversation_of
from sightline.server.desks.protocol import WrittenAnswer
from sightline.server.desks.text import ending_of
from sightline.server.http.errors import check_model, invalid


class TokenizeForm(Form[TokenizeRequest]):
    """Tokens of a text or a conversation."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, TokenizeRequest)

    def take(self, number: int, request: TokenizeRequest, unused: tuple[str, ...]) -> WrittenAnswer:
        model = self._model
        check_model(request.model, model.names)
        tokens = self._tokens(request)
        spelled = model.text.spell(tokens) if request.return_token_strs else None
        answer = Tokens(tokens, len(tokens), model.max_model_len, spelled)
        unread = [] if request.messages is None else model.text.unread(_conversation(request, request.messages))
        return WrittenAnswer(number, msgspec.json.encode(answer), also_unused(unused, unread))

    def _tokens(self, request: TokenizeRequest) -> list[int]:
        text = self._model.text
        match request.prompt, request.messages:
            case None, list(messages):
                _check_absent(request, "a prompt", "add_special_tokens")
                ending = ending_of(request.add_generation_prompt, request.continue_final_message)
                return text.open(_conversation(request, messages), ending).token_ids
            case str(prompt), None:
                _check_absent(
                    request,
                    "messages",
                    "add_generation_prompt",
                    "continue_final_message",
                    "chat_template_kwargs",
                    "tools",
                    "reasoning_effort",
                )
                return text.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
            case _:
                raise invalid("expected either prompt or messages, got both or neither", "prompt")


def _conversation(request: TokenizeRequest, messages: Sequence[Message]) -> Conversation:
    return conversation_of(
        messages, tools=request.tools, effort=request.reasoning_effort, switches=request.chat_template_kwargs
    )


def _check_absent(request: TokenizeRequest, owner: str, *names: str) -> None:
    """Raises `ApiError` for fields that mean something only with the other kind of text."""
    for name in names:
        if getattr(request, name) is not None:
            raise invalid(f"{name} needs {owner}, and changes nothing here; leave it out", name)


class DetokenizeForm(Form[DetokenizeRequest]):
    """Text of tokens."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, DetokenizeRequest)

    def take(self, number: int, request: DetokenizeRequest, unused: tuple[str, ...]) -> WrittenAnswer:
        model, tokens = self._model, request.tokens
        check_model(request.model, model.names)
        if len(tokens) > model.max_model_len:
            raise invalid(
                f"expected at most {model.max_model_len} tokens, the size of the context, got {len(tokens)}", "tokens"
            )
        if tokens and max(tokens) >= model.vocab_size:
            raise invalid(f"expected token ids from 0 to {model.vocab_size - 1}, got {max(tokens)}", "tokens")
        return WrittenAnswer(number, msgspec.json.encode(Detokenized(model.text.decode(tokens))), unused)
