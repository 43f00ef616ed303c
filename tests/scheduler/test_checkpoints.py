"""Which recurrent states are kept for others, and which of them give way."""

from __future__ import annotations

import pytest
import torch

from sightline.cache.host import HostBlocks
from sightline.cache.pools import CacheLimits
from sightline.cache.prefix import PrefixCache
from sightline.cache.store import CacheStore
from sightline.cache.tier import LowerTier
from sightline.core.request import Terms
from sightline.scheduler.checkpoints import Checkpoints
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import ScheduledRow, SequenceState
from sightline.scheduler.supply import Supply
from support.scheduling import make_sequence
from support.state_traffic import SPECS

PAGE = 2


class OneRow:
    """A sequence that is computed step by step, and what is kept of it."""

    def __init__(self, prompt_len: int, max_checkpoints: int = 8, *, host_bytes: int = 0) -> None:
        self.store = CacheStore(SPECS, CacheLimits(33, PAGE, 2, 64, 4, max_checkpoints), torch.device("cpu"))
        tier = LowerTier(self.store, HostBlocks(self.store, host_bytes), "hashes") if host_bytes else None
        self.prefixes = PrefixCache(self.store, tier)
        self.supply = Supply(self.store, self.prefixes)
        self.sequence = self.begin(prompt_len)

    def begin(self, prompt_len: int, caller: str = "") -> SequenceState:
        sequence = make_sequence("one", prompt_len, 16, terms=Terms(caller=caller))
        reuse = self.supply.find(sequence)
        self.supply.keep(sequence, reuse)
        self.supply.open(sequence, reuse, 32)
        return sequence

    def compute(self, count: int, *, has_followers: bool = False) -> None:
        """A step of some tokens; those behind the prompt are generated."""
        sequence, start = self.sequence, self.sequence.num_computed
        stop, row = start + count, sequence.held_row
        self.supply.keep_states(
            ScheduledRow(sequence, row, start, count, completes=True, scores_prompt=False), has_followers=has_followers
        )
        states = self.store.main.states
        assert states is not None
        states.slots_to_write([row], [start], [count], [1])
        self.store.lengths.advance(row, stop)
        states.launch(row, start, stop)
        self.store.lengths.commit(row, stop)
        sequence.num_computed = stop
        sequence.tokens += [7] * (stop + 1 - len(sequence.tokens))
        self.supply.publish(sequence)

    @property
    def kept(self) -> list[int]:
        """The numbers of tokens behind which the prefix cache has a state."""
        return [node.checkpoint.position for node in self.prefixes.nodes() if node.checkpoint is not None]


def test_a_prompt_is_kept_where_the_same_prompt_can_go_on() -> None:
    """The last token is computed again, so the state behind all of a prompt of whole pages does not serve it."""
    row = OneRow(8)
    row.compute(8)
    assert row.kept == [6, 8]
    assert row.supply.find(make_sequence("again", 8, 4)).num_tokens == 6


def test_an_answer_keeps_one_state_which_moves_on_as_it_grows() -> None:
    row = OneRow(4)
    row.compute(4)
    kept = []
    for _ in range(6):
        row.compute(1)
        kept.append(row.kept)
    assert kept == [[2, 4], [2, 4, 6], [2, 4, 6], [2, 4, 8], [2, 4, 8], [2, 4, 10]]


def test_a_new_state_takes_the_place_of_the_one_that_was_unused_for_longest() -> None:
    row = OneRow(3, max_checkpoints=1)
    row.compute(3)
    assert row.kept == [2]
    row.compute(1)
    assert row.kept == [4]


def test_the_state_for_other_continuations_goes_with_the_last_of_them() -> None:
    row = OneRow(6)
    row.compute(6, has_followers=True)
    states, checkpoints = row.store.main.states, row.supply._checkpoints
    assert states is not None
    assert isinstance(checkpoints, Checkpoints)
    assert checkpoints.fork(row.sequence) is not None
    row.supply.end_fork(row.sequence)
    assert checkpoints.fork(row.sequence) is None
    assert row.sequence.pinned == states.pinned(row.sequence.held_row) == set()


@pytest.mark.parametrize(
    ("host_bytes", "contexts", "kept"), [(1000, [4, 4], [4]), (64, [0, 4], [])], ids=["ample", "two blocks"]
)
def test_a_state_that_was_found_stays_until_its_sequence_has_it_although_another_one_needs_room(
    host_bytes: int, contexts: list[int], kept: list[int]
) -> None:
    """The first of two is fetched from host memory, and the only checkpoint gives way to its state. In a host memory of
    two blocks it pushes out what was to be fetched, which is computed then."""
    row = OneRow(5, max_checkpoints=1, host_bytes=host_bytes)
    row.compute(5)
    row.supply.release(row.sequence)
    row.prefixes.evict(2)
    row.supply.poll()
    row.sequence = row.begin(5, "other")
    row.compute(5)
    row.supply.release(row.sequence)
    scheduler = Scheduler(row.store, row.prefixes, max_step_tokens=16, max_scored_tokens=16)
    for caller in ("", "other"):
        scheduler.submit(make_sequence(caller, 5, 2, terms=Terms(caller=caller)))
    assert [each.context_len for each in scheduler.schedule().rows] == contexts
    assert row.kept == kept, "what came back is a checkpoint again"
    tier = row.prefixes.tier
    assert tier is not None
    assert (tier.counts.offloaded, tier.counts.failed_returns) == (3, 0), "the state that gave way is in host memory"
