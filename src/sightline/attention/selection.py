"""Which backend serves a group, and why the others do not.

A pure function of capability rows, a requirement and, where proof is asked for, the proofs. Never replaces an
explicit choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sightline.attention.capability import (
    Capability,
    HostLengths,
    Requirement,
    Work,
    device_refusals,
    lacks_package,
    refusals,
)
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
    passed_over: tuple[Candidate, ...] = ()
    """Backends that are not asked."""
    asked: str | None = None
    """The names by which the candidates were asked for; None where they are those that serve by default."""

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
    forgone: tuple[Refused, ...] = ()
    """Those of them that have kernels for such devices and rows, of a higher rank, which do not serve the need."""


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
    matches = [match_backend(candidate, need, work, doubt) for candidate in offer.candidates]
    fitting = [match for match in matches if not match.reasons]
    refused = [match for match in matches if match.reasons]
    if not fitting:
        # Rows of those that serve only by name may be in packages that would have to be imported.
        others = [each for each in offer.passed_over if each.by_default]
        would = [each.name for each in others if not match_backend(each, need, work, doubt).reasons]
        raise NoBackendError(_no_backend_text(offer, need, group, work, refused, would))
    chosen = max(fitting, key=lambda match: match.rank)
    behind = [
        (match.name, (f"{chosen.name} {'comes first' if match.rank == chosen.rank else f'is faster at {work.value}'}",))
        for match in fitting
        if match is not chosen
    ]
    return Selection(
        chosen.candidate,
        chosen.row,
        (*(match.told for match in refused), *behind, *offer.not_asked),
        tuple(match.told for match in refused if match.is_for_such and match.rank > chosen.rank),
    )


_NO_ROW = Capability(
    spec_kinds=frozenset(),
    devices=frozenset(),
    compute_capabilities=frozenset(),
    dtypes=frozenset(),
    cache_dtypes=frozenset(),
    head_dims=frozenset(),
    group_sizes=frozenset(),
    page_sizes=frozenset(),
    features=frozenset(),
    host_lengths=HostLengths.BOUND,
)
"""Of a backend that declares none."""


@dataclass(frozen=True)
class Match:
    """A backend's row that serves a need, the highest in rank of several; or the one that comes nearest to it."""

    candidate: Candidate
    row: Capability
    reasons: tuple[str, ...]
    """Why it does not serve; empty where it does."""
    distance: tuple[int, int, bool]
    """Reasons that only another machine, package or backend would mend, all reasons, and whether the dtype is one."""
    is_for_such: bool
    """The row is for such devices and attention."""
    rank: int

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def told(self) -> Refused:
        return self.name, self.reasons

    @property
    def gain(self) -> str:
        """Where a package is missing, what it would bring, and how to get it."""
        return f" (it brings {self.candidate.brings})" if lacks_package(self.row) and self.candidate.brings else ""


def match_backend(candidate: Candidate, need: Requirement, work: Work, doubt: Doubt = no_doubt) -> Match:
    """The row of a backend that would serve the need, or the one that comes nearest."""
    matches = [_match_row(candidate, row, need, doubt, work) for row in candidate.rows()]
    fitting = [match for match in matches if not match.reasons]
    if fitting:
        return max(fitting, key=lambda match: match.rank)
    if matches:
        return min(matches, key=lambda match: match.distance)
    return Match(candidate, _NO_ROW, ("declares no capability",), (1, 1, True), is_for_such=False, rank=0)


def _match_row(candidate: Candidate, row: Capability, need: Requirement, doubt: Doubt, work: Work) -> Match:
    reasons = refusals(row, need) or doubt(candidate, row, need)
    has_kind = need.spec.kind in row.spec_kinds
    hard = len(device_refusals(row, need.device)) + (not has_kind)
    return Match(
        candidate,
        row,
        reasons,
        (hard, len(reasons), need.dtype not in row.dtypes),
        is_for_such=has_kind and need.device.kind in row.devices,
        rank=row.ranks.of(work),
    )


def _no_backend_text(
    offer: Offer, need: Requirement, group: str, work: Work, refused: Sequence[Match], would: Sequence[str]
) -> str:
    wanted = ", ".join(sorted(feature.value for feature in need.features)) or "no special feature"
    lines = [
        f"expected an attention backend for {work.value} of {group} ({need.spec.kind.value}, {wanted}, {need.dtype}, "
        f"a cache in {need.cache_dtype}, head dimension {need.spec.head_dim}, page size {need.page_size}, "
        f"{need.device.kind.value}), got none:"
    ]
    lines += [f"  {match.name}: {'; '.join(match.reasons)}{match.gain}" for match in refused]
    if offer.asked is None:
        lines += [f"  {name}: {reason}" for name, (reason,) in offer.not_asked]
    elif offer.passed_over:
        lines.append(f"  not asked for: {', '.join(each.name for each in offer.passed_over)}")
    if would:
        lines.append(f"Ask for {' or '.join(would)}, or for none by name.")
    elif refused:
        nearest = min(refused, key=lambda match: match.distance)
        lines.append(f"The nearest is {nearest.name}: mend what it says, or choose another device or dtype.")
    else:
        lines.append("Ask for one of them by name.")
    return "\n".join(lines)
