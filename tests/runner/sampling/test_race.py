"""A race on the device has the winners of a draw on the host, whatever the logits and the parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sightline.core.request import EffectiveParams
from sightline.runner.sampling import race
from sightline.runner.sampling.draw import Choice, draw, truncated_probabilities
from sightline.runner.sampling.race import race_arrays, run

PLAIN = EffectiveParams(1.0, 1.0, 0, 0.0, 5, 16, frozenset(), True)


def raced(logits: Tensor, rows: Sequence[Choice]) -> list[int]:
    """The winners by the device's form, in the order of the rows."""
    keys = numpy.array([row.key for row in rows], dtype=numpy.uint64)
    arrays = race_arrays([(index, row.params) for index, row in enumerate(rows)], keys, logits.shape[1])
    made = arrays.on_device(torch.from_numpy(arrays.integers), torch.from_numpy(arrays.numbers))
    tokens = torch.full((len(rows),), -1).index_copy_(0, made.index, run(logits, made))
    return tokens.tolist()


def random_logits(num_rows: int, vocab_size: int, scale: float, seed: int, equals: str) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    match equals:
        case "few":
            return logits
        case "many":
            return logits.bfloat16().float()
        case "most":
            return logits.round()
        case _:
            return torch.zeros_like(logits).copysign(logits)


row_params = st.builds(
    lambda temperature, top_k, top_p, min_p: replace(
        PLAIN, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    ),
    st.one_of(st.sampled_from([1e4, 1.0, 0.6, 1e-4, 1e-30, 1e-307, 5e-324]), st.floats(0.05, 5.0)),
    st.one_of(st.sampled_from([0, 0, 1, 2, 63, 64, 2**31 - 1]), st.integers(0, 1500)),
    st.one_of(st.sampled_from([1.0, 1.0, 5e-324, 1e-9, 0.5, 0.9, 1.0 - 2.0**-53]), st.floats(0.01, 0.999)),
    st.sampled_from([0.0, 0.0, 1e-9, 0.1, 1.0]),
)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(row_params, st.integers(0, 2**64 - 1)), min_size=1, max_size=7),
    vocab_size=st.sampled_from([1, 2, 3, 65, 257, 1400]),
    scale=st.sampled_from([1e-30, 1e-6, 0.3, 4.0, 60.0, 1e30]),
    seed=st.integers(0, 10_000),
    equals=st.sampled_from(["few", "many", "most", "all"]),
    forbidden=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
@example(rows=[(replace(PLAIN, top_k=3, top_p=0.5), 9)], vocab_size=65, scale=1.0, seed=0, equals="all", forbidden=1.0)
def test_the_winners_are_those_of_the_host(
    rows: list[tuple[EffectiveParams, int]], vocab_size: int, scale: float, seed: int, equals: str, forbidden: float
) -> None:
    logits = random_logits(len(rows), vocab_size, scale, seed, equals)
    generator = torch.Generator().manual_seed(seed + 1)
    banned = torch.rand(logits.shape, generator=generator) < forbidden
    # One token of each row is always left.
    banned[torch.arange(len(rows)), torch.randint(vocab_size, (len(rows),), generator=generator)] = False
    logits.masked_fill_(banned, -torch.inf)
    choices = [Choice(params, key) for params, key in rows]
    assert raced(logits, choices) == draw(logits, choices)


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("seed", range(40))
def test_the_winners_are_those_of_the_host_in_a_whole_vocabulary(seed: int) -> None:
    random = numpy.random.default_rng(seed)
    rows = [
        Choice(
            replace(
                PLAIN,
                temperature=float(random.choice([0.3, 0.7, 1.0, 1.5])),
                top_k=int(random.choice([0, 20, 50, 5000])),
                top_p=float(random.choice([1.0, 0.95, 0.9, 0.5])),
                min_p=float(random.choice([0.0, 0.05])),
            ),
            int(key),
        )
        for key in random.integers(0, 2**63, 24)
    ]
    logits = random_logits(24, 128_256, float(random.choice([0.3, 2.0, 4.0])), seed, "many")
    assert raced(logits, rows) == draw(logits, rows)


@settings(max_examples=80, deadline=None)
@given(
    params=row_params,
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-6, 0.3, 4.0, 60.0]),
    equals=st.sampled_from(["few", "many", "most", "all"]),
)
def test_what_is_kept_is_what_sorting_everything_keeps(
    params: EffectiveParams, seed: int, scale: float, equals: str
) -> None:
    """Tokens that cannot come need not be kept by both."""
    logits = random_logits(3, 300, scale, seed, equals)
    arrays = race_arrays([(row, params) for row in range(3)], numpy.zeros(3, dtype=numpy.uint64), 300)
    made = arrays.on_device(torch.from_numpy(arrays.integers), torch.from_numpy(arrays.numbers))
    keep = (race._top_k_and_p, race._top_p, race._all)[arrays.ends.index(3)]
    distance = (logits.double() - logits.amax(dim=-1, keepdim=True)) / params.temperature
    weight = distance.exp()
    kept = keep(logits, distance, made) & (weight >= params.min_p) & (weight > 0)
    tokens, probability = truncated_probabilities(logits.double(), [params] * 3)
    assert torch.equal(kept, torch.zeros_like(kept).scatter_(1, tokens, probability > 0))


@pytest.mark.parametrize("size", [1, 100, 350, 1 << 22])
def test_how_many_rows_are_worked_on_at_a_time_changes_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_k": 9}, {"top_k": 5, "top_p": 0.6}, {"min_p": 0.2}]
    rows = [Choice(replace(PLAIN, **changes[key % 5]), key) for key in range(17)]  # type: ignore[arg-type]
    logits = random_logits(17, 100, 2.0, 0, "few")
    monkeypatch.setattr(race, "_BLOCK_SIZE", size)
    assert raced(logits, rows) == draw(logits, rows)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"top_k": 9}, {"top_k": 5, "top_p": 0.6}, {"min_p": 0.2}])
@pytest.mark.parametrize("where", [slice(3, 4), slice(None)], ids=["one", "all"])
def test_a_row_that_is_not_finite_draws_a_token_of_the_vocabulary_and_changes_no_other(
    bad: float, changes: dict[str, float], where: slice
) -> None:
    logits = random_logits(4, 50, 3.0, 1, "few")
    rows = [Choice(replace(PLAIN, **changes), key) for key in range(4)]  # type: ignore[arg-type]
    expected = raced(logits, rows)
    logits[1, where] = logits[2, where] = bad
    got = raced(logits, rows)
    assert (got[0], got[3]) == (expected[0], expected[3])
    assert all(0 <= token < 50 for token in got)


def test_rows_may_be_strided() -> None:
    logits = random_logits(6, 40, 3.0, 2, "few")
    rows = [Choice(replace(PLAIN, top_p=0.8), key) for key in range(6)]
    assert raced(logits.T.contiguous().T, rows) == raced(logits, rows)
