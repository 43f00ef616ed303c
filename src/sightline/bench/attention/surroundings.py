"""The rest of a layer around an attention kernel, in torch: the cache write, and the projections of latents.

    softmax          write ─▶ kernel
    latent, decode   write, queries into the latent space ─▶ kernel ─▶ outputs out of it
    latent, prefill  write, keys and values from latents  ─▶ kernel

Turns a kernel into a whole layer. Does not know the kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from sightline.attention.contract import LatentInputs, SoftmaxInputs
from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.bench.attention.data import ShapeData
from sightline.bench.attention.shapes import RowKind
from sightline.core.device import Device
from sightline.kernels.paging import write_entries


def _write_keys_values(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    write_entries(keys, slots, k)
    write_entries(values, slots, v)


def _write_latents(latent: Tensor, k_rope: Tensor, entries: Tensor, slots: Tensor) -> None:
    latent_dim = latent.shape[1]
    write_entries(entries[:, :latent_dim], slots, latent)
    write_entries(entries[:, latent_dim:], slots, k_rope)


@dataclass(frozen=True)
class CacheWrites:
    """The fastest cache writes available, so that the surroundings do not decide the comparison."""

    keys_values: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]
    latents: Callable[[Tensor, Tensor, Tensor, Tensor], object]

    @staticmethod
    def on(device: Device) -> CacheWrites:
        if device.torch_device.type == "cuda" and find_spec("triton") is not None:
            fused = import_module("sightline.kernels.triton.write")
            return CacheWrites(fused.write_keys_values, fused.write_latents)
        return CacheWrites(_write_keys_values, _write_latents)


class Surroundings(ABC):
    """The surroundings of one shape. Except for the cache, a kernel reads the same memory in every layer."""

    kernel_out: Tensor
    """Placeholder for the kernel's output."""

    @abstractmethod
    def before(self, layer: int) -> None:
        """Writes the cache and the kernel's inputs."""

    @abstractmethod
    def after(self, layer: int, given: Tensor) -> Tensor:
        """Computes the layer's output from the kernel's output."""

    def alone(self, layer: int) -> Tensor:
        """Runs the surroundings without a kernel."""
        self.before(layer)
        return self.after(layer, self.kernel_out)


class SoftmaxSurroundings(Surroundings):
    """Writes keys and values."""

    def __init__(self, data: ShapeData, inputs: SoftmaxInputs) -> None:
        self.inputs = inputs
        self.keys, self.values = data.pool.plane("k"), data.pool.plane("v")
        self.kernel_out = data.new_out()
        self._slots = data.write_slots
        self._write = CacheWrites.on(data.device).keys_values

    def before(self, layer: int) -> None:
        self._write(self.inputs.k, self.inputs.v, self.keys[layer], self.values[layer], self._slots)

    def after(self, layer: int, given: Tensor) -> Tensor:
        del layer
        return given


class _LatentSurroundings(Surroundings):
    """Writes [latent | rope] entries."""

    def __init__(self, data: ShapeData, inputs: tuple[LatentInputs, ...]) -> None:
        self.inputs = inputs
        self._entries, self._slots = data.pool.plane("entry"), data.write_slots
        self._write = CacheWrites.on(data.device).latents

    def before(self, layer: int) -> None:
        self._write(self.inputs[layer].latent, self.inputs[layer].k_rope, self._entries[layer], self._slots)


class AbsorbedSurroundings(_LatentSurroundings):
    """Takes queries into the latent space, where they attend to entries as cached."""

    def __init__(self, data: ShapeData, inputs: tuple[LatentInputs, ...], spec: LatentSpec) -> None:
        super().__init__(data, inputs)
        tokens, heads, like = data.shape.num_tokens, spec.num_q_heads, inputs[0].q_nope
        self.latent_dim = spec.latent_dim
        self.query = like.new_zeros(tokens, heads, spec.head_dim)
        """[num_tokens, num_q_heads, latent_dim | rope_dim]. In an engine the rotation writes the second part."""
        self.query[..., spec.latent_dim :] = inputs[0].q_rope
        self._q_latent = self.query[..., : spec.latent_dim].transpose(0, 1)
        self.kernel_out = like.new_zeros(tokens, heads, spec.latent_dim)
        self._out = data.new_out()

    def before(self, layer: int) -> None:
        super().before(layer)
        inputs = self.inputs[layer]
        torch.bmm(inputs.q_nope.transpose(0, 1), inputs.key_up, out=self._q_latent)

    def after(self, layer: int, given: Tensor) -> Tensor:
        taken = given.transpose(0, 1)
        torch.bmm(taken, self.inputs[layer].value_up.transpose(1, 2), out=self._out.transpose(0, 1))
        return self._out


class ExpandedSurroundings(_LatentSurroundings):
    """Computes keys and values of every head from the latents."""

    def __init__(self, data: ShapeData, inputs: tuple[LatentInputs, ...], spec: LatentSpec) -> None:
        super().__init__(data, inputs)
        tokens, heads, like = data.shape.num_tokens, spec.num_q_heads, inputs[0].q_nope
        head_dim = spec.nope_dim + spec.rope_dim
        whole = inputs[0].whole_queries()
        assert whole is not None, "each head's query is contiguous"
        self.q = whole
        """[num_tokens, num_q_heads, nope_dim + rope_dim]."""
        self.keys = like.new_zeros(tokens, heads, head_dim)
        self.values = like.new_zeros(tokens, heads, spec.value_dim)
        self.kernel_out = data.new_out()
        self._nope_dim = spec.nope_dim

    def before(self, layer: int) -> None:
        super().before(layer)
        inputs = self.inputs[layer]
        latents = inputs.latent.expand(inputs.key_up.shape[0], *inputs.latent.shape)
        torch.bmm(latents, inputs.key_up.transpose(1, 2), out=self.keys[..., : self._nope_dim].transpose(0, 1))
        self.keys[..., self._nope_dim :] = inputs.k_rope[:, None]
        torch.mm(inputs.latent, inputs.value_up.flatten(0, 1).T, out=self.values.flatten(1))

    def after(self, layer: int, given: Tensor) -> Tensor:
        del layer
        return given


def surround(data: ShapeData) -> Surroundings:
    """Builds the surroundings of a shape."""
    match data.shape.spec:
        case SoftmaxSpec():
            [inputs] = {id(each): each for each in data.inputs if isinstance(each, SoftmaxInputs)}.values()
            return SoftmaxSurroundings(data, inputs)
        case LatentSpec() as spec:
            by_layer = tuple(each for each in data.inputs if isinstance(each, LatentInputs))
            if data.shape.row_kind is RowKind.DECODE:
                return AbsorbedSurroundings(data, by_layer, spec)
            return ExpandedSurroundings(data, by_layer, spec)
