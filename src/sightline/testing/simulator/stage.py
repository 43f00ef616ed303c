"""Builds a real engine over the simulated model, and exposes the parts of it that the simulation looks at.

Everything between a request and its tokens is the engine's own. Checks nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sightline.attention.capability import Work
from sightline.attention.contract import AttentionBackend
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import SpecKind
from sightline.attention.selection import Candidate, Selection
from sightline.cache.blocks import BlockStore
from sightline.cache.host import HostBlocks
from sightline.cache.pages import PageAllocator
from sightline.cache.prefix import PrefixCache
from sightline.cache.store import CacheStore
from sightline.core.batch import Batch
from sightline.core.config import PADDING_PAGES, Quantization
from sightline.core.device import detect_device
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig
from sightline.distributed.collectives import Links
from sightline.distributed.ranks import Place, Rank
from sightline.engine.engine import Engine
from sightline.kernels.cpu.program import inline_launcher
from sightline.models.loading.generation import GenerationDefaults
from sightline.runner.build import NO_ENTRIES, assemble_runtime, make_recorder, make_store
from sightline.runner.following import Follower
from sightline.runner.roles import ALONE_ROLE, Follows, Role
from sightline.runner.runtime import Runtime
from sightline.scheduler.replicas import AnyScheduler, ReplicaScheduler
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import ScheduledRow, SequenceState
from sightline.testing.simulator.compressed_model import AddingBackend, PickingBackend, compressed_spec
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.faults import LOGIT_TICKS, TICK, Faults, FaultyAllocator
from sightline.testing.simulator.late_blocks import LateBlocks
from sightline.testing.simulator.liars import LyingDrafter, LyingDrafts
from sightline.testing.simulator.model import ReadingBackend, ReadingDefinition, ReadingModel
from sightline.testing.simulator.numbers import DTYPE
from sightline.testing.simulator.oracle import NUM_ORDINARY, likeliest
from sightline.testing.simulator.ranks import (
    Crewmate,
    FollowersCollectives,
    FollowersOutputs,
    LeadersCollectives,
    LeadersOutputs,
    Mailbox,
    MailSender,
    SimulatedCollectives,
    SimulatedLeads,
)
from sightline.testing.simulator.scenario import Scene
from sightline.testing.simulator.sparse_model import ChoosingBackend, ChosenBackend
from sightline.testing.simulator.state_model import SummingBackend


@dataclass(frozen=True, eq=False)
class StagedReplica:
    """A replica of the simulated engine, as its leading rank knows it."""

    number: int
    scene: Scene
    engine: Engine
    faults: Faults
    store: CacheStore
    """Rows and pages."""
    entries: CacheStore
    """The cache of the replica's first rank, which has the entries."""
    allocators: tuple[FaultyAllocator, ...]
    """One per pool."""

    @property
    def scheduler(self) -> Scheduler:
        whole = self.engine._scheduler
        return whole._each[self.number] if isinstance(whole, ReplicaScheduler) else whole

    @property
    def prefixes(self) -> PrefixCache | None:
        return self.engine.prefixes[self.number] if self.engine.prefixes else None

    def in_flight(self) -> list[ScheduledRow]:
        """Returns the rows of steps that are launched and not committed."""
        rows = [row for step in self.engine.in_flight for row in step.rows]
        return [row for row in rows if row.sequence.replica == self.number]

    def holders(self) -> list[SequenceState]:
        """Returns the sequences that hold a row: running ones, and those whose last step is not committed."""
        found = {id(sequence): sequence for sequence in self.scheduler.running}
        found.update((id(row.sequence), row.sequence) for row in self.in_flight())
        return [sequence for sequence in found.values() if sequence.table_row is not None]

    def waiting(self) -> list[SequenceState]:
        """Returns the sequences that wait for a row rather than for the first continuation of their request."""
        return [
            sequence
            for sequence in self.scheduler._waiting
            if sequence.leader is None or sequence.leader.is_out or sequence.leader.num_generated
        ]


@dataclass(frozen=True, eq=False)
class Stage:
    """An engine, and the faults that can be injected into it."""

    scene: Scene
    engine: Engine
    faults: Faults
    replicas: tuple[StagedReplica, ...]

    @property
    def scheduler(self) -> AnyScheduler:
        return self.engine._scheduler


