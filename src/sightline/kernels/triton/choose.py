"""The choice of the highest scores, exactly, with ties in the order of places, without atomics.

A program holds a segment of a query's scores in registers and finds the value of the last one that is chosen bit by
bit: it counts the scores that are at least so large, which needs no memory. Then it writes the chosen ones side by side
in the order of their places. A query with more scores than a segment has takes several levels: the best of all segments
are the candidates of the next, in the same order, so that equal scores are still chosen from the lowest place on.

    scores      |---- segment 0 ----|---- segment 1 ----|-- segment 2 --|
    candidates  |-- top_k --|-- top_k --|-- top_k --|                        then the same again
    choice      |-- top_k --|

The scores of a query are read once. Candidates are top_k / segment of them, and take eight bytes each. Launches depend
on the most scores that a query may have, never on how many it has. Does not know who scores what.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 1 << 14
"""Scores of a segment: as many as the registers of one multiprocessor hold with room to compute."""
_PER_THREAD = 16


@dataclass(frozen=True)
class ChoiceConfig:
    """The levels of a choice."""

    top_k: int
    segment: int
    """Scores of a segment: a power of two, at least twice `top_k` if there are several segments."""
    sizes: tuple[int, ...]
    """The most candidates of each level, the scores themselves being the first."""

    @staticmethod
    def of(top_k: int, most_keys: int, segment: int = SEGMENT) -> "ChoiceConfig":
        """The levels for queries that see up to `most_keys` keys."""
        segment, sizes = max(segment, triton.next_power_of_2(2 * top_k)), [max(most_keys, 1)]
        while sizes[-1] > segment:
            whole, rest = divmod(sizes[-1], segment)
            sizes.append(whole * top_k + min(rest, top_k))
        return ChoiceConfig(top_k, segment, tuple(sizes))


@dataclass(frozen=True, eq=False)
class Candidates:
    """The best of each segment of a level."""

    scores: Tensor
    """[queries, most candidates] fp32."""
    places: Tensor
    """[queries, most candidates] int32."""


def choose_places(
    scores: Tensor,
    tokens: Tensor,
    counts: Tensor,
    room: Sequence[Candidates],
    out: Tensor,
    config: ChoiceConfig,
) -> None:
    """Writes the places of the highest of each query's scores to its token's row of `out` [num_tokens, top_k] int32, in
    increasing order, -1 behind the last.

    scores [queries, most keys] fp32; `counts` [queries] int32 says how many each query has, and `tokens` [queries]
    int32 which token it is, -1 if none. Of equal scores those at lower places are chosen; -0.0 equals 0.0, and NaN
    counts as infinity. `room` has the candidates of each level behind the first.
    """
    queries = tokens.shape[0]
    if queries == 0:
        return
    found, places = scores, None
    for level, size in enumerate(config.sizes):
        segments = triton.cdiv(size, config.segment)
        kept = room[level] if level + 1 < len(config.sizes) else None
        block = max(16, triton.next_power_of_2(min(size, config.segment)))
        _choose_places[(segments, queries)](
            found, places, tokens, counts, out,
            None if kept is None else kept.scores, None if kept is None else kept.places,
            found.stride(0), 0 if kept is None else kept.scores.stride(0),
            TOP_K=config.top_k, FILL=triton.next_power_of_2(config.top_k), LEVEL=level, LAST=kept is None,
            SEGMENT=config.segment, BLOCK=block,
            num_warps=min(32, max(1, block // (32 * _PER_THREAD))),
        )  # fmt: skip
        if kept is not None:
            found, places = kept.scores, kept.places


@triton.jit
def _ordered(scores, there):
    """Integers in the order of the scores: NaN counts as infinity, both zeros are equal, missing scores are lowest."""
    scores = tl.where(scores == scores, scores, float("inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(there, ordered, -0x80000000)


@triton.jit
def _running_sum(numbers, BLOCK: tl.constexpr):
    """The sum of a segment's numbers up to each. A warp sums rows by itself, and warps exchange only their totals."""
    COLUMNS: tl.constexpr = 32 if BLOCK > 32 else BLOCK  # noqa: FURB136
    rows = tl.reshape(numbers, (BLOCK // COLUMNS, COLUMNS))
    totals = tl.sum(rows, 1)
    before = tl.cumsum(totals, 0) - totals
    return tl.reshape(tl.cumsum(rows, 1) + before[:, None], (BLOCK,))


# Strides of unknown alignment keep a thread from loading four scores at once: the places of chosen ones are stored one
# by one, and all addresses would be exchanged between threads first.
@triton.jit(do_not_specialize=["scores_stride", "kept_stride"], do_not_specialize_on_alignment=["tokens", "counts"])
def _choose_places(
    scores, places, tokens, counts, out, kept_scores, kept_places, scores_stride, kept_stride,
    TOP_K: tl.constexpr, FILL: tl.constexpr, LEVEL: tl.constexpr, LAST: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program chooses from one segment of one query."""
    segment, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, count = tl.load(tokens + query), tl.load(counts + query)
    is_done = token < 0
    for _ in tl.static_range(LEVEL):
        # An earlier level had room for all candidates.
        is_done = is_done | (count <= SEGMENT)
        count = count // SEGMENT * TOP_K + tl.minimum(count % SEGMENT, TOP_K)
    begin = segment * SEGMENT
    if is_done | ((begin >= count) & (segment > 0)):
        return
    size = tl.minimum(count - begin, SEGMENT)
    wanted = tl.minimum(size, TOP_K)
    in_segment = tl.arange(0, BLOCK)
    there = in_segment < size
    read = tl.load(scores + query * scores_stride + begin + in_segment, mask=there, other=0.0)
    ordered = _ordered(read, there)
    # Bit by bit, the largest threshold that enough scores reach. Every score reaches the first one.
    threshold = tl.full([], -0x80000000, tl.int32) + (size <= TOP_K).to(tl.int32)
    reached = tl.where(size <= TOP_K, size, BLOCK + 1)
    bit = tl.full([], 31, tl.int32)
    while (bit >= 0) & (reached != wanted):
        higher = threshold ^ (tl.full([], 1, tl.int32) << bit)
        reaching = tl.sum((ordered >= higher).to(tl.int32), 0)
        enough = reaching >= wanted
        threshold = tl.where(enough, higher, threshold)
        reached = tl.where(enough, reaching, reached)
        bit -= 1
    chosen = (ordered >= threshold).to(tl.int32)
    if reached != wanted:
        # More scores equal the last chosen one than there is room for.
        above = (ordered > threshold).to(tl.int32)
        equal = chosen - above
        chosen = above + equal * (_running_sum(equal, BLOCK) <= wanted - tl.sum(above, 0)).to(tl.int32)
    at = _running_sum(chosen, BLOCK) - 1
    is_chosen = chosen > 0
    place = begin + in_segment
    if LEVEL > 0:
        place = tl.load(places + query * scores_stride + begin + in_segment, mask=is_chosen, other=0)
    if LAST or count <= SEGMENT:
        row = out + token.to(tl.int64) * TOP_K
        tl.store(row + at, place, mask=is_chosen)
        behind = tl.arange(0, FILL)
        tl.store(row + behind, tl.full([FILL], -1, tl.int32), mask=(behind >= wanted) & (behind < TOP_K))
    else:
        kept = query * kept_stride + segment * TOP_K
        tl.store(kept_places + kept + at, place, mask=is_chosen)
        # Read again, so that no register holds them while thresholds are tried.
        best = tl.load(scores + query * scores_stride + begin + in_segment, mask=is_chosen, other=0.0)
        tl.store(kept_scores + kept + at, best, mask=is_chosen)
