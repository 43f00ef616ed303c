"""What the scheduler moves: sequences, the rows of a step, and the step itself.

    |--- num_computed ---|-- in flight --|-- pending --|
    |---------- num_scheduled -----------|
    |------------------ num_expected ------------------|

Between launch and commit a step's entries are in flight, and a token that it chooses is expected before it is known.
Knows how far a sequence has come. Does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sightline.cache.prefix import PrefixNode
from sightline.core.request import Request


@dataclass(eq=False, slots=True)
class SequenceState:
    """One running continuation of a request."""

    request: Request
    index: int = 0
    """Which of the request's continuations it is."""
    leader: SequenceState | None = None
    """The request's first continuation, for the others: its pages are theirs once its prompt is computed."""
    tokens: list[int] = field(init=False)
    """Prompt and generated, as far as they are known."""
    num_computed: int = 0
    """Tokens whose entries are committed to the cache."""
    num_scheduled: int = 0
    """Tokens whose entries are there once every launched step is committed."""
    num_expected: int = field(init=False)
    """Tokens that it holds once every launched step is committed."""
    num_steps: int = 0
    """Launched steps with it that are not committed."""
    table_row: int | None = None
    """Its page-table row while it has one."""
    num_pages: int = 0
    """Of its row, in each pool."""
    prefix: PrefixNode | None = None
    """The end of its pages that are in the prefix cache, locked, while it runs."""
    num_prefix_pages: int = 0
    """Pages up to there."""
    was_admitted: bool = False
    """It has run, though it may wait again."""
    num_cached: int = 0
    """Tokens of the prompt that it found in the cache when it was first admitted."""
    num_charged: int = 0
    """Tokens that were counted as its caller's, or that it found computed."""
    num_retractions: int = 0
    arrival: int = 0
    """Its place in the order in which sequences were submitted."""
    is_out: bool = False
    """It was removed, for whatever reason; its pages stay until the last step launched with it is over."""
    caller: str = field(init=False)
    rank: tuple[int, int] = field(init=False)
    """(priority, arrival): of two that run, the one with the higher gives way."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.num_expected = len(self.tokens)
        self.caller = self.request.terms.caller
        self.rank = (self.request.terms.priority, 0)

    @property
    def num_pending(self) -> int:
        return self.num_expected - self.num_scheduled

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def is_ready(self) -> bool:
        """True where its pending tokens can be computed before what is in flight is read.

        Not where the last token that it may have is on its way, nor where a choice depends on tokens before it.
        """
        if not self.num_steps:
            return True
        params = self.request.params
        if self.num_expected - len(self.request.prompt_token_ids) >= params.max_tokens:
            return False
        return self.num_expected == len(self.tokens) or not params.adjusts_logits

    @property
    def scores_prompt(self) -> bool:
        """True while the logits of prompt tokens still to schedule are wanted; one continuation does it for all."""
        if self.request.params.prompt_logprobs is None or self.index != 0:
            return False
        return self.num_scheduled < len(self.request.prompt_token_ids) - 1

    @property
    def max_len(self) -> int:
        """Tokens that it may ever hold in the cache; the last one generated is never run."""
        return len(self.request.prompt_token_ids) + self.request.params.max_tokens - 1

    def restart(self) -> None:
        """Nothing of it is in the cache, and nothing under way; its tokens it keeps."""
        self.num_computed = self.num_scheduled = 0
        self.num_expected = len(self.tokens)


@dataclass(eq=False, slots=True)
class ScheduledRow:
    """A sequence and which of its tokens a step computes.

    Nobody sets its fields. It is made for every row of every step, and to be frozen, or a tuple, would cost it more.
    """

    sequence: SequenceState
    table_row: int
    context_len: int
    """Tokens before them."""
    num_tokens: int
    completes: bool
    """True where it computes the last pending token: the next one can be chosen."""
    scores_prompt: bool
    """True where the logits of all its tokens are wanted."""

    @property
    def num_logits(self) -> int:
        """How many of its last tokens want logits."""
        return self.num_tokens if self.scores_prompt else int(self.completes)

    @property
    def seq_len(self) -> int:
        return self.context_len + self.num_tokens


class Schedule(NamedTuple):
    """The rows of one step, in order."""

    rows: tuple[ScheduledRow, ...]
