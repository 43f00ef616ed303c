"""The parts of a correct attention backend, one by one: a fault is one of them replaced.

Each part is a function that `parts_backend.py` calls. Shapes are those of the whole step: a padding token is a token of
a row that has nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import BackendContext, CachePolicy, SoftmaxInputs, StepView
from sightline.attention.oracle.attention import loaded_entries, stored_entries
from sightline.attention.shared.merge import merge_parts
from sightline.attention.spec import SoftmaxSpec
from sightline.cache.pools import Pool
from sightline.cache.table import PageTable
from sightline.core.batch import Batch, MaskKind
from sightline.core.lengths import Lengths

SPLIT = 64
"""Keys of a split."""
KINDS = tuple(MaskKind)
"""A mask's number is its place in here."""
Kept: TypeAlias = dict[Any, Any]
"""What a backend keeps from step to step. The correct one keeps nothing."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The row of each token, [num_tokens, 1] each. Padding tokens belong to a row of nothing."""

    index: Tensor
    """Place among its row's new tokens."""
    first: Tensor
    """The first token of its row."""
    context_len: Tensor
    query_len: Tensor
    table_row: Tensor
    kind: Tensor
    """Of the mask, as a number."""
    tree_line: Tensor
    """Where the plan's trees say what it sees; of no matter without a tree."""
    position: Tensor
    real: Tensor
    """bool: False for padding."""

    @property
    def seq_len(self) -> Tensor:
        return self.context_len + self.query_len

    def is_kind(self, kind: MaskKind) -> Tensor:
        return self.kind == KINDS.index(kind)


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys of one split, as each token sees them: [num_tokens, num_keys] each."""

    entry: Tensor
    """Place in the row."""
    new: Tensor
    """Place among the row's new tokens; negative in the context."""
    token: Tensor
    """The token that it is, where it is new; any token of the step where not."""
    position: Tensor


@dataclass(frozen=True, eq=False)
class Planes:
    """One layer's keys or values."""

    name: str
    layer: int
    step: StepView
    pool: Tensor
    """[num_slots, num_kv_heads, head_dim]."""
    scale: float
    """Of the layer: what stands in the pool, times this, is an entry."""
    new: Tensor
    """[num_tokens, num_kv_heads, head_dim]: the step's own."""


def device_lens(lengths: Lengths, batch: Batch, kept: Kept) -> Tensor:
    return lengths.device


def enough_for_all(context: BackendContext[SoftmaxSpec], bounds: Sequence[int], new: Sequence[int]) -> int:
    """On a GPU enough for any step, so that a captured graph serves the lengths that it is replayed with."""
    return context.limits.max_seq_len if context.device.type == "cuda" else max(bounds, default=0)


def fixed_split(batch: Batch, kept: Kept) -> int:
    return SPLIT


