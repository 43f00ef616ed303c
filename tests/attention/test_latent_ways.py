"""Every way of latent attention gives what the oracle gives, whatever the pages, the chunks and the rows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.attention.backends.reference.latent_backend import ReferenceLatentBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.bindings import GroupBinding
from sightline.attention.contract import AttentionBackend, BackendContext, LatentInputs, StepLimits
from sightline.attention.groups import group_layers
from sightline.attention.kinds import Feature
from sightline.attention.latent.phases import (
    Choose,
    PhaseKind,
    Way,
    absorbed_cost,
    cheapest_way,
    expanded_cost,
    plan_phases,
)
from sightline.attention.oracle.attention import attend_latent_row
from sightline.attention.planner import Planner
from sightline.attention.shared.tiles import RowSpan
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.pools import CacheLimits
from sightline.cache.store import CacheStore
from sightline.core.batch import CAUSAL, FULL, MaskKind, RowMask, RowWork
from sightline.kernels.cpu.program import inline_launcher
from sightline.runner.batching import assemble, assemble_transient
from support.case_marks import proofs

SPEC = LatentSpec(num_q_heads=3, latent_dim=16, rope_dim=4, nope_dim=8, value_dim=6, scale=0.31)
CPU = torch.device("cpu")
PAGE = 4
MAX_LEN, MAX_TOKENS = 96, 64


class Bench:
    """One group of two latent layers over pools of NaN, with pages in a shuffled order."""

    def __init__(
        self, backend: type[AttentionBackend[LatentSpec, LatentInputs]], seed: int = 0, max_len: int = MAX_LEN
    ) -> None:
        num_pages = max(200, max_len // PAGE + 2)
        self.groups = group_layers([SPEC, SPEC])
        self.store = CacheStore(
            [group.cache_spec(torch.float32) for group in self.groups],
            CacheLimits(num_pages, PAGE, 8, max_len),
            CPU,
            poison=True,
        )
        [pool] = self.store.pools
        pool.plane("entry").fill_(torch.nan)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        pool.allocator._free = order.tolist()
        workspace = self.workspace = Workspace(CPU, 1 << 30, poison=True)
        limits = StepLimits(8, MAX_TOKENS, max_len, (MAIN_LANE,), max_rollout=0)
        made = backend(
            BackendContext(
                "group0",
                SPEC,
                self.store.groups[0],
                workspace,
                limits,
                torch.float32,
                CPU,
                inline_launcher(),
                ResidentEntries(self.store.groups[0]),
            )
        )
        binding = GroupBinding.alone(self.groups[0], self.store.groups[0], made, backend.capabilities[0])
        self.planner = Planner([binding], limits, self.store.lengths, workspace, paranoid=True)
        workspace.seal()

    def run(
        self, work: Sequence[RowWork], inputs: Sequence[LatentInputs], *, lse: bool = False, transient: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        batch = assemble_transient(work, CPU) if transient else assemble(work, self.store)
        planned = self.planner.plan(batch, needs=frozenset({Feature.LSE}) if lse else frozenset())
        self.planner.launch(planned)
        planned.prepare()
        results = []
        for layer, given_inputs in enumerate(inputs):
            out = torch.full((batch.num_tokens, SPEC.num_q_heads, SPEC.value_dim), torch.nan)
            results.append((out, planned.attend(layer, given_inputs, out)))
        return results


def forced(way: Way, room: int) -> type[TorchLatentBackend]:
    """The backend with one way for every row, and room for so many keys."""

    class Forced(TorchLatentBackend):
        choose: ClassVar[Choose] = staticmethod(lambda spec, span, room: way)
        room_bytes: ClassVar[int] = room * SPEC.num_q_heads * (SPEC.nope_dim + SPEC.rope_dim + SPEC.value_dim) * 4

    return Forced


def random_inputs(num_tokens: int, seed: int) -> LatentInputs:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = torch.Generator().manual_seed(99)
    return LatentInputs(
        q_nope=values(num_tokens, SPEC.num_q_heads, SPEC.nope_dim),
        q_rope=values(num_tokens, SPEC.num_q_heads, SPEC.rope_dim),
        latent=values(num_tokens, SPEC.latent_dim),
        k_rope=values(num_tokens, SPEC.rope_dim),
        key_up=torch.randn(SPEC.num_q_heads, SPEC.nope_dim, SPEC.latent_dim, generator=weights),
        value_up=torch.randn(SPEC.num_q_heads, SPEC.value_dim, SPEC.latent_dim, generator=weights),
    )


BACKENDS: dict[str, type[AttentionBackend[LatentSpec, LatentInputs]]] = {
    "chosen": TorchLatentBackend,
    "absorbed": forced(Way.ABSORBED, MAX_LEN),
    "one-shot": forced(Way.ONE_SHOT, MAX_LEN),
    "chunked": forced(Way.CHUNKED, MAX_LEN),
    "chunks of 5": forced(Way.CHUNKED, 5),
    "chunks of 1": forced(Way.CHUNKED, 1),
    "chunks of a page": forced(Way.CHUNKED, PAGE),
}


def play(
    backend: type[AttentionBackend[LatentSpec, LatentInputs]],
    rows: Sequence[tuple[int, int, RowMask]],
    *,
    lse: bool,
    seed: int,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Rows of (context, new tokens, mask): the context is written in a step before."""
    bench = Bench(backend, seed)
    table_rows = []
    for context, new, _ in rows:
        row = bench.store.open_row()
        bench.store.grow_row(row, context + new)
        table_rows.append(row)
    for index, (row, (context, _, _)) in enumerate(zip(table_rows, rows, strict=True)):
        if context:
            bench.run(
                [RowWork(row, [1] * context, 0, 0)],
                [random_inputs(context, 100 * index + layer) for layer in range(2)],
            )
    work = [
        RowWork(row, [1] * new, context, 0, mask) for row, (context, new, mask) in zip(table_rows, rows, strict=True)
    ]
    num_tokens = sum(new for _, new, _ in rows)
    return bench.run(work, [random_inputs(num_tokens, 7000 + layer) for layer in range(2)], lse=lse)


