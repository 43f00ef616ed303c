"""Turns what a caller sends into a `Request`: checked against this model, with nothing left open.

Knows the model's limits and its own wishes. Does not know what runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from random import Random
from typing import TypeVar

from sightline.core.errors import RequestError
from sightline.core.request import EffectiveParams, Request, SamplingParams, Terms, check_prompt, new_request_id
from sightline.models.loading.generation import GenerationDefaults
from sightline.text.tokenizers.tokenizer import Tokenizer

_SEED_BITS = 53
"""The size of a seed that is chosen here. Answers and traces tell it, and JavaScript's numbers hold no more bits."""
_T = TypeVar("_T")


class Intake:
    """Turns what comes into requests."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        generation: GenerationDefaults,
        tokenizer: Tokenizer | None,
        seed: int | None,
    ) -> None:
        """`seed` is where the seeds of requests that bring none come from; None: from chance."""
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._generation = generation
        self._tokenizer = tokenizer
        self._seeds = Random(secrets.randbits(64) if seed is None else seed)

    def request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, prompt: str | None, terms: Terms, now: float
    ) -> tuple[Request, EffectiveParams]:
        """The request, and the parameters that it runs with. Raises `RequestError` for what cannot run."""
        kept = params.cut(prompt_token_ids, self._max_model_len)
        check_prompt(kept, self._vocab_size, self._max_model_len)
        self._check_tokens(params)
        asked = self._effective(params, self._max_model_len - len(kept))
        self._check_choice(asked)
        token_ids = tuple(int(token) for token in kept)
        return Request(new_request_id(), prompt, token_ids, asked.needs, terms, terms.deadline(now)), asked

    def _effective(self, params: SamplingParams, room: int) -> EffectiveParams:
        """The caller's wishes, then the model's own, then neutral values; `room` is what the context leaves."""
        model = self._generation
        greedy = model.do_sample is False or (model.temperature is None and not model.do_sample)
        model_temperature = 0.0 if greedy else _first(model.temperature, 1.0)
        end_tokens = frozenset(token for token in model.eos_token_ids if token < self._vocab_size)
        max_tokens = min(_first(params.max_tokens, room), room)
        if params.min_tokens is not None and params.min_tokens > max_tokens:
            raise RequestError(
                f"expected min_tokens of at most {max_tokens}, which is what the context leaves, got "
                f"{params.min_tokens}; shorten the prompt or raise max_model_len"
            )
        return EffectiveParams(
            temperature=_first(params.temperature, model_temperature),
            top_p=_first(params.top_p, model.top_p, 1.0),
            top_k=_first(params.top_k, model.top_k, 0),
            min_p=_first(params.min_p, model.min_p, 0.0),
            seed=self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            stop_token_ids=frozenset(params.stop_token_ids),
            skip_special_tokens=params.skip_special_tokens,
            detokenize=params.detokenize,
            eos_token_ids=frozenset() if params.ignore_eos else end_tokens,
            repetition_penalty=_first(params.repetition_penalty, model.repetition_penalty, 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.bias_pairs,
            allowed_token_ids=params.allowed,
            bad_words=self._bad_words(params),
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=_first(params.min_tokens, min(_first(model.min_tokens, 0), max_tokens)),
            n=params.n,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            structured_outputs=params.structured_outputs,
            reading=params.reading,
        )

    def _check_tokens(self, params: SamplingParams) -> None:
        """Raises `RequestError` for what this model, or its missing tokenizer, cannot do."""
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.bias_pairs.last_token),
            ("allowed_token_ids", (params.allowed or ())[-1:]),
        ):
            if (token := max(tokens, default=0)) >= self._vocab_size:
                raise RequestError(f"expected {name} below {self._vocab_size}, the vocabulary's size, got {token}")
        if len({*self._generation.eos_token_ids, *params.stop_token_ids}) >= self._vocab_size:
            raise RequestError("expected stop_token_ids that leave a token to generate, got the whole vocabulary")
        if self._tokenizer is None and (params.stop_strings or params.bad_words):
            wanted = "stop_token_ids, got stop strings" if params.stop_strings else "no bad_words, got some"
            raise RequestError(f"expected {wanted}: the tokenizer was not loaded (skip_tokenizer_init)")
        if self._tokenizer is None and params.structured_outputs is not None:
            raise RequestError(
                "expected no structured_outputs, got some: the tokenizer was not loaded (skip_tokenizer_init)"
            )

    def _check_choice(self, params: EffectiveParams) -> None:
        """Raises `RequestError` unless a token is left at every step, whatever was generated before."""
        ends = params.eos_token_ids | params.stop_token_ids if params.min_tokens else frozenset()
        kept_out = {word[-1] for word in params.bad_words} | ends
        allowed = range(self._vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        if len(kept_out) >= len(allowed) and kept_out.issuperset(allowed):
            raise RequestError(
                "expected allowed_token_ids that leave a token which is no end before min_tokens and ends no entry of "
                "bad_words, got none; allow more"
            )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word, as it is written at the beginning of a text and after a space."""
        if self._tokenizer is None or not params.bad_words:
            return ()
        words = [word.lstrip() for word in params.bad_words]
        found = {tuple(self._tokenizer.encode_text(prefix + word)) for word in words for prefix in ("", " ")}
        # A token beyond the model's vocabulary never comes.
        return tuple(sorted(word for word in found if word and max(word) < self._vocab_size))


def _first(*values: _T | None) -> _T:
    """The first value that is not None; the last one never is."""
    return next(value for value in values if value is not None)
