"""Selects the backend that serves a group, and reports why the others do not.

A pure function of capability rows, a requirement and, if proof is required, the proofs. Never replaces an explicit
choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sightline.attention.capability import (
    Capability,
    Requirement,
    Work,
    device_refusals,
    hindrances,
    lacks_here,
    refusals,
)
from sightline.attention.contract import AttentionBackend
from sightline.core.errors import NoBackendError


@dataclass(frozen=True)
class Candidate:
    """A backend that selection may choose."""

    name: str
    by_default: bool
    """False for a backend that serves only if requested by name."""
    distribution: str
    """The package that ships it."""
    load: Callable[[], type[AttentionBackend[Any, Any]]]
    """Imports the backend and its library. Backends that are not chosen are not imported."""
    rows: Callable[[], tuple[Capability, ...]]
    """The capability rows. Sightline's own can be read without the library; reading others imports the class."""
    brings: str = ""
    """What installing the package that the rows need would gain, and how to install it."""

    @staticmethod
    def of(name: str, backend: type[AttentionBackend[Any, Any]], distribution: str, *, by_default: bool) -> Candidate:
        """A candidate whose class is already imported."""
        return Candidate(name, by_default, distribution, lambda: backend, lambda: backend.capabilities)


Refused = tuple[str, tuple[str, ...]]
"""A backend's name and the reasons for refusing it."""


@dataclass(frozen=True)
class Offer:
    """Candidate backends, and those that are not considered."""

    candidates: tuple[Candidate, ...]
    """In order of preference."""
    passed_over: tuple[Candidate, ...] = ()
    """Backends that are not considered."""
    asked: str | None = None
    """The names by which the candidates were requested; None if they are the default ones."""

    @property
    def not_asked(self) -> tuple[Refused, ...]:
        reason = "serves only when asked for by name" if self.asked is None else f"{self.asked} was asked for"
        return tuple((candidate.name, (reason,)) for candidate in self.passed_over)


@dataclass(frozen=True)
class Selection:
    """The choice for one kind of rows of one group."""

    candidate: Candidate
    capability: Capability
    refused: tuple[Refused, ...]
    """Every backend that was not chosen."""
    forgone: tuple[Refused, ...]
    """Refused backends that have higher-ranked kernels for such devices and rows, but do not serve the need."""
    misses: tuple[Miss, ...] = ()
    """Refused backends that do not serve the need."""


Doubt = Callable[[Candidate, Capability, Requirement], tuple[str, ...]]
"""Returns reasons not to trust a row that serves a need; empty if there are none."""


def no_doubt(candidate: Candidate, capability: Capability, need: Requirement) -> tuple[str, ...]:
    """Trusts every declaration."""
    del candidate, capability, need
    return ()


def select_backend(
    offer: Offer, need: Requirement, group: str, doubt: Doubt = no_doubt, work: Work = Work.PREFILL
) -> Selection:
    """Returns the highest-ranked backend that serves the need; ties go to the first. Raises `NoBackendError` with every
    reason if there is none."""
    found = [(candidate, serving_row(candidate, need, work, doubt)) for candidate in offer.candidates]
    fitting = [(candidate, row, row.ranks.of(work)) for candidate, row in found if row is not None]
    misses = [nearest_miss(candidate, need, work, doubt) for candidate, row in found if row is None]
    if not fitting:
        # Skip backends that serve only by name: reading their rows might import a package.
        others = [each for each in offer.passed_over if each.by_default]
        would = [each.name for each in others if serving_row(each, need, work, doubt) is not None]
        raise NoBackendError(_no_backend_text(offer, need, group, work, misses, would))
    chosen, capability, highest = max(fitting, key=lambda fit: fit[2])
    behind = [
        (candidate.name, (f"{chosen.name} {'comes first' if rank == highest else f'is faster at {work.value}'}",))
        for candidate, _, rank in fitting
        if candidate is not chosen
    ]
    return Selection(
        chosen,
        capability,
        (*(miss.told for miss in misses), *behind, *offer.not_asked),
        tuple(miss.told for miss in misses if miss.is_for_such and miss.rank > highest),
        tuple(misses),
    )


