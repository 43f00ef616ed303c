"""How many recurrent states an engine has room for: those that rows need to go on, and checkpoints for others.

Pure arithmetic. Does not know models or slots.
"""

from __future__ import annotations

from typing import NamedTuple

from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger

ROWS_SHARE = 2
"""The states of rows may take 1 / ROWS_SHARE of the cache's memory; with less memory, fewer rows run."""
CHECKPOINT_SHARE = 4
"""Checkpoints take 1 / CHECKPOINT_SHARE of what the states of rows leave."""
CHECKPOINTS_PER_ROW = 16
"""More checkpoints than this for each row are not reserved by default."""
FORKED_ROWS = 8
"""Checkpoints without a prefix cache, for continuations that share a prompt."""


class StateSizes(NamedTuple):
    """How many states there are."""

    max_rows: int
    """Rows that may run; fewer than asked for if their states do not fit."""
    per_row: int
    """States that a row may need at once."""
    max_checkpoints: int

    def num_bytes(self, state_bytes: int) -> int:
        """What they take, with the empty state."""
        return (1 + self.max_rows * self.per_row + self.max_checkpoints) * state_bytes


NO_STATES_KEPT = StateSizes(0, 0, 0)


def share_states(
    state_bytes: int,
    room_bytes: int,
    max_rows: int,
    asked_rows: int | None,
    asked_checkpoints: int | None,
    *,
    in_flight: int,
    max_drafted: int,
    prefix_caching: bool,
    ledger: Ledger,
) -> StateSizes:
    """Divides `room_bytes`, the cache's memory, among states of `state_bytes` each.

    A row needs the state that it reads, one for each step in flight, and one for each token that may be the last one
    accepted. Raises `ConfigError` if not even one row fits, or rows or checkpoints that were asked for do not.
    """
    per_row = 2 + in_flight + max_drafted
    affordable = max(0, room_bytes // ROWS_SHARE // state_bytes - 1) // per_row
    if affordable < max_rows:
        if affordable < 1 or asked_rows is not None:
            raise ConfigError(
                f"expected room for the recurrent states of {max_rows if asked_rows is not None else 1} rows, "
                f"{per_row} of {state_bytes:,} bytes each, in half of the {room_bytes:,} bytes beside the weights, got "
                f"room for {affordable}; lower max_num_seqs or num_speculative_tokens, or use a smaller model"
            )
        ledger.degrade(
            "max_num_seqs",
            f"lowered from {max_rows} to {affordable}: a row keeps {per_row} recurrent states of {state_bytes:,} bytes",
            "ask for max_num_seqs, or raise memory_fraction",
        )
        max_rows = affordable
    left = room_bytes - (1 + max_rows * per_row) * state_bytes
    if asked_checkpoints is not None:
        if asked_checkpoints * state_bytes > left:
            raise ConfigError(
                f"expected state checkpoints that fit the {left:,} bytes beside weights and rows, got "
                f"{asked_checkpoints} of {state_bytes:,} bytes; lower max_state_checkpoints"
            )
        return StateSizes(max_rows, per_row, asked_checkpoints)
    most = CHECKPOINTS_PER_ROW * max_rows if prefix_caching else min(max_rows, FORKED_ROWS)
    return StateSizes(max_rows, per_row, min(most, left // CHECKPOINT_SHARE // state_bytes))
