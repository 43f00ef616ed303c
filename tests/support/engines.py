"""What an engine looks like when nothing runs."""

from __future__ import annotations

from sightline import LLM


def is_at_rest(llm: LLM) -> bool:
    """Every row is free, and every page is free or the prefix cache's alone."""
    store, prefixes = llm.engine.runtime.store, llm.engine.prefixes
    cached = list(prefixes.nodes()) if prefixes is not None else []
    owned_once = all(
        pool.allocator.owners(page) == 1
        for node in cached
        for pool, page in zip(store.pools, node.bundle.pages, strict=True)
    )
    evictable = prefixes.num_evictable if prefixes is not None else 0
    return (
        store.num_free_rows == store.limits.max_rows
        and owned_once
        and evictable == len(cached)
        and all(pool.allocator.num_free + len(cached) == pool.allocator.num_usable for pool in store.pools)
    )
