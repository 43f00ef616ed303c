"""Tiny engines that guess, and what they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from sightline import LLM, RequestOutput, SamplingParams
from sightline.llm import EngineSettings, TokensPrompt
from support.engines import is_at_rest
from support.tiny_models import random_prompts

PAGE = 4
PROMPTS = random_prompts([9, 14, 3, 21, 8])
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=8, max_tokens=24, ignore_eos=True)
SCORED = replace(GREEDY, logprobs=2)
TIE = 1e-4
"""Two tokens whose log-probabilities differ by less are a tie, which rounding decides: chunks round differently."""
EVERYTHING = [
    GREEDY,
    SAMPLED,
    replace(SAMPLED, n=3, top_p=0.9, logprobs=2),
    replace(SAMPLED, temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    replace(GREEDY, repetition_penalty=1.3, min_tokens=5, logit_bias={3: 2.0}, logprobs=1, prompt_logprobs=1),
]


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {
        "skip_tokenizer_init": True,
        "cache_tokens": 1024,
        "page_size": PAGE,
        "paranoid": True,
        "dtype": "float32",
        **changes,
    }
    return LLM(str(folder), **cast("EngineSettings", settings))


def ask(
    llm: LLM, params: SamplingParams | Sequence[SamplingParams], prompts: Sequence[list[int]]
) -> list[RequestOutput]:
    """The outputs, once nothing is held of the requests any more."""
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    assert is_at_rest(llm)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def assert_same_answers(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Fails at the first token that differs, unless it ties with the expected one; nothing behind a tie is compared.

    The expected answers come from greedy requests, with log-probabilities (`SCORED`).
    """
    for output, known in zip(found, expected, strict=True):
        for each, right in zip(output.outputs, known.outputs, strict=True):
            same = [token == other for token, other in zip(each.token_ids, right.token_ids, strict=True)]
            if all(same):
                continue
            at = same.index(False)
            assert right.logprobs is not None
            scores = {token: score.logprob for token, score in right.logprobs[at].items()}
            gap = scores[right.token_ids[at]] - scores.get(each.token_ids[at], float("-inf"))
            assert abs(gap) < TIE, f"token {at}: expected {right.token_ids}, got {each.token_ids}"
