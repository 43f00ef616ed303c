"""Engines that guess with liars who know the answers: chains, or trees."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sightline import RequestOutput
from sightline.engine import engine as engine_module
from sightline.scheduler.sequence import SequenceState
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.liars import LyingDrafter, LyingDrafts
from sightline.testing.simulator.scenario import Drafting
from support.tiny_models import VOCAB

MAX_STEP_TOKENS = 64


def lying_drafts(answers: Sequence[Sequence[int]], drafting: Drafting, num_tokens: int = VOCAB) -> LyingDrafts:
    """Drafts of a liar who knows the whole texts of some answers."""

    def truth(sequence: SequenceState, count: int) -> Sequence[int]:
        tokens = sequence.tokens
        known = [each for each in answers if list(each[: len(tokens)]) == tokens]
        return list(known[0][len(tokens) : len(tokens) + count]) if known else []

    drafter = LyingDrafter(truth, drafting, num_tokens)
    return LyingDrafts(drafter, drafting, MAX_STEP_TOKENS, num_tokens, 1, EventCounts())


def lie(
    patch: pytest.MonkeyPatch, outputs: Sequence[RequestOutput], honesty: float, most: int = 7, num_branches: int = 1
) -> None:
    """Engines that guess do so with liars, who know these outputs."""
    answers = [[*output.prompt_token_ids, *each.token_ids] for output in outputs for each in output.outputs]
    drafting = Drafting(honesty=honesty, most=most, num_branches=num_branches, adapts=False, seed=3)
    patch.setattr(engine_module, "make_drafts", lambda *_: lying_drafts(answers, drafting))
