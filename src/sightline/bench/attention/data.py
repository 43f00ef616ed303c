"""A shape as tensors: pools with pages in random order, inputs for each layer, and expected outputs from the oracle.

All contenders read the same pools and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from sightline.attention.contract import AttentionInputs, LatentInputs, SoftmaxInputs
from sightline.attention.groups import LayerGroup, group_layers
from sightline.attention.oracle.attention import attend_latent_row, attend_row
from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.bench.attention.shapes import RowKind, Shape
from sightline.cache.layout import Layout, arrange_free_pages, walk_slots
from sightline.cache.pools import CacheLimits, Pool
from sightline.cache.store import CacheStore
from sightline.core.batch import Batch, RowWork
from sightline.core.device import Device, DeviceKind
from sightline.runner.batching import assemble

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest relative error of an output vector. A wrong page gives ten times as much."""
MAX_LAYERS = 64
_CHECKED_ROWS = 4
_NEW_VALUE_FACTOR = 16.0
"""In decode, new values are larger than cached ones, so that a step that does not read its own token is detected."""
_NEW_LATENT_FACTOR = 4.0
_Normal: TypeAlias = Callable[..., Tensor]
"""Returns random numbers of a shape."""


@dataclass(frozen=True, eq=False)
class Sample:
    """The expected output of one token."""

    token: int
    expected: Tensor
    """[num_q_heads, out_dim] fp32, in the last layer."""


@dataclass(frozen=True, eq=False)
class ShapeData:
    """One shape in memory."""

    shape: Shape
    device: Device
    group: LayerGroup
    store: CacheStore
    batch: Batch
    inputs: tuple[AttentionInputs, ...]
    """By layer: the same queries and new entries, and the layer's own projections."""
    samples: tuple[Sample, ...]

    @property
    def num_layers(self) -> int:
        return len(self.inputs)

    @property
    def pool(self) -> Pool:
        [pool] = self.store.pools
        return pool

    @property
    def write_slots(self) -> Tensor:
        """[num_tokens] int64."""
        return self.batch.pools[self.pool.key].write_slots

    def new_out(self) -> Tensor:
        """An output [num_tokens, num_q_heads, out_dim], filled with NaN."""
        spec, shape = self.shape.spec, self.shape
        size = (shape.num_tokens, spec.num_q_heads, spec.out_dim)
        return torch.full(size, torch.nan, dtype=shape.dtype, device=self.device.torch_device)

    def forget(self) -> None:
        """Overwrites the new entries with NaN in every layer, so that a missing cache write is detected."""
        for plane in self.pool.spec.planes:
            self.pool.plane(plane.name)[:, self.write_slots] = torch.nan

    def error(self, out: Tensor) -> float:
        """Largest relative error of the last layer's output against the oracle; infinite if anything is NaN."""
        flat = out.reshape(self.shape.num_tokens, self.shape.spec.num_q_heads, -1)
        worst = 0.0
        for sample in self.samples:
            difference = (flat[sample.token].float() - sample.expected).norm(dim=-1)
            relative = (difference / sample.expected.norm(dim=-1)).max()
            worst = max(worst, torch.nan_to_num(relative, nan=torch.inf).item())
        return worst

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.shape.dtype]


