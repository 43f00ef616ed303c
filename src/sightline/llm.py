"""Offline generation for people who write Python: `LLM`.

Owns the shapes of prompts, and progress. `calls` has what one call does, the engine what runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack, cast

from sightline.core.answer_format import AnswerReading
from sightline.core.beams import BeamSearchOutput, BeamSearchParams
from sightline.core.config import EngineConfig, EngineKeywords, Task
from sightline.core.conversation import Conversation
from sightline.core.embedding import EmbeddingRequestOutput
from sightline.core.errors import ConfigError, RequestError
from sightline.core.interruption import uninterrupted
from sightline.core.request import RequestOutput, SamplingParams, Terms
from sightline.core.turns import ThreadTurn
from sightline.engine.beams import BeamSearch
from sightline.engine.calls import BatchCall, Encoded, SharedEngine, TextStream, refused_output
from sightline.engine.engine import Engine
from sightline.engine.text_embedder import TextEmbedder
from sightline.opening import build_engine, open_embedder, progress_bar
from sightline.structured.compiler import PendingGrammar
from sightline.text.answers.opening import check_tools, offered_tools, reading_of
from sightline.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("sightline")
_InputT = TypeVar("_InputT")
_T = TypeVar("_T")
_MadeT = TypeVar("_MadeT")
_P = ParamSpec("_P")
_GRAMMARS_AHEAD = 8
"""Grammars of one call that wait for a thread at once."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids: run exactly as they are."""

    prompt_token_ids: Sequence[int]


Prompt: TypeAlias = str | TextPrompt | TokensPrompt
Message: TypeAlias = Mapping[str, object]


class TemplateSettings(TypedDict, total=False):
    """Variables that a chat template may be given besides the messages."""

    add_generation_prompt: bool
    """Open the assistant's turn; on unless the final message is continued."""
    continue_final_message: bool
    """Leave the last message open, so that the answer continues it."""
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object]
    """The template's own switches."""


EngineSettings: TypeAlias = dict[str, Any]
"""Keywords of `LLM` in a dictionary."""


def configured_by(
    make: Callable[_P, _MadeT],
) -> Callable[[Callable[[_T, _MadeT], None]], Callable[Concatenate[_T, _P], None]]:
    """Decorates a constructor that takes what `make` makes, so that it takes the keywords of `make` instead."""

    def decorate(construct: Callable[[_T, _MadeT], None]) -> Callable[Concatenate[_T, _P], None]:
        def constructor(self: _T, /, *args: _P.args, **settings: _P.kwargs) -> None:
            construct(self, make(*args, **settings))

        update_wrapper(constructor, vars(make)["__init__"], assigned=())
        constructor.__doc__ = construct.__doc__
        return constructor

    return decorate


