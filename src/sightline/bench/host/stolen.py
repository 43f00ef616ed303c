"""Stolen time: how much of the processors' time the host of a virtual machine gave to other guests.

What was measured meanwhile says little about the program.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 8
"""The field of the first line that counts stolen ticks."""


def stolen_seconds() -> float:
    """Stolen time of all processors together since the machine started; 0 where the system does not tell."""
    try:
        fields = _STAT.read_text().split("\n", 1)[0].split()
        return int(fields[_STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


class StolenTime:
    """A window of time that begins now."""

    def __init__(self) -> None:
        self._begun, self._stolen = time.monotonic(), stolen_seconds()

    @property
    def share(self) -> float:
        """The stolen part of the processors' time in the window so far, from 0 to 1."""
        seconds = (time.monotonic() - self._begun) * (os.cpu_count() or 1)
        return min(1.0, (stolen_seconds() - self._stolen) / seconds) if seconds else 0.0
