"""Compiles for SM90 what the Triton backends launch there, on a machine that need not have a GPU. A script.

Triton's interpreter accepts what its compiler refuses: a variable that changes its type in a branch, for one. Tensors
of the meta device stand for those of a GPU, and a launch ends where the compiled kernel would be started. Prints each
kernel's name once for each time that it was compiled.

Ends with the text for LLVM, which is as far as Triton refuses anything; `--machine-code` goes to the end.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, KernelInterface

from sightline.kernels.hot_entries import HotBuffer, TurnRows
from sightline.kernels.packed_weights import FP8_BLOCK, WeightForm
from sightline.kernels.triton.choose import ChoiceConfig, ChoiceRoom, choose_places
from sightline.kernels.triton.compressed_attention import (
    CompressedLayer,
    SeenEntries,
    attend_compressed,
    choose_compressed,
    pieces_of,
)
from sightline.kernels.triton.compressed_steps import CompressionRule, NewChoice, NewEntries, NewKeys, keep_tokens
from sightline.kernels.triton.compressed_tokens import CompressedTokens, EntryPages, SeenKeys, count_keys
from sightline.kernels.triton.decay_sums import decay_sums
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
from sightline.kernels.triton.hot_entries import fetch_entries
from sightline.kernels.triton.index_scores import (
    IndexKeys,
    choose_score_config,
    list_queries,
    score_keys,
    write_index_keys,
)
from sightline.kernels.triton.latent_decode import LatentLayer, choose_latent_decode, decode_latent
from sightline.kernels.triton.merge import merge_states
from sightline.kernels.triton.norms import add_rms_norm, layer_norm, rms_norm
from sightline.kernels.triton.pages import list_pages
from sightline.kernels.triton.pointwise import activate, add_rows, gate, scale, softcap, take_rows
from sightline.kernels.triton.project import project_real
from sightline.kernels.triton.recurrent_chunks import CHUNK, ChunkedLayer, CutRows, Faded, recur_chunks
from sightline.kernels.triton.recurrent_steps import RecurrentLayer, RecurrentRule, recurrent_steps
from sightline.kernels.triton.recurrent_tokens import TokenRows, TokenSlots, find_tokens
from sightline.kernels.triton.rotations import rotary_table, turn_heads, turn_index, turn_latents
from sightline.kernels.triton.routing import RoutingRule, ScoreKind, choose_experts
from sightline.kernels.triton.row_product import InputNorm, row_gated_product, row_product
from sightline.kernels.triton.short_convolution import Convolution, Split, convolve, split_mixed
from sightline.kernels.triton.slots import count_choices, find_slots, list_slots
from sightline.kernels.triton.state_gates import delta_gates, gate_heads, gated_norm, norm_gated, time_steps
from sightline.kernels.triton.streams import StreamNumbers, collapse_streams, expand_streams
from sightline.kernels.triton.tails import turn_tails
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


def stop_before_machine_code(*given: Any) -> tuple[str, str] | None:
    """Triton's hook for the stages of a compilation; asked with nothing, it names what it does for Triton's cache."""
    if not given:
        return "no machine code", "no machine code"
    stages = given[1]

    def no_assembly(source: object, metadata: dict[str, object]) -> str:
        metadata["name"] = "nothing"
        return ""

    stages["ptx"], stages["cubin"] = no_assembly, lambda source, metadata: b""
    return None


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
    q_rope, new = meta(TOKENS, num_heads, 64), (meta(TOKENS, 512), meta(TOKENS, 64))
    decode_latent(q_latent, q_rope, new, layer, decode_rows(), decode_scratch(config, 512), config, found, None)
    chosen, rows = meta(TOKENS, 2048, dtype=torch.int32), decode_rows()
    tiles = Tiles(meta(TOKENS, FIELDS, dtype=torch.int32), 1)
    count_choices(tiles, 2048, rows.context_lens, rows.query_lens)
    for pages in (rows.pages, None):
        slots = find_slots(chosen, rows.table_rows, pages, PAGE_SIZE)
    list_slots(slots, meta(2, TOKENS, dtype=INT64), meta(TOKENS * 2048, dtype=torch.int32))
    rows = replace(rows, pages=slots, page_size=1)
    decode_latent(q_latent, q_rope, None, layer, rows, decode_scratch(config, 512), config, found, None)
    project_real(found, value_up, real, meta(TOKENS, num_heads, 128), overlaps=True, early=True)


def compile_index(
    dtype: torch.dtype, cache_dtype: torch.dtype, longest_query: int, *, paged: bool, ratio: int = 1
) -> None:
    """DeepSeek's indexer: 64 heads, 128 wide, 2,048 of 131,072 tokens, or of keys that stand for several."""
    config = choose_score_config(dtype, 64, 128, longest_query, shared_bytes=CHIP["shared_bytes"])
    codes, scales = meta(SLOTS, 128, dtype=cache_dtype), meta(SLOTS, 1, dtype=FP32) if cache_dtype is FP8 else None
    write_index_keys(
        meta(TOKENS, 128, dtype=dtype), codes, scales, meta(TOKENS, dtype=INT64), overlaps=CHIP["overlaps"]
    )
    tiles = Tiles(meta(8, FIELDS, dtype=torch.int32), config.queries)
    tokens, counts = (meta(8 * config.queries, dtype=torch.int32) for _ in range(2))
    list_queries(tiles, tokens, counts, ratio)
    choice, queries = ChoiceConfig.of(2048, 131_072), 8 * config.queries
    scores, out = meta(queries, 131_072, dtype=FP32), meta(TOKENS, 2048, dtype=torch.int32)
    keys = IndexKeys(codes, scales, meta(9, 2048, dtype=INT64) if paged else None, PAGE_SIZE, ratio)
    q, weights = meta(TOKENS, 64, 128, dtype=dtype), meta(TOKENS, 64, dtype=dtype)
    score_keys(
        q, weights, keys, tiles, slice(0, 8), 131_072, scores, config,
        multiprocessors=CHIP["multiprocessors"], overlaps=CHIP["overlaps"],
    )  # fmt: skip
    room = ChoiceRoom.of(choice, queries, lambda _, shape: meta(*shape, dtype=torch.int32))
    choose_places(scores, tokens, counts, room, out, choice, overlaps=CHIP["overlaps"])


