"""A step of an indexer, or of a latent layer that reads what one chose: what a backend makes of it, and the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sightline.attention.backends.reference.index_backend import ReferenceIndexBackend
from sightline.attention.backends.reference.latent_backend import ReferenceLatentBackend
from sightline.attention.buffers import PlanMemory
from sightline.attention.contract import (
    AttentionBackend,
    BackendContext,
    CachePolicy,
    IndexInputs,
    LatentInputs,
    StepLimits,
    StepView,
)
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import Feature
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import IndexSpec, LatentSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.layout import Layout, arrange_free_pages
from sightline.cache.pools import CacheLimits
from sightline.cache.spec import SCALED_DTYPES
from sightline.cache.store import CacheStore
from sightline.core.batch import CAUSAL, Batch, RowMask
from sightline.kernels.chosen_slots import FindSlots, chosen_slots
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.cpu.record import Launcher
from sightline.runner.batching import assemble
from sightline.testing.conformance.rig import Row, row_work

Backend = type[AttentionBackend[Any, Any]]
LAYERS, LAYER = 2, 1
UNTOUCHED = 77
"""What rows of an output hold before a step."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class SparseCase:
    """A step and the layer that runs it."""

    spec: IndexSpec | LatentSpec
    rows: tuple[tuple[int, int], ...]
    """The context and the new tokens of each row."""
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    max_seq_len: int = 128
    transient: bool = False
    padding: tuple[int, int] = (0, 0)
    """Rows and tokens of padding."""
    bound: bool = False
    """True if the host knows bounds of the lengths alone."""
    lse: bool = False
    mask: RowMask = CAUSAL
    is_sparse: bool = True
    whole_numbers: bool = True
    """True if scores are whole numbers, so that ties are exact whatever the order of sums."""
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.rows) + self.padding[1]


