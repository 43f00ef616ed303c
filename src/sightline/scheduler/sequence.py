"""What the scheduler moves: sequences, the rows of a step, and the step itself.

Knows how far a sequence has come. Does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sightline.cache.prefix import PrefixNode
from sightline.core.request import Request


@dataclass(eq=False)
class SequenceState:
    """One running continuation of a request."""

    request: Request
    index: int = 0
    """Which of the request's continuations it is."""
    leader: SequenceState | None = None
    """The request's first continuation, for the others: its pages are theirs once its prompt is computed."""
    tokens: list[int] = field(init=False)
    """Prompt and generated."""
    num_computed: int = 0
    """Tokens whose entries are committed to the cache."""
    table_row: int | None = None
    """Its page-table row while it runs."""
    prefix: PrefixNode | None = None
    """The end of its pages that are in the prefix cache, locked, while it runs."""
    num_prefix_pages: int = 0
    """Pages up to there."""
    was_admitted: bool = False
    """It has run, though it may wait again."""
    num_cached: int = 0
    """Tokens of the prompt that it found in the cache when it was first admitted."""
    arrival: int = 0
    """Its place in the order in which sequences were submitted."""
    is_out: bool = False
    """It was removed, for whatever reason."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """True while the logits of prompt tokens still to compute are wanted; one continuation does it for all."""
        wanted = self.request.params.prompt_logprobs is not None and self.index == 0
        return wanted and self.num_computed < len(self.request.prompt_token_ids) - 1

    @property
    def max_len(self) -> int:
        """Tokens that it may ever hold in the cache; the last one generated is never run."""
        return len(self.request.prompt_token_ids) + self.request.params.max_tokens - 1


@dataclass(frozen=True, eq=False)
class ScheduledRow:
    """A sequence and how many of its pending tokens the step computes."""

    sequence: SequenceState
    table_row: int
    num_tokens: int

    @property
    def completes(self) -> bool:
        """True where the step computes its last pending token: the next one can be sampled."""
        return self.num_tokens == self.sequence.num_pending

    @property
    def num_logits(self) -> int:
        """How many of its last tokens want logits."""
        return self.num_tokens if self.sequence.scores_prompt else int(self.completes)


@dataclass(frozen=True)
class Schedule:
    """The rows of one step, in order."""

    rows: tuple[ScheduledRow, ...]
