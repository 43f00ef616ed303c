"""Inputs for planning FlashInfer's wrappers: row lists, page lists, memory sizes, and copies in flight.

Knows page tables and host lengths. Does not know the library's wrappers, which the backends own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import StepView
from sightline.attention.spec import SoftmaxSpec
from sightline.cache.table import PageTable
from sightline.core.batch import Batch
from sightline.kernels.triton.pages import list_pages

HostInts = npt.NDArray[np.int32]

STREAMING_MULTIPROCESSORS_WITHOUT_A_DEVICE = 4
"""Used if there is no CUDA device, as in tests."""


@dataclass(frozen=True, eq=False)
class RowLists:
    """The rows of a step that have new tokens, in order."""

    rows: HostInts
    """[n]: indices of the rows in the step."""
    query_lens: HostInts
    """[n], above 0."""
    seq_lens: HostInts
    """[n]: context and new tokens."""
    table_rows: HostInts
    """[n]: page-table rows."""

    @staticmethod
    def of(batch: Batch, rows: Sequence[int] | None = None) -> RowLists:
        """All rows of the batch that have new tokens, or those among `rows`."""
        queries, contexts, table_rows = (
            np.fromiter(values, np.int32, batch.num_rows)
            for values in (batch.query_lens.exact(), batch.context_lens.exact(), batch.rows)
        )
        chosen = np.arange(batch.num_rows, dtype=np.int32) if rows is None else np.array(rows, dtype=np.int32)
        chosen = chosen[queries[chosen] > 0]
        return RowLists(chosen, queries[chosen], (contexts + queries)[chosen], table_rows[chosen])

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    def pages(self, page_size: int) -> HostInts:
        """[n]: page count per row."""
        return -(-self.seq_lens // page_size)


def offsets(lens: HostInts, num_rows: int | None = None) -> HostInts:
    """[num_rows + 1]: prefix sums; rows beyond `lens` are empty."""
    sums = np.zeros((len(lens) if num_rows is None else num_rows) + 1, dtype=np.int32)
    np.cumsum(lens, out=sums[1 : len(lens) + 1])
    sums[len(lens) + 1 :] = sums[len(lens)]
    return sums


def padded(values: HostInts, num_rows: int, fill: int) -> HostInts:
    """[num_rows]: `values`, then `fill`."""
    wide = np.full(num_rows, fill, dtype=np.int32)
    wide[: len(values)] = values
    return wide


def last_page_lens(seq_lens: HostInts, page_size: int) -> HostInts:
    """[n]: entries in each row's last page; 0 for an empty row."""
    return np.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0).astype(np.int32)


def on_host(values: npt.NDArray[np.int32 | np.int64]) -> Tensor:
    """A tensor that shares the array's memory. It is pageable, so a copy to a device has read it when the call
    returns."""
    return torch.from_numpy(values)


def fill_pages(
    name: str, table: PageTable, table_rows: HostInts, pages: HostInts, buffers: PlanBuffers, out: Tensor
) -> Tensor:
    """Writes the rows' pages, row after row, into `out` int32, and returns the filled part.

    The device walks the table, so the host's work grows with rows, not with pages.
    """
    staged = buffers.take(f"{name}.rows", (3, len(table_rows)), torch.int64)
    starts = offsets(pages)
    staged.copy_(on_host(np.stack((table_rows, pages, starts[:-1])).astype(np.int64)), non_blocking=True)
    list_pages(table.pages, staged, int(pages.max(initial=0)), out)
    return out[: int(starts[-1])]


def token_indices(name: str, rows: RowLists, step: StepView, buffers: PlanBuffers) -> Tensor:
    """[num_tokens] int64: the tokens of the rows."""
    starts = step.batch.query_offsets_host()
    listed = [token for row in rows.rows for token in range(starts[row], starts[row + 1])]
    indices = buffers.take(f"{name}.tokens", (len(listed),), torch.int64)
    indices.copy_(torch.tensor(listed, dtype=torch.int64), non_blocking=True)
    return indices


def chosen_counts(step: StepView, top_k: int) -> HostInts:
    """[num_tokens, without padding]: how many entries each token chooses. Masks are causal: it sees what stands before
    it."""
    rows = RowLists.of(step.batch)
    lens = rows.query_lens
    queries = np.arange(rows.num_tokens, dtype=np.int32) - np.repeat(offsets(lens)[:-1], lens)
    contexts = 0 if step.is_transient else np.repeat(rows.seq_lens - lens, lens)
    return np.minimum(contexts + queries + 1, top_k).astype(np.int32)


def slot_lists(name: str, counts: HostInts, buffers: PlanBuffers) -> Tensor:
    """[2, n] int64: how many slots each token has, and where they begin; as `list_slots` takes them."""
    staged = buffers.take(f"{name}.slots", (2, len(counts)), torch.int64)
    staged.copy_(on_host(np.stack((counts, offsets(counts)[:-1])).astype(np.int64)), non_blocking=True)
    return staged


def packed(rows: Sequence[int], query_lens: Sequence[int], room: int) -> Iterator[list[int]]:
    """Packs rows so that each pack has at most `room` tokens; a single row always fits."""
    pack: list[int] = []
    for row in rows:
        if pack and sum(query_lens[each] for each in pack) + query_lens[row] > room:
            yield pack
            pack = []
        pack.append(row)
    if pack:
        yield pack


class CopiesInFlight:
    """Prevents planning from overwriting pinned memory that an earlier plan of the lane is still copying from.

    The library plans into its own pinned memory and copies from it in stream order.
    """

    def __init__(self, device: torch.device) -> None:
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until the marked copies are done. Usually returns at once."""
        if self._done is not None:
            self._done.synchronize()

    def mark(self) -> None:
        """Records that all copies of a plan have been issued."""
        if self._done is not None:
            self._done.record()


def window_left(spec: SoftmaxSpec) -> int:
    """Keys to the left of a query that it sees; the library uses -1 for all."""
    return -1 if spec.window is None else spec.window - 1


def streaming_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return STREAMING_MULTIPROCESSORS_WITHOUT_A_DEVICE
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Row counts that captured steps are planned for: powers of two, and the maximum."""
    sizes = [1 << exponent for exponent in range(max_rows.bit_length()) if 1 << exponent < max_rows]
    return (*sizes, max_rows)


def partial_bytes(spec: SoftmaxSpec, max_rows: int, multiprocessors: int) -> int:
    """Upper bound on the float workspace that split contexts need.

    A partial result is one fp32 vector and one number per head, query row and split. There are at most two blocks of
    splits per multiprocessor; a step that may be captured also reserves memory for all of its tiles.
    """
    group, heads = spec.group_size, spec.num_q_heads
    splits = max(1, 2 * multiprocessors // spec.num_kv_heads)
    tile = 16 if group <= 16 else 128
    tiles = -(-max_rows * group // tile) + max_rows
    rows = max(-(-splits * 128 // group), -(-max(splits, tiles) * tile // group))
    return heads * rows * (spec.head_dim + 1) * 4 + 1024
