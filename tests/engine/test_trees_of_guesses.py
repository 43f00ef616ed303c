"""Guesses that are trees change how many steps an answer takes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from sightline import RequestOutput
from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.capability import Capability
from sightline.attention.kinds import Feature
from sightline.cache.store import NetworkCache
from sightline.core.batch import RowMask
from sightline.core.errors import NoBackendError
from sightline.engine import launch, sampled
from sightline.engine.live import LiveSequence
from sightline.llm import TokensPrompt
from sightline.runner.sampling.sampler import RowSampling
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState
from sightline.scheduler.supply import Supply
from sightline.speculative.verification import tree_mask, tree_positions
from support.case_marks import routine
from support.guessing import lie
from support.recording_backend import install
from support.speculating import EVERYTHING, GREEDY, PAGE, PROMPTS, ask, tiny, tokens_of

TREES = {"method": "ngram", "num_branches": 3}
Answers = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def truth(folders: Callable[[str], Path]) -> list[RequestOutput]:
    return ask(tiny(folders("llama")), EVERYTHING, PROMPTS)


def watched(patch: pytest.MonkeyPatch) -> list[tuple[ScheduledRow, RowResult]]:
    """The rows with trees that are committed from here on."""
    seen: list[tuple[ScheduledRow, RowResult]] = []
    commit = Scheduler.commit

    def watch(self: Scheduler, row: ScheduledRow, result: RowResult) -> None:
        if row.parents is not None:
            seen.append((row, result))
        commit(self, row, result)

    patch.setattr(Scheduler, "commit", watch)
    return seen


@pytest.mark.parametrize(
    ("family", "honesty"),
    [
        ("llama", 0.0),
        ("llama", 0.9),
        ("llama", 0.8),
        ("deepseek_v3", 0.8),
        *(
            pytest.param(family, 0.8, marks=pytest.mark.prove)
            for family in ("gemma2", "gemma3", "gpt_oss", "qwen3_moe")
        ),
    ],
)
def test_answers_are_those_without_guesses(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, honesty: float
) -> None:
    expected = ask(tiny(folders(family)), EVERYTHING, PROMPTS)
    lie(monkeypatch, expected, honesty, num_branches=3)
    seen = watched(monkeypatch)
    llm = tiny(folders(family), speculative_config=TREES)
    found = ask(llm, EVERYTHING, PROMPTS)
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert len(mine.logprobs or ()) == len(theirs.logprobs or ())
            for token, here, there in zip(mine.token_ids, mine.logprobs or (), theirs.logprobs or (), strict=False):
                assert here[token].logprob == pytest.approx(there[token].logprob, abs=1e-3)
    assert len(seen) > 10
    paths = [result.path for _, result in seen]
    moved = [path for path in paths if path and path != tuple(range(len(path)))]
    assert (len(moved) > 2) if honesty else (len(moved) < 5), "paths whose entries had to move"
    metrics = llm.engine.metrics()
    assert metrics.generation_tokens == sum(len(each.token_ids) for output in expected for each in output.outputs)
    assert metrics.spec_decode_num_draft_tokens > metrics.spec_decode_num_accepted_tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_tokens": 72, "max_model_len": 64, "max_num_seqs": 5},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=["rows that give way", "prompts in chunks", "fp8 cache"],
)
def test_trees_change_nothing_beside(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    expected = ask(tiny(folders("llama"), **settings), GREEDY, PROMPTS)
    lie(monkeypatch, expected, 0.8, num_branches=2)
    seen = watched(monkeypatch)
    llm = tiny(folders("llama"), speculative_config=TREES, **settings)
    assert tokens_of(ask(llm, GREEDY, PROMPTS)) == tokens_of(expected)
    assert any(result.path for _, result in seen)
    assert llm.engine.num_retractions > 0 or "cache_tokens" not in settings


def test_nothing_reads_entries_that_were_rejected(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are NaN from the commit on, for the row itself and for whoever finds its pages in the prefix cache."""
    expected = ask(tiny(folders("llama")), GREEDY, PROMPTS)
    longer = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in expected]
    continued = ask(tiny(folders("llama")), GREEDY, longer)
    lie(monkeypatch, [*expected, *continued], 0.8, num_branches=3)
    commit, num_poisoned = Scheduler.commit, 0

    def poison(self: Scheduler, row: ScheduledRow, result: RowResult) -> None:
        nonlocal num_poisoned
        commit(self, row, result)
        rejected = range(result.seq_len, row.seq_len)
        num_poisoned += len(rejected)
        for pool in self._store.pools:
            pages = pool.table.pages_of(row.table_row)
            slots = [pages[entry // PAGE] * PAGE + entry % PAGE for entry in rejected]
            for plane in pool.spec.planes:
                pool.plane(plane.name)[:, slots] = torch.nan

    monkeypatch.setattr(Scheduler, "commit", poison)
    llm = tiny(folders("llama"), speculative_config=TREES)
    assert tokens_of(ask(llm, GREEDY, PROMPTS)) == tokens_of(expected)
    found = ask(llm, GREEDY, longer)
    assert tokens_of(found) == tokens_of(continued)
    assert min(each.num_cached_tokens for each in found) >= 24 - PAGE, "what was right is found again"
    assert num_poisoned > 100


def test_a_commit_that_is_repeated_after_an_interruption_moves_and_counts_once(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, truth: list[RequestOutput]
) -> None:
    lie(monkeypatch, truth, 0.9, num_branches=3)
    counted = tiny(folders("llama"), speculative_config=TREES)
    ask(counted, EVERYTHING, PROMPTS)
    commit, calls = Scheduler.commit, iter(range(100_000))

    def interrupted(self: Scheduler, row: ScheduledRow, result: RowResult) -> None:
        commit(self, row, result)
        if next(calls) % 3 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "commit", interrupted)
    llm = tiny(folders("llama"), speculative_config=TREES)
    engine = llm.engine
    requests = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, EVERYTHING, strict=True)]
    num_interruptions = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interruptions += 1
    assert tokens_of([engine.pop_output(each) for each in requests]) == tokens_of(truth)
    assert num_interruptions > 10
    once, again = counted.engine.metrics(), engine.metrics()
    assert again.spec_decode_num_drafts == once.spec_decode_num_drafts
    assert again.spec_decode_num_draft_tokens == once.spec_decode_num_draft_tokens
    assert again.spec_decode_num_accepted_tokens == once.spec_decode_num_accepted_tokens