def count_layers(shape: Shape, device: Device) -> int:
    """Number of layers whose caches are twice as large as the device's L2 cache, so that each layer reads memory."""
    if device.kind is DeviceKind.CPU:
        return 2
    cached = torch.cuda.get_device_properties(device.torch_device).L2_cache_size
    return min(MAX_LAYERS, max(2, -(-2 * cached // shape.attention.num_bytes)))


def pool_bytes(shape: Shape, num_layers: int) -> int:
    """Bytes of the cache of all layers."""
    return shape.num_pages * shape.page_size * shape.entry_bytes * num_layers


def build_data(shape: Shape, device: Device, num_layers: int, seed: int = 5) -> ShapeData:
    """Builds random pools and inputs, equal for equal seeds."""
    target = device.torch_device
    generator = torch.Generator(target).manual_seed(seed)
    [group] = group_layers([shape.spec] * num_layers)
    limits = CacheLimits(shape.num_pages, shape.page_size, shape.num_rows, shape.length)
    store = CacheStore([group.cache_spec(shape.dtype)], limits, target)
    for pool in store.pools:
        for plane in pool.spec.planes:
            pool.plane(plane.name).normal_(generator=generator)
    arrange_free_pages(store, Layout.SHUFFLED)
    rows = [store.open_row() for _ in range(shape.num_rows)]
    for row in rows:
        store.grow_row(row, shape.length)
        store.fill_row(row, shape.context_len)
    batch = assemble([RowWork(row, [1] * shape.query_len, shape.context_len, 1) for row in rows], store)
    inputs = _inputs(shape, num_layers, generator)
    samples = tuple(_samples(shape, store, batch, inputs[-1]))
    return ShapeData(shape, device, group, store, batch, inputs, samples)


def _inputs(shape: Shape, num_layers: int, generator: torch.Generator) -> tuple[AttentionInputs, ...]:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device, dtype=shape.dtype)

    match shape.spec:
        case SoftmaxSpec() as spec:
            return (_softmax_inputs(shape, spec, normal),) * num_layers
        case LatentSpec() as spec:
            return _latent_inputs(shape, spec, num_layers, normal)


def _softmax_inputs(shape: Shape, spec: SoftmaxSpec, normal: _Normal) -> SoftmaxInputs:
    factor = _NEW_VALUE_FACTOR if shape.row_kind is RowKind.DECODE else 1.0
    entry = (shape.num_tokens, spec.num_kv_heads, spec.head_dim)
    q = normal(shape.num_tokens, spec.num_q_heads, spec.head_dim)
    return SoftmaxInputs(q=q, k=normal(*entry), v=normal(*entry) * factor, sinks=None)


def _latent_inputs(shape: Shape, spec: LatentSpec, num_layers: int, normal: _Normal) -> tuple[LatentInputs, ...]:
    """Each head's query is contiguous, which is the cheapest form; peers get the same."""
    factor = _NEW_LATENT_FACTOR if shape.row_kind is RowKind.DECODE else 1.0
    q = normal(shape.num_tokens, spec.num_q_heads, spec.nope_dim + spec.rope_dim)
    latent, k_rope = normal(shape.num_tokens, spec.latent_dim) * factor, normal(shape.num_tokens, spec.rope_dim)
    return tuple(
        LatentInputs(
            q_nope=q[..., : spec.nope_dim],
            q_rope=q[..., spec.nope_dim :],
            latent=latent,
            k_rope=k_rope,
            key_up=normal(spec.num_q_heads, spec.nope_dim, spec.latent_dim) * spec.latent_dim**-0.5,
            value_up=normal(spec.num_q_heads, spec.value_dim, spec.latent_dim) * spec.latent_dim**-0.5,
        )
        for _ in range(num_layers)
    )


def _samples(shape: Shape, store: CacheStore, batch: Batch, inputs: AttentionInputs) -> Iterator[Sample]:
    """Expected outputs of some tokens of some rows, from the first to the last."""
    [pool] = store.pools
    offsets = batch.query_offsets_host()
    for row in _spread(shape.num_rows):
        slots = walk_slots(pool, batch.rows[row], shape.context_len)
        context = torch.tensor(slots, dtype=torch.int64, device=batch.tokens.device)
        for place in _spread(shape.query_len):
            token = offsets[row] + place
            yield Sample(token, _answer(shape, pool, context, inputs, slice(offsets[row], token + 1)))


def _spread(count: int) -> list[int]:
    picked = {index * (count - 1) // max(_CHECKED_ROWS - 1, 1) for index in range(_CHECKED_ROWS)}
    return sorted(picked)


def _answer(shape: Shape, pool: Pool, context: Tensor, inputs: AttentionInputs, tokens: slice) -> Tensor:
    """The oracle's output for the last of the row's `tokens`, which attends to the context and to all of them."""
    query = slice(tokens.stop - 1, tokens.stop)
    visible = torch.ones(1, shape.context_len + tokens.stop - tokens.start, dtype=torch.bool)
    match shape.spec, inputs:
        case SoftmaxSpec() as spec, SoftmaxInputs() as given:
            keys = torch.cat([pool.plane("k")[-1, context], given.k[tokens]])
            values = torch.cat([pool.plane("v")[-1, context], given.v[tokens]])
            return attend_row(spec, given.q[query], keys, values, visible, None)[0][0]
        case LatentSpec() as spec, LatentInputs() as given:
            new = torch.cat([given.latent[tokens], given.k_rope[tokens]], dim=-1)
            entries = torch.cat([pool.plane("entry")[-1, context], new])
            queries = (given.q_nope[query], given.q_rope[query])
            return attend_latent_row(spec, *queries, entries, given.key_up, given.value_up, visible)[0][0]
        case spec, given:
            raise TypeError(f"expected inputs for {type(spec).__name__}, got {type(given).__name__}")
