"""Choosing, reading and telling in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sightline.runner.sampling.logprobs import TokenLogprobs, token_logprobs
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
            [told[index]] = token_logprobs(logits[index : index + 1], [tokens[index]], [row.params.logprobs])
    return Sampled(tuple(tokens), tuple(finite), told)
