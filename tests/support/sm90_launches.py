"""Compiles for SM90 what the Triton backends launch there, on a machine that need not have a GPU. A script.

Triton's interpreter accepts what its compiler refuses: a variable that changes its type in a branch, for one. Tensors
of the meta device stand for those of a GPU, and a launch ends where the compiled kernel would be started. Prints each
kernel's name once for each time that it was compiled.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, KernelInterface

from sightline.kernels.packed_weights import FP8_BLOCK, WeightForm
from sightline.kernels.triton.decode import DecodeLayer, choose_decode, decode_softmax
from sightline.kernels.triton.decode_shares import DecodeConfig, DecodeRows, DecodeScratch, divide
from sightline.kernels.triton.expert_groups import group_choices, tile_table
from sightline.kernels.triton.experts import (
    GroupedChoices,
    StackedWeights,
    choose_tiles,
    combine_parts,
    down_product,
    gate_up_product,
)
from sightline.kernels.triton.extend import extend_contiguous, extend_paged
from sightline.kernels.triton.extend_rules import CAUSAL_ROWS, CONTEXT_ROWS, ScoreRule
from sightline.kernels.triton.extend_tiles import FIELDS, ExtendConfig, Tiles, choose_config, prepare_tiles
from sightline.kernels.triton.gates import GateKind, GateRule
from sightline.kernels.triton.greedy import best_tokens
from sightline.kernels.triton.latent_decode import LatentLayer, choose_latent_decode, decode_latent
from sightline.kernels.triton.merge import merge_states
from sightline.kernels.triton.norms import add_rms_norm, layer_norm, rms_norm
from sightline.kernels.triton.pages import list_pages
from sightline.kernels.triton.pointwise import activate, add_rows, gate, softcap, take_rows
from sightline.kernels.triton.project import project_real
from sightline.kernels.triton.rotations import rotary_table, turn_heads, turn_latents
from sightline.kernels.triton.routing import RoutingRule, choose_experts
from sightline.kernels.triton.row_product import InputNorm, row_gated_product, row_product
from sightline.kernels.triton.thin_product import exact_product, thin_gated_product, thin_product
from sightline.kernels.triton.write import write_keys_values, write_latents

BF16, FP8, FP32, INT64 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64
CHIP: dict[str, Any] = {"multiprocessors": 132, "shared_bytes": 232_448, "overlaps": True}
"""An H200."""
SLOTS, PAGE_SIZE, TOKENS = 1024, 64, 4


class CompileOnly:
    """Stands for the driver of a GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compiled_instead(self: JITFunction[Any], grid: object) -> Any:
    """In place of a launch."""

    def compile_it(*arguments: object, **settings: object) -> object:
        print(self.fn.__name__)
        return self.run(*arguments, grid=grid, warmup=True, **settings)

    return compile_it


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scale_for(dtype: torch.dtype) -> Tensor | None:
    return meta(1, dtype=torch.float32) if dtype is FP8 else None


