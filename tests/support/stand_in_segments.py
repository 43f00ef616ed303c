"""Segments of tokens as stand-ins of libraries compute them: by the oracle, token by token."""

from __future__ import annotations

import itertools
from collections import deque

import torch
from torch import Tensor

from sightline.attention.contract import RecurrentInputs
from sightline.attention.oracle.recurrent import recur_row
from sightline.attention.spec import RecurrentSpec

PIECE = 16
"""Tokens that the oracle computes at once: it returns the state behind each of them."""
_BORDERS: deque[tuple[Tensor, list[int]]] = deque(maxlen=4)


def borders_of(cu_seqlens: Tensor) -> list[int]:
    """The borders as the library remembers them: what a tensor held when it was first seen."""
    for seen, borders in _BORDERS:
        if seen is cu_seqlens:
            return borders
    _BORDERS.append((cu_seqlens, cu_seqlens.tolist()))
    return _BORDERS[-1][1]


def recur_segments(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, scale: float, first: Tensor, borders: list[int]
) -> tuple[Tensor, Tensor]:
    """Outputs of all tokens, and the states behind segments [segments, heads, key_dim, value_dim], by the oracle.

    Without `beta`, whole values are stored and no key recalls any. Without queries of unit length, as they are given.
    """
    (num_tokens, key_heads, key_dim), (_, heads, value_dim) = q.shape, v.shape
    spec = RecurrentSpec(
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=scale,
        delta_rule=beta is not None,
        channel_decay=decay.ndim == 3,
        unit_keys=False,
        conv_width=0,
    )
    mixed = torch.cat([each.reshape(num_tokens, -1) for each in (q, k, v)], dim=1)
    inputs = RecurrentInputs(mixed, decay, torch.ones(num_tokens, heads) if beta is None else beta, None, None)
    out, states = torch.full(v.shape, torch.nan), first.float().clone()
    for segment, (start, stop) in enumerate(itertools.pairwise(borders)):
        for begin in range(start, stop, PIECE):
            piece = slice(begin, min(begin + PIECE, stop))
            found = recur_row(spec, inputs.part(piece), states[segment], None)
            out[piece], states[segment] = found.out, found.states[-1]
    return out.to(v.dtype), states


def forget_borders() -> None:
    """Forgets the borders of earlier tests."""
    _BORDERS.clear()
