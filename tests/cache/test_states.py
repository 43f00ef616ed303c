"""A state is read only where its tag says what is expected, and nothing that was written is changed."""

from __future__ import annotations

import signal
import sys

import pytest
import torch

from sightline.cache.pages import PageAllocator
from sightline.cache.spec import PlaneSpec, StateSpec
from sightline.cache.states import StateCheckpoint, StatePool, StateStage, StateTable
from sightline.core.errors import BatchError, OutOfPages
from support.state_traffic import interrupt

SPEC = StateSpec((PlaneSpec("state", (2, 3), torch.float32), PlaneSpec("tail", (4,), torch.float32)), num_layers=2)
ROW, OTHER = 1, 2


def make_table(num_slots: int = 12, max_checkpoints: int = 4, *, poison: bool = True) -> StateTable:
    pool = StatePool(SPEC, num_slots, torch.device("cpu"))
    table = StateTable(3, PageAllocator(num_slots), max_checkpoints, [pool], poison=poison)
    for row in (ROW, OTHER, 3):
        table.open(row)
    return table


def claim(table: StateTable, row: int, first: int, count: int, candidates: int = 1) -> list[int]:
    return table.slots_to_write([row], [first], [count], [candidates])


def compute(table: StateTable, row: int, first: int, count: int, candidates: int = 1) -> list[int]:
    """A step that is launched and not committed."""
    slots = claim(table, row, first, count, candidates)
    table.launch(row, first, first + count)
    return slots


def advance(table: StateTable, row: int, stop: int) -> int:
    """A row that committed `stop` tokens in one step; returns its slot."""
    slot = compute(table, row, 0, stop)[-1]
    table.commit(row, stop)
    return slot


def read(table: StateTable, row: int, position: int) -> int:
    [slot] = table.slots_to_read([row], [position])
    return slot


def test_a_row_begins_with_the_empty_state_and_reads_what_it_wrote() -> None:
    table = make_table()
    assert table.slots_to_read([ROW, OTHER], [0, 0]) == [0, 0]
    slots = compute(table, ROW, 0, 5)
    assert slots[:4] == [0, 0, 0, 0]
    assert slots[4] == read(table, ROW, 5) > 0
    assert table.tag(slots[4]) == (table.tag(slots[4]).sequence, 5, StateStage.LAUNCHED)
    for plane in ("state", "tail"):
        assert not table.pools[0].plane(plane)[:, 0].any()


@pytest.mark.parametrize("position", [1, 4, 6])
def test_a_state_behind_another_number_of_tokens_is_not_read(position: int) -> None:
    table = make_table()
    advance(table, ROW, 5)
    with pytest.raises(BatchError, match=f"one behind {position} tokens in row 1, got states behind"):
        read(table, ROW, position)


def test_a_state_that_no_step_was_launched_for_is_not_read() -> None:
    table = make_table()
    claim(table, ROW, 0, 5)
    with pytest.raises(BatchError, match="run the step that writes it"):
        read(table, ROW, 5)


def test_a_state_whose_step_failed_is_not_read_and_the_one_before_it_is() -> None:
    table = make_table()
    before = advance(table, ROW, 5)
    compute(table, ROW, 5, 2)
    table.unlaunch(ROW, 5)
    with pytest.raises(BatchError, match="run the step that writes it"):
        read(table, ROW, 7)
    assert read(table, ROW, 5) == before


def test_a_step_that_is_assembled_again_gets_the_same_slots() -> None:
    table = make_table()
    advance(table, ROW, 5)
    versions = table.versions([ROW])
    assert claim(table, ROW, 5, 3, 2) == claim(table, ROW, 5, 3, 2)
    assert table.versions([ROW]) == versions


def test_another_step_takes_the_slots_of_one_that_was_not_launched_which_is_stale_then() -> None:
    table = make_table()
    free, versions = table.num_free, table.versions([ROW])
    claim(table, ROW, 0, 5, 4)
    claim(table, ROW, 0, 2)
    assert table.positions(ROW) == (2,)
    assert table.num_free == free - 1
    assert table.versions([ROW]) != versions


