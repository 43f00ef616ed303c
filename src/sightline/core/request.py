"""Requests and their results.

Owns sampling parameters and output shapes. Does not know tokenizers, scheduling or tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from numbers import Integral
from typing import TypeAlias, cast

from sightline.core.answer_format import AnswerReading, AnswerRule, HeldAnswer
from sightline.core.conversation import AnswerEvent, ToolCall
from sightline.core.errors import RequestError
from sightline.core.settings import Setting, check_settings, keywords, setting
from sightline.core.structured import StructuredOutputs, read_structured_outputs
from sightline.core.token_lists import NO_BIAS, LogitBias, TokenIds
from sightline.core.words import MEANINGS

MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-4, 1e4
MAX_CONTINUATIONS = 128
"""The largest `n`."""
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 128
"""Limited because every character of the answer is compared with each."""
MAX_BAD_WORDS = 128
MAX_BAD_CHARACTERS = 8192
"""The most characters of all bad words together. Limited because the engine tokenises them."""
MAX_CALLER_LENGTH = 256
MAX_TIMEOUT = 1e9
TOKEN_ID = Setting("A token of the vocabulary.", low=0, high=MAX_COUNT, kind=int)
LOGIT_OFFSET = Setting("What is added to a logit.", low=-100, high=100, kind=float)


class FinishReason(StrEnum):
    """Why a sequence ended; the values match those of other engines."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """It ended by itself, and asks for calls of tools."""
    ABORT = "abort"
    ERROR = "error"


@keywords(RequestError, "a sampling parameter", dict.fromkeys(MEANINGS.values(), "a setting of the engine"))
@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. None takes the model's own default if there is one, otherwise the neutral value."""

    temperature: float | None = setting(
        None,
        "0 takes the likeliest token; more is more random. Neutral: 0, as transformers decodes; over HTTP 1, as "
        "OpenAI's API samples.",
        low=0,
        high=1e4,
    )
    top_p: float | None = setting(
        None, "Keep the likeliest tokens that make up this share. Neutral: 1.", low=0, high=1, excludes_low=True
    )
    top_k: int | None = setting(
        None, "Keep so many of the likeliest tokens; 0 and -1 keep all. Neutral: 0.", low=-1, high=MAX_COUNT
    )
    min_p: float | None = setting(
        None, "Drop tokens less likely than this share of the likeliest. Neutral: 0.", low=0, high=1
    )
    seed: int | None = setting(
        None, "The same seed and the same logits give the same tokens, whatever else runs.", low=0, high=MAX_SEED
    )
    max_tokens: int | None = setting(
        16, "Most tokens to generate; 0 only scores the prompt, with prompt_logprobs.", low=0, high=MAX_COUNT
    )
    """None generates up to the end of the context."""
    stop_token_ids: Sequence[int] = setting((), "Tokens that end the answer.")
    ignore_eos: bool = setting(False, "Go on past the model's own end tokens.")
    skip_special_tokens: bool = setting(True, "Leave special tokens out of the text.")
    repetition_penalty: float | None = setting(
        None,
        "Above 1, tokens of the prompt and the answer become less likely: positive logits are divided by it, negative "
        "ones multiplied. Neutral: 1.",
        low=MIN_REPETITION_PENALTY,
        high=MAX_REPETITION_PENALTY,
    )
    presence_penalty: float = setting(0.0, "Subtracted from the logit of every token in the answer.", low=-2, high=2)
    frequency_penalty: float = setting(
        0.0, "Subtracted from a token's logit once for each time it is in the answer.", low=-2, high=2
    )
    logit_bias: Mapping[int, float] | None = setting(
        None, "Token ids, and what is added to their logits before the penalties: -100 to 100."
    )
    stop: str | Sequence[str] | None = setting(None, "Text that ends the answer and is not part of it; one or several.")
    """Kept as a tuple."""
    include_stop_str_in_output: bool = setting(False, "Keep the stop string or the end token's text in the answer.")
    min_tokens: int | None = setting(
        None, "Tokens before any end token or stop string may end the answer. Neutral: 0.", low=0, high=MAX_COUNT
    )
    n: int = setting(1, "Continuations of each prompt, each with its own seed.", low=1, high=MAX_CONTINUATIONS)
    logprobs: int | None = setting(
        None,
        "Report the log probability of each generated token and so many of the likeliest ones, from the raw logits.",
        low=0,
        high=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = setting(
        None, "As logprobs, for every prompt token but the first; not in a stream.", low=0, high=MAX_LOGPROBS
    )
    truncate_prompt_tokens: int | None = setting(
        None,
        "Keep so many of the prompt's last tokens; -1 keeps as many as leave room for max_tokens. Neutral: keep all.",
        low=-1,
        high=MAX_COUNT,
    )
    allowed_token_ids: Sequence[int] | None = setting(None, "Generate only these tokens.")
    bad_words: Sequence[str] | None = setting(
        None, "Texts that are not generated as the tokenizer writes them, at the beginning of a text or after a space."
    )
    detokenize: bool = setting(True, "Turn the tokens into text; without it the text is empty.")
    structured_outputs: StructuredOutputs | None = setting(  # noqa: RUF009 - the default is None
        None, "What the answer must be: one of json (a schema), json_object, regex, choice and grammar (Lark)."
    )
    """A mapping of its fields is accepted too."""
    reading: AnswerReading | None = setting(  # noqa: RUF009 - the default is None
        None, "How reasoning and calls of tools are told apart in the answer's text."
    )

    def __post_init__(self) -> None:
        if self.top_p == 0.0 and type(self.top_p) is not bool:
            raise RequestError("expected top_p in (0, 1], got 0.0; use temperature 0 for greedy decoding")
        check_settings(self, RequestError)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        object.__setattr__(self, "stop_token_ids", _checked_token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _checked_bad_words(self.bad_words))
        object.__setattr__(self, "structured_outputs", read_structured_outputs(self.structured_outputs))
        if self.rule is not None and self.ignore_eos:
            raise RequestError(
                "expected ignore_eos False with structured_outputs, strict tools, a tool choice or a budget, whose "
                "grammar says where answers end"
            )
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _checked_allowed(self.allowed_token_ids))
        if self.truncate_prompt_tokens == 0:
            raise RequestError("expected truncate_prompt_tokens of at least 1, or -1, got 0; leave it out to keep all")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "expected max_tokens of at least 1, got 0, which only scores a prompt; send prompt_logprobs with it"
            )
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"expected min_tokens of at most max_tokens, {self.max_tokens}, got {self.min_tokens}; raise max_tokens"
            )
        if self.reading is not None and not self.detokenize:
            raise RequestError("expected detokenize with reading, got False: reasoning and calls are found in the text")
        if self.stop and not self.detokenize:
            raise RequestError("expected detokenize with stop, got False: stop strings are found in the text")

    @property
    def rule(self) -> AnswerRule | None:
        """What a grammar holds the answer to; None if it is free."""
        return _rule(self.reading, self.structured_outputs)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, normalized to a tuple."""
        return cast("tuple[str, ...]", self.stop)

    @cached_property
    def bias_pairs(self) -> LogitBias:
        """`logit_bias` by token. The prompts of one call share it: it may hold a whole vocabulary."""
        return LogitBias(sorted((self.logit_bias or {}).items()))

    @property
    def allowed(self) -> TokenIds | None:
        """`allowed_token_ids`, as they were checked."""
        return cast("TokenIds | None", self.allowed_token_ids)

    def cut(self, prompt: Sequence[int], max_model_len: int) -> Sequence[int]:
        """The tokens of a prompt that `truncate_prompt_tokens` keeps."""
        match self.truncate_prompt_tokens:
            case None:
                return prompt
            case -1:
                return prompt[-max(1, max_model_len - max(1, self.max_tokens or 0)) :]
            case count:
                return prompt[-count:]


@dataclass(frozen=True)
class RowNeeds:
    """What the rows of a request must compute, whatever it is for: all that a scheduler knows of its purpose."""

    max_new_tokens: int
    """Tokens that may be generated after the prompt; 0 if the prompt's own outputs are the result."""
    every_output: bool = False
    """True if the model's output is needed at every prompt token, so that none may come from the cache."""
    max_unread_tokens: int | None = None
    """Most tokens before it that the host may not have read when a token is chosen; None is any number."""
    is_whole: bool = False
    """True if the prompt is computed whole in one step, and neither reads nor writes the cache."""


