"""What follows from the rows of a step for their tokens: positions, which tokens have logits, which are still chosen.

Knows rows as columns of facts. Does not know tensors of a batch or pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from sightline.core.errors import BatchError
from sightline.core.lengths import checked_positions


class TokenMask(Protocol):
    """A row's mask, as far as positions depend on it."""

    @property
    def tree(self) -> Tensor | None: ...


class WorkColumns(Protocol):
    """The facts of all rows, as `StepWork` has them."""

    @property
    def tokens(self) -> Sequence[Sequence[int]]: ...
    @property
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def context_lens(self) -> Sequence[int]: ...
    @property
    def num_logits(self) -> Sequence[int]: ...
    @property
    def masks(self) -> Sequence[TokenMask]: ...
    @property
    def positions(self) -> Sequence[Sequence[int] | None]: ...
    @property
    def unread(self) -> Sequence[int | None]: ...


class TokenFacts(NamedTuple):
    """Facts about tokens that follow from their rows, row after row."""

    tokens: Sequence[int]
    positions: Sequence[int]
    unread_places: tuple[int, ...]
    """The indices of the tokens that the host does not know."""
    unread: tuple[int, ...]
    """The index in `chosen` of each of these tokens."""
    logit_places: tuple[int, ...]
    logit_rows: tuple[int, ...]


def token_facts(work: WorkColumns, num_causal: int) -> TokenFacts:
    """The facts of the rows' tokens; `num_causal` rows have a causal mask."""
    count, unread = len(work.query_lens), work.unread
    ones = (work.query_lens.count(1), work.num_logits.count(1), num_causal, work.positions.count(None))
    if ones != (count,) * 4 or min(work.context_lens, default=0) < 0:
        return _flattened(work)
    # The usual step, which may have hundreds of rows.
    every, chosen = tuple(range(count)), tuple([place for place in unread if place is not None])
    if len(chosen) == count:
        return TokenFacts((0,) * count, work.context_lens, every, chosen, every, every)
    tokens = [each[0] if each else 0 for each in work.tokens]
    places = tuple([index for index, place in enumerate(unread) if place is not None])
    return TokenFacts(tokens, work.context_lens, places, chosen, every, every)


def _flattened(work: WorkColumns) -> TokenFacts:
    """The facts of rows of any kinds. Raises `BatchError` if they contradict each other."""
    tokens: list[int] = []
    positions: list[int] = []
    logit_places: list[int] = []
    logit_rows: list[int] = []
    unread: list[int] = []
    unread_places: list[int] = []
    for index, query_len in enumerate(work.query_lens):
        num_logits, context_len, source = work.num_logits[index], work.context_lens[index], work.unread[index]
        if not 0 <= num_logits <= query_len:
            raise BatchError("num_logits", index, f"0 to {query_len}, the number of its new tokens", num_logits)
        if context_len < 0:
            raise BatchError("context_lens", index, "at least 0", context_len)
        tokens += work.tokens[index]
        if source is not None:
            unread.append(source)
            unread_places.append(len(tokens))
            tokens.append(0)
        tree, given = work.masks[index].tree, work.positions[index]
        positions += checked_positions(index, tree, given, context_len, query_len)
        logit_places += range(len(tokens) - num_logits, len(tokens))
        logit_rows += [index] * num_logits
    chosen = (tuple(unread_places), tuple(unread))
    return TokenFacts(tokens, positions, *chosen, tuple(logit_places), tuple(logit_rows))
