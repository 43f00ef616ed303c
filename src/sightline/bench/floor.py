"""The floor: the least time of a step, which is its bytes over the read rate or its operations over the product rate.

Measures the rates of the machine and counts what a step reads and multiplies. Does not know engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from sightline.attention.groups import LayerGroup
from sightline.core.config import Quantization
from sightline.models.contract import ExpertStack
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.runner.runtime import Runtime

_PRODUCT_SIZES = (128, 512, 2048, 8192)
_AT_ONCE_SECONDS = 0.02
_IN_A_ROW = 8


@dataclass(frozen=True)
class Machine:
    """Rates of this machine, measured in the same run."""

    read_bytes_per_second: float
    """Read rate of a matrix-vector product in fp32."""
    operations_per_second: float
    """Rate of a square matrix product in the compute dtype."""

    def best(self, other: Machine) -> Machine:
        """The higher of both rates."""
        return Machine(
            max(self.read_bytes_per_second, other.read_bytes_per_second),
            max(self.operations_per_second, other.operations_per_second),
        )

    def __str__(self) -> str:
        read, product = self.read_bytes_per_second / 1e9, self.operations_per_second / 1e9
        return f"read {read:.1f} GB/s, product {product:.0f} GFLOP/s"


@dataclass(frozen=True)
class ExpertSize:
    """The experts of some layers."""

    weights: int
    num_bytes: int
    unused_share: float
    """The share of them that a token does not use."""


@dataclass(frozen=True)
class ModelSize:
    """The weights of a model."""

    layers: int
    vocabulary: int
    """Weights of the output projection."""
    num_bytes: int
    """Bytes of all weights, in the form in which they are multiplied."""
    experts: tuple[ExpertSize, ...] = ()
    """The part of the layers' weights of which each token uses a few."""

    @property
    def weights(self) -> int:
        return self.layers + self.vocabulary

    @property
    def used_by_a_token(self) -> float:
        """Weights of the layers that one token is multiplied with."""
        return self.layers - sum(each.weights * each.unused_share for each in self.experts)

    def read_by(self, num_rows: int) -> float:
        """Bytes that a step of so many tokens reads, if their experts are chosen evenly and independently."""
        return self.num_bytes - sum(each.num_bytes * each.unused_share**num_rows for each in self.experts)


@dataclass(frozen=True)
class CacheReads:
    """What a group of layers reads of a row's cache per step."""

    bytes_per_token: float
    window: int | None
    """Most tokens that it attends to: those of a window, or those that are chosen; None is all."""
    state_bytes: int = 0
    """What it reads and writes of a row whatever its context: recurrent states."""
    unread: int = 0
    """Contexts of no more tokens are not read: an indexer has nothing to choose from them."""

    def bytes_of(self, context: int) -> int:
        """Bytes that a row of so many cached tokens needs."""
        num_read = 0 if context <= self.unread else min(context, self.window or context)
        return round(self.bytes_per_token * num_read) + self.state_bytes


@dataclass(frozen=True)
class Floor:
    """The least time of any step of one model on one machine."""

    machine: Machine
    size: ModelSize
    caches: tuple[CacheReads, ...]

    def decode(self, contexts: Sequence[int]) -> float:
        """Seconds of one decode step: the weights once and every row's cache, or the products.

        `contexts` are the cached tokens of each row.
        """
        cached = sum(cache.bytes_of(context) for cache in self.caches for context in contexts)
        return max(
            (self.size.read_by(len(contexts)) + cached) / self.machine.read_bytes_per_second,
            2 * (self.size.used_by_a_token + self.size.vocabulary) * len(contexts) / self.machine.operations_per_second,
        )

    def decode_all(self, contexts: Sequence[int], num_steps: int) -> float:
        """Seconds of `num_steps` decode steps, in which every row grows by a token."""
        return sum(self.decode([context + step for context in contexts]) for step in range(1, num_steps + 1))

    def prefill(self, num_tokens: int) -> float:
        """Seconds of the products of `num_tokens` in the layers; only the last token needs the vocabulary."""
        return 2 * self.size.used_by_a_token * num_tokens / self.machine.operations_per_second


