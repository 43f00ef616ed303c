"""Invariants of pages, rows and the prefix tree after every step, and of every batch before it runs.

Checks every page, row and node each time. Knows the cache and the running sequences. Does not know requests' answers.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sightline.cache.pools import Pool
from sightline.cache.prefix import PrefixNode
from sightline.cache.states import StateStage
from sightline.core.batch import PADDING_SLOT, Batch
from sightline.core.config import PADDING_PAGES
from sightline.scheduler.replicas import ReplicaScheduler
from sightline.scheduler.sequence import SequenceState
from sightline.testing.simulator.sparse_model import ENTRY_SIZE, POSITION
from sightline.testing.simulator.stage import StagedReplica

_FloatArray = NDArray[np.float64]


class Invariants:
    """The invariants of one replica. Each method yields what does not hold."""

    def __init__(self, stage: StagedReplica) -> None:
        self._stage = stage
        self._store = stage.store
        self._size = stage.scene.page_size
        # On a CPU, the memory that the device reads; of another replica, the leading rank's account.
        self._tables = [pool.table.on_host for pool in self._store.pools]
        self._contents = [self._held(pool) for pool in stage.entries.pools]
        self._places = np.arange(self._size, dtype=np.float64)
        self._launched: dict[int, tuple[tuple[int, ...], ...]] = {}
        """For each page-table row, the pages in each pool with which its last batch was launched."""

    def _held(self, pool: Pool) -> tuple[_FloatArray | None, _FloatArray] | None:
        """Tokens and positions, [num_pages, page_size] each. The pools of sparse layers hold hashes, not tokens; None
        for entries of several tokens."""
        if pool.tokens_per_entry > 1:
            return None
        if "k" in [plane.name for plane in pool.spec.planes]:
            tokens, positions = (pool.plane(name).view(-1, self._size).numpy() for name in ("k", "v"))
            return tokens, positions
        return None, pool.plane(pool.spec.planes[0].name).view(-1, self._size, ENTRY_SIZE)[..., POSITION].numpy()

    def after_step(self) -> Iterator[str]:
        """Checks everything that must hold between steps."""
        prefixes = self._stage.prefixes
        nodes = [] if prefixes is None else list(prefixes.nodes())
        holders = self._stage.holders()
        yield from self._owners(nodes)
        yield from self._states(nodes)
        yield from self._rows(holders)
        yield from self._parked()
        yield from self._replica()
        yield from self._in_flight()
        yield from self._tree(nodes, holders)
        yield from self._holdings(nodes, holders)

    def before_forward(self, batch: Batch) -> Iterator[str]:
        """A batch writes only to pages that its rows do not share, padding to none, and takes no page from a step in
        flight."""
        yield from self._in_flight()
        yield from self._time(batch)
        num_tokens = sum(batch.work.query_lens)
        for pool in self._store.pools:
            slots = batch.pools[pool.key].write_slots.tolist()
            if any(slot != PADDING_SLOT for slot in slots[num_tokens:]):
                yield f"padding of a batch writes to pages of {pool.key}"
            slots = slots[:num_tokens]
            written = [slot for slot in slots if slot != PADDING_SLOT or pool.tokens_per_entry == 1]
            pages = {slot // pool.entries_per_page for slot in written}
            for page in pages:
                if pool.allocator.owners(page) != 1:
                    yield f"a batch writes to page {page} of {pool.key}, which has {pool.allocator.owners(page)} owners"
        for row in batch.rows:
            self._launched[row] = tuple(pool.table.owned(row) for pool in self._store.pools)

    def _time(self, batch: Batch) -> Iterator[str]:
        """A step with a row that generates costs no more than its limit, unless its prompts are at their least.

        Each row may have one token beyond that, which it was admitted with in the place of another.
        """
        limit, lengths = self._stage.engine.pace.limit(), batch.work.query_lens
        if limit is None or 1 not in lengths or max(lengths) == 1:
            return
        costs, num_rows = limit.costs, len(lengths)
        work = sum(lengths) + costs.logit * len(batch.logit_indices)
        least = (num_rows + limit.least) * (1 + costs.logit)
        if work > max(limit.work, least) + num_rows * (1 + costs.logit):
            yield f"a step with rows that generate costs {work:g}, and may cost {limit.work:g}"

    def at_rest(self) -> Iterator[str]:
        """A closed engine has freed every page and row."""
        for pool in self._store.pools:
            if pool.allocator.num_free != pool.allocator.num_usable:
                yield f"{pool.key} has {pool.allocator.num_free} free pages of {pool.allocator.num_usable} at the end"
        states = self._store.main.states
        if states is not None and (states.num_free, states.num_checkpoints) != (states.num_usable, 0):
            yield f"{states.num_free} states of {states.num_usable} are free at the end, {states.num_checkpoints} kept"
        if self._store.num_free_rows != self._store.limits.max_rows:
            yield f"{self._store.num_free_rows} rows are free of {self._store.limits.max_rows} at the end"

    def _states(self, nodes: Sequence[PrefixNode]) -> Iterator[str]:
        """A state slot is free, or is owned by its rows and node; tags are true, and nobody holds more than it may."""
        states, limits = self._store.main.states, self._store.limits
        if states is None:
            return
        owned: Counter[int] = Counter(node.checkpoint.slot for node in nodes if node.checkpoint is not None)
        for tier in self._stage.engine.runtime.tiers:
            owned.update(tier.held_states())
        for row in range(limits.max_rows + 1):
            held = states.held(row)
            owned.update(held.values())
            pinned = states.pinned(row)
            if len([position for position in held if position not in pinned]) > limits.states_per_row:
                yield f"row {row} holds states behind {tuple(held)}, and may hold {limits.states_per_row}"
            for position, slot in held.items():
                if states.tag(slot).position != position or states.tag(slot).stage is StateStage.FREE:
                    yield f"row {row} holds slot {slot} behind {position} tokens, whose tag is {states.tag(slot)}"
        for slot in range(PADDING_PAGES, states.num_usable + PADDING_PAGES):
            if states.allocator.owners(slot) != owned[slot]:
                yield f"state slot {slot} has {states.allocator.owners(slot)} owners, and {owned[slot]} hold it"
            if not owned[slot] and states.tag(slot).stage is not StateStage.FREE:
                yield f"state slot {slot} is free, and its tag is {states.tag(slot)}"
        if states.num_checkpoints > limits.max_checkpoints:
            yield f"{states.num_checkpoints} states are kept for others, and {limits.max_checkpoints} may be"

    def _owners(self, nodes: Sequence[PrefixNode]) -> Iterator[str]:
        """A page is in the free list once, or is owned by its rows and node; the device's page table agrees."""
        rows = range(self._store.limits.max_rows + 1)
        for index, (pool, allocator) in enumerate(zip(self._store.pools, self._stage.allocators, strict=True)):
            owned = [pool.table.owned(row) for row in rows]
            expected = [0] * (allocator.num_usable + PADDING_PAGES)
            for pages in owned:
                for page in pages:
                    expected[page] += 1
            for node in nodes:
                expected[node.bundle.pages[index]] += 1
            for pages in self._in_transfer():
                expected[pages[index]] += 1
            owners, free = allocator.state()
            if owners != expected:
                wrong = {
                    page: (expected[page], owners[page])
                    for page in range(len(owners))
                    if owners[page] != expected[page]
                }
                yield f"of {pool.key}, pages have other owners than their counts say (page: (owners, count)): {wrong}"
            if sorted(free) != [page for page, count in enumerate(expected) if not count and page >= PADDING_PAGES]:
                yield f"of {pool.key}, the free list {sorted(free)} is not the pages without owners"
            width = pool.table.max_pages
            if self._tables[index].tolist() != [[*pages, *(0,) * (width - len(pages))] for pages in owned]:
                yield f"the device's page table of {pool.key} is not the host's"

    def _in_transfer(self) -> Iterator[tuple[int, ...]]:
        """The pages that transfers to the tier below, or back, hold."""
        for tier in self._stage.engine.runtime.tiers:
            yield from tier.holds()

    def _rows(self, holders: Sequence[SequenceState]) -> Iterator[str]:
        """Each open row belongs to one sequence, and no closed row has pages."""
        held = sorted(sequence.table_row for sequence in holders if sequence.table_row is not None)
        rows = range(1, self._store.limits.max_rows + 1)
        opened = [row for row in rows if self._store.is_open(row)]
        if held != opened:
            yield f"rows {opened} are open and sequences hold {held}"
        closed = [row for row in rows if row not in opened and self._store.row_pages(row)]
        if closed:
            yield f"rows {closed} are closed and have pages"

    def _parked(self) -> Iterator[str]:
        """A parked sequence holds nothing, and nobody will schedule it."""
        scheduler = self._stage.scheduler
        for sequence in scheduler._parked:
            if sequence.table_row is not None or sequence.prefix is not None or sequence.num_pages:
                yield "a parked sequence holds a row, pages or a node"
            if not sequence.is_paused or sequence in scheduler.running or sequence in scheduler._waiting:
                yield "a sequence is parked and runs or waits"

    def _replica(self) -> Iterator[str]:
        """A sequence is where it says, with its first continuation, and counts as work there until it is removed."""
        whole, scheduler, number = self._stage.engine._scheduler, self._stage.scheduler, self._stage.number
        here = [*scheduler.running, *scheduler._waiting, *scheduler._parked]
        if any(each.replica != number for each in here):
            yield "a sequence is in another replica than it says"
        if any(each.leader is not None and each.leader.replica != number for each in here):
            yield "a continuation is in another replica than the first one of its prompt"
        if isinstance(whole, ReplicaScheduler) and whole._loads[number] != sum(each.max_len for each in here):
            yield f"a replica counts work for {whole._loads[number]} tokens, and has other"

    def _in_flight(self) -> Iterator[str]:
        """A row in flight keeps the pages with which it was launched, and does not share those that it writes."""
        for row in self._stage.in_flight():
            first, stop = row.context_len // self._size, -(-(row.context_len + row.num_tokens) // self._size)
            for pool, launched in zip(self._store.pools, self._launched[row.table_row], strict=True):
                if pool.table.owned(row.table_row)[:stop] != launched[:stop]:
                    yield f"row {row.table_row}, in flight, lost pages {launched[:stop]} of {pool.key}"
                elif any(pool.allocator.owners(page) != 1 for page in launched[first:stop]):
                    yield f"row {row.table_row}, in flight, writes to a page of {pool.key} that it shares"

    def _tree(self, nodes: Sequence[PrefixNode], holders: Sequence[SequenceState]) -> Iterator[str]:
        """Nodes continue their parents, and are locked exactly by the sequences that run on them."""
        locks: Counter[int] = Counter()
        known = {id(node) for node in nodes}
        for sequence in holders:
            node = sequence.prefix
            keys = []
            while node is not None and node.parent is not None:
                locks[id(node)] += 1
                keys.append(node.key)
                if id(node) not in known:
                    yield "a running sequence's node is not in the tree"
                node = node.parent
            if sequence.prefix is not None and sequence.prefix.namespace != sequence.request.terms.caller:
                yield f"a request of {sequence.request.terms.caller!r} runs on pages of {sequence.prefix.namespace!r}"
            if b"".join(reversed(keys)) != array("I", sequence.tokens[: len(keys) * self._size]).tobytes():
                yield "a running sequence's node is another's beginning"
        for node in nodes:
            if node.num_locks != locks[id(node)]:
                yield f"a node has {node.num_locks} locks, and {locks[id(node)]} sequences run on it"
            if node.parent is None or node.parent.children.get(node.key) is not node:
                yield "a node is not its parent's child"
            elif node.namespace != node.parent.namespace or len(node.key) != self._size * array("I").itemsize:
                yield "a node does not continue its parent"
        prefixes = self._stage.prefixes
        unlocked = sum(node.num_locks == 0 for node in nodes)
        if prefixes is not None and (prefixes.num_evictable, prefixes.num_pages) != (unlocked, len(nodes)):
            yield f"the tree counts {prefixes.num_evictable} pages to evict, and {unlocked} have no lock"

    def _holdings(self, nodes: Sequence[PrefixNode], holders: Sequence[SequenceState]) -> Iterator[str]:
        """The pools hold the tokens and positions of the tree's nodes and of the running sequences."""
        size = self._size
        depths: dict[int, int] = {}
        pages: list[list[int]] = [[] for _ in self._store.pools]
        tokens = array("I")
        starts: list[int] = []
        for node in nodes:
            depths[id(node)] = start = depths.get(id(node.parent), -size) + size
            starts.append(start)
        tokens.frombytes(b"".join([node.key for node in nodes]))
        for index, numbers in enumerate(pages):
            numbers.extend([node.bundle.pages[index] for node in nodes])
        for sequence in holders:
            count = min(sequence.num_computed, len(sequence.tokens))
            num_pages = -(-count // size)
            starts.extend(range(0, num_pages * size, size))
            tokens.extend(sequence.tokens[:count])
            tokens.extend([_ANY] * (num_pages * size - count))
            for index, pool in enumerate(self._store.pools):
                pages[index].extend(pool.table.owned(sequence.table_row or 0)[:num_pages])
        if not starts:
            return
        expected = np.frombuffer(tokens, dtype=np.uint32).reshape(-1, size)
        anything = expected == _ANY
        positions = np.array(starts, dtype=np.float64)[:, None] + self._places
        for pool, numbers, contents in zip(self._store.pools, pages, self._contents, strict=True):
            if len(numbers) != len(starts):
                yield f"a running sequence has fewer pages of {pool.key} than its entries need"
                continue
            if contents is None:
                continue
            held_tokens, held_positions = contents
            held = np.array(numbers)
            right = (held_positions[held] == positions) | anything
            if held_tokens is not None:
                right &= (held_tokens[held] == expected) | anything
            if not right.all():
                wrong = np.flatnonzero(~right.all(axis=1)).tolist()
                yield f"pages {[numbers[index] for index in wrong]} of {pool.key} hold other entries than they should"


_ANY = 0xFFFFFFFF
"""Stands for an entry that is not yet computed."""
