"""The choice of the highest scores, exactly, with ties in the order of places, without atomics.

    sample      every n-th score of a query: a bound that few more scores reach than are wanted
    count       how many scores of each segment reach the bound
    gather      those that do, side by side in the order of their places
    choose      the highest of them, from the registers of one program

A program that chooses halves the values between the lowest and the highest score until as many as are wanted are above,
which needs no memory: all scores are in registers. If the sample was misleading, because many scores are equal or lie
in the rhythm of the sample, too many or too few reach the bound. The program then does the same over all scores of its
query, which it reads again for each halving: right, and slow. Queries with few scores need no bound and one launch.

Launches depend on the most scores that a query may have, never on how many it has. Does not know who scores what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

SEGMENT = 2048
"""Scores of which a program gathers the best."""
AT_ONCE = 1 << 13
"""Scores that a program chooses from directly: the registers of one multiprocessor hold them with room to compute."""
_LEAST_CAPACITY, _MOST_CAPACITY = 1 << 12, 1 << 14
_LEAST_SAMPLE, _MOST_SAMPLE = 1 << 11, 1 << 14
_APART = 16
"""One in so many scores is in the sample, if they are neither very few nor very many."""
_MANY_KEYS = _APART * _MOST_SAMPLE
"""With more keys, a sample says less, and more scores than usual may reach the bound."""
_PER_THREAD = 16


@dataclass(frozen=True)
class ChoiceConfig:
    """The sizes of a choice."""

    top_k: int
    most_keys: int
    """No query has more."""
    at_once: int
    """A query with at most so many keys needs one launch: a power of two."""
    capacity: int
    """Scores that are gathered to choose from: a power of two."""
    segment: int
    """Scores of a segment: a power of two."""
    sample: int
    """Scores of a sample: a power of two."""

    @staticmethod
    def of(top_k: int, most_keys: int, at_once: int = AT_ONCE) -> ChoiceConfig:
        """The sizes for queries that see up to `most_keys` keys."""
        few = top_k if most_keys <= _MANY_KEYS else 2 * top_k
        capacity = max(_LEAST_CAPACITY, min(triton.next_power_of_2(2 * few), _MOST_CAPACITY))
        sample = max(_LEAST_SAMPLE, min(triton.next_power_of_2(most_keys // _APART), _MOST_SAMPLE))
        return ChoiceConfig(top_k, max(most_keys, 1), at_once, min(capacity, at_once), SEGMENT, min(sample, at_once))

    @property
    def is_direct(self) -> bool:
        """True if a program holds all scores of a query."""
        return self.most_keys <= self.at_once

    @property
    def segments(self) -> int:
        """Segments of a query."""
        return triton.cdiv(self.most_keys, self.segment)


@dataclass(frozen=True, eq=False)
class ChoiceRoom:
    """Scratch memory of a choice that is not direct."""

    bounds: Tensor
    """[queries] int32: what the best scores reach, see `_ordered`."""
    reaching: Tensor
    """[queries, segments] int32: how many scores of each segment reach it."""
    scores: Tensor
    """[queries, capacity] int32: those scores, see `_ordered`."""
    places: Tensor
    """[queries, capacity] int32: their places."""

    @staticmethod
    def of(config: ChoiceConfig, queries: int, take: Callable[[str, tuple[int, ...]], Tensor]) -> ChoiceRoom:
        """The room for so many queries. `take` returns int32 memory of a name and a shape."""
        held = 0 if config.is_direct else config.capacity
        return ChoiceRoom(
            bounds=take("bounds", (queries,)),
            reaching=take("reaching", (queries, config.segments)),
            scores=take("best scores", (queries, held)),
            places=take("best places", (queries, held)),
        )

    def part(self, queries: int) -> ChoiceRoom:
        """The room of the first queries."""
        return ChoiceRoom(self.bounds[:queries], self.reaching[:queries], self.scores[:queries], self.places[:queries])


def choose_places(
    scores: Tensor,
    tokens: Tensor,
    counts: Tensor,
    room: ChoiceRoom | None,
    out: Tensor,
    config: ChoiceConfig,
    *,
    overlaps: bool = False,
) -> None:
    """Writes the places of the highest of each query's scores to its token's row of `out` [num_tokens, top_k] int32, in
    increasing order, -1 behind the last.

    scores [queries, most keys] fp32; `counts` [queries] int32 says how many each query has, and `tokens` [queries]
    int32 which token it is, -1 if none. Of equal scores those at lower places are chosen; -0.0 equals 0.0, and NaN
    counts as infinity. `room` is needed unless the choice is direct.
    """
    queries = tokens.shape[0]
    if queries == 0:
        return
    launch, block, segments = overlap_settings(overlaps), config.capacity, triton.next_power_of_2(config.segments)
    if config.is_direct:
        room, block = None, max(16, triton.next_power_of_2(config.most_keys))
    elif room is None:
        raise ValueError(f"expected room to choose among {config.most_keys} keys, got none")
    else:
        stride, in_block = scores.stride(0), {"SEGMENT": config.segment, "num_warps": _warps(config.segment)}
        _bound_scores[(queries,)](
            scores, tokens, counts, room.bounds, stride, TOP_K=config.top_k, SAMPLE=config.sample,
            CAPACITY=config.capacity, num_warps=_warps(config.sample), **launch,
        )  # fmt: skip
        _count_reaching[(config.segments, queries)](
            scores, tokens, counts, room.bounds, room.reaching, stride, room.reaching.stride(0), **in_block, **launch
        )
        _gather_reaching[(config.segments, queries)](
            scores, tokens, counts, room.bounds, room.reaching, room.scores, room.places,
            stride, room.reaching.stride(0), room.scores.stride(0),
            CAPACITY=config.capacity, SEGMENTS=segments, **in_block, **launch,
        )  # fmt: skip
    _choose_places[(queries,)](
        scores, tokens, counts, *((None,) * 3 if room is None else (room.reaching, room.scores, room.places)), out,
        config.segments, scores.stride(0),
        *((0, 0) if room is None else (room.reaching.stride(0), room.scores.stride(0))),
        TOP_K=config.top_k, FILL=triton.next_power_of_2(config.top_k), SEGMENTS=segments, BLOCK=block,
        DIRECT=room is None, num_warps=_warps(block), **launch,
    )  # fmt: skip


def _warps(block: int) -> int:
    return min(32, max(1, block // (32 * _PER_THREAD)))


@triton.jit
def _ordered(scores, there):
    """Integers in the order of the scores: NaN counts as infinity, both zeros are equal, missing scores are lowest."""
    scores = tl.where(scores == scores, scores, float("inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(there, ordered, -0x80000000)


@triton.jit
def _running_sum(numbers, BLOCK: tl.constexpr):
    """The sum of a block's numbers up to each. A warp sums rows by itself, and warps exchange only their totals."""
    COLUMNS: tl.constexpr = 32 if BLOCK > 32 else BLOCK  # noqa: FURB136
    rows = tl.reshape(numbers, (BLOCK // COLUMNS, COLUMNS))
    totals = tl.sum(rows, 1)
    before = tl.cumsum(totals, 0) - totals
    return tl.reshape(tl.cumsum(rows, 1) + before[:, None], (BLOCK,))


@triton.jit
def _halved(ordered, there, size, least, most):
    """A threshold that between `least` and `most` scores reach, or the value of the last one that is wanted.

    Also returns how many scores reach it, and how many are known to be above.
    """
    # Differences of 32-bit numbers take 33 bits.
    low = tl.min(tl.where(there, ordered, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(ordered, 0).to(tl.int64) + 1
    reached, above = size, tl.zeros([], tl.int32)
    while (reached > most) & (high - low > 1):
        middle = (low + high) >> 1
        found = tl.sum((ordered >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = found >= least
        low, reached = tl.where(enough, middle, low), tl.where(enough, found, reached)
        high, above = tl.where(enough, high, middle), tl.where(enough, above, found)
    return low.to(tl.int32), reached, above


# Strides of unknown alignment keep a thread from loading four scores at once: the places of chosen ones are stored one
# by one, and all addresses would be exchanged between threads first.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["tokens", "counts"])
def _bound_scores(
    scores, tokens, counts, bounds, stride,
    TOP_K: tl.constexpr, SAMPLE: tl.constexpr, CAPACITY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program finds the bound of a query."""
    query = tl.program_id(0).to(tl.int64)
    wait_for_previous(OVERLAPS)
    token, count = tl.load(tokens + query), tl.load(counts + query)
    if token < 0:
        return
    bound = tl.full([], -0x80000000, tl.int32)
    if count > CAPACITY:
        apart = (count + SAMPLE - 1) // SAMPLE
        place = tl.arange(0, SAMPLE) * apart
        there = place < count
        size = (count + apart - 1) // apart
        ordered = _ordered(tl.load(scores + query * stride + place, mask=there, other=0.0), there)
        # How many of the sample are wanted, and four standard deviations more.
        expected = TOP_K / apart.to(tl.float32)
        least = tl.minimum((expected + 4.0 * tl.sqrt(expected) + 4.0).to(tl.int32), size)
        bound, _, _ = _halved(ordered, there, size, least, least + least // 8)
    tl.store(bounds + query, bound)


@triton.jit(
    do_not_specialize=["stride", "reaching_stride"], do_not_specialize_on_alignment=["tokens", "counts", "bounds"]
)
def _count_reaching(
    scores, tokens, counts, bounds, reaching, stride, reaching_stride, SEGMENT: tl.constexpr, OVERLAPS: tl.constexpr
):
    """A program counts the scores of a segment that reach the bound."""
    segment, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(OVERLAPS)
    if tl.load(tokens + query) < 0:
        return
    place = segment * SEGMENT + tl.arange(0, SEGMENT)
    there = place < tl.load(counts + query)
    ordered = _ordered(tl.load(scores + query * stride + place, mask=there, other=0.0), there)
    reaches = there & (ordered >= tl.load(bounds + query))
    tl.store(reaching + query * reaching_stride + segment, tl.sum(reaches.to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["stride", "reaching_stride", "room_stride"],
    do_not_specialize_on_alignment=["tokens", "counts", "bounds"],
)
def _gather_reaching(
    scores, tokens, counts, bounds, reaching, best, places, stride, reaching_stride, room_stride,
    CAPACITY: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program puts the scores of a segment that reach the bound behind those of the segments before."""
    segment, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(OVERLAPS)
    if tl.load(tokens + query) < 0:
        return
    earlier = tl.arange(0, SEGMENTS)
    before = tl.sum(tl.load(reaching + query * reaching_stride + earlier, mask=earlier < segment, other=0), 0)
    place = segment * SEGMENT + tl.arange(0, SEGMENT)
    there = place < tl.load(counts + query)
    ordered = _ordered(tl.load(scores + query * stride + place, mask=there, other=0.0), there)
    reaches = there & (ordered >= tl.load(bounds + query))
    at = before + _running_sum(reaches.to(tl.int32), SEGMENT) - 1
    has_room = reaches & (at < CAPACITY)
    tl.store(best + query * room_stride + at, ordered, mask=has_room)
    tl.store(places + query * room_stride + at, place, mask=has_room)


@triton.jit
def _write_chosen(row, at, place, ordered, there, threshold, reached, above, wanted, BLOCK: tl.constexpr):
    """Writes the places of a block's chosen scores from `at` on, where `above` says how many are above the threshold.

    Returns how many are chosen, and how many of them equal the threshold.
    """
    chosen = (there & (ordered >= threshold)).to(tl.int32)
    num_equal = tl.zeros([], tl.int32)
    if reached != wanted:
        # More scores equal the last chosen one than there is room for.
        equal = (there & (ordered == threshold)).to(tl.int32)
        fits = (_running_sum(equal, BLOCK) <= wanted - above).to(tl.int32)
        chosen = chosen - equal + equal * fits
        num_equal = tl.sum(equal * fits, 0)
    tl.store(row + at + _running_sum(chosen, BLOCK) - 1, place, mask=chosen > 0)
    return tl.sum(chosen, 0), num_equal


@triton.jit(
    do_not_specialize=["segments", "stride", "reaching_stride", "room_stride"],
    do_not_specialize_on_alignment=["tokens", "counts"],
)
def _choose_places(
    scores, tokens, counts, reaching, best, places, out, segments, stride, reaching_stride, room_stride,
    TOP_K: tl.constexpr, FILL: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, DIRECT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program chooses for one query."""
    query = tl.program_id(0).to(tl.int64)
    wait_for_previous(OVERLAPS)
    token, count = tl.load(tokens + query), tl.load(counts + query)
    if token < 0:
        return
    wanted = tl.minimum(count, TOP_K)
    row, index = out + token.to(tl.int64) * TOP_K, tl.arange(0, BLOCK)
    own, none = scores + query * stride, tl.zeros([], tl.int32)
    size = count
    if not DIRECT:
        segment = tl.arange(0, SEGMENTS)
        size = tl.sum(tl.load(reaching + query * reaching_stride + segment, mask=segment < segments, other=0), 0)
    if (size <= BLOCK) & (size >= wanted):
        there = index < size
        place = index
        if DIRECT:
            ordered = _ordered(tl.load(own + index, mask=there, other=0.0), there)
        else:
            place = tl.load(places + query * room_stride + index, mask=there, other=0)
            ordered = tl.load(best + query * room_stride + index, mask=there, other=-0x80000000)
        threshold, reached, above = _halved(ordered, there, size, wanted, wanted)
        _write_chosen(row, none, place, ordered, there, threshold, reached, above, wanted, BLOCK)
    else:
        low, high = tl.full([], 0x7FFFFFFF, tl.int64), tl.full([], -0x80000000, tl.int64)
        for start in range(0, count, BLOCK):
            there = start + index < count
            ordered = _ordered(tl.load(own + start + index, mask=there, other=0.0), there)
            low = tl.minimum(low, tl.min(tl.where(there, ordered, 0x7FFFFFFF), 0).to(tl.int64))
            high = tl.maximum(high, tl.max(ordered, 0).to(tl.int64) + 1)
        reached, above = count, none
        while (reached > wanted) & (high - low > 1):
            middle = (low + high) >> 1
            found = none
            for start in range(0, count, BLOCK):
                there = start + index < count
                ordered = _ordered(tl.load(own + start + index, mask=there, other=0.0), there)
                found += tl.sum((ordered >= middle.to(tl.int32)).to(tl.int32), 0)
            enough = found >= wanted
            low, reached = tl.where(enough, middle, low), tl.where(enough, found, reached)
            high, above = tl.where(enough, high, middle), tl.where(enough, above, found)
        done, equal_done = none, none
        for start in range(0, count, BLOCK):
            there = start + index < count
            ordered = _ordered(tl.load(own + start + index, mask=there, other=0.0), there)
            chosen, equal = _write_chosen(
                row, done, start + index, ordered, there, low.to(tl.int32), reached, above + equal_done, wanted, BLOCK
            )
            done, equal_done = done + chosen, equal_done + equal
    behind = tl.arange(0, FILL)
    tl.store(row + behind, tl.full([FILL], -1, tl.int32), mask=(behind >= wanted) & (behind < TOP_K))
