"""DeepSeek V4 answers the same with a prefix cache, hits inside an open window of tokens, retraction and guesses.

What it keeps is a state for each sequence beside entries in pages. `test_hybrids` asks it what models with states are
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sightline import RequestOutput
from sightline.core.errors import ConfigError
from support.speculating import GREEDY, PAGE, SCORED, ask, assert_same_answers, tiny
from support.tiny_models import random_prompts

FAMILY = "deepseek_v4"
WINDOW = 16
"""Tokens of the longer entries."""
SHORT = replace(GREEDY, max_tokens=8)
[BEGINNING] = random_prompts([27], seed=2)
PROMPTS = [[*BEGINNING, *end] for end in ([3, 4, 5], [6, 7, 8, 9])]
"""They share six pages, which end inside the second window of 16 tokens."""


@pytest.fixture(scope="module")
def plain(folders: Callable[[str], Path]) -> list[RequestOutput]:
    llm = tiny(folders(FAMILY), prefix_caching=False, max_num_seqs=1)
    return ask(llm, replace(SCORED, max_tokens=8), PROMPTS)


def test_a_hit_inside_an_open_window_changes_no_answer(
    folders: Callable[[str], Path], plain: list[RequestOutput]
) -> None:
    llm = tiny(folders(FAMILY))
    found = [ask(llm, SHORT, [prompt])[0] for prompt in [*PROMPTS, *PROMPTS]]
    assert_same_answers(found, [*plain, *plain])
    cached = [output.num_cached_tokens or 0 for output in found]
    assert cached[2:] == [28, 28]
    assert all(count % PAGE == 0 and count % WINDOW for count in cached[2:])


@pytest.mark.prove
def test_repeated_text_is_guessed_and_changes_no_answer(folders: Callable[[str], Path]) -> None:
    prompts = [[5, 6, 7, 8] * 6, [9, 4, 11] * 7]
    expected = ask(tiny(folders(FAMILY), prefix_caching=False, max_num_seqs=1), replace(SCORED, max_tokens=20), prompts)
    llm = tiny(folders(FAMILY), speculative_config={"method": "ngram"})
    assert_same_answers(ask(llm, replace(GREEDY, max_tokens=20), prompts), expected)
    assert llm.engine.metrics().spec_decode_num_draft_tokens > 0


def test_rows_that_give_way_change_no_answer(folders: Callable[[str], Path], plain: list[RequestOutput]) -> None:
    llm = tiny(folders(FAMILY), cache_tokens=48, max_model_len=40, max_num_seqs=2)
    assert_same_answers(ask(llm, SHORT, PROMPTS), plain)
    assert llm.engine.num_retractions > 0


def test_a_tree_of_guesses_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="tree-mask"):
        tiny(folders(FAMILY), speculative_config={"method": "ngram", "num_branches": 3})


@pytest.mark.parametrize("page_size", [12, 24])
def test_pages_that_entries_do_not_fit_into_are_refused(folders: Callable[[str], Path], page_size: int) -> None:
    with pytest.raises(ConfigError, match="16 tokens"):
        tiny(folders(FAMILY), page_size=page_size)


def test_predictors_that_are_not_read_are_refused_as_drafters(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="multi-token prediction, which the method mtp needs"):
        tiny(folders(FAMILY), speculative_config={"method": "mtp"})


def test_a_model_that_keeps_states_is_refused_as_a_drafter(folders: Callable[[str], Path]) -> None:
    drafting = {"method": "draft_model", "model": str(folders(FAMILY))}
    with pytest.raises(ConfigError, match="expected a drafter that keeps no state of a sequence"):
        tiny(folders(FAMILY), speculative_config=drafting)
