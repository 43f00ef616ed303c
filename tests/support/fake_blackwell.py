"""Stand-ins for the kernels of flashinfer-python 0.7.2.post1 and tokenspeed-mla 2.0.4 for Blackwell, in torch.

They have exactly the libraries' parameters, compute the answer from the arguments, and refuse what the libraries
refuse: other page sizes, dtypes, head counts and shapes, memory that is too small, tables that are too narrow. They are
strict where a kernel is silent. The beginning of a workspace and all counters must be zero when a call begins, as they
are if the memory began as zeros, and are zero when it ends; the rest of a workspace is overwritten. All of a page table
must name pages of the pool, and arguments that the adapters have no use for are refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
SEMAPHORE_BYTES = 4096
"""The part of a workspace in which versions without separate counters keep their semaphores."""
GUARD_BYTES = 1 << 20
MULTIPROCESSORS = 4
"""As many as backends assume where there is no card."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins where the adapters import them from."""
    flashinfer, tokenspeed = ModuleType("flashinfer"), ModuleType("tokenspeed_mla")
    places: dict[str, tuple[Any, ...]] = {
        "flashinfer.mla": (trtllm_batch_decode_with_kv_cache_mla,),
        "flashinfer.prefill": (trtllm_ragged_attention_deepseek, trtllm_batch_context_with_kv_cache),
        "flashinfer.decode": (trtllm_batch_decode_with_kv_cache,),
        "tokenspeed_mla.mla_decode": (tokenspeed_mla_decode,),
    }
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", tokenspeed)
    for name, functions in places.items():
        module = ModuleType(name)
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def require_defaults(**arguments: object) -> None:
    """Refuses whatever differs from what a caller that does not know the argument would give."""
    used = [name for name, value in arguments.items() if value not in (None, False, 0, "auto", -1)]
    require(not used, f"expected the adapter to leave {used} alone")


def take_workspace(workspace: Tensor, needed: int = 0, counters: Tensor | None = None, semaphores: int = 0) -> None:
    """Checks the memory of a launch and uses it."""
    require(workspace.dtype in (torch.uint8, torch.int8) and workspace.ndim == 1, "expected a workspace of bytes")
    require(workspace.data_ptr() % 16 == 0, "expected a workspace on a border of 16 bytes")
    require(len(workspace) >= max(needed, SEMAPHORE_BYTES), f"expected {needed} bytes of workspace")
    require(not bool(workspace[:SEMAPHORE_BYTES].any()), "expected a workspace that began as zeros")
    workspace[SEMAPHORE_BYTES:] = -1 if workspace.dtype is torch.int8 else 255
    if counters is not None:
        require(counters.is_contiguous() and counters.data_ptr() % 16 == 0, "expected counters in a row")
        require(counters.nbytes >= 4 * max(semaphores, MULTIPROCESSORS), "multi_ctas_kv_counter_buffer is too small")
        require(not bool(counters.any()), "expected counters that began as zeros")


