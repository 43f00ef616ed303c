"""A case: one value for each dimension, and the rows, pool and estimated time that follow from them.

    values ─▶ rows, page table and pool ─▶ the point of `attention.coverage` that is recorded if the case passes
          └─▶ estimated seconds, so that a costly value is tried with everything else small

The *main* row has the case's context and new tokens; the other rows have at most as many. Knows numbers and names. Does
not know how a case is run.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from sightline.attention.contract import CachePolicy
from sightline.attention.dimensions import (
    IN_ORDER,
    Company,
    Dimension,
    KeptStates,
    LaneUse,
    Padding,
    Point,
    Reuse,
    Sharing,
    Value,
)
from sightline.attention.kinds import COMPRESSED_KINDS, KEEPING_KINDS, Feature, SpecKind
from sightline.core.batch import CAUSAL, FULL, MaskKind
from sightline.testing.conformance.rig import Row, tree_row

TIGHT = 0
"""`POOL_SLOTS` of a case whose pool has only as many slots as its rows need."""
OTHERS = (Row(9, 3), Row(0, 2))
"""The rows of steps that are planned before or beside a case's own step."""
GOES_ON_BY = 2
"""The most entries of each context that an earlier step of the backend writes."""
_MEANINGLESS: Mapping[Dimension, Value] = {
    Dimension.PAGE_SIZE: 16,
    Dimension.PAGE_ORDER: IN_ORDER,
    Dimension.SHARING: Sharing.NONE.value,
    Dimension.POOL_SLOTS: TIGHT,
    Dimension.KEPT: KeptStates.LAST.value,
    Dimension.SLOT_ORDER: IN_ORDER,
}
"""The plain values of dimensions that some kinds of layers do not have. They are part of no point."""
MOST_GUESSES = 8
"""The most tokens of a row whose states are kept because any of them may be the last one accepted."""
MOST_INSIDE = 3
"""The most checkpoints inside a row."""
_PADDINGS = ((2, 3), (0, 1), (7, 40))
_COMPANY_NEW = (1, 1, 2, 5, 1, 3)
_MANY_LAYERS = 8
_LAYERS_SECONDS = 0.25
"""If all layers of a case would take longer, only some of them are run."""
_COMPOSED = frozenset({Feature.SOFTCAP.value, Feature.SINKS.value, Feature.LSE.value})
_KEEPING_KINDS = frozenset(kind.value for kind in KEEPING_KINDS)
_COMPRESSED_KINDS = frozenset(kind.value for kind in COMPRESSED_KINDS)
_MOST_STATE_BYTES = 2 << 30
"""The most bytes of states: unlike pages, all of them are filled."""
MOST_POOL_BYTES = 9 << 30
"""The largest pool. Only the pages that rows use are touched."""


