"""Recurrent states under any traffic: every row reads the state of its own tokens, and no slot is lost or lacking."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from support.state_traffic import StateTraffic

BLOCKS = 6
BLOCK = 15


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_row_reads_its_own_state_and_no_slot_is_lost(block: int) -> None:
    counts = Counter[str]()
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        counts += StateTraffic(seed).run(40)
    what = ("hits", "retractions", "accepted", "failures", "checkpoints", "pins", "returned")
    assert min(counts[each] for each in what) > 0


def test_an_interruption_anywhere_in_a_step_loses_no_slot() -> None:
    handler, counts = signal.signal(signal.SIGINT, signal.default_int_handler), Counter[str]()
    try:
        for seed in range(30):
            counts += StateTraffic(seed, interrupts=True).run(30)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert counts["interruptions"] > 100
