"""The report that an engine prints when it starts: what was decided."""

from __future__ import annotations

from collections.abc import Iterable

from sightline.attention.backends import registry
from sightline.attention.capability import Work
from sightline.core.config import Quantization
from sightline.core.device import DeviceKind
from sightline.core.ledger import Note
from sightline.runner.backend_choice import GroupSelection
from sightline.runner.memory import memory_ledger
from sightline.runner.missing import missing_packages
from sightline.runner.runtime import Runtime


def startup_report(runtime: Runtime, notes: Iterable[Note] = ()) -> list[str]:
    """A few lines for a person: what runs where, and which missing packages would help on this device.

    `notes` are those of the ledger. Degradations are logged separately.
    """
    config = runtime.config
    dtype = str(config.dtype).removeprefix("torch.")
    weights = f"{dtype}, weights as quantised" if config.quantization is Quantization.KEEP else dtype
    narrow = "" if config.cache_dtype == config.dtype else f" in {str(config.cache_dtype).removeprefix('torch.')}"
    size, tokens = _mebibytes(runtime.store.num_bytes), f"{config.cache_tokens:,} tokens in pages of {config.page_size}"
    cache = f"cache of {size}{narrow}: {tokens}"
    lines = [
        f"{config.device.name} · {weights} · context {config.max_model_len:,} tokens",
        f"{cache if config.num_pages else 'no cache'} · scratch {_mebibytes(runtime.workspace.num_bytes)}",
    ]
    for binding, selection in zip(runtime.bindings, runtime.selections, strict=True):
        group = binding.group
        num_bytes = sum(pool.spec.bytes_per_token for pool in binding.cache.pools.values())
        cached = f", {num_bytes / len(group.layers):,.0f} cached bytes a token and layer" if num_bytes else ""
        if group.is_recurrent:
            cached += f", {binding.cache.states.spec.num_bytes:,} bytes of state a sequence"
        lines.append(
            f"{group.name}: {len(group.layers)} layers, {group.spec.label} on {serving_text(selection)}"
            f"{cached if config.num_pages else ''}"
        )
    if config.states_per_row:
        rows, kept = config.max_rows * config.states_per_row, config.max_checkpoints
        lines.append(f"recurrent states: {rows:,} for {config.max_rows:,} rows, {kept:,} checkpoints")
    lines += [
        f"host cache: {usage.max_blocks:,} pages in {_mebibytes(usage.num_bytes)} of host memory"
        for usage in [tier.usage() for tier in runtime.tiers]
    ]
    if config.hot_buffer_size:
        hot = sum(each.num_bytes for each in runtime.coordinators)
        lines.append(
            f"hisparse: entries in {_mebibytes(runtime.store.host_bytes)} of host memory, "
            f"{config.hot_buffer_size:,} hot ones of each row and layer in {_mebibytes(hot)}"
        )
    if runtime.graphs.buckets:
        count, sizes = len(runtime.graphs.buckets), ", ".join(map(str, config.graph_sizes))
        what = "CUDA graphs" if config.device.kind is DeviceKind.CUDA else "recorded programs"
        lines.append(f"{count} {what} for {sizes} rows: {_mebibytes(runtime.graphs.num_bytes)}")
    memory = memory_ledger(config, runtime.memory_taken)
    lines += [] if memory is None else memory.lines()
    lines += runtime.times.lines()
    lines += [f"note: {note}" for note in notes]
    return lines + [each.line for each in missing_packages(registry.BUILT_IN, config.device) if not each.hindrance]


def serving_text(selection: GroupSelection) -> str:
    """The backends of a group: one name, or the kinds of rows that each serves."""
    names = {work: each.candidate.name for work, each in selection.items()}
    if len(set(names.values())) == 1:
        return names[Work.PREFILL]
    works = {name: [work.value for work, other in names.items() if other == name] for name in names.values()}
    return ", ".join(f"{name} ({', '.join(each)})" for name, each in works.items())


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