def decode_rows() -> DecodeRows:
    queries, contexts, table_rows, slots = (meta(TOKENS, dtype=INT64) for _ in range(4))
    return DecodeRows(queries, contexts, table_rows, slots, meta(9, SLOTS // PAGE_SIZE, dtype=INT64), PAGE_SIZE)


def decode_scratch(config: DecodeConfig, value_dim: int) -> DecodeScratch:
    programs = config.num_programs
    starts, cuts = (meta(programs, 8, dtype=torch.int32) for _ in range(2))
    out = meta(2 * programs, config.heads, value_dim, dtype=torch.float32)
    stats = meta(2 * programs, 2, config.heads, dtype=torch.float32)
    return DecodeScratch(starts, cuts, meta(TOKENS, dtype=torch.int32), out, stats)


def compile_softmax_decode(cache_dtype: torch.dtype, *, with_everything: bool) -> None:
    """32 heads on 8, 128 wide."""
    config = choose_decode(128, 4, cache_dtype, BF16, **CHIP)
    rows, scratch = decode_rows(), decode_scratch(config, 128)
    window, softcap = (64, 30.0) if with_everything else (None, None)
    keys, values = meta(SLOTS, 8, 128, dtype=cache_dtype), meta(SLOTS, 8, 128, dtype=cache_dtype)
    layer = DecodeLayer(keys, values, scale_for(cache_dtype), scale_for(cache_dtype), 0.1, window, softcap)
    q, k, v = meta(TOKENS, 32, 128), meta(TOKENS, 8, 128), meta(TOKENS, 8, 128)
    sinks, lse = (meta(32), meta(TOKENS, 32, dtype=torch.float32)) if with_everything else (None, None)
    divide(rows, scratch, config, 8, window)
    for new in ((k, v), None):
        decode_softmax(q, new, sinks, layer, rows, scratch, config, meta(TOKENS, 32, 128), lse)


def compile_latent_decode(num_heads: int, cache_dtype: torch.dtype) -> None:
    """DeepSeek's sizes, with the products before and behind."""
    config = choose_latent_decode(512, 64, num_heads, BF16, **CHIP)
    real, q_latent, found = meta(1, dtype=INT64), meta(TOKENS, num_heads, 512), meta(TOKENS, num_heads, 512)
    key_up, value_up = meta(num_heads, 128, 512).transpose(1, 2), meta(num_heads, 128, 512)
    project_real(meta(TOKENS, num_heads, 128), key_up, real, q_latent, overlaps=True)
    layer = LatentLayer(meta(SLOTS, 576, dtype=cache_dtype), scale_for(cache_dtype), 0.1)
    new = (meta(TOKENS, num_heads, 64), meta(TOKENS, 512), meta(TOKENS, 64))
    decode_latent(q_latent, *new, layer, decode_rows(), decode_scratch(config, 512), config, found, None)
    project_real(found, value_up, real, meta(TOKENS, num_heads, 128), overlaps=True, early=True)


def tiles_for(config: ExtendConfig, group_size: int) -> Tiles:
    return Tiles(meta(8, FIELDS, dtype=torch.int32), config.tile_tokens(group_size))


def compile_extend() -> None:
    """Grouped queries over pages, and a latent's expanded heads side by side."""
    query_lens, context_lens, table_rows = (meta(2, dtype=INT64) for _ in range(3))
    config = choose_config(BF16, 128, 128, 4, 64, shared_bytes=CHIP["shared_bytes"])
    tiles, rule = tiles_for(config, 4), ScoreRule(0.1)
    prepare_tiles(query_lens, context_lens, table_rows, 64, meta(3, dtype=INT64), tiles)
    plane, pages = meta(SLOTS, 8, 128), meta(3, SLOTS // PAGE_SIZE, dtype=INT64)
    write_keys_values(meta(64, 8, 128), meta(64, 8, 128), plane, plane, meta(64, dtype=INT64))
    q, out = meta(64, 32, 128), meta(64, 32, 128)
    for masks in (CAUSAL_ROWS, CONTEXT_ROWS):
        extend_paged(q, plane, plane, pages, PAGE_SIZE, tiles, out, rule=rule, masks=masks, config=config)
    config = choose_config(BF16, 192, 128, 1, 64, shared_bytes=CHIP["shared_bytes"])
    write_latents(meta(64, 512), meta(64, 64), meta(SLOTS, 576), meta(64, dtype=INT64))
    q, k, out, lse = meta(64, 16, 192), meta(64, 16, 192), meta(64, 16, 128), meta(64, 16, dtype=torch.float32)
    settings: dict[str, Any] = {"rule": rule, "masks": CAUSAL_ROWS, "config": config, "lse": lse}
    extend_contiguous(q, k, meta(64, 16, 128), tiles_for(config, 1), out, **settings)
    merge_states(out, lse, meta(64, 16, 128), lse)
    list_pages(pages, meta(3, 2, dtype=INT64), 8, meta(16, dtype=torch.int32))


def compile_operations(dtype: torch.dtype, hidden: int, head_dim: int) -> None:
    """What layers name between their products: 32 heads on 8, and DeepSeek's latents."""
    x, weight, rows = meta(TOKENS, hidden, dtype=dtype), meta(hidden, dtype=FP32), meta(TOKENS, dtype=INT64)
    rms_norm(x, weight, 1e-6, x, overlaps=True)
    rms_norm(x, weight, 1e-6, x, rows)
    add_rms_norm(x, weight, 1e-6, x, overlaps=True)
    add_rms_norm(x, weight, 1e-6, x, weight, 1e-6, x)
    layer_norm(x, weight, weight, 1e-6, x)
    take_rows(x, rows, 2.0, x)
    add_rows(x, rows, x)
    softcap(meta(TOKENS, 32_001, dtype=FP32), 30.0)
    best_tokens(meta(TOKENS, 32_001, dtype=FP32), meta(2, TOKENS, dtype=INT64))
    for kind in GateKind:
        gate(GateRule(kind), x, x, x, overlaps=True)
    for kind in list(GateKind)[:4]:
        activate(kind, x)
    for dim in (head_dim, 64):
        cos, sin = meta(TOKENS, 1, dim, dtype=dtype), meta(TOKENS, 1, dim // 2, dtype=dtype)
        rotary_table(rows, meta(dim // 2, dtype=FP32), 1.0, cos, sin, sin)
        heads, norm = meta(TOKENS, 40, dim, dtype=dtype), (meta(dim, dtype=FP32), 1e-6)
        turn_heads(heads, cos, sin, heads, 32, overlaps=True)
        turn_heads(heads, cos, sin, heads, 32, (norm, norm))
    latent, key = meta(TOKENS, 512, dtype=dtype), meta(TOKENS, 64, dtype=dtype)
    parts = meta(TOKENS, 17, 64, dtype=dtype)
    turn_latents(latent, meta(512, dtype=FP32), 1e-6, latent, parts[:, :16], key, cos, sin, parts)


def compile_thin_products() -> None:
    """Products of few rows: gated, added, with sizes that are whole blocks and sizes that are not."""
    for outputs, inputs in ((4096, 14336), (1000, 2064)):
        x, weight, bias = meta(TOKENS, inputs), meta(2 * outputs, inputs), meta(2 * outputs)
        thin_product(x, weight, None, meta(TOKENS, 2 * outputs), adds=True, overlaps=True)
        thin_product(x, weight, bias, meta(TOKENS, 2 * outputs), adds=False, overlaps=True)
        rule = GateRule(GateKind.CLAMPED_SWIGLU)
        thin_gated_product(x, weight, bias, rule, meta(TOKENS, outputs), overlaps=True)
        one, norm = meta(1, inputs), InputNorm(meta(inputs, dtype=FP32), 1e-6)
        row_product(one, weight, None, meta(1, 2 * outputs), adds=True, overlaps=True)
        row_product(one, weight, bias, meta(1, 2 * outputs), adds=False, overlaps=True, norm=norm)
        row_gated_product(one, weight, bias, rule, meta(1, outputs), overlaps=True, norm=norm)
        many = meta(64, inputs)
        thin_product(many, weight, bias, meta(64, 2 * outputs), adds=False, overlaps=True)
        thin_gated_product(many, weight, None, rule, meta(64, outputs), overlaps=True)
    exact_product(meta(TOKENS, 2048), meta(64, 2048, dtype=FP32), None, meta(TOKENS, 64, dtype=FP32), overlaps=True)


def stacked_for(form: WeightForm, outputs: int, inputs: int, dtype: torch.dtype) -> StackedWeights:
    match form:
        case WeightForm.PLAIN:
            return StackedWeights(meta(64, outputs, inputs, dtype=dtype))
        case WeightForm.MXFP4:
            codes, scales = (meta(64, outputs, inputs // each, dtype=torch.uint8) for each in (2, 32))
            return StackedWeights(codes, meta(64, outputs, dtype=dtype), form, scales)
        case WeightForm.FP8_BLOCKS | WeightForm.FP8_PRODUCTS:
            scales = meta(64, -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK), dtype=torch.float32)
            return StackedWeights(meta(64, outputs, inputs, dtype=FP8), None, form, scales)


def compile_experts(
    num_tokens: int, gate: GateKind, form: WeightForm = WeightForm.PLAIN, dtype: torch.dtype = BF16
) -> None:
    """The sizes of DeepSeek-V2-Lite."""
    num_choices, gate_up = num_tokens * 6, stacked_for(form, 2816, 2048, dtype)
    config = choose_tiles(num_choices, gate_up, dtype)
    order, table = meta(num_choices, dtype=torch.int32), meta(num_choices * 3, dtype=torch.int32)
    choices = GroupedChoices(order, tile_table(table, num_choices, 64, config.rows), 6)
    group_choices(meta(num_tokens, 6, dtype=INT64), 64, config.rows, order, choices.tiles, overlaps=True)
    inner, parts = meta(num_choices, 1408, dtype=dtype), meta(num_choices, 2048, dtype=dtype)
    gate_up_product(meta(num_tokens, 2048, dtype=dtype), gate_up, GateRule(gate), choices, inner, config, overlaps=True)
    down_product(inner, stacked_for(form, 2048, 1408, dtype), choices, parts, config, overlaps=True)
    weights, target = meta(num_tokens, 6, dtype=torch.float32), meta(num_tokens, 2048, dtype=dtype)
    combine_parts(parts, weights, target, adds=True, overlaps=True)


def compile_routing(rule: RoutingRule, num_experts: int, *, corrected: bool) -> None:
    correction = meta(num_experts, dtype=torch.float32) if corrected else None
    experts, weights = meta(TOKENS, 6, dtype=torch.int32), meta(TOKENS, 6, dtype=torch.float32)
    choose_experts(meta(TOKENS, num_experts, dtype=torch.float32), correction, rule, experts, weights, overlaps=True)


def main() -> None:
    assert not triton.knobs.runtime.interpret, "the interpreter compiles nothing"
    driver.set_active(CompileOnly())
    KernelInterface.__getitem__ = compiled_instead
    compile_softmax_decode(BF16, with_everything=False)
    compile_softmax_decode(FP8, with_everything=True)
    compile_latent_decode(128, BF16)
    compile_latent_decode(16, FP8)
    compile_extend()
    compile_operations(BF16, 4096, 128)
    compile_operations(FP32, 576, 80)
    compile_thin_products()
    compile_experts(1, GateKind.SILU)
    compile_experts(512, GateKind.CLAMPED_SWIGLU)
    compile_experts(8192, GateKind.GELU_TANH)
    compile_experts(4, GateKind.CLAMPED_SWIGLU, WeightForm.MXFP4)
    compile_experts(8192, GateKind.SILU, WeightForm.FP8_BLOCKS)
    compile_experts(8192, GateKind.SILU, WeightForm.FP8_PRODUCTS)
    compile_routing(RoutingRule(False, False, 1.0), 64, corrected=False)
    compile_routing(RoutingRule(True, True, 2.5, num_groups=8, groups_per_token=4, ranked_by=2), 256, corrected=True)


if __name__ == "__main__":
    main()
