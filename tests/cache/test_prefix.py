"""The prefix tree holds what a dictionary of prefixes would, owns each page once, and evicts what nobody uses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Drawn
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, rule

from sightline.cache.pools import Bundle, CacheLimits
from sightline.cache.prefix import PrefixCache, PrefixNode
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec, StateSpec
from sightline.cache.states import StateCheckpoint
from sightline.cache.store import CacheStore

POOL = PoolSpec("kv", (PlaneSpec("k", (1,), torch.float32),), num_layers=1)
SPECS = (GroupCacheSpec("group0", (POOL,)), GroupCacheSpec("group1", (POOL,)))
PAGE = 2


def make_store(usable_pages: int = 16) -> CacheStore:
    return CacheStore(SPECS, CacheLimits(usable_pages + 1, PAGE, 8, 64), torch.device("cpu"))


def locked(cache: PrefixCache, tokens: list[int], namespace: str = "") -> tuple[PrefixNode, tuple[Bundle, ...]]:
    """The longest prefix that is cached, kept from eviction."""
    match = cache.find(namespace, tokens)
    return cache.lock(namespace, match), match.bundles


def publish(store: CacheStore, cache: PrefixCache, tokens: list[int], namespace: str = "") -> int:
    """A request that computes tokens, leaves them in the cache and goes. Returns how many it found there."""
    node, bundles = locked(cache, tokens, namespace)
    row = store.open_row()
    store.adopt(row, bundles)
    store.grow_row(row, len(tokens))
    store.fill_row(row, len(tokens))
    for index in range(len(bundles), len(tokens) // PAGE):
        node = cache.extend(node, tokens[index * PAGE : (index + 1) * PAGE], store.committed_bundle(row, index))
    store.close_row(row)
    cache.unlock(node)
    return len(bundles) * PAGE


def found(cache: PrefixCache, tokens: list[int], namespace: str = "") -> int:
    """Tokens that are cached."""
    node, bundles = locked(cache, tokens, namespace)
    cache.unlock(node)
    return len(bundles) * PAGE


def test_whole_pages_of_what_was_computed_are_found_and_tails_are_not() -> None:
    store = make_store()
    cache = PrefixCache(store)
    assert publish(store, cache, [1, 2, 3, 4, 5]) == 0
    assert found(cache, [1, 2, 3, 4, 5]) == 4
    assert found(cache, [1, 2, 3]) == 2
    assert found(cache, [1]) == 0
    assert found(cache, [1, 2, 4, 3]) == 2
    assert found(cache, [2, 1, 3, 4]) == 0


def test_namespaces_share_nothing() -> None:
    store = make_store()
    cache = PrefixCache(store)
    publish(store, cache, [1, 2, 3, 4], "mine")
    assert found(cache, [1, 2, 3, 4], "yours") == 0
    assert found(cache, [1, 2, 3, 4]) == 0
    assert found(cache, [1, 2, 3, 4], "mine") == 4


def test_a_namespace_that_holds_nothing_is_forgotten() -> None:
    store = make_store()
    cache = PrefixCache(store)
    for name in range(100):
        found(cache, [1, 2], f"caller {name}")
    publish(store, cache, [1, 2], "one")
    cache.clear()
    assert cache._roots == {}


def test_what_follows_shares_the_pages_before_it() -> None:
    store = make_store()
    cache = PrefixCache(store)
    publish(store, cache, [1, 2, 3, 4])
    assert publish(store, cache, [1, 2, 3, 4, 5, 6]) == 4
    assert publish(store, cache, [1, 2, 9, 9]) == 2
    assert cache.num_pages == 4
    assert store.num_free_pages == store.num_usable_pages - 4


def test_tokens_that_two_computed_at_once_are_kept_once() -> None:
    store = make_store()
    cache = PrefixCache(store)
    rows = [store.open_row() for _ in range(2)]
    nodes = []
    for row in rows:
        store.grow_row(row, 2)
        store.fill_row(row, 2)
        nodes.append(locked(cache, [1, 2])[0])
    nodes = [cache.extend(node, [1, 2], store.committed_bundle(row, 0)) for node, row in zip(nodes, rows, strict=True)]
    assert nodes[0] is nodes[1]
    assert cache.num_pages == 1
    for row, node in zip(rows, nodes, strict=True):
        store.close_row(row)
        cache.unlock(node)
    assert store.num_free_pages == store.num_usable_pages - 1


def test_the_longest_unused_goes_first_and_ends_go_before_beginnings() -> None:
    store = make_store()
    cache = PrefixCache(store)
    publish(store, cache, [1, 1, 2, 2])
    publish(store, cache, [3, 3, 4, 4])
    assert found(cache, [1, 1, 2, 2]) == 4
    assert cache.evict(1) == 1
    assert sorted(path(node) for node in cache.nodes()) == [(1, 1), (1, 1, 2, 2), (3, 3)]
    assert cache.evict(1) == 1
    assert sorted(path(node) for node in cache.nodes()) == [(1, 1), (1, 1, 2, 2)]
    assert cache.evict(5) == 2
    assert store.num_free_pages == store.num_usable_pages


def test_a_beginning_was_of_use_for_as_long_as_what_came_after_it() -> None:
    store = make_store()
    cache = PrefixCache(store)
    publish(store, cache, [1, 1])
    publish(store, cache, [5, 5])
    publish(store, cache, [1, 1, 2, 2])
    assert cache.evict(2) == 2
    assert (found(cache, [1, 1]), found(cache, [5, 5])) == (2, 0), "its end was used after the other"


def test_what_is_locked_stays_with_all_before_it() -> None:
    store = make_store()
    cache = PrefixCache(store)
    publish(store, cache, [1, 1, 2, 2, 3, 3])
    node, _ = locked(cache, [1, 1, 2, 2, 9])
    assert cache.num_evictable == 1
    assert cache.evict(5) == 1
    assert found(cache, [1, 1, 2, 2, 3, 3]) == 4
    cache.unlock(node)
    assert cache.evict(5) == 2


def test_pages_that_a_row_still_reads_outlive_their_eviction() -> None:
    store = make_store()
    cache = PrefixCache(store)
    publish(store, cache, [1, 2])
    node, bundles = locked(cache, [1, 2])
    row = store.open_row()
    store.adopt(row, bundles)
    cache.unlock(node)
    cache.evict(1)
    assert store.num_free_pages == store.num_usable_pages - 1
    store.close_row(row)
    assert store.num_free_pages == store.num_usable_pages


def test_large_token_ids_are_told_apart() -> None:
    store = make_store()
    cache = PrefixCache(store)
    publish(store, cache, [2**31 + 1, 7])
    assert found(cache, [1, 7]) == 0
    assert found(cache, [2**31 + 1, 7]) == 2


def test_a_prefix_that_is_used_again_and_again_takes_no_more_memory() -> None:
    store = make_store()
    cache = PrefixCache(store)
    publish(store, cache, [1, 2])
    for _ in range(1000):
        found(cache, [1, 2])
    assert len(cache._idle) < 100
    assert cache.evict(1) == 1


class Machine(RuleBasedStateMachine):
    """Requests come, extend their prefix and go, in any order, against a dictionary of what must be found."""

    running = Drawn("running")

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store()
        self.cache = PrefixCache(self.store)
        self.open: dict[int, tuple[PrefixNode, list[int], str]] = {}
        self.known: set[tuple[str, tuple[int, ...]]] = set()
        """Prefixes that were put in and not evicted."""

    @rule(
        target=running,
        tokens=st.lists(st.integers(0, 1), max_size=6).map(
            lambda pages: [page for each in pages for page in (each, 0)]
        ),
        namespace=st.sampled_from(["", "other"]),
    )
    def start(self, tokens: list[int], namespace: str) -> int:
        if not self.store.num_free_rows or self.store.num_free_pages < 8:
            return 0
        node, bundles = locked(self.cache, tokens, namespace)
        expected = 0
        while (namespace, tuple(tokens[: (expected + 1) * PAGE])) in self.known and (expected + 1) * PAGE <= len(
            tokens
        ):
            expected += 1
        assert len(bundles) == expected
        row = self.store.open_row()
        self.store.adopt(row, bundles)
        self.open[row] = (node, tokens[: expected * PAGE], namespace)
        return row

    @rule(row=running, page=st.integers(0, 1))
    def go_on(self, row: int, page: int) -> None:
        if row not in self.open or self.store.num_free_pages == 0:
            return
        node, tokens, namespace = self.open[row]
        if len(tokens) >= 16:
            return
        tokens = [*tokens, page, 0]
        self.store.grow_row(row, len(tokens))
        self.store.fill_row(row, len(tokens))
        node = self.cache.extend(node, tokens[-PAGE:], self.store.committed_bundle(row, len(tokens) // PAGE - 1))
        self.open[row] = (node, tokens, namespace)
        self.known.add((namespace, tuple(tokens)))

    @rule(row=consumes(running))
    def end(self, row: int) -> None:
        if row in self.open:
            node, _, _ = self.open.pop(row)
            self.store.close_row(row)
            self.cache.unlock(node)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        evictable = self.cache.num_evictable
        assert self.cache.evict(count) == min(count, evictable)
        held = {(node.namespace, path(node)) for node in self.cache.nodes()}
        gone = self.known - held
        # What is gone was an end, and nobody's.
        assert not any(
            namespace == other and tokens[: len(prefix)] == prefix
            for namespace, prefix in gone
            for other, tokens in held
        )
        for _, tokens, namespace in self.open.values():
            assert all((namespace, tuple(tokens[:end])) in held for end in range(PAGE, len(tokens) + 1, PAGE))
        self.known = held

    @invariant()
    def the_tree_is_what_is_known(self) -> None:
        nodes = list(self.cache.nodes())
        assert {(node.namespace, path(node)) for node in nodes} == self.known
        assert self.cache.num_pages == len(nodes)
        assert self.cache.num_evictable == sum(node.num_locks == 0 for node in nodes)

    @invariant()
    def every_page_has_the_owners_that_it_should_have(self) -> None:
        for index, pool in enumerate(self.store.pools):
            owners: dict[int, int] = {}
            for node in self.cache.nodes():
                owners[node.bundle.pages[index]] = owners.get(node.bundle.pages[index], 0) + 1
            assert all(count == 1 for count in owners.values()), "no page stands for two prefixes"
            for row in self.open:
                for page in pool.table.owned(row):
                    owners[page] = owners.get(page, 0) + 1
            assert all(pool.allocator.owners(page) == owners.get(page, 0) for page in range(1, 17))


def path(node: PrefixNode) -> tuple[int, ...]:
    """The tokens of a node and of all before it."""
    keys: list[bytes] = []
    step: PrefixNode | None = node
    while step is not None and step.parent is not None:
        keys.append(step.key)
        step = step.parent
    return tuple(memoryview(b"".join(reversed(keys))).cast("I"))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine.pytestmark = [pytest.mark.timeout(120)]  # type: ignore[attr-defined]


HYBRID = (*SPECS, GroupCacheSpec("recurrent", (), StateSpec((PlaneSpec("state", (1,), torch.float32),), num_layers=1)))


def make_hybrid(count: int) -> tuple[PrefixCache, list[PrefixNode], list[StateCheckpoint]]:
    """A cache of as many pages in one line, their nodes, and the states behind them, which one row pins."""
    store = CacheStore(HYBRID, CacheLimits(17, PAGE, 4, 64, 2, 2 * count), torch.device("cpu"))
    cache, states, row = PrefixCache(store), store.main.states, store.open_row()
    assert states is not None
    store.grow_row(row, count * PAGE)
    node = cache.lock("", cache.find("", []))
    nodes, checkpoints = [], []
    for index in range(count):
        start, stop = index * PAGE, (index + 1) * PAGE
        states.pin(row, stop)
        states.slots_to_write([row], [start], [PAGE], [1])
        store.lengths.advance(row, stop)
        states.launch(row, start, stop)
        store.lengths.commit(row, stop)
        node = cache.extend(node, [index] * PAGE, store.committed_bundle(row, index))
        nodes.append(node)
        checkpoint = states.checkpoint(row, stop)
        assert checkpoint is not None
        checkpoints.append(checkpoint)
    return cache, nodes, checkpoints


TOKENS = [index for index in range(4) for _ in range(PAGE)]


def test_a_prefix_with_states_ends_at_the_last_one_and_knows_of_the_pages_behind_it() -> None:
    cache, nodes, checkpoints = make_hybrid(4)
    assert (cache.find("", TOKENS).bundles, cache.find("", TOKENS).num_seen) == ((), 4)
    cache.attach(nodes[1], checkpoints[1])
    match = cache.find("", TOKENS)
    assert (match.node, match.checkpoint, len(match.bundles), match.num_seen) == (nodes[1], checkpoints[1], 2, 4)


def test_a_state_of_another_position_is_not_attached() -> None:
    cache, nodes, checkpoints = make_hybrid(3)
    with pytest.raises(ValueError, match="expected the state behind 4 tokens, where the page ends, got one behind 6"):
        cache.attach(nodes[1], checkpoints[2])
    assert cache.num_checkpoints == 0


def test_the_checkpoint_that_was_unused_for_longest_goes_first() -> None:
    cache, nodes, checkpoints = make_hybrid(3)
    for node, checkpoint in zip(nodes, checkpoints, strict=True):
        assert cache.attach(node, checkpoint)
        assert not cache.attach(node, checkpoint)
    cache.lock("", cache.find("", TOKENS[:PAGE]))
    dropped = []
    while cache.drop_checkpoint():
        dropped.append([node.checkpoint is None for node in nodes])
    assert dropped == [[False, True, False], [False, True, True], [True, True, True]]
    assert cache.num_checkpoints == 0


def test_a_state_is_restored_only_behind_its_own_number_of_tokens() -> None:
    cache, nodes, checkpoints = make_hybrid(3)
    store, bundles = cache._store, [node.bundle for node in nodes]
    row = store.open_row()
    store.adopt(row, bundles[:1])
    with pytest.raises(ValueError, match="expected an open row of 4 tokens to restore the state behind them"):
        store.restore(row, checkpoints[1])
    store.restore(row, checkpoints[0])
    assert store.main.states is not None
    assert store.main.states.positions(row) == (PAGE,)
