"""Bias, penalties and forbidden ends: those of transformers and the plain formulas, over any batch, without a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from sightline.core.request import EffectiveParams
from sightline.core.token_lists import LogitBias, TokenIds
from sightline.core.transfer import sent
from sightline.kernels.greedy import best_tokens
from sightline.runner.sampling.adjust import (
    AdjustedRow,
    Adjustments,
    BadWords,
    TokenAdjustment,
    adjust_arrays,
    adjusted,
)
from sightline.runner.sampling.sampler import RowSampling, choose_on_host, choose_unread
from support.sampling import sample

VOCAB = 60
NEUTRAL = EffectiveParams(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    seed=1,
    max_tokens=16,
    stop_token_ids=frozenset({7}),
    skip_special_tokens=True,
    eos_token_ids=frozenset({2, 9}),
)


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjustment(params: EffectiveParams, prompt: Sequence[int], output: Sequence[int]) -> TokenAdjustment:
    made = TokenAdjustment(params, prompt)
    for start in range(0, len(output), 3):
        made.count(output[start : start + 3])
    return made


def apply(logits: Tensor, *rows: TokenAdjustment) -> Tensor:
    return apply_rows(logits, [AdjustedRow(index, row) for index, row in enumerate(rows)], None)


def apply_rows(logits: Tensor, rows: Sequence[AdjustedRow], inputs: Tensor | None) -> Tensor:
    arrays = adjust_arrays(rows, logits.shape[1])
    with adjusted(logits, Adjustments(*sent(arrays, logits.device)), inputs) as values:
        return values.clone()


def plain(logits: Tensor, params: EffectiveParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """One row's logits, token by token."""
    counts, bias = Counter(output), dict(params.logit_bias)
    values = []
    for token, logit in enumerate(logits.tolist()):
        value = logit + bias.get(token, 0.0)
        if token in {*prompt, *output}:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
        is_early_end = len(output) < params.min_tokens and token in params.eos_token_ids | params.stop_token_ids
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        # A bad word would stand at the end of what was generated, if this token came.
        ends_bad_word = any((*output, token)[-len(word) :] == word for word in params.bad_words)
        values.append(-torch.inf if is_early_end or ends_bad_word or not is_allowed else value)
    return torch.tensor(values)


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=40)
few_tokens = st.integers(0, 5)
"""So few that bad words are met."""
params_of_any_kind = st.builds(
    lambda repetition, presence, frequency, bias, minimum, allowed, words: replace(
        NEUTRAL,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=LogitBias(sorted(bias.items())),
        min_tokens=minimum,
        allowed_token_ids=None if allowed is None else TokenIds(sorted(allowed)),
        bad_words=tuple(map(tuple, words)),
    ),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-1.5, 0.0, 0.7]),
    st.sampled_from([-0.4, 0.0, 1.1]),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5),
    st.integers(0, 30),
    st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
    st.lists(st.lists(few_tokens, min_size=1, max_size=3), max_size=4),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(params_of_any_kind, tokens, tokens | st.lists(few_tokens, max_size=40)), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_every_row_of_a_batch_gets_what_the_plain_formulas_give(
    rows: list[tuple[EffectiveParams, list[int], list[int]]], seed: int
) -> None:
    logits = random_logits(len(rows), seed)
    got = apply(logits, *(adjustment(*row) for row in rows))
    expected = torch.stack([plain(logits[index], *row) for index, row in enumerate(rows)])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(logits, random_logits(len(rows), seed)), "the logits are not as they were"


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output(penalty: float) -> None:
    prompt, output = [3, 5, 5, 11], [5, 20, 21, 20]
    logits = random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    got = apply(logits, adjustment(replace(NEUTRAL, repetition_penalty=penalty), prompt, output))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    params = replace(NEUTRAL, presence_penalty=0.5, frequency_penalty=0.25)
    got = apply(random_logits(1), adjustment(params, [3, 4], [4, 6, 6, 6]))
    change = (random_logits(1) - got)[0]
    expected = {4: 0.75, 6: 1.25}
    assert {int(token): float(change[token]) for token in change.nonzero()} == pytest.approx(expected, abs=1e-5)


