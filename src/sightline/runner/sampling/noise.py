"""The random noise for drawing tokens: a pure function of (seed, place, token).

Owns the hash, which decides the token that a seed gives. Does not know logits or batches: a token's noise does not
depend on anything else that is drawn.

    (seed, place) -> key of 64 bits -> four words of 32;  (first two, token) -> 32 bits;  (last two, token) -> 20 more
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
_SIGN = 1 << 31


def derived_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th continuation. The first uses the request's own seed, whatever `n` is."""
    own = _mix(_mix(_words([seed]) ^ _GOLDEN) + _words([index]) * _GOLDEN)
    return seed if index == 0 else int(own[0])


def noise_keys(seeds: Sequence[int], places: Sequence[int]) -> NDArray[numpy.uint64]:
    """A 64-bit hash of each (seed, place)."""
    return _mix(_mix(_words(seeds)) + (_words(places) + numpy.uint64(1)) * _GOLDEN)


def packed_words(keys: NDArray[numpy.uint64]) -> NDArray[numpy.int64]:
    """Four words of 32 bits for each key, two in an integer: [num_keys, 2]."""
    return numpy.stack([keys, _mix(keys + _GOLDEN)], axis=1).view(numpy.int64)


def key_words(packed: Tensor) -> Tensor:
    """The result of `packed_words`, [num_keys, 2] int64, as words: [num_keys, 4] int32."""
    return packed.contiguous().view(torch.int32)


def token_words(vocab_size: int, device: torch.device) -> Tensor:
    """A word for each token of the vocabulary, [vocab_size] int32, for `coarse_noise`."""
    return _scattered(torch.arange(vocab_size, dtype=torch.int32, device=device))


def coarse_noise(words: Tensor, of_tokens: Tensor) -> Tensor:
    """The first 32 bits of every token's noise, [num_rows, vocab_size] int32. The smallest integer is the least noise.

    `words` are [num_rows, 4] int32, `of_tokens` the result of `token_words`.
    """
    return _hashed(of_tokens, words[:, 0:1], words[:, 1:2])


def noise(words: Tensor, tokens: Tensor) -> Tensor:
    """A random number above 0 and below 1 of 52 bits for each token: fp64, in the shape of `tokens` int64.

    `words` are [..., 4] int32 whose leading dimensions broadcast with `tokens`. Half a unit is added to the bits, which
    fp64 holds exactly, so that the result is never 0 or 1.
    """
    scattered = _scattered(tokens.to(torch.int32))
    high = _hashed(scattered, words[..., 0], words[..., 1]).to(torch.int64) + _SIGN
    low = _hashed(scattered, words[..., 2], words[..., 3]).to(torch.int64) + _SIGN
    return ((high << 20) + (low >> 12)).to(torch.float64).add_(0.5).mul_(2.0**-52)


def log_exponential(words: Tensor, tokens: Tensor) -> Tensor:
    """The logarithm of each token's exponential noise, in fp64. Takes what `noise` takes."""
    return noise(words, tokens).neg_().log1p_().neg_().log_()


def _scattered(tokens: Tensor) -> Tensor:
    """Hashes token ids to words in which every bit depends on all bits of the id."""
    word = _xor_shifted(tokens + _signed(0x9E3779B9), 16).mul_(_signed(0x85EBCA6B))
    return _xor_shifted(_xor_shifted(word, 13).mul_(_signed(0xC2B2AE35)), 16)


def _hashed(scattered: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Hashes each token with a key of two words. The int32 products are meant to overflow."""
    word = _xor_shifted((scattered ^ first).mul_(_signed(0x21F0AAAD)), 16).add_(second)
    return _xor_shifted(word.mul_(_signed(0xD35A2D97)), 15).mul_(_signed(0x735A2D97))


def _xor_shifted(word: Tensor, by: int) -> Tensor:
    """word ^ (word >> by), in place. The mask removes the copies of the sign that int32 shifts make."""
    return word.bitwise_xor_((word >> by).bitwise_and_((1 << (32 - by)) - 1))


def _signed(word: int) -> int:
    """The lower 32 bits as a signed integer."""
    return ((word & 0xFFFFFFFF) ^ _SIGN) - _SIGN


def _words(values: Sequence[int]) -> NDArray[numpy.uint64]:
    return numpy.array(values, dtype=numpy.uint64)


def _mix(value: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """Hashes words of 64 bits. The products are meant to overflow."""
    value = (value ^ (value >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return value ^ (value >> numpy.uint64(31))
