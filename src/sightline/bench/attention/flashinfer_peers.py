"""FlashInfer's kernels (version 0.7.2) as peers, through its wrappers, and the list of all peers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.bench.attention.data import ShapeData
from sightline.bench.attention.peers import (
    LATENT_DECODE,
    LATENT_PREFILL,
    SOFTMAX_DECODE,
    SOFTMAX_PREFILL,
    AttentionPeer,
    FlashAttention3Peer,
    FlashAttention4Peer,
    FlashMlaPeer,
    Form,
    PagedIndex,
    PeerKernel,
    SdpaPeer,
    new_keys_values,
    paged,
    wrong_surroundings,
)
from sightline.bench.attention.surroundings import AbsorbedSurroundings, SoftmaxSurroundings, Surroundings

_BACKEND = "fa3"
_WORKSPACE_BYTES = 256 << 20


class FlashInferPeer(AttentionPeer):
    """One of FlashInfer's wrappers."""

    def __init__(
        self, name: str, forms: set[Form], make: Callable[[ShapeData, Surroundings, Tensor], PeerKernel]
    ) -> None:
        """`make` builds the kernel, given a workspace."""
        self.name = f"flashinfer {name}"
        self.forms = frozenset(forms)
        self._make = make

    def missing(self) -> str | None:
        found = find_spec("flashinfer") is not None
        return None if found else "package flashinfer is not installed: pip install flashinfer-python"

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=data.device.torch_device)
        return self._make(data, surroundings, workspace)


def _decode(data: ShapeData, surroundings: Surroundings, workspace: Tensor) -> PeerKernel:
    """Paged decode with tensor cores."""
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    return _paged_kernel(data, surroundings, wrapper, ())


def _paged_prefill(data: ShapeData, surroundings: Surroundings, workspace: Tensor) -> PeerKernel:
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=_BACKEND)
    return _paged_kernel(data, surroundings, wrapper, (PagedIndex.of(data).query_offsets,), causal=True)


def _paged_kernel(
    data: ShapeData, surroundings: Surroundings, wrapper: Any, offsets: tuple[Tensor, ...], **options: bool
) -> PeerKernel:
    """A kernel over paged keys and values. `offsets` come before the pages in the arguments of `plan`."""
    shape, spec, index = data.shape, data.shape.spec, PagedIndex.of(data)
    if not (isinstance(surroundings, SoftmaxSurroundings) and isinstance(spec, SoftmaxSpec)):
        raise wrong_surroundings("flashinfer", surroundings)
    q, out = surroundings.inputs.q, data.new_out()
    keys, values = paged(surroundings.keys, shape.page_size), paged(surroundings.values, shape.page_size)
    last_page_lens = (index.seq_lens - 1) % shape.page_size + 1
    rows = (*offsets, index.page_offsets, index.pages.flatten(), last_page_lens)
    sizes = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, shape.page_size)
    return _planned(
        lambda: wrapper.plan(*rows, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=spec.scale, **options),
        lambda layer: wrapper.run(q, (keys[layer], values[layer]), out=out),
        out,
    )


def _ragged_prefill(data: ShapeData, surroundings: Surroundings, workspace: Tensor) -> PeerKernel:
    """Prefill over keys and values that are contiguous, row after row."""
    q, k, v = new_keys_values(surroundings, "flashinfer")
    offsets, out, scale = PagedIndex.of(data).query_offsets, data.new_out(), data.shape.spec.scale
    wrapper: Any = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=_BACKEND)
    heads = (q.shape[1], k.shape[1], q.shape[2])
    dims = {"head_dim_vo": v.shape[-1], "q_data_type": q.dtype, "kv_data_type": q.dtype}
    return _planned(
        lambda: wrapper.plan(offsets, offsets, *heads, causal=True, sm_scale=scale, **dims),
        lambda _: wrapper.run(q, k, v, out=out),
        out,
    )


def _latent_decode(data: ShapeData, surroundings: Surroundings, workspace: Tensor) -> PeerKernel:
    """Absorbed latent decode."""
    shape, spec, index = data.shape, data.shape.spec, PagedIndex.of(data)
    if not (isinstance(surroundings, AbsorbedSurroundings) and isinstance(spec, LatentSpec)):
        raise wrong_surroundings("flashinfer", surroundings)
    library: Any = import_module("flashinfer.mla")
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend=_BACKEND)
    rows = library.MLAPlanMetadata.csr(index.query_offsets, index.page_offsets, index.pages.flatten(), index.seq_lens)
    dims = {"num_heads": spec.num_q_heads, "head_dim_ckv": spec.latent_dim, "head_dim_kpe": spec.rope_dim}
    step = {"page_size": shape.page_size, "causal": False, "sm_scale": spec.scale}
    types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
    query, out = surroundings.query, torch.empty_like(surroundings.kernel_out)
    entries = paged(data.pool.plane("entry"), shape.page_size)
    return _planned(
        lambda: wrapper.plan(metadata=rows, **dims, **step, **types),
        lambda layer: wrapper.run(query=query, kv_cache=entries[layer], out=out),
        out,
    )


def _planned(plan: Callable[[], object], attend: Callable[[int], object], out: Tensor) -> PeerKernel:
    """A kernel that was planned once and writes `out`."""

    def run(layer: int) -> Tensor:
        attend(layer)
        return out

    plan()
    return PeerKernel(run, plan)


PEERS: tuple[AttentionPeer, ...] = (
    FlashInferPeer("decode", {SOFTMAX_DECODE}, _decode),
    FlashInferPeer(f"mla {_BACKEND}", {LATENT_DECODE}, _latent_decode),
    FlashInferPeer(f"ragged {_BACKEND}", {SOFTMAX_PREFILL, LATENT_PREFILL}, _ragged_prefill),
    FlashInferPeer(f"paged {_BACKEND}", {SOFTMAX_PREFILL}, _paged_prefill),
    FlashAttention3Peer(),
    FlashAttention4Peer(),
    FlashMlaPeer(),
    SdpaPeer("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
    SdpaPeer("sdpa flash", SDPBackend.FLASH_ATTENTION),
)
