"""Guesses that lie at random: chains and trees that go on with the truth for as long as a die says so.

Knows the shape of drafts. Does not know where the truth comes from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from sightline.core.ledger import Ledger
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.drafter import Drafter, ObservedStep
from sightline.speculative.drafts import AdaptiveDrafts
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.scenario import Drafting

Truth: TypeAlias = Callable[[SequenceState, int], Sequence[int]]
"""Returns the next tokens of a sequence: at most the given number, and fewer if later ones are not known."""


class LyingDrafter(Drafter):
    """Tells the truth of each token with a given probability."""

    def __init__(self, truth: Truth, drafting: Drafting, num_tokens: int) -> None:
        """Lies are any of `num_tokens` tokens."""
        self._truth = truth
        self._drafting = drafting
        self._num_tokens = num_tokens
        self._random = random.Random(drafting.seed)

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        return [self._draft(each) for each in rooms]

    def _draft(self, room: DraftRoom) -> Draft:
        """A draft of any size. In a tree, a guess follows the one before it or any other."""
        draw, drafting = self._random, self._drafting
        truth = self._truth(room.sequence, room.most)
        tokens, parents, num_right = list[int](), list[int](), list[int | None]()
        for _ in range(0 if draw.random() < 0.1 else draw.choice([room.most, draw.randint(0, room.most)])):
            parent = len(tokens) - 1
            if drafting.num_branches > 1 and draw.random() < 0.6:
                parent = draw.randint(-1, len(tokens) - 1)
            before = 0 if parent < 0 else num_right[parent]
            is_true = before is not None and before < len(truth) and draw.random() < drafting.honesty
            token = truth[before] if is_true and before is not None else draw.randrange(self._num_tokens)
            if (parent, token) in zip(parents, tokens, strict=True):
                continue
            tokens.append(token)
            parents.append(parent)
            num_right.append(before + 1 if before is not None and token in truth[before : before + 1] else None)
        return Draft(tuple(tokens), tuple(parents) if drafting.num_branches > 1 else None)

    def observe(self, step: ObservedStep) -> None:
        """Learns nothing."""

    def forget(self, sequence: SequenceState) -> None:
        """Keeps nothing."""


class LyingDrafts(AdaptiveDrafts):
    """Adapts to lies or, if the scene says so, guesses as much as it may however often it was wrong."""

    def __init__(
        self,
        drafter: Drafter,
        drafting: Drafting,
        max_step_tokens: int,
        vocab_size: int,
        page_size: int,
        counts: EventCounts,
    ) -> None:
        super().__init__(
            drafter,
            drafting.most,
            max_step_tokens,
            Ledger(),
            vocab_size=vocab_size,
            num_branches=drafting.num_branches,
        )
        self._drafting_scene = drafting
        self._page_size = page_size
        self._counts = counts

    def limit(self, sequence: SequenceState) -> int:
        own = super().limit(sequence)
        return own if self._drafting_scene.adapts else self._drafting_scene.most

    def observe(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        super().observe(sequence, num_drafted, num_accepted)
        self._counts.drafts += 1
        self._counts.accepted_tokens += num_accepted
        self._counts.wrong_drafts += num_accepted == 0
        self._counts.whole_drafts += num_accepted == num_drafted
        # The token behind the accepted ones is not in the cache.
        self._counts.border_drafts += (len(sequence.tokens) - 1) % self._page_size == 0
