"""Ranks: the processes among which one model is divided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """One of the processes that compute a model together. The first one leads: it schedules and samples."""

    index: int
    size: int
    """The number of ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"expected a rank from 0 to {self.size - 1}, got {self.index}")

    @property
    def is_alone(self) -> bool:
        """True if there is no other rank."""
        return self.size == 1

    @property
    def leads(self) -> bool:
        """True for the rank that schedules and samples."""
        return self.index == 0

    def share(self, total: int) -> range:
        """This rank's part of `total` things in a row. Parts follow one another and differ by at most one thing."""
        return range(total * self.index // self.size, total * (self.index + 1) // self.size)

    def shares(self, total: int) -> tuple[range, ...]:
        """The parts of all ranks."""
        return tuple(Rank(index, self.size).share(total) for index in range(self.size))

    def __str__(self) -> str:
        return f"rank {self.index} of {self.size}"


ALONE = Rank(0, 1)
