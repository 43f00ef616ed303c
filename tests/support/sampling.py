"""Choosing, reading and telling in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from sightline.runner.sampling.logprobs import TokenLogprobs, read_scores, score_tokens
from sightline.runner.sampling.noise import key_words, packed_words
from sightline.runner.sampling.sampler import RowSampling, choose


class Sampled(NamedTuple):
    """The choice for each row."""

    tokens: tuple[int, ...]
    finite: tuple[bool, ...]
    logprobs: dict[int, TokenLogprobs]
    """By row, for rows that asked for them and are finite."""


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> Sampled:
    chosen = choose(logits, rows)
    tokens, finite = chosen.tokens.tolist(), chosen.finite.tolist()
    told = {}
    for index, row in enumerate(rows):
        if row.params.logprobs is not None and finite[index]:
            [scores] = score_tokens(logits[index : index + 1], chosen.tokens[index : index + 1], row.params.logprobs)
            told[index] = read_scores(scores.tolist(), row.params.logprobs)
    return Sampled(tuple(tokens), tuple(finite), told)


def words_of(keys: Sequence[int]) -> Tensor:
    """The words of keys of the noise, [num_keys, 4] int32."""
    return key_words(torch.from_numpy(packed_words(numpy.array(keys, dtype=numpy.uint64))))
