"""A stand-in for FlashInfer 0.7.2 on any device: its wrappers' names and parameters, computed with torch.

It is strict where the library is silent or refuses: arguments that the backends have no use for are refused, metadata
must be where planning does not wait for a device, and what a plan derives lies in the integer workspace that the
wrapper was given, so that plans that share one by mistake are caught. As under a captured graph, `run` reads nothing
but the wrapper's buffers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

_LOG2_E = math.log2(math.e)
_PLAN_BYTES = 8 << 20


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Puts the stand-in where `import flashinfer` finds it."""
    module, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = BatchPrefillWithPagedKVCacheWrapper
    vars(module)["BatchPrefillWithRaggedKVCacheWrapper"] = BatchPrefillWithRaggedKVCacheWrapper
    vars(mla)["BatchMLAPagedAttentionWrapper"] = BatchMLAPagedAttentionWrapper
    vars(mla)["MLAPlanMetadata"] = MLAPlanMetadata
    vars(module)["mla"] = mla
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    return module


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_unused(**arguments: object) -> None:
    used = [name for name, value in arguments.items() if value not in (None, False, 0)]
    _require(not used, f"expected the backend to leave {used} alone")


def _require_host(**tensors: Tensor | None) -> None:
    """What is on a device would be waited for."""
    for name, tensor in tensors.items():
        _require(
            tensor is not None and tensor.device.type == "cpu" and tensor.dtype == torch.int32 and tensor.ndim == 1,
            f"expected {name} as int32 on the host, got {tensor}",
        )


def _require_memory(buffer: Tensor) -> None:
    _require(buffer.is_contiguous() and buffer.data_ptr() % 16 == 0, "expected a workspace on a border of 16 bytes")


