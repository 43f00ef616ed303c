"""How many tokens are guessed for each sequence: 1, 3, 7 and so on while they are right, and none where guesses fail.
In a tree, this is the length of each path.

A guess that is right costs little, because a step reads the weights once for all its tokens. One that is wrong costs
the time of its tokens, so a sequence whose guesses fail rests: for 2 tokens, then 4, 8 and so on. With the token before
them, guesses are 2, 4 or 8 rows of a product, which kernels multiply at once.

On a device where a step of a few tokens takes no longer than a step of one, a draft that is wrong costs nothing either:
there as much is guessed as may be, until several drafts in a row have failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sightline.core.errors import DeviceFaultError
from sightline.core.ledger import Ledger
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.scheduler.trees import admitted, checked_draft
from sightline.speculative.drafter import Drafter, ObservedStep

logger = logging.getLogger("sightline")
_LONGEST_REST = 64
"""Tokens after which even a sequence whose guesses all failed is tried again."""


@dataclass(eq=False, slots=True)
class _Drafting:
    """How a sequence's guesses have fared."""

    limit: int
    """Tokens that it may guess next."""
    num_failed: int = 0
    """Drafts without a right token, since the last one with some."""
    rests_until: int = 0
    """The sequence's length from which on it guesses again."""


class AdaptiveDrafts:
    """The drafts of all sequences of an engine."""

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        max_step_tokens: int,
        ledger: Ledger,
        *,
        vocab_size: int,
        patience: int = 0,
        num_branches: int = 1,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Guesses at most `most` tokens of a sequence at once, in steps of at most `max_step_tokens`.

        Guesses must be tokens below `vocab_size`. If the drafter fails, the ledger is told, `on_failure` is called
        once, and nothing is guessed any more. `patience` is the number of drafts in a row that may have no right token
        before a sequence rests; if it is above 0, drafts do not shrink. With several branches, drafts may be trees with
        up to `most` tokens for each branch.
        """
        self.max_step_tokens = max_step_tokens
        self.num_branches = num_branches
        self._drafter = drafter
        self._most = most
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._patience = patience
        self._on_failure = on_failure
        self._has_failed = False
        self._drafting: dict[SequenceState, _Drafting] = {}

    def propose(self, rooms: Sequence[DraftRoom], most: int) -> Sequence[Draft]:
        """A draft for each room. Sequences that rest, and those for which nothing is left, get none."""
        drafts, asked = [Draft()] * len(rooms), dict[int, DraftRoom]()
        for index, (sequence, room_left, _) in enumerate(rooms):
            limit = self.limit(sequence)
            count = min(room_left, most, limit * self.num_branches)
            if count > 0:
                asked[index] = DraftRoom(sequence, count, min(limit, count))
                most -= count
        if not asked or self._has_failed:
            return drafts
        try:
            for index, draft in zip(asked, self._ask(tuple(asked.values())), strict=True):
                room = asked[index]
                checked = checked_draft(draft, room.most, self._vocab_size, may_branch=self.num_branches > 1)
                drafts[index] = admitted(checked, room.sequence.admits)
        except Exception as error:
            self._give_up(error)
            return [Draft()] * len(rooms)
        return drafts

    def _ask(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        """Asks the drafter. If it appended to a sequence's own tokens, these are removed, and it counts as failed."""
        lengths = [len(each.sequence.tokens) for each in rooms]
        try:
            return self._drafter.propose(rooms)
        finally:
            longer = [len(each.sequence.tokens) != length for each, length in zip(rooms, lengths, strict=True)]
            if any(longer):
                for each, length in zip(rooms, lengths, strict=True):
                    del each.sequence.tokens[length:]
                raise ValueError("expected a drafter that leaves a sequence's tokens alone, got one that adds some")

    def limit(self, sequence: SequenceState) -> int:
        """The number of tokens that may be guessed for a sequence now; in a tree, on each path."""
        state = self._drafting.get(sequence)
        if state is None:
            state = self._drafting[sequence] = _Drafting(self._most if self._patience else 1)
        return state.limit if len(sequence.tokens) >= state.rests_until else 0

    def observe_step(self, step: ObservedStep) -> None:
        """Shows the drafter a step of the target, before it is committed."""
        if not self._has_failed:
            try:
                self._drafter.observe(step)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A drafter that fails costs no request anything: the engine goes on without guesses."""
        if isinstance(error, DeviceFaultError | torch.AcceleratorError):
            raise error
        if self._has_failed:
            return
        self._has_failed = True
        self._on_failure()
        logger.error("the drafter failed, and nothing is guessed any more: %s", error, exc_info=error)
        self._ledger.degrade(
            "speculative_config",
            f"nothing is guessed any more: the drafter raised {type(error).__name__}: {error}",
            "report it, and start without speculative_config",
        )

    def observe(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        """Takes in how many tokens of a draft were right. `num_drafted` are those of its longest path."""
        state = self._drafting.get(sequence)
        if state is None or not num_drafted:
            return
        if num_accepted:
            state.num_failed = 0
            reached = num_drafted + 1 if num_accepted == num_drafted or self._patience else num_accepted // 2
            state.limit = min(self._most, (1 << reached.bit_length()) - 1) or 1
            return
        state.num_failed += 1
        if state.num_failed > self._patience:
            state.limit = 1
            state.rests_until = len(sequence.tokens) + min(_LONGEST_REST, 1 << (state.num_failed - self._patience))

    def forget(self, sequence: SequenceState) -> None:
        """Drops what is kept of a sequence."""
        self._drafting.pop(sequence, None)
        try:
            self._drafter.forget(sequence)
        except Exception as error:
            self._give_up(error)
