"""The extend kernel: a program attends with a tile of a row's queries to the row's keys, block by block.

    |------ context ------|-- new --|   a row's keys
                          |---------|   its queries; a tile is some consecutive ones times the heads of a key head

Blocks that all queries of a tile see completely need no mask. Blocks at the window's edge come before them, blocks at
the diagonal and at the row's end after them. `extend_tiles` makes the records that say which tile a program computes.
"""

import triton
import triton.language as tl

from sightline.kernels.triton.numbers import product

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_CAUSAL = tl.constexpr(0)
_FULL = tl.constexpr(1)
_TREE = tl.constexpr(2)
_BY_ROW = tl.constexpr(3)
_CONTEXT = tl.constexpr(4)


@triton.jit
def _load_pages(
    pages: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    page_size: tl.tensor,
    BLOCK_N: tl.constexpr,
    IN_ONE_PAGE: tl.constexpr,
    IS_PAGED: tl.constexpr,
) -> tl.tensor:
    """The page of a block's keys if one page holds them all, otherwise one per key; nothing is read from `stop` on."""
    if not IS_PAGED:
        page = start
    elif IN_ONE_PAGE:
        page = tl.load(pages + start // page_size, mask=start < stop, other=0)
    else:
        key = start + tl.arange(0, BLOCK_N)
        page = tl.load(pages + key // page_size, mask=key < stop, other=0)
    return page


@triton.jit
def _block_slots(
    page: tl.tensor,
    first_key: tl.tensor,
    start: tl.tensor,
    page_size: tl.tensor,
    BLOCK_N: tl.constexpr,
    IN_ONE_PAGE: tl.constexpr,
    IS_PAGED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The slots of a block's entries: one int64 slot, and each entry's distance from it."""
    distance = tl.arange(0, BLOCK_N)
    if not IS_PAGED:
        slot = (first_key + start).to(tl.int64)
    elif IN_ONE_PAGE:
        slot = page * page_size + start % page_size
    else:
        slot = tl.zeros([], tl.int64)
        distance = page * page_size + (start + distance) % page_size
    return slot, distance


@triton.jit
def _load_block(
    plane: tl.tensor,
    slot: tl.tensor,
    distance: tl.tensor,
    slot_stride: tl.tensor,
    is_seen: tl.tensor,
    FIRST_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    """Loads [BLOCK_N, BLOCK_DIM], with zeros for slots that are not seen and beyond the dimension."""
    dim = FIRST_DIM + tl.arange(0, BLOCK_DIM)
    at = plane + slot * slot_stride + (distance[:, None] * slot_stride + dim[None, :])
    if IS_MASKED:
        block = tl.load(at, mask=is_seen[:, None] & (dim < DIM)[None, :], other=0.0)
    elif FIRST_DIM + BLOCK_DIM > DIM:
        block = tl.load(at, mask=(dim < DIM)[None, :], other=0.0)
    else:
        block = tl.load(at)
    return block


@triton.jit
def _visible(
    key: tl.tensor,
    last_seen: tl.tensor,
    position: tl.tensor,
    tree: tl.tensor,
    new_positions: tl.tensor,
    tree_start: tl.tensor,
    num_keys: tl.tensor,
    window: tl.tensor,
    HAS_TREES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """The keys that each query sees, [BLOCK_M, BLOCK_N]. `tree` points to each query's line of its row's tree."""
    visible = key[None, :] <= last_seen[:, None]
    key_position = key
    if HAS_TREES:
        in_tree = (key >= tree_start) & (key < num_keys)
        new = key - tree_start
        seen = tl.load(tree[:, None] + new[None, :], mask=in_tree[None, :] & (position >= 0)[:, None], other=0)
        visible = visible & (~in_tree[None, :] | (seen != 0))
        key_position = tl.where(in_tree, tl.load(new_positions + new, mask=in_tree, other=0).to(tl.int32), key)
    if HAS_WINDOW:
        visible = visible & (tl.abs(position[:, None] - key_position[None, :]) < window)
    return visible


@triton.jit
def _attend_blocks(
    found: tl.tensor,
    total: tl.tensor,
    largest: tl.tensor,
    q: tl.tensor,
    q_rest: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    first_key: tl.tensor,
    start_block: tl.tensor,
    stop_block: tl.tensor,
    first_seen: tl.tensor,
    stop_seen: tl.tensor,
    last_seen: tl.tensor,
    position: tl.tensor,
    tree: tl.tensor,
    new_positions: tl.tensor,
    tree_start: tl.tensor,
    num_keys: tl.tensor,
    window: tl.tensor,
    softcap_scale: tl.tensor,
    factor: tl.tensor,
    keys_slot_stride: tl.tensor,
    values_slot_stride: tl.tensor,
    page_size: tl.tensor,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    IN_ONE_PAGE: tl.constexpr,
    HAS_TREES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_PAGED: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attends to some blocks of keys. Returns the updated weighted values [BLOCK_M, BLOCK_V], total of the weights and
    largest score to the base 2, both [BLOCK_M]."""
    # A block's pages are loaded one block ahead, so that the loads of its entries do not wait for them.
    page = _load_pages(pages, start_block, stop_seen, page_size, BLOCK_N, IN_ONE_PAGE, IS_PAGED)
    for start in range(start_block, stop_block, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_seen = (key >= first_seen) & (key < stop_seen)
        slot, distance = _block_slots(page, first_key, start, page_size, BLOCK_N, IN_ONE_PAGE, IS_PAGED)
        page = _load_pages(pages, start + BLOCK_N, stop_seen, page_size, BLOCK_N, IN_ONE_PAGE, IS_PAGED)
        k = _load_block(keys, slot, distance, keys_slot_stride, is_seen, 0, QK_DIM, BLOCK_QK, IS_MASKED)
        score = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
        score = product(q, tl.trans(k.to(q.dtype)), score, IS_INTERPRETED)
        if BLOCK_REST > 0:
            k_rest = _load_block(
                keys, slot, distance, keys_slot_stride, is_seen, BLOCK_QK, QK_DIM, BLOCK_REST, IS_MASKED
            )
            score = product(q_rest, tl.trans(k_rest.to(q.dtype)), score, IS_INTERPRETED)
        if HAS_SOFTCAP:
            score = 1.0 - 2.0 / (tl.exp2(score * softcap_scale) + 1.0)  # tanh
        if IS_MASKED:
            visible = _visible(
                key, last_seen, position, tree, new_positions, tree_start, num_keys, window, HAS_TREES, HAS_WINDOW
            )
            score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(largest, tl.max(score, 1) * factor)
        base = higher
        if IS_MASKED:
            # For a query that has seen nothing yet, -inf minus itself would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * factor - base[:, None])
        fade = tl.exp2(largest - base)
        v = _load_block(values, slot, distance, values_slot_stride, is_seen, 0, V_DIM, BLOCK_V, IS_MASKED)
        total = total * fade + tl.sum(weight, 1)
        found = product(weight.to(q.dtype), v.to(q.dtype), found * fade[:, None], IS_INTERPRETED)
        largest = higher
    return found, total, largest


@triton.jit
def _load_queries(
    at: tl.tensor,
    is_query: tl.tensor,
    FIRST_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Loads [BLOCK_M, BLOCK_DIM], with zeros where there is no query and beyond the dimension."""
    dim = FIRST_DIM + tl.arange(0, BLOCK_DIM)[None, :]
    return tl.load(at[:, None] + dim, mask=is_query[:, None] & (dim < DIM), other=0.0)


@triton.jit
def _bounds(
    kind: tl.tensor,
    first_position: tl.tensor,
    last_position: tl.tensor,
    context_len: tl.tensor,
    num_keys: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Bounds of keys: the first that any query of the tile sees, the first and the end of those that all see, and the
    end of those that any sees."""
    first_seen = tl.zeros([], tl.int32)
    first_shared = tl.zeros([], tl.int32)
    stop_seen = num_keys
    stop_shared = num_keys
    if HAS_WINDOW:
        first_seen = tl.maximum(first_position - window + 1, 0)
        first_shared = tl.maximum(last_position - window + 1, 0)
        if kind == _TREE:
            # New tokens of a tree are not in the order of their positions.
            first_seen = tl.minimum(first_seen, context_len)
        else:
            stop_seen = tl.minimum(num_keys, last_position + window)
            stop_shared = tl.minimum(num_keys, first_position + window)
    if kind == _CAUSAL:
        stop_seen = tl.minimum(stop_seen, last_position + 1)
        stop_shared = tl.minimum(stop_shared, first_position + 1)
    elif kind == _TREE:
        stop_shared = context_len
    elif kind == _CONTEXT:
        stop_seen = tl.minimum(stop_seen, context_len)
        stop_shared = tl.minimum(stop_shared, context_len)
    return first_seen, first_shared, tl.maximum(stop_shared, 0), stop_seen


@triton.jit
def _factors(
    scale: tl.tensor, softcap: tl.tensor, k_scale: tl.tensor, HAS_SOFTCAP: tl.constexpr, IS_FP8: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The factor that makes a product, or tanh, a score to the base 2; and for a softcap, the factor that makes a
    product twice tanh's argument, to the base 2."""
    factor = scale * _LOG2_E
    softcap_scale = factor
    if IS_FP8:
        factor = factor * tl.load(k_scale)
    if HAS_SOFTCAP:
        softcap_scale = 2.0 * factor / softcap
        factor = softcap * _LOG2_E
    return factor, softcap_scale


@triton.jit(
    do_not_specialize=["window", "page_size", "num_kv_heads", "group_size", "tile_heads", "tile_tokens", "head_blocks"]
)
def extend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    records: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    row_kinds: tl.tensor,
    trees: tl.tensor,
    tree_offsets: tl.tensor,
    positions: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    page_size: tl.tensor,
    num_kv_heads: tl.tensor,
    group_size: tl.tensor,
    tile_heads: tl.tensor,
    tile_tokens: tl.tensor,
    head_blocks: tl.tensor,
    pages_row_stride: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    keys_slot_stride: tl.tensor,
    keys_head_stride: tl.tensor,
    values_slot_stride: tl.tensor,
    values_head_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    lse_token_stride: tl.tensor,
    lse_head_stride: tl.tensor,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    IN_ONE_PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_TREES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    IS_PAGED: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """A program computes a tile of one key head. Heads are the inner index, so that the longest tiles start first."""
    program = tl.program_id(0)
    record = records + (program // (num_kv_heads * head_blocks)) * FIELDS
    row = tl.load(record)
    if row < 0:
        return
    first_query = tl.load(record + 1)
    first_token = tl.load(record + 2)
    query_len = tl.load(record + 3)
    num_keys = tl.load(record + 4)
    first_key = tl.load(record + 5)
    context_len = num_keys - query_len
    kv_head = (program % (num_kv_heads * head_blocks) // head_blocks).to(tl.int64)

    # The rows of the product: the heads of one query, then those of the next.
    lane = tl.arange(0, BLOCK_M)
    query = first_query + lane // tile_heads
    group_head = program % head_blocks * tile_heads + lane % tile_heads
    is_query = (lane < tile_tokens * tile_heads) & (query < query_len) & (group_head < group_size)
    q_head = (kv_head * group_size + group_head).to(tl.int64)
    token = (first_token + query).to(tl.int64)
    q_at = q + token * q_token_stride + q_head * q_head_stride
    tile_q = _load_queries(q_at, is_query, 0, QK_DIM, BLOCK_QK)
    tile_q_rest = tile_q
    if BLOCK_REST > 0:
        tile_q_rest = _load_queries(q_at, is_query, BLOCK_QK, QK_DIM, BLOCK_REST)

    kind = MASK_KIND
    if MASK_KIND == _BY_ROW:
        kind = tl.load(row_kinds + row).to(tl.int32)
    position = context_len + query
    last_seen = tl.where(kind == _CAUSAL, position, tl.where(kind == _CONTEXT, context_len, num_keys) - 1)
    first_position = context_len + first_query
    last_position = tl.minimum(first_position + tile_tokens, num_keys) - 1
    tree = trees
    new_positions = positions
    tree_start = num_keys
    if HAS_TREES:
        tree = trees + tl.load(tree_offsets + row) + query * query_len
        new_positions = positions + first_token
        if kind == _TREE:
            tree_start = context_len
            position = tl.load(positions + token, mask=is_query, other=-1).to(tl.int32)
            first_position = tl.min(tl.where(is_query, position, 2147483647), 0)
            last_position = tl.max(position, 0)
    first_seen, first_shared, stop_shared, stop_seen = _bounds(
        kind, first_position, last_position, context_len, num_keys, window, HAS_WINDOW
    )
    factor, softcap_scale = _factors(scale, softcap, k_scale, HAS_SOFTCAP, IS_FP8)
    if IS_PAGED:
        pages += first_key.to(tl.int64) * pages_row_stride
    keys += kv_head * keys_head_stride
    values += kv_head * values_head_stride

    found = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    first_block = first_seen // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        window_stop = tl.maximum(tl.cdiv(tl.minimum(first_shared, stop_seen), BLOCK_N) * BLOCK_N, first_block)
        found, total, largest = _attend_blocks(
            found, total, largest, tile_q, tile_q_rest, keys, values, pages, first_key, first_block, window_stop,
            first_seen, stop_seen, last_seen, position, tree, new_positions, tree_start, num_keys, window,
            softcap_scale, factor, keys_slot_stride, values_slot_stride, page_size, QK_DIM, V_DIM, IN_ONE_PAGE,
            HAS_TREES, HAS_WINDOW, HAS_SOFTCAP, IS_PAGED, IS_INTERPRETED, BLOCK_N, BLOCK_QK, BLOCK_REST, BLOCK_V,
            IS_MASKED=True,
        )  # fmt: skip
        first_block = window_stop
    shared_stop = tl.maximum(stop_shared // BLOCK_N * BLOCK_N, first_block)
    found, total, largest = _attend_blocks(
        found, total, largest, tile_q, tile_q_rest, keys, values, pages, first_key, first_block, shared_stop,
        first_seen, stop_seen, last_seen, position, tree, new_positions, tree_start, num_keys, window,
        softcap_scale, factor, keys_slot_stride, values_slot_stride, page_size, QK_DIM, V_DIM, IN_ONE_PAGE,
        HAS_TREES, HAS_WINDOW, HAS_SOFTCAP, IS_PAGED, IS_INTERPRETED, BLOCK_N, BLOCK_QK, BLOCK_REST, BLOCK_V,
        IS_MASKED=False,
    )  # fmt: skip
    first_block = shared_stop
    found, total, largest = _attend_blocks(
        found, total, largest, tile_q, tile_q_rest, keys, values, pages, first_key, first_block, stop_seen,
        first_seen, stop_seen, last_seen, position, tree, new_positions, tree_start, num_keys, window,
        softcap_scale, factor, keys_slot_stride, values_slot_stride, page_size, QK_DIM, V_DIM, IN_ONE_PAGE,
        HAS_TREES, HAS_WINDOW, HAS_SOFTCAP, IS_PAGED, IS_INTERPRETED, BLOCK_N, BLOCK_QK, BLOCK_REST, BLOCK_V,
        IS_MASKED=True,
    )  # fmt: skip

    if HAS_SINKS:
        sink = tl.load(sinks + q_head, mask=is_query, other=0.0).to(tl.float32) * _LOG2_E
        higher = tl.maximum(largest, sink)
        # If the sink is -inf and nothing was seen, -inf minus itself would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(largest - base)
        total = total * fade + tl.exp2(sink - base)
        found = found * fade[:, None]
        largest = higher
    # If the total is 0, the query saw nothing and `largest` is -inf.
    total = tl.where(total == 0.0, 1.0, total)
    share = 1.0 / total
    if IS_FP8:
        share = share * tl.load(v_scale)
    dim = tl.arange(0, BLOCK_V)[None, :]
    out_at = out + (token * out_token_stride + q_head * out_head_stride)[:, None] + dim
    tl.store(out_at, (found * share[:, None]).to(out.dtype.element_ty), mask=is_query[:, None] & (dim < V_DIM))
    if HAS_LSE:
        lse_at = lse + token * lse_token_stride + q_head * lse_head_stride
        tl.store(lse_at, (largest + tl.log2(total)) * _LN_2, mask=is_query)
