"""Two latent layers that attend to what an indexer chooses, with entries on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sightline.attention.backends.reference.index_backend import ReferenceIndexBackend
from sightline.attention.backends.reference.latent_backend import ReferenceLatentBackend
from sightline.attention.backends.torch.index_backend import TorchIndexBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.bindings import GroupBinding
from sightline.attention.contract import (
    BackendContext,
    EntryCoordinator,
    IndexInputs,
    LatentInputs,
    StepLimits,
)
from sightline.attention.groups import group_layers
from sightline.attention.planner import Planner
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.sparse.hot_entries import FEW_TOKENS, HotEntries
from sightline.attention.spec import IndexSpec, LatentSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.pools import CacheLimits, GroupCache
from sightline.cache.store import CacheStore
from sightline.core.batch import RowWork
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.hot_entries import FetchEntries, fetch_entries
from sightline.runner.batching import assemble

TOP_K, PAGE, MAX_LEN, MAX_TOKENS, MAX_ROWS = 6, 4, 96, 64, 6
LATENT = LatentSpec(num_q_heads=3, latent_dim=16, rope_dim=4, nope_dim=8, value_dim=6, scale=0.31, top_k=TOP_K)
INDEX = IndexSpec(num_q_heads=4, head_dim=16, top_k=TOP_K)
CPU = torch.device("cpu")
ORACLES: tuple[Any, ...] = (ReferenceLatentBackend, ReferenceIndexBackend)
OURS: tuple[Any, ...] = (TorchLatentBackend, TorchIndexBackend)


def hot(buffer_size: int, copy: FetchEntries = fetch_entries, kind: type[HotEntries] = HotEntries) -> Any:
    """Makes the coordinator of entries in host memory."""

    def make(cache: GroupCache, limits: StepLimits) -> EntryCoordinator:
        return kind(cache, TOP_K, limits, buffer_size, copy, poison=True)

    return make


class HotBench:
    """Two layers: both attend to what the indexer of the first chooses."""

    def __init__(
        self,
        backends: Sequence[Any] = OURS,
        make_hot: Callable[[GroupCache, StepLimits], EntryCoordinator] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`make_hot` makes the coordinator of entries in host memory; None: they are on the device."""
        self.groups = group_layers([LATENT, LATENT], indexers={0: INDEX})
        specs = [group.cache_spec(dtype) for group in self.groups]
        specs[0] = replace(specs[0], on_host=make_hot is not None)
        self.store = CacheStore(specs, CacheLimits(120, PAGE, MAX_ROWS, MAX_LEN), CPU, poison=True)
        for pool in self.store.pools:
            pool.allocator._free.reverse()
        workspace = Workspace(CPU, 1 << 28, poison=True)
        limits = StepLimits(MAX_ROWS, MAX_TOKENS, MAX_LEN, (MAIN_LANE,), max_rollout=0)
        self.coordinators: list[EntryCoordinator] = []
        bindings = []
        for group, cache, backend in zip(self.groups, self.store.groups, backends, strict=True):
            is_hot = cache.is_on_host and make_hot is not None
            coordinator = make_hot(cache, limits) if is_hot and make_hot else ResidentEntries(cache)
            self.coordinators.append(coordinator)
            context = BackendContext(
                group.name,
                group.spec,
                cache,
                workspace,
                limits,
                torch.float32,
                CPU,
                inline_launcher(),
                coordinator,
            )
            bindings.append(GroupBinding.alone(group, cache, backend(context), backend.capabilities[0]))
        self.planner = Planner(bindings, limits, self.store.lengths, workspace, paranoid=True)
        self.lens: dict[int, int] = {}

    def open(self) -> int:
        row = self.store.open_row()
        self.store.grow_row(row, MAX_LEN)
        self.lens[row] = 0
        return row

    def step(
        self,
        counts: dict[int, int],
        seed: int,
        *,
        kept: dict[int, int] | None = None,
        pad: int = 0,
        is_kept: bool = True,
    ) -> list[Tensor]:
        """Runs a step of new tokens for each row; returns what was chosen, if anything was, then each layer's output.

        `kept` are the tokens of each row that stay, all without it; the others are guesses that are refused.
        Nothing is committed unless `is_kept`. Of `pad` padding tokens about half have a padding row.
        """
        kept = counts if kept is None else kept
        work = [RowWork(row, [0] * count, self.lens[row], 1) for row, count in counts.items()]
        batch = assemble(work, self.store)
        real = batch.num_tokens
        if pad:
            batch = batch.pad(batch.num_rows + pad // 2, batch.num_tokens + pad)
        planned = self.planner.plan(batch)
        self.planner.launch(planned)
        planned.prepare()
        chosen = planned.choose(0, index_inputs(batch.num_tokens, seed))
        found = [] if chosen is None else [chosen[:real].clone()]
        for layer in range(2):
            out = torch.full((batch.num_tokens, LATENT.num_q_heads, LATENT.value_dim), torch.nan)
            planned.attend(layer, latent_inputs(batch.num_tokens, seed + 1 + layer, chosen), out)
            assert out[real:].isnan().all(), "padding tokens keep their contents"
            found.append(out[:real])
        for row in counts:
            self.lens[row] += kept[row]
            if is_kept:
                self.store.lengths.commit(row, self.lens[row])
                self.store.lengths.settle(row, self.lens[row])
        return found


def index_inputs(num_tokens: int, seed: int) -> IndexInputs:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_tokens, INDEX.num_q_heads, INDEX.head_dim, generator=generator)
    key = torch.randn(num_tokens, INDEX.head_dim, generator=generator)
    weights = torch.randn(num_tokens, INDEX.num_q_heads, generator=generator)
    return IndexInputs(q, key, weights)


