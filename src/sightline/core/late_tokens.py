"""Tokens of a batch that an earlier step chooses after the batch was planned.

The steps of a draft are planned at once, before the first of them runs. The token of each later step is then unknown:
the step before it chooses it, on the device. It is filled in between the two steps, and a step whose tokens were not
filled in is refused.

Knows tensors and places in them. Does not know steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sightline.core.errors import BatchError
from sightline.core.lengths import Continued, put_chosen


class LateTokens:
    """The places of a batch's tokens that wait for a choice."""

    def __init__(self, tokens: Tensor, places: Tensor, sources: Tensor, continued: Continued, num_chosen: int) -> None:
        """`tokens` [num_tokens] int64 are the batch's. The token at `continued[0][i]` will be the chosen one at
        `continued[1][i]`; `places` and `sources` begin with the same numbers, on the device. `num_chosen` is how many
        tokens the earlier step chooses; 0 if the batch waits for none."""
        self._tokens = tokens
        self._places = places
        self._sources = sources
        self._continued = continued
        self._num_chosen = num_chosen
        self._is_filled = not (num_chosen and continued[0])

    def fill(self, chosen: Tensor) -> None:
        """Copies the tokens that the earlier step chose, [num_chosen] int64, into the batch's, in stream order.

        Raises `BatchError` if they are there already: a batch runs with one choice.
        """
        if self._is_filled:
            raise BatchError("tokens", None, "a batch that waits for tokens", "one that has all", "fill each step once")
        if chosen.shape != (self._num_chosen,) or chosen.dtype != self._tokens.dtype:
            got = f"{tuple(chosen.shape)} {chosen.dtype}"
            raise BatchError("chosen", None, f"({self._num_chosen},) {self._tokens.dtype}", got)
        put_chosen(self._tokens, self._continued, (self._places, self._sources), chosen)
        self._is_filled = True

    def require_filled(self) -> None:
        """Raises `BatchError` if the batch still waits for tokens."""
        if not self._is_filled:
            remedy = "run the step before it, and fill in what it chose (`Batch.fill`)"
            raise BatchError("tokens", None, "filled in before the step runs", "tokens that nobody chose yet", remedy)

    def over(self, tokens: Tensor) -> LateTokens:
        """The same places in another tensor that begins with the same tokens."""
        other = LateTokens(tokens, self._places, self._sources, self._continued, self._num_chosen)
        other._is_filled |= self._is_filled
        return other

    def taken(self, tokens: Tensor, kept: Sequence[int]) -> LateTokens:
        """The places in another tensor, which holds the tokens at the indices `kept` of this one."""
        sources = dict(zip(*self._continued, strict=True))
        found = [(place, sources[token]) for place, token in enumerate(kept) if token in sources]
        continued = (tuple([place for place, _ in found]), tuple([source for _, source in found]))
        on_device = [tokens.new_tensor(each) for each in continued]
        other = LateTokens(tokens, on_device[0], on_device[1], continued, self._num_chosen)
        other._is_filled |= self._is_filled
        return other
