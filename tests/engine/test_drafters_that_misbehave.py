"""A drafter of another package may do anything with what it is given. Answers stay the same, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sightline import LLM
from sightline.engine import engine as engine_module
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.drafter import Drafter, DrafterContext, ObservedStep
from sightline.speculative.drafts import AdaptiveDrafts
from support.case_marks import proofs
from support.speculating import EVERYTHING, PROMPTS, ask, tiny, tokens_of
from support.tiny_models import VOCAB, make_model


class Answers:
    """What the model says without guesses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        outputs = ask(tiny(folder), EVERYTHING, PROMPTS)
        self.tokens = tokens_of(outputs)
        self._texts = [[*each.prompt_token_ids, *one.token_ids] for each in outputs for one in each.outputs]

    def behind(self, tokens: list[int], count: int) -> list[int]:
        known = next((each for each in self._texts if each[: len(tokens)] == tokens), [])
        return known[len(tokens) : len(tokens) + count]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(folder)
    return Answers(folder)


class Right(Drafter):
    """Knows the answers."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def truth(self, room: DraftRoom) -> list[int]:
        return self._answers.behind(room.sequence.tokens, room.most)

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        return [Draft(tuple(self.truth(each))) for each in rooms]

    def observe(self, step: ObservedStep) -> None:
        """Learns nothing."""

    def forget(self, sequence: SequenceState) -> None:
        """Keeps nothing."""


class Kept(Right):
    """Keeps the lists that it gave, and uses them for something else when it sees the step."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._lists: list[list[int]] = []

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        self._lists = [self.truth(each) for each in rooms]
        return [Draft(each) for each in self._lists]  # type: ignore[arg-type]

    def observe(self, step: ObservedStep) -> None:
        for each in self._lists:
            each.clear()


class KeptParents(Kept):
    """Does the same with the parents of trees."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        self._lists, drafts = [], []
        for room in rooms:
            tokens = self.truth(room)[: max(1, room.most - 1)]
            parents = list(range(-1, len(tokens) - 1))
            if tokens and room.most > len(tokens):
                tokens.append((tokens[0] + 1) % VOCAB)
                parents.append(-1)
            self._lists.append(parents)
            drafts.append(Draft(tokens, parents))  # type: ignore[arg-type]
        return drafts


class Arrays(Right):
    """Gives arrays."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        return [Draft(np.array(self.truth(each), np.int32)) for each in rooms]  # type: ignore[arg-type]


def guessing(answers: Answers, patch: pytest.MonkeyPatch, make: Callable[[Answers], Drafter], branches: int) -> LLM:
    def drafts(context: DrafterContext) -> AdaptiveDrafts:
        assert context.vocab_size == VOCAB
        return AdaptiveDrafts(
            make(answers), 7, 64, context.ledger, vocab_size=context.vocab_size, patience=2, num_branches=branches
        )

    patch.setattr(engine_module, "make_drafts", drafts)
    return tiny(answers.folder, speculative_config={"method": "ngram", "num_branches": branches})


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("make", [Kept, KeptParents, Arrays])
def test_a_draft_is_what_it_was_when_it_was_proposed(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, make: Callable[[Answers], Drafter], branches: int
) -> None:
    if make is KeptParents and branches == 1:
        pytest.skip("trees must be asked for")
    llm = guessing(answers, monkeypatch, make, branches)
    assert tokens_of(ask(llm, EVERYTHING, PROMPTS)) == answers.tokens
    assert llm.engine.metrics().spec_decode_num_accepted_tokens > 80


class Unknown(Right):
    """Guesses a token that the model does not have."""

    token: object = VOCAB

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        return [Draft((self.token,)) for _ in rooms]  # type: ignore[arg-type]


class Negative(Unknown):
    token = -1


class Fractional(Unknown):
    token = 1.0


class Appending(Right):
    """Guesses one token after the other, and appends each to what it was given."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        for each in rooms:
            each.sequence.tokens.append(3)
        return [Draft((3,))] * len(rooms)


class FailingAppending(Appending):
    """Fails on top of that."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        super().propose(rooms)
        raise RuntimeError("expected an end, got none")


class Fewer(Right):
    """Has no draft for the last room."""

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        return super().propose(rooms)[:-1]


class Unforgetting(Right):
    """Fails when a sequence ends."""

    def forget(self, sequence: SequenceState) -> None:
        raise RuntimeError("expected a sequence that it knows, got another")


class Blind(Right):
    """Fails when it sees a step."""

    def observe(self, step: ObservedStep) -> None:
        raise RuntimeError("expected states, got none")


@pytest.mark.parametrize("branches", [1, *proofs(2)])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Unknown, f"expected tokens from 0 to {VOCAB - 1}"),
        (Negative, f"expected tokens from 0 to {VOCAB - 1}"),
        (Fractional, "TypeError"),
        (Appending, "leaves a sequence's tokens alone"),
        (FailingAppending, "leaves a sequence's tokens alone"),
        (Fewer, "ValueError"),
        (Unforgetting, "expected a sequence that it knows"),
        (Blind, "expected states, got none"),
    ],
)
def test_a_drafter_that_breaks_its_contract_is_not_asked_again_and_answers_stay(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, make: Callable[[Answers], Drafter], why: str, branches: int
) -> None:
    llm = guessing(answers, monkeypatch, make, branches)
    for _ in range(2):
        assert tokens_of(ask(llm, EVERYTHING, PROMPTS)) == answers.tokens
    [told] = [each for each in llm.engine.ledger.degradations if each.subject == "speculative_config"]
    assert why in told.outcome
