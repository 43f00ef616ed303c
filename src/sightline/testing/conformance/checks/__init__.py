"""Every check of the kit, each after those that it builds on."""

from __future__ import annotations

from sightline.testing.conformance.checks import (
    borrowed,
    cache,
    choices,
    compressed,
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
    recurrences,
    scaled_cache,
    sparse,
    states,
)
from sightline.testing.conformance.trial import Check

_MODULES = (
    first,
    states,
    recurrences,
    cache,
    borrowed,
    latent,
    lengths,
    pages,
    features,
    numerics,
    scaled_cache,
    sparse,
    choices,
    compressed,
    plans,
    memory,
    graphs,
    covering,
)


def _ordered(checks: list[Check]) -> tuple[Check, ...]:
    """Sorts checks after those that they build on, and otherwise keeps their order."""
    names = {check.name for check in checks}
    unknown = {name for check in checks for name in check.after} - names
    if len(names) != len(checks) or unknown:
        raise ValueError(f"expected checks of different names that build on known ones, got {sorted(unknown)}")
    done: dict[str, Check] = {}
    while checks:
        ready = next(check for check in checks if all(name in done for name in check.after))
        done[ready.name] = ready
        checks.remove(ready)
    return tuple(done.values())


CHECKS: tuple[Check, ...] = _ordered(
    [each for module in _MODULES for each in vars(module).values() if isinstance(each, Check)]
)