class LLM:
    """A model that answers, or embeds. Several threads may call it.

    Requests of all threads run in one batch: while threads wait, one of them steps the engine for all. Each gets its
    own answers and its own errors, and Ctrl-C ends the main thread's requests alone. `engine` itself takes one thread
    at a time, and refuses a second one with `LaneBusyError`.
    """

    @configured_by(EngineKeywords)
    def __init__(self, config: EngineConfig) -> None:
        """Takes the settings in docs/settings.md as keywords, and other engines' names for them.

        `model` is a folder, a .gguf file, a Hugging Face id, or None for the default model.
        """
        embeds = Task(config.task) is Task.EMBED
        self._generating = None if embeds else SharedEngine(build_engine(config))
        self._embedder = open_embedder(config) if embeds else None

    @classmethod
    def of(cls, engine: Engine) -> LLM:
        """An LLM with an engine that exists already."""
        llm = cls.__new__(cls)
        llm._generating, llm._embedder = SharedEngine(engine), None
        return llm

    @property
    def engine(self) -> Engine:
        """The engine that runs requests. Raises if the model embeds."""
        return self.shared.engine

    @property
    def shared(self) -> SharedEngine[Engine]:
        """The engine, as threads share it. Raises if the model embeds."""
        if self._generating is None:
            raise ConfigError("expected a model that generates, got one with task embed; use embed")
        return self._generating

    @property
    def embedder(self) -> TextEmbedder:
        """The embedder. Raises if the model generates."""
        if self._embedder is None:
            raise ConfigError('expected a model that embeds, got one that generates; use LLM(..., task="embed")')
        return self._embedder

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        truncate: bool = False,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each text, in order, in `.outputs.embedding`.

        A text of more than `max_model_len` tokens is an error, or cut with `truncate`. `dimensions` keeps so many of
        the first numbers, at length 1 again.
        """
        listed: Sequence[Prompt] = [texts] if isinstance(texts, (str, Mapping)) else texts
        with progress_bar(enabled=use_tqdm) as bar:
            task = bar.add_task("Embedding", total=len(listed))
            return self.embedder.embed(
                [_text_or_tokens(each) for each in listed],
                truncate=truncate,
                dimensions=dimensions,
                on_progress=lambda count: bar.advance(task, count),
            )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt, as many at a time as there is room for.

        Prompts of a lower `priority` go first; one for all, or one for each. `timeout` are the seconds that a request
        may take from when it is queued: then it ends with what it has, and the finish reason "abort".

        A prompt that cannot run fails alone, whether before its first step or later: `RequestOutput.error` says why,
        and each of its `n` outputs has the finish reason "error".
        """
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        terms = _terms(priority, timeout, len(listed))
        return self._run(listed, self.encode_prompt, sampling_params, terms, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        **template: Unpack[TemplateSettings],
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template; as `generate` otherwise.

        With `tools`, reasoning and calls are told apart from the text: see `CompletionOutput`.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        return self._run(
            conversations,
            lambda each: self._encode_chat(each, **template),
            self._reading_tools(conversations, sampling_params, **template),
            _terms(priority, timeout, len(conversations)),
            use_tqdm=use_tqdm,
        )

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that a search with `beam_width` beams finds, the best first.

        Each token of a beam is a request of its own; prefix caching lets beams share pages. A prompt that cannot run
        fails alone: `BeamSearchOutput.error` says why.
        """
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        engine = self.engine
        search = BeamSearch(
            params,
            engine.generation.eos_token_ids,
            engine.runtime.config.max_model_len,
            engine.tokenizer,
            self._continue,
        )
        return search.run([self.encode_prompt(each)[1] for each in listed])

    def _continue(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
        terms = [Terms()] * len(prompts)
        return self._run(prompts, lambda tokens: (None, tokens), params, terms, use_tqdm=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> TextStream:
        """Continues a prompt piece by piece. Closing the stream cancels the request and frees its pages."""
        return self._submit(self.encode_prompt(prompt), sampling_params, Terms(priority=priority, timeout=timeout))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        **template: Unpack[TemplateSettings],
    ) -> TextStream:
        """Answers a conversation piece by piece; as `stream` otherwise."""
        terms = Terms(priority=priority, timeout=timeout)
        [params] = self._reading_tools([messages], sampling_params, **template)
        return self._submit(self._encode_chat(messages, **template), params, terms)

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step. Any thread may call it."""
        self.engine.cancel(request_id)

    def close(self) -> None:
        """Ends everything; a closed LLM refuses work. Threads that wait for an answer get `EngineClosedError`."""
        if self._generating is not None:
            engine = self._generating.engine
            self._generating.run(lambda _: engine.close())
        if self._embedder is not None:
            self._embedder.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode`, `decode` and `apply_chat_template`. Raises if it was not loaded."""
        tokenizer = self.engine.tokenizer if self._embedder is None else self._embedder.tokenizer
        if tokenizer is None:
            raise RequestError(
                "expected a tokenizer, got none: it was not loaded (skip_tokenizer_init); use prompt_token_ids"
            )
        return tokenizer

    def _submit(self, encoded: Encoded, sampling_params: SamplingParams | None, terms: Terms) -> TextStream:
        text, token_ids = encoded
        params = sampling_params or SamplingParams()
        if params.prompt_logprobs is not None:
            raise RequestError(
                "expected prompt_logprobs with generate or chat, got them with a stream, which has no place"
            )

        grammars = self.compile_grammars([params])

        def submit(_turn: ThreadTurn) -> TextStream:
            with uninterrupted():
                return TextStream(self.shared, self.engine.submit(token_ids, params, text, terms))

        stream = self.shared.run(submit)
        del grammars
        return stream

    def encode_prompt(self, prompt: object) -> Encoded:
        """A prompt's text, if it has one, and its tokens."""
        given = _text_or_tokens(prompt)
        return (given, self.get_tokenizer().encode_prompt(given)) if isinstance(given, str) else (None, given)

    def _encode_chat(self, messages: Sequence[Message], **settings: Unpack[TemplateSettings]) -> Encoded:
        continues = settings.get("continue_final_message", False)
        rendered = self.get_tokenizer().apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=settings.get("add_generation_prompt", not continues),
            continue_final_message=continues,
            tools=settings.get("tools"),
            **settings.get("chat_template_kwargs", {}),
        )
        return rendered, self.get_tokenizer().encode_rendered(rendered)

    def _reading_tools(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        **settings: Unpack[TemplateSettings],
    ) -> list[SamplingParams]:
        """The parameters of each conversation, with how its answer is read if tools are offered."""
        asked = _spread(sampling_params or SamplingParams(), len(conversations), "SamplingParams")
        tools = settings.get("tools")
        if not tools:
            return list(asked)
        tokenizer, offer = self.get_tokenizer(), Conversation((), offered_tools(tools))
        check_tools(tokenizer, offer)

        def reading(messages: Sequence[Message]) -> AnswerReading | None:
            try:
                return reading_of(tokenizer, offer, self._encode_chat(messages, **settings)[0] or "")
            except RequestError:
                # It is refused alone, when its turn comes.
                return None

        return [
            replace(params, reading=reading(messages)) for params, messages in zip(asked, conversations, strict=True)
        ]

    def _run(
        self,
        inputs: Sequence[_InputT],
        encode: Callable[[_InputT], Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        terms: Sequence[Terms],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        asked = SamplingParams() if sampling_params is None else sampling_params
        params = _spread(asked, len(inputs), "SamplingParams")
        counts = [each.n for each in params]
        grammars = self.compile_grammars(params)
        call = BatchCall(self.shared, self.engine, inputs, encode, params, terms, counts, refused_output)
        with progress_bar(enabled=use_tqdm) as bar:
            task = bar.add_task("Generating", total=len(inputs))
            outputs = call.run(lambda count: bar.update(task, completed=count))
        # Until here they are kept, however many there are.
        del grammars
        return outputs

    def compile_grammars(self, params: Iterable[SamplingParams]) -> list[PendingGrammar]:
        """Compiles what answers will be held to, while other threads may use the engine. Whoever holds the result keeps
        the grammars. One that cannot be held is refused when its request is submitted."""
        found: list[PendingGrammar] = []
        for each in {id(each): each for each in params}.values():
            if (pending := self.engine.prepare(each)) is not None:
                found.append(pending)
            # Not too many wait at once: the time of each counts from here.
            if len(found) > _GRAMMARS_AHEAD:
                found[-_GRAMMARS_AHEAD].settle()
        for pending in found:
            pending.settle()
        return found


def _text_or_tokens(prompt: object) -> str | list[int]:
    """Returns the text or the token ids of a prompt, in whichever form it comes."""
    match prompt:
        case str(text):
            return text
        case {"prompt": str(text), **rest} if not rest:
            return text
        case {"prompt_token_ids": [*token_ids], **rest} if not rest:
            return cast("list[int]", token_ids)
        case _:
            got = f"keys {', '.join(map(str, prompt))}" if isinstance(prompt, Mapping) else type(prompt).__name__
            raise RequestError(
                "expected a prompt as text, {'prompt': text} or {'prompt_token_ids': [list of ids]}, "
                f"and nothing beside it, got {got}"
            )


def _terms(priority: int | Sequence[int], timeout: float | None, count: int) -> list[Terms]:
    return [Terms(priority=each, timeout=timeout) for each in _spread(priority, count, "priority")]


def _spread(value: _T | Sequence[_T], count: int, name: str) -> Sequence[_T]:
    """Returns one value for each prompt."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"expected one {name} or {count}, one for each prompt, got {len(value)}")
    return value
