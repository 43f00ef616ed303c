"""Log probabilities and usage in the shapes of answers, for whole answers and for events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sightline.server.api.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionDetails,
    CompletionLogprobs,
    PromptDetails,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
    Usage,
)
from sightline.server.desks.protocol import Generated
from sightline.server.process.protocol import PositionScores, ScoredToken


def usage(outcome: Generated) -> Usage:
    """Numbers of tokens read and generated."""
    read, generated = outcome.num_prompt_tokens, outcome.num_generated
    return Usage(
        read, generated, read + generated, PromptDetails(outcome.num_cached), CompletionDetails(outcome.num_reasoning)
    )


def prompt_logprobs(positions: Iterable[PositionScores | None]) -> PromptLogprobs:
    """A prompt's log probabilities in the form of an answer's body."""
    return [
        None
        if scores is None
        else {str(each.token): PromptLogprob(each.logprob, each.rank, each.text) for each in scores}
        for scores in positions
    ]


def chat_logprobs(tokens: Sequence[ScoredToken], count: int) -> ChatLogprobs:
    """Log probabilities of each token and of the `count` likeliest tokens at its position."""
    told = []
    for token in tokens:
        chosen = token.scores[0]
        text = chosen.text or ""
        rivals = [TopLogprob(other, logprob, _bytes(other)) for other, logprob in likeliest(token.scores, count)]
        told.append(ChatLogprob(text, chosen.logprob, _bytes(text), rivals))
    return ChatLogprobs(told)


def completion_logprobs(
    positions: Sequence[PositionScores | None], count: int, offsets: list[int], first: str = ""
) -> CompletionLogprobs:
    """Log probabilities in the older shape; `first` is the text of a prompt's first token, which has none."""
    return CompletionLogprobs(
        [first if scores is None else scores[0].text or "" for scores in positions],
        [None if scores is None else scores[0].logprob for scores in positions],
        [None if scores is None else _by_text(likeliest(scores, count)) for scores in positions] if count else None,
        offsets,
    )


def likeliest(scores: PositionScores, count: int) -> list[tuple[str, float]]:
    """The text and log probability of a position's `count` likeliest tokens, the likeliest first."""
    # The first token is the chosen one, which need not be among the likeliest.
    known = scores[len(scores) > count :]
    ranked = sorted(known, key=lambda each: (each.rank, each.token))
    return [(each.text or "", each.logprob) for each in ranked][:count]


def _by_text(ranked: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Log probabilities by text. Tokens with the same text, such as parts of characters, appear once: the likeliest."""
    told: dict[str, float] = {}
    for text, logprob in ranked:
        told.setdefault(text, logprob)
    return told


def _bytes(text: str) -> list[int] | None:
    """The UTF-8 bytes of a token; None for a part of a character, whose bytes its text does not show."""
    return None if "\ufffd" in text else list(text.encode())
