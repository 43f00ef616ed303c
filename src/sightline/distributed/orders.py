"""What the leading rank tells the others: typed messages, in msgpack. Numbers only, so that a message is small.

Every order has a number; a rank refuses any but the next one. Tokens are not in an order: the device alone may know
them, so the collectives send them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sightline.core.errors import RankLostError


class PagesOfRow(msgspec.Struct, frozen=True, array_like=True):
    """The pages of a row from one place on, in a pool."""

    pool: int
    row: int
    first: int
    pages: Sequence[int]


class StatesOfRow(msgspec.Struct, frozen=True, array_like=True):
    """The slots of the states that a row of a step reads and writes."""

    read: int
    """The slot of the state behind its context; that of padding if it has none."""
    positions: Sequence[int]
    """The numbers of tokens behind which it writes a state."""
    slots: Sequence[int]


class TreeOfRow(msgspec.Struct, frozen=True, array_like=True):
    """The guesses of a row that are a tree."""

    index: int
    """The row's place in the step."""
    positions: Sequence[int]
    sees: Sequence[Sequence[int]]
    """For each token, the new tokens that it sees."""


class PartOrder(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of one replica compute in a step."""

    rows: Sequence[int]
    context_lens: Sequence[int]
    query_lens: Sequence[int]
    num_logits: Sequence[int]
    num_candidates: Sequence[int]
    padded_rows: int
    padded_tokens: int
    """The size of the step with padding, which all ranks agree on before they plan; 0 if there is nothing to do."""
    bucket: tuple[int, int] | None = None
    """The size of the bucket that it is run in, and its bound of new tokens in a row; None if it is run eagerly."""
    pages: Sequence[PagesOfRow] = ()
    """What changed since the last order."""
    states: Sequence[StatesOfRow] = ()
    """For each row, in a model that keeps states."""
    trees: Sequence[TreeOfRow] = ()


class StepOrder(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One step."""

    number: int
    parts: Sequence[PartOrder]
    """What each replica computes."""
    first_rows: int = 0
    """The rows of the first half of a step that is cut in two; 0 if it is not."""
    is_captured: bool = False
    """True if the step is recorded, so that later ones in its memory are replayed."""


class CopyOrder(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Copy the first entries of a page to another page."""

    number: int
    replica: int
    pool: str
    source: int
    target: int
    num_tokens: int


class MoveOrder(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Copy entries from slots to other slots."""

    number: int
    replica: int
    pool: str
    sources: Sequence[int]
    targets: Sequence[int]


class StopOrder(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The last order."""

    number: int


Order = StepOrder | CopyOrder | MoveOrder | StopOrder
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Order)


def packed(order: Order) -> bytes:
    """The message of an order."""
    return _encoder.encode(order)


def unpacked(message: bytes, number: int) -> Order:
    """The order of a message, which must have this number."""
    try:
        order: Order = _decoder.decode(message)
    except msgspec.DecodeError as error:
        raise RankLostError(f"expected an order of the leading rank, got other bytes: {error}") from error
    if order.number != number:
        raise RankLostError(
            f"expected order {number} of the leading rank, got order {order.number}: one was lost, or came twice"
        )
    return order
