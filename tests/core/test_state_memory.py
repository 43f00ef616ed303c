"""How many recurrent states fit, and what is said if they do not."""

from __future__ import annotations

import pytest

from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.state_memory import CHECKPOINTS_PER_ROW, FORKED_ROWS, StateSizes, share_states

STATE = 1000


def share(
    room: int,
    rows: int = 4,
    asked_rows: int | None = None,
    checkpoints: int | None = None,
    *,
    in_flight: int = 0,
    drafted: int = 0,
    caches: bool = True,
    ledger: Ledger | None = None,
) -> StateSizes:
    return share_states(
        STATE,
        room * STATE,
        rows,
        asked_rows,
        checkpoints,
        in_flight=in_flight,
        max_drafted=drafted,
        prefix_caching=caches,
        ledger=ledger or Ledger(),
    )


@pytest.mark.parametrize(("in_flight", "drafted", "per_row"), [(0, 0, 2), (1, 0, 3), (0, 5, 7), (1, 5, 8)])
def test_a_row_has_what_it_reads_what_is_in_flight_and_every_guess(in_flight: int, drafted: int, per_row: int) -> None:
    sizes = share(1000, in_flight=in_flight, drafted=drafted)
    assert (sizes.max_rows, sizes.per_row) == (4, per_row)
    assert sizes.num_bytes(STATE) == (1 + 4 * per_row + sizes.max_checkpoints) * STATE


def test_states_of_rows_take_half_of_the_memory_at_most_and_fewer_rows_run_otherwise() -> None:
    ledger = Ledger()
    assert share(18, ledger=ledger).max_rows == 4
    assert not ledger.degradations
    assert share(17, ledger=ledger).max_rows == 3
    [degradation] = ledger.degradations
    assert "lowered from 4 to 3" in str(degradation)


def test_checkpoints_take_a_quarter_of_what_is_left_and_not_more_than_rows_can_use() -> None:
    assert share(9 + 40).max_checkpoints == 10
    assert share(10_000).max_checkpoints == 4 * CHECKPOINTS_PER_ROW
    assert share(10_000, rows=100, caches=False).max_checkpoints == FORKED_ROWS
    assert share(9 + 40, checkpoints=40).max_checkpoints == 40
    assert share(9 + 40, checkpoints=0).max_checkpoints == 0


@pytest.mark.parametrize(
    ("room", "asked_rows", "checkpoints", "message"),
    [
        (5, None, None, "recurrent states of 1 rows"),
        (0, None, None, "got room for 0"),
        (17, 4, None, "recurrent states of 4 rows, 2 of 1,000 bytes each.*got room for 3"),
        (49, None, 41, "fit the 40,000 bytes.*got 41 of 1,000 bytes; lower max_state_checkpoints"),
    ],
)
def test_what_does_not_fit_is_refused(room: int, asked_rows: int | None, checkpoints: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share(room, 4, asked_rows, checkpoints)
