"""Drawing a token from logits: temperature, top-k, top-p, min-p, then a race.

The order is that of transformers: top-p is a share of what top-k left. In the race every remaining token gets the time
E / weight, where E is its own exponential noise, and the shortest time wins. Each token wins with a probability
proportional to its weight. Changing one logit changes the winner only if its token wins before or after the change.
Times are compared as logarithms: the largest distance - log E wins.

    top-k    only the likeliest few are sorted and considered
    open     nothing is sorted; the full noise is computed only for the few tokens that can still win

Both are exact: the way of drawing changes only the time that it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from sightline.core.request import EffectiveParams
from sightline.runner.sampling.noise import coarse_noise, key_words, log_exponential, packed_words, token_words
from sightline.runner.sampling.nucleus import NUM_BUCKETS, masses, outside_top_p, share_limit
from sightline.runner.sampling.positions import at_most, true_positions

_FEW = (64, 1024)
"""How many of the likeliest tokens are sorted for top-k: the first of these numbers that is enough."""
_REACH = 20.0
"""The time limit is set so that this many tokens of a row are expected within it. With probability exp(-20) there is
none, and the whole row is computed."""
_BLOCK_SIZE = 1 << 18
"""The number of logits processed at a time in open rows: they fit in a core's cache."""
_SLACK = 1e-4
"""A relative tolerance above the rounding errors of fp32 weights."""


@dataclass(frozen=True)
class Choice:
    """What determines a row's token besides its logits."""

    params: EffectiveParams
    key: int
    """The key of the row's noise: see `noise_keys`."""


@dataclass(frozen=True)
class _Rows:
    """Rows that are drawn together."""

    logits: Tensor
    """[num_rows, vocab_size] fp32."""
    params: Sequence[EffectiveParams]
    words: Tensor
    """The keys of the noise, [num_rows, 4] int32."""

    def at(self, indices: Sequence[int]) -> _Rows:
        """A subset of the rows, by ascending indices; not copied if they are consecutive."""
        first, end = indices[0], indices[-1] + 1
        where = slice(first, end) if end - first == len(indices) else list(indices)
        return _Rows(self.logits[where], [self.params[index] for index in indices], self.words[where])

    def column(self, values: Sequence[float]) -> Tensor:
        """[num_rows, 1] fp64."""
        return torch.tensor(values, dtype=torch.float64, device=self.logits.device).unsqueeze(1)

    @property
    def temperature(self) -> Tensor:
        return self.column([each.temperature for each in self.params])


def draw(logits: Tensor, rows: Sequence[Choice]) -> list[int]:
    """One token for each row of logits [num_rows, vocab_size] fp32, which are finite or -inf for forbidden tokens."""
    every = _Rows(logits, [row.params for row in rows], _words([row.key for row in rows]))
    vocab_size = logits.shape[1]
    waiting = [index for index, row in enumerate(rows) if 0 < row.params.top_k < vocab_size]
    rest = sorted(set(range(len(rows))) - set(waiting))
    tokens = [0] * len(rows)
    for index, token in zip(rest, _draw_open(every.at(rest)) if rest else [], strict=True):
        tokens[index] = token
    for count in (*(few for few in _FEW if few < vocab_size), vocab_size):
        # One more than top-k, to see if the last kept token ties with one that is not kept.
        indices = [index for index in waiting if rows[index].params.top_k < count or count == vocab_size]
        drawn = _draw_few(every.at(indices), count) if indices else []
        for index, winner in zip(indices, drawn, strict=True):
            if winner is not None:
                tokens[index] = winner
                waiting.remove(index)
    return tokens


