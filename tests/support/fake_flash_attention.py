"""A `flash_attn.cute` that computes with torch on any device, as strict as the real one is on compute capability 9.0.

The signature and what is refused are those of flash-attn-4 4.0.0b36. Where the real kernel loads a whole tile, values
that have no weight are multiplied by it here too, so that a NaN among them shows:

    ragged                           up to the tile's end, other rows' values included; zeros behind the last
    pages of the size of a tile      the whole last page
    other pages                      the row's own and nothing else
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

Forward = Callable[..., tuple[Tensor, Tensor | None, None, None, None]]


def install(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Puts the fake where `import flash_attn.cute` finds it; returns what real compile keys would be, as they come."""
    configurations: list[tuple[object, ...]] = []
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    modules = {name: ModuleType(name) for name in names}
    for name in names[:2]:
        modules[name].__path__ = []
    vars(modules["flash_attn.cute.interface"])["_flash_attn_fwd"] = _forward(configurations)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("call", "backend", "latent_backend"):
        monkeypatch.delitem(sys.modules, f"sightline.attention.backends.flash_attention.{name}", raising=False)
    return configurations


def _forward(configurations: list[tuple[object, ...]]) -> Forward:
    def _flash_attn_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: None = None,
        max_seqlen_k: None = None,
        min_seqlen_k: None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        learnable_sink: Tensor | None = None,
        tile_mn: None = None,
        mma_pv_is_rs: None = None,
        intra_wg_overlap: None = None,
        num_threads: int = 384,
        num_splits: int = 1,
        pack_gqa: None = None,
        _arch: None = None,
        score_mod: None = None,
        mask_mod: None = None,
        block_sparse_tensors: None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse: None = None,
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        assert num_splits == 1, "SplitKV not supported on SM 9.0"
        assert cu_seqlens_q is not None
        assert out is not None
        assert softmax_scale is not None
        check_inputs(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, learnable_sink)
        if causal:
            window_size_right = 0
        local = window_size_left is not None or window_size_right not in (None, 0)
        tile_n = tile_width(q.shape[-1], v.shape[-1], causal=causal, local=local)
        paged = page_table is not None
        if paged and k.shape[1] != tile_n:
            assert q.shape[-1] % 16 == 0, "Paged KV does not support irregular head dim"
            rows_at_once = 128 // (math.gcd(q.shape[-1], v.shape[-1], 64) // 8)
            assert tile_n % rows_at_once == 0, "the copy of a tile would write beyond it"
        configuration = (
            *(q.dtype, q.shape[-1], v.shape[-1], q.shape[1] // k.shape[-2], causal, local, softcap, return_lse),
            *(paged, paged and k.shape[1] == tile_n, window_size_left is not None, window_size_right is not None),
            *(None if learnable_sink is None else learnable_sink.dtype, cu_seqlens_q.shape[0] > 257),
        )
        configurations.append(configuration)
        found_lse = torch.full((q.shape[1], q.shape[0]), torch.nan, device=q.device)
        offsets = cu_seqlens_q.tolist()
        for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
            if stop == start:
                continue
            keys, values, num_keys = row_keys(row, k, v, cu_seqlens_k, seqused_k, page_table, tile_n)
            window = (window_size_left, window_size_right)
            tokens = slice(start, stop)
            out[tokens], found_lse[:, tokens] = attend_tile(
                q[tokens], keys, values, num_keys, window, softmax_scale, softcap, learnable_sink
            )
        return out, found_lse if return_lse else None, None, None, None

    return _flash_attn_fwd


def check_inputs(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *others: Tensor | None) -> None:
    """What the real one asserts."""
    cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, learnable_sink = others
    assert cu_seqlens_q is not None
    batch_size = cu_seqlens_q.shape[0] - 1
    assert v.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert q.shape[1] % v.shape[-2] == 0
    assert k.shape[:-1] == v.shape[:-1]
    assert k.shape[-1] == q.shape[-1]
    assert all(8 <= size <= 256 and size % 8 == 0 for size in (q.shape[-1], v.shape[-1]))
    if page_table is not None:
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table.dtype == torch.int32
        assert page_table.stride(-1) == 1
        assert page_table.shape[0] == batch_size
        assert k.ndim == 4
    else:
        assert cu_seqlens_k is not None
        assert cu_seqlens_k.shape == cu_seqlens_q.shape
        assert k.ndim == 3
        assert k.shape[0] > 0, "the real one would set all of out to 0"
    for lengths in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        if lengths is not None:
            assert lengths.dtype == torch.int32
            assert lengths.stride(0) == 1
    assert seqused_k is None or seqused_k.shape == (batch_size,)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert out.stride(-1) == 1
    assert out.data_ptr() % 16 == 0
    assert all(stride * out.element_size() % 16 == 0 for stride in out.stride()[:-1])
    if learnable_sink is not None:
        assert learnable_sink.shape == (q.shape[1],)
        assert learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)


def tile_width(head_dim: int, value_dim: int, *, causal: bool, local: bool) -> int:
    """Keys of a tile on compute capability 9.0."""
    if head_dim <= 128:
        return 144 if 64 < head_dim <= 96 and not (causal or local) else 128
    if head_dim <= 192:
        return 96 if local else 128 if value_dim <= 128 else 112
    return 64 if local else 80


def row_keys(
    row: int,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    tile_n: int,
) -> tuple[Tensor, Tensor, int]:
    """What is loaded of a row's keys and values, and how many of them are its own."""
    if cu_seqlens_k is not None:
        start, stop = cu_seqlens_k[row : row + 2].tolist()
        loaded = slice(start, start + -(-(stop - start) // tile_n) * tile_n)
        return k[loaded], v[loaded], stop - start
    assert page_table is not None
    assert seqused_k is not None
    page_size, num_keys = k.shape[1], int(seqused_k[row])
    pages = page_table[row, : -(-num_keys // page_size)].long()
    loaded = slice(None) if page_size == tile_n else slice(num_keys)
    return k[pages].flatten(0, 1)[loaded], v[pages].flatten(0, 1)[loaded], num_keys


def attend_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_keys: int,
    window: Sequence[int | None],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Of one row: q [num_queries, heads, d], k [loaded, kv_heads, d], v [loaded, kv_heads, value_dim].

    `window` is how many keys to the left and to the right are seen beside the query's own.
    Returns out [num_queries, heads, value_dim] and the LSE [heads, num_queries].
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query = torch.arange(q.shape[0], device=q.device).unsqueeze(1) + num_keys - q.shape[0]
    key = torch.arange(k.shape[0], device=q.device)
    hidden = (key >= num_keys).expand(q.shape[0], -1)
    left, right = window
    if left is not None:
        hidden = hidden | (key < query - left)
    if right is not None:
        hidden = hidden | (key > query + right)
    scores = scores.masked_fill(hidden, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest.isneginf(), 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1)
    if sinks is not None:
        # In float32: infinity, where scores are far below.
        total = total + torch.exp(sinks.float().unsqueeze(1) - largest.squeeze(-1))
    lse = largest.squeeze(-1) + total.log()
    weights = (weights / total.masked_fill(total == 0, 1.0).unsqueeze(-1)).to(v.dtype).float()
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype), lse
