"""Memory: leases are zeroed only on request, plan buffers keep their addresses, and nothing grows."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from sightline.attention.workspace import MAIN_LANE
from sightline.testing.conformance.rig import AttentionRig, Memory, Row
from sightline.testing.conformance.trial import Trial, check, ragged_rows


@check("next-batch", "long-beside-short")
def zeroed_leases(trial: Trial) -> None:
    """The backend does not rely on zeroed scratch memory unless its lease asks for it."""
    bench = trial.bench(setting=replace(trial.setting, memory=Memory.POISON))
    for seed in range(3):
        step = trial.step(bench, ragged_rows(trial.page_size)[seed : seed + 5], seed=seed)
        trial.try_step(step)
        # Again: whatever a step leaves in a lease must not reach the next.
        trial.try_step(step)
    trial.try_step(trial.step(trial.bench(setting=replace(bench.setting, max_seq_len=2560)), [Row(2000, 1), Row(3, 1)]))


def _go_through(trial: Trial, bench: AttentionRig, shift: int = 0) -> None:
    """Runs two dozen steps of many shapes; another `shift` gives other contexts."""
    for index in range(24):
        first = Row(60 - index % 7 - shift, 1 + 3 * (index % 2))
        step = trial.step(bench, [first, Row(9 * index % 50, 2), Row(0, 5 - index % 5)])
        step.run()
        for table_row in step.table_rows:
            bench.store.close_row(table_row)


@check("next-batch")
def stable_addresses(trial: Trial) -> None:
    """Plan buffers keep their names and addresses."""
    bench = trial.bench()
    _go_through(trial, bench)
    before = bench.planner.buffer_addresses(MAIN_LANE)
    _go_through(trial, bench)
    after = bench.planner.buffer_addresses(MAIN_LANE)
    moved = sorted(name for name in before if after.get(name) != before[name])
    trial.require(not moved, f"expected plan buffers to keep their addresses, got others for {', '.join(moved)}")
    added = sorted(after.keys() - before.keys())
    trial.require(
        not added, f"expected the same plan buffers from step to step, got {len(added)} new ones, such as {added[:3]}"
    )


@check("stable-addresses")
def no_growth(trial: Trial) -> None:
    """Memory does not grow from step to step."""
    bench = trial.bench()
    _go_through(trial, bench)
    before = _live_bytes(trial)
    # New lengths, to find anything that is kept per length.
    _go_through(trial, bench, shift=7)
    grown = _live_bytes(trial) - before
    trial.require(grown <= 0, f"expected no growth, got {grown:,} bytes more of tensors")


def _live_bytes(trial: Trial) -> int:
    """The bytes of all live tensors; on a GPU, the bytes that its allocator has given out."""
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