def compile_compressed(
    num_heads: int, ratio: int, top_k: int | None, *, decodes: bool, dtype: torch.dtype = BF16
) -> None:
    """Heads of 512 over a window of 128 and entries of DeepSeek V4, in pages of 256."""
    config = choose_compressed(512, num_heads, dtype, **CHIP)
    rows = TokenRows(meta(TOKENS + 1, dtype=INT64), meta(TOKENS, dtype=torch.int32))
    slots = TokenSlots(meta(TOKENS, dtype=INT64), meta(TOKENS, dtype=INT64))
    tokens = CompressedTokens(rows, meta(TOKENS, dtype=INT64), slots)
    keys = SeenKeys(128, ratio, top_k or 0, decodes)
    table = decode_rows()
    count_keys(tokens, keys, config.block, table.query_lens, table.context_lens)
    key, window = meta(TOKENS, 512, dtype=dtype), meta(9, 128, 512, dtype=dtype)
    rule = new = choice = seen = entries = None
    if ratio:
        overlap, entries = ratio == 4, meta(SLOTS, 512, dtype=dtype)
        places = EntryPages.of(meta(9, SLOTS, dtype=INT64), meta(TOKENS, dtype=INT64), 256, ratio)
        found = None if top_k is None else meta(TOKENS, top_k, dtype=torch.int32)
        rule, seen = CompressionRule(ratio, overlap, 64, 1e-6), SeenEntries(places, found)
        values, turn = meta(TOKENS, 1024 if overlap else 512, dtype=dtype), meta(TOKENS, 32, dtype=FP32)
        sums = meta(9, 3 if overlap else 1, 3, 512, dtype=FP32)
        slots_of = meta(TOKENS, dtype=INT64)
        new = NewEntries(values, values, meta(512, dtype=FP32), turn, turn, sums, entries, slots_of)
        choice = None if found is None else NewChoice(meta(TOKENS, top_k or 0, dtype=torch.int32), places, found)
    keep_tokens(tokens, rule, new, NewKeys(key, window), choice, overlaps=True)
    layer = CompressedLayer(key, window, entries, meta(num_heads, dtype=FP32), 0.04)
    scratch = decode_scratch(config, 512 // pieces_of(config, 512))
    q, out = meta(TOKENS, num_heads, 512, dtype=dtype), meta(TOKENS, num_heads, 512, dtype=dtype)
    attend_compressed(q, layer, tokens, keys, seen, slice(0, TOKENS), table, scratch, config, out)


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
    scale(meta(TOKENS, 32_001, dtype=FP32), 0.5)
    softcap(meta(TOKENS, 32_001, dtype=FP32), 30.0)
    best_tokens(meta(TOKENS, 32_001, dtype=FP32), meta(2, TOKENS, dtype=INT64))
    for kind in GateKind:
        gate(GateRule(kind), x, x, x, overlaps=True)
    for kind in set(GateKind) - {GateKind.CLAMPED_SWIGLU, GateKind.CLAMPED_SILU}:
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
    index, norm_of_key = meta(TOKENS, 65, 128, dtype=dtype), (meta(128, dtype=FP32), meta(128, dtype=FP32), 1e-6)
    turn_index(index[:, :64], index[:, 64], norm_of_key, cos, sin, index, overlaps=True)


def compile_state_gates() -> None:
    """What layers with states name beside the recurrence."""
    heads, channels, rates = meta(TOKENS, 32), meta(TOKENS, 32, 128), meta(32, dtype=FP32)
    by_head, by_channel = meta(TOKENS, 32, dtype=FP32), meta(TOKENS, 32, 128, dtype=FP32)
    delta_gates(heads, heads, rates, rates, None, by_head, by_head, overlaps=True)
    delta_gates(channels, heads, rates, meta(32, 128, dtype=FP32), -5.0, by_channel, by_head, overlaps=True)
    time_steps(heads, rates, rates, (0.0, 1.0), by_head, by_head, overlaps=True)
    gate_heads(heads, channels, overlaps=True)
    gated_norm(channels, channels, meta(128, dtype=FP32), 1e-6, GateKind.SIGMOID, channels, overlaps=True)
    norm_gated(
        meta(TOKENS, 4096), meta(TOKENS, 4096), meta(8, 512, dtype=FP32), 1e-6, meta(TOKENS, 4096), overlaps=True
    )


def compile_recurrence(key_heads: int, value_dim: int, *, delta: bool, channels: bool, width: int, skip: bool) -> None:
    """32 heads of a recurrent layer: one token a row, several, and without states."""
    rule = RecurrentRule(32, key_heads, 128, value_dim, 0.1, delta, channels, delta, width)
    size = 2 * key_heads * 128 + 32 * value_dim
    mixed, out = meta(TOKENS, size), meta(TOKENS, 32, value_dim)
    decay = meta(TOKENS, 32, 128, dtype=FP32) if channels else meta(TOKENS, 32, dtype=FP32)
    beta, factors = meta(TOKENS, 32, dtype=FP32), meta(32, dtype=FP32) if skip else None
    weight, bias = (meta(size, width), meta(size)) if width else (None, None)
    states, tails = meta(9, 32, 128, value_dim, dtype=FP32), meta(9, size, width - 1, dtype=FP32) if width else None
    slots = TokenSlots(meta(TOKENS, dtype=INT64), meta(TOKENS, dtype=INT64))
    tokens = TokenRows(meta(TOKENS + 1, dtype=INT64), meta(TOKENS, dtype=torch.int32))
    find_tokens(meta(TOKENS, dtype=INT64), tokens)
    layer = RecurrentLayer(mixed, decay, beta, weight, bias, factors, states, tails)
    for longest in (1, 5):
        recurrent_steps(rule, layer, slots, tokens, out, longest=longest, overlaps=True)
    without = layer._replace(states=None, tails=None)
    recurrent_steps(rule, without, None, tokens, out, longest=5)
    split = Split(meta(TOKENS, key_heads, 128), meta(TOKENS, key_heads, 128), out)
    given = None if weight is None else Convolution(weight, bias, tails)
    split_mixed(mixed, given, slots, tokens, split, unit=delta, overlaps=True)
    split_mixed(mixed, given, slots, tokens, split, unit=delta, spoiled=meta(TOKENS, key_heads + 32, dtype=FP32))
    if channels:
        borders, cut = meta(TOKENS + 1, dtype=INT64), meta(TOKENS, 2, dtype=INT64)
        decay_sums(decay, borders, cut, decay, chunk=CHUNK, scale=1.0, least=-128.0)
    table, rows, squares = meta(TOKENS, 2, dtype=INT64), meta(TOKENS, 3, dtype=INT64), meta(TOKENS, 32, CHUNK, CHUNK)
    wide, left = meta(TOKENS, 32, 128), meta(TOKENS, 32, 128, dtype=FP32)
    faded = Faded(wide, wide, wide, left, left) if channels else None
    chunks = CutRows(table, rows, rows, squares, squares, squares.float(), left, faded)
    recur_chunks(rule, ChunkedLayer(split, decay, beta, factors, states), slots, chunks, out, shared_bytes=232_448)
    recur_chunks(rule, ChunkedLayer(split, decay, beta, factors, None), None, chunks, out, shared_bytes=232_448)
    if given is not None:
        split_mixed(mixed, given._replace(tails=None), None, tokens, split, unit=delta)
        convolve(mixed, given, slots, tokens, mixed, overlaps=True)
        convolve(mixed, given._replace(tails=None), None, tokens, mixed)


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
    x = meta(num_tokens, 2048, dtype=dtype)
    gate_up_product(x, gate_up, GateRule(gate), choices, inner, config, overlaps=True)
    up = stacked_for(form, 1408, 2048, dtype)
    gate_up_product(x, up, GateRule(gate), choices, inner, config, gates_itself=True, overlaps=True)
    down_product(inner, stacked_for(form, 2048, 1408, dtype), choices, parts, config, overlaps=True)
    weights, target = meta(num_tokens, 6, dtype=torch.float32), meta(num_tokens, 2048, dtype=dtype)
    combine_parts(parts, weights, target, adds=True, overlaps=True)


def compile_routing(rule: RoutingRule, num_experts: int, *, corrected: bool) -> None:
    correction = meta(num_experts, dtype=torch.float32) if corrected else None
    experts, weights = meta(TOKENS, 6, dtype=torch.int32), meta(TOKENS, 6, dtype=torch.float32)
    choose_experts(meta(TOKENS, num_experts, dtype=torch.float32), correction, rule, experts, weights, overlaps=True)


def compile_streams() -> None:
    """Those of DeepSeek V4, and heads of its queries, keys and index queries."""
    streams, numbers = meta(TOKENS, 4, 4096), StreamNumbers(20, 1e-6, 1e-6)
    logits, base, scale = (meta(*shape, dtype=FP32) for shape in ((TOKENS, 24), (24,), (3,)))
    writing, mixing, out = meta(TOKENS, 4, dtype=FP32), meta(TOKENS, 4, 4, dtype=FP32), meta(TOKENS, 4096)
    collapse_streams(streams, logits, scale, base, numbers, writing, mixing, out, overlaps=True)
    collapse_streams(streams, logits, scale, base, numbers, None, None, out, overlaps=True)
    expand_streams(out, writing, mixing, streams, overlaps=True)
    cos, sin = meta(TOKENS, 1, 64), meta(TOKENS, 1, 32)
    turn_tails(meta(TOKENS, 64, 512), meta(512, dtype=FP32), 1e-6, cos, sin, overlaps=True)
    turn_tails(meta(TOKENS, 1, 512), meta(512, dtype=FP32), 1e-6, cos, sin, overlaps=True)
    turn_tails(meta(TOKENS, 64, 128), None, 0.0, cos, sin, overlaps=True)


def compile_hot_entries(top_k: int, width: int, apart: int) -> None:
    """Buffers of twice as many entries as are chosen; 2 layers and 4 rows."""
    size, slots = 2 * top_k, meta(TOKENS, top_k, dtype=INT64)
    held, order = (meta(2, 5, size, dtype=torch.int32) for _ in range(2))
    buffer = HotBuffer(
        plane=meta(2 * 5 * size, width, dtype=INT64),
        host=meta(2, SLOTS, width, dtype=INT64),
        pages=meta(5, SLOTS // PAGE_SIZE, dtype=INT64),
        page_size=PAGE_SIZE,
        apart=apart,
        held=held,
        order=order,
        places=meta(5, SLOTS + 1, dtype=torch.int32),
        counts=meta(2, dtype=INT64),
        work=meta(2, TOKENS, size, dtype=torch.int32),
        sources=meta(TOKENS, top_k, dtype=INT64),
    )
    turn = TurnRows(*(meta(TOKENS, dtype=INT64) for _ in range(3)))
    fetch_entries(buffer, 1, turn, meta(TOKENS, 1, top_k, dtype=torch.int32), slots)


def main() -> None:
    assert not triton.knobs.runtime.interpret, "the interpreter compiles nothing"
    driver.set_active(CompileOnly())
    KernelInterface.__getitem__ = compiled_instead
    if sys.argv[1:] != ["--machine-code"]:
        triton.knobs.runtime.add_stages_inspection_hook = stop_before_machine_code
    compile_softmax_decode(BF16, with_everything=False)
    compile_softmax_decode(FP8, with_everything=True)
    compile_latent_decode(128, BF16)
    compile_latent_decode(16, FP8)
    compile_index(BF16, BF16, 1, paged=True)
    compile_index(BF16, BF16, 1, paged=True, ratio=4)
    compile_index(BF16, FP8, 1, paged=True)
    compile_index(BF16, FP8, 64, paged=True)
    compile_index(BF16, BF16, 64, paged=False)
    compile_index(FP32, FP32, 64, paged=True)
    compile_compressed(64, 0, None, decodes=True)
    compile_compressed(64, 4, 512, decodes=True)
    compile_compressed(64, 4, 512, decodes=False)
    compile_compressed(64, 128, None, decodes=True)
    compile_compressed(16, 4, 512, decodes=True, dtype=FP32)
    compile_compressed(32, 4, None, decodes=False)
    compile_extend()
    compile_operations(BF16, 4096, 128)
    compile_operations(FP32, 576, 80)
    compile_thin_products()
    compile_state_gates()
    compile_recurrence(16, 128, delta=True, channels=False, width=4, skip=False)
    compile_recurrence(32, 128, delta=True, channels=True, width=4, skip=False)
    compile_recurrence(8, 64, delta=False, channels=False, width=4, skip=True)
    compile_recurrence(32, 128, delta=False, channels=False, width=0, skip=False)
    compile_experts(1, GateKind.SILU)
    compile_experts(512, GateKind.CLAMPED_SWIGLU)
    compile_experts(8192, GateKind.GELU_TANH)
    compile_experts(4, GateKind.CLAMPED_SWIGLU, WeightForm.MXFP4)
    compile_experts(64, GateKind.CLAMPED_SILU, WeightForm.MXFP4)
    compile_experts(8192, GateKind.SILU, WeightForm.FP8_BLOCKS)
    compile_experts(8192, GateKind.SILU, WeightForm.FP8_PRODUCTS)
    compile_routing(RoutingRule(ScoreKind.SOFTMAX, False, 1.0), 64, corrected=False)
    compile_routing(RoutingRule(ScoreKind.SQRT_SOFTPLUS, True, 1.5), 256, corrected=True)
    compile_routing(
        RoutingRule(ScoreKind.SIGMOID, True, 2.5, num_groups=8, groups_per_token=4, ranked_by=2), 256, corrected=True
    )
    compile_streams()
    compile_hot_entries(2048, 144, 1)
    compile_hot_entries(512, 128, 4)


if __name__ == "__main__":
    main()