def truncated_probabilities(logits: Tensor, params: Sequence[EffectiveParams]) -> tuple[Tensor, Tensor]:
    """Tokens by falling probability, and their probabilities after temperature, top-k, top-p and min-p, not normalised.

    Logits are [num_rows, vocab_size] fp64. Equally likely tokens are in the order of their ids.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rows = _Rows(logits, params, _words([0] * len(params)))
    return tokens, _kept_weight((ordered - ordered[:, :1]) / rows.temperature, rows)


def _draw_few(rows: _Rows, count: int) -> list[int | None]:
    """Draws from the `count` likeliest tokens, for rows with a smaller top-k, or any rows if `count` is all.

    A row's token is None if a tie with the last kept token extends beyond those.
    """
    found = rows.logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = rows.logits.gather(1, found).double().sort(dim=-1, descending=True, stable=True)
    tokens = found.gather(1, order)
    distance = (ordered - ordered[:, :1]) / rows.temperature
    score = distance - log_exponential(rows.words.unsqueeze(1), tokens)
    score.masked_fill_(_kept_weight(distance, rows) == 0.0, -torch.inf)
    winners: list[int] = tokens.gather(1, score.argmax(dim=-1, keepdim=True)).squeeze(1).tolist()
    if count == rows.logits.shape[1]:
        return list(winners)
    last_kept = ordered.gather(1, rows.column([each.top_k - 1 for each in rows.params]).long())
    # Of tokens that cannot come it does not matter which are kept.
    certain = ((last_kept > ordered[:, -1:]) | last_kept.isneginf()).squeeze(1).tolist()
    return [token if sure else None for token, sure in zip(winners, certain, strict=True)]


def _kept_weight(distance: Tensor, rows: _Rows) -> Tensor:
    """The weights of tokens sorted by falling logit, of which top-k keeps no more; 0 for dropped ones."""
    rank = torch.arange(distance.shape[1], device=distance.device).unsqueeze(0)
    beyond = rank >= rows.column([each.top_k or torch.inf for each in rows.params])
    mass = masses(distance).masked_fill_(beyond, 0)
    before = mass.cumsum(dim=-1).sub_(mass)
    top_p = rows.column([each.top_p for each in rows.params])
    outside = (before >= share_limit(top_p, mass.sum(dim=-1, keepdim=True))) & (top_p < 1.0)
    weight = distance.exp()
    min_p = rows.column([each.min_p for each in rows.params])
    return weight.masked_fill_(beyond | outside | (weight < min_p), 0.0)


def _draw_open(rows: _Rows) -> list[int]:
    """Draws for rows without top-k."""
    num_rows, vocab_size = rows.logits.shape
    of_tokens = token_words(vocab_size, rows.logits.device)
    block = max(1, _BLOCK_SIZE // max(vocab_size, NUM_BUCKETS))
    found = []
    for start in range(0, num_rows, block):
        near, tokens, reach = _finalists(rows.at(range(start, min(start + block, num_rows))), of_tokens, _REACH)
        found.append((near + start, tokens, reach))
    near, tokens, reach = (torch.cat(parts) for parts in zip(*found, strict=True))
    score, winners = _best(rows, near, tokens)
    short = (score < -reach.log()).nonzero().squeeze(1)
    if len(short):
        some = rows.at(short.tolist())
        near, tokens, _ = _finalists(some, of_tokens, torch.inf)
        winners[short] = _best(some, near, tokens)[1]
    chosen: list[int] = winners.tolist()
    return chosen


def _finalists(rows: _Rows, of_tokens: Tensor, expected: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and tokens [num_finalists] whose time may be within their row's limit, and the limits [num_rows] fp64.

    The limit, or reach, is the time within which `expected` tokens of the row are expected. E is at least the noise, so
    a token's time can be within the limit only if its noise is at most reach * weight. If any is, the winner is among
    these tokens, and only they need their full noise. A weight that fp32 rounds to 0 cannot win.
    """
    weight = _open_weight(rows)
    reach = expected / weight.sum(dim=-1, keepdim=True).double()
    # fp32 rounds the coarse noise by at most 128 of its 2^32 units.
    most = weight.mul((reach * (2.0**32 * (1 + _SLACK))).float()).add_(512.0 - 2.0**31)
    near, tokens = true_positions(at_most(coarse_noise(rows.words, of_tokens).float(), most))
    kept = weight[near, tokens] > 0.0
    return near[kept], tokens[kept], reach.squeeze(1)


def _open_weight(rows: _Rows) -> Tensor:
    """Weights [num_rows, vocab_size] fp32; 0 for dropped tokens. Borderline cases of min-p are left to `_best`."""
    largest = rows.logits.amax(dim=-1, keepdim=True)
    # A temperature too small for fp32 is taken as higher: more tokens are considered, never fewer.
    smallest = torch.finfo(torch.float32).tiny
    weight = (rows.logits - largest).div_(rows.temperature.clamp(min=smallest).float()).exp_()
    nucleus = [index for index, each in enumerate(rows.params) if each.top_p < 1.0]
    if nucleus:
        some = rows.at(nucleus)
        distance = (some.logits.double() - largest[nucleus]).div_(some.temperature)
        outside = outside_top_p(distance, some.logits, some.column([each.top_p for each in some.params]))
        if len(nucleus) == len(rows.params):
            weight.masked_fill_(outside, 0.0)
        else:
            weight[nucleus] = weight[nucleus].masked_fill_(outside, 0.0)
    if any(each.min_p > 0.0 for each in rows.params):
        floor = rows.column([each.min_p * (1 - _SLACK) for each in rows.params]).float()
        weight.masked_fill_(at_most(weight, floor), 0.0)
    return weight


def _best(rows: _Rows, near: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The best score of each row and its token, among `tokens` [num_listed] of the rows `near`; min-p is exact."""
    num_rows, vocab_size = rows.logits.shape
    largest = rows.logits.amax(dim=-1)
    distance = (rows.logits[near, tokens].double() - largest[near]) / rows.temperature[near, 0]
    cut_off = distance.exp() < rows.column([each.min_p for each in rows.params])[near, 0]
    score = (distance - log_exponential(rows.words[near], tokens)).masked_fill_(cut_off, -torch.inf)
    best = score.new_full((num_rows,), -torch.inf).scatter_reduce_(0, near, score, "amax")
    first = torch.where(score == best[near], tokens, vocab_size)
    return best, first.new_full((num_rows,), vocab_size).scatter_reduce_(0, near, first, "amin")


def _words(keys: Sequence[int]) -> Tensor:
    return key_words(torch.from_numpy(packed_words(numpy.array(keys, dtype=numpy.uint64))))