Answers = list[tuple[torch.Tensor, torch.Tensor | None]]
"""By layer: the output and the LSE."""


def assert_close(got: Answers, backend_name: str, expected: Answers) -> None:
    for (out, lse), (wanted, wanted_lse) in zip(got, expected, strict=True):
        torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5, msg=backend_name)
        assert (lse is None) == (wanted_lse is None)
        if lse is not None:
            torch.testing.assert_close(lse, wanted_lse, atol=2e-5, rtol=2e-5, msg=backend_name)


TREE = RowMask(MaskKind.TREE, torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool))
CASES = {
    "decode": [(9, 1, CAUSAL), (1, 1, CAUSAL), (40, 1, CAUSAL), (4, 1, CAUSAL)],
    "prompts": [(0, 9, CAUSAL), (0, 1, CAUSAL), (0, 17, CAUSAL)],
    "prefixes": [(0, 7, CAUSAL), (1, 7, CAUSAL), (3, 7, CAUSAL), (4, 7, CAUSAL), (5, 7, CAUSAL), (31, 7, CAUSAL)],
    "mixed": [(12, 1, CAUSAL), (20, 6, CAUSAL), (0, 11, CAUSAL), (8, 1, CAUSAL), (16, 4, CAUSAL)],
    "full": [(0, 6, FULL), (9, 5, FULL), (4, 1, FULL)],
}


@pytest.mark.parametrize("lse", [*proofs(False), True], ids=["plain", "lse"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_way_gives_what_the_oracle_gives(name: str, case: str, lse: bool) -> None:
    got = play(BACKENDS[name], CASES[case], lse=lse, seed=3)
    assert_close(got, name, play(ReferenceLatentBackend, CASES[case], lse=lse, seed=5))


def test_a_tree_is_seen_through_its_mask() -> None:
    rows = [(9, 3, TREE), (5, 4, CAUSAL), (0, 3, TREE)]
    assert_close(
        play(TorchLatentBackend, rows, lse=True, seed=1), "tree", play(ReferenceLatentBackend, rows, lse=True, seed=2)
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
def test_a_transient_step_touches_no_pool(name: str, mask: RowMask) -> None:
    lengths = [5, 1, 13, 4]
    work = [RowWork(0, [1] * length, 0, 0, mask) for length in lengths]
    inputs = [random_inputs(sum(lengths), layer) for layer in range(2)]
    bench, oracle = Bench(BACKENDS[name]), Bench(ReferenceLatentBackend)
    got = bench.run(work, inputs, transient=True, lse=True)
    assert_close(got, name, oracle.run(work, inputs, transient=True, lse=True))
    assert bench.store.pools[0].plane("entry").isnan().all(), "nothing was written"


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), min_size=1, max_size=5),
    name=st.sampled_from(sorted(BACKENDS)),
    seed=st.integers(0, 1000),
)
def test_any_rows_in_any_pages(rows: list[tuple[int, int]], name: str, seed: int) -> None:
    masked = [(context, new, CAUSAL) for context, new in rows]
    got = play(BACKENDS[name], masked, lse=True, seed=seed)
    assert_close(got, name, play(ReferenceLatentBackend, masked, lse=True, seed=seed + 1))