def take_buffer(
    buffers: PlanBuffers, step: StepView, kept: Kept, name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return buffers.take(name, shape, dtype)


def fill_always(buffer: Tensor, values: Tensor, kept: Kept) -> None:
    buffer.copy_(values)


def as_they_are(inputs: SoftmaxInputs, kept: Kept) -> SoftmaxInputs:
    return inputs


def before_the_end(token: Tensor, num_real: Tensor) -> Tensor:
    return token < num_real


def is_paged(step: StepView) -> bool:
    return step.policy is CachePolicy.PAGED


def has_pool(step: StepView) -> bool:
    return step.policy is not CachePolicy.TRANSIENT


def given_slots(given: Tensor, tokens: Tokens, pool: Pool) -> Tensor:
    return given


def put_entries(pool: Tensor, slots: Tensor, entries: Tensor) -> None:
    """As bytes: 8-bit floats are not moved by every op."""
    pool.view(torch.uint8).index_copy_(0, slots, entries.contiguous().view(torch.uint8))


def get_entries(pool: Tensor, slots: Tensor) -> Tensor:
    return pool.view(torch.uint8)[slots].view(pool.dtype)


def write_plane(planes: Planes, slots: Tensor, kept: Kept) -> None:
    put_entries(planes.pool, slots, stored_entries(planes.new, planes.pool.dtype, planes.scale))


def read_plane(planes: Planes, slots: Tensor, kept: Kept) -> Tensor:
    return loaded_entries(get_entries(planes.pool, slots), planes.scale)


def table_slots(table: PageTable, rows: Tensor, entries: Tensor, page_size: int) -> Tensor:
    return table.slots(rows, entries, page_size)


def every_page(table: PageTable, rows: Tensor, entries: Tensor, page_size: int) -> Tensor:
    return torch.ones_like(entries, dtype=torch.bool)


def sees(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
    """[num_tokens, num_keys]: whether the mask shows the key. `tree` [num_tokens, num_tokens] holds all rows' trees."""
    mask = keys.new <= tokens.index
    mask = torch.where(tokens.is_kind(MaskKind.FULL), True, mask)
    mask = mask & ~tokens.is_kind(MaskKind.CONTEXT)
    if tree.numel():
        mask = torch.where(
            tokens.is_kind(MaskKind.TREE), tree[tokens.tree_line, keys.new.clamp(0, tree.shape[1] - 1)], mask
        )
    return (keys.entry < tokens.seq_len) & ((keys.new < 0) | mask)


def distance(tokens: Tokens, keys: Keys) -> Tensor:
    return (tokens.position - keys.position).abs()


def less_than(distances: Tensor, window: int) -> Tensor:
    return distances < window


def hide(values: Tensor, visible: Tensor, tokens: Tokens, keys: Keys, page_size: int) -> Tensor:
    """A weight of 0 would not silence a NaN."""
    return values.masked_fill(~visible[:, :, None, None], 0.0)


def cap(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap)


def total(terms: Tensor, dim: int) -> Tensor:
    """Summed by halves: in the same order on any device, whatever stands beside."""
    while terms.shape[dim] > 1:
        half = terms.shape[dim] // 2
        rest = terms.narrow(dim, 2 * half, terms.shape[dim] - 2 * half)
        terms = terms.narrow(dim, 0, half) + terms.narrow(dim, half, half)
        terms = torch.cat([terms, rest], dim) if rest.shape[dim] else terms
    return terms.squeeze(dim)


def log_sum_exp(scores: Tensor) -> Tensor:
    largest = scores.amax(1)
    largest = largest.masked_fill(largest.isneginf(), 0.0)
    return total((scores - largest.unsqueeze(1)).exp(), 1).log() + largest


def weigh(weights: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_tokens, num_keys, heads] and [..., head_dim]: the sum over the keys."""
    return total(weights.unsqueeze(-1) * values, 1)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor, spec: SoftmaxSpec) -> tuple[Tensor, Tensor]:
    """One more part, which has weight and no value."""
    return merge_parts(torch.stack([out, torch.zeros_like(out)]), torch.stack([lse, sinks.float().expand_as(lse)]))


@dataclass(frozen=True)
class Parts:
    """What a backend is made of. The defaults are correct."""

    accept: Callable[[BackendContext[SoftmaxSpec]], None] = lambda context: None
    """Looks at what the backend is built for."""
    query_lens: Callable[[Lengths, Batch, Kept], Tensor] = device_lens
    context_lens: Callable[[Lengths, Batch, Kept], Tensor] = device_lens
    """[num_rows] int64, on the device."""
    longest: Callable[[BackendContext[SoftmaxSpec], Sequence[int], Sequence[int]], int] = enough_for_all
    """From the bounds of all rows, and of their new tokens: how many keys are looked at."""
    split_size: Callable[[Batch, Kept], int] = fixed_split
    take: Callable[[PlanBuffers, StepView, Kept, str, Sequence[int], torch.dtype], Tensor] = take_buffer
    fill_constant: Callable[[Tensor, Tensor, Kept], None] = fill_always
    """Fills a plan buffer that holds the same in every plan."""
    zeroed: bool = True
    """The count of merged parts starts as zeros."""
    one_memory_for_lanes: bool = False
    """What `prepare` makes is the backend's and not the plan's."""

    inputs: Callable[[SoftmaxInputs, Kept], SoftmaxInputs] = as_they_are
    real: Callable[[Tensor, Tensor], Tensor] = before_the_end
    """Which tokens belong to a row."""
    writes: Callable[[StepView], bool] = is_paged
    reads: Callable[[StepView], bool] = has_pool
    write_slots: Callable[[Tensor, Tokens, Pool], Tensor] = given_slots
    write: Callable[[Planes, Tensor, Kept], None] = write_plane
    read: Callable[[Planes, Tensor, Kept], Tensor] = read_plane
    read_layer: Callable[[int], int] = lambda layer: layer
    scale_layer: Callable[[int], int] = lambda layer: layer
    """Whose scale a layer's entries have."""
    slots: Callable[[PageTable, Tensor, Tensor, int], Tensor] = table_slots
    readable: Callable[[PageTable, Tensor, Tensor, int], Tensor] = every_page

    sees: Callable[[Tokens, Keys, Tensor, int], Tensor] = sees
    distance: Callable[[Tokens, Keys], Tensor] = distance
    within: Callable[[Tensor, int], Tensor] = less_than
    window: Callable[[BackendContext[SoftmaxSpec]], int | None] = lambda context: context.spec.window
    hide: Callable[[Tensor, Tensor, Tokens, Keys, int], Tensor] = hide

    head_dim: Callable[[int], int] = lambda head_dim: head_dim
    """How much of a head's key is read."""
    kv_head: Callable[[Tensor, SoftmaxSpec], Tensor] = lambda head, spec: head // spec.group_size
    scale: Callable[[SoftmaxSpec], float] = lambda spec: spec.scale
    cap: Callable[[Tensor, float], Tensor] = cap
    log_sum_exp: Callable[[Tensor], Tensor] = log_sum_exp
    weigh: Callable[[Tensor, Tensor, torch.dtype], Tensor] = weigh
    merge: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = lambda outs, lses, split: merge_parts(outs, lses)
    add_sinks: Callable[[Tensor, Tensor, Tensor, SoftmaxSpec], tuple[Tensor, Tensor]] = add_sinks
    lse: Callable[[Tensor], Tensor] = lambda lse: lse


CORRECT = Parts()