def test_no_step_writes_what_it_reads_or_what_others_write() -> None:
    table = make_table()
    reads = [advance(table, ROW, 5), advance(table, OTHER, 3)]
    written = table.slots_to_write([ROW, OTHER], [5, 3], [3, 2], [3, 1])
    kept = [slot for slot in written if slot]
    assert len(set(kept) | set(reads)) == len(kept) + len(reads) == 6


def test_a_commit_keeps_exactly_the_accepted_state() -> None:
    table = make_table()
    free = table.num_free
    advance(table, ROW, 4)
    slots = compute(table, ROW, 4, 4, candidates=4)
    table.commit(ROW, 6)
    table.settle(ROW, 6)
    assert table.positions(ROW) == (6,)
    assert read(table, ROW, 6) == slots[1]
    assert table.tag(slots[1]).stage is StateStage.COMMITTED
    assert [table.tag(slot).stage for slot in (slots[0], slots[2], slots[3])] == [StateStage.FREE] * 3
    assert table.num_free == free - 1


def test_a_commit_without_its_state_raises() -> None:
    table = make_table()
    compute(table, ROW, 0, 5)
    for length in (3, 6):
        with pytest.raises(BatchError, match=f"one behind {length} tokens"):
            table.commit(ROW, length)
    claim(table, ROW, 5, 1)
    with pytest.raises(BatchError, match="run the step that writes it"):
        table.commit(ROW, 6)


def test_a_committed_state_is_not_written_again() -> None:
    table = make_table()
    advance(table, ROW, 5)
    with pytest.raises(BatchError, match="a committed one"):
        claim(table, ROW, 4, 1)


def test_a_slot_that_is_used_again_has_no_tag_of_its_last_use() -> None:
    table = make_table(num_slots=2)
    slot = advance(table, ROW, 5)
    table.fill(ROW, 0)
    assert table.tag(slot).stage is StateStage.FREE
    assert torch.isnan(table.pools[0].plane("state")[:, slot]).all()
    assert claim(table, OTHER, 0, 5)[-1] == slot
    with pytest.raises(BatchError, match="run the step that writes it"):
        read(table, OTHER, 5)


def test_the_state_of_an_earlier_sequence_in_the_same_row_is_not_read() -> None:
    table = make_table()
    advance(table, ROW, 5)
    table.open(ROW)
    with pytest.raises(BatchError, match="got none"):
        read(table, ROW, 5)


def test_a_row_goes_on_from_a_checkpoint_and_leaves_it_as_it_is() -> None:
    table = make_table()
    slot = advance(table, ROW, 8)
    checkpoint = table.checkpoint(ROW, 8)
    assert checkpoint is not None
    table.share(checkpoint)
    table.fill(ROW, 0)
    table.restore(OTHER, checkpoint)
    assert read(table, OTHER, 8) == slot == checkpoint.slot
    assert compute(table, OTHER, 8, 1) != [slot]
    table.commit(OTHER, 9)
    assert table.tag(slot).stage is StateStage.COMMITTED, "the tree has it still"
    table.release(checkpoint)
    assert table.tag(slot).stage is StateStage.FREE


def test_a_checkpoint_whose_slot_is_used_again_is_refused() -> None:
    table = make_table(num_slots=3)
    advance(table, ROW, 8)
    checkpoint = table.checkpoint(ROW, 8)
    assert checkpoint is not None
    table.fill(ROW, 0)
    advance(table, OTHER, 8)
    for use in (table.share, table.release, lambda each: table.restore(3, each)):
        with pytest.raises(ValueError, match="written anew since"):
            use(checkpoint)


def test_a_checkpoint_of_another_position_is_refused() -> None:
    table = make_table()
    advance(table, ROW, 8)
    checkpoint = table.checkpoint(ROW, 8)
    assert checkpoint is not None
    with pytest.raises(ValueError, match="behind 7 tokens"):
        table.restore(OTHER, checkpoint._replace(position=7))


def test_only_a_committed_state_is_a_checkpoint() -> None:
    table = make_table()
    compute(table, ROW, 0, 8)
    assert table.checkpoint(ROW, 8) is None
    table.commit(ROW, 8)
    assert isinstance(table.checkpoint(ROW, 8), StateCheckpoint)
    assert table.checkpoint(ROW, 4) is None


