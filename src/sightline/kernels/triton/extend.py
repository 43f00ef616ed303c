"""Attention for rows with any number of new tokens: over pages, over the step's own keys, or over contiguous keys.

Launches the kernel in `extend_kernel`. `extend_tiles` divides the work, `extend_rules` says what a query sees. Does not
know batches or plans.
"""

import torch
import triton
from torch import Tensor

from sightline.kernels.triton.extend_kernel import extend_kernel
from sightline.kernels.triton.extend_rules import ExtendMasks, ScoreRule
from sightline.kernels.triton.extend_tiles import FIELDS, ExtendConfig, Tiles, split_dim
from sightline.kernels.triton.numbers import warps_for


def extend_paged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    page_size: int,
    tiles: Tiles,
    out: Tensor,
    *,
    rule: ScoreRule,
    masks: ExtendMasks,
    config: ExtendConfig,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Attends to entries in pages. The new tokens' entries must already be written.

    q [num_tokens, q_heads, qk_dim], keys [num_slots, kv_heads, qk_dim], values [num_slots, kv_heads, v_dim], pages
    [num_table_rows, max_pages] int64, out [num_tokens, q_heads, v_dim]: the last dimension of each is contiguous. sinks
    [q_heads]. lse [num_tokens, q_heads] fp32 is optional. float8_e4m3fn entries need one fp32 scale each for keys and
    values, on the device. `tiles` come from `prepare_tiles` with page-table rows. Outputs of padding tokens are not
    written.
    """
    is_fp8 = keys.dtype is torch.float8_e4m3fn
    if (k_scale is not None) != is_fp8 or (v_scale is not None) != is_fp8:
        raise ValueError(f"expected scales exactly for float8_e4m3fn entries, got {keys.dtype}; give both or neither")
    _launch(q, keys, values, pages, page_size, tiles, out, rule, masks, config, sinks, lse, k_scale, v_scale)


def extend_contiguous(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    out: Tensor,
    *,
    rule: ScoreRule,
    masks: ExtendMasks,
    config: ExtendConfig,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Attends to contiguous keys k [num_keys, kv_heads, qk_dim] and values v [num_keys, kv_heads, v_dim].

    `tiles` come from `prepare_tiles` without page-table rows if the keys are the step's own, otherwise from
    `prepare_ragged_tiles`. The rest is as in `extend_paged`.
    """
    _launch(q, k, v, None, 1, tiles, out, rule, masks, config, sinks, lse, None, None)


def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor | None,
    page_size: int,
    tiles: Tiles,
    out: Tensor,
    rule: ScoreRule,
    masks: ExtendMasks,
    config: ExtendConfig,
    sinks: Tensor | None,
    lse: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    num_q_heads, qk_dim = q.shape[1:]
    num_kv_heads, v_dim = values.shape[1:]
    group_size = num_q_heads // num_kv_heads
    tile_heads, tile_tokens = config.tile_heads(group_size), config.tile_tokens(group_size)
    tiles.require_size(tile_tokens)
    head_blocks = triton.cdiv(group_size, tile_heads)
    if tiles.records.shape[0] == 0:
        return
    block_qk, block_rest = split_dim(qk_dim)
    numbers = (rule.scale, rule.softcap or 0.0, rule.window or 0, page_size)
    counts = (num_kv_heads, group_size, tile_heads, tile_tokens, head_blocks)
    strides = (stride for each in (q, keys, values, out) for stride in each.stride()[:2])
    tensors = (q, keys, values, pages, tiles.records, out, lse, sinks, k_scale, v_scale)
    extend_kernel[(tiles.records.shape[0] * num_kv_heads * head_blocks,)](
        *tensors,
        *(masks.row_kinds, masks.trees, masks.tree_offsets, masks.positions),
        *numbers,
        *counts,
        0 if pages is None else pages.stride(0),
        *strides,
        *((0, 0) if lse is None else lse.stride()),
        QK_DIM=qk_dim,
        V_DIM=v_dim,
        IN_ONE_PAGE=page_size % config.block_n == 0,
        FIELDS=FIELDS,
        MASK_KIND=int(masks.kind),
        HAS_TREES=masks.trees is not None,
        HAS_WINDOW=rule.window is not None,
        HAS_SOFTCAP=rule.softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        IS_PAGED=pages is not None,
        IS_FP8=k_scale is not None,
        IS_INTERPRETED=q.device.type == "cpu",
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_QK=block_qk,
        BLOCK_REST=block_rest,
        BLOCK_V=max(16, triton.next_power_of_2(v_dim)),
        num_warps=warps_for(config.num_warps, config.block_m, keys, values),
        num_stages=config.num_stages,
    )
