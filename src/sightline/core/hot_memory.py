"""How memory is shared out with HiSparse, and how many pages a cache gets with or without it.

Pure arithmetic. Does not know pools or kernels.

    |-- room for the cache ---------------------------------------------|
    |-- hot entries of all rows --|-- index keys and other pools -------|     on the device
    |-- entries of all tokens ----------------- x host_to_device_ratio -|     on the host
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sightline.core.config import PADDING_PAGES, EngineConfig
from sightline.core.device import Device, DeviceKind, available_bytes, detect_device
from sightline.core.errors import ConfigError, ModelTooLargeError
from sightline.core.hisparse import HiSparse, read_hisparse
from sightline.core.ledger import Ledger
from sightline.core.memory import MemoryBudget, gibibytes
from sightline.core.page_shape import entries_per_page

HOST_SHARE = 2
"""On a GPU, entries may take 1 / HOST_SHARE of the host memory that is free: it is shared with others."""
ROWS_SHARE = 2
"""Hot entries may take 1 / ROWS_SHARE of the room for the cache before fewer rows run at once."""


@dataclass(frozen=True)
class ChosenFacts:
    """The sizes of what a model keeps for layers that attend to chosen entries."""

    top_k: int = 0
    """The most entries that a token chooses; 0 if no layer chooses any."""
    num_groups: int = 0
    num_layers: int = 0
    elements: int = 0
    """Elements of an entry in all of these layers."""
    widths: int = 0
    """Elements of one layer's entry, summed over the groups."""
    tokens_per_entry: int = 1
    """The tokens that an entry stands for; of several groups the fewest, so that sizes are upper bounds."""

    def entries(self, num_tokens: int) -> int:
        """The entries that so many tokens complete."""
        return num_tokens // self.tokens_per_entry

    def elements_per_page(self, page_size: int) -> int:
        """Elements of a page's entries. Raises `ConfigError` if entries do not fit pages."""
        return self.elements * entries_per_page(page_size, self.tokens_per_entry) if self.top_k else 0

    def __add__(self, other: ChosenFacts) -> ChosenFacts:
        if not (self.num_groups and other.num_groups):
            return self if self.num_groups else other
        return ChosenFacts(
            max(self.top_k, other.top_k),
            self.num_groups + other.num_groups,
            self.num_layers + other.num_layers,
            self.elements + other.elements,
            self.widths + other.widths,
            min(self.tokens_per_entry, other.tokens_per_entry),
        )


class HotDemand(NamedTuple):
    """The memory that hot entries need, as a function of the number of rows."""

    facts: ChosenFacts
    buffer: int
    """Hot entries of a row and layer."""
    itemsize: int
    """Bytes of an element of the cache."""
    model_len: int
    step_tokens: int

    @property
    def row_bytes(self) -> int:
        """Device memory per row: entries, their places and ages, a map of places, and scratch."""
        facts = self.facts
        held = self.buffer * (facts.elements * self.itemsize + 8 * facts.num_layers)
        places = facts.entries(self.model_len) + 1
        return held + facts.num_groups * (4 * places + 8 * self.buffer + 16 * facts.top_k)

    @property
    def fixed_bytes(self) -> int:
        """Device memory for staged contexts and the entries of a step."""
        return self.facts.widths * self.itemsize * (self.facts.entries(self.model_len) + self.step_tokens)

    def num_bytes(self, max_rows: int) -> int:
        """Returns the device memory for that many rows, and the padding row."""
        return (max_rows + 1) * self.row_bytes + self.fixed_bytes


def demand_of(hisparse: HiSparse, facts: ChosenFacts, itemsize: int, model_len: int, step_tokens: int) -> HotDemand:
    """Returns the demand of a model's hot entries. Raises `ConfigError` if the settings do not fit the model."""
    if not facts.top_k:
        raise ConfigError(
            "expected a model whose layers attend to chosen entries (DeepSeek V3.2, DeepSeek V4, GLM-5) with "
            "enable_hisparse, got one whose layers do not; leave it out"
        )
    if hisparse.top_k not in (None, facts.top_k):
        raise ConfigError(
            f"expected top_k {facts.top_k} in hisparse_config, as the model has it, got {hisparse.top_k}; leave it out"
        )
    return HotDemand(facts, hisparse.buffer_for(facts.top_k), itemsize, model_len, step_tokens)


