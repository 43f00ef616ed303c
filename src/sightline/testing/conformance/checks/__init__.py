"""Every check, in the order in which they build on each other."""

from __future__ import annotations

from sightline.testing.conformance.checks import (
    cache,
    covering,
    features,
    first,
    graphs,
    latent,
    lengths,
    memory,
    numerics,
    pages,
    plans,
    scaled_cache,
)
from sightline.testing.conformance.trial import Check


def _ordered(checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Each after those that it names, else as they stand."""
    names = {check.name for check in checks}
    unknown = {name for check in checks for name in check.after} - names
    if len(names) != len(checks) or unknown:
        raise ValueError(f"expected checks of different names that build on known ones, got {sorted(unknown)}")
    done: dict[str, Check] = {}
    left = list(checks)
    while left:
        ready = next(check for check in left if all(name in done for name in check.after))
        done[ready.name] = ready
        left.remove(ready)
    return tuple(done.values())


CHECKS: tuple[Check, ...] = _ordered(
    (
        *first.CHECKS,
        *cache.CHECKS,
        *latent.CHECKS,
        *lengths.CHECKS,
        *pages.CHECKS,
        *features.CHECKS,
        *numerics.CHECKS,
        *scaled_cache.CHECKS,
        *plans.CHECKS,
        *memory.CHECKS,
        *graphs.CHECKS,
        *covering.CHECKS,
    )
)
