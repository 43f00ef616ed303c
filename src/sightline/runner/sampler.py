"""From logits to tokens.

A token depends on its row's logits, its parameters, the tokens before it, its seed and its place in the output, and on
nothing else: each token's noise is a function of (seed, place, token), so neither the batch nor a recomputation changes
it, and a rounding of the logits changes a choice only where two tokens were about as good.

    raw logits ─ bias, penalties, forbidden tokens ─ temperature ─ top-k ─ top-p ─ min-p ─ draw
         └─ log probabilities that are told
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sightline.core.request import EffectiveParams
from sightline.runner.adjustment import TokenAdjustment, adjusted
from sightline.runner.drawing import Choice, draw
from sightline.runner.logprobs import TokenLogprobs, token_logprobs
from sightline.runner.noise import noise_key


@dataclass(frozen=True)
class RowSampling:
    """How one row chooses its next token."""

    params: EffectiveParams
    place: int
    """Tokens that the sequence has generated before this one."""
    adjustment: TokenAdjustment | None = None
    """Its bias and token counts; there exactly where the parameters adjust logits."""

    def __post_init__(self) -> None:
        if self.params.adjusts_logits != (self.adjustment is not None):
            raise ValueError(f"expected an adjustment exactly for parameters that adjust logits, got {self.adjustment}")
        if self.adjustment is not None and self.adjustment.num_counted != self.place:
            raise ValueError(f"expected {self.place} tokens counted, got {self.adjustment.num_counted}")


@dataclass(frozen=True)
class Sampled:
    """The choice for each row."""

    tokens: tuple[int, ...]
    finite: tuple[bool, ...]
    """False where the row's logits held a NaN or an infinity: its token means nothing."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """By row, of the raw logits, for rows that asked for them and are finite."""


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> Sampled:
    """One token for each row of logits [num_rows, vocab_size] fp32, which are as before when it returns."""
    finite = _finite(logits)
    adjusting = [(index, row.adjustment) for index, row in enumerate(rows) if row.adjustment is not None]
    with adjusted(logits, adjusting) as values:
        drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0 and finite[index]]
        tokens = _argmax(values) if len(drawn) < len(rows) else [0] * len(rows)
        if drawn:
            some = values if len(drawn) == len(rows) else values[drawn]
            chosen = draw(some, [_choice(rows[index]) for index in drawn])
            for index, token in zip(drawn, chosen, strict=True):
                tokens[index] = token
    return Sampled(tuple(tokens), tuple(finite), _logprobs(logits, rows, tokens, finite))


def _finite(logits: Tensor) -> list[bool]:
    """Whether each row is free of NaN and infinities, which its extremes tell without another pass over a mask."""
    finite: list[bool] = (logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()).tolist()
    return finite


def _argmax(logits: Tensor) -> list[int]:
    """The first of the largest. On the CPU numpy's takes a tenth of the time of torch's."""
    tokens: list[int] = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return tokens


def _logprobs(
    logits: Tensor, rows: Sequence[RowSampling], tokens: Sequence[int], finite: Sequence[bool]
) -> dict[int, TokenLogprobs]:
    asked = {index: row.params.logprobs for index, row in enumerate(rows) if finite[index]}
    counts = {index: count for index, count in asked.items() if count is not None}
    if not counts:
        return {}
    told = token_logprobs(logits[list(counts)], [tokens[index] for index in counts], list(counts.values()))
    return dict(zip(counts, told, strict=True))


def _choice(row: RowSampling) -> Choice:
    return Choice(row.params, noise_key(row.params.seed, row.place))
