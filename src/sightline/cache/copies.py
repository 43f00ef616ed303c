"""Copies of whole pages and states between pools and memory outside them.

    pool plane   [num_layers, num_pages, page]  ──gather──▶  [num_blocks, num_layers * page]   rows of bytes
                                                ◀─scatter──

All copies are enqueued on the current stream, in order. Does not know which pages, nor who keeps the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8 on the host. For a card it is pinned, so that copies do not block the host."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def as_bytes(plane: Tensor, num_places: int) -> Tensor:
    """[num_layers, num_places, bytes] uint8: a view of a plane [num_layers, num_slots, ...] by page, or by slot."""
    num_layers = plane.shape[0]
    return plane.view(num_layers, -1).view(torch.uint8).view(num_layers, num_places, -1)


def gather(planes: Sequence[Tensor], places: Tensor, out: Tensor) -> Tensor:
    """Fills the first columns of `out` with what the planes have at some places; returns the columns behind them.

    `planes` are views of `as_bytes`, `places` is [n] int64 on their device, `out` is [n, bytes] uint8.
    """
    for plane in planes:
        own, out = _split(plane, out)
        own.copy_(plane.index_select(1, places).transpose(0, 1))
    return out


def scatter(planes: Sequence[Tensor], places: Tensor, source: Tensor) -> Tensor:
    """Writes the first columns of `source` to some places of the planes; returns the columns behind them.

    The reverse of `gather`. Places are different from each other.
    """
    for plane in planes:
        own, source = _split(plane, source)
        plane.index_copy_(1, places, own.transpose(0, 1))
    return source


def _split(plane: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of a plane's bytes [n, num_layers, bytes], and those behind them."""
    num_layers, _, width = plane.shape
    own, behind = rows[:, : num_layers * width], rows[:, num_layers * width :]
    return own.as_strided((len(rows), num_layers, width), (rows.stride(0), width, 1)), behind