@dataclass(eq=False)
class SparseRig:
    """One backend over pools whose unused slots are NaN and whose pages are out of order."""

    case: SparseCase
    backend: Backend
    launcher: Launcher = field(default_factory=inline_launcher)
    find: FindSlots = chosen_slots
    store: CacheStore = field(init=False)
    made: AttentionBackend[Any, Any] = field(init=False)
    memory: PlanMemory = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        group = LayerGroup("group0", case.spec, tuple(range(LAYERS)))
        cache_dtype = case.cache_dtype or case.dtype
        scales = {"entry": [0.5, 0.25]} if cache_dtype in SCALED_DTYPES else None
        pages = (len(case.rows) + 1) * -(-case.max_seq_len // case.page_size) + 1
        limits = CacheLimits(pages, case.page_size, len(case.rows) + 4, case.max_seq_len, 1, 0)
        self.store = CacheStore([group.cache_spec(cache_dtype, scales)], limits, DEVICE)
        for pool in self.store.pools:
            for plane in pool.spec.planes:
                pool.plane(plane.name).fill_(torch.nan)
        arrange_free_pages(self.store, Layout.SHUFFLED)
        workspace = Workspace(DEVICE, 1 << 34, poison=True)
        cache = self.store.cache("group0")
        steps = StepLimits(len(case.rows) + 4, max(case.num_tokens, 8), case.max_seq_len, (MAIN_LANE,), 0)
        entries = ResidentEntries(cache, self.find)
        self.made = self.backend(
            BackendContext("group0", case.spec, cache, workspace, steps, case.dtype, DEVICE, self.launcher, entries)
        )
        self.memory = PlanMemory(workspace.elastic("test", "plans", MAIN_LANE), poison=True)
        workspace.seal()

    def batch(self) -> Batch:
        case = self.case
        rows = [Row(0 if case.transient else context, new, case.mask) for context, new in case.rows]
        table_rows = [self.store.open_row() for _ in rows]
        for length in range(1, max(row.seq_len for row in rows) + 1):
            for table_row, row in zip(table_rows, rows, strict=True):
                if length <= row.seq_len:
                    self.store.grow_row(table_row, length)
        batch = assemble(row_work(rows, table_rows), self.store)
        if any(case.padding):
            batch = batch.pad(len(rows) + case.padding[0], case.num_tokens)
        if case.bound:
            most = case.max_seq_len
            batch = batch.bounded([*batch.query_lens.bound], [most - 1] * batch.num_rows, known=False)
        return batch

    def run(self) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """The output, the LSE if the case needs it, and what the pool holds then."""
        case, batch = self.case, self.batch()
        inputs = case_inputs(case)
        self._fill_contexts(batch)
        needs = frozenset(
            feature for feature, wanted in ((Feature.SPARSE, case.is_sparse), (Feature.LSE, case.lse)) if wanted
        )
        policy = CachePolicy.TRANSIENT if case.transient else CachePolicy.PAGED
        self.memory.begin()
        plan = self.made.plan(StepView(batch, policy, MAIN_LANE, needs), self.memory.part("group0"))
        out = new_output(case)
        plan.prepare()
        lse = plan.run(LAYER, inputs, out)
        [pool] = self.store.cache("group0").pools.values()
        held = {
            # A reader owes nothing to the padding page.
            plane.name: pool.plane(plane.name)[:, case.page_size :].view(torch.uint8).cpu().clone()
            for plane in pool.spec.planes
        }
        return out.cpu(), None if lse is None else lse.cpu(), held

    def _fill_contexts(self, batch: Batch) -> None:
        case = self.case
        if case.transient:
            return
        [pool] = self.store.cache("group0").pools.values()
        generator = torch.Generator().manual_seed(case.seed + 1)
        for table_row, (context, _) in zip(batch.rows, case.rows, strict=False):
            places = torch.arange(context, device=DEVICE)
            slots = pool.table.slots(torch.full_like(places, table_row), places, pool.page_size)
            for plane in pool.spec.planes:
                shape = (LAYERS, context, *plane.shape)
                if plane.name == "scale":
                    drawn = torch.randint(-1, 2, shape, generator=generator).float().exp2()
                else:
                    drawn = drawn_numbers(case, shape, generator)
                stored = drawn.to(plane.dtype).to(DEVICE)
                pool.plane(plane.name).view(torch.uint8)[:, slots] = stored.view(torch.uint8)


def drawn_numbers(case: SparseCase, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if case.whole_numbers:
        return torch.randint(-2, 3, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def case_inputs(case: SparseCase) -> Any:
    """The inputs of a layer. Heads and tokens are strided, and padding is NaN."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    spec, tokens = case.spec, case.num_tokens

    def draw(*shape: int) -> Tensor:
        numbers = drawn_numbers(case, (*shape[:-1], shape[-1] + 16), generator)
        numbers[tokens - case.padding[1] :] = torch.nan
        return numbers.to(case.dtype).to(DEVICE)[..., : shape[-1]]

    if isinstance(spec, IndexSpec):
        heads, dim = spec.num_q_heads, spec.head_dim
        return IndexInputs(draw(tokens, heads, dim), draw(tokens, dim), draw(tokens, heads))
    heads, scale = spec.num_q_heads, 1.2 / math.sqrt(spec.latent_dim)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(case.dtype).to(DEVICE)

    return LatentInputs(
        draw(tokens, heads, spec.nope_dim),
        draw(tokens, heads, spec.rope_dim),
        draw(tokens, spec.latent_dim),
        draw(tokens, spec.rope_dim),
        weight(heads, spec.nope_dim, spec.latent_dim),
        weight(heads, spec.value_dim, spec.latent_dim),
        chosen_places(case, generator) if case.is_sparse else None,
    )


def chosen_places(case: SparseCase, generator: torch.Generator) -> Tensor:
    """Random places for each query, as an indexer would give them. Those of padding do not exist."""
    top_k = case.spec.top_k
    assert top_k is not None
    chosen = torch.full((case.num_tokens, top_k), 1 << 30, dtype=torch.int32)
    token = 0
    for context, new in case.rows:
        for query in range(new):
            new_seen = query + 1 if case.mask is CAUSAL else new
            visible = (0 if case.transient else context) + new_seen
            places = torch.randperm(visible, generator=generator)[:top_k].sort().values
            chosen[token] = -1
            chosen[token, : len(places)] = places
            token += 1
    return chosen.to(DEVICE)


def new_output(case: SparseCase) -> Tensor:
    if isinstance(case.spec, IndexSpec):
        return torch.full((case.num_tokens, case.spec.top_k), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    shape = (case.num_tokens, case.spec.num_q_heads, case.spec.value_dim)
    return torch.full(shape, UNTOUCHED, dtype=case.dtype, device=DEVICE)


def expected_of(case: SparseCase) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """What the reference backend gives. It needs lengths that the host knows."""
    oracle: Backend = ReferenceIndexBackend if isinstance(case.spec, IndexSpec) else ReferenceLatentBackend
    return SparseRig(replace(case, bound=False), oracle).run()


def check_choice(case: SparseCase, backend: Backend) -> None:
    """Raises unless an indexer's backend chooses and keeps what the oracle does, and leaves padding as it was."""
    chosen, _, held = SparseRig(case, backend).run()
    expected, _, kept = expected_of(case)
    real = case.num_tokens - case.padding[1]
    assert (chosen[real:] == UNTOUCHED).all(), "padding was written"
    if case.is_sparse:
        assert torch.equal(chosen[:real], expected[:real])
    else:
        assert (chosen == UNTOUCHED).all()
    for name, plane in kept.items():
        assert torch.equal(held[name], plane), f"other {name} planes"


def check_attention(case: SparseCase, backend: Backend, tolerance: float, find: FindSlots = chosen_slots) -> None:
    """Raises unless a latent backend attends to what was chosen as the oracle does, and leaves padding as it was."""
    found, lse, held = SparseRig(case, backend, find=find).run()
    expected, expected_lse, kept = expected_of(case)
    real = case.num_tokens - case.padding[1]
    assert (found[real:] == UNTOUCHED).all(), "padding was written"
    torch.testing.assert_close(found[:real].float(), expected[:real].float(), rtol=tolerance, atol=tolerance)
    assert (lse is None) == (not case.lse)
    if lse is not None and expected_lse is not None:
        torch.testing.assert_close(lse[:real], expected_lse[:real], rtol=tolerance, atol=tolerance)
    for name, plane in kept.items():
        assert torch.equal(held[name], plane), f"other {name} planes"
