"""Index builders: which rows are computed together, which slots they read, what each query may see.

A tile is a set of rows of equal query length whose keys are gathered contiguously, padded to the longest. Rows are
packed so that less than half is padding, and so that a tile's keys fit the lease that they are gathered into. Pure
functions of lengths and masks. Does not know backends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sightline.attention.spec import AttentionSpec
from sightline.cache.table import PageTable
from sightline.core.batch import Batch, MaskKind

MAX_BIAS_ELEMENTS = 1 << 22
"""Maximum elements of a tile's mask: 16 MiB in fp32. Larger tiles are split, by row and then by query."""


@dataclass(frozen=True)
class RowSpan:
    """One row's part in a tile.

    |-- skipped --|---- keys the row may see: context, then new ----|
    0             first_key                                   seq_len
    """

    row: int
    """Index in the batch."""
    first_token: int
    query_len: int
    context_len: int
    first_key: int
    """Keys before it are outside every query's window."""
    kind: MaskKind

    @property
    def stop_key(self) -> int:
        """The end of the keys that any query sees."""
        return self.context_len + (0 if self.kind is MaskKind.CONTEXT else self.query_len)

    @property
    def num_keys(self) -> int:
        return self.stop_key - self.first_key

    @property
    def reach(self) -> int:
        """The distance from the last query to the first key, both counted."""
        return self.context_len + self.query_len - self.first_key

    @property
    def is_fresh(self) -> bool:
        """True for a prompt's first chunk, whose keys are all the step's own."""
        return self.context_len == 0 and self.query_len > 1 and self.kind is not MaskKind.CONTEXT


def row_spans(batch: Batch, window: int | None) -> tuple[RowSpan, ...]:
    """The rows that have tokens. Positions of new tokens are never below the row's context length."""
    offsets = batch.query_offsets_host()
    return tuple(
        RowSpan(
            row,
            offsets[row],
            query_len,
            context_len,
            _first_key(context_len, window),
            batch.masks[row].kind,
        )
        for row, (query_len, context_len) in enumerate(
            zip(batch.query_lens.exact(), batch.context_lens.exact(), strict=True)
        )
        if query_len > 0
    )


