"""Dimensions: the ways in which steps, specs and groups differ, and which of their values can occur together.

Knows numbers and names. Does not know what was proven, nor how a case is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Dimension(Enum):
    """One way in which two steps, specs or groups can differ."""

    ROWS = "rows"
    NEW_TOKENS = "new tokens of a row"
    CONTEXT = "context of a row"
    STEP_TOKENS = "tokens of a step"
    LAYERS = "layers of a group"
    KEY_HEADS = "key heads"
    WINDOW = "window"
    """Present only in cases that have a window; `FEATURES` says which do."""
    POOL_SLOTS = "slots of a pool"
    KIND = "kind of attention"
    GROUP_SIZE = "query heads on a key head"
    HEAD_DIM = "head dimension"
    VALUE_DIM = "value dimension"
    CONV_WIDTH = "tokens of the convolution"
    """0 if there is none."""
    UNIT_KEYS = "keys of unit length"
    TOP_K = "chosen tokens"
    """0 if a query attends to all that it sees."""
    RATIO = "tokens of an entry"
    """0 if a layer of compressed attention has no entries."""
    OVERLAP = "entries that overlap"
    PAGE_SIZE = "page size"
    DTYPE = "dtype"
    CACHE_DTYPE = "cache dtype"
    FEATURES = "features"
    """Features of the spec and the step, except masks: see `features_name`."""
    MASK = "mask"
    POLICY = "cache policy"
    SHARING = "pages shared between rows"
    PAGE_ORDER = "order of pages"
    """`in order` also for rows of at most two pages: orders only differ from three pages on."""
    KEPT = "states kept"
    SLOT_ORDER = "order of state slots"
    PADDING = "padding"
    REUSE = "steps planned before on the same backend"
    COMPANY = "rows beside the longest"
    LANE = "lane"

    __hash__ = object.__hash__  # Enum.__hash__ is slow, and millions of points are looked up

    @property
    def is_scale(self) -> bool:
        return self in _SCALES


_SCALES = frozenset(
    {
        Dimension.ROWS,
        Dimension.NEW_TOKENS,
        Dimension.CONTEXT,
        Dimension.STEP_TOKENS,
        Dimension.LAYERS,
        Dimension.KEY_HEADS,
        Dimension.WINDOW,
        Dimension.POOL_SLOTS,
    }
)


class Sharing(Enum):
    """Values of `Dimension.SHARING`."""

    NONE = "none"
    PREFIX = "prefix"
    """Rows share the pages of a prefix."""


class KeptStates(Enum):
    """Values of `Dimension.KEPT`."""

    LAST = "of last tokens"
    """The state behind each row's last token alone."""
    CHECKPOINTS = "checkpoints"
    """States behind tokens inside a row too, for others to continue."""
    GUESSES = "of guesses"
    """The states behind the last tokens of a row, each of which may turn out to be the last one accepted."""


class Padding(Enum):
    """Values of `Dimension.PADDING`."""

    NONE = "none"
    PADDED = "padded"
    """With padding rows or tokens."""


class Reuse(Enum):
    """Values of `Dimension.REUSE`."""

    FIRST = "first"
    """The first step that the backend plans."""
    AFTER_OTHERS = "after others"
    """Steps of other rows were planned before it."""
    AGAIN = "planned again"
    """The step was planned, then another, then this one again."""
    GOES_ON = "goes on"
    """The rows read what an earlier step of theirs wrote."""


class Company(Enum):
    """Values of `Dimension.COMPANY`."""

    ALONE = "alone"
    SHORTER = "shorter"
    """Alongside rows with no more context and no more new tokens."""
    SAME = "same"
    """All rows of a step have the same lengths."""


class LaneUse(Enum):
    """Values of `Dimension.LANE`."""

    MAIN = "main"
    SECOND = "second"
    """In a lane other than the main one, with a live plan in each."""


PLAIN_FEATURES = "plain"
IN_ORDER = "in order"
WITHOUT_CACHE = "transient"
CHOOSES = "sparse"
"""The feature without which `Dimension.TOP_K` is 0."""


def features_name(names: Iterable[str]) -> str:
    """The value of `Dimension.FEATURES`: the names sorted and joined by `+`, or `plain`."""
    return "+".join(sorted(names)) or PLAIN_FEATURES


Value: TypeAlias = int | str
Point: TypeAlias = Mapping[Dimension, Value]
"""One case. Dimensions that the case lacks, such as the window of a spec without one, are absent."""


