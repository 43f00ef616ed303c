"""Which backend serves a group, and why the others do not.

A pure function of capability rows and a requirement. Never replaces an explicit choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sightline.attention.capability import Capability, Requirement, refusals
from sightline.attention.contract import AttentionBackend, SoftmaxInputs
from sightline.core.errors import ConfigError, NoBackendError


@dataclass(frozen=True)
class Candidate:
    """A backend that selection may choose, in order of preference."""

    name: str
    backend: type[AttentionBackend[SoftmaxInputs]]
    by_default: bool
    """False for a backend that serves only when it is asked for by name."""


@dataclass(frozen=True)
class Selection:
    """The choice for one group."""

    candidate: Candidate
    capability: Capability
    refused: tuple[tuple[str, tuple[str, ...]], ...]
    """(name, reasons) of every candidate that was not chosen."""


def select_backend(candidates: Sequence[Candidate], need: Requirement, requested: str | None, group: str) -> Selection:
    """The requested backend, or the first that serves the need; else an error with every reason."""
    names = [candidate.name for candidate in candidates]
    if requested is not None and requested not in names:
        raise ConfigError(f"expected an attention backend out of {', '.join(names)}, got {requested!r}")
    chosen: tuple[Candidate, Capability] | None = None
    refused: list[tuple[str, tuple[str, ...]]] = []
    for candidate in candidates:
        fitting, reasons = _match(candidate, need)
        if requested not in (None, candidate.name):
            reasons = (f"{requested} was asked for",)
        elif requested is None and not candidate.by_default:
            reasons = ("serves only when asked for by name", *reasons)
        elif fitting is not None and chosen is not None:
            reasons = (f"{chosen[0].name} comes first",)
        elif fitting is not None:
            chosen = (candidate, fitting)
            continue
        refused.append((candidate.name, reasons))
    if chosen is None:
        raise NoBackendError(_no_backend_text(need, group, refused, requested))
    return Selection(*chosen, tuple(refused))


def _match(candidate: Candidate, need: Requirement) -> tuple[Capability | None, tuple[str, ...]]:
    """The first row that fits, or the reasons of the row that comes nearest."""
    nearest: tuple[str, ...] | None = None
    for capability in candidate.backend.capabilities:
        reasons = refusals(capability, need)
        if not reasons:
            return capability, ()
        if nearest is None or len(reasons) < len(nearest):
            nearest = reasons
    return None, nearest or ("declares no capability",)


def _no_backend_text(
    need: Requirement, group: str, refused: Sequence[tuple[str, tuple[str, ...]]], requested: str | None
) -> str:
    wanted = ", ".join(sorted(feature.value for feature in need.features)) or "no special feature"
    lines = [
        f"expected an attention backend for {group} ({need.spec.kind.value}, {wanted}, {need.dtype}, "
        f"head dimension {need.spec.head_dim}, page size {need.page_size}, {need.device.kind.value}), got none:"
    ]
    lines += [f"  {name}: {'; '.join(reasons)}" for name, reasons in refused]
    nearest = requested or min(refused, key=lambda entry: len(entry[1]))[0]
    lines.append(f"The nearest is {nearest}: remove what it refuses, or choose another device or dtype.")
    return "\n".join(lines)