def split_long(
    spans: Sequence[RowSpan], spec: AttentionSpec, *, knows_causal: bool, most: int = MAX_BIAS_ELEMENTS
) -> tuple[RowSpan, ...]:
    """Splits causal rows whose mask would be too large by query; keys of earlier queries are context for later ones.

    Only valid if the step writes its keys before it reads them. `knows_causal` says that the kernel needs no mask for a
    fresh prompt; `most` is the maximum number of elements of a mask.
    """
    cut: list[RowSpan] = []
    for span in spans:
        unmasked = knows_causal and is_plain_causal([span], spec)
        count = max(1, most // max(1, span.num_keys))
        if span.kind is not MaskKind.CAUSAL or unmasked or span.query_len <= count:
            cut.append(span)
            continue
        for start in range(0, span.query_len, count):
            context_len = span.context_len + start
            cut.append(
                replace(
                    span,
                    first_token=span.first_token + start,
                    query_len=min(count, span.query_len - start),
                    context_len=context_len,
                    first_key=_first_key(context_len, spec.window),
                )
            )
    return tuple(cut)


def _first_key(context_len: int, window: int | None) -> int:
    return 0 if window is None else max(0, context_len - window + 1)


def pack_tiles(spans: Sequence[RowSpan], max_keys: int, *, transient: bool) -> tuple[tuple[RowSpan, ...], ...]:
    """Splits rows into tiles of equal query length, mask and key source, with key counts within a factor of two."""

    def shape(span: RowSpan) -> tuple[int, str, bool, int]:
        from_step = transient or span.is_fresh
        alone = span.row if span.kind is MaskKind.TREE else -1
        return (span.query_len, span.kind.value, from_step, alone)

    def order(span: RowSpan) -> tuple[tuple[int, str, bool, int], int, int]:
        return (shape(span), span.num_keys.bit_length(), span.first_token)

    tiles: list[tuple[RowSpan, ...]] = []
    for _, members in itertools.groupby(sorted(spans, key=order), key=lambda span: order(span)[:2]):
        tile: list[RowSpan] = []
        longest = 0
        for span in members:
            longest = max(longest, span.num_keys)
            keys = (len(tile) + 1) * longest
            if tile and (keys > max_keys or keys * span.query_len > MAX_BIAS_ELEMENTS):
                tiles.append(tuple(tile))
                tile, longest = [], span.num_keys
            tile.append(span)
        tiles.append(tuple(tile))
    return tuple(tiles)


def fill_slots(tile: Sequence[RowSpan], table: PageTable, rows: Sequence[int], page_size: int, out: Tensor) -> None:
    """Fills `out` [tile rows, longest] with the slots of each row's keys, of which there is at least one.

    Beyond a row's end its last key is repeated: only the row's own written entries are gathered, so the contents of
    unused slots cannot reach a product.
    """
    longest = out.shape[1]
    device = out.device
    first = torch.tensor([span.first_key for span in tile], device=device).unsqueeze(1)
    last = torch.tensor([span.stop_key - 1 for span in tile], device=device).unsqueeze(1)
    entries = torch.minimum(first + torch.arange(longest, device=device), last)
    table_rows = torch.tensor([rows[span.row] for span in tile], device=device).unsqueeze(1).expand_as(entries)
    out.copy_(table.slots(table_rows, entries, page_size))


def needs_bias(tile: Sequence[RowSpan], spec: AttentionSpec) -> bool:
    """False if every query of the tile sees every gathered key."""
    ragged = any(span.num_keys != tile[0].num_keys for span in tile)
    within_window = spec.window is None or tile[0].reach <= spec.window
    sees_all = tile[0].query_len == 1 or tile[0].kind in (MaskKind.FULL, MaskKind.CONTEXT)
    return ragged or not within_window or not sees_all


def is_plain_causal(tile: Sequence[RowSpan], spec: AttentionSpec) -> bool:
    """True for fresh prompts under a causal mask that no window limits, which the kernel applies by itself."""
    return all(
        span.is_fresh and span.kind is MaskKind.CAUSAL and (spec.window is None or span.query_len <= spec.window)
        for span in tile
    )


def fill_bias(tile: Sequence[RowSpan], spec: AttentionSpec, batch: Batch, out: Tensor) -> None:
    """Fills `out` [tile rows, 1, query_len, longest] with 0 for visible keys and -inf otherwise."""
    device = out.device
    _, _, query_len, longest = out.shape
    context = torch.tensor([span.context_len for span in tile], device=device).view(-1, 1, 1)
    first = torch.tensor([span.first_key for span in tile], device=device).view(-1, 1, 1)
    stop = torch.tensor([span.stop_key for span in tile], device=device).view(-1, 1, 1)
    new = torch.arange(query_len, device=device).view(1, -1, 1)
    key = first + torch.arange(longest, device=device).view(1, 1, -1)
    visible = (key < stop).expand(-1, query_len, -1)
    query_position, key_position = context + new, key
    if tile[0].kind is MaskKind.CAUSAL:
        visible = visible & (key <= query_position)
    elif tile[0].kind is MaskKind.TREE:
        visible, query_position, key_position = _tree_visibility(tile[0], batch, key.view(-1), visible)
    if spec.window is not None:
        visible = visible & ((query_position - key_position).abs() < spec.window)
    out.fill_(-torch.inf).masked_fill_(visible.unsqueeze(1), 0.0)


def _tree_visibility(span: RowSpan, batch: Batch, key: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The visibility of a tree row and its positions, which follow the tree and not the token order."""
    tree = batch.masks[span.row].tree
    assert tree is not None, "a TREE mask has a tree"
    positions = batch.positions[span.first_token : span.first_token + span.query_len]
    new_key = (key - span.context_len).clamp(0, span.query_len - 1)
    is_context = key < span.context_len
    seen = torch.where(is_context, True, tree.to(key.device)[:, new_key])
    key_position = torch.where(is_context, key, positions[new_key])
    return visible & seen.unsqueeze(0), positions.view(1, -1, 1), key_position.view(1, 1, -1)
