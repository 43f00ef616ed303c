"""Every bug in how recurrent states are kept is found by what an engine answers, or by an error before it does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sightline.runner.runner import Runner
from support.case_marks import routine
from support.guessing import lie
from support.speculating import GREEDY, SAMPLED, ask, tiny, tokens_of
from support.state_bugs import STATE_BUGS, Plant
from support.tiny_models import prompts_alike

PROMPTS = prompts_alike(14, 4, 5)
FORKED = replace(SAMPLED, n=3, max_tokens=6)
NGRAM = {"method": "ngram"}
CRAMPED = {"cache_tokens": 72, "max_model_len": 64, "max_num_seqs": 3}


@dataclass(frozen=True)
class Truth:
    """The answers of an engine that keeps no prefix and runs one row."""

    folder: Path
    answers: list[list[tuple[int, ...]]]
    forked: list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def truth(folders: Callable[[str], Path]) -> Truth:
    llm = tiny(folders("qwen3_next"), prefix_caching=False, max_num_seqs=1)
    return Truth(folders("qwen3_next"), tokens_of(ask(llm, GREEDY, PROMPTS)), tokens_of(ask(llm, FORKED, PROMPTS[:2])))


def shake(patch: pytest.MonkeyPatch) -> None:
    """Every fifth forward pass raises when it is over, and its rows are run again in parts."""
    forward, count = Runner.forward, itertools.count(1)

    def shaky(self: Runner, *arguments: Any) -> Tensor:
        result = forward(self, *arguments)
        if next(count) % 5 == 0:
            raise RuntimeError("shaken")
        return result

    patch.setattr(Runner, "forward", shaky)


def workload(truth: Truth, patch: pytest.MonkeyPatch) -> None:
    """Prefixes, forks, retraction and guesses, all of whose answers are known."""
    llm = tiny(truth.folder, max_num_batched_tokens=12, max_num_seqs=3)
    for _ in range(2):
        assert tokens_of(ask(llm, GREEDY, PROMPTS)) == truth.answers
        assert tokens_of(ask(llm, FORKED, PROMPTS[:2])) == truth.forked
    with patch.context() as shaken:
        shake(shaken)
        shaky = tiny(truth.folder, max_num_seqs=3)
        assert tokens_of(ask(shaky, GREEDY, PROMPTS)) == truth.answers
        assert shaky.engine.metrics().steps_cut > 2
    cramped = tiny(truth.folder, max_state_checkpoints=3, **CRAMPED)
    assert tokens_of(ask(cramped, GREEDY, PROMPTS)) == truth.answers
    outputs = ask(tiny(truth.folder, prefix_caching=False), GREEDY, PROMPTS)
    with patch.context() as liars:
        lie(liars, outputs, 0.6)
        guessing = tiny(truth.folder, speculative_config=NGRAM, max_num_seqs=3)
        for _ in range(2):
            assert tokens_of(ask(guessing, GREEDY, PROMPTS)) == truth.answers


@pytest.mark.prove
def test_without_a_bug_every_answer_is_right(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    workload(truth, monkeypatch)


@pytest.mark.parametrize(
    "plant",
    routine(STATE_BUGS, "read_the_state_of_another_row", "update_in_place", "keep_a_checkpoint_of_the_wrong_position"),
)
def test_every_bug_is_found(truth: Truth, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a wrong answer, or any error
        workload(truth, monkeypatch)
