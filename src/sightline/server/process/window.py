"""How much of a stream its client has not read: when its request pauses, and when it runs on.

Counts only. Does not know reports, the engine or the socket.

Both sides use the same limit. The engine process counts what it sends and what it is told was read (`ReadWindow`); the
front end counts what its client takes and tells it now and then (`ReadCount`).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MAX_UNREAD_REPORTS = 64
"""Reports of a stream that may wait for its client."""
FIRST_UNREAD_BYTES = 1 << 10
"""Contents of reports that may wait for a client which has read nothing: 2 tokens with 20 log probabilities each."""
MAX_UNREAD_BYTES = 16 << 10
"""Contents of reports that may wait for a client which has read much."""
BYTES_READ_PER_BYTE = 8
"""How many bytes a client must have read for one more that may wait for it. A socket's buffers take in some kilobytes,
which look as if they were read."""


class UnreadLimit(msgspec.Struct, frozen=True, array_like=True):
    """How much may wait for the client of a stream."""

    max_reports: int
    first_bytes: int
    """Contents of reports, before anything is read."""
    max_bytes: int

    def num_bytes(self, num_read: int) -> int:
        """Contents that may wait, once `num_read` bytes have been read."""
        return min(self.max_bytes, self.first_bytes + num_read // BYTES_READ_PER_BYTE)


def unread_limit(num_continuations: int, report_bytes: int) -> UnreadLimit:
    """The limit of a request: at least two reports of every continuation, so that none waits for the others to be read.

    `report_bytes` estimates the contents of a report.
    """
    least = 2 * num_continuations
    return UnreadLimit(
        max(MAX_UNREAD_REPORTS, least),
        max(FIRST_UNREAD_BYTES, least * report_bytes),
        max(MAX_UNREAD_BYTES, least * report_bytes),
    )


class ReadWindow:
    """The reports of one request that were sent and not read."""

    def __init__(self, limit: UnreadLimit) -> None:
        self._limit = limit
        self._num_unread = self._num_bytes = 0
        self._num_bytes_read = 0
        self._is_paused = False

    def sent(self, num_bytes: int) -> bool:
        """Counts a report that goes out. Returns True if the request must pause."""
        self._num_unread += 1
        self._num_bytes += num_bytes
        is_full = self._num_unread >= self._limit.max_reports or self._num_bytes >= self._max_bytes
        pauses = not self._is_paused and is_full
        self._is_paused |= pauses
        return pauses

    def read(self, count: int, num_bytes: int) -> bool:
        """Counts reports that the client has read. Returns True if the request must be resumed.

        Half of the window is free by then, so that a client which reads steadily pauses its request seldom.
        """
        self._num_unread = max(0, self._num_unread - count)
        self._num_bytes = max(0, self._num_bytes - num_bytes)
        self._num_bytes_read += num_bytes
        has_room = 2 * self._num_unread <= self._limit.max_reports and 2 * self._num_bytes <= self._max_bytes
        resumes = self._is_paused and has_room
        self._is_paused &= not resumes
        return resumes

    @property
    def _max_bytes(self) -> int:
        return self._limit.num_bytes(self._num_bytes_read)


class ReadBatch(NamedTuple):
    """Reports that a client has read."""

    num_reports: int
    num_bytes: int
    """The size of the reports' contents."""


class ReadCount:
    """Counts what the client of one request reads, and says when the engine process is to be told.

    That is after a quarter of a window, which is less than `ReadWindow` leaves unread when it resumes: a client that
    has read everything is never left paused.
    """

    def __init__(self, limit: UnreadLimit) -> None:
        self._limit = limit
        self._untold = ReadBatch(0, 0)
        self._num_bytes_read = 0

    def read(self, num_bytes: int) -> ReadBatch | None:
        """Counts a report. Returns all that were not told, if it is time to tell."""
        self._num_bytes_read += num_bytes
        batch = ReadBatch(self._untold.num_reports + 1, self._untold.num_bytes + num_bytes)
        max_bytes = self._limit.num_bytes(self._num_bytes_read)
        if 4 * batch.num_reports < self._limit.max_reports and 4 * batch.num_bytes < max_bytes:
            self._untold = batch
            return None
        self._untold = ReadBatch(0, 0)
        return batch
