"""Rows of one new token for the decode kernels, in shuffled pages of poisoned caches, and the oracle's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.oracle.attention import (
    attend_latent_row,
    attend_row,
    loaded_entries,
    stored_entries,
    visible_keys,
)
from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.core.batch import CAUSAL
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.decode import DecodeLayer, decode_softmax
from sightline.kernels.triton.decode_shares import DecodeConfig, DecodeRows, DecodeScratch, divide
from sightline.kernels.triton.latent_decode import LatentLayer, decode_latent

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
PADDING_TOKENS = 2
UNTOUCHED = 7.0
ROWS = ((0, 0), (0, 1), (5, 1), (33, 1), (0, 0), (16, 1), (45, 1), (0, 0))
"""Contexts and new tokens: rows of none stand in front, between and behind."""


@dataclass(frozen=True)
class Case:
    """Rows, how they attend, and how the work is cut."""

    rows: tuple[tuple[int, int], ...] = ROWS
    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 16
    """Of latent attention, the latent's."""
    rope_dim: int = 8
    """Of latent attention."""
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """The inputs' where it is None."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Of an fp8 cache: keys' or entries', and values'."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lse: bool = True
    block: int = 16
    heads: int = 16
    num_programs: int = 5

    @property
    def config(self) -> DecodeConfig:
        overlaps = Chip.of(DEVICE).overlaps
        return DecodeConfig(self.block, self.heads, self.num_programs, num_warps=4, depth=1, overlaps=overlaps)

    @property
    def spec(self) -> SoftmaxSpec:
        num_q_heads = self.num_kv_heads * self.group_size
        scale = self.head_dim**-0.5
        return SoftmaxSpec(num_q_heads, self.num_kv_heads, self.head_dim, scale, self.window, self.softcap, self.sinks)

    @property
    def latent_spec(self) -> LatentSpec:
        """Queries are in the latent's space already, and values are the latents."""
        scale = (self.head_dim + self.rope_dim) ** -0.5
        return LatentSpec(self.group_size, self.head_dim, self.rope_dim, self.head_dim, self.head_dim, scale)

    @property
    def num_tokens(self) -> int:
        """Those of rows, and padding."""
        return sum(query_len for _, query_len in self.rows) + PADDING_TOKENS

    @property
    def tiles(self) -> int:
        """Of softmax attention: rows times groups of heads."""
        return len(self.rows) * self.num_kv_heads * self.config.num_subgroups(self.group_size)


