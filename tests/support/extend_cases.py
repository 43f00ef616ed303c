"""Rows for the extend kernel, in shuffled pages of poisoned pools, and what the oracle says of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sightline.attention.oracle.attention import attend_row, visible_keys
from sightline.attention.spec import SoftmaxSpec
from sightline.core.batch import CAUSAL, RowMask
from sightline.core.batch import MaskKind as RowKind
from sightline.kernels.triton.extend import extend_contiguous, extend_paged
from sightline.kernels.triton.extend_rules import CAUSAL_ROWS, ExtendMasks, LaunchMask, ScoreRule
from sightline.kernels.triton.extend_tiles import FIELDS, ExtendConfig, Tiles, num_tiles, prepare_tiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PADDING_TOKENS = 3
UNTOUCHED = 7.0
KINDS = {RowKind.CAUSAL: LaunchMask.CAUSAL, RowKind.FULL: LaunchMask.FULL, RowKind.TREE: LaunchMask.TREE}


@dataclass(frozen=True)
class Case:
    """Rows and how they attend."""

    query_lens: tuple[int, ...] = (5, 0, 1, 21)
    context_lens: tuple[int, ...] = (9, 0, 38, 0)
    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """The inputs' where it is None."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Of an fp8 cache."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    masks: tuple[RowMask, ...] | None = None
    """All causal where it is None."""
    positions: tuple[tuple[int, ...], ...] = ()
    """Of tree rows' new tokens, counted from the context's end; in order of the rows."""
    config: ExtendConfig = field(default=ExtendConfig(block_m=16, block_n=16, num_warps=4, num_stages=1))

    @property
    def spec(self) -> SoftmaxSpec:
        num_q_heads = self.num_kv_heads * self.group_size
        return SoftmaxSpec(
            num_q_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5, self.window, self.softcap, self.sinks
        )

    @property
    def rule(self) -> ScoreRule:
        return ScoreRule(self.spec.scale, self.softcap, self.window)

    @property
    def row_masks(self) -> tuple[RowMask, ...]:
        return self.masks or (CAUSAL,) * len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + PADDING_TOKENS


@dataclass(frozen=True, eq=False)
class Step:
    """A case's tensors; k and v hold whole rows, context included."""

    case: Case
    q: Tensor
    """[num_tokens, q_heads, head_dim]: parts of one projection, as layers give them; NaN in padding."""
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    sinks: Tensor | None
    positions: Tensor
    """[num_tokens] int64."""


def make_step(case: Case) -> Step:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    spec = case.spec
    fused = normal(case.num_tokens, spec.num_q_heads + 2, case.head_dim)
    fused[sum(case.query_lens) :] = torch.nan
    lens = [sum(pair) for pair in zip(case.query_lens, case.context_lens, strict=True)]
    entry = (spec.num_kv_heads, case.head_dim)
    positions, depths = [], iter(case.positions)
    for query_len, context_len, mask in zip(case.query_lens, case.context_lens, case.row_masks, strict=True):
        places = next(depths) if mask.kind is RowKind.TREE else range(query_len)
        positions += [context_len + place for place in places]
    return Step(
        case,
        fused[:, 1:-1],
        tuple(normal(length, *entry) for length in lens),
        tuple(normal(length, *entry) for length in lens),
        torch.randn(spec.num_q_heads, generator=generator) if case.sinks else None,
        torch.tensor(positions + [0] * PADDING_TOKENS),
    )