def test_a_prefix_of_64k_tokens_stays_within_a_lease_of_a_few_chunks() -> None:
    context, new, room = 1 << 16, 9, 4096
    bench = Bench(forced(Way.CHUNKED, room), max_len=context + new)
    row = bench.store.open_row()
    bench.store.grow_row(row, context + new)
    bench.store.fill_row(row, context)
    [pool] = bench.store.pools
    slots = pool.table.slots(torch.full((context,), row), torch.arange(context), PAGE)
    entries = torch.randn(context, SPEC.head_dim, generator=torch.Generator().manual_seed(4))
    pool.plane("entry")[:, slots] = entries
    before, inputs = bench.workspace.ledger()[:-1], random_inputs(new, 11)
    [(out, lse)] = bench.run([RowWork(row, [1] * new, context, 0)], [inputs], lse=True)
    every = torch.cat([entries, torch.cat([inputs.latent, inputs.k_rope], dim=-1)])
    visible = torch.ones(new, context + new, dtype=torch.bool).tril(context)
    expected, expected_lse = attend_latent_row(
        SPEC, inputs.q_nope, inputs.q_rope, every, inputs.key_up, inputs.value_up, visible
    )
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=2e-4)
    assert lse is not None
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
    assert bench.workspace.ledger()[:-1] == before, "all but the plan buffers, which are the last"
    sizes = {entry.name: entry.num_bytes for entry in bench.workspace.ledger()}
    heads = SPEC.num_q_heads * 4
    assert sizes["keys"] + sizes["values"] == room * heads * (SPEC.nope_dim + SPEC.rope_dim + SPEC.value_dim)


DEEPSEEK_V3 = LatentSpec(128, 512, 64, 128, 128, 0.1)


def span(context_len: int, query_len: int, kind: MaskKind = MaskKind.CAUSAL, row: int = 0, first: int = 0) -> RowSpan:
    return RowSpan(row, first, query_len, context_len, 0, kind)


@pytest.mark.parametrize(
    ("context_len", "query_len", "room", "way"),
    [
        (4096, 1, 10_000, Way.ABSORBED),
        (4096, 8, 10_000, Way.ABSORBED),
        (4096, 160, 10_000, Way.ABSORBED),
        (4096, 190, 10_000, Way.ONE_SHOT),
        (0, 512, 10_000, Way.ONE_SHOT),
        (0, 512, 500, Way.CHUNKED),
        (20_000, 512, 10_000, Way.CHUNKED),
        (0, 1, 10_000, Way.ONE_SHOT),
    ],
)
def test_few_queries_are_absorbed_and_many_are_expanded(context_len: int, query_len: int, room: int, way: Way) -> None:
    assert cheapest_way(DEEPSEEK_V3, span(context_len, query_len), room) is way


def test_the_costs_are_those_that_are_written_down() -> None:
    assert absorbed_cost(DEEPSEEK_V3, 1, 1000) == 512 * 256 + 1000 * 1088
    assert expanded_cost(DEEPSEEK_V3, 1, 1000) == 1000 * 512 * 256 + 1000 * 320


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.sampled_from(list(Way))), min_size=1, max_size=6),
    st.integers(1, 30),
)
def test_phases_cover_every_key_once_for_every_query_that_may_see_it(
    rows: list[tuple[int, int, Way]], room: int
) -> None:
    firsts = [sum(new for _, new, _ in rows[:index]) for index in range(len(rows))]
    spans = [span(context, new, row=row, first=firsts[row]) for row, (context, new, _) in enumerate(rows)]
    ways = dict(zip(spans, (way for _, _, way in rows), strict=True))
    phases = plan_phases(spans, SPEC, room, lambda spec, span, room: ways[span])
    for phase in phases:
        if phase.kind in (PhaseKind.PREFIX_CHUNK, PhaseKind.RAGGED):
            assert phase.num_keys <= room
    for each in spans:
        parts = [part for phase in phases for part in phase.parts if part.span == each]
        for query in range(each.query_len):
            seen = [
                key
                for part in parts
                if query >= part.first_query
                for key in range(part.first_key, part.stop_key)
                if key <= each.context_len + query
            ]
            assert sorted(seen) == list(range(each.context_len + query + 1))