@dataclass(frozen=True, eq=False)
class Paged:
    """Where a case's entries lie, on the host."""

    case: Case
    pages: Tensor
    table_rows: Tensor
    num_slots: int

    @staticmethod
    def shuffled(case: Case) -> Paged:
        generator = torch.Generator().manual_seed(2)
        count = len(case.rows)
        max_pages = max(-(-(context + 1) // case.page_size) for context, _ in case.rows)
        pages = torch.zeros(count + 1, max_pages, dtype=torch.int64)
        pages[1:] = (torch.randperm(count * max_pages, generator=generator) + 1).view(count, max_pages)
        table_rows = torch.randperm(count, generator=generator) + 1
        return Paged(case, pages, table_rows, (1 + count * max_pages) * case.page_size)

    def slots(self, row: int, entries: Tensor) -> Tensor:
        page_size = self.case.page_size
        return self.pages[self.table_rows[row], entries // page_size] * page_size + entries % page_size

    @property
    def write_slots(self) -> Tensor:
        """Padding tokens have the padding page's first."""
        own = [
            self.slots(row, torch.tensor([context]))
            for row, (context, query_len) in enumerate(self.case.rows)
            if query_len
        ]
        return torch.cat([*own, torch.zeros(PADDING_TOKENS, dtype=torch.int64)])

    @property
    def rows(self) -> DecodeRows:
        contexts, query_lens = (torch.tensor(each) for each in zip(*self.case.rows, strict=True))
        return DecodeRows(
            query_lens=query_lens.to(DEVICE),
            context_lens=contexts.to(DEVICE),
            table_rows=self.table_rows.to(DEVICE),
            write_slots=self.write_slots.to(DEVICE),
            pages=self.pages.to(DEVICE),
            page_size=self.case.page_size,
        )

    def cache(self, contexts: Sequence[Tensor], scale: float) -> Tensor:
        """[num_slots, ...]: what is seen of contexts where it belongs, NaN everywhere else."""
        dtype = self.case.cache_dtype or self.case.dtype
        plane = torch.full((self.num_slots, *contexts[0].shape[1:]), torch.nan).to(dtype)
        for row, context in enumerate(contexts):
            length = context.shape[0]
            first = 0 if self.case.window is None else max(0, length + 1 - self.case.window)
            slots = self.slots(row, torch.arange(first, length))
            plane.view(torch.uint8)[slots] = stored_entries(context[first:], dtype, scale).view(torch.uint8)
        return plane.to(DEVICE)

    def require_written(self, plane: Tensor, before: Tensor, new: Tensor, scale: float) -> None:
        """`new` [num_tokens, ...] stands in the rows' slots, and nothing else changed."""
        wanted = before.cpu().clone()
        count = self.case.num_tokens - PADDING_TOKENS
        stored = stored_entries(new[:count], plane.dtype, scale).contiguous()
        wanted.view(torch.uint8)[self.write_slots[:count]] = stored.view(torch.uint8)
        assert torch.equal(plane.cpu().view(torch.uint8), wanted.view(torch.uint8))


@dataclass(frozen=True, eq=False)
class Found:
    """What a kernel gave, beside what was wanted; on the host."""

    case: Case
    out: Tensor
    lse: Tensor
    wanted_out: Tensor
    wanted_lse: Tensor

    def check(self) -> None:
        """Rows' tokens equal the oracle's; padding is as it was."""
        count = self.case.num_tokens - PADDING_TOKENS
        # Half precision: weights and outputs are rounded, by the interpreter towards zero, to 8 bits of up to 4.
        tolerance = 2e-5 if self.case.dtype is torch.float32 else 0.04
        torch.testing.assert_close(self.out[:count].float(), self.wanted_out, atol=tolerance, rtol=0.0)
        assert bool((self.out[count:] == UNTOUCHED).all())
        assert bool((self.lse[count:] == UNTOUCHED).all())
        if self.case.lse:
            torch.testing.assert_close(self.lse[:count], self.wanted_lse, atol=2e-5, rtol=1e-5)


def make_scratch(case: Case, value_dim: int) -> DecodeScratch:
    """Records of no meaning, and NaN where parts go."""
    programs, heads = case.num_programs, case.heads

    def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=DEVICE)

    return DecodeScratch(
        filled(99, torch.int32, programs, 8),
        filled(99, torch.int32, programs, 8),
        filled(99, torch.int32, len(case.rows)),
        filled(torch.nan, torch.float32, 2 * programs, heads, value_dim),
        filled(torch.nan, torch.float32, 2 * programs, 2, heads),
    )


def _random(case: Case, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(case.dtype)


def _with_new(case: Case, context: Sequence[Tensor], new: Tensor, scale: float) -> list[Tensor]:
    """For each row that has a new token: all its entries, as they are read from the cache."""
    whole, token = [], 0
    for row, (_, query_len) in enumerate(case.rows):
        if query_len:
            entries = torch.cat([context[row], new[token : token + 1]])
            whole.append(loaded_entries(stored_entries(entries, case.cache_dtype or case.dtype, scale), scale))
            token += 1
    return whole


def _scale_tensors(case: Case) -> tuple[Tensor | None, Tensor | None]:
    if case.cache_dtype is not FP8:
        return None, None
    first, second = torch.tensor(case.scales, device=DEVICE).view(2, 1)
    return first, second


def _outputs(case: Case, num_heads: int) -> tuple[Tensor, Tensor]:
    out = torch.full((case.num_tokens, num_heads, case.head_dim), UNTOUCHED, dtype=case.dtype, device=DEVICE)
    return out, torch.full((case.num_tokens, num_heads), UNTOUCHED, device=DEVICE)


def decode(case: Case) -> Found:
    """Softmax attention; what stands in the cache afterwards is checked."""
    generator, spec, paged = torch.Generator().manual_seed(1), case.spec, Paged.shuffled(case)
    # As layers give them: parts of one projection.
    fused = _random(case, generator, case.num_tokens, spec.num_q_heads + 2 * spec.num_kv_heads, case.head_dim)
    fused[case.num_tokens - PADDING_TOKENS :] = torch.nan
    q, k, v = fused.to(DEVICE).split_with_sizes([spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    entry = (spec.num_kv_heads, case.head_dim)
    contexts = [[_random(case, generator, context, *entry) for context, _ in case.rows] for _ in range(2)]
    planes = [paged.cache(each, scale) for each, scale in zip(contexts, case.scales, strict=True)]
    before = [plane.clone() for plane in planes]
    sinks = torch.randn(spec.num_q_heads, generator=generator) if case.sinks else None
    out, lse = _outputs(case, spec.num_q_heads)
    rows, scratch, config = paged.rows, make_scratch(case, case.head_dim), case.config
    divide(rows, scratch, config, spec.num_kv_heads * config.num_subgroups(spec.group_size), case.window)
    layer = DecodeLayer(planes[0], planes[1], *_scale_tensors(case), spec.scale, case.window, case.softcap)
    sinks_there = None if sinks is None else sinks.to(DEVICE)
    decode_softmax(q, (k, v), sinks_there, layer, rows, scratch, config, out, lse if case.lse else None)
    for plane, old, new, scale in zip(planes, before, (k, v), case.scales, strict=True):
        paged.require_written(plane, old, new.cpu(), scale)
    whole_k, whole_v = (
        _with_new(case, each, new.cpu(), scale) for each, new, scale in zip(contexts, (k, v), case.scales, strict=True)
    )
    answers = [
        attend_row(spec, fused[token : token + 1, : spec.num_q_heads], whole_k[token], whole_v[token], seen, sinks)
        for token, seen in enumerate(_visible(case, spec))
    ]
    return _found(case, out, lse, answers, spec.num_q_heads)


def decode_latents(case: Case) -> Found:
    """Latent attention; what stands in the cache afterwards is checked."""
    generator, spec, paged = torch.Generator().manual_seed(1), case.latent_spec, Paged.shuffled(case)
    queries = _random(case, generator, case.num_tokens, spec.num_q_heads, spec.head_dim)
    new = _random(case, generator, case.num_tokens, spec.head_dim)
    for tensor in (queries, new):
        tensor[case.num_tokens - PADDING_TOKENS :] = torch.nan
    contexts = [_random(case, generator, context, spec.head_dim) for context, _ in case.rows]
    scale = case.scales[0]
    plane = paged.cache(contexts, scale)
    before = plane.clone()
    out, lse = _outputs(case, spec.num_q_heads)
    rows, scratch, config = paged.rows, make_scratch(case, case.head_dim), case.config
    divide(rows, scratch, config, config.num_subgroups(spec.num_q_heads), None)
    q_latent, q_rope = queries.to(DEVICE).split_with_sizes([spec.latent_dim, spec.rope_dim], dim=-1)
    latent, k_rope = new.to(DEVICE).split_with_sizes([spec.latent_dim, spec.rope_dim], dim=-1)
    layer = LatentLayer(plane, _scale_tensors(case)[0], spec.scale)
    wanted_lse = lse if case.lse else None
    decode_latent(q_latent, q_rope, (latent, k_rope), layer, rows, scratch, config, out, wanted_lse)
    paged.require_written(plane, before, new, scale)
    whole = _with_new(case, contexts, new, scale)
    # Queries are in the latent's space: what takes them there is the identity.
    up = torch.eye(spec.latent_dim).expand(spec.num_q_heads, -1, -1)
    q_nope, rope = queries[..., : spec.latent_dim], queries[..., spec.latent_dim :]
    answers = [
        attend_latent_row(spec, q_nope[token : token + 1], rope[token : token + 1], whole[token], up, up, seen)
        for token, seen in enumerate(_visible(case, spec))
    ]
    return _found(case, out, lse, answers, spec.num_q_heads)


def _visible(case: Case, spec: SoftmaxSpec | LatentSpec) -> list[Tensor]:
    """For each new token."""
    return [
        visible_keys(spec, CAUSAL, context, torch.tensor([context])) for context, query_len in case.rows if query_len
    ]


def _found(case: Case, out: Tensor, lse: Tensor, answers: Sequence[tuple[Tensor, Tensor]], num_heads: int) -> Found:
    none = (torch.zeros(0, num_heads, case.head_dim), torch.zeros(0, num_heads))
    wanted = [torch.cat(each) for each in zip(none, *answers, strict=True)]
    return Found(case, out.cpu(), lse.cpu(), wanted[0], wanted[1])
