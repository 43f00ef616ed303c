"""Scratch memory is leased once, counted and bounded; plan buffers say when they were filled again."""

from __future__ import annotations

import itertools

import pytest
import torch

from sightline.attention.buffers import PlanBuffers
from sightline.attention.workspace import MAIN_LANE, Lane, LeaseEntry, Workspace
from sightline.core.errors import ConfigError, PlanError

CPU = torch.device("cpu")
SIDE_LANE = Lane(1)


def test_a_lease_has_the_shape_and_dtype_asked_for() -> None:
    lease = Workspace(CPU, 1000).lease("group0", "k", MAIN_LANE, [3, 4], torch.float16)
    assert (lease.shape, lease.dtype, lease.device) == ((3, 4), torch.float16, CPU)


def test_the_ledger_has_every_lease_in_order_with_its_bytes() -> None:
    workspace = Workspace(CPU, 1000)
    workspace.lease("group0", "v", MAIN_LANE, [3, 4], torch.float16)
    workspace.lease("group0", "k", MAIN_LANE, [5], torch.int64)
    workspace.lease("group0", "k", SIDE_LANE, [], torch.float32)
    assert workspace.ledger() == (
        LeaseEntry("group0", "v", MAIN_LANE, 24),
        LeaseEntry("group0", "k", MAIN_LANE, 40),
        LeaseEntry("group0", "k", SIDE_LANE, 4),
    )
    assert workspace.num_bytes == 68


def test_a_lease_may_fill_the_limit_and_not_pass_it() -> None:
    workspace = Workspace(CPU, 100)
    workspace.lease("group0", "k", MAIN_LANE, [15], torch.float32)
    with pytest.raises(ConfigError, match=r"at most 100 bytes of scratch memory, got 60 and 44 more for group0\.v"):
        workspace.lease("group0", "v", MAIN_LANE, [11], torch.float32)
    assert workspace.num_bytes == 60, "a refused lease was counted"
    workspace.lease("group0", "v", MAIN_LANE, [10], torch.float32)
    assert workspace.num_bytes == 100


def test_a_zeroed_lease_starts_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.full((64,), torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)
    workspace = Workspace(CPU, 1000)
    assert workspace.lease("group0", "counters", MAIN_LANE, [64], torch.float32, zeroed=True).count_nonzero() == 0
    assert workspace.lease("group0", "scratch", MAIN_LANE, [64], torch.float32).isnan().all()


def test_a_lease_belongs_to_owner_name_and_lane() -> None:
    workspace = Workspace(CPU, 1000)
    keys = [
        ("group0", "k", MAIN_LANE),
        ("group1", "k", MAIN_LANE),
        ("group0", "v", MAIN_LANE),
        ("group0", "k", Lane(1)),
    ]
    leases = [workspace.lease(*key, [4], torch.float32) for key in keys]
    assert len({lease.data_ptr() for lease in leases}) == 4
    for key in keys:
        with pytest.raises(ValueError, match="was taken already; keep the tensor that it returned"):
            workspace.lease(*key, [4], torch.float32)
    assert workspace.num_bytes == 64


def test_later_leases_move_no_earlier_one() -> None:
    workspace = Workspace(CPU, 1 << 20)
    first = workspace.lease("group0", "k", MAIN_LANE, [8], torch.float32, zeroed=True)
    address = first.data_ptr()
    for index in range(20):
        workspace.lease("group0", f"other{index}", MAIN_LANE, [100], torch.float32).fill_(1.0)
    assert first.data_ptr() == address
    assert first.count_nonzero() == 0


def test_a_lease_from_a_sealed_arena_raises_and_says_where_it_belongs() -> None:
    workspace = Workspace(CPU, 1000)
    kept = workspace.lease("group0", "k", MAIN_LANE, [4], torch.float32, zeroed=True)
    workspace.seal()
    with pytest.raises(PlanError, match=r"before the first step, got group0\.v during one; take it in the constructor"):
        workspace.lease("group0", "v", MAIN_LANE, [4], torch.float32)
    with pytest.raises(PlanError, match="before the first step"):
        workspace.lease("group0", "k", MAIN_LANE, [4], torch.float32)
    assert workspace.ledger() == (LeaseEntry("group0", "k", MAIN_LANE, 16),)
    assert kept.tolist() == [0.0] * 4, "what was leased before stays as it was"


FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_poisoned_lease_is_nan_all_over(dtype: torch.dtype) -> None:
    lease = Workspace(CPU, 1000, poison=True).lease("group0", "k", MAIN_LANE, [3, 5], dtype)
    assert lease.float().isnan().all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_poisoned_lease_of_integers_holds_indices_within_any_bounds(dtype: torch.dtype) -> None:
    lease = Workspace(CPU, 1000, poison=True).lease("group0", "slots", MAIN_LANE, [3, 5], dtype)
    assert (lease == 1).all()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_zeroed_lease_is_zero_under_poison_too(dtype: torch.dtype) -> None:
    workspace = Workspace(CPU, 1000, poison=True)
    lease = workspace.lease("group0", "counters", MAIN_LANE, [3, 5], dtype, zeroed=True)
    assert (lease.float() == 0).all()


def test_without_poison_a_lease_costs_no_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *args, **options: torch.full((64,), 7.0))
    assert (Workspace(CPU, 1000).lease("group0", "k", MAIN_LANE, [64], torch.float32) == 7.0).all()


def test_a_buffer_has_the_shape_and_dtype_asked_for() -> None:
    buffer = PlanBuffers(CPU).take("slots", [3, 4], torch.int32)
    assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == ((3, 4), torch.int32, True)


