"""Fingerprints of tensor contents, for `--paranoid`: they detect changes in place.

Not a security measure: detects accidents only. Computed on the device, one number is read back per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Fingerprint: TypeAlias = Mapping[str, int]
"""Maps names to a number that depends on every element and its position."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> Fingerprint:
    """One number for each tensor."""
    return {name: _fingerprint(tensor) for name, tensor in tensors.items()}


def changed_parts(before: Fingerprint, after: Fingerprint) -> tuple[str, ...]:
    """The names whose contents differ."""
    return tuple(name for name in before if before[name] != after[name])


def _fingerprint(tensor: Tensor) -> int:
    words = tensor.contiguous().view(-1).view(_INTEGERS[tensor.dtype.itemsize]).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=tensor.device)
    mixed = (words + places) * -7046029254386353131
    return int((mixed ^ (mixed >> 29)).mul_(places).sum())
