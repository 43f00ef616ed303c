"""Backend capabilities as frozen rows, and the reasons why a row does not fit a need.

Selection, error messages and documents read these rows; nothing probes a backend.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from sightline.attention.coverage import Demand
from sightline.attention.kinds import RECURRENT_ONLY, Feature, SpecKind
from sightline.attention.spec import AttentionSpec
from sightline.core.device import Device, DeviceKind


class Wildcard(Enum):
    """`ANY` in a capability row: every value is supported."""

    ANY = "any"


ANY = Wildcard.ANY


class HostLengths(Enum):
    """Which lengths planning needs on the host."""

    EXACT = "exact"
    BOUND = "bound"


class GraphLevel(Enum):
    """Which steps may be captured in a CUDA graph, both `prepare` and `run`.

    Applies to steps that have a cache and only causal masks. A graph is captured on a step without padding. It is
    replayed for any plan with at most as many rows and tokens, padded to that size, and with the same
    `query_lens.bound` and needs. The bucket of a graph fixes these; launches must not depend on anything else.
    """

    NONE = "none"
    """No step: launches depend on the lengths."""
    DECODE = "decode"
    """Steps in which no row has more than one new token."""
    FULL = "full"
    """Any step."""


class Work(Enum):
    """Kinds of rows, by what makes a backend fast for them."""

    PREFILL = "prefill"
    """Rows of many new tokens, and any rows mixed with them."""
    DECODE = "decode"
    """Rows of one new token under a causal mask."""
    FEW = "decode of few rows"
    """Like `DECODE`, with at most `FEW_ROWS` rows: a context must be split to keep a device busy."""
    ALONE = "decode of one row"
    """Like `FEW`, with a single row: launch latency matters as much as memory traffic."""


FEW_ROWS = 8


def decode_work(num_rows: int) -> Work:
    """The kind of decode work for this number of rows."""
    if num_rows == 1:
        return Work.ALONE
    return Work.FEW if num_rows <= FEW_ROWS else Work.DECODE


@dataclass(frozen=True)
class Ranks:
    """Relative speed of a row per kind of work: among the rows that fit, the highest serves. Measured, not promised."""

    prefill: int = 0
    decode: int = 0
    few: int = 0
    alone: int | None = None
    """None: same as `few`."""

    def of(self, work: Work) -> int:
        alone = self.few if self.alone is None else self.alone
        return {Work.PREFILL: self.prefill, Work.DECODE: self.decode, Work.FEW: self.few, Work.ALONE: alone}[work]


@dataclass(frozen=True)
class Capability:
    """One row: every combination of its values is served."""

    spec_kinds: frozenset[SpecKind]
    devices: frozenset[DeviceKind]
    compute_capabilities: frozenset[tuple[int, int]] | Wildcard
    """Listed individually, never compared with >=; ignored on a CPU."""
    dtypes: frozenset[torch.dtype]
    cache_dtypes: frozenset[torch.dtype] | Wildcard
    head_dims: frozenset[int] | Wildcard
    group_sizes: frozenset[int] | Wildcard
    """Query heads that share a key head."""
    page_sizes: frozenset[int] | Wildcard
    features: frozenset[Feature]
    host_lengths: HostLengths
    graph: GraphLevel = GraphLevel.NONE
    package: str | None = None
    """Package that this row requires beyond Sightline's own dependencies."""
    expanded_dims: frozenset[tuple[int, int]] | Wildcard = ANY
    """Latent attention only: (key, value) dimensions of a head when expanded from entries."""
    only_with: frozenset[Feature] = frozenset()
    """Features of recurrent layers that a spec must have: a kernel of the delta rule computes nothing without it."""
    hot_entries: bool = field(default=False, metadata={"proven": False})
    """Attention to chosen entries only: True if it reads them where its coordinator says, so that they may be in host
    memory."""
    ranks: Ranks = field(default=Ranks(), metadata={"proven": False})
    """Not part of a proof, because ranks do not affect results."""

    def __post_init__(self) -> None:
        for name in ("spec_kinds", "devices", "dtypes", "features", "only_with"):
            self._require_set(name, or_any=False)
        if not self.only_with <= self.features & RECURRENT_ONLY:
            raise ValueError(
                f"expected only_with to be declared features out of {_names(RECURRENT_ONLY)}, got "
                f"{_names(self.only_with)}"
            )
        for name in (
            "compute_capabilities",
            "cache_dtypes",
            "head_dims",
            "group_sizes",
            "page_sizes",
            "expanded_dims",
        ):
            self._require_set(name, or_any=True)

    def _require_set(self, name: str, *, or_any: bool) -> None:
        value = vars(self)[name]
        if isinstance(value, frozenset) or (or_any and value is ANY):
            return
        raise TypeError(f"expected {name} to be a frozenset{' or ANY' if or_any else ''}, got {value!r}")