@dataclass(frozen=True)
class EffectiveParams:
    """Sampling parameters with every default filled in: what runs, and what is echoed."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    """Stop tokens of the caller."""
    skip_special_tokens: bool
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end tokens that are in its vocabulary; empty if they are ignored."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = NO_BIAS
    allowed_token_ids: TokenIds | None = None
    """None allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens of which none is generated as a whole."""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    reading: AnswerReading | None = None

    @property
    def drawing(self) -> EffectiveParams:
        """The parameters for drawing from unadjusted logits, without those that depend on tokens or text."""
        return EffectiveParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=frozenset(),
            skip_special_tokens=self.skip_special_tokens,
        )

    @cached_property
    def counts_tokens(self) -> bool:
        """True if a token's logit depends on how often the token occurred before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def adjusts_logits(self) -> bool:
        """True if the logits of single tokens may be changed before sampling."""
        return (
            self.counts_tokens
            or len(self.logit_bias) > 0
            or self.min_tokens > 0
            or self.allowed_token_ids is not None
            or len(self.bad_words) > 0
        )

    @property
    def rule(self) -> AnswerRule | None:
        """What a grammar holds the answer to; None if it is free."""
        return _rule(self.reading, self.structured_outputs)

    @property
    def _max_unread_tokens(self) -> int | None:
        if self.rule is not None:
            # A mask depends on every token before it.
            return 0
        if not self.adjusts_logits:
            return None
        # The host finds the beginning of a bad word; the device counts one token more than the host.
        return 0 if any(len(word) > 1 for word in self.bad_words) else 1

    @cached_property
    def needs(self) -> RowNeeds:
        """What sampling with these parameters asks of the rows."""
        return RowNeeds(
            self.max_tokens,
            every_output=self.prompt_logprobs is not None,
            max_unread_tokens=self._max_unread_tokens,
        )


