"""The operations as compiled CPU kernels, one record each, which a launcher runs or keeps for a program."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from sightline.kernels.cpu import norms, pointwise, states
from sightline.kernels.cpu.compiled import compiled
from sightline.kernels.cpu.compiler import CompiledKernel
from sightline.kernels.cpu.instructions import ELEMENTS
from sightline.kernels.cpu.pointwise import GateCode
from sightline.kernels.cpu.record import Launcher, Record, float_bits
from sightline.layers import portable
from sightline.layers.activation import Activation, ClampedSilu, ClampedSwiglu, Gate
from sightline.layers.decay_rates import DecayRates
from sightline.layers.norm import GroupNorm, HeadNorms, LayerNorm, RmsNorm
from sightline.layers.operations import HEAD_GATES, IndexRows, LatentRows, Operations, TurnedHeads
from sightline.layers.rotary import Rotary, RotaryTable, WindowTable
from sightline.layers.stream_mix import StreamMix, StreamShares
from sightline.layers.time_steps import TimeSteps

_CODES: MappingProxyType[Activation, GateCode] = MappingProxyType(
    {
        Activation.SILU: GateCode.SILU,
        Activation.GELU: GateCode.GELU,
        Activation.GELU_TANH: GateCode.GELU_TANH,
        Activation.RELU: GateCode.RELU,
        Activation.SIGMOID: GateCode.SIGMOID,
    }
)


class CpuOperations(Operations):
    """Buffers are row-major, and of one dtype; logits are fp32."""

    turns = False

    def __init__(self, launcher: Launcher, dtype: torch.dtype) -> None:
        """Compiles every kernel for buffers of this dtype."""
        self._launcher = launcher
        self._dtype = dtype
        element = ELEMENTS[dtype]
        self._take_rows = compiled(pointwise.make_take_rows, element, 0)
        self._add_rows = compiled(pointwise.make_take_rows, element, 1)
        self._rotary_table = compiled(norms.make_rotary_table, element)
        self._rms_norm = compiled(norms.make_rms_norm, element)
        self._add_rms_norm = compiled(norms.make_add_rms_norm, element)
        self._layer_norm = compiled(norms.make_layer_norm, element)
        self._turn = compiled(norms.make_turn, element)
        self._turn_index = compiled(norms.make_turn_index, element)
        self._gates = {code: compiled(pointwise.make_gate, element, code) for code in GateCode}
        self._activations = {code: compiled(pointwise.make_activate, element, code) for code in _CODES.values()}
        self._gated_norms = {kind: compiled(states.make_gated_norm, element, _CODES[kind]) for kind in HEAD_GATES}
        self._delta_gates = {bounded: compiled(states.make_delta_gates, element, bounded) for bounded in (False, True)}
        self._time_steps = compiled(states.make_time_steps, element)
        self._norm_gated = compiled(states.make_norm_gated, element)
        self._multiply = compiled(pointwise.make_multiply, element)
        self._gate_heads = compiled(states.make_gate_heads, element)
        self._copy = compiled(pointwise.make_widen, element, element)
        self._widen = compiled(pointwise.make_widen, element, ELEMENTS[torch.float32])
        self._scale = compiled(pointwise.make_scale)
        self._softcap = compiled(pointwise.make_softcap)
        self._best_tokens = compiled(pointwise.make_best_tokens)

    def embed(self, weight: Tensor, tokens: Tensor, scale: float, out: Tensor) -> None:
        self._look_up(self._take_rows, weight, tokens, rounded(scale, out.dtype), out)

    def add_rows(self, table: Tensor, rows: Tensor, out: Tensor) -> None:
        self._look_up(self._add_rows, table, rows, 1.0, out)

    def _look_up(self, kernel: CompiledKernel, table: Tensor, rows: Tensor, scale: float, out: Tensor) -> None:
        arguments = (*self._rows(table), rows.data_ptr(), *out.shape, float_bits(scale), *self._rows(out))
        self._launch(kernel, (*arguments, len(table)), table, rows, out)

    def rotary_table(self, rotary: Rotary, positions: Tensor, out: RotaryTable) -> None:
        tables = (out.cos, out.sin, out.minus_sin)
        frequencies = rotary.frequencies
        places = [place for table in tables for place in self._rows(table)]
        arguments = (
            positions.data_ptr(),
            len(positions),
            frequencies.data_ptr(),
            len(frequencies),
            float_bits(rotary.amplitude),
            *places,
        )
        self._launch(self._rotary_table, arguments, positions, frequencies, *tables)

    def window_table(self, rotary: Rotary, positions: Tensor, size: int, out: WindowTable) -> None:
        portable.window_table(rotary, positions, size, out)

    def norm(self, x: Tensor, norm: RmsNorm, out: Tensor) -> None:
        self._norm(x, 0, norm, out, x)

    def norm_rows(self, x: Tensor, rows: Tensor, norm: RmsNorm, out: Tensor) -> None:
        self._norm(x, rows.data_ptr(), norm, out, x, rows)

    def _norm(self, x: Tensor, rows: int, norm: RmsNorm, out: Tensor, *keeps: Tensor) -> None:
        arguments = (*self._rows(x), rows, *out.shape, *_weighted(norm), *self._rows(out))
        self._launch(self._rms_norm, arguments, norm.weight, out, *keeps)

    def add_normed(self, result: Tensor, norm: RmsNorm, stream: Tensor) -> None:
        arguments = (*self._rows(result), *self._rows(stream), *stream.shape, *_weighted(norm), 0, 0, 0, 0)
        self._launch(self._add_rms_norm, arguments, result, norm.weight, stream)

    def add_normed_then_norm(
        self, result: Tensor, norm: RmsNorm, stream: Tensor, next_norm: RmsNorm, out: Tensor
    ) -> None:
        weights = (*_weighted(norm), *_weighted(next_norm))
        arguments = (*self._rows(result), *self._rows(stream), *stream.shape, *weights, *self._rows(out))
        self._launch(self._add_rms_norm, arguments, result, norm.weight, stream, next_norm.weight, out)

    def layer_norm(self, x: Tensor, norm: LayerNorm, out: Tensor) -> None:
        weights = (norm.weight.data_ptr(), norm.bias.data_ptr(), float_bits(norm.epsilon))
        self._launch(
            self._layer_norm, (*self._rows(x), *x.shape, *weights, *self._rows(out)), x, norm.weight, norm.bias, out
        )

    def turn_heads(self, heads: TurnedHeads, norms: HeadNorms | None, table: RotaryTable) -> None:
        x, out, num_q_heads = heads.turned.whole, heads.rotated.whole, heads.q.shape[1]
        if norms is None:
            self._rotate(x, table, out, (0, 0, num_q_heads, 0, 0))
        else:
            weights = (*_weighted(norms.q), num_q_heads, *_weighted(norms.k))
            self._rotate(x, table, out, weights, norms.q.weight, norms.k.weight)

    def turn_latents(self, rows: LatentRows, norm: RmsNorm, table: RotaryTable) -> None:
        self.norm(rows.unnormed, norm, rows.latent)
        turned, rotated = rows.turned.whole, rows.rotated.whole
        without = (0, 0, 0, 0, 0)
        # The key's part is read where it was projected: it needs no room beside the queries'.
        self._rotate(turned[:, :-1], table, rotated[:, :-1], without)
        self._rotate(rows.k_rope.unsqueeze(1), table, rotated[:, -1:], without)

    def turn_index(self, rows: IndexRows, norm: LayerNorm, table: RotaryTable) -> None:
        arguments = (
            *self._rows(rows.q),
            rows.q.stride(1),
            *rows.q.shape,
            *self._rows(rows.key),
            *(norm.weight.data_ptr(), norm.bias.data_ptr(), float_bits(norm.epsilon)),
            *self._rows(table.cos),
            *self._rows(table.sin),
            table.cos.shape[-1],
            *self._rows(rows.turned),
        )
        self._launch(self._turn_index, arguments, *rows, norm.weight, norm.bias, table.cos, table.sin)

    def _rotate(
        self, x: Tensor, table: RotaryTable, out: Tensor, norms: tuple[int, int, int, int, int], *keeps: Tensor
    ) -> None:
        arguments = (
            *self._rows(x),
            x.stride(1),
            *x.shape,
            *self._rows(table.cos),
            *self._rows(table.sin),
            *self._rows(out),
            out.stride(1),
            *norms,
        )
        self._launch(self._turn, arguments, x, table.cos, table.sin, out, *keeps)

    def turn_tails(self, x: Tensor, norm: RmsNorm | None, table: RotaryTable, *, back: bool = False) -> None:
        portable.turn_tails(x, norm, table, back=back)

    def add_places(self, x: Tensor, bias: Tensor, places: Tensor, out: Tensor) -> None:
        portable.add_places(x, bias, places, out)

    def collapse_streams(
        self, streams: Tensor, logits: Tensor, mix: StreamMix, shares: StreamShares, out: Tensor
    ) -> None:
        portable.collapse_streams(streams, logits, mix, shares, out)

    def expand_streams(self, result: Tensor, shares: StreamShares, streams: Tensor) -> None:
        portable.expand_streams(result, shares, streams)

    def join_streams(self, streams: Tensor, logits: Tensor, mix: StreamMix, out: Tensor) -> None:
        portable.join_streams(streams, logits, mix, out)

    def gate(self, kind: Gate, gate: Tensor, up: Tensor, out: Tensor) -> None:
        match kind:
            case Activation():
                code, alpha, limit = _CODES[kind], 0.0, 0.0
            case ClampedSwiglu(alpha, limit):
                code = GateCode.CLAMPED_SWIGLU
            case ClampedSilu(limit):
                code, alpha = GateCode.CLAMPED_SILU, 1.0
        arguments = (*self._rows(gate), *self._rows(up), *self._rows(out), *out.shape)
        self._launch(self._gates[code], (*arguments, float_bits(alpha), float_bits(limit)), gate, up, out)

    def activate(self, kind: Activation, x: Tensor) -> None:
        self._launch(self._activations[_CODES[kind]], (*self._rows(x), *x.shape), x)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: RmsNorm, activation: Activation, out: Tensor) -> None:
        places = [place for each in (x, gate, out) for place in (*self._rows(each), each.stride(1))]
        arguments = (*places, *x.shape, *_weighted(norm))
        self._launch(self._gated_norms[activation], arguments, x, gate, norm.weight, out)

    def delta_gates(self, x: Tensor, shares: Tensor, rates: DecayRates, decay: Tensor, beta: Tensor) -> None:
        log_rates, bias, bound = rates
        num_tokens, num_heads = shares.shape
        x, decay = (each.view(num_tokens, bias.numel()) for each in (x, decay))
        weights = (log_rates.data_ptr(), bias.data_ptr(), num_heads, float_bits(0.0 if bound is None else bound))
        places = (*self._rows(x), *x.shape, *weights, *_fp32_rows(decay), *self._rows(shares), *_fp32_rows(beta))
        self._launch(self._delta_gates[bound is not None], places, x, shares, log_rates, bias, decay, beta)

    def gate_heads(self, gate: Tensor, x: Tensor) -> None:
        arguments = (*self._rows(gate), *self._rows(x), x.stride(1), *x.shape)
        self._launch(self._gate_heads, arguments, gate, x)

    def time_steps(self, x: Tensor, steps: TimeSteps, times: Tensor, decays: Tensor) -> None:
        limits = (float_bits(steps.least), float_bits(steps.most))
        weights = (steps.bias.data_ptr(), steps.log_rates.data_ptr(), *limits)
        arguments = (*self._rows(x), *x.shape, *weights, *_fp32_rows(times), *_fp32_rows(decays))
        self._launch(self._time_steps, arguments, x, steps.bias, steps.log_rates, times, decays)

    def norm_gated(self, x: Tensor, gate: Tensor, norm: GroupNorm, out: Tensor) -> None:
        rows = (*self._rows(x), *self._rows(gate), *self._rows(out))
        weight = (*norm.weight.shape, norm.weight.data_ptr(), float_bits(norm.epsilon))
        self._launch(self._norm_gated, (*rows, len(x), *weight), x, gate, norm.weight, out)

    def multiply(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        arguments = (*self._rows(x), *self._rows(y), *self._rows(out), *out.shape)
        self._launch(self._multiply, arguments, x, y, out)

    def copy(self, x: Tensor, out: Tensor) -> None:
        self._launch(self._copy, (*self._rows(x), *x.shape, *self._rows(out)), x, out)

    def widened(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return x
        out = x.new_empty(x.shape, dtype=torch.float32)
        self._launch(self._widen, (*self._rows(x), *x.shape, *_fp32_rows(out)), x, out)
        return out

    def scale(self, logits: Tensor, factor: float) -> None:
        self._launch(self._scale, (*_fp32_rows(logits), *logits.shape, float_bits(factor)), logits)

    def softcap(self, logits: Tensor, cap: float) -> None:
        arguments = (*_fp32_rows(logits), *logits.shape, float_bits(cap))
        self._launch(self._softcap, arguments, logits)

    def best_tokens(self, logits: Tensor, out: Tensor) -> None:
        arguments = (*_fp32_rows(logits), *logits.shape, out[0].data_ptr(), out[1].data_ptr())
        self._launch(self._best_tokens, arguments, logits, out)

    def _rows(self, x: Tensor) -> tuple[int, int]:
        """Address and row stride of a buffer whose last dimension is contiguous."""
        if x.dtype != self._dtype or x.stride(-1) != 1:
            raise ValueError(
                f"expected row-major buffers of {self._dtype}, got {x.dtype} with strides {tuple(x.stride())}"
            )
        return x.data_ptr(), x.stride(0)

    def _launch(self, kernel: CompiledKernel, arguments: tuple[int, ...], *keeps: Tensor) -> None:
        numbers = np.array(arguments, dtype=np.int64)
        self._launcher.launch(Record(kernel.address, numbers, (kernel, *keeps), kernel.name))


def rounded(value: float, dtype: torch.dtype) -> float:
    """The value as the dtype holds it. Without torch, whose operations no program repeats."""
    if dtype == torch.bfloat16:
        bits = int(np.float32(value).view(np.uint32))
        kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(np.uint32(kept).view(np.float32))
    return float(np.float16(value) if dtype == torch.float16 else np.float32(value))


def _weighted(norm: RmsNorm) -> tuple[int, int]:
    """Address of the weight, and epsilon."""
    return norm.weight.data_ptr(), float_bits(norm.epsilon)


def _fp32_rows(x: Tensor) -> tuple[int, int]:
    if x.dtype != torch.float32 or x.stride(-1) != 1:
        raise ValueError(f"expected row-major fp32, got {x.dtype} with strides {tuple(x.stride())}")
    return x.data_ptr(), x.stride(0)
