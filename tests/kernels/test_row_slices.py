"""Slices of rows cover all rows once, and what is computed by slices does not depend on them."""

from __future__ import annotations

import pytest
import torch

from sightline.kernels import residual_streams, row_slices, tail_rotation


@pytest.mark.parametrize("num_rows", [0, 1, 511, 512, 513, 1500])
def test_slices_cover_the_rows_in_order(num_rows: int) -> None:
    covered = [row for rows in row_slices.row_slices(num_rows) for row in range(rows.start, rows.stop)]
    assert covered == list(range(num_rows))


def test_streams_and_tails_do_not_depend_on_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    streams, result = torch.randn(7, 3, 8, generator=generator), torch.randn(7, 8, generator=generator)
    shares, mixing = torch.rand(7, 3, generator=generator), torch.rand(7, 3, 3, generator=generator)
    heads, angles = torch.randn(7, 2, 8, generator=generator), torch.rand(7, 1, 2, generator=generator)
    found = []
    for rows in (512, 2):
        monkeypatch.setattr(row_slices, "ROWS", rows)
        mixed, out, turned = streams.clone(), torch.empty(7, 8), heads.clone()
        residual_streams.collapse(streams, shares, out)
        residual_streams.expand(result, shares, mixing, mixed)
        tail_rotation.turn_tails(turned, angles.cos(), angles.sin())
        found.append((out, mixed, turned))
    for whole, sliced in zip(*found, strict=True):
        torch.testing.assert_close(sliced, whole)
