"""Scores of an indexer over paged keys, and the keys themselves: one launch that writes, and one that scores.

    score(query, key) = sum over heads h of weight[h] * max(0, query[h] . key)

A program scores a run of key blocks for the queries of one tile (`extend_tiles`): the product [keys, heads] of a block
needs no exchange between warps to be summed over heads, and 8-bit keys are converted in registers. Every key is read
once per tile and every score written once, so the floor is the bytes of the keys: 256 a token in bf16 and 132 in 8 bits
for 128 dimensions. Launches depend on the most keys that a row may have, never on a row's length: programs without keys
return at once. Does not know plans, nor what is chosen.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.decode_shares import block_places, entries_of
from sightline.kernels.triton.extend_tiles import FIELDS, Tiles
from sightline.kernels.triton.numbers import as_stored, product, stored_view, warps_for
from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

LEAST_SCALE = tl.constexpr(2.0**-100)
"""Scale of a key of zeros."""
MOST_QUERIES = 4
"""The most queries of a tile; 2 with 64 heads. Several tiles of a prompt read the same keys, mostly from the
second-level cache. By calculation, these reads take less time than the products. Not measured."""
_BLOCK_QUERIES = 256
"""How many queries of tiles a program lists."""
_RUN = 32
"""Most blocks of keys per program."""


@dataclass(frozen=True, eq=False)
class IndexKeys:
    """The keys of one layer."""

    codes: Tensor
    """[num_slots, head_dim]."""
    scales: Tensor | None
    """[num_slots, 1] fp32 if codes are e4m3; None if they are the keys themselves."""
    pages: Tensor | None
    """[num_table_rows, max_pages] int64; None if the keys are those of the step, row after row."""
    page_size: int
    """Keys of a page."""
    ratio: int = 1
    """Tokens per key. A query sees the keys of which it has seen all tokens."""
    apart: int = 1
    """Pages that the tokens of a key fill, of which the last has the key."""


@dataclass(frozen=True)
class ScoreConfig:
    """The sizes of a program of the score kernel."""

    queries: int
    """Queries of a tile."""
    block: int
    """Keys of a block."""
    num_warps: int
    num_stages: int


def choose_score_config(
    dtype: torch.dtype, num_heads: int, head_dim: int, longest_query: int, *, shared_bytes: int
) -> ScoreConfig:
    """A good configuration for rows of up to `longest_query` new tokens."""
    heads, dims = _padded(num_heads), _padded(head_dim)
    if dtype is torch.float32:
        # No tensor cores: the operands of the product are in registers.
        return ScoreConfig(1, 16, 4, 1)
    queries = min(MOST_QUERIES, triton.next_power_of_2(longest_query))
    # More columns would spill registers. With this many, the products already take longer than reading the keys.
    while queries > 1 and queries * heads > 128:
        queries //= 2
    columns = queries * heads
    # With one query, half of the keys at a time and more of them on their way: a tenth to a fifth faster on an H200.
    block = max(16, min(64 if queries == 1 else 128, (1 << 15) // columns))
    room = shared_bytes * 15 // 16 - columns * dims * dtype.itemsize
    while block > 16 and block * dims * dtype.itemsize > room:
        block //= 2
    stages = max(1, min(6, room // (block * dims * dtype.itemsize)))
    return ScoreConfig(queries, block, 4 if block * columns <= 1 << 13 else 8, stages)


def write_index_keys(
    key: Tensor, codes: Tensor, scales: Tensor | None, slots: Tensor, *, overlaps: bool = False
) -> None:
    """Writes `key` [n, head_dim] to `codes` [num_slots, head_dim] at `slots` [n] int64.

    e4m3 codes have `scales` [num_slots, 1] fp32: the least power of two at which the largest number of a key fits.
    """
    num_tokens, head_dim = key.shape
    if num_tokens == 0:
        return
    is_fp8 = codes.dtype is torch.float8_e4m3fn
    if is_fp8 != (scales is not None):
        given = "without" if scales is None else "with"
        raise ValueError(f"expected scales exactly for float8_e4m3fn keys, got {codes.dtype} {given} scales")
    dims = triton.next_power_of_2(head_dim)
    block = max(1, 1024 // dims)
    _write_index_keys[(triton.cdiv(num_tokens, block),)](
        key, stored_view(codes), scales, slots, num_tokens,
        key.stride(0), codes.stride(0), 0 if scales is None else scales.stride(0),
        HEAD_DIM=head_dim, DIMS=dims, BLOCK=block, FP8=is_fp8, num_warps=4, **overlap_settings(overlaps),
    )  # fmt: skip


def list_queries(tiles: Tiles, tokens: Tensor, counts: Tensor, ratio: int = 1) -> None:
    """Writes what each query of each tile is: its `tokens` [num_tiles * tile_tokens] int32 in the step, -1 if there is
    none, and its `counts`, how many keys of `ratio` tokens it sees under a causal mask."""
    queries = tiles.records.shape[0] * tiles.tile_tokens
    if queries == 0:
        return
    _list_queries[(triton.cdiv(queries, _BLOCK_QUERIES),)](
        tiles.records, tokens, counts, queries, tiles.tile_tokens,
        FIELDS=FIELDS, RATIO=ratio, BLOCK=_BLOCK_QUERIES, num_warps=4,
    )  # fmt: skip


def score_keys(
    q: Tensor,
    weights: Tensor,
    keys: IndexKeys,
    tiles: Tiles,
    part: slice,
    most_keys: int,
    scores: Tensor,
    config: ScoreConfig,
    *,
    multiprocessors: int,
    overlaps: bool = False,
) -> None:
    """Writes `scores` [queries of the tiles, most_keys] fp32 for the tiles of `part`, as far as their queries see.

    q [num_tokens, heads, head_dim] and weights [num_tokens, heads] are those of the step. `most_keys` is the most keys
    that a row may have. What a query does not see is neither read nor written.
    """
    num_tiles, (_, num_heads, head_dim) = part.stop - part.start, q.shape
    if num_tiles == 0:
        return
    tiles.require_size(config.queries)
    blocks = triton.cdiv(most_keys, config.block)
    run = max(1, min(_RUN, num_tiles * blocks // (2 * multiprocessors)))
    pages = keys.pages
    _score_keys[(triton.cdiv(blocks, run), num_tiles)](
        q, weights, keys.codes, keys.scales, pages, tiles.records, scores, part.start, run * config.block,
        q.stride(0), q.stride(1), weights.stride(0), weights.stride(1),
        keys.codes.stride(0), 0 if keys.scales is None else keys.scales.stride(0),
        0 if pages is None else pages.stride(0), scores.stride(0),
        NUM_HEADS=num_heads, HEADS=_padded(num_heads), HEAD_DIM=head_dim, DIMS=_padded(head_dim),
        QUERIES=config.queries, PAGE_SIZE=keys.page_size, RATIO=keys.ratio, APART=keys.apart, BLOCK=config.block,
        STAGES=config.num_stages,
        FIELDS=FIELDS, FP8=keys.scales is not None, PAGED=pages is not None,
        INTERPRETED=q.device.type == "cpu",
        num_warps=warps_for(config.num_warps, config.block, keys.codes, q), **overlap_settings(overlaps),
    )  # fmt: skip


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _write_index_keys(
    key, codes, scales, slots, num_tokens, key_token, slot_stride, scale_stride,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program writes the keys of some tokens."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIMS)
    is_token = token < num_tokens
    inside = is_token[:, None] & (dim < HEAD_DIM)[None, :]
    slot = tl.load(slots + token, mask=is_token, other=0)
    new = tl.load(key + (token * key_token)[:, None] + dim[None, :], mask=inside, other=0.0)
    by = 1.0
    if FP8:
        # NaN has a code of its own at any scale.
        new = new.to(tl.float32)
        sizes = tl.where(new == new, tl.abs(new), 0.0)
        # 448 is the largest e4m3 number. Adding all bits of the mantissa rounds up to a power of two.
        least = tl.maximum(tl.div_rn(tl.max(sizes, 1), 448.0), LEAST_SCALE)
        power = (least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        power = power.to(tl.float32, bitcast=True)
        tl.store(scales + slot * scale_stride, power, mask=is_token)
        by = power[:, None] + tl.zeros([BLOCK, DIMS], tl.float32)
    _, kept = as_stored(new, by, codes.dtype.element_ty, FP8)
    tl.store(codes + (slot * slot_stride)[:, None] + dim[None, :], kept, mask=inside)


@triton.jit(do_not_specialize=["num_queries", "tile_tokens"])
def _list_queries(
    records, tokens, counts, num_queries, tile_tokens, FIELDS: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program lists some queries."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < num_queries
    record = records + index // tile_tokens * FIELDS
    row = tl.load(record, mask=exists, other=-1)
    query = tl.load(record + 1, mask=exists, other=0) + index % tile_tokens
    first_token = tl.load(record + 2, mask=exists, other=0)
    query_len = tl.load(record + 3, mask=exists, other=0)
    num_keys = tl.load(record + 4, mask=exists, other=0)
    is_query = (row >= 0) & (query < query_len)
    tl.store(tokens + index, tl.where(is_query, first_token + query, -1), mask=exists)
    tl.store(counts + index, tl.where(is_query, (num_keys - query_len + query + 1) // RATIO, 0), mask=exists)


@triton.jit(do_not_specialize=["first_tile"])
def _score_keys(
    q, weights, codes, scales, pages, records, scores, first_tile, run_keys,
    q_token, q_head, weights_token, weights_head, slot_stride, scale_stride, max_pages, scores_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    QUERIES: tl.constexpr, PAGE_SIZE: tl.constexpr, RATIO: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, FIELDS: tl.constexpr, FP8: tl.constexpr, PAGED: tl.constexpr, INTERPRETED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program scores a run of keys for the queries of a tile."""
    wait_for_previous(OVERLAPS)
    tile = tl.program_id(1)
    record = records + (first_tile + tile) * FIELDS
    row, first_query, first_token = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    query_len, num_keys, place = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    context = num_keys - query_len
    seen = (context + tl.minimum(first_query + QUERIES, query_len)) // RATIO
    begin = tl.program_id(0) * run_keys
    if (row < 0) | (begin >= seen):
        return
    column = tl.arange(0, QUERIES * HEADS)
    query, head = first_query + column // HEADS, column % HEADS
    in_columns = (query < query_len) & (head < NUM_HEADS)
    token = (first_token + query).to(tl.int64)
    dim, in_block = tl.arange(0, DIMS), tl.arange(0, BLOCK)
    queries = tl.load(
        q + (token * q_token + head * q_head)[:, None] + dim[None, :],
        mask=in_columns[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    factors = tl.load(weights + token * weights_token + head * weights_head, mask=in_columns, other=0.0)
    factors = factors.to(tl.float32)
    if FP8 and not INTERPRETED and queries.dtype == tl.bfloat16:
        # A GPU converts e4m3 to fp16 in one instruction, to bf16 in several. Powers of two bring queries into range.
        largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        queries = (queries.to(tl.float32) * inverse[:, None]).to(tl.float16)
        factors *= (exponent << 23).to(tl.float32, bitcast=True)
    in_tile = tl.arange(0, QUERIES)
    target = scores + (tile * QUERIES + in_tile).to(tl.int64)[None, :] * scores_stride
    limits = tl.where(first_query + in_tile < query_len, (context + first_query + in_tile + 1) // RATIO, 0)
    for start in tl.range(begin, tl.minimum(begin + run_keys, seen), BLOCK, num_stages=STAGES):
        # Keys that are not seen are never read: a seen key is read instead and its score dropped.
        key = start + in_block
        read = tl.minimum(key, seen - 1)
        if PAGED:
            table = pages + place.to(tl.int64) * max_pages
            first, slots = block_places(table, start, read, 1, PAGE_SIZE, BLOCK, APART)
        else:
            first, slots = place.to(tl.int64), read
        keys = entries_of(codes + first * slot_stride, slots * slot_stride, dim, HEAD_DIM, DIMS)
        none = tl.zeros([BLOCK, QUERIES * HEADS], tl.float32)
        products = product(keys.to(queries.dtype), tl.trans(queries), none, INTERPRETED)
        weighed = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * factors[None, :]
        if NUM_HEADS < HEADS:
            # Padding heads have no products, whatever a key holds.
            weighed = tl.where((head < NUM_HEADS)[None, :], weighed, 0.0)
        found = tl.sum(tl.reshape(weighed, (BLOCK, QUERIES, HEADS)), 2)
        if FP8:
            found *= tl.load(scales + (first + slots) * scale_stride)[:, None]
        tl.store(target + key[:, None], found, mask=key[:, None] < limits[None, :])
