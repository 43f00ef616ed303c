"""A short self-test: greedy answers must be the same however they are computed.

    plain answers ─┬─ other page size ─ other chunk size ─ one at a time ─ prefix hits ─ eager ─ each other backend
                   └─ the first token that differs names the pair

Where two tokens are nearly as likely, rounding may decide between them: that is told as a tie, not as a failure. Knows
answers and settings. Does not know how an engine is built, nor how findings are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,",
    "Once upon a time there was a small engine that answered questions. Each answer was the same, whether it came "
    "alone or together with others, and whether its pages were short or long. One day somebody asked it:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
"""Of different lengths: less than a page, several pages, several chunks."""
NUM_TOKENS = 8
"""Tokens of an answer."""
TIES: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "bfloat16": 0.06, "float16": 0.01})
"""By dtype: the difference of two log probabilities up to which rounding may choose between their tokens."""


class Asking(Enum):
    """How the prompts are asked."""

    TOGETHER = "together"
    ALONE = "one at a time"
    AGAIN = "a second time"
    """Together twice; the second answers count, and their prompts must have been found in the cache."""


@dataclass(frozen=True)
class Variant:
    """One way to compute the answers."""

    subject: str
    """What it tries: "page size"."""
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the plain engine."""
    asking: Asking = Asking.TOGETHER


class GreedyAnswer(NamedTuple):
    """The answer to a prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """For each token, the log probabilities of the likeliest ones."""
    num_cached: int
    """Tokens of the prompt that were in the cache."""


Ask: TypeAlias = Callable[[Variant], Sequence[GreedyAnswer]]
"""Answers all prompts in one way. Raises `SightlineError` if that cannot be tried."""


@dataclass(frozen=True)
class Difference:
    """Where the answers of two ways differ first."""

    prompt: int
    place: int
    one: int | None
    """The token of the plain answer; None if it had ended."""
    other: int | None
    gap: float | None
    """How much likelier the plain answer's token was in it, as a logarithm; None if that is not known."""

    def is_tie(self, tie: float) -> bool:
        """True if rounding may have chosen between the two."""
        return self.gap is not None and self.gap <= tie

    def __str__(self) -> str:
        gap = "" if self.gap is None else f", less likely by {self.gap:.4f}"
        return f"prompt {self.prompt}, token {self.place} of the answer: {self.one} became {self.other}{gap}"


def compare(plain: Sequence[GreedyAnswer], others: Sequence[GreedyAnswer], tie: float) -> Difference | None:
    """Returns the first difference that is no tie, else the first tie; None if all answers are the same."""
    found = list(_differences(plain, others))
    return next((each for each in found if not each.is_tie(tie)), found[0] if found else None)


def _differences(plain: Sequence[GreedyAnswer], others: Sequence[GreedyAnswer]) -> Iterator[Difference]:
    """Yields the first difference of each prompt: what follows it continues another text."""
    for prompt, (one, other) in enumerate(zip(plain, others, strict=True)):
        for place in range(max(len(one.tokens), len(other.tokens))):
            ours = one.tokens[place] if place < len(one.tokens) else None
            theirs = other.tokens[place] if place < len(other.tokens) else None
            if ours != theirs:
                yield Difference(prompt, place, ours, theirs, _gap(one, place, theirs))
                break


def _gap(answer: GreedyAnswer, place: int, other: int | None) -> float | None:
    likely = answer.logprobs[place] if place < len(answer.logprobs) else {}
    if other is None or other not in likely:
        return None
    return likely[answer.tokens[place]] - likely[other]


def ways(page_size: int, *, has_graphs: bool, backends: Iterable[str]) -> tuple[Variant, ...]:
    """The ways to try besides the plain one, which has pages of `page_size`, whole prompts and eager steps."""
    other_size = page_size // 2 if page_size > 1 else 2
    tried = [
        Variant("page size", f"pages of {other_size}", {"page_size": other_size}),
        Variant("chunk size", "chunks of 7 tokens", {"max_num_batched_tokens": 7}),
        Variant("batch size", "one at a time", asking=Asking.ALONE),
        Variant("prefix hits", "prompts that are cached", {"prefix_caching": True}, Asking.AGAIN),
    ]
    if has_graphs:
        tried.append(Variant("captured steps", "captured steps", {"enforce_eager": False}))
    return (*tried, *(Variant("backend", name, {"attention_backend": name}) for name in backends))
