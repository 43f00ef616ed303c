"""What kernels of compressed attention share: where a step's tokens, states and entries are.

    tokens   | row 0 | row 1 ... | row n | of no row |
    slots    read_slots[row]: the state behind a row's context; slot 0 always holds zeros
             write_slots[token]: where the state behind a token is kept; 0: nowhere

A page has the entries that its tokens complete. If an entry stands for more tokens than a page has, the last of the
pages that its tokens share holds it. Does not know specs, batches or plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.recurrent_tokens import TokenRows, TokenSlots

_BLOCK = 256


@dataclass(frozen=True, eq=False)
class CompressedTokens:
    """The tokens of a step."""

    rows: TokenRows
    context_lens: Tensor | None
    """[num_rows] int64; None: no row has a context."""
    slots: TokenSlots | None
    """None: rows begin with the empty state, and none is kept."""

    @property
    def num_tokens(self) -> int:
        return self.rows.rows.shape[0]


@dataclass(frozen=True, eq=False)
class EntryPages:
    """Where the entries of rows are in a plane."""

    pages: Tensor | None
    """[num_table_rows, max_pages] int64; None: entry e of a row is at the index of its first token in the step + e."""
    table_rows: Tensor | None
    """[num_rows] int64; None like the pages."""
    in_page: int
    """How many entries a page has."""
    apart: int
    """How many pages an entry's tokens fill; 1 if a page has several entries."""

    @staticmethod
    def of(pages: Tensor, table_rows: Tensor, page_size: int, ratio: int) -> EntryPages:
        """The entries of `ratio` tokens in pages of `page_size` tokens; one must divide the other."""
        if page_size % ratio and ratio % page_size:
            raise ValueError(f"expected pages of {ratio} tokens, its divisors or its multiples, got {page_size}")
        return EntryPages(pages, table_rows, max(1, page_size // ratio), max(1, ratio // page_size))

    @property
    def max_pages(self) -> int:
        """The stride of the page table; 0 without pages."""
        return 0 if self.pages is None else self.pages.stride(0)


@dataclass(frozen=True)
class SeenKeys:
    """What the queries of a step attend to, in blocks of keys: the window, and then entries."""

    window: int
    ratio: int
    """Tokens per entry; 0: there are no entries."""
    most_entries: int
    """A query attends to at most so many; 0: to all that it sees."""
    one_by_one: bool
    """True if rows have at most one token, behind which a state is kept: its ring then has the whole window."""


def count_keys(tokens: CompressedTokens, keys: SeenKeys, block: int, lens: Tensor, counts: Tensor) -> None:
    """Writes 1 to `lens` [num_tokens] int64 for tokens of rows, 0 for others; and to `counts` [num_tokens] int64 the
    numbers of keys in the blocks of `block` keys that they attend to, those not seen included."""
    if tokens.num_tokens == 0:
        return
    _count_keys[(triton.cdiv(tokens.num_tokens, _BLOCK),)](
        tokens.rows.rows, tokens.rows.offsets, tokens.context_lens, lens, counts, tokens.num_tokens, keys.most_entries,
        WINDOW=keys.window, RATIO=keys.ratio, ONE_BY_ONE=keys.one_by_one,
        CONTEXT=tokens.context_lens is not None, KEYS=block, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def seen_keys(position, context, WINDOW: tl.constexpr, ONE_BY_ONE: tl.constexpr):
    """How many keys a query sees in the ring of the state, and how many of the step's; and the first position."""
    first = tl.maximum(position - (WINDOW - 1), 0)
    in_ring = position + 1 - first if ONE_BY_ONE else tl.maximum(context - first, 0)
    return in_ring, position + 1 - first - in_ring, first


@triton.jit
def entry_slots(table, entry, wanted, IN_PAGE: tl.constexpr, APART: tl.constexpr):
    """The slots of entries of a row, whose pages are in `table`. Reads nothing for entries that are not wanted."""
    page = tl.load(table + (entry // IN_PAGE) * APART + (APART - 1), mask=wanted, other=0)
    return tl.where(wanted, page * IN_PAGE + entry % IN_PAGE, 0)


@triton.jit(
    do_not_specialize=["num_tokens", "most_entries"],
    do_not_specialize_on_alignment=["token_rows", "offsets", "context_lens", "lens", "counts"],
)
def _count_keys(
    token_rows, offsets, context_lens, lens, counts, num_tokens, most_entries,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, ONE_BY_ONE: tl.constexpr, CONTEXT: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program counts for some tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    row = tl.load(token_rows + token, mask=exists, other=-1)
    is_real = row >= 0
    context = tl.zeros([BLOCK], tl.int32)
    if CONTEXT:
        context = tl.load(context_lens + row, mask=is_real, other=0).to(tl.int32)
    first = tl.load(offsets + row, mask=is_real, other=0).to(tl.int32)
    position = context + token - first
    in_ring, new, _ = seen_keys(position, context, WINDOW, ONE_BY_ONE)
    blocks = (in_ring + KEYS - 1) // KEYS + (new + KEYS - 1) // KEYS
    if RATIO > 0:
        entries = (position + 1) // RATIO
        entries = tl.where(most_entries > 0, tl.minimum(entries, most_entries), entries)
        blocks += (entries + KEYS - 1) // KEYS
    tl.store(lens + token, is_real.to(tl.int64), mask=exists)
    tl.store(counts + token, tl.where(is_real, blocks * KEYS, 0).to(tl.int64), mask=exists)
