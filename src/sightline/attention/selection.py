"""Which backend serves a group, and why the others do not.

A pure function of capability rows, a requirement and, where proof is asked for, the proofs. Never replaces an
explicit choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sightline.attention.capability import Capability, Requirement, Work, refusals
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
    """Imports it, and the library that it computes with. A backend that is not chosen is not imported."""
    rows: Callable[[], tuple[Capability, ...]]
    """What it can do. Of Sightline's own these are read without the library; of others they are the class's."""
    brings: str = ""
    """What a machine would gain by the package that the rows need, and how to get it."""

    @staticmethod
    def of(name: str, backend: type[AttentionBackend[Any, Any]], distribution: str, *, by_default: bool) -> Candidate:
        """One whose class is there already."""
        return Candidate(name, by_default, distribution, lambda: backend, lambda: backend.capabilities)


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
    """The choice for one kind of rows of one group."""

    candidate: Candidate
    capability: Capability
    refused: tuple[Refused, ...]
    """Every backend that was not chosen."""


Doubt = Callable[[Candidate, Capability, Requirement], tuple[str, ...]]
"""Reasons not to trust a row that serves a need; empty where there is none."""


def no_doubt(candidate: Candidate, capability: Capability, need: Requirement) -> tuple[str, ...]:
    """A declaration is enough."""
    del candidate, capability, need
    return ()


def select_backend(
    offer: Offer, need: Requirement, group: str, doubt: Doubt = no_doubt, work: Work = Work.PREFILL
) -> Selection:
    """The highest in rank of those that serve the need, the first of equals; else an error with every reason."""
    fitting: list[tuple[Candidate, Capability]] = []
    refused: list[Refused] = []
    for candidate in offer.candidates:
        capability, reasons = _match(candidate, need, doubt, work)
        if capability is None:
            refused.append((candidate.name, reasons))
        else:
            fitting.append((candidate, capability))
    if not fitting:
        raise NoBackendError(_no_backend_text(need, group, work, refused, offer.passed_over))
    chosen, row = max(fitting, key=lambda each: each[1].ranks.of(work))
    for candidate, capability in fitting:
        if candidate is not chosen:
            behind = "comes first" if capability.ranks.of(work) == row.ranks.of(work) else f"is faster at {work.value}"
            refused.append((candidate.name, (f"{chosen.name} {behind}",)))
    return Selection(chosen, row, (*refused, *offer.passed_over))


def _match(
    candidate: Candidate, need: Requirement, doubt: Doubt, work: Work
) -> tuple[Capability | None, tuple[str, ...]]:
    """The row that fits and is highest in rank, or the reasons of the row that comes nearest."""
    fitting: list[Capability] = []
    nearest: tuple[str, ...] | None = None
    for capability in candidate.rows():
        reasons = refusals(capability, need) or doubt(candidate, capability, need)
        if not reasons:
            fitting.append(capability)
        elif nearest is None or len(reasons) < len(nearest):
            nearest = reasons
    if fitting:
        return max(fitting, key=lambda capability: capability.ranks.of(work)), ()
    return None, nearest or ("declares no capability",)


def _no_backend_text(
    need: Requirement, group: str, work: Work, refused: Sequence[Refused], passed_over: Sequence[Refused]
) -> str:
    wanted = ", ".join(sorted(feature.value for feature in need.features)) or "no special feature"
    lines = [
        f"expected an attention backend for {work.value} of {group} ({need.spec.kind.value}, {wanted}, {need.dtype}, "
        f"a cache in {need.cache_dtype}, head dimension {need.spec.head_dim}, page size {need.page_size}, "
        f"{need.device.kind.value}), got none:"
    ]
    lines += [f"  {name}: {'; '.join(reasons)}" for name, reasons in (*refused, *passed_over)]
    if refused:
        nearest = min(refused, key=lambda entry: len(entry[1]))[0]
        lines.append(f"The nearest is {nearest}: mend what it says, or choose another device or dtype.")
    else:
        lines.append("Ask for one of them by name.")
    return "\n".join(lines)
