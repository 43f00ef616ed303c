"""The masks and scores of an extend launch, as plain values. Does not know kernels."""

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class LaunchMask(IntEnum):
    """The mask of a launch, or, but for `BY_ROW`, of one row."""

    CAUSAL = 0
    """Query i of n sees the keys up to index num_keys - n + i."""
    FULL = 1
    """Every query sees every key."""
    TREE = 2
    """A query sees the context, and the new tokens that the row's tree allows. Not for a whole launch."""
    BY_ROW = 3
    """Each row has its own mask. Not for a row."""
    CONTEXT = 4
    """A query sees the context and no new token."""


@dataclass(frozen=True, eq=False)
class ExtendMasks:
    """The masks of a launch."""

    kind: LaunchMask
    row_kinds: Tensor | None = None
    """[num_rows] int8, for `BY_ROW`: the `LaunchMask` of each row."""
    trees: Tensor | None = None
    """[any] uint8, if a row may be a `TREE`: masks [query_len, query_len], 1 where query i sees new token j."""
    tree_offsets: Tensor | None = None
    """[num_rows] int64, with `trees`: the start of each tree row's mask."""
    positions: Tensor | None = None
    """[num_tokens] int64, with `trees`: the position of each token, by which a window measures distance."""

    def __post_init__(self) -> None:
        if self.kind is LaunchMask.TREE:
            raise ValueError("expected another mask for a launch, got TREE; give row_kinds and trees")
        if (self.kind is LaunchMask.BY_ROW) != (self.row_kinds is not None):
            raise ValueError(f"expected row_kinds exactly for BY_ROW, got {self.kind.name}")
        with_trees = {each is not None for each in (self.trees, self.tree_offsets, self.positions)}
        if len(with_trees) != 1 or (self.trees is not None and self.row_kinds is None):
            raise ValueError("expected trees, tree_offsets and positions together, with row_kinds, or none of them")


CAUSAL_ROWS = ExtendMasks(LaunchMask.CAUSAL)
FULL_ROWS = ExtendMasks(LaunchMask.FULL)
CONTEXT_ROWS = ExtendMasks(LaunchMask.CONTEXT)


@dataclass(frozen=True)
class ScoreRule:
    """How a score is computed from a query and a key."""

    scale: float
    """More than 0."""
    softcap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    window: int | None = None
    """A query sees keys less than `window` positions away."""

    def __post_init__(self) -> None:
        if not self.scale > 0.0:
            raise ValueError(f"expected a scale above 0, got {self.scale}")