def test_a_pin_keeps_a_state_within_a_chunk_until_it_is_given_up() -> None:
    table = make_table()
    table.pin(ROW, 4)
    slots = compute(table, ROW, 0, 9)
    assert [index + 1 for index, slot in enumerate(slots) if slot] == [4, 9]
    table.commit(ROW, 9)
    compute(table, ROW, 9, 1)
    table.commit(ROW, 10)
    assert table.positions(ROW) == (4, 10)
    table.unpin(ROW, 4)
    assert table.positions(ROW) == (10,)


def test_a_row_keeps_the_state_that_it_goes_on_from_when_its_pin_is_given_up() -> None:
    table = make_table()
    table.pin(ROW, 4)
    compute(table, ROW, 0, 6, candidates=3)
    table.commit(ROW, 4)
    table.unpin(ROW, 4)
    table.settle(ROW, 4)
    assert table.positions(ROW) == (4,)
    assert read(table, ROW, 4)


def test_pins_and_checkpoints_are_limited_so_that_rows_can_always_go_on() -> None:
    table = make_table(num_slots=1 + 3 * 2 + 2, max_checkpoints=2)
    for row in (ROW, OTHER):
        table.pin(row, 2)
    assert not table.has_room
    with pytest.raises(ValueError, match="room for a checkpoint"):
        table.pin(3, 2)
    for row in (ROW, OTHER, 3):
        compute(table, row, 0, 4)
        table.commit(row, 4)
        compute(table, row, 4, 1)
    assert table.num_free == 0
    with pytest.raises(OutOfPages):
        claim(table, 3, 5, 1)


def test_a_row_without_its_recurrent_states_is_put_an_empty_one() -> None:
    table = make_table()
    table.put(ROW, 7)
    slot = read(table, ROW, 7)
    assert not table.pools[0].plane("state")[:, slot].any()
    table.put(ROW, 0)
    assert table.positions(ROW) == ()


def test_lengths_that_only_the_device_knows_are_refused() -> None:
    table = make_table()
    with pytest.raises(BatchError, match="lengths that the host knows"):
        table.slots_of(torch.tensor([1]), torch.tensor([4]))


def test_a_batch_is_stale_once_the_slots_that_it_names_are_given_up() -> None:
    table = make_table()
    advance(table, ROW, 2)
    claim(table, ROW, 2, 3)
    before = table.versions([ROW])
    table.settle(ROW, 2)
    assert table.versions([ROW]) != before
    assert table.positions(ROW) == (2,)


def test_no_two_uses_of_a_row_have_the_same_tag() -> None:
    table = make_table()
    tags = set()
    for _ in range(3):
        table.open(ROW)
        tags.add(table.tag(advance(table, ROW, 2)).sequence)
    assert len(tags) == 3


def test_an_interruption_while_slots_are_claimed_loses_none() -> None:
    """Ctrl-C may come at any line, because a step is assembled outside of what is not interrupted."""
    num_interrupted = 0
    for line in range(1, 200):
        table = make_table()
        advance(table, ROW, 2)
        table.pin(ROW, 3)
        claim(table, ROW, 2, 4)
        trace, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            interrupt(line)
            table.slots_to_write([ROW, OTHER], [2, 0], [3, 2], [2, 1])
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            sys.settrace(trace)
            signal.signal(signal.SIGINT, handler)
        for row, launched in ((ROW, 2), (OTHER, 0)):
            table.settle(row, launched)
        assert table.num_free == table.num_usable - 1, line
        assert claim(table, ROW, 2, 1)[0] > 0
    assert 10 < num_interrupted < 199


def test_a_state_that_is_awaited_counts_as_a_checkpoint_because_it_may_outlive_its_row() -> None:
    table = make_table(max_checkpoints=1)
    slot = table.receive(1, 8)
    assert not table.has_room
    with pytest.raises(OutOfPages, match="room for a checkpoint"):
        table.receive(2, 8)
    table.fill(1, 0)
    assert table.num_checkpoints == 1, "the transfer still writes it"
    table.let_go(1, 8, slot)
    assert (table.num_checkpoints, table.num_free) == (0, table.num_usable)
