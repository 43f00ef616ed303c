"""Copies the pages of some rows into one list, as kernels of other libraries need them, in one launch.

Does not know rows' lengths: the caller says how many pages each row has.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
"""The number of pages that a program copies."""


def list_pages(table: Tensor, rows: Tensor, most: int, out: Tensor) -> None:
    """Copies pages of `table` [num_table_rows, max_pages] int64 to `out` int32.

    `rows` [3, n] int64 has, for each row, its index in the table, its number of pages (at most `most`), and their
    start in `out`.
    """
    count = rows.shape[1]
    if count == 0 or most == 0:
        return
    _list_kernel[(count, triton.cdiv(most, _BLOCK))](
        table, rows, out, count, table.stride(0), BLOCK=_BLOCK, num_warps=4
    )


@triton.jit(do_not_specialize=["count"])
def _list_kernel(table, rows, out, count, row_stride, BLOCK: tl.constexpr):
    """A program copies some pages of one row."""
    row = rows + tl.program_id(0)
    place, num_pages, start = tl.load(row), tl.load(row + count), tl.load(row + 2 * count)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = page < num_pages
    found = tl.load(table + place * row_stride + page, mask=there, other=0)
    tl.store(out + start + page, found.to(tl.int32), mask=there)