def measure_machine(dtype: torch.dtype, device: torch.device) -> Machine:
    """Measures this machine, with torch's number of threads."""
    matrix, vector = torch.ones(1 << 14, 1 << 13, device=device), torch.ones(1 << 13, device=device)
    read = min(_timed(lambda: matrix @ vector) for _ in range(5))
    return Machine(matrix.nbytes / read, _product_rate(dtype, device))


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Rate of the largest square product that is quick: 2048³ takes minutes without instructions for the dtype.

    A GPU needs a large one to be busy.
    """
    for size in _PRODUCT_SIZES:
        square = torch.rand(size, size, dtype=dtype, device=device)
        taken = min(_timed(partial(torch.mm, square, square)) for _ in range(5))
        if taken > _AT_ONCE_SECONDS:
            break
    return 2 * size**3 / taken


def model_size(
    checkpoint: Checkpoint, dtype: torch.dtype, quantization: str, stacks: Sequence[ExpertStack] = ()
) -> ModelSize:
    """Counts the weights from the checkpoint's headers, without reading them. `stacks` are the model's experts."""

    def bytes_of(info: TensorInfo) -> int:
        is_kept = quantization == Quantization.KEEP.value
        return _stored_bytes(info, dtype) if is_kept else math.prod(info.shape) * dtype.itemsize

    sizes = {name: math.prod(info.shape) for name, info in checkpoint.tensors.items()}
    embedding = sizes.get("model.embed_tokens.weight", 0)
    head = sizes.get("lm_head.weight", 0)
    multiplied = {
        name: info for name, info in checkpoint.tensors.items() if not (head and name == "model.embed_tokens.weight")
    }
    num_bytes = sum(bytes_of(info) for info in multiplied.values())
    stored = [[name for name in stack.names if name in multiplied] for stack in stacks]
    experts = tuple(
        ExpertSize(sum(sizes[name] for name in names), sum(bytes_of(multiplied[name]) for name in names), unused)
        for names, unused in zip(stored, [stack.unused_share for stack in stacks], strict=True)
    )
    return ModelSize(sum(sizes.values()) - embedding - head, head or embedding, num_bytes, experts)


def cache_reads(runtime: Runtime) -> tuple[CacheReads, ...]:
    """What the layer groups of an engine read per step."""
    return tuple(
        CacheReads(
            sum(pool.spec.bytes_per_token for pool in binding.cache.pools.values()),
            _most_read(binding.group),
            2 * binding.cache.states.spec.num_bytes,
            (binding.group.spec.top_k or 0) * binding.group.spec.tokens_per_entry if binding.group.chooses else 0,
        )
        for binding in runtime.bindings
    )


def _most_read(group: LayerGroup) -> int | None:
    """The most tokens whose entries in pages a query reads; None is all. A window that is part of a state does not
    count."""
    spec = group.spec
    if group.chooses or (spec.top_k is None and group.is_recurrent):
        return None
    return spec.window if spec.top_k is None else spec.top_k * spec.tokens_per_entry


def _stored_bytes(info: TensorInfo, dtype: torch.dtype) -> int:
    """Bytes in the file. A tensor joined from several types counts as equal parts of each."""
    rates: list[float] = []
    for name in info.stored_as.split("+"):
        if name in GGMLQuantizationType.__members__:
            block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
            rates.append(num_bytes / block)
        else:
            rates.append(float(dtype.itemsize))
    return round(math.prod(info.shape) * sum(rates) / len(rates))


def _timed(run: Callable[[], object]) -> float:
    """Seconds of a run. On a GPU one of several in a row, because the host takes long to launch and to wait."""
    if not torch.cuda.is_available():
        return _spent(run)

    def run_in_a_row() -> None:
        for _ in range(_IN_A_ROW):
            run()
        torch.cuda.synchronize()

    return _spent(run_in_a_row) / _IN_A_ROW


def _spent(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