def latent_inputs(num_tokens: int, seed: int, chosen: Tensor | None) -> LatentInputs:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads = LATENT.num_q_heads
    return LatentInputs(
        q_nope=values(num_tokens, heads, LATENT.nope_dim),
        q_rope=values(num_tokens, heads, LATENT.rope_dim),
        latent=values(num_tokens, LATENT.latent_dim),
        k_rope=values(num_tokens, LATENT.rope_dim),
        key_up=values(heads, LATENT.nope_dim, LATENT.latent_dim),
        value_up=values(heads, LATENT.value_dim, LATENT.latent_dim),
        chosen=chosen,
    )


def little_traffic(bench: HotBench) -> list[list[Tensor]]:
    """Prompts of which one is long, decode, guesses that are refused, and a row with another owner."""
    first, second = bench.open(), bench.open()
    found = [bench.step({first: 3, second: 20}, 0), bench.step({first: 5, second: 18}, 10)]
    found += [bench.step({first: 1, second: 1}, 20 + 10 * number, pad=number) for number in range(2)]
    found.append(bench.step({first: 3, second: 3}, 40, kept={first: 1, second: 2}))
    bench.store.close_row(first)
    again = bench.open()
    found.append(bench.step({again: 9, second: 1}, 50))
    return [*found, bench.step({again: 1, second: 1}, 60)]


def traffic(bench: HotBench) -> list[list[Tensor]]:
    """Everything that can happen to a row: chunks, decode, guesses that are refused, pages that change owner, pages
    that are shared, and a fork."""
    first, second, third = bench.open(), bench.open(), bench.open()
    found, alone = [bench.step({first: 3, second: 20, third: 1}, 0)], {first: 1, second: 1, third: 1}
    found += [bench.step(alone, 10 * number + 10, pad=number % 5) for number in range(6)]
    found.append(bench.step({first: 1, second: 18, third: 5}, 100))
    # Guesses, most of which are refused, and others in their place.
    for number, kept in enumerate([1, 2, 4]):
        guessed = {first: 4, second: 1, third: 4}
        found.append(bench.step(guessed, 200 + 10 * number, kept={first: kept, second: 1, third: 1}))
        found.append(bench.step(alone, 300 + 10 * number))
    # Another sequence in the row of the first, on the same pages.
    bench.store.close_row(first)
    again = bench.open()
    assert again == first
    found.append(bench.step({again: 12, second: 1}, 400))
    found += [bench.step({again: 1, second: 1, third: 1}, 410 + 10 * number) for number in range(3)]
    # A row that begins with pages of another, as a prefix hit and a fork have it.
    bundles = [bench.store.committed_bundle(second, index) for index in range(5)]
    bench.store.close_row(third)
    shared = bench.store.open_row()
    bench.store.adopt(shared, bundles)
    bench.store.grow_row(shared, MAX_LEN)
    bench.store.copy_page(second, shared, 5, 2)
    bench.lens[shared] = 5 * PAGE + 2
    found += [bench.step({shared: 1, second: 1, again: 1}, 500 + 10 * number) for number in range(4)]
    return found + long_chunks(bench, again, second, shared)


def long_chunks(bench: HotBench, first: int, second: int, third: int) -> list[list[Tensor]]:
    """Contexts that are staged one by one because another row is between them, beside one another, and one by one
    because they do not fit beside one another; and a row of as many new tokens as just use the hot buffer."""
    apart = bench.step({first: FEW_TOKENS + 1, third: 2, second: FEW_TOKENS + 2}, 600)
    together = bench.step({first: FEW_TOKENS + 1, third: FEW_TOKENS + 2}, 610)
    assert bench.lens[second] + bench.lens[third] > MAX_LEN
    in_turn = bench.step({second: FEW_TOKENS + 1, third: FEW_TOKENS + 4, first: FEW_TOKENS}, 620)
    # A padding token without a row, whose choice is what another token left there.
    padded = [bench.step({first: 1, second: 1, third: 1}, 630 + 10 * number, pad=1) for number in range(2)]
    return [apart, together, in_turn, *padded]
