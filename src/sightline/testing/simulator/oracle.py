"""What a history is followed by: the arithmetic that the simulated model does on its cache, done on the tokens alone.

Knows tokens. Does not know batches, pages or the engine.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.core.request import EffectiveParams
from sightline.runner.sampling.sampler import RowSampling, choose

NUM_ORDINARY = 37
"""Tokens 0 to 36 are generated, and most prompts are made of them."""
RAISING, SPOILING = NUM_ORDINARY, NUM_ORDINARY + 1
"""Tokens that only prompts hold: a forward pass that reads the first raises, logits after the second are NaN."""
VOCAB = NUM_ORDINARY + 2
MAX_LEN = 1 << 12
MASK = (1 << 52) - 1
_BEST, _SECOND, _NEVER = 8.0, 7.0, -1000.0
"""Logits; of all others, 0."""
_NORMALISER = math.log(math.exp(_BEST) + math.exp(_SECOND) + NUM_ORDINARY - 2)
_WEIGHTS = [random.Random(place).getrandbits(64) | 1 for place in range(MAX_LEN)]
WEIGHTS = np.array(_WEIGHTS, dtype=np.uint64)
"""By place in a history: what the entry there counts in the hash."""


def prefix_hashes(tokens: Sequence[int]) -> Iterator[int]:
    """The hash of every beginning of a history, from its first token on: of each token, its place and its position."""
    total = 0
    for position, token in enumerate(tokens):
        total += (token * 64 + position * 8192 + 1) * _WEIGHTS[position]
        yield total & MASK


def candidates(value: int) -> tuple[int, int]:
    """The likeliest token after a hash, and the second."""
    best, second = value % NUM_ORDINARY, value // NUM_ORDINARY % NUM_ORDINARY
    return best, second if second != best else (best + 1) % NUM_ORDINARY


def next_token(tokens: Sequence[int]) -> int:
    """The likeliest token after a history."""
    *_, value = prefix_hashes(tokens)
    return candidates(value)[0]


def logits_of_hashes(hashes: Sequence[int | None]) -> NDArray[np.float32]:
    """[num_hashes, VOCAB]; NaN where there is no hash."""
    logits = np.zeros((len(hashes), VOCAB), dtype=np.float32)
    logits[:, NUM_ORDINARY:] = _NEVER
    for row, value in enumerate(hashes):
        if value is None:
            logits[row] = np.nan
        else:
            best, second = candidates(value)
            logits[row, best], logits[row, second] = _BEST, _SECOND
    return logits


def expected_tokens(prompt: Sequence[int], generated: Sequence[int], params: EffectiveParams) -> list[int]:
    """What should stand at the place of each generated token, after all that was generated before it."""
    hashes = list(prefix_hashes([*prompt, *generated]))[len(prompt) - 1 : -1]
    if params.temperature > 0.0:
        rows = [RowSampling(params, place) for place in range(len(hashes))]
        logits = torch.from_numpy(logits_of_hashes(hashes))
        return choose(logits, rows).tokens.tolist() if rows else []
    if params.frequency_penalty == 0.0:
        return [value % NUM_ORDINARY for value in hashes]
    counts: Counter[int] = Counter()
    expected = []
    for value, token in zip(hashes, generated, strict=True):
        expected.append(_penalised(value, counts, params.frequency_penalty))
        counts[token] += 1
    return expected


def _penalised(value: int, counts: Counter[int], penalty: float) -> int:
    """The likeliest token where each costs something for every time that it was there; of equals the first."""
    scores = dict.fromkeys(range(NUM_ORDINARY), 0.0) | dict(zip(candidates(value), (_BEST, _SECOND), strict=True))
    return max(scores, key=lambda token: (scores[token] - penalty * counts[token], -token))


def logprob(value: int, token: int) -> float:
    """Of a token after a hash."""
    scores = dict(zip(candidates(value), (_BEST, _SECOND), strict=True))
    return scores.get(token, 0.0 if token < NUM_ORDINARY else _NEVER) - _NORMALISER
