"""Scratch memory is leased once, counted and bounded; plan buffers say when they were filled again."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sightline.attention.buffers import PlanMemory
from sightline.attention.workspace import MAIN_LANE, Lane, LeaseEntry, Workspace
from sightline.core.errors import ConfigError, PlanError
from support.plan_buffers import plan_buffers, plan_memory

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
    told = r"at most 100 bytes of scratch memory, got 60 and 44 more for group0\.v; lower max_model_len, max_num_seqs"
    with pytest.raises(ConfigError, match=told):
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
    buffer = plan_buffers().take("slots", [3, 4], torch.int32)
    assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == ((3, 4), torch.int32, True)


def test_a_buffer_taken_twice_in_one_plan_is_refused() -> None:
    memory = plan_memory()
    memory.part("group0[0]").take("slots", [4], torch.int64)
    memory.part("group0[1]").take("slots", [4], torch.int64)
    with pytest.raises(ValueError, match=r"buffer 'group0\[0\]\.slots' was taken twice in one plan"):
        memory.part("group0[0]").take("slots", [4], torch.int64)
    memory.begin()
    memory.part("group0[0]").take("slots", [4], torch.int64)


def plan(memory: PlanMemory, *sizes: int, dtype: torch.dtype = torch.int64) -> list[Tensor]:
    memory.begin()
    return [memory.take(f"buffer{index}", [size], dtype) for index, size in enumerate(sizes)]


def test_buffers_of_one_plan_have_memory_of_their_own_whether_or_not_there_was_room() -> None:
    memory = plan_memory()
    for sizes in ((4, 1), (40_000, 7, 3), (1, 50_000), (4, 1)):
        taken = plan(memory, *sizes)
        for index, buffer in enumerate(taken):
            buffer.fill_(index)
        assert [set(buffer.tolist()) for buffer in taken] == [{index} for index in range(len(sizes))]


def test_plans_of_the_same_sizes_lie_in_the_same_place_once_there_is_room() -> None:
    memory = plan_memory()
    plan(memory, 100_000, 9, 33)
    places = [[buffer.data_ptr() for buffer in plan(memory, 100_000, 9, 33)] for _ in range(3)]
    assert places[0] == places[1] == places[2]
    assert memory.addresses() == {f"buffer{index}": address for index, address in enumerate(places[0])}
    plan(memory, 3, 200, 1)
    assert not memory.has_overflowed
    again = [buffer.data_ptr() for buffer in plan(memory, 100_000, 9, 33)]
    assert again == places[0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float64])
def test_every_buffer_begins_where_any_kernel_can_read_it(dtype: torch.dtype) -> None:
    memory = plan_memory()
    for _ in range(2):
        first = plan(memory, 1, 3, 17, 5, dtype=dtype)[0].data_ptr()
    assert all((address - first) % 256 == 0 for address in memory.addresses().values())


def test_a_step_that_grows_token_by_token_moves_the_memory_now_and_then() -> None:
    memory = plan_memory()
    addresses = [plan(memory, size)[0].data_ptr() for size in range(16_000, 256_000, 640)]
    moves = sum(before != after for before, after in itertools.pairwise(addresses))
    assert moves < 40, f"{moves} of {len(addresses)}"


def test_a_lane_keeps_what_its_largest_step_needs_and_no_more() -> None:
    """Each buffer was largest in another step: kept apart they would need 64 times as much."""
    workspace = Workspace(CPU, 1 << 30)
    memory = PlanMemory(workspace.elastic("planner", "plan buffers", MAIN_LANE))
    for largest in range(64):
        plan(memory, *(100_000 if index == largest else 1 for index in range(64)))
    memory.begin()
    step = 8 * 100_000 + 64 * 256
    assert step <= workspace.num_bytes <= 1.3 * step
    assert workspace.ledger() == (LeaseEntry("planner", "plan buffers", MAIN_LANE, workspace.num_bytes),)


def test_a_step_beyond_the_limit_is_refused_and_the_next_one_is_planned() -> None:
    memory = plan_memory(limit_bytes=10_000)
    with pytest.raises(PlanError, match=r"at most 10,000 bytes of planner\.plan buffers.*got a step that needs 10,240"):
        plan(memory, 1000, 250)
    plan(memory, 1000)
    [buffer] = plan(memory, 1000)
    assert buffer.numel() == 1000
    with pytest.raises(PlanError, match="plan a smaller one"):
        plan(memory, 1200, 100)


def test_plan_buffers_count_against_the_limit_of_other_leases() -> None:
    workspace = Workspace(CPU, 10_000)
    memory = PlanMemory(workspace.elastic("planner", "plan buffers", MAIN_LANE))
    workspace.lease("group0", "k", MAIN_LANE, [1500], torch.float32)
    with pytest.raises(PlanError, match="at most 4,000 bytes"):
        plan(memory, 1000)


def test_every_plan_moves_the_epoch_whether_or_not_it_takes_anything() -> None:
    memory = plan_memory()
    epochs = set()
    for sizes in ((4,), (4,), (400,), ()):
        plan(memory, *sizes)
        epochs.add(memory.epoch)
    assert len(epochs) == 4


def test_contents_are_what_the_last_plan_took_and_no_more() -> None:
    memory = plan_memory()
    plan(memory, 8, 3)
    plan(memory, 2)[0].copy_(torch.tensor([5, 6]))
    assert {name: tensor.tolist() for name, tensor in memory.contents().items()} == {"buffer0": [5, 6]}


def test_a_poisoned_buffer_shows_what_is_read_before_it_is_filled_at_every_plan() -> None:
    memory = plan_memory(poison=True)
    for size in (4, 2, 9):
        memory.begin()
        bias = memory.take("bias", [size], torch.float32)
        slots = memory.take("slots", [size], torch.int64)
        assert bias.isnan().all()
        assert (slots == 1).all()
        bias.zero_()
        slots.fill_(5)


def test_pinned_buffers_keep_their_addresses_or_the_plan_is_refused() -> None:
    memory = plan_memory()
    for _ in range(2):
        memory.begin()
        memory.part("a").take("x", (3,), torch.int64)
        memory.part("b").take("y", (5,), torch.int32)
        memory.pin()
        memory.require_pinned()
    memory.begin()
    memory.part("a").take("x", (100,), torch.int64)
    memory.part("b").take("y", (5,), torch.int32)
    with pytest.raises(PlanError, match=r"at their captured addresses, got others for b\.y; its backend must take"):
        memory.require_pinned()
    memory.begin()
    with pytest.raises(PlanError, match=r"captured addresses, got others for a\.x, b\.y"):
        memory.require_pinned()


def test_pinned_buffers_do_not_grow() -> None:
    memory = plan_memory()
    memory.begin()
    memory.part("a").take("x", (3,), torch.int64)
    memory.pin()
    memory.begin()
    memory.part("a").take("x", (3,), torch.int64)
    with pytest.raises(PlanError, match=r"bytes, as a graph was captured with, got 1,048,832 up to a\.y"):
        memory.part("a").take("y", (1 << 20,), torch.uint8)
    memory.begin()
    memory.part("a").take("x", (3,), torch.int64)
    memory.require_pinned()