@dataclass(frozen=True, eq=False)
class Case:
    """One combination of values to try."""

    values: Mapping[Dimension, Value]
    """One value for each dimension, `WINDOW` only if there is one. `STEP_TOKENS` follows from the others, unless it is
    given: the other rows then have enough new tokens to reach it."""
    seed: int = 0
    most_pool_bytes: int = MOST_POOL_BYTES
    """The estimated time of a case with a larger pool is very high."""

    def number(self, dimension: Dimension) -> int:
        return int(self.values.get(dimension, _MEANINGLESS.get(dimension, 0)))

    def name(self, dimension: Dimension) -> str:
        return str(self.values.get(dimension, _MEANINGLESS.get(dimension, "")))

    def changed(self, dimension: Dimension, value: Value) -> Case:
        return replace(self, values={**self.values, dimension: value})

    @property
    def features(self) -> frozenset[str]:
        return frozenset(self.name(Dimension.FEATURES).split("+"))

    @property
    def window(self) -> int | None:
        return self.number(Dimension.WINDOW) if Feature.WINDOW.value in self.features else None

    @property
    def top_k(self) -> int | None:
        """The number of tokens that are chosen, if any are."""
        return self.number(Dimension.TOP_K) or None

    @property
    def is_transient(self) -> bool:
        return self.name(Dimension.POLICY) == CachePolicy.TRANSIENT.value

    @property
    def goes_on(self) -> bool:
        return self.name(Dimension.REUSE) == Reuse.GOES_ON.value

    @property
    def has_others(self) -> bool:
        """True if other steps are planned on the same backend."""
        is_alone = self.name(Dimension.REUSE) in (Reuse.FIRST.value, Reuse.GOES_ON.value)
        return not is_alone or self.name(Dimension.LANE) == LaneUse.SECOND.value

    @property
    def padding(self) -> tuple[int, int]:
        """The number of padding rows and padding tokens."""
        is_padded = self.name(Dimension.PADDING) == Padding.PADDED.value
        return _PADDINGS[self.seed % len(_PADDINGS)] if is_padded else (0, 0)

    @cached_property
    def main_row(self) -> int:
        """The index of the main row."""
        return random.Random(f"main {self.seed}").randrange(self.number(Dimension.ROWS))

    @property
    def shared_pages(self) -> int:
        """The number of pages of the main row's context that the other rows share."""
        if self.name(Dimension.SHARING) == Sharing.NONE.value:
            return 0
        # A row does not share the pages that an earlier step of its own writes.
        own = GOES_ON_BY if self.goes_on else 0
        pages = max(0, self.number(Dimension.CONTEXT) - own) // self.number(Dimension.PAGE_SIZE)
        # Shorter rows share half of them.
        return pages if self.name(Dimension.COMPANY) == Company.SAME.value else -(-pages // 2)

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(context, new tokens) of every row."""
        main, count = (self.number(Dimension.CONTEXT), self.number(Dimension.NEW_TOKENS)), self.number(Dimension.ROWS)
        if self.name(Dimension.COMPANY) == Company.SAME.value:
            return (main,) * count
        lengths = list(itertools.islice(itertools.cycle(self._beside()), count))
        lengths[self.main_row] = main
        return tuple(lengths)

    def _beside(self) -> list[tuple[int, int]]:
        """(context, new tokens) of the other rows, to be repeated; at most as many as the main row has."""
        page, most, new = (self.number(each) for each in (Dimension.PAGE_SIZE, Dimension.CONTEXT, Dimension.NEW_TOKENS))
        shared = self.shared_pages * page
        contexts = [min(most, shared + more) for more in (0, page - 1, 1, page, page + 1, 7, 2 * page + 3)]
        missing = int(self.values.get(Dimension.STEP_TOKENS, 0)) - new
        least = -(-missing // max(1, self.number(Dimension.ROWS) - 1))
        news = [min(new, max(some, least)) for some in _COMPANY_NEW]
        both = zip(itertools.cycle(contexts), itertools.cycle(news), strict=False)
        return list(itertools.islice(both, len(contexts) * len(news)))

    @cached_property
    def _alike(self) -> Counter[tuple[int, int]]:
        """The number of rows with each pair of lengths."""
        return Counter(self.lengths)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows with their masks. The main row and every second other row have the case's mask."""
        is_same = self.name(Dimension.COMPANY) == Company.SAME.value
        return tuple(
            self._keeping(self._masked(*lengths)) if is_same or place % 2 or place == self.main_row else Row(*lengths)
            for place, lengths in enumerate(self.lengths)
        )

    def _keeping(self, row: Row) -> Row:
        """Returns the row with the states that it keeps besides the last one."""
        match self.name(Dimension.KEPT):
            case KeptStates.GUESSES.value:
                return replace(row, candidates=max(1, min(row.query_len, MOST_GUESSES)))
            case KeptStates.CHECKPOINTS.value if row.query_len > 1:
                draw = random.Random(f"kept {self.seed} {row.query_len}")
                inside = range(row.query_len - 1)
                return replace(row, checkpoints=tuple(sorted(draw.sample(inside, min(len(inside), MOST_INSIDE)))))
            case _:
                return row

    def _masked(self, context_len: int, query_len: int) -> Row:
        match self.name(Dimension.MASK):
            case MaskKind.FULL.value:
                return Row(context_len, query_len, FULL)
            case MaskKind.TREE.value:
                draw = random.Random(f"tree {self.seed} {query_len}")
                # Each token follows one of the three before it, so that a long tree is deep.
                return tree_row(
                    context_len, [draw.randint(max(-1, place - 3), place - 1) for place in range(query_len)]
                )
            case _:
                return Row(context_len, query_len, CAUSAL)

    @property
    def main_len(self) -> int:
        """The number of keys of the main row."""
        return self.number(Dimension.CONTEXT) + self.number(Dimension.NEW_TOKENS)

    @cached_property
    def num_tokens(self) -> int:
        return sum(count * new for (_, new), count in self._alike.items())

    @cached_property
    def needed_pages(self) -> int:
        """The pages that the rows of all steps need in each pool, and the padding page."""
        page = self.number(Dimension.PAGE_SIZE)
        own = sum(count * -(-(context + new) // page) for (context, new), count in self._alike.items())
        return 1 + own + (2 * sum(-(-row.seq_len // page) for row in OTHERS) if self.has_others else 0)

    @property
    def num_pages(self) -> int:
        """The pages of each pool: as many as the case asks for, but at least the needed ones."""
        return max(self.needed_pages, -(-self.number(Dimension.POOL_SLOTS) // self.number(Dimension.PAGE_SIZE)))

    @property
    def is_pool_tight(self) -> bool:
        return self.number(Dimension.POOL_SLOTS) == TIGHT

    @property
    def _page_order(self) -> str:
        """The order of the main row's pages. Up to two pages count as in order."""
        pages = -(-self.main_len // self.number(Dimension.PAGE_SIZE))
        return self.name(Dimension.PAGE_ORDER) if pages > 2 and not self.is_transient else IN_ORDER

    @property
    def _kept(self) -> str:
        """The states that the rows keep as they are: a row of one token has only one."""
        keeps = any(row.checkpoints or row.candidates > 1 for row in self.rows)
        return self.name(Dimension.KEPT) if keeps and not self.is_transient else KeptStates.LAST.value

    @property
    def _company(self) -> str:
        """The company of the rows as they are: rows that should be shorter may turn out to have equal lengths."""
        is_same = len(self.lengths) > 1 and len(self._alike) == 1
        return Company.SAME.value if is_same else self.name(Dimension.COMPANY)

    def point(self) -> Point:
        """Returns the point that is covered if the case passes."""
        derived: dict[Dimension, Value] = {
            Dimension.STEP_TOKENS: self.num_tokens,
            Dimension.POOL_SLOTS: self.num_pages * self.number(Dimension.PAGE_SIZE),
            Dimension.PAGE_ORDER: self._page_order,
            Dimension.SHARING: (Sharing.PREFIX if self.shared_pages else Sharing.NONE).value,
            Dimension.COMPANY: self._company,
            Dimension.KEPT: self._kept,
            Dimension.SLOT_ORDER: IN_ORDER if self.is_transient else self.name(Dimension.SLOT_ORDER),
        }
        known = {*self.values, Dimension.STEP_TOKENS}
        point = {**self.values, **{each: value for each, value in derived.items() if each in known}}
        if self.window is None:
            point.pop(Dimension.WINDOW, None)
        return point

    def run_layers(self) -> tuple[int, ...]:
        """The layers that are run, in order: all, or the first, the last and some others if they are many and slow."""
        count = self.number(Dimension.LAYERS)
        if count <= _MANY_LAYERS or count * self._layer_seconds <= _LAYERS_SECONDS:
            return tuple(range(count))
        return tuple(sorted({0, 1, 2, 4, count // 2, count - 2, count - 1}))

    def compared_layers(self) -> tuple[int, ...]:
        """The layers whose output is compared with the oracle."""
        run = self.run_layers()
        within = random.Random(f"layer {self.seed}").choice(run)
        return tuple(sorted({run[0], run[1 % len(run)], within, run[-2 % len(run)], run[-1]}))

    @property
    def num_q_heads(self) -> int:
        """The channels of a convolution stand beside each other as heads do."""
        if self.name(Dimension.KIND) == SpecKind.CONVOLUTION.value:
            return self.number(Dimension.HEAD_DIM)
        return self.number(Dimension.KEY_HEADS) * self.number(Dimension.GROUP_SIZE)

    @property
    def _entry_size(self) -> int:
        """Elements that are cached per token."""
        planes = 2 if self.name(Dimension.KIND) == SpecKind.SOFTMAX.value else 1
        return planes * self.number(Dimension.KEY_HEADS) * self.number(Dimension.HEAD_DIM)

    @property
    def _pool_bytes(self) -> int:
        """The size of the pool with elements of four bytes."""
        slots = self.num_pages * self.number(Dimension.PAGE_SIZE)
        return 4 * slots * self._entry_size * self.number(Dimension.LAYERS)

    @property
    def _is_composed(self) -> bool:
        """True for features with which backends materialise scores, which takes more time."""
        return bool(self.features & _COMPOSED) or self.name(Dimension.MASK) == MaskKind.TREE.value

    @cached_property
    def _num_entries(self) -> int:
        return sum(count * (context + new) for (context, new), count in self._alike.items())

    @property
    def _is_index(self) -> bool:
        return self.name(Dimension.KIND) == SpecKind.INDEX.value

    @property
    def _is_recurrent(self) -> bool:
        return self.name(Dimension.KIND) in _KEEPING_KINDS

    @property
    def _is_compressed(self) -> bool:
        return self.name(Dimension.KIND) in _COMPRESSED_KINDS

    @property
    def state_size(self) -> int:
        """Elements of a state in one layer, without the tail of a convolution that is not alone."""
        if self.name(Dimension.KIND) == SpecKind.CONVOLUTION.value:
            return self.number(Dimension.HEAD_DIM) * self.number(Dimension.CONV_WIDTH)
        if self._is_compressed:
            return self.number(Dimension.HEAD_DIM) * (9 + self.number(Dimension.WINDOW))
        return self.num_q_heads * self.number(Dimension.HEAD_DIM) * self.number(Dimension.VALUE_DIM)

    @property
    def states_per_row(self) -> int:
        """The state that a row reads, and those that it writes."""
        return 1 + (MOST_GUESSES if self.name(Dimension.KEPT) == KeptStates.GUESSES.value else 1) + self.goes_on

    @property
    def max_checkpoints(self) -> int:
        return sum(len(row.checkpoints) for row in self.rows)

    @property
    def num_state_rows(self) -> int:
        """The rows of the case, of padding and of the steps before and beside it."""
        return len(self.lengths) + self.padding[0] + (2 * len(OTHERS) if self.has_others else 0)

    @cached_property
    def _state_seconds(self) -> float:
        """The estimated time of a case of layers with states."""
        layers, compared, tokens = len(self.run_layers()), len(self.compared_layers()), self.num_tokens
        slots = 1 + self.num_state_rows * self.states_per_row + self.max_checkpoints
        pool = 4 * slots * self.state_size * self.number(Dimension.LAYERS)
        oracle = tokens * (1.5e-4 + 2e-8 * self.state_size)
        if self._is_compressed:
            oracle += self._num_entries * (1.5e-4 / max(1, self.number(Dimension.RATIO)) + 2e-8 * self._entry_size)
            # A page takes about as long as so many bytes.
            pool += self._pool_bytes * self.needed_pages // self.num_pages + 600 * self.num_pages
        # Only the last layer is compared for all of many rows.
        compared_whole = 1 + (compared - 1) * min(1.0, 24 / len(self.lengths))
        computed = self._layer_seconds * layers + oracle * compared_whole
        steps = 1 + self.has_others + self.goes_on
        too_large = pool / 1e8 if pool > min(self.most_pool_bytes, _MOST_STATE_BYTES) else 0.0
        return 0.008 * steps + computed * (1 + self.goes_on) + 4e-9 * pool + too_large

    @cached_property
    def _layer_seconds(self) -> float:
        """The estimated time of one layer, without the oracle."""
        if self._is_compressed:
            read = self.number(Dimension.HEAD_DIM) * (self.num_q_heads + 4)
            ratio = max(1, self.number(Dimension.RATIO))
            keys = self.num_tokens * (self.number(Dimension.WINDOW) + self.main_len / ratio)
            return 3e-3 + 3e-4 * len(self.lengths) + 1e-9 * read * keys + 4e-9 * len(self.lengths) * self.state_size
        if self._is_recurrent:
            return 1e-3 + 1e-4 * len(self.lengths) + 1.5e-8 * self.num_tokens * self.state_size
        size, heads = self.number(Dimension.HEAD_DIM), self.num_q_heads
        scores = sum(count * new * (context + new) for (context, new), count in self._alike.items())
        entries = self._num_entries
        if self._is_index:
            return 1e-3 + 2e-4 * len(self.lengths) + scores * (5e-10 * heads * size + 4e-8) + 4e-8 * entries * size
        if self.top_k is not None and self.main_len > self.top_k:
            read = self.num_tokens * self.top_k
            return 1e-3 + 2e-4 * len(self.lengths) + read * (2.5e-10 * heads * (2 * size + 90) + 4e-9 * size)
        made = size * size // 8 * heads if self.name(Dimension.KIND) == SpecKind.LATENT.value else 0
        arithmetic = 2.5e-10 * (scores * heads * (2 * size + (90 if self._is_composed else 20)) + entries * made)
        moved = 4e-8 * (entries * self._entry_size + self.num_tokens * heads * size)
        return 1e-3 + 2e-4 * len(self.lengths) + arithmetic + moved

    @cached_property
    def seconds(self) -> float:
        """The estimated time on one core."""
        if self._is_recurrent:
            return self._state_seconds
        layers, compared = len(self.run_layers()), len(self.compared_layers())
        size, heads = self.number(Dimension.HEAD_DIM), self.num_q_heads
        made = 0.0
        if self.name(Dimension.KIND) == SpecKind.LATENT.value:
            made = 1e-10 * size * size * heads * self.main_len
        if self.top_k is not None:
            # The oracle ranks the entries of every query, and draws choices of all of them.
            made += 2e-6 * self.main_len + 2e-7 * self.num_tokens * self.main_len
        oracle = compared * (3e-9 * self._num_entries * heads * size + 1e-3 * min(len(self.lengths), 32) + made)
        filled = self._pool_bytes * self.needed_pages // self.num_pages
        # Added time keeps cases away from pools for which a machine may not have the memory.
        too_large = self._pool_bytes / 1e8 if self._pool_bytes > self.most_pool_bytes else 0.0
        pool = 2e-6 * self.num_pages + 1.5e-9 * filled + too_large
        steps = 1 + self.has_others + self.goes_on
        return 0.008 * steps + layers * self._layer_seconds * (1 + self.goes_on) + oracle * (1 + self.goes_on) + pool
