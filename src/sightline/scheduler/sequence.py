"""Sequences, the rows of a step, and the step itself.

    |--- num_computed ---|-- in flight --|-- pending --|
    |---------- num_scheduled -----------|
    |------------------ num_expected ------------------|

Between launch and commit a step's entries are in flight, and the token that it chooses is expected but not yet known.
Knows the progress of a sequence. Does not decide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sightline.cache.prefix import PrefixNode
from sightline.cache.tier import Returning
from sightline.core.request import EffectiveParams, Request


@dataclass(eq=False, slots=True)
class SequenceState:
    """One running continuation of a request."""

    request: Request
    index: int = 0
    """Index among the request's continuations."""
    leader: SequenceState | None = None
    """The request's first continuation; None for that one itself. Its pages are shared once its prompt is computed."""
    drawing: EffectiveParams | None = None
    """How its tokens are drawn, for a drafter that draws with the same noise; None if the likeliest is taken."""
    admits: Callable[[Sequence[int]], int] | None = None
    """How many of some guesses, from the first on, may follow its known tokens; None: any guess may be right."""
    replica: int = 0
    """The replica of the model that computes it."""
    tokens: list[int] = field(init=False)
    """Known prompt and generated tokens."""
    num_computed: int = 0
    """Tokens whose entries are committed to the cache."""
    num_scheduled: int = 0
    """Tokens whose entries exist once every launched step is committed."""
    num_expected: int = field(init=False)
    """Tokens that it has once every launched step is committed."""
    num_steps: int = 0
    """Launched steps that contain it and are not committed."""
    table_row: int | None = None
    """Its page-table row while it has one."""
    num_pages: int = 0
    """Pages of its row in each pool."""
    prefix: PrefixNode | None = None
    """Locked end of its pages in the prefix cache, while it runs."""
    num_prefix_pages: int = 0
    """Number of pages up to `prefix`."""
    returning: Returning | None = None
    """Blocks of a lower tier that are on their way into its row. It does not run before they are there, or failed."""
    pinned: set[int] = field(default_factory=set)
    """Numbers of tokens behind which its row keeps a recurrent state for others."""
    branch: int = 0
    """Tokens in cached pages when it was admitted, if more than those behind which a recurrent state was kept."""
    answered: PrefixNode | None = None
    """The page of its answer behind which a recurrent state is kept."""
    was_admitted: bool = False
    """True once it has run, even if it waits again."""
    num_cached: int = 0
    """Tokens of the prompt that it found in the cache when it was first admitted."""
    num_charged: int = 0
    """Tokens charged to its caller, or found computed."""
    num_retractions: int = 0
    arrival: int = 0
    """Position in the order of submission."""
    is_paused: bool = False
    """True if it must not run: it is parked, or will be once the last step launched with it is over."""
    is_out: bool = False
    """True if it was removed; its pages stay until the last step launched with it is over."""
    max_len: int = field(init=False)
    """Maximum tokens in the cache; the last generated token is never computed."""
    max_expected: int = field(init=False)
    """Maximum tokens, generated ones included."""
    is_whole: bool = field(init=False)
    """True if it is computed in one step, without pages."""
    caller: str = field(init=False)
    rank: tuple[int, int] = field(init=False)
    """(priority, arrival): among running sequences, the highest gives way."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.num_expected = len(self.tokens)
        # Kept here, because every step asks every row.
        self.max_len = len(self.tokens) + max(0, self.request.needs.max_new_tokens - 1)
        self.max_expected = len(self.tokens) + self.request.needs.max_new_tokens
        self.is_whole = self.request.needs.is_whole
        self.caller = self.request.terms.caller
        self.rank = (self.request.terms.priority, 0)

    @property
    def held_row(self) -> int:
        """Its page-table row. Raises `ValueError` if it has none."""
        if self.table_row is None:
            raise ValueError(f"expected a sequence with a row, got one of {self.request.request_id} that waits")
        return self.table_row

    @property
    def num_pending(self) -> int:
        return self.num_expected - self.num_scheduled

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def is_ready(self) -> bool:
        """True if its pending tokens can be computed before the result in flight is read.

        False if it is paused, if blocks are on their way into its row, if everything that it may compute is in flight,
        or if sampling depends on more tokens that the host has not read than it may.
        """
        if self.returning is not None:
            return False
        if not self.num_steps:
            return True
        if self.is_paused or self.num_scheduled >= self.max_len:
            return False
        most = self.request.needs.max_unread_tokens
        return most is None or self.num_expected - len(self.tokens) <= most

    @property
    def wants_scores(self) -> bool:
        """True if all tokens of its prompt need outputs; only the first continuation computes these, and only once.

        With the first generated token they are all there. Retracted after that, it shares what is cached of its prompt.
        """
        num_prompt_tokens = len(self.request.prompt_token_ids)
        is_asked = self.request.needs.every_output and self.index == 0 and num_prompt_tokens > 1
        return is_asked and len(self.tokens) == num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """True while such prompt tokens are unscheduled, except the last, whose output is there anyway."""
        return self.wants_scores and self.num_scheduled < len(self.request.prompt_token_ids) - 1

    def expected_after(self, row: ScheduledRow) -> int:
        """Tokens that it has once the row is committed."""
        if not row.completes:
            return self.num_expected
        return min(row.seq_len + 1, self.max_expected)

    def restart(self) -> None:
        """Resets progress to nothing cached and nothing in flight; keeps the tokens."""
        self.num_computed = self.num_scheduled = 0
        self.num_expected = len(self.tokens)


@dataclass(eq=False, slots=True)
class ScheduledRow:
    """A sequence, and which of its tokens a step computes.

    Treat as immutable. Not frozen, because one is created per row per step.
    """

    sequence: SequenceState
    table_row: int
    """`PADDING_ROW` for a sequence that is computed whole and holds no pages."""
    context_len: int
    """Number of tokens before them."""
    num_tokens: int
    completes: bool
    """True if it computes the last pending token, so that the next one can be sampled."""
    scores_prompt: bool
    """True if all its tokens need logits."""
    drafts: tuple[int, ...] = ()
    """The last of its tokens, if they are guesses. Each is kept if the model chooses it behind the one before."""
    parents: tuple[int, ...] | None = None
    """The parent of each guess in a tree, see `Draft`; None for a chain."""

    @property
    def draft_parents(self) -> Sequence[int]:
        """The parent of each guess, in a chain too."""
        return range(-1, len(self.drafts) - 1) if self.parents is None else self.parents

    @property
    def num_logits(self) -> int:
        """How many of its last tokens need logits."""
        return self.num_tokens if self.scores_prompt else 1 + len(self.drafts) if self.completes else 0

    @property
    def seq_len(self) -> int:
        return self.context_len + self.num_tokens


@dataclass(eq=False, slots=True)
class RowResult:
    """What a step gave a row, to be committed.

    Treat as immutable. Not frozen, because one is created per row per step.
    """

    seq_len: int
    """Accepted length: entries of the row up to here are kept, entries behind it are discarded."""
    tokens: tuple[int, ...] = ()
    """Tokens that the step settled, the last of which follows the accepted entries."""
    path: tuple[int, ...] | None = None
    """For a tree, the guesses that were right, by index: their entries follow the row's known tokens from here on. None
    for other rows, whose accepted entries are where they belong."""


class DraftRoom(NamedTuple):
    """A sequence that may be guessed for."""

    sequence: SequenceState
    most: int
    """Tokens that its row has room for."""
    longest: int | None = None
    """Tokens that a path of a tree may have; None: as many as `most`."""


class Draft(NamedTuple):
    """Guesses of what a sequence generates next: one continuation, or a tree of several.

    known   the quick ─┬─ brown ── fox          tokens   brown fox red
                       └─ red                   parents  -1    0   -1
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    """For each token, the index of the guess that it follows, -1 for the sequence's last token. Parents come before
    their children, and children of one parent are different tokens. None: each token follows the one before."""


class Drafts(Protocol):
    """Guesses what sequences generate next."""

    max_step_tokens: int
    """Tokens that a step with guesses may have."""

    def propose(self, rooms: Sequence[DraftRoom], most: int) -> Sequence[Draft]:
        """A draft for each room, of at most `most` tokens together; an empty one where nothing is guessed."""

    def observe(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        """Takes in how many tokens of a draft were right; of a tree, how many of its longest path's number."""

    def forget(self, sequence: SequenceState) -> None:
        """The sequence ends. Idempotent."""


class Schedule(NamedTuple):
    """The rows of one step, in order: all of them hold pages, or all are computed whole."""

    rows: tuple[ScheduledRow, ...]
