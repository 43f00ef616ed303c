"""The contract for drafters: one guesses for all sequences of an engine, and sees every step before it is committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from sightline.core.device import DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.speculation import DraftMethod, Speculation
from sightline.models.contract import NO_TAPS, Taps
from sightline.models.decoder import DecoderDefinition
from sightline.models.drafting import DraftSource
from sightline.models.loading.checkpoint import Checkpoint
from sightline.runner.networks import DraftRuntime
from sightline.scheduler.sequence import Draft, DraftRoom, RowResult, ScheduledRow, SequenceState
from sightline.scheduler.trees import merged


class ObservedRow(NamedTuple):
    """A row of a step, with the part of it that is kept."""

    row: ScheduledRow
    result: RowResult
    start: int
    """Where its tokens begin in the step."""

    def kept(self, states: Tensor) -> Tensor:
        """The rows of a step's states that belong to this row's kept tokens, in the order of the sequence."""
        if self.result.path is None:
            return states[self.start : self.start + self.result.seq_len - self.row.context_len]
        return states[[self.start, *(self.start + 1 + guess for guess in self.result.path)]]

    def known_from(self, place: int) -> list[int]:
        """The sequence's tokens from a place on, with those that the step settled. The place must be before the row's
        end."""
        tokens, settled = self.row.sequence.tokens, self.result.tokens
        if not settled:
            return tokens[place:]
        return [*tokens[place : self.result.seq_len + 1 - len(settled)], *settled]


class ObservedStep(NamedTuple):
    """A step of the target that is about to be committed."""

    rows: Sequence[ObservedRow]
    """Rows that did not fail."""
    states: Tensor | None
    """[num_tokens, width]: the states that the target gives for the step's tokens; None if it gives none."""

    @property
    def given_states(self) -> Tensor:
        """`states` of a target that gives some. Raises `ValueError` if it does not."""
        if self.states is None:
            raise ValueError("expected the states of the model, got none; name the taps in the drafter's kind")
        return self.states


class Drafter(ABC):
    """Guesses the next tokens of sequences. A wrong guess costs time and nothing else."""

    @abstractmethod
    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        """Returns a draft for each room, of at most `most` tokens; an empty one if there is no guess. Must not change a
        room.

        A draft may be a tree if `num_branches` is above 1. It then has at most `longest` tokens on each path.
        """

    @abstractmethod
    def observe(self, step: ObservedStep) -> None:
        """Sees a step before it is committed: the sequences do not have its tokens yet, and hold their pages."""

    @abstractmethod
    def forget(self, sequence: SequenceState) -> None:
        """Drops what is kept of a sequence. Idempotent."""


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is built from."""

    speculation: Speculation
    device: DeviceKind
    ledger: Ledger
    vocab_size: int
    """The tokens of the model: guesses are below it."""
    draft: DraftRuntime | None = None
    """The drafter's own networks; None, or without any, if its kind has none."""

    def retire(self) -> None:
        """Says that the drafter computes nothing any more."""
        if self.draft is not None:
            self.draft.retire()

    @property
    def networks(self) -> DraftRuntime:
        """The drafter's own networks. Raises `ValueError` if its kind has none."""
        if self.draft is None or not self.draft.networks:
            raise ValueError(f"expected the networks of {self.speculation.method}, got none; name them in its kind")
        return self.draft


class DraftTarget(NamedTuple):
    """The model that is drafted for, before it is built."""

    checkpoint: Checkpoint
    definition: DecoderDefinition
    ledger: Ledger


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter, as it is registered: what it needs, and how one is made for an engine.

    A package registers one through the entry point group `sightline.drafters`, under the name of its method.
    """

    method: DraftMethod
    """Its name, and the settings that it takes. It needs `model` if it guesses with a network of its own."""
    make: Callable[[DrafterContext], Drafter]
    taps: Taps = NO_TAPS
    """The states of the target that it observes. Only for a kind without networks: those declare their own taps."""
    networks: Callable[[Speculation, DraftTarget], DraftSource] | None = None
    """Finds its networks and describes them; None if it guesses without any. Raises `ConfigError` if they do not fit
    the target."""


class TextDrafter(ABC):
    """Guesses the next tokens of one sequence from its tokens alone."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Guesses up to `most` tokens that follow `tokens`, all that the sequence has; none if it has no guess.

        Tokens of earlier calls come again, with further ones behind them.
        """

    def propose_several(self, tokens: Sequence[int], most: int, count: int) -> Sequence[Sequence[int]]:
        """Guesses up to `count` continuations, each as `propose` does, the likeliest first."""
        del count
        return [self.propose(tokens, most)]


MakeTextDrafter: TypeAlias = Callable[[], TextDrafter]
"""Makes the drafter of a sequence."""


class DrafterOfTexts(Drafter):
    """Guesses for each sequence with a `TextDrafter` of its own."""

    def __init__(self, make: MakeTextDrafter, num_branches: int = 1) -> None:
        """`num_branches` is the number of continuations that are guessed at once. Several form a tree."""
        self._make = make
        self._num_branches = num_branches
        self._by_sequence: dict[SequenceState, TextDrafter] = {}

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        return [self._draft(each) for each in rooms]

    def _draft(self, room: DraftRoom) -> Draft:
        drafter, tokens = self._drafter(room.sequence), room.sequence.tokens
        if self._num_branches == 1:
            return Draft(tuple(drafter.propose(tokens, room.most)))
        longest = room.most if room.longest is None else room.longest
        return merged(drafter.propose_several(tokens, longest, self._num_branches), room.most)

    def _drafter(self, sequence: SequenceState) -> TextDrafter:
        found = self._by_sequence.get(sequence)
        if found is None:
            found = self._by_sequence[sequence] = self._make()
        return found

    def observe(self, step: ObservedStep) -> None:
        """Does nothing: the next call of `propose` has the sequence's tokens."""

    def forget(self, sequence: SequenceState) -> None:
        self._by_sequence.pop(sequence, None)
