"""What an engine looks like when nothing runs."""

from __future__ import annotations

from itertools import zip_longest

from sightline import LLM
from sightline.cache.prefix import PrefixCache
from sightline.cache.store import CacheStore
from sightline.scheduler.sequence import SequenceState
from sightline.speculative.drafter import Drafter


def kept_by_drafters(holder: object) -> list[str]:
    """What drafts, and the drafters that they have, keep by sequence: nothing, if no sequence is left."""
    found: list[str] = []
    for name, value in vars(holder).items():
        if isinstance(value, dict | set) and any(isinstance(each, SequenceState) for each in value):
            found.append(f"{type(holder).__name__}.{name}")
        elif isinstance(value, Drafter):
            found += kept_by_drafters(value)
    return found


def is_at_rest(llm: LLM) -> bool:
    """Every row is free, every page is free or the prefix cache's alone, and drafters keep nothing of a sequence."""
    drafts = llm.engine._drafts
    if drafts is not None and kept_by_drafters(drafts):
        return False
    runtime = llm.engine.runtime
    stores = (runtime.store, *runtime.others)
    return all(store_is_at_rest(*each) for each in zip_longest(stores, llm.engine.prefixes))


def store_is_at_rest(store: CacheStore, prefixes: PrefixCache | None) -> bool:
    """The same of one replica's cache."""
    cached = list(prefixes.nodes()) if prefixes is not None else []
    owned_once = all(
        pool.allocator.owners(page) == 1
        for node in cached
        for pool, page in zip(store.pools, node.bundle.pages, strict=True)
    )
    evictable = prefixes.num_evictable if prefixes is not None else 0
    states, kept = store.main.states, {node.checkpoint.slot for node in cached if node.checkpoint is not None}
    if states is not None and (states.num_checkpoints, states.num_free + len(kept)) != (len(kept), states.num_usable):
        return False
    return (
        store.num_free_rows == store.limits.max_rows
        and owned_once
        and evictable == len(cached)
        and all(pool.allocator.num_free + len(cached) == pool.allocator.num_usable for pool in store.pools)
    )