@dataclass(frozen=True)
class _Mask:
    causal: bool
    window_left: int
    softcap: float
    scale: float


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: _Mask) -> tuple[Tensor, Tensor]:
    """Of one row: q [n, heads, d], k and v [m, kv_heads, d]; the output and the log-sum-exp to the base 2."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.float().repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * mask.scale
    if mask.softcap > 0:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    distance = torch.arange(k.shape[0] - q.shape[0], k.shape[0]).unsqueeze(1) - torch.arange(k.shape[0])
    visible = torch.ones_like(distance, dtype=torch.bool)
    if mask.causal:
        visible &= distance >= 0
    if mask.window_left >= 0:
        visible &= distance <= mask.window_left
    scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype), lse.transpose(0, 1) * _LOG2_E


class _Wrapper:
    """What the wrappers of both prefills share."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool, backend: str) -> None:
        _require_memory(float_workspace_buffer)
        _require(kv_layout == "NHD", f"expected NHD, got {kv_layout}")
        _require(backend in ("fa2", "fa3"), f"expected a kernel by name, got {backend}")
        self._float = float_workspace_buffer
        self._int = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=float_workspace_buffer.device)
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._max_total_num_rows: int | None = None
        self._fixed_rows = 0
        self._qo_indptr_last = -1
        self._mask: _Mask | None = None
        self._dtypes: tuple[torch.dtype, torch.dtype] | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            _require_memory(buffer)
        self._float, self._int = float_workspace_buffer, int_workspace_buffer

    def _plan_tokens(self, qo_indptr: Tensor, fixed_batch_size: int) -> None:
        self._qo_indptr_last = total = int(qo_indptr[-1])
        if not self._use_cuda_graph:
            return
        self._fixed_rows = fixed_batch_size
        if self._max_total_num_rows is None:
            self._max_total_num_rows = total
        _require(total <= self._max_total_num_rows, f"expected at most {self._max_total_num_rows} tokens, got {total}")
        _require(len(qo_indptr) - 1 == fixed_batch_size, f"expected {fixed_batch_size} rows, got {len(qo_indptr) - 1}")
        # Below this the library's arithmetic, which is unsigned, goes wrong without a word.
        _require(self._max_total_num_rows >= fixed_batch_size, "expected a first plan of full rows")

    def _keep(self, *lists: Tensor) -> None:
        """Puts what was planned where the library puts it."""
        flat = torch.cat([torch.tensor([len(each) for each in lists], dtype=torch.int32), *lists])
        _require(flat.nbytes <= self._int.nbytes, f"expected {flat.nbytes} bytes for a plan, got {self._int.nbytes}")
        self._int[: flat.nbytes].view(torch.int32).copy_(flat)

    def _kept(self, count: int) -> list[list[int]]:
        flat = self._int.view(torch.int32)
        sizes = flat[:count].tolist()
        rest = flat[count : count + sum(sizes)].tolist()
        return [rest[sum(sizes[:index]) : sum(sizes[: index + 1])] for index in range(count)]

    def _set_mask(
        self, causal: bool, window_left: int, softcap: float | None, scale: float | None, q_dtype: Any, kv_dtype: Any
    ) -> None:
        _require(scale is not None, "expected a scale")
        single = self._use_cuda_graph and self._max_total_num_rows == self._fixed_rows
        _require(causal or window_left < 0 or single, "a window would reach to the left alone")
        self._mask = _Mask(causal, window_left, softcap or 0.0, float(scale or 0.0))
        self._dtypes = (q_dtype, q_dtype if kv_dtype is None else kv_dtype)
        narrow = self._dtypes[1] == torch.float8_e4m3fn
        _require(not (narrow and self._backend == "fa3"), "fa3 wants queries in fp8 where keys are")
        _require(q_dtype in (torch.float16, torch.bfloat16), f"expected half precision, got {q_dtype}")

    def _begin_run(self, q: Tensor, k: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool) -> _Mask:
        _require((q.dtype, k.dtype) == self._dtypes, f"expected {self._dtypes}, got {q.dtype} and {k.dtype}")
        _require(q.shape[0] == self._qo_indptr_last, f"expected {self._qo_indptr_last} tokens, got {q.shape[0]}")
        _require(out is not None and out.is_contiguous() and out.dtype == q.dtype, "expected memory for the output")
        _require((lse is not None) == return_lse, "expected memory for the LSE exactly where it is wanted")
        if lse is not None:
            _require(lse.shape == q.shape[:2] and lse.dtype == torch.float32, f"got an LSE of {lse.shape}")
        self._float.fill_(255)
        assert self._mask is not None, "planned before"
        return self._mask


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        _require_unused(custom=custom_mask_buf, mask=mask_indptr_buf, jit=jit_args, kwargs=jit_kwargs)
        _require_unused(variant_owns_mask=variant_owns_mask)
        self._buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if use_cuda_graph:
            _require(all(each is not None for each in self._buffers), "expected buffers of its own for a graph")
            _require(backend == "fa2", "expected the kernel that splits contexts for a graph")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        _require_host(qo_indptr=qo_indptr, paged_kv_indptr=paged_kv_indptr, last=paged_kv_last_page_len, seq=seq_lens)
        _require_unused(mask=custom_mask, packed=packed_custom_mask, prefix=prefix_len_ptr, sizes=fixed_split_size)
        _require_unused(tables=block_tables, uniform=uniform_q_len, disable=disable_split_kv, rope=rope_scale)
        assert seq_lens is not None, "checked before"
        num_rows, num_pages = len(qo_indptr) - 1, paged_kv_indptr.diff()
        _require(len(seq_lens) == len(paged_kv_last_page_len) == len(num_pages) == num_rows, "expected lists alike")
        derived = (num_pages - 1).clamp(min=0) * page_size + paged_kv_last_page_len
        _require(torch.equal(derived.int(), seq_lens), f"expected lengths of {derived}, got {seq_lens}")
        _require(paged_kv_indices.dtype == torch.int32, f"expected int32 pages, got {paged_kv_indices.dtype}")
        _require(len(paged_kv_indices) >= int(paged_kv_indptr[-1]), "expected a page for each in the offsets")
        fixed = 0 if self._buffers[3] is None else len(self._buffers[3])
        self._plan_tokens(qo_indptr, fixed)
        if self._use_cuda_graph:
            indices = self._buffers[2]
            assert indices is not None, "checked before"
            indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
        else:
            self._buffers = (None, None, paged_kv_indices, None)
        self._keep(qo_indptr, paged_kv_indptr, seq_lens)
        self._set_mask(causal, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> None:
        _require_unused(more=args or None, q_scale=q_scale, v_scale=v_scale, sinks=sinks, factors=kv_cache_sf)
        _require(lse_base == "log2" and lse_layout == "NH", "a graph would convert the first plan's rows")
        keys, values = paged_kv_cache
        _require(keys.stride() == values.stride(), "expected keys and values that lie alike: others are compiled anew")
        mask, indices = self._begin_run(q, keys, out, lse, return_lse), self._buffers[2]
        assert indices is not None, "planned before"
        assert out is not None, "checked before"
        starts, firsts, seq_lens = self._kept(3)
        for row, seq_len in enumerate(seq_lens):
            tokens = slice(starts[row], starts[row + 1])
            if tokens.start == tokens.stop:
                continue
            pages = indices[firsts[row] : firsts[row + 1]].long()
            k, v = (each[pages].flatten(0, 1)[:seq_len].float() for each in (keys, values))
            found, logs = _attend(q[tokens], k * (k_scale or 1.0), v, mask)
            out[tokens] = found
            if lse is not None:
                lse[tokens] = logs


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        _require_unused(graph=use_cuda_graph, qo=qo_indptr_buf, kv=kv_indptr_buf, mask=custom_mask_buf)
        _require_unused(indptr=mask_indptr_buf, jit=jit_args, kwargs=jit_kwargs, variant=variant_owns_mask)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        _require_host(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        _require_unused(mask=custom_mask, packed=packed_custom_mask, prefix=prefix_len_ptr, sizes=fixed_split_size)
        _require_unused(v=v_indptr, o=o_indptr, uniform=uniform_q_len, disable=disable_split_kv, rope=rope_scale)
        _require(len(qo_indptr) == len(kv_indptr) > 1, "expected offsets of as many rows, and of some")
        value_dim = head_dim_qk if head_dim_vo is None else head_dim_vo
        pairs = ((64, 64), (128, 128), (256, 256), (192, 128))
        _require(self._backend == "fa2" or (head_dim_qk, value_dim) in pairs, f"no fa3 for {head_dim_qk}, {value_dim}")
        self._plan_tokens(qo_indptr, 0)
        self._keep(qo_indptr, kv_indptr)
        self._set_mask(causal, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | None = None,
    ) -> None:
        _require_unused(more=args or None, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, o_scale=o_scale)
        mask = self._begin_run(q, k, out, lse, return_lse)
        assert out is not None, "checked before"
        starts, firsts = self._kept(2)
        _require(k.shape[0] == v.shape[0] == firsts[-1], f"expected {firsts[-1]} keys, got {k.shape[0]}")
        for row in range(len(starts) - 1):
            tokens, keys = slice(starts[row], starts[row + 1]), slice(firsts[row], firsts[row + 1])
            found, logs = _attend(q[tokens], k[keys], v[keys], mask)
            out[tokens] = found
            if lse is not None:
                lse[tokens] = logs * (1 / _LOG2_E if lse_base == "ln" else 1)


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        _require_memory(float_workspace_buffer)
        _require(backend == "fa3", f"expected Hopper's kernel, got {backend}")
        self._float = float_workspace_buffer
        self._use_cuda_graph = use_cuda_graph
        self._reserved = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._plan: tuple[Tensor, Tensor, Tensor] | None = None
        self._indices = torch.empty(0, dtype=torch.int32)
        self._mask: _Mask | None = None
        self._arguments: dict[str, Any] = {}
        self._cluster: int | None = None

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
        query_layout: str = "packed",
        kv_cache_layout: str = "packed",
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        starts, firsts, lens = metadata.qo_indptr, metadata.kv_indptr, metadata.kv_len_arr
        _require_host(qo_indptr=starts, kv_indptr=firsts, kv_len_arr=lens)
        _require_unused(profiler=use_profiler, skip=skip_softmax, sinks=use_sinks, output=output_dtype)
        _require((head_dim_ckv, head_dim_kpe) == (512, 64), f"got {head_dim_ckv}, {head_dim_kpe}")
        _require(torch.equal(firsts.diff(), (lens + page_size - 1) // page_size), "expected pages as lengths need them")
        _require(len(starts) == len(lens) + 1 > 1, "expected lists alike, of some rows")
        _require((kv_data_type == torch.float8_e4m3fn) == (scale_mode == "kv-per-tensor"), f"got {scale_mode}")
        # A launch is one of two, by the average of queries: a graph holds one of them.
        cluster = 2 if int(starts[-1]) * num_heads // len(lens) > 64 else 1
        if self._use_cuda_graph:
            _require(self._cluster in (None, cluster), "expected the launch that was captured")
            for reserved, given in zip(self._reserved, (starts, firsts, None, lens), strict=True):
                assert reserved is not None, "reserved for a graph"
                _require(given is None or reserved.shape == given.shape, "expected buffers of just that size")
            indices = self._reserved[2]
            assert indices is not None, "checked before"
            indices[: len(metadata.kv_indices)].copy_(metadata.kv_indices)
        else:
            indices = metadata.kv_indices
        tile = 64 * cluster
        _require(not causal or tile % num_heads == 0, f"{num_heads} heads do not fill tiles of {tile}")
        self._cluster = cluster
        self._plan = (starts, firsts, lens)
        self._indices = indices
        self._mask = _Mask(causal, -1, 0.0, sm_scale)
        self._arguments = {"lse": lse_mode, "q": q_data_type, "kv": kv_data_type, "page": page_size}
        self._arguments |= {"layouts": (query_layout, kv_cache_layout)}

    def run(
        self,
        *,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        return_lse_base_on_e: bool = False,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> None:
        planned = self._arguments
        mode = ("basee" if return_lse_base_on_e else "base2") if return_lse or lse is not None else "none"
        _require(planned["lse"] == mode, f"expected an LSE as planned, {planned['lse']}, got {mode}")
        _require((query.dtype, kv_cache.dtype) == (planned["q"], planned["kv"]), "expected dtypes as planned")
        _require(planned["layouts"] == ("packed", "packed") and query.ndim == kv_cache.ndim == 3, "expected one tensor")
        _require(kv_cache.shape[1] == planned["page"] and kv_cache.shape[2] == query.shape[2] == 576, "another shape")
        narrow = planned["kv"] == torch.float8_e4m3fn
        _require((ckv_scale is not None) == (kpe_scale is not None) == narrow, "expected scales exactly for fp8")
        _require(out is not None and out.shape == (*query.shape[:2], 512), "expected memory for the output")
        self._float.fill_(255)
        assert self._plan is not None, "planned before"
        assert self._mask is not None, "planned before"
        assert out is not None, "checked before"
        starts, firsts, lens = (each.tolist() for each in self._plan)
        for row, seq_len in enumerate(lens):
            tokens = slice(starts[row], starts[row + 1])
            pages = self._indices[firsts[row] : firsts[row + 1]].long()
            entries = kv_cache[pages].flatten(0, 1)[:seq_len].float() * (ckv_scale or 1.0)
            found, logs = _attend(query[tokens], entries.unsqueeze(1), entries[:, None, :512], self._mask)
            out[tokens] = found
            if lse is not None:
                lse[tokens] = logs / _LOG2_E
