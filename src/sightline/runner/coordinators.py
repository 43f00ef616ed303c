"""Makes the coordinator of each group, which tells its backends where entries are, and collects their metrics."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.attention.contract import EntryCoordinator, StepLimits
from sightline.attention.groups import LayerGroup
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.sparse.hot_entries import HotEntries
from sightline.cache.pools import GroupCache
from sightline.cache.store import CacheStore
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import ConfigError
from sightline.core.resolution import ResolvedConfig
from sightline.kernels import hot_entries
from sightline.kernels.hot_entries import FetchEntries
from sightline.runner.compute import slots_finder


def make_coordinator(
    config: ResolvedConfig, group: LayerGroup, cache: GroupCache, limits: StepLimits
) -> EntryCoordinator:
    """The coordinator of a group. Raises `ConfigError` if its entries are in host memory without hot ones."""
    if not cache.is_on_host:
        return ResidentEntries(cache, slots_finder(config.layer_kernels))
    top_k = group.spec.top_k
    if top_k is None or not config.hot_buffer_size:
        raise ConfigError(
            f"expected a buffer of hot entries for {group.name}, whose entries are in host memory, got none; use "
            "enable_hisparse, with a model whose layers attend to chosen tokens"
        )
    copy = copies_for(config.device)
    return HotEntries(cache, top_k, limits, config.hot_buffer_size, copy, poison=config.paranoid)


def hot_metrics(coordinators: Sequence[EntryCoordinator], store: CacheStore) -> dict[str, int]:
    """The part of `EngineMetrics` that entries in host memory have, by field."""
    counts = [each.counts() for each in coordinators]
    return {
        "hisparse_lookups": sum(each.chosen for each in counts),
        "hisparse_misses": sum(each.copied for each in counts),
        "hisparse_host_bytes": store.host_bytes,
        "hisparse_device_bytes": sum(each.num_bytes for each in coordinators),
    }


def copies_for(device: Device) -> FetchEntries:
    """The kernels that make entries hot."""
    if device.kind is not DeviceKind.CUDA:
        return hot_entries.fetch_entries
    # Imported here: Triton is an extra.
    from sightline.kernels.triton.hot_entries import fetch_entries

    return fetch_entries