def set_stage(
    scene: Scene, watch: Callable[[int, Batch], None], counts: EventCounts, tell: Callable[[str], None]
) -> Stage:
    """Builds the engine. Calls `watch` with the replica and every batch before its forward pass, `tell` with what other
    ranks find, and counts what becomes of guesses."""
    config = _config(scene)
    faults = Faults(logit_ticks=0 if scene.max_step_ticks is None else LOGIT_TICKS)
    allocators: list[FaultyAllocator] = []

    def make_allocator(num_pages: int) -> FaultyAllocator:
        allocators.append(FaultyAllocator(num_pages, faults))
        return allocators[-1]

    def make_blocks(store: CacheStore, _: int) -> BlockStore:
        assert scene.host is not None, "there is a tier if the scene has one"
        return LateBlocks(store, scene.host, counts)

    logits: list[Tensor] = []
    crew = [_follow(scene, config, number, watch) for number in range(1, scene.num_ranks)]
    role = _lead(scene, crew, faults, logits, tell) if crew else ALONE_ROLE
    model = _model(scene, faults, partial(watch, 0), logits)
    runtime = _runtime(config, model, make_allocator, role, make_blocks)
    drafts = None
    if scene.drafting is not None:
        drafter = LyingDrafter(_truth, scene.drafting, NUM_ORDINARY)
        drafts = LyingDrafts(
            drafter, scene.drafting, scene.max_step_tokens, runtime.definition.vocab_size, scene.page_size, counts
        )
    engine = Engine(runtime, None, GenerationDefaults(frozenset()), Ledger(), faults.clock, drafts)
    stores = (runtime.store, *runtime.others)
    entries = [runtime.store, *(each.store for each in crew if each.place.within.leads)]
    # Each store has an allocator for each pool, then one for its states if it keeps some.
    step = len(allocators) // len(stores)
    owned = [tuple(allocators[start : start + len(runtime.store.pools)]) for start in range(0, len(allocators), step)]
    replicas = [
        StagedReplica(number, scene, engine, faults, *each)
        for number, each in enumerate(zip(stores, entries, owned, strict=True))
    ]
    return Stage(scene, engine, faults, tuple(replicas))


def _runtime(
    config: ResolvedConfig,
    model: ReadingModel,
    make_allocator: Callable[[int], PageAllocator],
    role: Role,
    make_blocks: Callable[[CacheStore, int], BlockStore] = HostBlocks,
) -> Runtime:
    """The runtime of one rank, over entries and states that are NaN until they are written."""
    definition = ReadingDefinition(model)
    groups = definition.groups()
    store = make_store(config, groups, make_allocator, watcher=role.watcher(0))
    others = [
        make_store(config, groups, make_allocator, watcher=role.watcher(1 + other), device=NO_ENTRIES)
        for other in range(role.num_others)
    ]
    for plane in [pool.plane(spec.name) for pool in store.pools for spec in pool.spec.planes]:
        # Entries that were never written are NaN, in every run.
        plane.fill_(torch.nan)
    for states in [group.states for group in store.groups]:
        states.fill(range(PADDING_PAGES, states.num_slots), torch.nan)
    return assemble_runtime(
        config,
        definition,
        model,
        groups,
        _selections(groups),
        store,
        inline_launcher(),
        make_blocks=make_blocks,
        role=role,
        others=others,
    )


def _lead(
    scene: Scene, crew: Sequence[Crewmate], faults: Faults, logits: list[Tensor], tell: Callable[[str], None]
) -> Role:
    """The leading rank's role, with the other ranks behind it."""
    place = Place(Rank(0, scene.num_ranks), scene.num_replicas)
    everyone = LeadersCollectives(place.rank, [each.tokens for each in crew], faults)
    outputs = LeadersOutputs(place.replica, [each for each in crew if each.place.within.leads])
    sender = MailSender([each.mailbox for each in crew], faults)
    links = Links(place, everyone, SimulatedCollectives(place.within), outputs)
    return SimulatedLeads(links, sender, crew, logits, tell)


