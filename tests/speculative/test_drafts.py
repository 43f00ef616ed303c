"""How many tokens are guessed for a sequence follows how many were right."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.core.device import DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.speculation import Speculation
from sightline.scheduler.sequence import SequenceState
from sightline.speculative.drafter import Drafter
from sightline.speculative.drafts import AdaptiveDrafts
from sightline.speculative.methods import make_drafts
from support.scheduling import make_sequence


class Ready(Drafter):
    """Always has a guess."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return [len(tokens)] * most


def drafts_and_sequence() -> tuple[AdaptiveDrafts, SequenceState]:
    return AdaptiveDrafts(Ready, 8, 16), make_sequence("a", 8, 200)


def test_a_draft_grows_while_it_is_right_and_shrinks_to_what_was() -> None:
    drafts, sequence = drafts_and_sequence()
    for drafted, accepted, following in ((1, 1, 3), (3, 3, 7), (7, 7, 8), (8, 7, 3), (3, 2, 1), (1, 1, 3), (3, 1, 1)):
        assert len(drafts.propose(sequence, 99)) == drafted
        drafts.observe(sequence, drafted, accepted)
        assert len(drafts.propose(sequence, 99)) == following, (drafted, accepted)
    drafts.observe(sequence, 7, 7)
    assert len(drafts.propose(sequence, 5)) == 5, "never more than there is room for"


def test_guesses_that_fail_rest_longer_and_longer_and_are_tried_again() -> None:
    drafts, sequence = drafts_and_sequence()
    tried = 0
    for _ in range(1000):
        if proposed := drafts.propose(sequence, 8):
            tried += 1
            drafts.observe(sequence, len(proposed), 0)
        sequence.tokens.append(1)
    assert 1000 // 64 <= tried <= 1000 // 64 + 8
    drafts.observe(sequence, 2, 1)
    sequence.tokens += [1] * 64
    assert drafts.propose(sequence, 8)
    drafts.observe(sequence, 2, 0)
    sequence.tokens += [1, 1]
    assert drafts.propose(sequence, 8), "one failure after a success rests briefly"


def test_every_sequence_has_a_state_of_its_own_and_leaves_nothing() -> None:
    drafts, first = drafts_and_sequence()
    second = make_sequence("b", 4, 9)
    drafts.propose(first, 8)
    drafts.propose(second, 8)
    drafts.observe(first, 1, 0)
    assert not drafts.propose(first, 8)
    assert len(drafts.propose(second, 8)) == 1
    drafts.forget(first)
    drafts.forget(first)
    drafts.forget(second)
    assert drafts._drafting == {}


def test_more_guesses_than_a_step_takes_are_told() -> None:
    for asked, subjects in ((7, []), (8, ["num_speculative_tokens"])):
        ledger = Ledger()
        make_drafts(Speculation(num_speculative_tokens=asked), DeviceKind.CPU, ledger)
        assert [each.subject for each in ledger.degradations] == subjects
