"""Pages: any order, any size, shared between rows, with garbage in unused slots."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sightline.attention.kinds import PAGED_KINDS
from sightline.attention.oracle.dtypes import compute_dtypes
from sightline.cache.layout import Layout
from sightline.core.device import Device, DeviceKind, available_bytes
from sightline.testing.conformance.rig import Row, Subject, Unused
from sightline.testing.conformance.trial import Trial, check, ragged_rows

_THREE = ((Row(20, 1), Row(25, 1), Row(30, 1)), (Row(5, 9), Row(21, 6), Row(3, 4)))
"""Rows whose middle one is filled with NaN: decode rows, then chunks."""
_SIGNED, _UNSIGNED = 1 << 31, 1 << 32
"""Element counts that signed and unsigned 32-bit offsets cannot reach."""


@check("ragged", kinds=PAGED_KINDS)
def page_order(trial: Trial) -> None:
    """Pages may be shuffled, interleaved between rows, or descending."""
    for layout in (Layout.SHUFFLED, Layout.DESCENDING):
        setting = replace(trial.setting, layout=layout)
        trial.try_rows(ragged_rows(trial.page_size), setting=setting)
        trial.try_rows([Row(5 * trial.page_size + 1, 1)], setting=setting)
    # Two pages in order, then the rest reversed: looking at the first two is not enough.
    bench = trial.bench()
    table_row = bench.store.open_row()
    for pool in bench.store.pools:
        pages = sorted(pool.allocator.allocate(max(5, bench.store.pages_for(4 * trial.page_size + 3))))
        pool.table.append(table_row, [*pages[:2], *reversed(pages[2:])])
    trial.try_step(trial.paged_step(bench, [Row(4 * trial.page_size + 1, 2)], table_rows=[table_row]))


@check("page-order", kinds=PAGED_KINDS)
def page_sharing(trial: Trial) -> None:
    """Rows may share the pages of a prefix."""
    page = trial.page_size
    for layout in (Layout.IN_ORDER, Layout.SHUFFLED):
        bench = trial.bench(setting=replace(trial.setting, layout=layout))
        owner = trial.paged_step(bench, [Row(2 * page, 1)])
        pages = owner.pool.table.owned(owner.table_rows[0])
        rows, table_rows = [Row(2 * page, 1)], list(owner.table_rows)
        for shared, query_len in ((2, 1), (1, 3), (2, 2)):
            twin = bench.store.open_row()
            owner.pool.allocator.share(pages[:shared])
            owner.pool.table.append(twin, pages[:shared])
            rows.append(Row(shared * page, query_len))
            bench.store.grow_row(twin, rows[-1].seq_len)
            table_rows.append(twin)
        contexts = [tuple(plane[: row.context_len] for plane in owner.contexts[0]) for row in rows]
        trial.try_step(trial.paged_step(bench, rows, seed=4, table_rows=table_rows, contexts=contexts))


@check("page-order", "split-merge", kinds=PAGED_KINDS)
def page_sizes(trial: Trial) -> None:
    """Every declared page size works."""
    for page_size in trial.some([size for size in trial.samples.of_page_sizes(trial.row) if size != trial.page_size]):
        setting = replace(
            trial.setting, page_size=page_size, layout=Layout.SHUFFLED, max_seq_len=max(512, 8 * page_size)
        )
        trial.try_rows(ragged_rows(page_size), setting=setting)


@check("page-order", kinds=PAGED_KINDS)
def unused_slots(trial: Trial) -> None:
    """NaN in unused slots, or in another row, does not reach the output."""
    for layout in (Layout.IN_ORDER, Layout.SHUFFLED):
        setting = replace(trial.setting, unused=Unused.NAN, layout=layout)
        trial.try_rows(ragged_rows(trial.page_size), setting=setting)
    # Another row's entries must not matter either.
    for rows in _THREE:
        step = trial.paged_step(trial.bench(), rows)
        clean = step.inputs
        step.change_inputs(torch.clone)
        first, last = rows[0].query_len, rows[0].query_len + rows[1].query_len
        for new in trial.problem.of_new_entries(step.inputs):
            new[first:last] = torch.nan
        answer = trial.run(step)
        step.inputs = clean
        for name, row in (("before", 0), ("behind", 2)):
            trial.agree(step, answer, f"the row {name} one with NaN", {row: range(rows[row].query_len)})


def _pool_bytes(itemsize: int, numbers: int) -> int:
    """The bytes of a key plane and a value plane with that many elements, and of everything else."""
    return 2 * itemsize * numbers + (1 << 30)


def _too_large(subject: Subject) -> str | None:
    """A CPU touches only the used part of a pool; a GPU must have room for all of it."""
    needed = _pool_bytes(_large_dtype(subject).itemsize, _SIGNED)
    if subject.device.kind is DeviceKind.CUDA and available_bytes(subject.device) < needed:
        return f"expected {needed >> 30} GiB free for a large pool, got {available_bytes(subject.device) >> 30}"
    return None


def _large_dtype(subject: Subject) -> torch.dtype:
    return compute_dtypes(subject.capability)[-1]


def large_numbers(device: Device, itemsize: int, free_bytes: int) -> int:
    """How many elements lie before the pages in use: 2^32 on a GPU with room for them, otherwise 2^31."""
    has_room = device.kind is DeviceKind.CUDA and free_bytes >= _pool_bytes(itemsize, _UNSIGNED)
    return _UNSIGNED if has_room else _SIGNED


@check("covering", "page-sharing", "accumulation", excused=_too_large, alone=True, kinds=PAGED_KINDS)
def large_pool(trial: Trial) -> None:
    """The end of a pool of more than 2^31 numbers, or 2^32 on a GPU with room for it, is written and read."""
    # The pages in use lie beyond the reach of 32-bit offsets and 16-bit page numbers.
    device, dtype = trial.subject.device, _large_dtype(trial.subject)
    numbers = large_numbers(device, dtype.itemsize, available_bytes(device))
    other = trial.in_dtype(dtype)
    spec, page = trial.sized(max(trial.samples.of_head_dims(trial.row))), trial.page_size
    [pool] = spec.pools(1, dtype)
    num_pages = numbers // (math.prod(pool.planes[0].shape) * page) + 64
    setting = replace(other.setting, layout=Layout.DESCENDING, num_pages=num_pages, max_rows=4)
    other.try_rows([Row(3 * page + 2, 1), Row(0, page + 1), Row(page, 2)], spec, setting)
