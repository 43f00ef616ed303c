"""The frozen `Batch`: everything that one step computes on, explicit, with no mode.

    |------ context_len ------|-- query_len --|
    |---------------- seq_len ----------------|

A batch is made from facts: what each row computes (`RowWork`) and which pools it reads and writes. Everything else
(positions, lengths on the device, write slots, logit indices) follows from them and is derived here, in one place, so
that `dataclasses.replace` cannot change one of them alone. A contradiction between facts is a `BatchError`.

A prefill row has a long query and no context, a decode row a query of one, a chunk both, a tree step a mask: they are
rows of the same kind and may stand in the same batch. Every operation that changes a batch (`pad`, `take`, `split`,
`idle`) returns a new batch with a new id, which no plan belongs to.

Tokens that steps in flight choose are facts too, but only the device knows them: the batch is made with the tensor that
will hold them, and copies them into its own in stream order. If the step that chooses them is not launched yet, the
batch says how many it waits for, and `fill` takes them before it runs.

Knows nothing of plans or backends, and of pools only what `PoolPages` says. Whether a context is really in the cache is
checked by `cache.lengths`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NewType

import torch
from torch import Tensor

from sightline.core.batch_memory import BatchMemory, StaticMemory
from sightline.core.errors import BatchError
from sightline.core.late_tokens import LateTokens
from sightline.core.lengths import (
    Lengths,
    check_unread,
    extend,
    pad_lengths,
    placed_lengths,
    put_chosen,
    slice_lengths,
    take_lengths,
)
from sightline.core.pool_rows import PoolPages, PoolRows, check_rows, move_contexts, slots_of_kept
from sightline.core.token_facts import token_facts

BatchId = NewType("BatchId", int)
PADDING_ROW = 0
"""The page-table row of padding rows."""
PADDING_SLOT = 0
"""The slot, in the padding page of every pool, that padding tokens write to."""

_batch_ids = itertools.count(1)


def _next_batch_id() -> BatchId:
    return BatchId(next(_batch_ids))


class MaskKind(Enum):
    """Which new tokens of its row a query may see. The context is always visible."""

    CAUSAL = "causal"
    FULL = "full"
    TREE = "tree"
    CONTEXT = "context"
    """None of them. The new tokens have no cache entries: their write slots are the padding slot."""


@dataclass(frozen=True, eq=False)
class RowMask:
    """The mask of one row."""

    kind: MaskKind
    tree: Tensor | None = None
    """[query_len, query_len] bool for `TREE`: True if query i sees new token j."""

    def __post_init__(self) -> None:
        if (self.kind is MaskKind.TREE) != (self.tree is not None):
            raise ValueError(f"expected a tree exactly for a TREE mask, got {self.kind} with tree {self.tree}")


CAUSAL = RowMask(MaskKind.CAUSAL)
FULL = RowMask(MaskKind.FULL)
CONTEXT = RowMask(MaskKind.CONTEXT)


@dataclass(eq=False, slots=True)
class RowWork:
    """The work of one row in a step.

    Treat as immutable. Not frozen, because one is created per row per step.
    """

    table_row: int
    tokens: Sequence[int]
    """The new tokens, as far as the host knows them."""
    context_len: int
    """Tokens of this row that are in the cache."""
    num_logits: int
    """How many of the last tokens need logits: 0 within a prompt, 1 to generate, more to score a prompt."""
    mask: RowMask = CAUSAL
    positions: Sequence[int] | None = None
    """Positions of a tree's tokens. Tokens of other rows directly follow the context."""
    unread: int | None = None
    """Where the new token after `tokens` is in the batch's `chosen`, if a step in flight chooses it."""
    num_candidates: int = 1
    """How many of its last tokens may turn out to be the last one that is kept: more than 1 if they are guesses."""