def expected(step: Step, k: Sequence[Tensor], v: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The oracle's out and LSE of the tokens that belong to rows."""
    case, parts, first = step.case, [], 0
    for row, query_len in enumerate(case.query_lens):
        tokens = slice(first, first + query_len)
        visible = visible_keys(case.spec, case.row_masks[row], case.context_lens[row], step.positions[tokens])
        parts.append(attend_row(case.spec, step.q[tokens], k[row], v[row], visible, step.sinks))
        first += query_len
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def make_masks(step: Step) -> ExtendMasks:
    masks = step.case.row_masks
    if step.case.masks is None:
        return CAUSAL_ROWS
    row_kinds = torch.tensor([KINDS[mask.kind] for mask in masks], dtype=torch.int8, device=DEVICE)
    trees = [mask.tree.flatten() if mask.tree is not None else torch.zeros(0, dtype=torch.bool) for mask in masks]
    if not any(tree.numel() for tree in trees):
        return ExtendMasks(LaunchMask.BY_ROW, row_kinds)
    offsets = torch.tensor([0, *itertools.accumulate(tree.numel() for tree in trees)][:-1], device=DEVICE)
    return ExtendMasks(
        LaunchMask.BY_ROW, row_kinds, torch.cat(trees).to(torch.uint8).to(DEVICE), offsets, step.positions.to(DEVICE)
    )


def empty_tiles(num_rows: int, num_tokens: int, tile_tokens: int) -> Tiles:
    records = torch.full((num_tiles(num_rows, num_tokens, tile_tokens), FIELDS), 99, dtype=torch.int32, device=DEVICE)
    return Tiles(records, tile_tokens)


def make_outputs(step: Step) -> tuple[Tensor, Tensor]:
    out = torch.full(step.q.shape, UNTOUCHED, dtype=step.case.dtype, device=DEVICE)
    return out, torch.full(step.q.shape[:2], UNTOUCHED, device=DEVICE)


def put(plane: Tensor, slots: Tensor, new: Tensor, scale: float) -> None:
    """Writes entries with torch: `write_keys_values` has tests of its own."""
    stored = (new.float() / scale).clamp(-448, 448).to(plane.dtype) if plane.element_size() == 1 else new
    plane.view(torch.uint8)[slots.to(plane.device)] = stored.view(torch.uint8).to(plane.device)


def run_paged(step: Step) -> tuple[Tensor, Tensor]:
    """Writes contexts and new tokens, attends through the pages, and returns all tokens' out and LSE."""
    case, rows = step.case, len(step.case.query_lens)
    generator = torch.Generator().manual_seed(2)
    max_pages = 1 + max(key.shape[0] for key in step.k) // case.page_size
    num_pages = 1 + rows * max_pages
    pages = torch.zeros(rows + 1, max_pages, dtype=torch.int64)
    pages[1:] = (torch.randperm(num_pages - 1, generator=generator) + 1).view(rows, max_pages)
    table_rows = torch.randperm(rows, generator=generator) + 1
    cache_dtype = case.cache_dtype or case.dtype
    shape = (2, num_pages * case.page_size, *step.k[0].shape[1:])
    keys, values = torch.full(shape, torch.nan).to(cache_dtype).to(DEVICE)
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if cache_dtype is torch.float8_e4m3fn:
        k_scale, v_scale = torch.tensor(case.scales, device=DEVICE)
        scales = (k_scale, v_scale)
    for row in range(rows):
        entry = torch.arange(step.k[row].shape[0])
        slots = pages[table_rows[row], entry // case.page_size] * case.page_size + entry % case.page_size
        for plane, new, scale in zip((keys, values), (step.k[row], step.v[row]), case.scales, strict=True):
            put(plane, slots, new, scale)
    tiles = empty_tiles(rows, case.num_tokens, case.config.tile_tokens(case.group_size))
    lens, contexts = (torch.tensor(each, device=DEVICE) for each in (case.query_lens, case.context_lens))
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE)
    prepare_tiles(lens, contexts, table_rows.to(DEVICE), case.num_tokens, offsets, tiles)
    out, lse = make_outputs(step)
    extend_paged(
        step.q.to(DEVICE),
        keys,
        values,
        pages.to(DEVICE),
        case.page_size,
        tiles,
        out,
        rule=case.rule,
        masks=make_masks(step),
        config=case.config,
        sinks=None if step.sinks is None else step.sinks.to(DEVICE),
        lse=lse,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    return out.cpu(), lse.cpu()


def run_transient(step: Step) -> tuple[Tensor, Tensor]:
    """Attends to the step's own keys: a case without contexts."""
    case, rows = step.case, len(step.case.query_lens)
    padding = torch.full((PADDING_TOKENS, *step.k[0].shape[1:]), torch.nan, dtype=case.dtype)
    # Keys and values as they lie in one projection: a token's of both side by side.
    both = torch.stack([torch.cat([*step.k, padding]), torch.cat([*step.v, padding])], dim=1).to(DEVICE)
    tiles = empty_tiles(rows, case.num_tokens, case.config.tile_tokens(case.group_size))
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE)
    prepare_tiles(torch.tensor(case.query_lens, device=DEVICE), None, None, case.num_tokens, offsets, tiles)
    out, lse = make_outputs(step)
    extend_contiguous(
        step.q.to(DEVICE),
        both[:, 0],
        both[:, 1],
        tiles,
        out,
        rule=case.rule,
        masks=make_masks(step),
        config=case.config,
        sinks=None if step.sinks is None else step.sinks.to(DEVICE),
        lse=lse,
    )
    return out.cpu(), lse.cpu()


def require_equal(step: Step, actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Compares the rows' tokens with the oracle's, and padding with what lay there before."""
    count = sum(step.case.query_lens)
    (out, lse), (wanted_out, wanted_lse) = actual, wanted
    # Half precision: weights and outputs are rounded, by the interpreter towards zero, to 8 bits of numbers up to 4.
    tolerance = 2e-5 if step.case.dtype is torch.float32 else 0.04
    torch.testing.assert_close(out[:count].float(), wanted_out, atol=tolerance, rtol=0.0)
    torch.testing.assert_close(lse[:count], wanted_lse, atol=2e-5, rtol=1e-5)
    assert bool((out[count:] == UNTOUCHED).all())
    assert bool((lse[count:] == UNTOUCHED).all())