def test_a_buffer_taken_twice_in_one_plan_is_refused() -> None:
    buffers = PlanBuffers(CPU)
    buffers.begin()
    buffers.take("slots", [4], torch.int64)
    with pytest.raises(ValueError, match="buffer 'slots' was taken twice in one plan"):
        buffers.take("slots", [4], torch.int64)
    buffers.begin()
    buffers.take("slots", [4], torch.int64)


def test_a_buffer_that_fits_stays_where_it_is() -> None:
    buffers = PlanBuffers(CPU)
    address = buffers.take("slots", [100], torch.int64).data_ptr()
    for shape in ([100], [3], [10, 10], [1], [100]):
        buffers.begin()
        assert buffers.take("slots", shape, torch.int64).data_ptr() == address


def test_a_buffer_grows_by_doubling_so_that_small_steps_do_not_move_it() -> None:
    buffers = PlanBuffers(CPU)
    addresses = []
    for size in range(16, 257):
        buffers.begin()
        addresses.append(buffers.take("slots", [size], torch.int64).data_ptr())
    moves = sum(before != after for before, after in itertools.pairwise(addresses))
    assert moves == 4, "16 to 32, 64, 128, 256"


def test_names_have_memory_of_their_own() -> None:
    buffers = PlanBuffers(CPU)
    first, second = buffers.take("first", [4], torch.int64), buffers.take("second", [4], torch.int64)
    first.fill_(1)
    second.fill_(2)
    assert first.tolist() == [1] * 4


def test_another_dtype_gets_memory_of_that_dtype() -> None:
    buffers = PlanBuffers(CPU)
    buffers.take("bias", [4], torch.float32)
    buffers.begin()
    assert buffers.take("bias", [4], torch.float16).dtype == torch.float16


def test_changing_the_dtype_to_and_fro_does_not_grow_the_memory() -> None:
    buffers = PlanBuffers(CPU)
    for index in range(12):
        buffers.begin()
        buffer = buffers.take("bias", [16], torch.float32 if index % 2 else torch.float16)
    assert buffer.untyped_storage().nbytes() <= 4 * 16 * 4


def test_every_fill_moves_the_epoch_whether_or_not_the_memory_moves() -> None:
    buffers = PlanBuffers(CPU)
    stamps = []
    for size in (4, 4, 400, 4):
        buffers.begin()
        buffers.take("slots", [size], torch.int64)
        stamps.append(buffers.stamp()["slots"])
    assert len(set(stamps)) == 4


def test_a_stamp_has_exactly_the_buffers_of_its_plan() -> None:
    buffers = PlanBuffers(CPU)
    buffers.begin()
    buffers.take("tokens", [4], torch.int64)
    buffers.take("slots", [4], torch.int64)
    first = buffers.stamp()
    buffers.begin()
    assert buffers.stamp() == {}
    buffers.take("slots", [4], torch.int64)
    assert set(first) == {"tokens", "slots"}
    assert set(buffers.stamp()) == {"slots"}
    assert buffers.changed_since(first) == ("slots",)
    assert buffers.changed_since(buffers.stamp()) == ()


def test_beginning_a_plan_that_takes_nothing_makes_no_older_plan_stale() -> None:
    buffers = PlanBuffers(CPU)
    buffers.begin()
    buffers.take("slots", [4], torch.int64)
    stamp = buffers.stamp()
    buffers.begin()
    buffers.take("other", [4], torch.int64)
    assert buffers.changed_since(stamp) == ()


def test_contents_are_what_the_last_plan_took_and_no_more() -> None:
    buffers = PlanBuffers(CPU)
    buffers.take("slots", [8], torch.int64).fill_(1)
    buffers.begin()
    buffers.take("slots", [2], torch.int64).copy_(torch.tensor([5, 6]))
    assert [tensor.tolist() for tensor in buffers.contents(["slots"])] == [[5, 6]]


def test_addresses_stay_once_the_largest_step_was_planned() -> None:
    buffers = PlanBuffers(CPU)

    def plan(num_rows: int, num_keys: int) -> None:
        buffers.begin()
        buffers.take("slots", [num_rows, num_keys], torch.int64)
        buffers.take("bias", [num_rows, 1, num_keys], torch.float32)

    plan(1, 3)
    small = dict(buffers.addresses())
    plan(16, 100)
    largest = dict(buffers.addresses())
    assert set(largest) == {"slots", "bias"}
    assert largest != small
    for num_rows, num_keys in ((16, 100), (1, 1), (3, 77), (16, 99), (0, 0), (16, 100)):
        plan(num_rows, num_keys)
        assert buffers.addresses() == largest


def test_an_address_is_where_the_buffer_that_was_taken_begins() -> None:
    buffers = PlanBuffers(CPU)
    taken = {name: buffers.take(name, [9], torch.int32).data_ptr() for name in ("tokens", "slots")}
    assert buffers.addresses() == taken


def test_a_poisoned_buffer_shows_what_is_read_before_it_is_filled_at_every_plan() -> None:
    buffers = PlanBuffers(CPU, poison=True)
    for size in (4, 2, 9):
        buffers.begin()
        bias = buffers.take("bias", [size], torch.float32)
        slots = buffers.take("slots", [size], torch.int64)
        assert bias.isnan().all()
        assert (slots == 1).all()
        bias.zero_()
        slots.fill_(5)


def test_poison_leaves_what_another_buffer_holds_alone() -> None:
    buffers = PlanBuffers(CPU, poison=True)
    first = buffers.take("first", [4], torch.float32).fill_(3.0)
    buffers.take("second", [400], torch.float32)
    assert first.tolist() == [3.0] * 4


def test_without_poison_a_buffer_keeps_what_the_last_plan_left() -> None:
    buffers = PlanBuffers(CPU)
    buffers.take("slots", [4], torch.int64).fill_(5)
    buffers.begin()
    assert buffers.take("slots", [4], torch.int64).tolist() == [5] * 4
