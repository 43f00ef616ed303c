"""Masks of the tokens that may come, one bit each, laid over logits before a token is chosen.

Masks are made on the host, of rows that a grammar holds; where they come from is not known here. On a GPU all of them
go there by one copy, packed, and are unpacked there: nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.transfer import sent


class TokenMasks(NamedTuple):
    """The masks of some rows of logits, on the host."""

    rows: NDArray[numpy.int64]
    """[num_masked]: which rows of the logits have one."""
    words: NDArray[numpy.int64]
    """[num_masked, num_words]: bit i of word w is token 64 w + i."""


def row_masks(masks: Sequence[NDArray[numpy.int64] | None]) -> TokenMasks | None:
    """The masks of all rows, None for rows without one; None if no row has one."""
    found = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not found:
        return None
    return TokenMasks(
        numpy.array([row for row, _ in found], dtype=numpy.int64), numpy.stack([mask for _, mask in found])
    )


@contextmanager
def masked(logits: Tensor, masks: TokenMasks | None) -> Iterator[Tensor]:
    """Sets the logits [num_rows, vocab_size] fp32 of tokens that may not come to -inf, and undoes it at the end."""
    if masks is None:
        yield logits
        return
    with torch.inference_mode():
        rows, words = sent([masks.rows, masks.words], logits.device)
        before = logits.index_select(0, rows)
        try:
            logits.index_copy_(0, rows, before.masked_fill(_hidden(words, logits.shape[1]), -torch.inf))
            yield logits
        finally:
            logits.index_copy_(0, rows, before)


def _hidden(words: Tensor, vocab_size: int) -> Tensor:
    """[num_masked, vocab_size] bool: True for tokens that may not come."""
    if words.device.type == "cpu":
        bits = numpy.unpackbits(words.numpy().view(numpy.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits == 0)
    return unpacked(words)[:, :vocab_size] == 0


def unpacked(words: Tensor) -> Tensor:
    """The bits of words [num_masked, num_words] int64 as [num_masked, 64 num_words] uint8, on any device."""
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = words.view(torch.uint8).unsqueeze(-1).bitwise_right_shift(places).bitwise_and_(1)
    return bits.view(words.shape[0], -1)
