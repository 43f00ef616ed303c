"""Drafters that lie at random change no answer under random traffic. `make prove` plays a hundred times as much."""

from __future__ import annotations

from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.simulation import simulate


def test_five_hundred_steps_break_nothing() -> None:
    total = EventCounts()
    for seed in range(500_000, 500_006):
        total += simulate(seed, 80, guesses=True)
    assert total.steps > 500
    assert total.trees > 30
    assert total.accepted_tokens > 300
    counts = [total.retractions, total.cancels, total.pauses, total.forks, total.cached_tokens, total.failed_forwards]
    assert min(*counts, total.wrong_drafts, total.whole_drafts, total.border_drafts) > 0
