"""Attention kernels of other libraries to compare with. None is a dependency; each is imported only if requested.

    peer ── missing ─▶ why it is not installed
         ── refuses ─▶ why it does not serve a shape
         ── build   ─▶ its kernel over the shape's pools, planned ─▶ a contender: the kernel in a layer's surroundings

FlashInfer's kernels are in `flashinfer_peers`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sightline.attention.kinds import SpecKind
from sightline.attention.spec import LatentSpec
from sightline.bench.attention.contenders import Contender, Origin
from sightline.bench.attention.data import ShapeData
from sightline.bench.attention.shapes import RowKind, Shape
from sightline.bench.attention.surroundings import (
    AbsorbedSurroundings,
    ExpandedSurroundings,
    SoftmaxSurroundings,
    Surroundings,
    surround,
)
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import SightlineError

Form: TypeAlias = tuple[SpecKind, RowKind]
SOFTMAX_DECODE, SOFTMAX_PREFILL = (SpecKind.SOFTMAX, RowKind.DECODE), (SpecKind.SOFTMAX, RowKind.PREFILL)
LATENT_DECODE, LATENT_PREFILL = (SpecKind.LATENT, RowKind.DECODE), (SpecKind.LATENT, RowKind.PREFILL)
_CUDA = frozenset({DeviceKind.CUDA})


@dataclass(frozen=True, eq=False)
class PeerKernel:
    """A library's kernel, planned for one shape."""

    run: Callable[[int], Tensor]
    """Runs the attention of a layer on the tensors of the surroundings."""
    plan: Callable[[], object] | None = None
    """Host work per step."""


class AttentionPeer(ABC):
    """A kernel of another library."""

    name: str
    forms: frozenset[Form]
    devices: ClassVar[frozenset[DeviceKind]] = _CUDA

    @abstractmethod
    def missing(self) -> str | None:
        """What is not installed; None if everything is."""

    @abstractmethod
    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        """Plans the kernel. Errors of the library are not caught."""

    def refuses(self, shape: Shape, device: Device) -> str | None:
        """Why it does not serve the shape on the device; None if it does."""
        if device.kind not in self.devices:
            return f"does not run on {device.kind.value}"
        if (shape.spec.kind, shape.row_kind) not in self.forms:
            return f"does not serve {shape.spec.kind.value} {shape.row_kind.value}"
        if device.kind is DeviceKind.CUDA and shape.dtype not in (torch.bfloat16, torch.float16):
            return f"does not compute in {shape.dtype}"
        return None

    def build(self, data: ShapeData) -> Contender:
        """Builds the kernel with the rest of a layer around it."""
        surroundings = surround(data)
        surroundings.before(0)
        kernel = self.kernel(data, surroundings)

        def layer(index: int) -> Tensor:
            surroundings.before(index)
            return surroundings.after(index, kernel.run(index))

        return Contender(self.name, Origin.PEER, layer, kernel.run, kernel.plan, None, None)


@dataclass(frozen=True, eq=False)
class PagedIndex:
    """A batch's lengths and pages as libraries expect them; all int32."""

    query_offsets: Tensor
    """[num_rows + 1], on the host."""
    page_offsets: Tensor
    """[num_rows + 1], on the host."""
    seq_lens: Tensor
    """[num_rows], on the host."""
    pages: Tensor
    """[num_rows, pages per row], on the device."""

    @staticmethod
    def of(data: ShapeData) -> PagedIndex:
        shape = data.shape
        rows = torch.arange(shape.num_rows + 1, dtype=torch.int32)
        pages = data.pool.table.pages[list(data.batch.rows)].to(torch.int32).contiguous()
        seq_lens = torch.full((shape.num_rows,), shape.length, dtype=torch.int32)
        return PagedIndex(rows * shape.query_len, rows * pages.shape[1], seq_lens, pages)


def paged(plane: Tensor, page_size: int) -> Tensor:
    """A view [num_layers, num_pages, page_size, ...] of [num_layers, num_slots, ...]."""
    return plane.view(plane.shape[0], -1, page_size, *plane.shape[2:])


def wrong_surroundings(peer: str, surroundings: Surroundings) -> SightlineError:
    return SightlineError(f"expected surroundings that {peer} supports, got {type(surroundings).__name__}")


