"""Divides the queries of the extend kernel into tiles, one per program, in a table that the device computes.

A tile is some consecutive queries of one row, with all query heads that share a key head. The number of tiles depends
only on the numbers of rows and tokens: each row has at most one tile that is not full.

Owns the table and the sizes of tiles. Does not know scores, masks or caches.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.numbers import BORDER

FIELDS = 6
"""The number of fields of a tile's record, int32 each:

row                 -1 if the tile is not used
first query         of the tile, counted from the row's first new token
first token         of the row, in the step
query length        of the row
number of keys      of the row, new tokens included
first key           the page-table row, or the index of the first key if keys are contiguous
"""

_BLOCK_TILES = 64
_FEW_ROWS, _MANY_ROWS = 16, 256
"""How many rows a program reads at a time. Two sizes, because each is compiled before an engine is ready."""


@dataclass(frozen=True)
class ExtendConfig:
    """The tile sizes and compile options of the extend kernel."""

    block_m: int
    """Queries times heads of a tile: a power of two, at least 16."""
    block_n: int
    """The number of keys of a block: a power of two, at least 16."""
    num_warps: int
    num_stages: int

    def tile_heads(self, group_size: int) -> int:
        """The number of query heads of a tile: those of a key head, or as many as fit."""
        return min(group_size, self.block_m)

    def tile_tokens(self, group_size: int) -> int:
        """The number of queries of a tile."""
        return self.block_m // self.tile_heads(group_size)


def choose_config(
    dtype: torch.dtype, qk_dim: int, v_dim: int, group_size: int, longest_query: int, *, shared_bytes: int
) -> ExtendConfig:
    """A good configuration for rows of up to `longest_query` new tokens that fits in a program's shared memory.

    Few queries get small tiles. SM90's warp groups need tiles of at least 64 rows.
    """
    wanted = max(16, triton.next_power_of_2(group_size * longest_query))
    widest = max(qk_dim, v_dim)
    if dtype is torch.float32:
        # No tensor cores: operands are in registers, and a larger tile would spill them.
        config = ExtendConfig(min(wanted, 32), 16, num_warps=8 if wanted > 16 else 4, num_stages=1)
    elif wanted <= 32 or qk_dim % BORDER != 0 or v_dim % BORDER != 0:
        # Unaligned heads get no warp group (see `numbers.warps_for`), so they get tiles that need none.
        config = ExtendConfig(min(wanted, 32), 64 if widest <= 256 else 32, num_warps=4, num_stages=3)
    elif widest > 256:
        config = ExtendConfig(64, 32, num_warps=8, num_stages=3)
    elif wanted == 64 or 64 < widest <= 128:
        config = ExtendConfig(64, 64, num_warps=4, num_stages=3)
    else:
        config = ExtendConfig(128, 128 if widest <= 64 else 64, num_warps=8, num_stages=3)
    padded = sum(split_dim(qk_dim)), max(16, triton.next_power_of_2(v_dim))
    # Masks and sums take some shared memory too.
    return _fitted(config, padded[0] * dtype.itemsize, padded[1] * dtype.itemsize, shared_bytes * 15 // 16)


def _fitted(config: ExtendConfig, query_bytes: int, value_bytes: int, shared_bytes: int) -> ExtendConfig:
    """Shrinks a configuration until it fits: fewer stages, then smaller blocks, then smaller tiles."""

    def fits(config: ExtendConfig) -> bool:
        blocks = config.num_stages * config.block_n * (query_bytes + value_bytes)
        return config.block_m * query_bytes + blocks <= shared_bytes

    while not fits(config) and config.num_stages > 1:
        config = replace(config, num_stages=config.num_stages - 1)
    while not fits(config) and config.block_n > 16:
        config = replace(config, block_n=config.block_n // 2)
    while not fits(config) and config.block_m > 16:
        config = replace(config, block_m=config.block_m // 2)
    return config


def split_dim(dim: int) -> tuple[int, int]:
    """Two powers of two, the second perhaps 0, that cover `dim` with less padding than one would."""
    whole = max(16, triton.next_power_of_2(dim))
    half = whole // 2
    if half < 16 or dim == whole:
        return whole, 0
    rest = max(16, triton.next_power_of_2(dim - half))
    return (whole, 0) if half + rest >= whole else (half, rest)


def num_tiles(num_rows: int, num_tokens: int, tile_tokens: int) -> int:
    """The number of tiles that suffices for `num_rows` rows of any lengths with `num_tokens` tokens in all."""
    if tile_tokens == 1:
        return num_tokens
    return num_tokens // tile_tokens + num_rows


@dataclass(frozen=True, eq=False)
class Tiles:
    """A table of tiles, and the size of a tile."""

    records: Tensor
    """[num_tiles, FIELDS] int32, contiguous."""
    tile_tokens: int

    def __post_init__(self) -> None:
        if self.records.dtype is not torch.int32 or self.records.ndim != 2 or self.records.shape[1] != FIELDS:
            raise ValueError(
                f"expected records [num_tiles, {FIELDS}] int32, got {list(self.records.shape)} {self.records.dtype}"
            )

    def require_size(self, tile_tokens: int) -> None:
        """Raises if the tiles have another size."""
        if tile_tokens != self.tile_tokens:
            raise ValueError(f"expected tiles of {tile_tokens} tokens, got {self.tile_tokens}; prepare them so")

    def require(self, num_rows: int, num_tokens: int) -> None:
        """Raises if so many rows and tokens may need more tiles."""
        expected = num_tiles(num_rows, num_tokens, self.tile_tokens)
        if self.records.shape[0] < expected:
            raise ValueError(
                f"expected at least {expected} tiles for {num_rows} rows and {num_tokens} tokens, "
                f"got {self.records.shape[0]}"
            )


def prepare_tiles(
    query_lens: Tensor,
    context_lens: Tensor | None,
    table_rows: Tensor | None,
    num_tokens: int,
    query_offsets: Tensor,
    tiles: Tiles,
    served: Tensor | None = None,
) -> None:
    """Fills the tiles of a step, and `query_offsets` [num_rows + 1] int64, the index of each row's first token.

    query_lens, context_lens, table_rows [num_rows] int64. Without contexts and page-table rows the step is transient: a
    row's keys are its own new tokens. `served` [num_rows] int8 is 1 for the rows that get tiles; by default all do.
    """
    if (context_lens is None) != (table_rows is None):
        raise ValueError("expected contexts and page-table rows together, or neither, got one of them")
    num_rows = query_lens.shape[0]
    tiles.require(num_rows, num_tokens)
    _launch(query_lens, context_lens, table_rows, query_offsets, served, tiles, num_rows, is_ragged=False)


def prepare_ragged_tiles(query_offsets: Tensor, key_offsets: Tensor, num_tokens: int, tiles: Tiles) -> None:
    """Fills the tiles for contiguous queries and keys, row after row.

    query_offsets, key_offsets [num_rows + 1], of one integer dtype: the starts of each row's queries and keys, and the
    end of the last.
    """
    num_rows = query_offsets.shape[0] - 1
    tiles.require(num_rows, num_tokens)
    _launch(query_offsets, key_offsets, None, None, None, tiles, num_rows, is_ragged=True)


def _launch(
    queries: Tensor,
    keys: Tensor | None,
    table_rows: Tensor | None,
    query_offsets: Tensor | None,
    served: Tensor | None,
    tiles: Tiles,
    num_rows: int,
    *,
    is_ragged: bool,
) -> None:
    count = tiles.records.shape[0]
    if count == 0:
        return
    _prepare_tiles[(triton.cdiv(count, _BLOCK_TILES),)](
        queries,
        keys,
        table_rows,
        query_offsets,
        served,
        tiles.records,
        num_rows,
        count,
        tiles.tile_tokens,
        FIELDS=FIELDS,
        IS_RAGGED=is_ragged,
        IS_PAGED=table_rows is not None,
        SOME=served is not None,
        BLOCK_ROWS=_FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS,
        BLOCK_TILES=_BLOCK_TILES,
        num_warps=4,
    )


@triton.jit
def _length(lengths: tl.tensor, row: tl.tensor, is_row: tl.tensor, IS_RAGGED: tl.constexpr) -> tl.tensor:
    """The lengths of rows: as given, or as differences of offsets."""
    length = tl.load(lengths + row, mask=is_row, other=0)
    if IS_RAGGED:
        length = tl.load(lengths + row + 1, mask=is_row, other=0) - length
    return length.to(tl.int32)


@triton.jit(
    do_not_specialize=["num_rows", "num_tiles", "tile_tokens"],
    do_not_specialize_on_alignment=["queries", "keys", "table_rows", "served"],
)
def _prepare_tiles(
    queries: tl.tensor,
    keys: tl.tensor,
    table_rows: tl.tensor,
    query_offsets: tl.tensor,
    served: tl.tensor,
    records: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    tile_tokens: tl.tensor,
    FIELDS: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    IS_PAGED: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
) -> None:
    """A program computes the records of some tiles from all rows. The first program also writes the offsets."""
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    row = tl.zeros([BLOCK_TILES], tl.int32)
    first_tile = tl.zeros([BLOCK_TILES], tl.int32)
    first_token = tl.zeros([BLOCK_TILES], tl.int32)
    num_tokens_before = 0
    num_tiles_before = 0
    for start in range(0, num_rows, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        is_row = rows < num_rows
        lens = _length(queries, rows, is_row, IS_RAGGED)
        counts = (lens + tile_tokens - 1) // tile_tokens
        if SOME:
            counts *= tl.load(served + rows, mask=is_row, other=0).to(tl.int32)
        token_stops = num_tokens_before + tl.cumsum(lens, 0)
        tile_stops = num_tiles_before + tl.cumsum(counts, 0)
        if not IS_RAGGED and tl.program_id(0) == 0:
            tl.store(query_offsets + 1 + rows, token_stops.to(tl.int64), mask=is_row)
        is_before = (tile_stops[None, :] <= tile[:, None]) & is_row[None, :]
        row += tl.sum(is_before.to(tl.int32), 1)
        first_tile += tl.sum(tl.where(is_before, counts[None, :], 0), 1)
        first_token += tl.sum(tl.where(is_before, lens[None, :], 0), 1)
        num_tokens_before += tl.sum(lens, 0)
        num_tiles_before += tl.sum(counts, 0)
    if not IS_RAGGED and tl.program_id(0) == 0:
        tl.store(query_offsets, tl.zeros([], tl.int64))
    is_used = row < num_rows
    query_len = _length(queries, row, is_used, IS_RAGGED)
    # A row's last queries come first: with a causal mask they see the most keys, and no long tile should start last.
    last = (query_len + tile_tokens - 1) // tile_tokens - 1
    first_query = (last - (tile - first_tile)) * tile_tokens
    if IS_RAGGED:
        num_keys = _length(keys, row, is_used, IS_RAGGED)
        first_key = tl.load(keys + row, mask=is_used, other=0).to(tl.int32)
        first_token = tl.load(queries + row, mask=is_used, other=0).to(tl.int32)
    elif IS_PAGED:
        num_keys = query_len + _length(keys, row, is_used, IS_RAGGED)
        first_key = tl.load(table_rows + row, mask=is_used, other=0).to(tl.int32)
    else:
        num_keys = query_len
        first_key = first_token
    record = records + tile * FIELDS
    exists = tile < num_tiles
    tl.store(record, tl.where(is_used, row, -1), mask=exists)
    tl.store(record + 1, first_query, mask=exists)
    tl.store(record + 2, first_token, mask=exists)
    tl.store(record + 3, query_len, mask=exists)
    tl.store(record + 4, num_keys, mask=exists)
    tl.store(record + 5, first_key, mask=exists)
