"""Parameters and results of beam search. Does not know how beams are computed."""

from __future__ import annotations

from dataclasses import dataclass

from sightline.core.errors import RequestError
from sightline.core.request import MAX_COUNT, MAX_LOGPROBS, SamplingParams
from sightline.core.settings import check_settings, keywords, setting, stated

MAX_BEAMS = MAX_LOGPROBS // 2
"""Each beam is continued by its `2 * beam_width` likeliest tokens, whose log probabilities are asked for."""


@keywords(RequestError, "a parameter of beam search", dict.fromkeys(stated(SamplingParams), "a sampling parameter"))
@dataclass(frozen=True)
class BeamSearchParams:
    """How to search."""

    beam_width: int = setting(1, "Sequences that are kept after each token, and returned.", low=1, high=MAX_BEAMS)
    max_tokens: int = setting(16, "Most tokens to generate.", low=1, high=MAX_COUNT)
    ignore_eos: bool = setting(False, "Go on past the model's own end tokens.")
    temperature: float = setting(0.0, "0 or 1: beams are ranked by the model's own log probabilities.", low=0, high=1)
    length_penalty: float = setting(
        1.0,
        "A sequence is ranked by its log probability / length ** length_penalty, prompt included.",
        low=-10,
        high=10,
    )

    def __post_init__(self) -> None:
        check_settings(self, RequestError)
        if self.temperature not in (0.0, 1.0):
            raise RequestError(
                f"expected temperature 0 or 1 in a beam search, got {self.temperature:g}: beams are ranked by the "
                "model's own log probabilities"
            )


@dataclass(frozen=True)
class BeamSearchSequence:
    """A continuation that was found."""

    tokens: tuple[int, ...]
    """The prompt's tokens and the generated ones, without the end token."""
    text: str | None
    """The text of `tokens`; None without a tokenizer."""
    cum_logprob: float
    """Log probability of the generated tokens and the end token, if there is one."""
    finish_reason: str
    """ "stop" if an end token followed, "length" otherwise."""
    stop_reason: int | None = None
    """The end token."""


@dataclass(frozen=True)
class BeamSearchOutput:
    """The result for a prompt."""

    sequences: tuple[BeamSearchSequence, ...]
    """`beam_width` of them at most, the best first."""
    error: str | None = None
    """Why there are none, if the prompt could not run."""