def test_ends_cannot_come_before_the_least_number_of_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 7], logits[0, 9], logits[0, 30] = 9.0, 8.0, 7.0, 1.0
    params = replace(NEUTRAL, min_tokens=3)
    made = TokenAdjustment(params, [1])
    chosen = []
    for place in range(5):
        chosen.append(sample(logits, [RowSampling(params, place, made)]).tokens[0])
        made.count([chosen[-1]])
    assert chosen == [30, 30, 30, 2, 2]


def test_a_bias_bans_and_forces() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    for bias, expected in (({best: -100.0}, False), ({best: 100.0}, True)):
        params = replace(NEUTRAL, temperature=1.0, logit_bias=LogitBias(bias.items()))
        rows = [RowSampling(replace(params, seed=seed), 0, TokenAdjustment(params, [1])) for seed in range(50)]
        assert {token == best for token in sample(logits.repeat(50, 1), rows).tokens} == {expected}


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 9}], ids=str)
def test_only_allowed_tokens_come_and_their_logprobs_are_those_of_the_raw_logits(changes: dict[str, Any]) -> None:
    logits = random_logits(50)
    params = replace(NEUTRAL, allowed_token_ids=TokenIds((3, 40)), logprobs=0, **changes)
    rows = [RowSampling(replace(params, seed=seed), 0, TokenAdjustment(params, [1])) for seed in range(50)]
    got = sample(logits, rows)
    assert set(got.tokens) == {3, 40}
    for index, token in enumerate(got.tokens):
        assert got.logprobs[index].logprobs[0] == pytest.approx(float(logits[index].log_softmax(-1)[token]), abs=1e-5)


