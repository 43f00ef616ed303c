"""From logits to tokens.

A token depends on its row's logits, its parameters, the tokens before it, its seed and its place in the output, and on
nothing else: the random number is a function of (seed, place), so neither the batch nor a recomputation changes it.

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

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


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
        tokens = _argmax(values)
        drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0 and finite[index]]
        if drawn:
            chosen = draw(values[drawn], [_choice(rows[index]) for index in drawn])
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


def derived_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th continuation. The first keeps the request's own, whatever `n` is."""
    return seed if index == 0 else _mix(_mix(seed ^ _GOLDEN) + index * _GOLDEN)


def _choice(row: RowSampling) -> Choice:
    return Choice(row.params, uniform(row.params.seed, row.place))


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on (seed, place) alone: a counter run through a 64-bit mixer."""
    return (_mix(_mix(seed) + (place + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
