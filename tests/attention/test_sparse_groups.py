"""An indexer and the attention to what it chose, planned together: torch gives what the oracle gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sightline.attention.backends.reference.index_backend import ReferenceIndexBackend
from sightline.attention.backends.reference.latent_backend import ReferenceLatentBackend
from sightline.attention.backends.torch.index_backend import TorchIndexBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.bindings import GroupBinding
from sightline.attention.contract import AttentionBackend, BackendContext, IndexInputs, LatentInputs, StepLimits
from sightline.attention.groups import group_layers
from sightline.attention.oracle.index import choose_tokens
from sightline.attention.planner import Planner
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import IndexSpec, LatentSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.pools import CacheLimits
from sightline.cache.store import CacheStore
from sightline.core.batch import RowWork
from sightline.kernels.choice import choose_highest
from sightline.kernels.cpu.program import inline_launcher
from sightline.runner.batching import assemble, assemble_transient

TOP_K = 6
LATENT = LatentSpec(num_q_heads=3, latent_dim=16, rope_dim=4, nope_dim=8, value_dim=6, scale=0.31, top_k=TOP_K)
INDEX = IndexSpec(num_q_heads=8, head_dim=16, top_k=TOP_K)
CPU = torch.device("cpu")
ORACLES: tuple[Any, ...] = (ReferenceLatentBackend, ReferenceIndexBackend)
OURS: tuple[Any, ...] = (TorchLatentBackend, TorchIndexBackend)


class SparseBench:
    """Two layers: both attend to what the indexer of the first chooses."""

    def __init__(self, backends: Sequence[type[AttentionBackend[Any, Any]]], dtype: torch.dtype) -> None:
        self.groups = group_layers([LATENT, LATENT], indexers={0: INDEX})
        specs = [group.cache_spec(dtype) for group in self.groups]
        self.store = CacheStore(specs, CacheLimits(60, 4, 8, 96), CPU, poison=True)
        for pool in self.store.pools:
            pool.allocator._free.reverse()
        workspace = Workspace(CPU, 1 << 28, poison=True)
        limits = StepLimits(8, 64, 96, (MAIN_LANE,), max_rollout=0)
        bindings = []
        for group, cache, backend in zip(self.groups, self.store.groups, backends, strict=True):
            context = BackendContext(
                group.name,
                group.spec,
                cache,
                workspace,
                limits,
                torch.float32,
                CPU,
                inline_launcher(),
                ResidentEntries(cache),
            )
            bindings.append(GroupBinding.alone(group, cache, backend(context), backend.capabilities[0]))
        self.planner = Planner(bindings, limits, self.store.lengths, workspace, paranoid=True)

    def run(self, work: Sequence[RowWork], seed: int, *, transient: bool = False) -> list[torch.Tensor]:
        """What was chosen, if anything was, then the output of each layer."""
        batch = assemble_transient(work, CPU) if transient else assemble(work, self.store)
        planned = self.planner.plan(batch)
        self.planner.launch(planned)
        planned.prepare()
        chosen = planned.choose(0, index_inputs(batch.num_tokens, seed))
        found = [] if chosen is None else [chosen.clone()]
        for layer in range(2):
            out = torch.full((batch.num_tokens, LATENT.num_q_heads, LATENT.value_dim), torch.nan)
            planned.attend(layer, latent_inputs(batch.num_tokens, seed + 1 + layer, chosen), out)
            found.append(out)
        return found


def index_inputs(num_tokens: int, seed: int) -> IndexInputs:
    """Small whole numbers: scores are exact, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-1, 2, (num_tokens, INDEX.num_q_heads, INDEX.head_dim), generator=generator)
    key = torch.randint(-1, 2, (num_tokens, INDEX.head_dim), generator=generator)
    weights = torch.randint(-1, 2, (num_tokens, INDEX.num_q_heads), generator=generator)
    return IndexInputs(q.float(), key.float(), weights.float())


def latent_inputs(num_tokens: int, seed: int, chosen: torch.Tensor | None) -> LatentInputs:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
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


def steps(bench: SparseBench) -> list[list[torch.Tensor]]:
    """Prompts in chunks of several sizes beside a row that decodes, from below the top k to far above it."""
    rows = [bench.store.open_row() for _ in range(3)]
    for row in rows:
        bench.store.grow_row(row, 60)
    lens, found = dict.fromkeys(rows, 0), []
    for number, counts in enumerate([(3, 5, 1), (2, 1, 1), (1, 1, 1), (1, 20, 7), (1, 1, 30), (1, 1, 1)]):
        work = [RowWork(row, [0] * count, lens[row], 1) for row, count in zip(rows, counts, strict=True)]
        found.append(bench.run(work, 100 * number))
        for row, count in zip(rows, counts, strict=True):
            lens[row] += count
            bench.store.lengths.commit(row, lens[row])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_choices_and_outputs_are_those_of_the_oracle(dtype: torch.dtype) -> None:
    expected, found = (steps(SparseBench(backends, dtype)) for backends in (ORACLES, OURS))
    assert [len(each) for each in found] == [2, 2, 3, 3, 3, 3], "steps up to the top k choose nothing"
    for step, right in zip(found, expected, strict=True):
        for tensor, wanted in zip(step, right, strict=True):
            torch.testing.assert_close(tensor, wanted, atol=2e-5, rtol=2e-5)


def test_a_step_without_a_cache_chooses_among_its_own_tokens() -> None:
    work = [RowWork(1, [0] * 17, 0, 1), RowWork(2, [0] * 5, 0, 1)]
    expected, found = (
        SparseBench(backends, torch.float32).run(work, 7, transient=True) for backends in (ORACLES, OURS)
    )
    assert len(found) == 3
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("top_k", [1, 3, 8, 40])
def test_equal_scores_are_chosen_at_lower_places_first(top_k: int) -> None:
    generator = torch.Generator().manual_seed(top_k)
    scores = torch.randint(-2, 2, (50, 20), generator=generator).float() * torch.tensor([-0.0, 1.0] * 10)
    visible = torch.rand(50, 20, generator=generator) < 0.7
    visible[:, 0] = True
    found = torch.full((50, top_k), 7, dtype=torch.int32)
    choose_highest(scores.masked_fill(~visible, -torch.inf), found)
    assert torch.equal(found, choose_tokens(scores, visible, top_k))


def test_a_layer_that_reads_a_choice_needs_an_indexer_before_it() -> None:
    with pytest.raises(ValueError, match="expected an indexer that chooses 6 tokens for layer 0"):
        group_layers([LATENT, LATENT], indexers={1: INDEX})
