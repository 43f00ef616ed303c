"""The tokens that follow a history: the arithmetic that the simulated model does on its cache, done on tokens alone.

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
"""Tokens 0 to 36 are ordinary: only they are generated."""
RAISING, SPOILING = NUM_ORDINARY, NUM_ORDINARY + 1
"""Special tokens of prompts: a forward pass that reads the first raises, and logits after the second are NaN."""
VOCAB = NUM_ORDINARY + 2
MAX_LEN = 1 << 12
MASK = (1 << 52) - 1
_BEST, _SECOND, _NEVER = 8.0, 7.0, -1000.0
"""Logits of the likeliest, the second and the special tokens; all others have 0."""
_NORMALISER = math.log(math.exp(_BEST) + math.exp(_SECOND) + NUM_ORDINARY - 2)
_WEIGHTS = [random.Random(place).getrandbits(64) | 1 for place in range(MAX_LEN)]
WEIGHTS = np.array(_WEIGHTS, dtype=np.uint64)
"""The factor of each position in the hash."""


def prefix_hashes(tokens: Sequence[int]) -> Iterator[int]:
    """Yields the hash of every prefix of a history, the shortest first."""
    total = 0
    for position, token in enumerate(tokens):
        total += _mixed(token, position)
        yield total & MASK


def likeliest(tokens: Sequence[int], count: int) -> list[int]:
    """Returns the tokens that follow a history if each is the likeliest."""
    known, total = [], sum(_mixed(token, position) for position, token in enumerate(tokens))
    for position in range(len(tokens), min(len(tokens) + count, MAX_LEN)):
        known.append((total & MASK) % NUM_ORDINARY)
        total += _mixed(known[-1], position)
    return known


def _mixed(token: int, position: int) -> int:
    return (token * 64 + position * 8192 + 1) * _WEIGHTS[position]


def candidates(value: int) -> tuple[int, int]:
    """Returns the likeliest token after a hash, and the second."""
    best, second = value % NUM_ORDINARY, value // NUM_ORDINARY % NUM_ORDINARY
    return best, second if second != best else (best + 1) % NUM_ORDINARY


def logits_of_hashes(hashes: Sequence[int | None]) -> NDArray[np.float32]:
    """Returns logits [num_hashes, VOCAB]; NaN for a hash of None."""
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
    """Returns the token that should follow the prompt and the first i generated tokens, for each i."""
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
    """Returns the likeliest token under a frequency penalty; the first of equals."""
    scores = dict.fromkeys(range(NUM_ORDINARY), 0.0) | dict(zip(candidates(value), (_BEST, _SECOND), strict=True))
    return max(scores, key=lambda token: (scores[token] - penalty * counts[token], -token))


def logprob(value: int, token: int) -> float:
    """Returns the log probability of a token after a hash."""
    scores = dict(zip(candidates(value), (_BEST, _SECOND), strict=True))
    return scores.get(token, 0.0 if token < NUM_ORDINARY else _NEVER) - _NORMALISER