def _rule(reading: AnswerReading | None, structured: StructuredOutputs | None) -> AnswerRule | None:
    if reading is None:
        return structured
    return HeldAnswer(reading, structured) if reading.is_held or structured is not None else None


def _checked_token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
        raise RequestError(f"expected {name} to be a list of token ids, got {token_ids!r}")
    _check_ids(token_ids, f"every {name} entry")
    return tuple(token_ids)


def _checked_allowed(token_ids: object) -> TokenIds:
    if not (found := _checked_token_ids("allowed_token_ids", token_ids)):
        raise RequestError("expected allowed_token_ids with at least one token, got none; leave it out to allow all")
    return TokenIds(sorted(set(found)))


def _checked_bad_words(words: object) -> tuple[str, ...]:
    listed = () if words is None else words
    if isinstance(listed, str) or not isinstance(listed, Sequence) or {type(word) for word in listed} - {str}:
        raise RequestError(f"expected bad_words to be a list of strings, got {words!r}")
    if not all(word.strip() for word in listed):
        raise RequestError("expected bad_words with more than spaces in them, got one without; leave it out")
    if len(listed) > MAX_BAD_WORDS or sum(map(len, listed)) > MAX_BAD_CHARACTERS:
        raise RequestError(
            f"expected at most {MAX_BAD_WORDS} bad_words of {MAX_BAD_CHARACTERS} characters in all, got {len(listed)} "
            f"of {sum(map(len, listed))}; send fewer"
        )
    return tuple(listed)


def _checked_stop(stop: object) -> tuple[str, ...]:
    listed = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(listed, Sequence) or not all(isinstance(text, str) for text in listed):
        raise RequestError(f"expected stop to be a string or a list of strings, got {stop!r}")
    if "" in listed:
        raise RequestError("expected stop strings of at least one character, got an empty one; leave it out")
    if len(listed) > MAX_STOP_STRINGS:
        raise RequestError(f"expected at most {MAX_STOP_STRINGS} stop strings, got {len(listed)}")
    return tuple(listed)


def _checked_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"expected logit_bias to map token ids to numbers, got {bias!r}")
    _check_ids(bias, "every logit_bias token")
    low, high = float(LOGIT_OFFSET.low or 0), float(LOGIT_OFFSET.high or 0)
    if not all(type(value) is float and low <= value <= high for value in bias.values()):
        for token, value in bias.items():
            LOGIT_OFFSET.check(value, RequestError, f"logit_bias of token {token}")
    return dict(bias)


