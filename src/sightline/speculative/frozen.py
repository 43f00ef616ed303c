"""Guesses with a network that has no cache: every step of a draft reads the model's entries, from the same position.

    the model has computed t0 to t3, and chosen t4; its entries are 0 to 3
    step 1   (t4, the model's state of t3) at position 4, sees entries 0 to 3 ──▶ d1, a state
    step 2   (d1, that state)              at position 4, sees entries 0 to 3 ──▶ d2, a state

Nothing is written, so there is nothing to compute along with a prompt, to share, or to take back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.core import speculation
from sightline.core.batch import CONTEXT
from sightline.core.speculation import Speculation
from sightline.models.drafting import DraftSource
from sightline.models.gemma4_assistant import AssistantDraft, define_assistant
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.networks import DraftRuntime
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.drafter import Drafter, DrafterContext, DrafterKind, DraftTarget, ObservedStep
from sightline.speculative.network_steps import DraftedRow, NetworkSteps, choosing, drafts_in_order, longest_first


class _Seen(NamedTuple):
    """The last token that the model has computed for a sequence."""

    state: Tensor
    """[1, width]."""
    num_computed: int


class FrozenDrafter(Drafter):
    """Guesses the likeliest tokens of a network that reads the model's cache."""

    def __init__(self, draft: DraftRuntime) -> None:
        self._draft = draft
        [network] = draft.networks
        self._steps = NetworkSteps(network)
        self._seen: dict[SequenceState, _Seen] = {}

    @staticmethod
    def make(context: DrafterContext) -> FrozenDrafter:
        return FrozenDrafter(context.networks)

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        seen = [index for index, each in enumerate(rooms) if self._is_seen(each.sequence)]
        if not seen:
            return [Draft()] * len(rooms)
        order = longest_first(rooms, seen)
        sequences = [rooms[index].sequence for index in order]
        states = torch.cat([self._seen[each].state for each in sequences])
        known = states.new_tensor([each.tokens[-1] for each in sequences], dtype=torch.int64)
        drafted = [
            DraftedRow(each.held_row, len(each.tokens) - 1, rooms[index].most, CONTEXT)
            for each, index in zip(sequences, order, strict=True)
        ]
        columns = self._steps.roll_out(drafted, known, states, choosing(self._draft, sequences, 0))
        return drafts_in_order(columns, order, len(rooms))

    def _is_seen(self, sequence: SequenceState) -> bool:
        """True if the state of the last computed token is kept. It is not after a retraction."""
        seen = self._seen.get(sequence)
        return seen is not None and seen.num_computed == len(sequence.tokens) - 1

    def observe(self, step: ObservedStep) -> None:
        rows = [each for each in step.rows if each.result.tokens]
        if not rows:
            return
        # Copied, because a sequence keeps its last state, and a view would keep those of the whole step.
        states = self._draft.fuse(torch.cat([each.kept(step.given_states)[-1:] for each in rows]))
        for index, each in enumerate(rows):
            self._seen[each.row.sequence] = _Seen(states[index : index + 1], each.result.seq_len)

    def forget(self, sequence: SequenceState) -> None:
        self._seen.pop(sequence, None)


def _assistant(config: Speculation, target: DraftTarget) -> DraftSource:
    checkpoint = open_checkpoint(config.network, target.ledger)
    assistant = define_assistant(checkpoint.config, target.definition, target.ledger)
    return DraftSource(AssistantDraft(assistant), checkpoint)


FROZEN_KV_MTP = DrafterKind(speculation.FROZEN_KV_MTP, FrozenDrafter.make, networks=_assistant)
