"""Chooses tokens from logits.

A token depends only on its row's logits, its parameters, the tokens before it, its seed and its place in the output:
the noise is a function of (seed, place, token), so neither the batch nor a recomputation changes it. Rounding of the
logits changes a choice only if two tokens were about equally good.

    raw logits ─ bias, penalties, forbidden tokens ─ temperature ─ top-k ─ top-p ─ min-p ─ draw
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.core.request import EffectiveParams
from sightline.runner.sampling.adjust import TokenAdjustment, adjusted
from sightline.runner.sampling.draw import Choice, draw
from sightline.runner.sampling.noise import noise_key


@dataclass(eq=False, slots=True)
class RowSampling:
    """How one row chooses its next token. Treat as immutable; not frozen, because one is created per row per step."""

    params: EffectiveParams
    place: int
    """The number of tokens that the sequence has generated before this one."""
    adjustment: TokenAdjustment | None = None
    """The bias and token counts if the parameters adjust logits, otherwise None."""

    def __post_init__(self) -> None:
        if self.params.adjusts_logits != (self.adjustment is not None):
            raise ValueError(f"expected an adjustment exactly for parameters that adjust logits, got {self.adjustment}")
        if self.adjustment is not None and self.adjustment.num_counted != self.place:
            raise ValueError(f"expected {self.place} tokens counted, got {self.adjustment.num_counted}")


@dataclass(frozen=True)
class Chosen:
    """The choice for each row, on the device, so that the next step can use it before the host reads it."""

    tokens: Tensor
    """[num_rows] int64."""
    finite: Tensor
    """[num_rows] bool: False if the row's logits held a NaN or an infinity. Its token is then meaningless."""


def choose(logits: Tensor, rows: Sequence[RowSampling]) -> Chosen:
    """Chooses one token for each row of logits [num_rows, vocab_size] fp32. The logits are unchanged afterwards."""
    finite = logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()
    adjusting = [(index, row.adjustment) for index, row in enumerate(rows) if row.adjustment is not None]
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
    if drawn:
        # Skip rows with NaN or infinite logits: sampling them would not terminate.
        usable = finite.tolist()
        drawn = [index for index in drawn if usable[index]]
    with adjusted(logits, adjusting) as values:
        tokens = _argmax(values) if len(drawn) < len(rows) else torch.zeros_like(finite, dtype=torch.int64)
        if drawn:
            some = values if len(drawn) == len(rows) else values[drawn]
            chosen = draw(some, [_choice(rows[index]) for index in drawn])
            tokens[drawn] = torch.tensor(chosen, dtype=torch.int64, device=tokens.device)
    return Chosen(tokens, finite)


def _argmax(logits: Tensor) -> Tensor:
    """The index of the first largest logit, [num_rows] int64. On the CPU numpy takes a tenth of torch's time."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _choice(row: RowSampling) -> Choice:
    return Choice(row.params, noise_key(row.params.seed, row.place))
