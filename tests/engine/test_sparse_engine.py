"""Models with sparse attention answer as they do without a cache, in one batch, in one piece and without guesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sightline import RequestOutput
from support.case_marks import routine
from support.engines import is_at_rest
from support.guessing import lie
from support.speculating import GREEDY, PAGE, SAMPLED, SCORED, ask, assert_same_answers, tiny
from support.tiny_models import prompts_alike, random_prompts
from support.tiny_sparse import TOP_K
from support.tiny_sparse_mtp import SparseOracle

NGRAM = {"method": "ngram"}
FAMILIES = ("deepseek_v32", "glm_moe_dsa")
PROMPTS = random_prompts([9, 14, 3, 33, TOP_K])
ROUNDS = [prompts_alike(22, 2, 5), prompts_alike(22, 2, 5), random_prompts([30, 2, TOP_K - 1])]
"""Contexts below, at and above what an indexer chooses."""
ANSWER = 8
FEW = replace(GREEDY, max_tokens=ANSWER)
Folders = Callable[[str], Path]
families = pytest.mark.parametrize("family", routine({name: name for name in FAMILIES}, "glm_moe_dsa"))


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Callable[[str], list[list[RequestOutput]]]:
    """The answers of a family to every round without a cache, one prompt at a time."""
    known: dict[str, list[list[RequestOutput]]] = {}

    def find(family: str) -> list[list[RequestOutput]]:
        if family not in known:
            llm = tiny(folders(family), prefix_caching=False, max_num_seqs=1)
            known[family] = [ask(llm, replace(SCORED, max_tokens=ANSWER), prompts) for prompts in ROUNDS]
        return known[family]

    return find


Plain = Callable[[str], list[list[RequestOutput]]]


@families
@pytest.mark.parametrize(
    ("chunk", "overlaps"), [(16, True), *(pytest.param(each, False, marks=pytest.mark.prove) for each in (5, 512))]
)
def test_a_prefix_cache_chunks_and_steps_in_flight_change_no_answer(
    folders: Folders, plain: Plain, family: str, chunk: int, overlaps: bool
) -> None:
    llm = tiny(folders(family), max_num_batched_tokens=chunk, max_num_seqs=4, async_scheduling=overlaps)
    for prompts, answers in zip(ROUNDS, plain(family), strict=True):
        assert_same_answers(ask(llm, FEW, prompts), answers)
    assert llm.engine.metrics().prefix_cache_hits > 22


@families
@pytest.mark.parametrize("page_size", [pytest.param(each, marks=pytest.mark.prove) for each in (1, 16)])
def test_sizes_of_pages_change_no_answer(folders: Folders, plain: Plain, family: str, page_size: int) -> None:
    llm = tiny(folders(family), page_size=page_size)
    for prompts, answers in zip(ROUNDS, plain(family), strict=True):
        assert_same_answers(ask(llm, FEW, prompts), answers)


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overlaps", [False, True])
def test_rows_that_give_way_change_no_answer(folders: Folders, family: str, overlaps: bool) -> None:
    folder = folders(family)
    expected = ask(tiny(folder), SCORED, PROMPTS)
    llm = tiny(folder, async_scheduling=overlaps, cache_tokens=88, max_model_len=64, max_num_seqs=5)
    assert_same_answers(ask(llm, GREEDY, PROMPTS), expected)
    assert llm.engine.num_retractions > 0


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_continuations_of_one_prompt_share_its_entries(folders: Folders, family: str) -> None:
    [prompt] = random_prompts([22], seed=4)
    params = replace(SAMPLED, n=3, max_tokens=ANSWER)
    [together] = ask(tiny(folders(family), max_num_seqs=4), params, [prompt])
    [alone] = ask(tiny(folders(family), prefix_caching=False, max_num_seqs=1), params, [prompt])
    found = [each.token_ids for each in together.outputs]
    assert found == [each.token_ids for each in alone.outputs]
    assert len(set(found)) > 1


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_cancelled_and_paused_requests_leave_the_others_alone(folders: Folders, family: str) -> None:
    llm = tiny(folders(family), max_num_batched_tokens=8, max_num_seqs=3)
    engine, expected = llm.engine, ask(tiny(folders(family)), replace(SCORED, max_tokens=ANSWER), PROMPTS)
    for steps in (1, 3, 6):
        kept = [engine.submit(prompt, FEW) for prompt in PROMPTS]
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


@families
@pytest.mark.parametrize("branches", [1, pytest.param(3, marks=pytest.mark.prove)])
def test_guesses_change_no_answer(
    folders: Folders, plain: Plain, monkeypatch: pytest.MonkeyPatch, family: str, branches: int
) -> None:
    answers = plain(family)
    lie(monkeypatch, [output for outputs in answers for output in outputs], 0.7, num_branches=branches)
    llm = tiny(folders(family), speculative_config=NGRAM, max_num_batched_tokens=32, max_num_seqs=4)
    for prompts, expected in zip(ROUNDS, answers, strict=True):
        assert_same_answers(ask(llm, FEW, prompts), expected)
    metrics = llm.engine.metrics()
    assert 0 < metrics.spec_decode_num_accepted_tokens < metrics.spec_decode_num_draft_tokens


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_the_n_gram_drafter_changes_no_answer(folders: Folders, plain: Plain, family: str) -> None:
    llm = tiny(folders(family), speculative_config=NGRAM, max_num_seqs=4)
    for prompts, expected in zip(ROUNDS, plain(family), strict=True):
        assert_same_answers(ask(llm, FEW, prompts), expected)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("deepseek_v32", "deepseek_v32"),
        ("glm_moe_dsa", "glm_moe_dsa"),
        ("deepseek_v32", "llama"),
        ("llama", "glm_moe_dsa"),
    ],
)
def test_a_draft_model_changes_no_answer(folders: Folders, family: str, drafter: str) -> None:
    """Its steps are planned at once, before the first one runs."""
    expected = ask(tiny(folders(family)), replace(SCORED, max_tokens=ANSWER), PROMPTS)
    config = {"method": "draft_model", "model": str(folders(drafter)), "num_speculative_tokens": 3}
    llm = tiny(folders(family), speculative_config=config, max_model_len=256)
    assert_same_answers(ask(llm, FEW, PROMPTS), expected)
    metrics = llm.engine.metrics()
    assert metrics.spec_decode_num_draft_tokens > 0
    if family == drafter:
        assert metrics.spec_decode_num_accepted_tokens > 0.95 * metrics.spec_decode_num_draft_tokens


@pytest.mark.parametrize(
    ("family", "modules"), [("deepseek_v32", 1), pytest.param("glm_moe_dsa", 2, marks=pytest.mark.prove)]
)
def test_modules_for_multi_token_prediction_change_no_answer(tmp_path: Path, family: str, modules: int) -> None:
    folder = SparseOracle(family, modules, tmp_path).folder
    expected = ask(tiny(folder), replace(SCORED, max_tokens=ANSWER), PROMPTS)
    llm = tiny(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 3}, max_num_seqs=3)
    assert_same_answers(ask(llm, FEW, PROMPTS), expected)
    assert llm.engine.metrics().spec_decode_num_draft_tokens > 0
    assert {each.group.name for each in llm.engine.runtime.networks[1].bindings} == {"draft0.group0", "draft0.index0"}


def test_pages_hold_a_latent_for_each_layer_and_an_index_key_for_each_indexer(folders: Folders) -> None:
    pools = {pool.spec.name: pool for pool in tiny(folders("glm_moe_dsa")).engine.runtime.store.pools}
    pages = pools["latent"].allocator.num_usable + 1
    assert pools["latent"].num_bytes == 5 * pages * PAGE * (20 + 8) * 4
    assert pools["index"].num_bytes == 2 * pages * PAGE * 14 * 4