@dataclass(frozen=True)
class Miss:
    """Why a backend does not serve a need, according to its closest row."""

    name: str
    reasons: tuple[str, ...]
    distance: tuple[int, int, bool]
    """Number of reasons that only another machine, package or backend would fix; number of all reasons; whether the
    dtype is one."""
    is_for_such: bool
    """True if the row is for this kind of device and attention."""
    rank: int
    gain: str
    """If a package is missing, what it would gain and how to install it."""
    remedies: tuple[str, ...] = ()
    """What would remove the reasons, all of them together. An empty one says that a reason cannot be removed."""

    @property
    def told(self) -> Refused:
        return self.name, self.reasons


def serving_row(candidate: Candidate, need: Requirement, work: Work, doubt: Doubt = no_doubt) -> Capability | None:
    """The highest-ranked row of a backend that serves the need; None if there is none."""
    rows = [row for row in candidate.rows() if not _reasons(candidate, row, need, doubt)]
    return max(rows, key=lambda row: row.ranks.of(work), default=None)


def nearest_miss(candidate: Candidate, need: Requirement, work: Work, doubt: Doubt = no_doubt) -> Miss:
    """The closest row of a backend that does not serve the need."""
    misses = [_miss(candidate, row, need, work, doubt) for row in candidate.rows()]
    declares_none = Miss(candidate.name, ("declares no capability",), (1, 1, True), is_for_such=False, rank=0, gain="")
    return min(misses, key=lambda miss: miss.distance, default=declares_none)


def _miss(candidate: Candidate, row: Capability, need: Requirement, work: Work, doubt: Doubt) -> Miss:
    reasons = _reasons(candidate, row, need, doubt)
    has_kind = need.spec.kind in row.spec_kinds
    hard = len(device_refusals(row, need.device)) + (not has_kind)
    return Miss(
        candidate.name,
        reasons,
        (hard, len(reasons), need.dtype not in row.dtypes),
        is_for_such=has_kind and need.device.kind in row.devices,
        rank=row.ranks.of(work),
        gain=f" (it brings {candidate.brings})" if lacks_here(row, need.device) and candidate.brings else "",
        remedies=tuple(dict.fromkeys(each.remedy for each in hindrances(row, need))),
    )


def _reasons(candidate: Candidate, row: Capability, need: Requirement, doubt: Doubt) -> tuple[str, ...]:
    return refusals(row, need) or doubt(candidate, row, need)


def _no_backend_text(
    offer: Offer, need: Requirement, group: str, work: Work, misses: Sequence[Miss], would: Sequence[str]
) -> str:
    wanted = ", ".join(sorted(feature.value for feature in need.features)) or "no special feature"
    lines = [
        f"expected an attention backend for {work.value} of {group} ({need.spec.kind.value}, {wanted}, {need.dtype}, "
        f"a cache in {need.cache_dtype}, head dimension {need.spec.head_dim}, page size {need.page_size}, "
        f"{need.device.kind.value}), got none:"
    ]
    lines += [f"  {miss.name}: {'; '.join(miss.reasons)}{miss.gain}" for miss in misses]
    if offer.asked is None:
        lines += [f"  {name}: {reason}" for name, (reason,) in offer.not_asked]
    elif offer.passed_over:
        lines.append(f"  not asked for: {', '.join(each.name for each in offer.passed_over)}")
    if would:
        lines.append(f"Ask for {' or '.join(would)}, or for none by name.")
    elif misses:
        nearest = min(misses, key=lambda miss: miss.distance)
        lines.append(f"The nearest is {nearest.name}: mend what it says, or choose another device or dtype.")
    else:
        lines.append("Ask for one of them by name.")
    return "\n".join(lines)
