"""Choosing and reading in one go."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sightline.runner.sampler import RowSampling, Sampled, choose, read


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> Sampled:
    return read(choose(logits, rows), logits, rows)
