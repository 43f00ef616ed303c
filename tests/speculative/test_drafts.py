"""How many tokens are guessed for a sequence follows how many were right."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.core.device import DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.speculation import Speculation
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.drafter import DrafterContext, DrafterOfTexts, TextDrafter
from sightline.speculative.drafts import AdaptiveDrafts
from sightline.speculative.methods import make_drafts
from support.scheduling import make_sequence


class Ready(TextDrafter):
    """Always has a guess."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return [len(tokens)] * most


def drafts_and_sequence() -> tuple[AdaptiveDrafts, SequenceState]:
    return AdaptiveDrafts(DrafterOfTexts(Ready), 8, 16, Ledger()), make_sequence("a", 8, 200)


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
    drafts, sequence = AdaptiveDrafts(DrafterOfTexts(Ready), 7, 16, Ledger(), patience=2), make_sequence("a", 8, 200)
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
    for asked, subjects in ((7, []), (8, ["num_speculative_tokens"])):
        ledger = Ledger()
        make_drafts(DrafterContext(Speculation(num_speculative_tokens=asked), DeviceKind.CPU, ledger))
        assert [each.subject for each in ledger.degradations] == subjects
