"""Which backend serves a group, and why the others do not.

A pure function of capability rows, a requirement and, where proof is asked for, the proofs. Never replaces an
explicit choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sightline.attention.capability import Capability, Requirement, refusals
from sightline.attention.contract import AttentionBackend
from sightline.core.errors import NoBackendError


@dataclass(frozen=True)
class Candidate:
    """A backend that selection may choose."""

    name: str
    by_default: bool
    """False for a backend that serves only when it is asked for by name."""
    distribution: str
    """The package that ships it."""
    load: Callable[[], type[AttentionBackend[Any, Any]]]
    """Imports it. A backend that nobody asks for is not imported."""


Refused = tuple[str, tuple[str, ...]]
"""A backend's name and the reasons."""


@dataclass(frozen=True)
class Offer:
    """What selection may choose from."""

    candidates: tuple[Candidate, ...]
    """In order of preference."""
    passed_over: tuple[Refused, ...]
    """Backends that are not asked."""


@dataclass(frozen=True)
class Selection:
    """The choice for one group."""

    candidate: Candidate
    backend: type[AttentionBackend[Any, Any]]
    capability: Capability
    refused: tuple[Refused, ...]
    """Every backend that was not chosen."""


Doubt = Callable[[Candidate, Capability, Requirement], tuple[str, ...]]
"""Reasons not to trust a row that serves a need; empty where there is none."""


def no_doubt(candidate: Candidate, capability: Capability, need: Requirement) -> tuple[str, ...]:
    """A declaration is enough."""
    del candidate, capability, need
    return ()


def select_backend(offer: Offer, need: Requirement, group: str, doubt: Doubt = no_doubt) -> Selection:
    """The first backend that serves the need; else an error with every reason."""
    chosen: tuple[Candidate, type[AttentionBackend[Any, Any]], Capability] | None = None
    refused: list[Refused] = []
    for candidate in offer.candidates:
        if chosen is not None:
            refused.append((candidate.name, (f"{chosen[0].name} comes first",)))
            continue
        backend = candidate.load()
        fitting, reasons = _match(candidate, backend.capabilities, need, doubt)
        if fitting is None:
            refused.append((candidate.name, reasons))
        else:
            chosen = (candidate, backend, fitting)
    if chosen is None:
        raise NoBackendError(_no_backend_text(need, group, refused, offer.passed_over))
    return Selection(*chosen, (*refused, *offer.passed_over))


def _match(
    candidate: Candidate, rows: Sequence[Capability], need: Requirement, doubt: Doubt
) -> tuple[Capability | None, tuple[str, ...]]:
    """The first row that fits, or the reasons of the row that comes nearest."""
    nearest: tuple[str, ...] | None = None
    for capability in rows:
        reasons = refusals(capability, need) or doubt(candidate, capability, need)
        if not reasons:
            return capability, ()
        if nearest is None or len(reasons) < len(nearest):
            nearest = reasons
    return None, nearest or ("declares no capability",)


def _no_backend_text(need: Requirement, group: str, refused: Sequence[Refused], passed_over: Sequence[Refused]) -> str:
    wanted = ", ".join(sorted(feature.value for feature in need.features)) or "no special feature"
    lines = [
        f"expected an attention backend for {group} ({need.spec.kind.value}, {wanted}, {need.dtype}, "
        f"head dimension {need.spec.head_dim}, page size {need.page_size}, {need.device.kind.value}), got none:"
    ]
    lines += [f"  {name}: {'; '.join(reasons)}" for name, reasons in (*refused, *passed_over)]
    if refused:
        nearest = min(refused, key=lambda entry: len(entry[1]))[0]
        lines.append(f"The nearest is {nearest}: mend what it says, or choose another device or dtype.")
    else:
        lines.append("Ask for one of them by name.")
    return "\n".join(lines)