def _check_ids(token_ids: Collection[object], what: str) -> None:
    """Raises `RequestError` for the first that is no token id. Fast if none is: there may be a whole vocabulary."""
    if not all(type(token) is int and 0 <= token <= MAX_COUNT for token in token_ids):
        for token in token_ids:
            TOKEN_ID.check(token, RequestError, what)


def check_prompt(token_ids: Sequence[object], vocab_size: int, max_model_len: int) -> None:
    """Raises `RequestError` unless the tokens can be run and at least one more generated."""
    if len(token_ids) == 0:
        raise RequestError("expected a prompt of at least one token, got an empty one")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"expected a prompt of at most {max_model_len - 1} tokens (max_model_len {max_model_len} less one "
            f"to generate), got {len(token_ids)}; shorten it or raise max_model_len"
        )
    if {type(token) for token in token_ids} == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:  # type: ignore[type-var, operator]
        # The usual case, without a look at each token: there may be many.
        return
    for position, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise RequestError(f"expected token ids from 0 to {vocab_size - 1}, got {token!r} at position {position}")


def new_request_id() -> str:
    """An unguessable id, never chosen by a client."""
    return f"request-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Terms:
    """Caller, priority and timeout of a request."""

    caller: str = ""
    """Identifies who asks. Requests of one caller share a prefix cache, and callers get equal shares of the engine."""
    priority: int = setting(
        0, "Lower goes first, and may preempt running requests of a higher value.", low=-(2**31), high=MAX_COUNT
    )
    timeout: float | None = setting(
        None, "Seconds from submission until the request must have ended.", low=0, high=MAX_TIMEOUT, excludes_low=True
    )

    def __post_init__(self) -> None:
        caller: object = self.caller
        if not isinstance(caller, str):
            raise RequestError(f"expected caller to be a string, got {caller!r}")
        if len(caller) > MAX_CALLER_LENGTH:
            raise RequestError(f"expected a caller of at most {MAX_CALLER_LENGTH} characters, got {len(caller)}")
        check_settings(self, RequestError)

    def deadline(self, now: float) -> float | None:
        """Clock time by which a request submitted at `now` must have ended."""
        return None if self.timeout is None else now + self.timeout


@dataclass(frozen=True)
class Request:
    """One prompt, checked, and what its rows must compute."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    needs: RowNeeds
    terms: Terms = Terms()
    deadline: float | None = None
    """Engine clock time by which it must have ended."""


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token: from the log-softmax of the raw logits, before sampling changes them."""

    logprob: float
    rank: int
    """1 is the most likely; ties count as more likely."""
    decoded_token: str | None
    """The token's text on its own; None without a tokenizer."""


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""Maps token ids to logprobs: the actual token first, then the most likely ones."""


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    """The stop string or the caller's stop token that ended it; None for the model's own end token."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One per token in `token_ids`, if the request asked for them."""
    reasoning: str | None = None
    """The reasoning before `text`, if the request says how it is told apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that it asks for, if the request says how they are read."""


@dataclass(frozen=True)
class RequestOutput:
    """The result of a request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """`n` of them, by index."""
    finished: bool
    params: EffectiveParams | None
    """The parameters that ran, with defaults filled in. None if the request was refused before that."""
    error: str | None = None
    """Why it failed, if a `finish_reason` is "error", or why the engine ended it, if one is "abort"."""
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """One per prompt token, if the request asked for them. The first is None: it has no prediction."""
    num_cached_tokens: int = 0
    """Prompt tokens that an earlier request had left in the cache."""
    num_retractions: int = 0
    """How often a continuation gave its pages back for others and was computed again."""
    queue_seconds: float = 0.0
    """Seconds from submission to the first step, or to the end if there was none."""


@dataclass(frozen=True)
class TextDelta:
    """New output of one continuation: whole characters, and the chosen tokens."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None
    index: int = 0
    """Index of the continuation."""
    stop_reason: int | str | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    events: tuple[AnswerEvent, ...] = ()
    """Also the reasoning and calls, if the request says how they are read."""
