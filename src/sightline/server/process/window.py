"""How many of a stream's reports its client has not read: when its request pauses, and when it runs on.

Counts only. Does not know reports, the engine or the socket.
"""

from __future__ import annotations

MAX_UNREAD_REPORTS = 64
"""Reports of a stream that may wait for its client."""


class ReadWindow:
    """The reports of one request that were sent and not read."""

    def __init__(self, max_unread: int) -> None:
        self._max_unread = max_unread
        self._num_unread = 0
        self._is_paused = False

    def sent(self) -> bool:
        """Counts a report that goes out. Returns True if the request must pause."""
        self._num_unread += 1
        pauses = not self._is_paused and self._num_unread >= self._max_unread
        self._is_paused |= pauses
        return pauses

    def read(self, count: int) -> bool:
        """Counts reports that the client has read. Returns True if the request must be resumed.

        Half of the window is free by then, so that a client which reads steadily pauses its request seldom.
        """
        self._num_unread = max(0, self._num_unread - count)
        resumes = self._is_paused and self._num_unread <= self._max_unread // 2
        self._is_paused &= not resumes
        return resumes


def read_batch(max_unread: int) -> int:
    """How many reports a client reads before the engine process is told.

    Less than `ReadWindow` leaves unread when it resumes: a client that has read everything is never left paused.
    """
    return max(1, max_unread // 4)