def rows_with_hot_entries(
    demand: HotDemand, room: MemoryBudget, max_rows: int, asked_rows: int | None, ledger: Ledger
) -> int:
    """Rows that may run at once: at most `max_rows`, and no more than there is memory for their hot entries."""
    affordable = (room.room_bytes // ROWS_SHARE - demand.fixed_bytes) // demand.row_bytes - 1
    if affordable >= max_rows:
        return max_rows
    if affordable < 1 or asked_rows is not None:
        raise ConfigError(
            f"expected memory for the hot entries of {max_rows} rows, {gibibytes(demand.num_bytes(max_rows))}, got "
            f"{gibibytes(max(0, room.room_bytes))} for the cache, of which they may take 1 / {ROWS_SHARE}; lower "
            "max_num_seqs, device_buffer_size or max_model_len"
        )
    ledger.degrade(
        "max_num_seqs",
        f"lowered from {max_rows} to {affordable}: each row has {gibibytes(demand.row_bytes)} of hot entries",
        "lower device_buffer_size, or ask for fewer rows",
    )
    return affordable


@dataclass(frozen=True)
class CachePage:
    """One page of every pool together."""

    num_tokens: int
    num_bytes: int
    host_bytes: int = 0
    """The part of `num_bytes` that is in host memory."""

    @property
    def device_bytes(self) -> int:
        return self.num_bytes - self.host_bytes


def count_pages(asked_tokens: int | None, page: CachePage, memory: MemoryBudget, useful: int) -> int:
    """Pages for sequences: as requested, otherwise what memory allows, never more than `useful`."""
    if asked_tokens is not None:
        asked = -(-asked_tokens // page.num_tokens)
        needed = (asked + PADDING_PAGES) * page.num_bytes
        if needed > memory.room_bytes:
            raise ConfigError(
                f"expected a cache that fits the {max(0, memory.room_bytes):,} bytes left beside the weights, got "
                f"cache_tokens = {asked_tokens}, which takes {needed:,}; lower cache_tokens ({memory})"
            )
        return asked
    affordable = memory.cache_bytes // page.num_bytes - PADDING_PAGES
    if affordable < 1:
        raise ModelTooLargeError(
            f"expected memory for at least one cache page of {page.num_bytes:,} bytes beside the weights, "
            f"got {memory.room_bytes:,} bytes left; use a smaller model or dtype, or free memory ({memory})"
        )
    return min(useful, affordable)


def count_host_pages(
    asked_tokens: int | None,
    page: CachePage,
    memory: MemoryBudget,
    useful: int,
    device: Device,
    hot_bytes: int,
    ratio: float,
    ledger: Ledger,
) -> int:
    """Like `count_pages`, for a cache with entries on the host, and `hot_bytes` of hot ones on the device.

    `memory` is the room for the whole cache on the device. On a CPU, which is its own host, both share it.
    """
    left = memory.without(hot_bytes)
    if device.kind is DeviceKind.CPU:
        # One memory for both: no ratio makes it larger.
        return count_pages(asked_tokens, page, left, useful)
    on_host = available_bytes(detect_device("cpu")) // HOST_SHARE // page.host_bytes - PADDING_PAGES
    on_device = CachePage(page.num_tokens, page.device_bytes)
    if asked_tokens is not None:
        asked = count_pages(asked_tokens, on_device, left, useful)
        if asked > on_host:
            raise ConfigError(
                f"expected entries that fit 1 / {HOST_SHARE} of the free host memory, got cache_tokens = "
                f"{asked_tokens}, which takes {gibibytes(asked * page.host_bytes)}; lower cache_tokens"
            )
        return asked
    wanted = int(ratio * (memory.cache_bytes // page.num_bytes))
    found = min(count_pages(None, on_device, left, useful), max(1, wanted))
    if on_host < found:
        if on_host < 1:
            raise ConfigError(
                f"expected free host memory for entries, got less than a page of {page.host_bytes:,} bytes; free some"
            )
        ledger.degrade(
            "host_to_device_ratio",
            f"the cache holds {on_host * page.num_tokens:,} tokens instead of {found * page.num_tokens:,}, what 1 / "
            f"{HOST_SHARE} of the free host memory has room for",
            "free host memory, or lower host_to_device_ratio in hisparse_config",
        )
    return min(found, on_host)


class PageShape(NamedTuple):
    """A page before it is known where its entries are."""

    num_tokens: int
    elements: int
    """Elements of a token in all pools and layers."""
    itemsize: int
    scale_bytes: int = 0
    """What a token has beside its elements, on the device."""
    compressed: int = 0
    """Elements of a page's entries that stand for several tokens each, in all pools and layers."""

    def split(self, host_elements: int = 0) -> CachePage:
        """Returns the size of a page of which `host_elements` elements are in host memory."""
        size = self.itemsize * self.num_tokens
        scales = self.scale_bytes * self.num_tokens
        compressed = self.compressed * self.itemsize
        on_host = host_elements * self.itemsize
        return CachePage(self.num_tokens, self.elements * size + scales + compressed, on_host)


class LongestRow(NamedTuple):
    """Limits of a row and of a step."""

    model_len: int
    step_tokens: int


class CacheSizes(NamedTuple):
    """How large the cache is."""

    num_pages: int
    """With the padding page; 0 if nothing is cached."""
    max_rows: int
    hot_buffer: int = 0
    """Hot entries of each row and layer; 0 if entries are on the device."""


NO_PAGES = CacheSizes(0, 0)


def _tell_unused_ratio(config: EngineConfig, hisparse: HiSparse, device: Device, ledger: Ledger) -> None:
    """Notes a ratio that was asked for and decides nothing."""
    if hisparse.host_to_device_ratio == HiSparse().host_to_device_ratio:
        return
    if device.kind is DeviceKind.CPU:
        ledger.note("host_to_device_ratio", "changes nothing on a CPU, where host and device are the same memory")
    elif config.cache_tokens is not None:
        ledger.note("host_to_device_ratio", "changes nothing beside cache_tokens, which says how large the cache is")


def _tell_rounding(asked_tokens: int | None, page_size: int, ledger: Ledger) -> None:
    """Notes a cache that is larger than asked for, because it has whole pages."""
    if asked_tokens is not None and asked_tokens % page_size:
        whole = -(-asked_tokens // page_size) * page_size
        ledger.note("cache_tokens", f"{asked_tokens} are rounded up to {whole}, in whole pages of {page_size}")


def size_cache(
    config: EngineConfig,
    chosen: ChosenFacts,
    shape: PageShape,
    longest: LongestRow,
    room: MemoryBudget,
    max_rows: int,
    device: Device,
    ledger: Ledger,
) -> CacheSizes:
    """Shares out the room for the cache. Raises `ConfigError` for settings that cannot work."""
    _tell_rounding(config.cache_tokens, shape.num_tokens, ledger)
    hisparse = read_hisparse(config.enable_hisparse, config.hisparse_config)
    pages_per_row = -(-longest.model_len // shape.num_tokens)
    if hisparse is None:
        pages = count_pages(config.cache_tokens, shape.split(), room, max_rows * pages_per_row)
        return CacheSizes(PADDING_PAGES + pages, max_rows)
    demand = demand_of(hisparse, chosen, shape.itemsize, *longest)
    _tell_unused_ratio(config, hisparse, device, ledger)
    rows = rows_with_hot_entries(demand, room, max_rows, config.max_num_seqs, ledger)
    pages = count_host_pages(
        config.cache_tokens,
        shape.split(chosen.elements_per_page(shape.num_tokens)),
        room,
        rows * pages_per_row,
        device,
        demand.num_bytes(rows),
        hisparse.host_to_device_ratio,
        ledger,
    )
    return CacheSizes(PADDING_PAGES + pages, rows, demand.buffer)
