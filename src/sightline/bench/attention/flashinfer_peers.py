"""FlashInfer's kernels as peers, through its wrappers' `plan` and `run`; the version is 0.7.2.

Owns these calls. Does not know what is measured.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.bench.attention.data import ShapeData
from sightline.bench.attention.peers import (
    LATENT_DECODE,
    LATENT_PREFILL,
    SOFTMAX_DECODE,
    SOFTMAX_PREFILL,
    AttentionPeer,
    PagedIndex,
    PeerKernel,
    new_keys_values,
    paged,
    wrong_surroundings,
)
from sightline.bench.attention.surroundings import AbsorbedSurroundings, SoftmaxSurroundings, Surroundings

_WORKSPACE_BYTES = 256 << 20


class FlashInferPeer(AttentionPeer):
    """One of its wrappers."""

    def missing(self) -> str | None:
        found = find_spec("flashinfer") is not None
        return None if found else "package flashinfer is not installed: pip install flashinfer-python"

    def _workspace(self, data: ShapeData) -> Tensor:
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=data.device.torch_device)


def _last_page_lens(index: PagedIndex, page_size: int) -> Tensor:
    """[num_rows]: entries in each row's last page."""
    return (index.seq_lens - 1) % page_size + 1


class FlashInferDecodePeer(FlashInferPeer):
    """Paged decode with tensor cores."""

    name = "flashinfer decode"
    forms = frozenset({SOFTMAX_DECODE})

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        shape, spec, index = data.shape, data.shape.spec, PagedIndex.of(data)
        if not (isinstance(surroundings, SoftmaxSurroundings) and isinstance(spec, SoftmaxSpec)):
            raise wrong_surroundings(self.name, surroundings)
        q, out = surroundings.inputs.q, data.new_out()
        keys, values = paged(surroundings.keys, shape.page_size), paged(surroundings.values, shape.page_size)
        decode: Any = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
            self._workspace(data), "NHD", use_tensor_cores=True
        )
        pages = (index.page_offsets, index.pages.flatten(), _last_page_lens(index, shape.page_size))
        sizes = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, shape.page_size)

        def plan() -> None:
            decode.plan(*pages, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=spec.scale)

        def run(layer: int) -> Tensor:
            decode.run(q, (keys[layer], values[layer]), out=out)
            return out

        plan()
        return PeerKernel(run, plan)


class FlashInferPagedPeer(FlashInferPeer):
    """Paged prefill."""

    forms = frozenset({SOFTMAX_PREFILL})

    def __init__(self, backend: str) -> None:
        self.name = f"flashinfer paged {backend}"
        self._backend = backend

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        shape, spec, index = data.shape, data.shape.spec, PagedIndex.of(data)
        if not (isinstance(surroundings, SoftmaxSurroundings) and isinstance(spec, SoftmaxSpec)):
            raise wrong_surroundings(self.name, surroundings)
        q, out = surroundings.inputs.q, data.new_out()
        keys, values = paged(surroundings.keys, shape.page_size), paged(surroundings.values, shape.page_size)
        prefill: Any = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            self._workspace(data), "NHD", backend=self._backend
        )
        last_page_lens = _last_page_lens(index, shape.page_size)
        rows = (index.query_offsets, index.page_offsets, index.pages.flatten(), last_page_lens)
        sizes = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, shape.page_size)

        def plan() -> None:
            prefill.plan(*rows, *sizes, causal=True, sm_scale=spec.scale, q_data_type=q.dtype, kv_data_type=q.dtype)

        def run(layer: int) -> Tensor:
            prefill.run(q, (keys[layer], values[layer]), out=out)
            return out

        plan()
        return PeerKernel(run, plan)


class FlashInferRaggedPeer(FlashInferPeer):
    """Prefill over keys and values that lie row after row."""

    forms = frozenset({SOFTMAX_PREFILL, LATENT_PREFILL})

    def __init__(self, backend: str) -> None:
        self.name = f"flashinfer ragged {backend}"
        self._backend = backend

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        q, k, v = new_keys_values(surroundings, self.name)
        offsets, out, scale = PagedIndex.of(data).query_offsets, data.new_out(), data.shape.spec.scale
        prefill: Any = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace(data), "NHD", backend=self._backend
        )
        dims = {"head_dim_vo": v.shape[-1], "q_data_type": q.dtype, "kv_data_type": q.dtype}

        def plan() -> None:
            heads = (q.shape[1], k.shape[1], q.shape[2])
            prefill.plan(offsets, offsets, *heads, causal=True, sm_scale=scale, **dims)

        def run(layer: int) -> Tensor:
            del layer
            prefill.run(q, k, v, out=out)
            return out

        plan()
        return PeerKernel(run, plan)


class FlashInferLatentPeer(FlashInferPeer):
    """Absorbed latent decode."""

    forms = frozenset({LATENT_DECODE})

    def __init__(self, backend: str) -> None:
        self.name = f"flashinfer mla {backend}"
        self._backend = backend

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        shape, spec, index = data.shape, data.shape.spec, PagedIndex.of(data)
        if not (isinstance(surroundings, AbsorbedSurroundings) and isinstance(spec, LatentSpec)):
            raise wrong_surroundings(self.name, surroundings)
        library: Any = import_module("flashinfer.mla")
        wrapper = library.BatchMLAPagedAttentionWrapper(self._workspace(data), backend=self._backend)
        rows = library.MLAPlanMetadata.csr(
            index.query_offsets, index.page_offsets, index.pages.flatten(), index.seq_lens
        )
        dims = {"num_heads": spec.num_q_heads, "head_dim_ckv": spec.latent_dim, "head_dim_kpe": spec.rope_dim}
        types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
        query, out = surroundings.query, torch.empty_like(surroundings.kernel_out)
        entries = paged(data.pool.plane("entry"), shape.page_size)

        def plan() -> None:
            step = {"page_size": shape.page_size, "causal": False, "sm_scale": spec.scale}
            wrapper.plan(metadata=rows, **dims, **step, **types)

        def run(layer: int) -> Tensor:
            wrapper.run(query=query, kv_cache=entries[layer], out=out)
            return out

        plan()
        return PeerKernel(run, plan)
