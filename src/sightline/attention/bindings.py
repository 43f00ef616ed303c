"""Which backend serves which rows of a group, and how it sees them.

Knows groups, capabilities and batches. Does not plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sightline.attention.capability import Capability, HostLengths, Work, decode_work
from sightline.attention.contract import AttentionBackend, CachePolicy, StepView
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import Feature
from sightline.cache.pools import GroupCache
from sightline.core.batch import Batch, MaskKind
from sightline.core.errors import ConfigError, PlanError

MASK_FEATURES = {
    MaskKind.FULL: Feature.NON_CAUSAL,
    MaskKind.TREE: Feature.TREE_MASK,
    MaskKind.CONTEXT: Feature.SHARED_CACHE,
}


@dataclass(frozen=True)
class PartBackend:
    """A backend that serves some kinds of rows of a group."""

    backend: AttentionBackend[Any, Any]
    capability: Capability
    """The capability row by which it was chosen."""


@dataclass(frozen=True)
class GroupBinding:
    """A layer group with the cache and the backends that serve it."""

    group: LayerGroup
    cache: GroupCache
    """The pools of the group's owner."""
    serving: Mapping[Work, PartBackend]
    """The backend for each kind of rows: prefill, and the others that steps may have. If all are the same, steps are
    not split."""

    def __post_init__(self) -> None:
        unable = [type(part.backend).__name__ for part in self.parts if not part.capability.hot_entries]
        if self.cache.is_on_host and unable:
            raise ConfigError(
                f"expected backends that read entries in host memory for {self.group.name}, got {', '.join(unable)}; "
                "choose others, or leave enable_hisparse out"
            )

    @staticmethod
    def alone(
        group: LayerGroup, cache: GroupCache, backend: AttentionBackend[Any, Any], capability: Capability
    ) -> GroupBinding:
        """A binding that serves everything with one backend."""
        return GroupBinding(group, cache, dict.fromkeys(Work, PartBackend(backend, capability)))

    @property
    def parts(self) -> tuple[PartBackend, ...]:
        """Every distinct backend, once."""
        return tuple({id(part.backend): part for part in self.serving.values()}.values())

    def place(self, backend: AttentionBackend[Any, Any]) -> int:
        """Index of a backend in `parts`."""
        return next(place for place, part in enumerate(self.parts) if part.backend is backend)


def mask_features(batch: Batch) -> frozenset[Feature]:
    """The features that the rows' masks need. Deduplicates masks first: most rows share one, and hashing an enum is
    slow."""
    return frozenset(MASK_FEATURES[mask.kind] for mask in set(batch.masks) if mask.kind in MASK_FEATURES)


def policy_of(group: LayerGroup, batch: Batch) -> CachePolicy:
    """How the group uses the cache in this step."""
    if group.loan is None:
        return CachePolicy.PAGED if batch.pools else CachePolicy.TRANSIENT
    if not batch.pools:
        raise PlanError(f"{group.name} reads the entries of {group.loan.lender}, got a step that keeps none")
    return CachePolicy.BORROWED


def part_of(step: StepView, rows: slice, tokens: slice, asked: frozenset[Feature]) -> StepView:
    """Some rows of a step. `asked` is what it needs whatever its masks are."""
    batch = step.batch.part(rows, tokens)
    return replace(step, batch=batch, needs=asked | mask_features(batch))


def check_part(serving: PartBackend, part: StepView, group: str) -> None:
    """Raises `PlanError` for rows that the backend does not declare to serve, before it plans them."""
    name, capability, batch = type(serving.backend).__name__, serving.capability, part.batch
    missing = part.needs - capability.features
    if missing:
        lacking = ", ".join(sorted(feature.value for feature in missing))
        raise PlanError(f"{name} serves {group} and lacks {lacking}")
    exact = batch.query_lens.host is not None and batch.context_lens.host is not None
    if capability.host_lengths is HostLengths.EXACT and not exact:
        raise PlanError(
            f"{name} serves {group} and needs exact host lengths, got a batch whose lengths only the device knows"
        )


def divide(batch: Batch, serving: Mapping[Work, PartBackend]) -> tuple[tuple[PartBackend, slice, slice], ...]:
    """Assigns rows and tokens of a step to backends: leading decode rows, then the others.

    A step in another order, without a cache, or whose lengths only the device knows is served by one backend.
    """
    prefill = serving[Work.PREFILL]
    rows, tokens = slice(0, batch.num_rows), slice(0, batch.num_tokens)
    decoding = batch.num_decoding() if batch.pools else 0
    if not decoding:
        return ((prefill, rows, tokens),)
    decode = serving[decode_work(decoding)]
    if decoding == batch.num_rows:
        return ((decode, rows, tokens),)
    if decode.backend is prefill.backend or batch.query_lens.host is None:
        return ((prefill, rows, tokens),)
    border = sum(batch.query_lens.host[:decoding])
    return (
        (decode, slice(0, decoding), slice(0, border)),
        (prefill, slice(decoding, batch.num_rows), slice(border, batch.num_tokens)),
    )
