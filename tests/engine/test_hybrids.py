"""Models with recurrent layers answer as they do without a cache, in one batch, in one piece and without guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sightline import LLM, RequestOutput
from sightline.core.errors import ConfigError
from support.case_marks import proofs
from support.engines import is_at_rest
from support.guessing import lie
from support.hybrids import HYBRIDS, ROUTINE
from support.speculating import (
    EVERYTHING,
    GREEDY,
    PAGE,
    PROMPTS,
    SAMPLED,
    SCORED,
    ask,
    assert_same_answers,
    tiny,
    tokens_of,
)
from support.tiny_models import prompts_alike, random_prompts

NGRAM = {"method": "ngram"}
REPEATED = prompts_alike(22, 4, 5)
ROUNDS = [REPEATED, REPEATED, prompts_alike(9, 3, 14), random_prompts([30, 2, 8])]
PROVEN = ("bailing_hybrid", "minimax", "nemotron_h", "granite_hybrid", "lfm2", "deepseek_v4")
"""One family of each kind of layer. The others differ from these in what is tested with their models."""
VARIANTS = [pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS if name not in (*ROUTINE, *PROVEN)]
families = pytest.mark.parametrize("family", [ROUTINE[0], *proofs(ROUTINE[1], *PROVEN), *VARIANTS])
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in (ROUTINE[1], *PROVEN[:4])]
one_family = pytest.mark.parametrize("family", [ROUTINE[0], *proofs(*PROVEN[4:]), *OTHERS, *VARIANTS])
"""For what the engine does with states, whatever the layers are."""


@pytest.fixture(scope="module")
def plain(folders: Callable[[str], Path]) -> Callable[[str], list[list[RequestOutput]]]:
    """The answers of a family to every round without a cache, one prompt at a time."""
    known: dict[str, list[list[RequestOutput]]] = {}

    def find(family: str) -> list[list[RequestOutput]]:
        if family not in known:
            llm = tiny(folders(family), prefix_caching=False, max_num_seqs=1)
            _, *others = ROUNDS
            answers = [ask(llm, SCORED, prompts) for prompts in others]
            known[family] = [answers[0], *answers]
        return known[family]

    return find


Plain = Callable[[str], list[list[RequestOutput]]]


@families
@pytest.mark.parametrize("chunk", [16, *proofs(5), pytest.param(512, marks=pytest.mark.slow)])
def test_a_prefix_cache_and_chunks_change_no_answer(
    folders: Callable[[str], Path], plain: Plain, family: str, chunk: int
) -> None:
    llm = tiny(folders(family), max_num_batched_tokens=chunk, max_num_seqs=4)
    for prompts, answers in zip(ROUNDS, plain(family), strict=True):
        assert_same_answers(ask(llm, GREEDY, prompts), answers)
    assert llm.engine.metrics().prefix_cache_hits > 22 * 3


@families
@pytest.mark.parametrize("chunk", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_guesses_prefixes_and_chunks_together_change_no_answer(
    folders: Callable[[str], Path], plain: Plain, monkeypatch: pytest.MonkeyPatch, family: str, chunk: int
) -> None:
    """Each of these alone was right in engines where all of them together lost a fifth of the accuracy."""
    lie(monkeypatch, [output for outputs in plain(family) for output in outputs], 0.7)
    llm = tiny(folders(family), speculative_config=NGRAM, max_num_batched_tokens=chunk, max_num_seqs=4)
    for prompts, answers in zip(ROUNDS, plain(family), strict=True):
        assert_same_answers(ask(llm, GREEDY, prompts), answers)
    metrics = llm.engine.metrics()
    accepted, drafted = metrics.spec_decode_num_accepted_tokens, metrics.spec_decode_num_draft_tokens
    assert 0 < accepted < drafted
    assert metrics.prefix_cache_hits > 0


@pytest.mark.parametrize("honesty", [*proofs(0.0, 1.0), 0.6])
def test_every_parameter_gives_the_same_answers_with_guesses(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, honesty: float
) -> None:
    folder = folders("qwen3_next")
    expected = ask(tiny(folder), EVERYTHING, PROMPTS)
    lie(monkeypatch, expected, honesty)
    llm = tiny(folder, speculative_config=NGRAM)
    assert tokens_of(ask(llm, EVERYTHING, PROMPTS)) == tokens_of(expected)


@one_family
def test_rows_that_give_way_go_on_from_a_checkpoint(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = folders(family)
    expected = ask(tiny(folder), SCORED, PROMPTS)
    cramped = {"cache_tokens": 72, "max_model_len": 64, "max_num_seqs": 5}
    for overlaps in (False, True):
        llm = tiny(folder, async_scheduling=overlaps, **cramped)
        assert_same_answers(ask(llm, GREEDY, PROMPTS), expected)
        assert llm.engine.num_retractions > 0
    lie(monkeypatch, expected, 0.6)
    llm = tiny(folder, speculative_config=NGRAM, **cramped)
    assert_same_answers(ask(llm, GREEDY, PROMPTS), expected)
    assert llm.engine.num_retractions > 0


@one_family
def test_steps_in_flight_change_no_answer(folders: Callable[[str], Path], plain: Plain, family: str) -> None:
    llm = tiny(folders(family), async_scheduling=True, max_num_batched_tokens=16, max_num_seqs=3)
    for prompts, answers in zip(ROUNDS, plain(family), strict=True):
        assert_same_answers(ask(llm, GREEDY, prompts), answers)


@pytest.mark.parametrize("prefix_caching", [True, *proofs(False)])
def test_continuations_of_one_prompt_share_its_state(folders: Callable[[str], Path], prefix_caching: bool) -> None:
    llm = tiny(folders("qwen3_next"), prefix_caching=prefix_caching, max_num_seqs=4)
    fresh = tiny(folders("qwen3_next"), prefix_caching=False, max_num_seqs=1)
    params = replace(SAMPLED, n=4, max_tokens=8)
    for length in (1, 2, 8, 9, 22):
        [prompt] = random_prompts([length], seed=length)
        [together] = ask(llm, params, [prompt])
        seeds = [each.token_ids for each in together.outputs]
        [alone] = ask(fresh, params, [prompt])
        assert seeds == [each.token_ids for each in alone.outputs]
    assert len(set(seeds)) > 1


def cached(llm: LLM, *prompts: Sequence[int]) -> list[int]:
    """The tokens of each prompt that were found, asked one after the other."""
    return [ask(llm, replace(GREEDY, max_tokens=1), [list(prompt)])[0].num_cached_tokens for prompt in prompts]


def test_a_hit_ends_at_the_last_checkpoint(folders: Callable[[str], Path]) -> None:
    llm = tiny(folders("qwen3_next"))
    [first, second, third] = random_prompts([21, 21, 21], seed=3)
    # A checkpoint is behind the last whole page, but for a prompt's last token.
    assert cached(llm, first, first, first[:20], first[:17], first[:16]) == [0, 20, 0, 16, 0]
    # The fourth had 16 in pages and no state there; it left one for the fifth, which the sixth shares beyond 8.
    assert cached(llm, [*first[:8], *second[:9]], [*first[:8], *third[:3]]) == [0, 8]


def test_a_branch_gets_a_checkpoint_the_second_time(folders: Callable[[str], Path]) -> None:
    llm = tiny(folders("qwen3_next"))
    [system, *questions] = random_prompts([10, 7, 7, 7], seed=4)
    assert cached(llm, *([*system, *question] for question in questions)) == [0, 0, 8]


def test_the_next_turn_of_a_conversation_goes_on_behind_the_answer(folders: Callable[[str], Path]) -> None:
    llm = tiny(folders("qwen3_next"))
    [prompt, question] = random_prompts([13, 5], seed=8)
    num_computed = 0
    for _ in range(3):
        [output] = ask(llm, replace(GREEDY, max_tokens=10), [prompt])
        assert output.num_cached_tokens == num_computed // PAGE * PAGE
        told = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        # The last token of an answer is not.
        num_computed = len(told) - 1
        prompt = [*told, *question]


@pytest.mark.parametrize("count", [0, 1, *proofs(2, 3)])
def test_few_checkpoints_change_how_much_is_found_and_nothing_else(
    folders: Callable[[str], Path], plain: Plain, count: int
) -> None:
    llm = tiny(folders("qwen3_next"), max_state_checkpoints=count, max_num_seqs=4)
    for prompts, answers in zip(ROUNDS, plain("qwen3_next"), strict=True):
        assert_same_answers(ask(llm, GREEDY, prompts), answers)
    states = llm.engine.runtime.store.main.states
    assert states is not None
    assert states.num_checkpoints == count
    assert cached(llm, ROUNDS[0][0], ROUNDS[0][0])[1] == (24 if count else 0)


@pytest.mark.parametrize("most_steps", [3, *proofs(8)])
def test_a_cancelled_or_paused_request_leaves_no_state(folders: Callable[[str], Path], most_steps: int) -> None:
    llm = tiny(folders("qwen3_next"), max_num_batched_tokens=8, max_num_seqs=3)
    engine, expected = llm.engine, ask(tiny(folders("qwen3_next")), SCORED, PROMPTS)
    for steps in range(1, most_steps + 1):
        kept = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        for _ in range(steps):
            engine.step()
        engine.pause(kept[0])
        engine.cancel(kept[1])
        for _ in range(2):
            engine.step()
        engine.resume(kept[0])
        while engine.has_work:
            engine.step()
        found = [engine.pop_output(each) for each in kept]
        assert_same_answers(found[:1] + found[2:], expected[:1] + expected[2:])
        assert is_at_rest(llm)


def test_a_tree_of_guesses_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="tree-mask"):
        tiny(folders("qwen3_next"), speculative_config={"method": "ngram", "num_branches": 3})


def test_checkpoints_of_a_model_without_recurrent_layers_are_told_to_change_nothing(
    folders: Callable[[str], Path],
) -> None:
    llm = tiny(folders("llama"), max_state_checkpoints=3)
    assert any("no layer of the model is recurrent" in str(each) for each in llm.engine.ledger.degradations)