@dataclass(frozen=True)
class Span:
    """Numbers from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"expected a span from low to high, got {self.low} to {self.high}")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


_NEVER_MEET: tuple[frozenset[tuple[Dimension, Value]], ...] = tuple(
    frozenset(pair)
    for pair in (
        ((Dimension.POLICY, WITHOUT_CACHE), (Dimension.SHARING, Sharing.PREFIX.value)),
        ((Dimension.POLICY, WITHOUT_CACHE), (Dimension.REUSE, Reuse.GOES_ON.value)),
        ((Dimension.COMPANY, Company.ALONE.value), (Dimension.SHARING, Sharing.PREFIX.value)),
        ((Dimension.POLICY, WITHOUT_CACHE), (Dimension.KEPT, KeptStates.CHECKPOINTS.value)),
        ((Dimension.POLICY, WITHOUT_CACHE), (Dimension.KEPT, KeptStates.GUESSES.value)),
    )
)


_ORDERS = (Dimension.PAGE_ORDER, Dimension.SLOT_ORDER)


def is_sparse(features: Value) -> bool:
    """True if a value of `Dimension.FEATURES` says that queries attend to chosen tokens."""
    return CHOOSES in str(features).split("+")


def can_meet(one: tuple[Dimension, Value], two: tuple[Dimension, Value]) -> bool:
    """False if no step can have both values at once."""
    if {one[0], two[0]} == {Dimension.FEATURES, Dimension.TOP_K}:
        features, top_k = (one[1], two[1]) if one[0] is Dimension.FEATURES else (two[1], one[1])
        return is_sparse(features) == (int(top_k) > 0)
    if {one[0], two[0]} == {Dimension.RATIO, Dimension.PAGE_SIZE}:
        small, large = sorted((int(one[1]), int(two[1])))
        return small == 0 or large % small == 0
    ordered = any(
        a == (Dimension.POLICY, WITHOUT_CACHE) and b[0] in _ORDERS and b[1] != IN_ORDER
        for a, b in ((one, two), (two, one))
    )
    return not ordered and frozenset((one, two)) not in _NEVER_MEET


def possible_span(
    dimension: Dimension, value: Value, scale: Dimension, scales: Mapping[Dimension, Span]
) -> Span | None:
    """The part of a scale's span that steps with that value can have; None if there is none.

    A shared prefix, and an order of pages, need whole pages, and their length depends on the page size; so only the far
    end of a context span is required.
    """
    span = scales[scale]
    match dimension, scale:
        case Dimension.COMPANY, Dimension.ROWS if value == Company.ALONE.value:
            return Span(1, 1) if span.low <= 1 else None
        case Dimension.COMPANY, _ if value == Company.SHORTER.value:
            return _from(_least_beside_shorter(scale, scales), span)
        case Dimension.COMPANY | Dimension.SHARING, Dimension.ROWS | Dimension.STEP_TOKENS:
            needs_two = value not in (Company.ALONE.value, Sharing.NONE.value)
            return _from(2, span) if needs_two else span
        case Dimension.POLICY, Dimension.CONTEXT if value == WITHOUT_CACHE:
            return Span(0, 0) if span.low <= 0 else None
        case Dimension.REUSE, Dimension.CONTEXT if value == Reuse.GOES_ON.value:
            return _from(1, span)
        case Dimension.SHARING, Dimension.CONTEXT if value == Sharing.PREFIX.value:
            return Span(span.high, span.high) if span.high > 0 else None
        case Dimension.PAGE_ORDER, Dimension.CONTEXT if value != IN_ORDER:
            return Span(span.high, span.high) if span.high > 0 else None
        case Dimension.KEPT, Dimension.NEW_TOKENS | Dimension.STEP_TOKENS if value != KeptStates.LAST.value:
            return _from(2, span)
        case Dimension.FEATURES, Dimension.WINDOW if "window" not in str(value).split("+"):
            return None
        case _:
            return span


def _least_beside_shorter(scale: Dimension, scales: Mapping[Dimension, Span]) -> int:
    """The least value of the scale in a step in which some row is shorter than the longest.

    No row can be shorter than one new token without context: if rows have no context, the longest has two new tokens;
    if they have one new token, it has a context.
    """
    new, context = scales.get(Dimension.NEW_TOKENS), scales.get(Dimension.CONTEXT)
    is_fresh = context is not None and context.high == 0
    match scale:
        case Dimension.ROWS:
            return 2
        case Dimension.STEP_TOKENS:
            return 3 if is_fresh else 2
        case Dimension.NEW_TOKENS if is_fresh:
            return 2
        case Dimension.CONTEXT if new is not None and new.high == 1:
            return 1
        case _:
            return scales[scale].low


def _from(least: int, span: Span) -> Span | None:
    """The part of a span from `least` upwards, or None."""
    return Span(max(least, span.low), span.high) if span.high >= least else None
