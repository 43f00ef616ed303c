"""Lists of tokens in sampling parameters, packed once for the device. Does not know who asks for them."""

from __future__ import annotations

from array import array
from functools import cached_property


class LogitBias(tuple[tuple[int, float], ...]):
    """(token id, offset) pairs by token, each once. Packed once, however many sequences share it."""

    @property
    def last_token(self) -> tuple[int, ...]:
        """The token of the last pair, if there is one."""
        return tuple(token for token, _ in self[-1:])

    @cached_property
    def packed(self) -> tuple[bytes, bytes]:
        """The token ids as int64 and the offsets as fp32, both native."""
        return array("q", [token for token, _ in self]).tobytes(), array("f", [value for _, value in self]).tobytes()


NO_BIAS = LogitBias()


class TokenIds(tuple[int, ...]):
    """Ascending token ids, each once. Packed once, however many sequences share them."""

    @cached_property
    def packed(self) -> bytes:
        """The ids as native int64."""
        return array("q", self).tobytes()