def new_keys_values(surroundings: Surroundings, peer: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a prefill without context: [num_tokens, heads, dim] each."""
    match surroundings:
        case SoftmaxSurroundings(inputs=inputs):
            return inputs.q, inputs.k, inputs.v
        case ExpandedSurroundings():
            return surroundings.q, surroundings.keys, surroundings.values
        case _:
            raise wrong_surroundings(peer, surroundings)


class SdpaPeer(AttentionPeer):
    """Torch's `scaled_dot_product_attention` over rows of equal length."""

    forms = frozenset({SOFTMAX_PREFILL, LATENT_PREFILL})
    devices: ClassVar[frozenset[DeviceKind]] = frozenset(DeviceKind)

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = name
        self._backend = backend

    def missing(self) -> str | None:
        return None

    def refuses(self, shape: Shape, device: Device) -> str | None:
        on_cudnn = self._backend is SDPBackend.CUDNN_ATTENTION
        if on_cudnn and device.kind is DeviceKind.CPU:
            return "does not run on cpu"
        if not on_cudnn and shape.spec.kind is SpecKind.LATENT and _head_dims(shape)[0] != _head_dims(shape)[1]:
            return "does not support values that are shorter than keys"
        return super().refuses(shape, device)

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        parts = new_keys_values(surroundings, self.name)
        q, k, v = (part.view(data.shape.num_rows, -1, *part.shape[1:]).transpose(1, 2) for part in parts)
        scale, grouped = data.shape.spec.scale, q.shape[1] != k.shape[1]

        def run(layer: int) -> Tensor:
            del layer
            with sdpa_kernel(self._backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            return out.transpose(1, 2)

        return PeerKernel(run)


def _head_dims(shape: Shape) -> tuple[int, int]:
    """Head dimensions of keys and of values in a prefill kernel."""
    match shape.spec:
        case LatentSpec(nope_dim=nope, rope_dim=rope, value_dim=value):
            return nope + rope, value
        case spec:
            return spec.head_dim, spec.out_dim


def _find_library(file: str) -> Path | None:
    """Looks for a shared library on the import path."""
    return next((path for folder in sys.path if (path := Path(folder) / file).is_file()), None)


def _load_library(file: str) -> None:
    """Registers the library's operations with torch. Loading it again is harmless."""
    path = _find_library(file)
    if path is None:
        raise SightlineError(f"expected {file} in a folder of PYTHONPATH, got none")
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]


def _missing_library(file: str) -> str | None:
    return None if _find_library(file) else f"no {file} in a folder of PYTHONPATH"


def call(operation: Any, *arguments: object) -> Any:
    """Calls an operation of a library. If the arguments do not match, the error shows its schema."""
    try:
        return operation(*arguments)
    except (RuntimeError, TypeError) as error:
        raise SightlineError(f"{error}; the library has {operation.default._schema}") from error


class FlashAttention3Peer(AttentionPeer):
    """FlashAttention 3 as vLLM builds it: paged in decode, ragged in prefill. Latents use its second query."""

    name = "flash-attention-3"
    forms = frozenset({SOFTMAX_DECODE, SOFTMAX_PREFILL, LATENT_DECODE, LATENT_PREFILL})
    _file: ClassVar[str] = "_vllm_fa3_C.abi3.so"

    def missing(self) -> str | None:
        return _missing_library(self._file)

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        _load_library(self._file)
        operations = torch.ops._vllm_fa3_C
        if data.shape.row_kind is RowKind.DECODE:
            return self._decode(operations, data, surroundings)
        return self._prefill(operations, data, surroundings)

    def _decode(self, operations: Any, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        shape, index, target = data.shape, PagedIndex.of(data), data.device.torch_device
        q, q_v, keys, values = self._paged_tensors(data, surroundings)
        offsets, seq_lens = index.query_offsets.to(target), index.seq_lens.to(target)
        out = torch.empty(*q.shape[:2], values.shape[-1], dtype=q.dtype, device=target)
        heads = (q.shape[1], keys.shape[-2], q.shape[-1], values.shape[-1])

        def plan() -> Tensor:
            sizes = (shape.num_rows, 1, shape.length, *heads, q.dtype, seq_lens, offsets, None, None, None, None)
            metadata: Tensor = call(
                operations.get_scheduler_metadata, *sizes, shape.page_size, 0, True, -1, -1, False, 0, None, 0
            )
            return metadata

        metadata = plan()

        def run(layer: int) -> Tensor:
            tensors = (q, keys[layer], values[layer], None, None, q_v, out, offsets, None, None, None, seq_lens)
            self._forward(operations, tensors, (1, shape.length), index.pages, shape.spec.scale, metadata)
            return out

        return PeerKernel(run, plan)

    def _prefill(self, operations: Any, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        shape = data.shape
        q, k, v = new_keys_values(surroundings, self.name)
        offsets = PagedIndex.of(data).query_offsets.to(q.device)
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)

        def run(layer: int) -> Tensor:
            del layer
            tensors = (q, k, v, None, None, None, out, offsets, offsets, None, None, None)
            self._forward(operations, tensors, (shape.length, shape.length), None, shape.spec.scale, None)
            return out

        return PeerKernel(run)

    def _paged_tensors(
        self, data: ShapeData, surroundings: Surroundings
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Queries, second queries, keys and values. The last two are [num_layers, num_pages, page_size, heads, dim]."""
        page_size = data.shape.page_size
        match surroundings:
            case SoftmaxSurroundings(inputs=inputs, keys=keys, values=values):
                return inputs.q, None, paged(keys, page_size), paged(values, page_size)
            case AbsorbedSurroundings(query=query, latent_dim=latent_dim):
                entries = paged(data.pool.plane("entry"), page_size).unsqueeze(-2)
                parts = (query[..., latent_dim:], query[..., :latent_dim])
                return *parts, entries[..., latent_dim:], entries[..., :latent_dim]
            case _:
                raise wrong_surroundings(self.name, surroundings)

    @staticmethod
    def _forward(
        operations: Any,
        tensors: tuple[Tensor | None, ...],
        longest: tuple[int, int],
        pages: Tensor | None,
        scale: float,
        metadata: Tensor | None,
    ) -> None:
        """Positional arguments: no rotation, no fp8 scales, causal, no window, no softcap, no sinks, one rank."""
        none6 = (None,) * 6
        call(
            operations.fwd,
            *(*tensors, *longest, pages, None, None, *none6, scale, True, -1, -1, 0.0, True),
            *(metadata, 0, None, 0, None, 1, 0, None),
        )


class FlashMlaPeer(AttentionPeer):
    """DeepSeek's FlashMLA as vLLM builds it."""

    name = "flash-mla"
    forms = frozenset({LATENT_DECODE})
    _file: ClassVar[str] = "_flashmla_C.abi3.so"

    def missing(self) -> str | None:
        return _missing_library(self._file)

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        _load_library(self._file)
        operation = torch.ops._flashmla_C.dense_decode_fwd
        if not isinstance(surroundings, AbsorbedSurroundings):
            raise wrong_surroundings(self.name, surroundings)
        index, latent_dim = PagedIndex.of(data), surroundings.latent_dim
        query, seq_lens = surroundings.query.unsqueeze(1), index.seq_lens.to(data.device.torch_device)
        entries = paged(data.pool.plane("entry"), data.shape.page_size).unsqueeze(-2)
        rows = (latent_dim, seq_lens, index.pages, data.shape.spec.scale, True)
        # The first call computes how rows are split; later calls reuse that.
        _, _, *splits = call(operation, query, entries[0], *rows, None, None, None)

        def run(layer: int) -> Tensor:
            out: Tensor = call(operation, query, entries[layer], *rows, *splits, None)[0]
            return out.squeeze(1)

        return PeerKernel(run)


class FlashAttention4Peer(AttentionPeer):
    """FlashAttention 4 (CuTe DSL) over ragged rows."""

    name = "flash-attention-4"
    forms = frozenset({SOFTMAX_PREFILL, LATENT_PREFILL})

    def missing(self) -> str | None:
        found = find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
        return None if found else "package flash_attn.cute is not installed: pip install flash-attn-4"

    def kernel(self, data: ShapeData, surroundings: Surroundings) -> PeerKernel:
        attend = import_module("flash_attn.cute").flash_attn_varlen_func
        q, k, v = new_keys_values(surroundings, self.name)
        offsets, length = PagedIndex.of(data).query_offsets.to(q.device), data.shape.length
        lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": length, "max_seqlen_k": length}

        def run(layer: int) -> Tensor:
            del layer
            out: Tensor = attend(q, k, v, **lengths, softmax_scale=data.shape.spec.scale, causal=True)[0]
            return out

        return PeerKernel(run)
