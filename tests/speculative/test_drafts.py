"""How many tokens are guessed for a sequence follows how many were right."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.core.device import DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.speculation import Speculation
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.scheduler.trees import depths, merged
from sightline.speculative.drafter import Drafter, DrafterContext, DrafterOfTexts, ObservedStep, TextDrafter
from sightline.speculative.drafts import AdaptiveDrafts
from sightline.speculative.methods import make_drafts
from support.scheduling import make_sequence

VOCAB = 10_000


class Ready(TextDrafter):
    """Always has a guess."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return [len(tokens)] * most


def drafts_and_sequence() -> tuple[AdaptiveDrafts, SequenceState]:
    return AdaptiveDrafts(DrafterOfTexts(Ready), 8, 16, Ledger(), vocab_size=VOCAB), make_sequence("a", 8, 200)


def guess(drafts: AdaptiveDrafts, sequence: SequenceState, most: int) -> tuple[int, ...]:
    [draft] = drafts.propose([DraftRoom(sequence, most)], 99)
    return draft.tokens


def test_a_draft_grows_while_it_is_right_and_shrinks_to_what_was() -> None:
    drafts, sequence = drafts_and_sequence()
    for drafted, accepted, following in ((1, 1, 3), (3, 3, 7), (7, 7, 8), (8, 7, 3), (3, 2, 1), (1, 1, 3), (3, 1, 1)):
        assert len(guess(drafts, sequence, 99)) == drafted
        drafts.observe(sequence, drafted, accepted)
        assert len(guess(drafts, sequence, 99)) == following, (drafted, accepted)
    drafts.observe(sequence, 7, 7)
    assert len(guess(drafts, sequence, 5)) == 5, "never more than there is room for"


def test_guesses_that_fail_rest_longer_and_longer_and_are_tried_again() -> None:
    drafts, sequence = drafts_and_sequence()
    tried = 0
    for _ in range(1000):
        if proposed := guess(drafts, sequence, 8):
            tried += 1
            drafts.observe(sequence, len(proposed), 0)
        sequence.tokens.append(1)
    assert 1000 // 64 <= tried <= 1000 // 64 + 8
    drafts.observe(sequence, 2, 1)
    sequence.tokens += [1] * 64
    assert guess(drafts, sequence, 8)
    drafts.observe(sequence, 2, 0)
    sequence.tokens += [1, 1]
    assert guess(drafts, sequence, 8), "one failure after a success rests briefly"


def test_with_patience_drafts_stay_long_until_several_fail_in_a_row() -> None:
    drafts, sequence = (
        AdaptiveDrafts(DrafterOfTexts(Ready), 7, 16, Ledger(), vocab_size=VOCAB, patience=2),
        make_sequence("a", 8, 200),
    )
    for accepted in (3, 0, 0, 1, 0, 7, 0, 0):
        assert len(guess(drafts, sequence, 99)) == 7
        drafts.observe(sequence, 7, accepted)
    assert len(guess(drafts, sequence, 99)) == 7
    drafts.observe(sequence, 7, 0)
    assert not guess(drafts, sequence, 99)
    sequence.tokens += [1, 1]
    assert len(guess(drafts, sequence, 99)) == 1
    drafts.observe(sequence, 1, 1)
    assert len(guess(drafts, sequence, 99)) == 3


def test_every_sequence_has_a_state_of_its_own_and_leaves_nothing() -> None:
    drafts, first = drafts_and_sequence()
    second = make_sequence("b", 4, 9)
    guess(drafts, first, 8)
    guess(drafts, second, 8)
    drafts.observe(first, 1, 0)
    assert not guess(drafts, first, 8)
    assert len(guess(drafts, second, 8)) == 1
    drafts.forget(first)
    drafts.forget(first)
    drafts.forget(second)
    assert drafts._drafting == {}


def test_what_a_step_has_room_for_is_shared_in_the_order_of_its_rows() -> None:
    drafts, first = drafts_and_sequence()
    second, third = make_sequence("b", 4, 9), make_sequence("c", 4, 9)
    drafts.observe(first, 3, 3)
    drafts.propose([DraftRoom(first, 8)], 8)
    drafts.observe(first, 3, 3)
    rooms = [DraftRoom(each, 8) for each in (first, second, third)]
    assert [len(each.tokens) for each in drafts.propose(rooms, 8)] == [7, 1, 0]
    assert list(drafts.propose(rooms, 0)) == [Draft()] * 3


def test_more_guesses_than_a_step_takes_are_told() -> None:
    for asked, device, told in (
        (7, DeviceKind.CPU, ""),
        (8, DeviceKind.CPU, "at most 7 tokens are guessed at once, not 8"),
        (7, DeviceKind.CUDA, ""),
        (8, DeviceKind.CUDA, "steps with more than 7 guesses in a row run eagerly"),
    ):
        ledger = Ledger()
        make_drafts(DrafterContext(Speculation(num_speculative_tokens=asked), device, ledger, VOCAB))
        assert [each.subject for each in ledger.degradations] == (["num_speculative_tokens"] if told else [])
        assert told in "".join(map(str, ledger.degradations))


class Branching(Drafter):
    """Guesses two continuations, as long as it may."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        return [merged([[1] * (each.longest or 0), [2] * (each.longest or 0)], each.most) for each in rooms]

    def observe(self, step: ObservedStep) -> None:
        """Learns nothing."""

    def forget(self, sequence: SequenceState) -> None:
        """Keeps nothing."""


def test_a_tree_grows_with_its_longest_path_and_takes_the_room_of_all_its_branches() -> None:
    drafts, sequence = (
        AdaptiveDrafts(Branching(), 7, 16, Ledger(), vocab_size=VOCAB, num_branches=2),
        make_sequence("a", 8, 200),
    )
    for depth in (1, 3, 7, 7):
        [draft] = drafts.propose([DraftRoom(sequence, 99)], 99)
        assert len(draft.tokens) == 2 * depth
        assert max(depths(draft.parents or ())) == depth
        drafts.observe(sequence, depth, depth)
    [draft] = drafts.propose([DraftRoom(sequence, 99)], 9)
    assert len(draft.tokens) == 9
    [draft] = drafts.propose([DraftRoom(sequence, 5)], 99)
    assert draft == Draft((1,) * 5), "a tree of one branch is a chain"


class Lone(Branching):
    """Always guesses a tree."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        return [Draft((1, 2), (-1, -1))] * len(rooms)


def test_a_tree_that_nobody_asked_for_ends_the_guessing_and_is_told() -> None:
    ledger = Ledger()
    drafts, sequence = AdaptiveDrafts(Lone(), 7, 16, ledger, vocab_size=VOCAB, patience=1), make_sequence("a", 8, 200)
    assert list(drafts.propose([DraftRoom(sequence, 99)], 99)) == [Draft()]
    assert "expected one continuation, got a tree" in ledger.degradations[0].outcome