def softmax_slots(num_heads: int, batch_size: int, max_q_len: int) -> int:
    """Bytes that TRT-LLM's kernels set aside for the statistics of an LSE."""
    return 8 * num_heads * batch_size * (-(-max_q_len // 256) * 256) + GUARD_BYTES


def table_rows(
    block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, num_pages: int, page_size: int
) -> list[tuple[Tensor, int]]:
    """The slots of each row, and its length."""
    for name, values, ndim in (("block_tables", block_tables, 2), ("seq_lens", seq_lens, 1)):
        require(
            values.dtype is torch.int32 and values.ndim == ndim and values.is_contiguous(),
            f"expected {name} as int32 of {ndim} dimensions, got {values.dtype} {list(values.shape)}",
        )
    require(len(block_tables) == len(seq_lens), f"got {len(block_tables)} rows of pages, {len(seq_lens)} lengths")
    require(page_size in (32, 64), f"expected pages of 32 or 64, got {page_size}")
    inside = bool(((block_tables >= 0) & (block_tables < num_pages)).all())
    require(inside, "expected page numbers inside of the pool")
    rows = []
    for pages, length in zip(block_tables.long(), seq_lens.tolist(), strict=True):
        require(0 < length <= min(max_seq_len, len(pages) * page_size), f"expected at most {max_seq_len}, got {length}")
        rows.append(((pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length], length))
    return rows


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, left: int = -1) -> tuple[Tensor, Tensor]:
    """One row: q [n, heads, d], k [m, kv_heads, d], v [m, kv_heads, dv]. Returns the output and a natural LSE."""
    group = q.shape[1] // k.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    distance = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if left >= 0:
        visible &= distance <= left
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.einsum("hqk,khd->qhd", torch.exp(scores - lse.unsqueeze(-1)), values), lse.transpose(0, 1)


def latent_rows(
    query: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The absorbed attention of [batch, q_len, heads, 576]: the output, and the natural LSE [batch, q_len, heads]."""
    require(query.dtype is torch.bfloat16 and kv_cache.dtype is torch.bfloat16, f"got {query.dtype}, {kv_cache.dtype}")
    require(query.ndim == 4 and query.shape[-1] == 576 == kv_cache.shape[-1], f"got queries of {list(query.shape)}")
    require(query.stride(-1) == 1 and kv_cache.is_contiguous(), "expected contiguous heads and entries")
    require(isinstance(scale, float), "expected a scale as a float")
    if kv_cache.ndim == 4:
        kv_cache = kv_cache.squeeze(1)
    num_pages, page_size, _ = kv_cache.shape
    entries = kv_cache.flatten(0, 1)
    require(len(query) == len(seq_lens), f"expected {len(seq_lens)} rows, got {len(query)}")
    found, lses = [], []
    for q, (slots, _) in zip(query, table_rows(block_tables, seq_lens, max_seq_len, num_pages, page_size), strict=True):
        own = entries[slots].unsqueeze(1)
        out, lse = attend(q, own, own[..., :512], scale, causal=True)
        found.append(out)
        lses.append(lse)
    return torch.stack(found), torch.stack(lses)


def put(out: Tensor | None, found: Tensor) -> Tensor:
    require(out is not None and out.shape == found.shape, f"expected memory for an output of {list(found.shape)}")
    assert out is not None, "checked before"
    require(out.dtype is torch.bfloat16 and out.is_contiguous(), f"expected a contiguous bf16 output, got {out.dtype}")
    return out.copy_(found)


def put_lse(lse: Tensor | None, found: Tensor, base: str | None, *, wanted: bool) -> Tensor | None:
    """Fills an LSE that the adapter gave memory for, in base 2 unless it says otherwise."""
    require((lse is not None) == wanted, "expected memory for the LSE exactly if it is wanted")
    if lse is None:
        return None
    require(lse.shape == found.shape and lse.dtype is torch.float32, f"got an LSE of {list(lse.shape)}")
    return lse.copy_(found if base == "basee" else found * LOG2_E)


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: list[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    require_defaults(top_k=sparse_mla_top_k, sinks=sinks, skip=skip_softmax_threshold_scale_factor, pdl=enable_pdl)
    require_defaults(format=kv_scale_format, offsets=cum_seq_lens_q, longest=max_q_len, lens=sparse_mla_top_k_lens)
    require_defaults(dcp=enable_dcp, rank=cp_rank, bounds=causal_seqlens_kv_global, half=use_fp16_softmax)
    require(is_var_seq and uses_shared_paged_kv_idx and cp_world == 1, "expected lengths that differ, on one rank")
    require(kv_lora_rank == 512 and qk_rope_head_dim == 64, f"got dimensions {kv_lora_rank}, {qk_rope_head_dim}")
    require(not isinstance(bmm2_scale, Tensor) and bmm2_scale == 1.0, "expected values as they are stored")
    assert seq_lens is not None, "seq_lens is required"
    assert isinstance(bmm1_scale, float), "a float"
    batch, q_len, heads, _ = query.shape
    require(return_lse_base in (None, "basee", "base2"), f"got return_lse_base {return_lse_base}")
    if backend == "trtllm-gen":
        require(not 64 < heads < 128, f"trtllm-gen MLA decode does not support 64 < num_heads_q < 128; got {heads}")
        stats = softmax_slots(heads, batch, q_len) if return_lse else 0
        require(multi_ctas_kv_counter_buffer is not None, "the library would allocate counters of its own")
        take_workspace(workspace_buffer, stats, multi_ctas_kv_counter_buffer, batch * heads)
    else:
        require(backend == "cute-dsl" and multi_ctas_kv_counter_buffer is None, f"got {backend} with counters")
        require(heads <= 128, f"expected at most 128 heads, got {heads}")
        require(cute_dsl_impl == "monolithic" or not return_lse, "the modular implementation has no LSE")
        require(
            block_tables.shape[-1] % (128 // kv_cache.shape[-2]) == 0, "Expected block_num % (128 / block_size) == 0"
        )
        take_workspace(workspace_buffer, partial_bytes(batch, heads, q_len))
    found, own = latent_rows(query, kv_cache, block_tables, seq_lens, max_seq_len, bmm1_scale)
    filled = put(out, found)
    base = return_lse_base or ("basee" if backend == "cute-dsl" else "base2")
    filled_lse = put_lse(lse, own.flatten(0, 1), base, wanted=return_lse)
    return filled if filled_lse is None else (filled, filled_lse)


def partial_bytes(batch: int, num_heads: int, q_len: int) -> int:
    """Bytes for the partial results of contexts that CuteDSL's and TokenSpeed's kernels split."""
    tiles = -(-num_heads * q_len // 128)
    splits = min(max(1, MULTIPROCESSORS // batch // (2 * tiles)), 32)
    return 0 if splits == 1 else batch * 128 * tiles * splits * 513 * 4


def tokenspeed_mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float = 1.0,
    out: Tensor | None = None,
    is_var_seq: bool = True,
    causal_mask: bool = True,
    window_left: int = -1,
    enable_pdl: bool = False,
    return_lse: bool = False,
    causal_seqs: Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave_size: int = 1,
    *,
    min_split_kv: int = 1,
    local_visible_lens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    require_defaults(window=window_left, pdl=enable_pdl, bounds=causal_seqs, rank=cp_rank, lens=local_visible_lens)
    require(is_var_seq and causal_mask and cp_world == cp_interleave_size == min_split_kv == 1, "expected defaults")
    require(kv_lora_rank == 512 and qk_rope_head_dim == 64, f"got dimensions {kv_lora_rank}, {qk_rope_head_dim}")
    require(output_scale == 1.0, "expected values as they are stored")
    batch, q_len, heads, _ = query.shape
    require(heads <= 128, f"expected at most 128 heads, got {heads}")
    require(max_seq_len > 0, f"max_seq_len must be > 0, got {max_seq_len}")
    require(workspace_buffer.dtype is torch.int8, f"workspace_buffer must be torch.int8, got {workspace_buffer.dtype}")
    # A tile reads the page table to its end.
    require(block_tables.shape[-1] % (128 // kv_cache.shape[-2]) == 0, "expected pages of whole tiles")
    take_workspace(workspace_buffer, partial_bytes(batch, heads, q_len))
    found, lse = latent_rows(query, kv_cache, block_tables, seq_lens, max_seq_len, softmax_scale)
    filled = put(out, found)
    return (filled, lse * LOG2_E) if return_lse else filled


def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Tensor | None = None,
    kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    require_defaults(window=window_left, pdl=enable_pdl, sinks=attention_sinks, half=use_fp16_softmax)
    require_defaults(skip=skip_softmax_threshold_scale_factor, queries=q_seq_lens_cpu, keys=kv_seq_lens_cpu)
    require_defaults(sparse=uses_spcompress)
    require(sage_attn_sfs == (None,) * 4 and not any(num_elts_per_sage_attn_blk), "expected no SageAttention")
    require(backend == "trtllm-gen" and skip_all_rows_active_check, f"got {backend}")
    require((bmm2_scale, o_sf_scale) == (1.0, 1.0), "expected values as they are")
    dims = (query.shape[2], key.shape[2], value.shape[2])
    require(dims in ((192, 192, 128), (128, 128, 128), (256, 256, 256)), f"Unsupported head dimensions: {dims}")
    require(query.dtype is key.dtype is value.dtype is torch.bfloat16, f"got {query.dtype}")
    queries, keys = offsets(cum_seq_lens_q, max_q_len, batch_size), offsets(cum_seq_lens_kv, max_kv_len, batch_size)
    require((queries[-1], keys[-1]) == (len(query), len(key)), "expected offsets that end with the tokens")
    lens = [stop - start for start, stop in pairwise(keys)]
    require(seq_lens.dtype is torch.int32 and seq_lens.tolist() == lens, f"expected key lengths {lens}, got {seq_lens}")
    assert isinstance(bmm1_scale, float), "a float"
    heads = query.shape[1]
    take_workspace(workspace_buffer, softmax_slots(heads, batch_size, max_q_len) if return_lse else 0)
    found, own = torch.empty(*query.shape[:2], value.shape[2]), torch.empty(query.shape[:2])
    for row in range(batch_size):
        tokens, span = slice(queries[row], queries[row + 1]), slice(keys[row], keys[row + 1])
        require(tokens.start < tokens.stop and span.start < span.stop, "expected rows that are not empty")
        require(not is_causal or tokens.stop - tokens.start <= span.stop - span.start, "more queries than keys")
        found[tokens], own[tokens] = attend(query[tokens], key[span], value[span], bmm1_scale, causal=is_causal)
    filled, filled_lse = put(out, found), put_lse(lse, own, "base2", wanted=return_lse)
    return filled if filled_lse is None else (filled, filled_lse)


def offsets(values: Tensor, longest: int, batch_size: int) -> list[int]:
    require(values.dtype is torch.int32 and values.shape == (batch_size + 1,), f"got offsets {values}")
    listed: list[int] = values.tolist()
    lens = values.diff().tolist()
    require(listed[0] == 0 and min(lens) >= 0 and max(lens) <= longest, f"expected lengths to {longest}, got {lens}")
    return listed


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: list[Tensor] | None = None,
    kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> Tensor:
    require_defaults(dtype=out_dtype, factor=o_sf_scale, size=o_sf_vec_size, pdl=enable_pdl, sinks=sinks)
    require_defaults(factors=kv_cache_sf, skip=skip_softmax_threshold_scale_factor, lse=lse, wanted=return_lse)
    require_defaults(half=use_fp16_softmax, sparse=uses_spcompress)
    require(backend == "trtllm-gen" and uses_shared_paged_kv_idx, f"got {backend}")
    require(causal or window_left < 0, "Sliding-window non-causal attention is not supported")
    queries, keys = offsets(cum_seq_lens_q, max_q_len, batch_size), offsets(cum_seq_lens_kv, max_kv_len, batch_size)
    require(queries[-1] == len(query), f"expected {queries[-1]} queries, got {len(query)}")
    rows = paged_rows(query, kv_cache, kv_layout, block_tables, seq_lens, max_kv_len, bmm1_scale, bmm2_scale)
    require([length for _, _, length in rows] == cum_seq_lens_kv.diff().tolist(), f"expected lengths of {keys}")
    take_workspace(workspace_buffer, 0, multi_ctas_kv_counter_buffer, batch_size * query.shape[1])
    assert isinstance(bmm1_scale, float), "a float"
    found = torch.empty(query.shape)
    for row, (k, v, length) in enumerate(rows):
        tokens = slice(queries[row], queries[row + 1])
        require(0 < tokens.stop - tokens.start <= length, "expected new tokens among the keys")
        found[tokens], _ = attend(query[tokens], k, v, bmm1_scale, causal=causal, left=window_left)
    return put(out, found)


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: list[Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: Tensor | None = None,
    request_order_plan: Any | None = None,
) -> Tensor:
    require_defaults(dtype=out_dtype, factor=o_sf_scale, size=o_sf_vec_size, sinks=sinks, pdl=enable_pdl, mask=mask)
    require_defaults(longest=max_q_len, offsets=cum_seq_lens_q, skip=skip_softmax_threshold_scale_factor)
    require_defaults(factors=kv_cache_sf, lse=lse, wanted=return_lse, log2=bmm1_scale_log2, rank=cp_rank)
    require_defaults(sparse=enable_block_sparse_attention, bounds=causal_seqlens_kv_global, order=request_order)
    require_defaults(mode=bf16q_fp8kv_transform_mode, plan=request_order_plan)
    require(backend == "trtllm-gen", "the library would choose another kernel on another card")
    require((q_len_per_req, o_scale, cp_world) == (1, 1.0, 1) and uses_shared_paged_kv_idx, "expected defaults")
    require(multi_ctas_kv_counter_buffer is not None, "the library would allocate counters of its own")
    rows = paged_rows(query, kv_cache, kv_layout, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale)
    require(len(rows) == len(query), f"expected {len(rows)} queries, got {len(query)}")
    take_workspace(workspace_buffer, 0, multi_ctas_kv_counter_buffer, query.shape[0] * query.shape[1])
    assert isinstance(bmm1_scale, float), "a float"
    found = [
        attend(q.unsqueeze(0), k, v, bmm1_scale, causal=True, left=window_left)[0]
        for q, (k, v, _) in zip(query, rows, strict=True)
    ]
    return put(out, torch.cat(found))


def paged_rows(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_layout: str,
    block_tables: Tensor,
    seq_lens: Tensor,
    longest: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
) -> Sequence[tuple[Tensor, Tensor, int]]:
    """Keys, values and the length of each row."""
    assert isinstance(kv_cache, tuple), "keys and values as two tensors"
    keys, values = kv_cache
    require(kv_layout == "NHD" and keys.ndim == 4, f"expected [pages, entries, heads, dims], got {kv_layout}")
    require(query.dtype is keys.dtype is values.dtype is torch.bfloat16, f"got {query.dtype}, {keys.dtype}")
    require(query.ndim == 3 and query.stride(-1) == keys.stride(-1) == 1, "expected contiguous heads")
    require(query.shape[2] == keys.shape[3] in (64, 128, 256), f"got heads of {query.shape[2]}")
    require(isinstance(bmm1_scale, float), "expected a scale as a float")
    require(not isinstance(bmm2_scale, Tensor) and bmm2_scale == 1.0, "expected values as they are stored")
    rows = table_rows(block_tables, seq_lens, longest, keys.shape[0], keys.shape[1])
    return [(keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots], length) for slots, length in rows]