class Treeless(TorchBackend):
    """Serves everything but trees."""

    capabilities: ClassVar[tuple[Capability, ...]] = tuple(
        replace(each, features=each.features - {Feature.TREE_MASK}) for each in TorchBackend.capabilities
    )


def test_a_backend_without_tree_masks_is_refused_at_start_up(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, treeless=Treeless)
    with pytest.raises(NoBackendError, match=r"treeless.*lacks tree-mask"):
        tiny(folders("llama"), speculative_config=TREES, attention_backend="treeless")
    chains = tiny(folders("llama"), speculative_config={"method": "ngram"}, attention_backend="treeless")
    assert len(ask(chains, GREEDY, PROMPTS)) == len(PROMPTS)
    decoding = tiny(folders("llama"), speculative_config=TREES, decode_attention_backend="treeless")
    assert len(ask(decoding, GREEDY, PROMPTS)) == len(PROMPTS), "rows with trees are not decode"


def test_several_earlier_places_are_guessed_as_one_tree(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5, 6, 7, 8, 5, 6, 9, 10, 5, 6, 11, 12] * 3
    params = replace(GREEDY, max_tokens=40)
    expected = ask(tiny(folders("llama")), params, [prompt])
    seen = watched(monkeypatch)
    assert tokens_of(ask(tiny(folders("llama"), speculative_config=TREES), params, [prompt])) == tokens_of(expected)
    assert seen
    assert all(len(set(zip(row.parents or (), row.drafts, strict=True))) == len(row.drafts) for row, _ in seen)


