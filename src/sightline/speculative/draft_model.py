"""Guesses with a smaller model that has the same tokens.

    step of the model        ... t5 t6 │ d1 d2 d3      two of three are right
    entries of the drafter   ... t5 t6   d1 d2         so these are right too, and only d2 is computed again
    next draft               feeds what it has not computed, then its own guesses one by one

It computes every prompt along with the model, so that its entries are in the same pages and are shared with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sightline.core import speculation
from sightline.core.batch import RowWork
from sightline.core.errors import ConfigError
from sightline.core.speculation import Speculation
from sightline.models.drafting import DraftModel, DraftSource
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.runner.networks import DraftRuntime
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.drafter import Drafter, DrafterContext, DrafterKind, DraftTarget, ObservedStep
from sightline.speculative.network_steps import (
    DraftedRow,
    NetworkSteps,
    choosing,
    drafts_in_order,
    longest_first,
)


class ModelDrafter(Drafter):
    """Guesses the likeliest tokens of a smaller model."""

    def __init__(self, draft: DraftRuntime) -> None:
        self._draft = draft
        [network] = draft.networks
        self._steps = NetworkSteps(network)
        self._fed: dict[SequenceState, tuple[int, ...]] = {}
        """By sequence: the tokens that its last draft computed entries for, behind the entries that are known to be
        right. The guesses among them may be wrong."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        order = longest_first(rooms, range(len(rooms)))
        sequences = [rooms[index].sequence for index in order]
        rows = [each.held_row for each in sequences]
        lengths = [self._steps.length(row) for row in rows]
        work = []
        for sequence, row, length in zip(sequences, rows, lengths, strict=True):
            self._steps.discard(row)
            work.append(RowWork(row, sequence.tokens[length:], length, num_logits=1))
        first = choosing(self._draft, sequences, 0)(self._steps.run(work).logits, 0)
        drafted = [
            DraftedRow(row, len(sequence.tokens), rooms[index].most - 1)
            for row, sequence, index in zip(rows, sequences, order, strict=True)
        ]
        columns = [first, *self._steps.roll_out(drafted, first, None, choosing(self._draft, sequences, 1))]
        drafts = drafts_in_order(columns, order, len(rooms))
        for index, length in zip(order, lengths, strict=True):
            sequence = rooms[index].sequence
            self._fed[sequence] = (*sequence.tokens[length:], *drafts[index].tokens[:-1])
        return drafts

    def observe(self, step: ObservedStep) -> None:
        work = []
        for each in step.rows:
            row, length = each.row, self._steps.length(each.row.table_row)
            known = each.known_from(length)[: each.result.seq_len - length]
            num_right = num_equal(self._fed.pop(row.sequence, ()), known)
            # A draft whose step was interrupted may have been for another row.
            num_right = min(num_right, self._steps.launched(row.table_row) - length)
            length += num_right
            self._steps.commit(row.table_row, length)
            self._steps.discard(row.table_row)
            # A single missing token is fed with the next draft.
            if len(known) > num_right + 1:
                work.append(RowWork(row.table_row, known[num_right:], length, num_logits=0))
        if work:
            self._steps.run(work)
            for extended in work:
                self._steps.commit(extended.table_row, extended.context_len + len(extended.tokens))

    def forget(self, sequence: SequenceState) -> None:
        self._fed.pop(sequence, None)


def num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next(
        (place for place, (one, other) in enumerate(zip(some, others, strict=False)) if one != other),
        min(len(some), len(others)),
    )


def _make(context: DrafterContext) -> Drafter:
    return ModelDrafter(context.networks)


def _networks(config: Speculation, target: DraftTarget) -> DraftSource:
    checkpoint = open_checkpoint(config.network, target.ledger)
    definition = define_model(checkpoint.config, target.ledger)
    if definition.vocab_size != target.definition.vocab_size:
        raise ConfigError(
            f"expected a drafter with the {target.definition.vocab_size:,} tokens of the model, got {config.network} "
            f"with {definition.vocab_size:,}; choose a smaller model of the same family"
        )
    return DraftSource(DraftModel(definition), checkpoint)


DRAFT_MODEL = DrafterKind(speculation.DRAFT_MODEL, _make, networks=_networks)