def test_a_bad_word_of_several_tokens_is_stopped_at_its_last_one_alone() -> None:
    params = replace(NEUTRAL, bad_words=((4, 5, 6), (8,)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 6], logits[0, 8], logits[0, 30] = 5.0, 9.0, 1.0
    for output, expected in (([4, 5], 30), ([4, 5, 5], 6), ([5, 4, 5], 30), ([5], 6), ([], 6), ([4, 5, 6, 4, 5], 30)):
        row = RowSampling(params, len(output), adjustment(params, [4, 5], output))
        assert sample(logits, [row]).tokens == (expected,), output


@pytest.mark.parametrize("fault", ["allows all", "forgets what was generated", "forgets a word's beginning"])
def test_a_mistake_in_choosing_allowed_tokens_would_show(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    params = replace(NEUTRAL, allowed_token_ids=TokenIds(range(3, 40)), bad_words=((4, 5, 6),))
    match fault:
        case "allows all":
            monkeypatch.setattr(
                TokenAdjustment, "allowed", property(lambda row: None, lambda row, value: None), raising=False
            )
        case "forgets what was generated":
            monkeypatch.setattr(BadWords, "follow", lambda words, generated: None)
        case _:
            monkeypatch.setattr(BadWords, "follow", lambda words, generated: setattr(words, "_latest", generated[-1:]))
    logits = random_logits(1)
    got = apply(logits, adjustment(params, [1], [4, 5]))
    assert not torch.equal(got[0], plain(logits[0], params, [1], [4, 5]))


def test_many_distinct_tokens_are_counted_in_arrays_that_grow() -> None:
    params = replace(NEUTRAL, frequency_penalty=1.0)
    made = TokenAdjustment(params, [])
    for token in [*range(500), *range(100)]:
        made.count([token])
    assert sorted(zip(made.tokens.tolist(), made.times.tolist(), strict=True)) == [
        (token, 2.0 if token < 100 else 1.0) for token in range(500)
    ]


def test_an_interrupted_count_says_so() -> None:
    made = TokenAdjustment(replace(NEUTRAL, presence_penalty=1.0), [1])
    with pytest.raises(TypeError):
        made.count([1, [2]])  # type: ignore[list-item]
    assert not made.is_whole


def test_a_row_that_adjusts_without_an_adjustment_or_with_a_late_one_is_refused() -> None:
    params = replace(NEUTRAL, presence_penalty=1.0)
    with pytest.raises(ValueError, match="expected an adjustment exactly for"):
        RowSampling(params, 0)
    with pytest.raises(ValueError, match="expected an adjustment exactly for"):
        RowSampling(NEUTRAL, 0, TokenAdjustment(NEUTRAL, [1]))
    with pytest.raises(ValueError, match="expected 3 tokens counted, got 0"):
        RowSampling(params, 3, TokenAdjustment(params, [1]))


@pytest.mark.parametrize("extreme", [3e38, -3e38])
def test_extreme_logits_stay_finite_under_penalties(extreme: float) -> None:
    for penalty in (1e-4, 1e4):
        params = replace(NEUTRAL, repetition_penalty=penalty, temperature=1.0)
        row = adjustment(params, [0, 1], [])
        logits = torch.full((1, VOCAB), extreme)
        assert bool(apply(logits, row).isfinite().all())
        assert 0 <= sample(logits, [RowSampling(params, 0, row)]).tokens[0] < VOCAB


def test_logits_that_are_not_contiguous_are_adjusted_too() -> None:
    logits = random_logits(2).T.contiguous().T
    assert not logits.is_contiguous()
    params = replace(NEUTRAL, logit_bias=LogitBias([(4, 50.0)]))
    assert sample(logits, [RowSampling(params, 0, TokenAdjustment(params, []))] * 2).tokens == (4, 4)


def without_long_words(params: EffectiveParams) -> EffectiveParams:
    return replace(params, bad_words=tuple(word for word in params.bad_words if len(word) == 1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            params_of_any_kind.map(without_long_words),
            tokens,
            st.lists(few_tokens, min_size=1, max_size=20),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.8]),
)
def test_a_token_that_only_the_device_knows_counts_as_one_that_was_read(
    rows: list[tuple[EffectiveParams, list[int], list[int], bool]], seed: int, temperature: float
) -> None:
    logits = random_logits(len(rows), seed)
    # The step's inputs: other tokens, then the last of each row, in some order.
    inputs = torch.tensor([59, *(output[-1] for _, _, output, _ in reversed(rows)), 58])
    read, unread = [], []
    for index, (asked, prompt, output, is_late) in enumerate(rows):
        params = replace(asked, temperature=temperature, seed=seed + index)
        known = adjustment(params, prompt, output)
        late = adjustment(params, prompt, output[:-1]) if is_late else known
        has = params.adjusts_logits
        read.append(RowSampling(params, len(output), known if has else None))
        at = len(rows) - index if is_late and has else None
        unread.append(RowSampling(params, len(output), late if has else None, at))
    adjusting = [
        [
            AdjustedRow(index, row.adjustment, row.unread_at)
            for index, row in enumerate(made)
            if row.adjustment is not None
        ]
        for made in (read, unread)
    ]
    expected = apply_rows(logits, adjusting[0], None)
    assert torch.equal(apply_rows(logits, adjusting[1], inputs), expected)
    # Whoever makes the parameters sees to it that one token is left.
    left, finite = expected.isfinite().any(dim=-1), torch.ones(len(rows), dtype=torch.bool)
    chosen = choose_on_host(logits, read, None, finite)[left]
    assert torch.equal(choose_unread(logits, read, None, best_tokens)[0][left], chosen)
    assert torch.equal(choose_unread(logits, unread, inputs, best_tokens)[0][left], chosen)
    assert torch.equal(choose_on_host(logits, unread, inputs, finite)[left], chosen)
    assert torch.equal(logits, random_logits(len(rows), seed)), "the logits are not as they were"


def test_tokens_that_are_not_read_are_refused_where_they_are_needed() -> None:
    params = replace(NEUTRAL, presence_penalty=1.0)
    late = RowSampling(params, 3, adjustment(params, [1], [2, 3]), 0)
    with pytest.raises(ValueError, match="expected the step's input tokens"):
        sample(random_logits(1), [late])
    with pytest.raises(ValueError, match="expected 1 tokens counted, got 2"):
        RowSampling(params, 2, adjustment(params, [1], [2, 3]), 0)
    worded = replace(NEUTRAL, bad_words=((3, 4),))
    with pytest.raises(ValueError, match="expected every token counted with bad words"):
        RowSampling(worded, 3, adjustment(worded, [1], [2, 3]), 0)


def test_a_mistake_in_counting_an_unread_token_would_show() -> None:
    """A token that has an entry is counted once more in that entry too: both write the same logit."""
    params = replace(NEUTRAL, frequency_penalty=0.5)
    logits = random_logits(1)
    arrays = adjust_arrays([AdjustedRow(0, adjustment(params, [], [4, 4]), 0)], VOCAB)
    moved = Adjustments(*sent(arrays, logits.device))
    with adjusted(logits, moved, torch.tensor([4])) as values:
        assert float(logits.clone()[0, 4]) == pytest.approx(float(random_logits(1)[0, 4]) - 1.5, abs=1e-5)
        assert values is logits