Plant = Callable[[pytest.MonkeyPatch], None]
Take = Callable[[sampled._Results, int], RowResult]


def plant_take(patch: pytest.MonkeyPatch, change: Callable[[sampled._Results, int, RowResult], RowResult]) -> None:
    take: Take = sampled._Results.take

    def changed(self: sampled._Results, index: int) -> RowResult:
        result = take(self, index)
        return change(self, index, result) if self.step.rows[index].drafts else result

    patch.setattr(sampled._Results, "take", changed)


def accepted_length_off_by_one(patch: pytest.MonkeyPatch) -> None:
    plant_take(patch, lambda results, index, result: replace_result(result, seq_len=result.seq_len - bool(result.path)))


def replace_result(result: RowResult, **changes: object) -> RowResult:
    return replace(result, **changes)  # type: ignore[arg-type]


def bonus_token_dropped(patch: pytest.MonkeyPatch) -> None:
    plant_take(patch, lambda results, index, result: replace_result(result, tokens=result.tokens[:-1] or result.tokens))


def padding_row_accepted(patch: pytest.MonkeyPatch) -> None:
    """Guesses are padded to one size, and padding counts as right behind a draft that is."""

    def padded(results: sampled._Results, index: int, result: RowResult) -> RowResult:
        row = results.step.rows[index]
        if not result.path or len(result.path) == len(row.drafts):
            return result
        return RowResult(result.seq_len + 1, (*result.tokens[:-1], 0, result.tokens[-1]), (*result.path, 0))

    plant_take(patch, padded)


def tree_parent_wrong(patch: pytest.MonkeyPatch) -> None:
    """A guess sees the guess before its parent."""

    def mask(row: ScheduledRow) -> RowMask:
        return tree_mask(replace(row, parents=tuple(max(-1, parent - 1) for parent in row.draft_parents)))

    patch.setattr(launch, "tree_mask", mask)


def mask_of_the_previous_round(patch: pytest.MonkeyPatch) -> None:
    kept: dict[int, RowMask] = {}

    def mask(row: ScheduledRow) -> RowMask:
        found, kept[row.num_tokens] = kept.get(row.num_tokens, tree_mask(row)), tree_mask(row)
        return found

    patch.setattr(launch, "tree_mask", mask)


def tree_positions_as_a_chains(patch: pytest.MonkeyPatch) -> None:
    def positions(row: ScheduledRow) -> list[int]:
        assert len(tree_positions(row)) == row.num_tokens
        return list(range(row.context_len, row.seq_len))

    patch.setattr(launch, "tree_positions", positions)


def rejected_slot_left_in_the_prefix_cache(patch: pytest.MonkeyPatch) -> None:
    """The entry behind the accepted ones, which is a rejected guess's, fills the page that is published."""
    publish = Supply.publish

    def one_more(self: Supply, sequence: SequenceState) -> None:
        lengths, row, num_computed = self.store.lengths, sequence.held_row, sequence.num_computed
        if len(sequence.tokens) == num_computed + 1 and sequence.num_pages * PAGE > num_computed:
            lengths.fill(row, num_computed + 1)
            sequence.num_computed += 1
        publish(self, sequence)
        lengths.fill(row, num_computed)
        sequence.num_computed = num_computed

    patch.setattr(Supply, "publish", one_more)


def siblings_entries_moved(patch: pytest.MonkeyPatch) -> None:
    """The last accepted entry is that of the guess before it in the row."""
    keep = NetworkCache.keep

    def sibling(self: NetworkCache, row: int, context_len: int, places: Sequence[int]) -> None:
        is_apart = len(places) > 1 and places[-1] - 1 > places[-2]
        keep(self, row, context_len, (*places[:-1], places[-1] - 1) if is_apart else places)

    patch.setattr(NetworkCache, "keep", sibling)