def _follow(scene: Scene, config: ResolvedConfig, number: int, watch: Callable[[int, Batch], None]) -> Crewmate:
    """Another rank, with faults and a clock of its own, of which nothing is made."""
    tokens, given, logits, mailbox = deque[Tensor](), deque[Tensor](), list[Tensor](), Mailbox()
    place = Place(Rank(number, scene.num_ranks), scene.num_replicas)
    everyone, within = FollowersCollectives(place.rank, tokens), SimulatedCollectives(place.within)
    role = Follows(Links(place, everyone, within, FollowersOutputs(place.replica, given)))
    # The leading rank's own replica is watched there.
    watches = place.replica.index > 0 and place.within.leads
    model = _model(scene, Faults(), partial(watch, place.replica.index) if watches else lambda _: None, logits)
    runtime = _runtime(config, model, role.make_allocator, role)
    follower = Follower(role, runtime, mailbox, make_recorder(runtime))
    return Crewmate(place, follower, runtime.store, mailbox, tokens, given, logits)


def _config(scene: Scene) -> ResolvedConfig:
    """The settings of the engine."""
    return ResolvedConfig(
        device=detect_device("cpu"),
        dtype=DTYPE,
        cache_dtype=DTYPE,
        quantization=Quantization.DEQUANTISE,
        max_model_len=scene.max_len,
        max_rows=scene.max_rows,
        max_step_tokens=scene.max_step_tokens,
        page_size=scene.page_size,
        num_pages=scene.num_pages + PADDING_PAGES,
        scratch_bytes=1 << 20,
        prefix_caching=scene.prefix_caching,
        host_cache_bytes=scene.host.num_blocks if scene.host is not None and scene.prefix_caching else 0,
        attention_backend=None,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        seed=0,
        paranoid=scene.paranoid,
        require_proof=False,
        max_queued=scene.max_queued,
        async_scheduling=scene.async_scheduling,
        states_per_row=0 if scene.max_checkpoints is None else _states_per_row(scene),
        max_checkpoints=scene.max_checkpoints or 0,
        hot_buffer_size=(scene.top_k or 0) * (scene.hot_per_choice or 0),
        max_step_ms=None if scene.max_step_ticks is None else scene.max_step_ticks * TICK * 1e3,
    )


def _model(scene: Scene, faults: Faults, watch: Callable[[Batch], None], logits: list[Tensor]) -> ReadingModel:
    """The simulated model, with layers that keep states if the scene has some. It adds what it gives to `logits`, if
    there are several ranks."""
    keeps_states = scene.max_checkpoints is not None
    # An indexer chooses from entries of several tokens if these are in host memory.
    top_k = None if scene.hot_per_choice is None else scene.top_k
    compressed = compressed_spec(scene.page_size, scene.num_pages, top_k) if keeps_states else None
    shown = None if scene.num_ranks == 1 else logits
    return ReadingModel(
        faults, watch, compressed=compressed, top_k=scene.top_k, shown=shown, exchanges_rows=scene.pads_replicas
    )


_BACKENDS: Mapping[SpecKind, type[AttentionBackend[Any, Any]]] = {
    SpecKind.SOFTMAX: ReadingBackend,
    SpecKind.RECURRENT: SummingBackend,
    SpecKind.LATENT: ChosenBackend,
    SpecKind.INDEX: ChoosingBackend,
    SpecKind.COMPRESSED: AddingBackend,
    SpecKind.COMPRESSED_INDEX: PickingBackend,
}


def _selections(groups: Sequence[LayerGroup]) -> list[dict[Work, Selection]]:
    """The simulated backend of each group, for all work."""
    selections = []
    for backend in [_BACKENDS[group.spec.kind] for group in groups]:
        candidate = Candidate.of("simulated", backend, "sightline", by_default=False)
        selection = Selection(candidate, backend.capabilities[0], refused=(), forgone=())
        selections.append(dict.fromkeys(Work, selection))
    return selections


def _states_per_row(scene: Scene) -> int:
    """What a row reads, one for each step in flight, and one for each token that may be the last one accepted."""
    return 2 + scene.async_scheduling + (0 if scene.drafting is None else scene.drafting.most)


def _truth(sequence: SequenceState, count: int) -> list[int]:
    """The next tokens of a sequence that takes the likeliest ones; none if its prompt ends the request."""
    return likeliest(sequence.tokens, count)