@dataclass(eq=False, slots=True)
class StepWork:
    """The work of all rows of a step, one column per fact of `RowWork`.

    Columns, because reading an object per row would take most of the time in which a step is assembled. Treat as
    immutable. Not frozen, because one is created per step.
    """

    table_rows: Sequence[int]
    tokens: Sequence[Sequence[int]]
    context_lens: Sequence[int]
    num_logits: Sequence[int]
    masks: Sequence[RowMask]
    positions: Sequence[Sequence[int] | None]
    unread: Sequence[int | None]
    num_candidates: Sequence[int]
    query_lens: tuple[int, ...] = field(init=False)
    """New tokens of each row, those that the host does not know included."""

    def __post_init__(self) -> None:
        others = (self.positions, self.unread, self.num_candidates)
        facts = (self.table_rows, self.context_lens, self.num_logits, self.masks, *others)
        lens = tuple(map(len, self.tokens))
        if set(map(len, facts)) != {len(lens)}:
            sizes = [len(lens), *map(len, facts)]
            raise BatchError("work", None, "columns of one length", sizes, "give every row all of its facts")
        if None not in self.unread and not any(lens):
            lens = (1,) * len(lens)
        elif self.unread.count(None) < len(lens):
            lens = tuple([length + (place is not None) for length, place in zip(lens, self.unread, strict=True)])
        self.query_lens = lens

    @staticmethod
    def of(rows: Iterable[RowWork]) -> StepWork:
        columns = [
            (
                row.table_row,
                row.tokens,
                row.context_len,
                row.num_logits,
                row.mask,
                row.positions,
                row.unread,
                row.num_candidates,
            )
            for row in rows
        ]
        return StepWork(*zip(*columns, strict=True)) if columns else StepWork((), (), (), (), (), (), (), ())

    def __len__(self) -> int:
        return len(self.table_rows)

    def row(self, index: int) -> RowWork:
        table_row, tokens, mask = self.table_rows[index], self.tokens[index], self.masks[index]
        context_len, num_logits = self.context_lens[index], self.num_logits[index]
        others = (self.positions[index], self.unread[index], self.num_candidates[index])
        return RowWork(table_row, tokens, context_len, num_logits, mask, *others)

    def take(self, indices: Iterable[int]) -> StepWork:
        """The work of some rows, in this order."""
        return StepWork.of([self.row(index) for index in indices])


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's rows. Frozen, unplanned."""

    work: StepWork
    """Work of the rows, excluding padding rows."""
    sources: tuple[PoolPages, ...]
    """The pools that the rows read and write. Empty: the step touches no cache."""
    device: torch.device
    chosen: Tensor | None = None
    """[num_chosen] int64 on the device: tokens that steps in flight choose. None if no row continues one."""
    awaited: int = 0
    """How many tokens the step before will choose, if it is not launched yet; `fill` takes them."""
    late: LateTokens = field(init=False)
    tokens: Tensor = field(init=False)
    """[num_tokens] int64, row after row, then padding."""
    positions: Tensor = field(init=False)
    """[num_tokens] int64. A row's positions directly follow its context; a tree's are depths."""
    query_lens: Lengths = field(init=False)
    context_lens: Lengths = field(init=False)
    masks: tuple[RowMask, ...] = field(init=False)
    """[num_rows]."""
    rows: tuple[int, ...] = field(init=False)
    """[num_rows]: page-table row of each row."""
    table_rows: Tensor = field(init=False)
    """[num_rows] int64: `rows` on the device."""
    pools: Mapping[str, PoolRows] = field(init=False)
    """By pool key. Empty: the step neither reads nor writes any cache."""
    logit_indices: Tensor = field(init=False)
    """[num_logits] int64: indices of the tokens that need logits, row after row; then zeros as padding."""
    logit_rows: tuple[int, ...] = field(init=False)
    """The row of each of these tokens, without padding."""
    logit_places: tuple[int, ...] = field(init=False)
    """`logit_indices` on the host, without padding."""
    memory: BatchMemory = field(init=False)
    """Memory of the tensors; tells whether another batch has reused it."""
    tenant: int = field(init=False)
    batch_id: BatchId = field(init=False)
    """New for every batch, including one made by `dataclasses.replace`: other contents are another batch."""

    def __post_init__(self) -> None:
        self._derive(BatchMemory())

    @staticmethod
    def inside(
        work: StepWork,
        sources: tuple[PoolPages, ...],
        memory: StaticMemory,
        chosen: Tensor | None = None,
        awaited: int = 0,
    ) -> Batch:
        """A batch of causal rows padded to the memory's shape, with its tensors there.

        Every batch that was there before is overwritten.
        """
        if work.masks.count(CAUSAL) != len(work):
            row = next(index for index, mask in enumerate(work.masks) if mask is not CAUSAL)
            raise BatchError("masks", row, "causal, as the graph was captured", work.masks[row].kind, "run it eagerly")
        batch: Batch = object.__new__(Batch)
        batch._set(work=work, sources=sources, device=memory.device, chosen=chosen, awaited=awaited)
        batch._derive(memory)
        return batch

    def _derive(self, memory: BatchMemory) -> None:
        """Sets everything that follows from the facts, with the tensors in `memory`."""
        work, facts = self.work, token_facts(self.work, self.work.masks.count(CAUSAL))
        rows, query_lens, context_lens = tuple(work.table_rows), work.query_lens, tuple(work.context_lens)
        check_rows(rows, context_lens, self.sources, PADDING_ROW)
        continued = (facts.unread_places, facts.unread)
        if facts.unread:
            check_unread(continued, self.chosen, self.awaited)
        reads = [source.slots_to_read(rows, context_lens) for source in self.sources]
        slots = [_write_slots(work, source) for source in self.sources]
        states = [each for each in reads if each is not None]
        bounds, padding = memory.query_bounds(query_lens), memory.num_padding(len(rows))
        # A single copy to the device.
        per_token = [facts.tokens, facts.positions, *continued]
        on_device = memory.put(
            [*per_token, query_lens, context_lens, rows, facts.logit_places, *slots, *states], self.device
        )
        if facts.unread and self.chosen is not None:
            put_chosen(on_device[0], continued, on_device[2:4], self.chosen)
        empty = (0,) * padding
        context_lens += empty
        padded_rows = rows + (PADDING_ROW,) * padding
        self._set(
            late=LateTokens(on_device[0], on_device[2], on_device[3], continued, self.awaited),
            tokens=on_device[0],
            positions=on_device[1],
            query_lens=Lengths(on_device[4], bounds, query_lens + empty),
            context_lens=Lengths(on_device[5], context_lens, context_lens),
            masks=(*work.masks, *(CAUSAL,) * padding),
            rows=padded_rows,
            table_rows=on_device[6],
            pools=self._pool_rows(padded_rows, on_device[8:], slots, reads),
            logit_indices=on_device[7],
            logit_rows=facts.logit_rows,
            logit_places=facts.logit_places,
            memory=memory,
            tenant=memory.tenant,
            batch_id=_next_batch_id(),
        )

    def _pool_rows(
        self,
        rows: tuple[int, ...],
        on_device: Sequence[Tensor],
        slots: Sequence[Sequence[int]],
        reads: Sequence[Sequence[int] | None],
    ) -> dict[str, PoolRows]:
        """The rows in each pool. `on_device` has the slots that each pool writes, then those that states are read
        from."""
        left, pools = iter(on_device[len(slots) :]), dict[str, PoolRows]()
        for source, written, kept, read in zip(self.sources, on_device, slots, reads, strict=False):
            versions = source.versions(rows)
            if read is None:
                pools[source.key] = PoolRows(source.table_id, versions, written)
            else:
                padding = (PADDING_SLOT,) * (written.shape[0] - len(kept))
                pools[source.key] = PoolRows(source.table_id, versions, written, next(left), (*kept, *padding))
        return pools

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _with(self, **fields: Any) -> Batch:
        """A new batch that differs in these fields. Skips the derivation; for this class only."""
        other: Batch = object.__new__(Batch)
        other._set(**{**vars(self), **fields, "batch_id": _next_batch_id()})
        if "memory" in fields:
            other._set(tenant=other.memory.tenant)
        return other

    @property
    def is_overwritten(self) -> bool:
        """True if another batch was placed in this one's memory since."""
        return self.memory.tenant != self.tenant

    def _require_tensors(self) -> None:
        """Raises if the tensors are another batch's: a copy of them would look like this batch and be current."""
        if self.is_overwritten:
            found = "overwritten by a batch in the same memory"
            raise BatchError("tensors", None, f"those of batch {self.batch_id}", found, "assemble the batch again")

    def fill(self, chosen: Tensor) -> None:
        """Copies the tokens that the step before chose, [awaited] int64, into this batch's, in stream order."""
        self._require_tensors()
        self.late.fill(chosen)

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.tokens.shape[0]

    def query_offsets_host(self) -> tuple[int, ...]:
        """[num_rows + 1]: start of each row's tokens, and the end of the last."""
        return tuple(itertools.accumulate(self.query_lens.exact(), initial=0))

    def num_decoding(self) -> int:
        """Leading rows of at most one new token under a causal mask."""
        bounds, masks = self.query_lens.bound, self.masks
        if not bounds or (max(bounds) <= 1 and masks.count(CAUSAL) == len(masks)):
            return len(bounds)
        for row, (bound, mask) in enumerate(zip(bounds, masks, strict=True)):
            if bound > 1 or mask.kind is not MaskKind.CAUSAL:
                return row
        return len(bounds)

    def pad(self, num_rows: int, num_tokens: int) -> Batch:
        """A new batch with empty rows and padding tokens appended."""
        self._require_tensors()
        extra_rows, extra_tokens = num_rows - self.num_rows, num_tokens - self.num_tokens
        if extra_rows < 0 or extra_tokens < 0:
            raise ValueError(
                f"expected padding to at least {self.num_rows} rows and {self.num_tokens} tokens, "
                f"got {num_rows} and {num_tokens}"
            )
        tokens = extend(self.tokens, extra_tokens, 0)
        return self._with(
            late=self.late.over(tokens),
            tokens=tokens,
            positions=extend(self.positions, extra_tokens, 0),
            query_lens=pad_lengths(self.query_lens, extra_rows),
            context_lens=pad_lengths(self.context_lens, extra_rows),
            masks=self.masks + (CAUSAL,) * extra_rows,
            rows=self.rows + (PADDING_ROW,) * extra_rows,
            table_rows=extend(self.table_rows, extra_rows, PADDING_ROW),
            pools={key: pool.padded(extra_rows, extra_tokens, PADDING_SLOT) for key, pool in self.pools.items()},
            memory=BatchMemory(),
        )

    def take(self, rows: Sequence[int]) -> Batch:
        """A new batch of the given rows, in that order, without padding tokens."""
        self._require_tensors()
        if len(set(rows)) != len(rows) or not all(0 <= row < self.num_rows for row in rows):
            raise ValueError(f"expected each row once, from 0 to {self.num_rows - 1}, got {list(rows)}")
        padding = [row >= len(self.work) for row in rows]
        if padding != sorted(padding):
            raise ValueError(f"expected padding rows, from {len(self.work)} on, behind the others, got {list(rows)}")
        offsets = self.query_offsets_host()
        kept = [token for row in rows for token in range(offsets[row], offsets[row + 1])]
        new_token = {old: new for new, old in enumerate(kept)}
        wanted: dict[int, list[int]] = {row: [] for row in rows}
        for token, row in zip(self.logit_places, self.logit_rows, strict=True):
            if row in wanted:
                wanted[row].append(new_token[token])
        index, row_index = (torch.tensor(list(each), dtype=torch.int64, device=self.device) for each in (kept, rows))
        tokens, logit_indices = self.tokens[index], [token for row in rows for token in wanted[row]]
        return self._with(
            work=self.work.take(row for row in rows if row < len(self.work)),
            late=self.late.taken(tokens, kept),
            tokens=tokens,
            positions=self.positions[index],
            query_lens=take_lengths(self.query_lens, rows),
            context_lens=take_lengths(self.context_lens, rows),
            masks=tuple(self.masks[row] for row in rows),
            rows=tuple(self.rows[row] for row in rows),
            table_rows=self.table_rows[row_index],
            pools={key: pool.taken(rows, row_index, kept, index) for key, pool in self.pools.items()},
            logit_indices=torch.tensor(logit_indices, dtype=torch.int64, device=self.device),
            logit_rows=tuple(new for new, row in enumerate(rows) for _ in wanted[row]),
            logit_places=tuple(logit_indices),
            memory=BatchMemory(),
        )

    def split(self, first_rows: int) -> tuple[Batch, Batch]:
        """Two new batches: the first `first_rows` rows, and the rest."""
        if not 0 <= first_rows <= self.num_rows:
            raise ValueError(f"expected a split between 0 and {self.num_rows} rows, got {first_rows}")
        return self.take(range(first_rows)), self.take(range(first_rows, self.num_rows))

    def part(self, rows: slice, tokens: slice) -> Batch:
        """A new batch of contiguous rows that shares this one's memory; `tokens` is their range.

        A part has no logits: they belong to the whole step.
        """
        if self.query_lens.host is not None and tokens.start != sum(self.query_lens.host[: rows.start]):
            raise BatchError("tokens", rows.start, "those of the part's rows", tokens)
        return self._with(
            work=self.work.take(range(len(self.work))[rows]),
            tokens=self.tokens[tokens],
            positions=self.positions[tokens],
            query_lens=slice_lengths(self.query_lens, rows),
            context_lens=slice_lengths(self.context_lens, rows),
            masks=self.masks[rows],
            rows=self.rows[rows],
            table_rows=self.table_rows[rows],
            pools={key: pool.part(rows, tokens) for key, pool in self.pools.items()},
            logit_indices=self.logit_indices[:0],
            logit_rows=(),
            logit_places=(),
        )

    def idle(self) -> Batch:
        """A new batch without rows over the same pools, for a rank that has nothing to do."""
        return self.take(())

    def bounded(self, query_bound: Sequence[int], context_bound: Sequence[int], *, known: bool) -> Batch:
        """A new batch over the same memory with looser host bounds.

        Unless `known`, the host does not know the lengths, as while drafts are accepted on the device.
        """
        return self._with(
            query_lens=self.query_lens.bounded(query_bound, known=known),
            context_lens=self.context_lens.bounded(context_bound, known=known),
        )

    def behind(self, contexts: Tensor) -> Batch:
        """A new batch in this one's memory, whose rows begin where only the device knows: a step in flight decides how
        many of its entries stay. Overwrites this batch.

        `contexts` [num_rows, without padding] int64 are on the device, and at most this batch's context lengths, which
        stay as bounds. Positions and write slots are derived on the device, by operations that can be captured.
        """
        self._require_tensors()
        count, tokens = len(self.work), (self.query_lens.device, self.table_rows)
        if contexts.shape != (count,) or contexts.dtype != torch.int64:
            raise BatchError("contexts", None, f"({count},) int64", f"{tuple(contexts.shape)} {contexts.dtype}")
        if self.masks.count(CAUSAL) < len(self.masks):
            raise BatchError("masks", None, "causal in rows whose contexts only the device knows", "others")
        written = [(source, self.pools[source.key].write_slots) for source in self.sources]
        move_contexts(self.context_lens.device, contexts, self.positions, *tokens, written)
        self.memory.tenant += 1
        behind = Lengths(self.context_lens.device, self.context_lens.bound, None)
        return self._with(context_lens=behind, memory=self.memory)

    def placed_in(self, memory: Batch) -> Batch:
        """A new batch with these contents copied into the tensors of `memory`, a batch of the same sizes.

        It takes the query-length bounds of `memory`, because a captured graph reads that memory and its bucket fixes
        them. Contexts keep their own bounds.
        """
        self._require_tensors()
        sizes, expected = (self.num_rows, self.num_tokens), (memory.num_rows, memory.num_tokens)
        if sizes != expected or self.pools.keys() != memory.pools.keys():
            raise BatchError("sizes", None, f"{expected} rows and tokens over the same pools", sizes)
        memory.memory.tenant += 1
        pools = {key: rows.placed_in(memory.pools[key]) for key, rows in self.pools.items()}
        return self._with(
            late=self.late.over(memory.tokens),
            tokens=memory.tokens.copy_(self.tokens),
            positions=memory.positions.copy_(self.positions),
            table_rows=memory.table_rows.copy_(self.table_rows),
            query_lens=placed_lengths(self.query_lens.bounded(memory.query_lens.bound, known=True), memory.query_lens),
            context_lens=placed_lengths(self.context_lens, memory.context_lens),
            pools=pools,
            memory=memory.memory,
        )


def _write_slots(work: StepWork, source: PoolPages) -> Sequence[int]:
    """The slot of each new token's entry, row after row."""
    facts = (work.table_rows, work.context_lens, work.query_lens, work.num_candidates)
    if CONTEXT not in work.masks:
        return source.slots_to_write(*facts)
    kept = [mask is not CONTEXT for mask in work.masks]
    return slots_of_kept(source, *facts, kept, PADDING_SLOT)