def entries_left_where_they_were(patch: pytest.MonkeyPatch) -> None:
    keep = NetworkCache.keep

    def stay(self: NetworkCache, row: int, context_len: int, places: Sequence[int]) -> None:
        keep(self, row, context_len, range(len(places)))

    patch.setattr(NetworkCache, "keep", stay)


def rejected_tokens(results: sampled._Results, index: int, result: RowResult) -> list[int]:
    row = results.step.rows[index]
    kept = range(len(result.tokens) - 1) if result.path is None else result.path
    return [token for guess, token in enumerate(row.drafts) if guess not in kept]


def seed_consumed_by_a_rejected_token(patch: pytest.MonkeyPatch) -> None:
    used: dict[SequenceState, int] = {}
    sampling = LiveSequence.sampling

    def count(results: sampled._Results, index: int, result: RowResult) -> RowResult:
        sequence = results.step.rows[index].sequence
        used[sequence] = used.get(sequence, 0) + bool(rejected_tokens(results, index, result))
        return result

    def later(self: LiveSequence, row: ScheduledRow, last_input: int) -> RowSampling:
        found = sampling(self, row, last_input)
        return replace(found, place=found.place + used.get(self.sequence, 0)) if found.adjustment is None else found

    plant_take(patch, count)
    patch.setattr(LiveSequence, "sampling", later)


def penalty_counting_rejected_tokens(patch: pytest.MonkeyPatch) -> None:
    def count(results: sampled._Results, index: int, result: RowResult) -> RowResult:
        adjustment = results.step.lives[index].adjustment
        if adjustment is not None:
            num_counted = adjustment.num_counted
            adjustment.count(rejected_tokens(results, index, result))
            adjustment.num_counted = num_counted
        return result

    plant_take(patch, count)


def penalty_counting_siblings(patch: pytest.MonkeyPatch) -> None:
    behind = LiveSequence.sampling_behind_drafts

    def chain(self: LiveSequence, row: ScheduledRow) -> list[RowSampling]:
        found, wrong = behind(self, row), behind(self, replace(row, parents=None))
        return [replace(one, adjustment=other.adjustment) for one, other in zip(found, wrong, strict=True)]

    patch.setattr(LiveSequence, "sampling_behind_drafts", chain)


PLANTS: dict[str, Plant] = {
    each.__name__: each
    for each in (
        accepted_length_off_by_one,
        bonus_token_dropped,
        padding_row_accepted,
        tree_parent_wrong,
        mask_of_the_previous_round,
        tree_positions_as_a_chains,
        rejected_slot_left_in_the_prefix_cache,
        siblings_entries_moved,
        entries_left_where_they_were,
        seed_consumed_by_a_rejected_token,
        penalty_counting_rejected_tokens,
        penalty_counting_siblings,
    )
}


@pytest.mark.parametrize(
    "plant",
    routine(
        PLANTS, "tree_parent_wrong", "mask_of_the_previous_round", "siblings_entries_moved", "penalty_counting_siblings"
    ),
)
def test_planted_faults_are_seen(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, truth: list[RequestOutput], plant: Plant
) -> None:
    """Each fault changes an answer of a workload that is the same without it, or raises."""
    lie(monkeypatch, truth, 0.85, num_branches=3)
    plant(monkeypatch)
    llm = tiny(folders("llama"), speculative_config=TREES)
    found: object = None
    with suppress(Exception):
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        found = tokens_of(llm.generate(given, EVERYTHING, use_tqdm=False))
    assert found != tokens_of(truth)


def test_the_ledger_says_that_steps_with_trees_are_not_recorded(folders: Callable[[str], Path]) -> None:
    for config, is_told in ((TREES, True), ({"method": "ngram"}, False)):
        llm = tiny(folders("llama"), speculative_config=config, layer_kernels="numba", cuda_graph_sizes="1,2")
        told = [each for each in llm.engine.ledger.notes if each.subject == "num_branches"]
        assert bool(told) == is_told
        assert len(ask(llm, GREEDY, PROMPTS)) == len(PROMPTS)
