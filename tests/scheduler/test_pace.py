"""Steps are timed by their work, and what a step may hold follows from the last few of them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.scheduler.costs import LEAST_TOKENS, StepCosts, StepLimit
from sightline.scheduler.pace import Pace
from sightline.scheduler.sequence import ScheduledRow
from support.scheduling import make_sequence

COSTS = StepCosts(logit=0.5, context=0.01)
BASE, SLOPE = 0.02, 0.001
"""Seconds of the device that these tests pretend to have."""


def row(num_tokens: int, context_len: int = 0, *, scored: bool = False) -> ScheduledRow:
    return ScheduledRow(make_sequence("a", 8, 1), 1, context_len, num_tokens, True, scored)


class Device:
    """Steps that take the time that their work says, times a factor."""

    def __init__(self, max_step_ms: float | None = 100.0) -> None:
        self.pace = Pace(COSTS, max_step_ms)
        self.now = 0.0

    def run(self, *rows: ScheduledRow, factor: float = 1.0) -> float:
        work = sum(COSTS.work(each.num_tokens, each.context_len, each.num_logits) for each in rows)
        started, self.now = self.now, self.now + (BASE + SLOPE * work) * factor
        self.pace.observe(rows, started, self.now)
        return self.now - started

    def decode(self, factor: float = 1.0) -> None:
        self.run(row(1, 20), row(1, 30), factor=factor)

    def prefill(self, factor: float = 1.0) -> tuple[int, float]:
        """The largest chunk that fits beside a row that generates, and the time that it took."""
        limit = self.pace.limit()
        assert limit is not None
        count, _ = limit.beside(1, 20).take(512, 0, scored=False)
        return count, self.run(row(1, 20), row(count), factor=factor)

    def settled(self) -> Device:
        for _ in range(10):
            self.decode()
            self.prefill()
        return self


@given(
    work=st.floats(0, 1e6),
    context_len=st.integers(0, 10_000),
    scored=st.booleans(),
    logit=st.floats(0, 10),
    context=st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_tokens_within_a_work_cost_no_more_and_one_more_would(
    work: float, context_len: int, scored: bool, logit: float, context: float
) -> None:
    costs = StepCosts(logit, context)
    count = costs.num_tokens(work, context_len, scored=scored)

    def cost(number: int) -> float:
        return costs.work(number, context_len, number if scored else 1)

    assert count == 0 or cost(count) <= work * (1 + 1e-9)
    assert cost(count + 1) > work * (1 - 1e-9)


def test_without_a_limit_nothing_is_learned_and_nothing_limited() -> None:
    for asked in (None, 0.0):
        device = Device(asked)
        device.run(row(8))
        assert device.pace.limit() is None
        assert (device.pace.max_step_ms, device.pace.num_over) == (None, 0)
        assert device.pace.total_seconds == pytest.approx(device.now)


def test_the_first_chunks_are_small_and_double_until_the_limit_is_near() -> None:
    device = Device()
    device.decode()
    counts = [device.prefill()[0] for _ in range(6)]
    assert counts[0] == LEAST_TOKENS
    assert all(after <= 2 * before + 4 for before, after in pairwise(counts))
    assert counts[-1] > 50


def test_once_the_rate_is_known_steps_take_as_long_as_they_may_and_no_longer() -> None:
    device = Device().settled()
    for _ in range(20):
        count, seconds = device.prefill()
        assert 0.097 < seconds <= 0.1 + 1e-9
        assert count > LEAST_TOKENS
        device.decode()


@pytest.mark.parametrize("factor", [50.0, 0.02])
def test_one_step_that_is_slow_or_fast_for_another_reason_changes_little(factor: float) -> None:
    device = Device().settled()
    usual = device.prefill()[0]
    device.prefill(factor)
    device.decode(factor)
    after = [device.prefill()[0] for _ in range(12)]
    assert all(0.8 * usual <= count <= 1.2 * usual for count in after)


def test_a_slow_first_step_is_forgotten_after_the_next() -> None:
    device = Device()
    device.decode(100.0)
    device.run(row(64), factor=100.0)
    for _ in range(2):
        device.decode()
        device.run(row(64))
    assert device.prefill()[0] > 50


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_device_that_becomes_slower_or_faster_is_followed(factor: float) -> None:
    device = Device().settled()
    usual = device.prefill()[0]
    for _ in range(8):
        device.decode(factor)
        device.prefill(factor)
    count, seconds = device.prefill(factor)
    assert seconds <= 0.1 + 1e-9 or count == LEAST_TOKENS
    assert (count < usual) is (factor > 1)


def test_prompts_do_not_seem_to_be_free_after_slow_decode_steps() -> None:
    device = Device()
    for _ in range(8):
        device.decode(4.0)
    seconds = sorted(device.prefill()[1] for _ in range(12))
    assert seconds[-1] < 0.16, "once, where the slope is not known yet"
    assert seconds[-2] < 0.11


def test_small_steps_do_not_make_large_ones_seem_cheap() -> None:
    """A GPU's small steps all take the same time."""
    pace, now = Pace(COSTS, 100.0), 0.0
    for count in [1, 2, 4, 8, 16] * 4:
        pace.observe([row(1), row(count)], now, now + 0.01)
        now += 0.01
    limit = pace.limit()
    assert limit is not None
    assert limit.work <= 2 * COSTS.work(17, 0, 2) + 4