@dataclass(frozen=True)
class Requirement:
    """What a layer group needs from a backend on this machine."""

    spec: AttentionSpec
    device: Device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    page_size: int
    extra_features: frozenset[Feature] = frozenset()
    """Features that the engine needs beyond the spec's."""
    demands: tuple[Demand, ...] = ()
    """Every kind of step that the engine may ask for, all of which a proof must cover; empty: only what the spec
    implies."""
    hot_entries: bool = False
    """True if entries are in host memory, with a buffer of hot ones on the device."""

    @property
    def features(self) -> frozenset[Feature]:
        return self.spec.features | self.extra_features


def lacks_package(capability: Capability) -> bool:
    """True if the row needs a package that is not installed."""
    return capability.package is not None and not _is_installed(capability.package)


class Hindrance(NamedTuple):
    """One reason why a row does not serve a need."""

    reason: str
    remedy: str
    """What would remove the reason; empty if nothing would, because the model is so."""


def lacks_here(capability: Capability, device: Device) -> bool:
    """True if the row needs a package that the device's machine has not. One that is not here counts as having all."""
    return device.is_here and lacks_package(capability)


def device_hindrances(capability: Capability, device: Device) -> tuple[Hindrance, ...]:
    """What keeps the row from running on the device at all."""
    found = []
    if lacks_here(capability, device):
        found.append(Hindrance(f"package {capability.package} is not installed", f"install {capability.package}"))
    if device.kind not in capability.devices:
        kinds = _names(capability.devices)
        found.append(Hindrance(f"runs on {kinds}, not {device.kind.value}", f"use a machine with {kinds}"))
    elif device.kind is DeviceKind.CUDA and not _serves(capability.compute_capabilities, device.compute_capability):
        found.append(
            Hindrance(
                f"does not list compute capability {device.compute_capability}",
                f"use a GPU of compute capability {_listed(capability.compute_capabilities)}",
            )
        )
    return tuple(found)


def device_refusals(capability: Capability, device: Device) -> tuple[str, ...]:
    """Reasons why the row cannot run on the device at all."""
    return tuple(each.reason for each in device_hindrances(capability, device))


def hindrances(capability: Capability, need: Requirement) -> tuple[Hindrance, ...]:
    """Every reason why the row does not serve the need, with its remedy; empty if it does."""
    spec, found = need.spec, list(device_hindrances(capability, need.device))

    def add(reason: str, remedy: str = "") -> None:
        found.append(Hindrance(reason, remedy))

    if spec.kind not in capability.spec_kinds:
        add(f"serves {_names(capability.spec_kinds)} attention, not {spec.kind.value}")
    if need.dtype not in capability.dtypes:
        dtypes = _dtypes(capability.dtypes)
        add(f"computes in {dtypes}, not {need.dtype}", f"use the dtype {dtypes.replace('torch.', '')}")
    if not _serves(capability.cache_dtypes, need.cache_dtype):
        add(f"does not read a {need.cache_dtype} cache", f"use a cache in {_listed(capability.cache_dtypes)}")
    if not _serves(capability.head_dims, spec.head_dim):
        add(f"does not list head dimension {spec.head_dim}")
    if not _serves(capability.expanded_dims, spec.expanded_dims):
        add(f"does not list keys and values of {spec.expanded_dims} made from latents")
    if not _serves(capability.group_sizes, spec.group_size):
        add(f"does not list {spec.group_size} query heads on a key head")
    if not _serves(capability.page_sizes, need.page_size):
        add(f"does not list page size {need.page_size}", f"use the page size {_listed(capability.page_sizes)}")
    missing = need.features - capability.features
    if missing:
        is_of_model = bool(missing & spec.features)
        add(f"lacks {_names(missing)}", "" if is_of_model else f"leave out the settings that need {_names(missing)}")
    if need.hot_entries and not capability.hot_entries:
        add("does not read entries in host memory", "leave out enable_hisparse")
    absent = capability.only_with - spec.features
    if absent:
        add(f"serves only layers with {_names(absent)}")
    return tuple(found)


def refusals(capability: Capability, need: Requirement) -> tuple[str, ...]:
    """Every reason why the row does not serve the need; empty if it does."""
    return tuple(each.reason for each in hindrances(capability, need))


def _is_installed(package: str) -> bool:
    """Looks the package up by name without importing it or its parents, so a broken package does not raise here."""
    top, *inner = package.split(".")
    spec = find_spec(top)
    if spec is None:
        return False
    folders = [Path(folder).joinpath(*inner) for folder in spec.submodule_search_locations or ()]
    return not inner or any(folder.is_dir() or folder.with_suffix(".py").is_file() for folder in folders)


def _serves(values: Set[object] | Wildcard, value: object) -> bool:
    return values is ANY or value in values


def _names(values: Set[Enum]) -> str:
    return ", ".join(sorted(str(value.value) for value in values))


def _listed(values: Set[object] | Wildcard) -> str:
    """The values that a row lists, for a remedy."""
    if isinstance(values, Wildcard):
        return values.value
    texts = {
        ".".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.") for value in values
    }
    return " or ".join(sorted(texts, key=lambda text: (len(text), text)))


def _dtypes(values: Set[torch.dtype]) -> str:
    return ", ".join(sorted(str(value) for value in values))
