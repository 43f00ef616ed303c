"""Guessed tokens change how many steps an answer takes, and nothing else: whatever is guessed, and how it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from sightline.core.request import FinishReason, Terms
from sightline.engine import sampled
from sightline.engine.live import LiveSequence
from sightline.llm import TokensPrompt
from sightline.runner.sampling.adjust import TokenAdjustment
from sightline.runner.sampling.sampler import RowSampling
from sightline.scheduler import scheduler
from sightline.scheduler.drafted_rows import add_drafts
from sightline.scheduler.sequence import RowResult, ScheduledRow
from sightline.speculative.drafts import AdaptiveDrafts
from support.case_marks import proofs, routine
from support.engines import is_at_rest
from support.guessing import lie
from support.speculating import EVERYTHING, GREEDY, PAGE, PROMPTS, SAMPLED, ask, tiny, tokens_of

NGRAM = {"method": "ngram"}


@pytest.mark.parametrize(
    ("family", "honesty"),
    [
        ("llama", 0.0),
        ("llama", 1.0),
        ("llama", 0.7),
        ("deepseek_v3", 0.7),
        *(
            pytest.param(family, 0.7, marks=pytest.mark.prove)
            for family in ("gemma2", "gemma3", "gpt_oss", "qwen3_moe")
        ),
    ],
)
def test_answers_are_those_without_guesses(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, honesty: float
) -> None:
    folder = folders(family)
    expected = ask(tiny(folder), EVERYTHING, PROMPTS)
    lie(monkeypatch, expected, honesty)
    llm = tiny(folder, speculative_config=NGRAM)
    found = ask(llm, EVERYTHING, PROMPTS)
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            for token, here, there in zip(mine.token_ids, mine.logprobs or (), theirs.logprobs or (), strict=False):
                assert here[token].logprob == pytest.approx(there[token].logprob, abs=1e-3)
    metrics = llm.engine.metrics()
    assert metrics.generation_tokens == sum(len(each.token_ids) for output in expected for each in output.outputs)
    assert metrics.spec_decode_num_draft_tokens > 100
    by_position = metrics.spec_decode_num_accepted_tokens_per_pos
    assert (len(by_position), sum(by_position)) == (7, metrics.spec_decode_num_accepted_tokens)
    assert list(by_position) == sorted(by_position, reverse=True), "behind a wrong guess nothing is right"
    assert by_position[0] <= metrics.spec_decode_num_drafts
    share = metrics.spec_decode_num_accepted_tokens / metrics.spec_decode_num_draft_tokens
    assert (share < 0.2) if honesty == 0.0 else (share > 0.2)


@pytest.mark.parametrize("honesty", [0.6, 1.0])
def test_rows_that_give_way_and_prompts_in_chunks_change_nothing(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, honesty: float
) -> None:
    folder = folders("llama")
    expected = ask(tiny(folder), GREEDY, PROMPTS)
    lie(monkeypatch, expected, honesty)
    cramped = tiny(folder, speculative_config=NGRAM, cache_tokens=72, max_model_len=64, max_num_seqs=5)
    assert tokens_of(ask(cramped, GREEDY, PROMPTS)) == tokens_of(expected)
    assert cramped.engine.num_retractions > 0
    slow = tiny(folder, speculative_config=NGRAM, max_num_batched_tokens=5, max_num_seqs=3)
    assert tokens_of(ask(slow, GREEDY, PROMPTS)) == tokens_of(expected)
    assert min(each.engine.metrics().spec_decode_num_accepted_tokens for each in (cramped, slow)) > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 9, 55])
def test_an_answer_ends_at_its_limit_and_at_that_of_the_context(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    params, prompts = replace(GREEDY, max_tokens=max_tokens), PROMPTS[:1]
    expected = ask(tiny(folders("llama"), max_model_len=64), params, prompts)
    lie(monkeypatch, expected, 1.0, most=16)
    found = ask(tiny(folders("llama"), max_model_len=64, speculative_config=NGRAM), params, prompts)
    assert tokens_of(found) == tokens_of(expected)
    assert len(found[0].outputs[0].token_ids) == max_tokens
    assert found[0].outputs[0].finish_reason == FinishReason.LENGTH.value


@pytest.mark.parametrize("at", [0, 6, 20, *proofs(1, 5, 7)])
def test_an_end_among_guesses_that_are_right_is_the_end(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    [whole] = ask(tiny(folders("llama")), GREEDY, PROMPTS[:1])
    answer = whole.outputs[0].token_ids
    params = replace(GREEDY, stop_token_ids=[answer[at]])
    [expected] = ask(tiny(folders("llama")), params, PROMPTS[:1])
    lie(monkeypatch, [whole], 1.0)
    llm = tiny(folders("llama"), speculative_config=NGRAM)
    [found] = ask(llm, params, PROMPTS[:1])
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].stop_reason == expected.outputs[0].stop_reason == answer[at]
    assert llm.engine.metrics().generation_tokens == len(expected.outputs[0].token_ids)


def test_the_cache_keeps_nothing_of_guesses_that_were_wrong(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(tiny(folders("llama")), GREEDY, PROMPTS)
    longer = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in expected]
    continued = ask(tiny(folders("llama")), GREEDY, longer)
    lie(monkeypatch, [*expected, *continued], 0.6)
    llm = tiny(folders("llama"), speculative_config=NGRAM)
    ask(llm, GREEDY, PROMPTS)
    found = ask(llm, GREEDY, longer)
    assert tokens_of(found) == tokens_of(continued)
    assert min(each.num_cached_tokens for each in found) >= 24 - PAGE, "what was right is found again"


def test_requests_that_are_cancelled_leave_the_others_alone(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(tiny(folders("llama")), GREEDY, PROMPTS)
    lie(monkeypatch, expected, 0.8)
    llm, random = tiny(folders("llama"), speculative_config=NGRAM), Random(5)
    engine = llm.engine
    for _ in range(12):
        asked = {engine.submit(prompt, GREEDY): index for index, prompt in enumerate(PROMPTS)}
        gone = set(random.sample(sorted(asked), 2))
        while not all(engine.is_finished(each) for each in asked):
            if random.random() < 0.3:
                engine.cancel(random.choice(sorted(gone)))
            engine.step()
        for each, index in asked.items():
            found = engine.pop_output(each).outputs[0].token_ids
            whole = expected[index].outputs[0].token_ids
            assert found == whole[: len(found)]
            assert each in gone or found == whole
    assert is_at_rest(llm)


def test_text_that_repeats_itself_takes_fewer_steps(folders: Callable[[str], Path]) -> None:
    prompt = [5, 6, 7, 8] * 6
    params = replace(GREEDY, max_tokens=60)
    plain, guessing = tiny(folders("llama")), tiny(folders("llama"), speculative_config=NGRAM)
    assert tokens_of(ask(guessing, params, [prompt])) == tokens_of(ask(plain, params, [prompt]))
    assert guessing.engine.metrics().steps <= plain.engine.metrics().steps


def test_text_that_was_served_before_takes_fewer_steps_for_the_same_caller_only(
    folders: Callable[[str], Path],
) -> None:
    params, steps = replace(GREEDY, max_tokens=40), list[int]()
    [expected] = ask(tiny(folders("llama")), params, PROMPTS[:1])
    # Runs of eight tokens do not repeat within one answer.
    config = {**NGRAM, "prompt_lookup_max": 8, "prompt_lookup_min": 8, "corpus_tokens": 1000}
    llm = tiny(folders("llama"), speculative_config=config)
    for caller in ("first", "first", "second"):
        before = llm.engine.metrics().steps
        asked = llm.engine.submit(PROMPTS[0], params, terms=Terms(caller=caller))
        while not llm.engine.is_finished(asked):
            llm.engine.step()
        assert llm.engine.pop_output(asked).outputs[0].token_ids == expected.outputs[0].token_ids
        steps.append(llm.engine.metrics().steps - before)
    assert steps[1] < steps[0] // 2
    assert steps[2] == steps[0]


def bonus_dropped(patch: pytest.MonkeyPatch) -> None:
    take = sampled._Results.take

    def shorter(self: sampled._Results, index: int) -> RowResult:
        result = take(self, index)
        return RowResult(result.seq_len, result.tokens[:-1]) if len(result.tokens) > 1 else result

    patch.setattr(sampled._Results, "take", shorter)


def wrong_guess_kept(patch: pytest.MonkeyPatch) -> None:
    take = sampled._Results.take

    def longer(self: sampled._Results, index: int) -> RowResult:
        result, row = take(self, index), self.step.rows[index]
        if len(row.drafts) < len(result.tokens):
            return result
        kept = (*result.tokens[:-1], row.drafts[len(result.tokens) - 1], result.tokens[-1])
        return RowResult(result.seq_len + 1, kept)

    patch.setattr(sampled._Results, "take", longer)


def rejected_slots_kept(patch: pytest.MonkeyPatch) -> None:
    take = sampled._Results.take

    def all_of_it(self: sampled._Results, index: int) -> RowResult:
        result, row = take(self, index), self.step.rows[index]
        return RowResult(row.seq_len, result.tokens) if row.drafts else result

    patch.setattr(sampled._Results, "take", all_of_it)


def seed_of_the_first_place(patch: pytest.MonkeyPatch) -> None:
    behind = LiveSequence.sampling_behind_drafts

    def same_place(self: LiveSequence, row: ScheduledRow) -> list[RowSampling]:
        found = behind(self, row)
        return [each if each.adjustment is not None else RowSampling(each.params, found[0].place) for each in found]

    patch.setattr(LiveSequence, "sampling_behind_drafts", same_place)


def penalties_count_all_guesses(patch: pytest.MonkeyPatch) -> None:
    after = TokenAdjustment.after

    def in_place(self: TokenAdjustment, token: int) -> TokenAdjustment:
        found = after(self, token)
        self._tokens, self._times = found._tokens, found._times
        self._slot, self._num_distinct = found._slot, found._num_distinct
        return found

    patch.setattr(TokenAdjustment, "after", in_place)


def end_passed_over(patch: pytest.MonkeyPatch) -> None:
    def take_in(self: LiveSequence) -> FinishReason | None:
        self.ending = self.ending or self._read_tokens()
        return self.ending

    patch.setattr(LiveSequence, "take_in", take_in)


def guesses_beyond_the_pages(patch: pytest.MonkeyPatch) -> None:
    def wide(rows: list[ScheduledRow], drafts: AdaptiveDrafts, page_size: int, most: tuple[int, int]) -> None:
        del page_size
        add_drafts(rows, drafts, 64, most)

    patch.setattr(scheduler, "add_drafts", wide)


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    each.__name__: each
    for each in (
        bonus_dropped,
        wrong_guess_kept,
        rejected_slots_kept,
        seed_of_the_first_place,
        penalties_count_all_guesses,
        end_passed_over,
        guesses_beyond_the_pages,
    )
}


@pytest.mark.parametrize("plant", routine(PLANTS, "wrong_guess_kept", "rejected_slots_kept"))
def test_planted_faults_are_seen(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Each fault changes an answer of a workload that is the same without it, or raises."""
    folder, is_about_pages = folders("llama"), plant is guesses_beyond_the_pages
    cramped = {"cache_tokens": 80 if is_about_pages else 1024, "max_model_len": 64, "max_num_seqs": 3}
    [first] = ask(tiny(folder, **cramped), GREEDY, PROMPTS[:1])
    ended = replace(GREEDY, stop_token_ids=[first.outputs[0].token_ids[9]])
    params = [GREEDY, SAMPLED, EVERYTHING[3], EVERYTHING[4], ended]
    prompts = [*PROMPTS[1:], PROMPTS[0]]
    truth = [ask(tiny(folder, **cramped), each, [prompt])[0] for each, prompt in zip(params, prompts, strict=True)]
    lie(monkeypatch, [first, *truth], 0.8)

    def answers() -> list[list[tuple[int, ...]]]:
        llm = tiny(folder, **cramped, speculative_config=NGRAM)
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return tokens_of(llm.generate(given, params, use_tqdm=False))

    assert answers() == tokens_of(truth)
    plant(monkeypatch)
    found: object = None
    with suppress(Exception):
        found = answers()
    assert found != tokens_of(truth)
