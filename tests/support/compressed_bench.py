"""Layers of compressed attention over texts: what backends make of steps, and what the oracle says about whole texts.

Four layers: entries of 4 tokens that overlap and that an indexer chooses from, twice; entries of 16 tokens, all read; a
window alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sightline.attention.bindings import GroupBinding
from sightline.attention.compressed.inputs import CompressedIndexInputs, CompressedInputs, CompressionInputs
from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.attention.contract import AttentionBackend, BackendContext, EntryCoordinator, StepLimits
from sightline.attention.groups import LayerGroup, group_layers
from sightline.attention.kinds import SpecKind
from sightline.attention.oracle.compressed import attend_compressed_row, compress_row
from sightline.attention.oracle.index import choose_tokens, index_scores
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.sparse.hot_entries import HotEntries
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.layout import Layout, arrange_free_pages
from sightline.cache.pools import CacheLimits, GroupCache
from sightline.cache.store import CacheStore
from sightline.core.batch import Batch, RowWork
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.hot_entries import FetchEntries, fetch_entries
from sightline.runner.batching import assemble, assemble_transient

CPU = torch.device("cpu")
HEADS, DIM, WINDOW, TOP_K = 3, 16, 10, 3
OVERLAPPING = Compression(ratio=4, overlap=True, rope_dim=6, norm_eps=1e-5)
DISJOINT = Compression(ratio=16, overlap=False, rope_dim=6, norm_eps=1e-5)
CHOSEN = CompressedSpec(HEADS, DIM, 0.3, WINDOW, OVERLAPPING, TOP_K)
INDEX = CompressedIndexSpec(num_q_heads=4, head_dim=8, top_k=TOP_K, compression=OVERLAPPING)
WHOLE = CompressedSpec(HEADS, DIM, 0.3, WINDOW, DISJOINT)
WINDOW_ONLY = CompressedSpec(HEADS, DIM, 0.3, WINDOW, None)
SPECS = (CHOSEN, WHOLE, CHOSEN, WINDOW_ONLY)
INDEXERS = {0: INDEX, 2: INDEX}
InputsT = TypeVar("InputsT", CompressedInputs, CompressedIndexInputs, CompressionInputs)
Backends = dict[SpecKind, type[AttentionBackend[Any, Any]]]


def random_compression(
    compression: Compression, head_dim: int, length: int, generator: torch.Generator, norm: Tensor
) -> CompressionInputs:
    """Inputs of a text's tokens. The last token of a window has its rotation, the same in all texts; others NaN."""
    width = compression.width(head_dim)
    values, gates = (torch.randn(length, width, generator=generator) for _ in range(2))
    windows = torch.arange(length) // compression.ratio
    turned = windows.unsqueeze(1) * torch.linspace(0.1, 1.3, compression.rope_dim // 2)
    turned[(torch.arange(length) + 1) % compression.ratio != 0] = torch.nan
    return CompressionInputs(values, 3.0 * gates, norm, turned.cos(), turned.sin())


@dataclass(eq=False)
class Text:
    """A text: the inputs of all of its tokens in every layer, and what comes out."""

    length: int
    seed: int
    dtype: torch.dtype = torch.float32

    def _generator(self, layer: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + layer)

    @cached_property
    def inputs(self) -> tuple[CompressedInputs, ...]:
        found = []
        for layer, spec in enumerate(SPECS):
            own, weights = self._generator(layer), torch.Generator().manual_seed(layer)
            norm, sinks = torch.rand(DIM, generator=weights) + 0.5, torch.randn(HEADS, generator=weights)
            q, key = (torch.randn(self.length, *shape, generator=own) for shape in ((HEADS, DIM), (DIM,)))
            entries = None
            if spec.compression is not None:
                entries = random_compression(spec.compression, DIM, self.length, own, norm)
            found.append(CompressedInputs(q.to(self.dtype), key.to(self.dtype), sinks, entries))
        return tuple(found)

    @cached_property
    def index_inputs(self) -> dict[int, CompressedIndexInputs]:
        found = {}
        for layer, spec in INDEXERS.items():
            own, weights = self._generator(50 + layer), torch.Generator().manual_seed(50 + layer)
            norm = torch.rand(spec.head_dim, generator=weights) + 0.5
            q = torch.randn(self.length, spec.num_q_heads, spec.head_dim, generator=own)
            scores = torch.randn(self.length, spec.num_q_heads, generator=own)
            raw = random_compression(spec.compression, spec.head_dim, self.length, own, norm)
            found[layer] = CompressedIndexInputs(q.to(self.dtype), scores.to(self.dtype), raw)
        return found

    @cached_property
    def chosen(self) -> dict[int, Tensor]:
        """The oracle's choices of all tokens, by layer."""
        found = {}
        for layer, inputs in self.index_inputs.items():
            keys = compress_row(OVERLAPPING, inputs.entries).to(self.dtype)
            visible = torch.arange(len(keys)) < ((torch.arange(self.length) + 1) // OVERLAPPING.ratio).unsqueeze(1)
            found[layer] = choose_tokens(index_scores(inputs.q, keys, inputs.weights), visible, TOP_K)
        return found

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """The oracle's outputs of all tokens, by layer."""
        found = []
        for layer, (spec, inputs) in enumerate(zip(SPECS, self.inputs, strict=True)):
            entries = torch.empty(0, DIM)
            if spec.compression is not None and inputs.entries is not None:
                entries = compress_row(spec.compression, inputs.entries).to(self.dtype)
            chosen = self.chosen.get(layer)
            positions = torch.arange(self.length)
            found.append(attend_compressed_row(spec, inputs.q, positions, inputs.key, entries, inputs.sinks, chosen))
        return tuple(found)


@lru_cache(maxsize=64)
def text_of(length: int, seed: int) -> Text:
    """A text with its answers, which are computed once."""
    return Text(length, seed)


@lru_cache(maxsize=64)
def branch(text: Text, other: Text, position: int) -> Text:
    """A text whose tokens are those of `text` up to a position, then those of `other`."""

    def joined(one: Any, two: Any) -> Any:
        return _join([one.part(slice(position)), two.part(slice(position, text.length))], text.length)

    made = Text(text.length, text.seed, text.dtype)
    vars(made)["inputs"] = tuple(map(joined, text.inputs, other.inputs))
    vars(made)["index_inputs"] = {
        layer: joined(text.index_inputs[layer], other.index_inputs[layer]) for layer in INDEXERS
    }
    return made


class TextPart(NamedTuple):
    """The new tokens of a row in a step."""

    row: int
    text: Text
    start: int
    stop: int
    candidates: int = 1

    @property
    def work(self) -> RowWork:
        return RowWork(self.row, [0] * (self.stop - self.start), self.start, 1, num_candidates=self.candidates)


class StepFound(NamedTuple):
    """What a step gave, for all of its tokens."""

    chosen: dict[int, Tensor | None]
    outputs: tuple[Tensor, ...]


class CompressedBench:
    """The layers with a store and a planner."""

    def __init__(
        self,
        backends: Backends,
        page_size: int = 16,
        *,
        dtype: torch.dtype = torch.float32,
        max_len: int = 320,
        layout: Layout = Layout.SHUFFLED,
        max_rows: int = 6,
        max_step_tokens: int = 400,
        paranoid: bool = False,
        device: torch.device = CPU,
        buffer: int | None = None,
        copy: FetchEntries = fetch_entries,
    ) -> None:
        """`buffer` is how many chosen entries of each row are hot, and `copy` makes them so; None: all are on the
        device."""
        self.dtype, self._buffer, self._copy = dtype, buffer, copy
        self.device = device
        self.groups = group_layers(SPECS, indexers=INDEXERS)
        pages = max_rows * -(-max_len // page_size) + 1
        limits = CacheLimits(pages, page_size, max_rows, max_len, states_per_row=8, max_checkpoints=12)
        specs = [group.cache_spec(dtype, with_hot_entries=buffer is not None) for group in self.groups]
        self.store = CacheStore(specs, limits, device, poison=True)
        arrange_free_pages(self.store, layout)
        self.poison()
        workspace = Workspace(device, 1 << 30, poison=True)
        step_limits = StepLimits(max_rows, max_step_tokens, max_len, (MAIN_LANE,), max_rollout=0)
        self.coordinators: dict[str, EntryCoordinator] = {}
        bindings = [self._bind(group, backends[group.spec.kind], workspace, step_limits) for group in self.groups]
        self.planner = Planner(bindings, step_limits, self.store.lengths, workspace, paranoid=paranoid)
        workspace.seal()

    def _bind(
        self,
        group: LayerGroup,
        backend: type[AttentionBackend[Any, Any]],
        workspace: Workspace,
        limits: StepLimits,
    ) -> GroupBinding:
        cache = self.store.cache(group.name)
        coordinator: EntryCoordinator = ResidentEntries(cache) if not cache.is_on_host else self._hot(cache, limits)
        self.coordinators[group.name] = coordinator
        context = BackendContext(
            group.name, group.spec, cache, workspace, limits, self.dtype, self.device, inline_launcher(), coordinator
        )
        return GroupBinding.alone(group, cache, backend(context), backend.capabilities[0])

    def _hot(self, cache: GroupCache, limits: StepLimits) -> HotEntries:
        assert self._buffer is not None, "entries are in host memory if some are hot"
        return HotEntries(cache, TOP_K, limits, self._buffer, self._copy, poison=True)

    def poison(self) -> None:
        """Fills every place that nobody owns with NaN, those of the padding page too."""
        for pool in self.store.pools:
            free = pool.allocator.allocate(pool.allocator.num_free)
            size = pool.entries_per_page
            slots = [page * size + place for page in (0, *free) for place in range(size)]
            pool.plane(pool.spec.planes[0].name)[:, slots] = torch.nan
            pool.allocator.release(free)
        states = self.store.main.states
        assert states is not None
        for each in states.pools:
            each.fill(range(1, each.num_slots), torch.nan)

    def open_row(self, length: int) -> int:
        row = self.store.open_row()
        self.store.grow_row(row, length)
        return row

    def plan(self, parts: Sequence[TextPart], *, transient: bool = False, padded: int = 0) -> PlannedBatch:
        work = [part.work for part in parts]
        batch = assemble_transient(work, self.device) if transient else assemble(work, self.store)
        return self.planner.plan(_padded(batch, padded))

    def run(self, parts: Sequence[TextPart], *, transient: bool = False, padded: int = 0) -> StepFound:
        """Plans and runs a step. `padded` adds tokens, and as many rows, that belong to nobody."""
        planned = self.plan(parts, transient=transient, padded=padded)
        self.planner.launch(planned)
        return self.compute(planned, parts)

    def compute(self, planned: PlannedBatch, parts: Sequence[TextPart]) -> StepFound:
        planned.prepare()
        count = planned.batch.num_tokens
        chosen: dict[int, Tensor | None] = {}
        outputs = []
        for layer in range(len(SPECS)):
            if layer in INDEXERS:
                found = planned.choose(layer, self._joined_index(parts, layer, count))
                chosen[layer] = None if found is None else found.clone()
            out = torch.full((count, HEADS, DIM), torch.nan, dtype=self.dtype, device=self.device)
            planned.attend(layer, self.joined(parts, layer, count, chosen.get(layer)), out)
            outputs.append(out)
        return StepFound(chosen, tuple(outputs))

    def check(self, parts: Sequence[TextPart], found: StepFound, tolerance: float = 3e-5) -> None:
        """Compares a step with the oracle's answers about whole texts."""
        first = 0
        for part in parts:
            tokens, own = slice(first, first + part.stop - part.start), slice(part.start, part.stop)
            for layer, chosen in found.chosen.items():
                if chosen is not None:
                    assert chosen[tokens].tolist() == part.text.chosen[layer][own].tolist(), (part.row, layer)
            for layer, out in enumerate(found.outputs):
                wanted = part.text.outputs[layer][own]
                torch.testing.assert_close(
                    out[tokens].float().cpu(), wanted, atol=tolerance, rtol=tolerance, msg=f"layer {layer} of {part}"
                )
            first = tokens.stop

    def step(self, parts: Sequence[TextPart], *, commit: bool = True, padded: int = 0) -> None:
        """Runs a step, compares it with the oracle, and keeps all of its tokens."""
        self.check(parts, self.run(parts, padded=padded))
        for part in parts if commit else ():
            self.store.lengths.commit(part.row, part.stop)

    def joined(
        self, parts: Sequence[TextPart], layer: int, count: int, chosen: Tensor | None = None
    ) -> CompressedInputs:
        """A layer's inputs of a step, NaN for padding tokens."""
        joined = _join([part.text.inputs[layer].part(slice(part.start, part.stop)) for part in parts], count)
        return replace(_moved(joined, self.device), chosen=chosen)

    def _joined_index(self, parts: Sequence[TextPart], layer: int, count: int) -> CompressedIndexInputs:
        joined = _join([part.text.index_inputs[layer].part(slice(part.start, part.stop)) for part in parts], count)
        return _moved(joined, self.device)


def _moved(inputs: InputsT, device: torch.device) -> InputsT:
    """The same inputs on a device."""
    found: dict[str, Any] = {each.name: getattr(inputs, each.name) for each in fields(inputs)}
    for name, value in found.items():
        if value is not None:
            found[name] = value.to(device) if isinstance(value, Tensor) else _moved(value, device)
    return replace(inputs, **found)


def _padded(batch: Batch, count: int) -> Batch:
    return batch.pad(batch.num_rows + count, batch.num_tokens + count) if count else batch


def _filled(values: Sequence[Tensor], count: int) -> Tensor:
    """The values of all rows' tokens, then NaN for padding tokens."""
    joined = torch.cat(list(values))
    return torch.cat([joined, joined.new_full((count - len(joined), *joined.shape[1:]), torch.nan)])


_WEIGHTS = ("norm", "sinks", "chosen")


def _join(parts: Sequence[InputsT], count: int) -> InputsT:
    """The inputs of several runs of tokens as one, with NaN for padding tokens."""
    found = {}
    for each in fields(parts[0]):
        values = [getattr(part, each.name) for part in parts]
        if values[0] is None or each.name in _WEIGHTS:
            found[each.name] = values[0]
        else:
            found[each.name] = (_join if each.name == "entries" else _filled)(values, count)
    return replace(parts[0], **found)
