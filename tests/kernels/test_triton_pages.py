"""Lists of pages, in Triton's interpreter or on the card."""

from __future__ import annotations

import pytest
import torch

from sightline.kernels.triton.pages import list_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("counts", [[3, 0, 300, 1], [0, 0], [], [1]])
def test_rows_follow_each_other_and_nothing_else_is_written(counts: list[int]) -> None:
    table = torch.randperm(7 * 400).view(7, 400)
    rows = [5, 2, 6, 1][: len(counts)]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    out = torch.full((sum(counts) + 2,), -1, dtype=torch.int32, device=DEVICE)
    listed = torch.tensor([rows, counts, starts], dtype=torch.int64, device=DEVICE).view(3, len(counts))
    list_pages(table.to(DEVICE), listed, max(counts, default=0), out)
    expected = [page for row, count in zip(rows, counts, strict=True) for page in table[row, :count].tolist()]
    assert out.tolist() == [*expected, -1, -1]
