"""Undoes the changes that GGUF converters make to the layout of tensors.

Does not know names, metadata or storage types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """A conversion from decoded tensors of the file to one tensor of Hugging Face."""

    apply: Callable[..., torch.Tensor]
    """Takes the sources in order. The result is contiguous."""
    shape: Callable[..., Shape | None] = lambda shape: shape
    """Computes the result's shape from those of the sources; None if they do not fit each other."""
    keeps_rows: bool = False
    """True if there is one source and `apply` only reorders its rows. It then works on any tensor with as many rows."""


UNCHANGED = TensorLayout(lambda tensor: tensor, keeps_rows=True)

MINUS_ONE = TensorLayout(lambda tensor: tensor - 1.0)
"""Gemma's norms multiply by (1 + weight). The converter stores the sum, so that it works as a plain norm."""


def split_pairs(num_heads: int) -> TensorLayout:
    """Undoes the row order that is made for rotary embeddings of neighbouring rows.

    Within each head, rows (0, half, 1, half + 1, ...) become (0, 1, ..., half, half + 1, ...).
    """

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    return TensorLayout(apply, keeps_rows=True)


def _transposed_shape(shape: Shape) -> Shape | None:
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else None


TRANSPOSED = TensorLayout(lambda tensor: tensor.transpose(1, 2).contiguous(), _transposed_shape)
"""[experts, out, in] to [experts, in, out]."""


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    columns = [tensor.transpose(1, 2) if tensor.dim() == 3 else tensor for tensor in (gate, up)]
    *outer, size = columns[0].shape
    joined = torch.empty(*outer, 2 * size, dtype=gate.dtype)
    for offset, source in enumerate(columns):
        joined[..., offset::2] = source
    return joined


def _interleaved_shape(gate: Shape, up: Shape) -> Shape | None:
    if gate != up or len(gate) not in (2, 3):
        return None
    return (gate[0], 2 * gate[1]) if len(gate) == 2 else (gate[0], gate[2], 2 * gate[1])


INTERLEAVED = TensorLayout(_interleaved, _interleaved_shape)
"""Gate and up weights [experts, out, in] to one [experts, in, 2 * out], and biases [experts, out] to
[experts, 2 * out]: gates in the even columns."""