def test_replicas_that_compute_at_once_do_not_seem_faster_than_one() -> None:
    alone, beside = Device().settled(), Pace(COSTS, 100.0)
    other = replace(row(1), sequence=make_sequence("b", 8, 1))
    other.sequence.replica = 1
    now = 0.0
    for count in [8, 16, 32, 64, 128] * 3:
        for work in (0.0, COSTS.work(count, 0, 1)):
            rows = [row(count if work else 1), replace(other, num_tokens=count if work else 1)]
            seconds = BASE + SLOPE * COSTS.work(rows[0].num_tokens, 0, 1)
            beside.observe(rows, now, now + seconds)
            now += seconds
    found, expected = beside.limit(), alone.pace.limit()
    assert found is not None
    assert expected is not None
    assert found.work <= 1.1 * expected.work


def test_a_limit_below_a_decode_step_leaves_the_least() -> None:
    device = Device(10.0).settled()
    assert device.prefill()[0] == LEAST_TOKENS
    assert device.pace.num_over > 10


def test_logits_of_scored_prompts_and_long_contexts_take_their_share() -> None:
    limit = StepLimit(100.0, COSTS, least=0)
    plain, _ = limit.take(512, 0, scored=False)
    scored, _ = limit.take(512, 0, scored=True)
    late, left = limit.take(512, 400, scored=False)
    assert late < scored < plain
    assert 0.0 <= left.work < 6.0


def test_the_least_is_shared_by_all_prompts_of_a_step() -> None:
    first, limit = StepLimit(-5.0, COSTS).take(10, 0, scored=False)
    second, limit = limit.take(10, 0, scored=False)
    assert (first, second) == (10, LEAST_TOKENS - 10)
    assert limit.is_used_up


def test_a_step_in_flight_behind_another_took_the_time_since_that_ended() -> None:
    pace = Pace(COSTS, 100.0)
    pace.observe([row(1)], 0.0, 10.0)
    pace.observe([row(1)], 1.0, 12.0)
    assert pace.total_seconds == 12.0
    pace.observe([row(1)], 20.0, 21.0)
    assert pace.total_seconds == 13.0


def test_an_infinite_limit_learns_and_does_not_limit() -> None:
    device = Device(None)
    device.pace.max_seconds = math.inf
    device.decode()
    device.run(row(64))
    assert device.pace.limit() is None
    assert device.pace.max_step_ms is None
    assert device.pace.seconds(10.0) == pytest.approx(BASE + SLOPE * 10.0)
