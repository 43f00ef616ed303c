"""Memory: leases that are zero only where that was asked for, buffers that stay where they are, nothing that grows."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from sightline.attention.workspace import MAIN_LANE
from sightline.testing.conformance.rig import AttentionRig, Memory, Row
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Check, Trial, ragged_rows


def zeroed_leases(trial: Trial) -> None:
    bench = trial.bench(setting=replace(trial.setting, memory=Memory.POISON))
    for seed in range(3):
        step = Step(bench, ragged_rows(trial.page_size)[seed : seed + 5], seed=seed)
        trial.try_step(step)
        # The same again: what a step leaves in a lease does not reach the next.
        trial.try_step(step)
    trial.try_step(Step(trial.bench(setting=replace(bench.setting, max_seq_len=2560)), [Row(2000, 1), Row(3, 1)]))


def _go_through(bench: AttentionRig, shift: int = 0) -> None:
    """Two dozen steps of many shapes; `shift` gives other contexts."""
    for index in range(24):
        first = Row(60 - index % 7 - shift, 1 + 3 * (index % 2))
        step = Step(bench, [first, Row(9 * index % 50, 2), Row(0, 5 - index % 5)])
        step.run()
        for table_row in step.table_rows:
            bench.store.close_row(table_row)


def stable_addresses(trial: Trial) -> None:
    bench = trial.bench()
    _go_through(bench)
    before = bench.planner.buffer_addresses(MAIN_LANE)
    _go_through(bench)
    after = bench.planner.buffer_addresses(MAIN_LANE)
    moved = sorted(name for name in before if after.get(name) != before[name])
    trial.require(not moved, f"expected plan buffers to stay where they are, got other addresses of {', '.join(moved)}")
    added = sorted(after.keys() - before.keys())
    trial.require(
        not added, f"expected the same plan buffers from step to step, got {len(added)} new ones, such as {added[:3]}"
    )


def no_growth(trial: Trial) -> None:
    bench = trial.bench()
    _go_through(bench)
    before = _live_bytes(trial)
    # Lengths that never were: what is kept for each shows too.
    _go_through(bench, shift=7)
    grown = _live_bytes(trial) - before
    trial.require(grown <= 0, f"expected more steps to keep no memory, got {grown:,} bytes of tensors more")


def _live_bytes(trial: Trial) -> int:
    """Of all tensors that are alive; on a GPU, what its allocator has given out."""
    gc.collect()
    device = trial.subject.device.torch_device
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) is torch.Tensor and each.device == device
    }
    return sum(storages.values())


CHECKS = (
    Check(
        "zeroed-leases",
        "scratch memory is zero only where the lease asks for it",
        zeroed_leases,
        ("next-batch", "long-beside-short"),
    ),
    Check("stable-addresses", "plan buffers keep their names and addresses", stable_addresses, ("next-batch",)),
    Check("no-growth", "steps keep nothing: memory does not grow", no_growth, ("stable-addresses",)),
)
