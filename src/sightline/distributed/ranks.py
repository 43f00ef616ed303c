"""Ranks: the processes that compute one model, which stand in a grid.

             rank within the replica
             0     1     …
replica 0    0     1           each replica has rows and a cache of its own, and all of the model
replica 1    2     3           the ranks of a replica have a part of the model each
…

Experts may be divided among all ranks instead.
"""

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


@dataclass(frozen=True)
class Place:
    """Where a process stands in the grid."""

    rank: Rank
    """Among all processes."""
    num_replicas: int

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.rank.size % self.num_replicas:
            raise ValueError(f"expected replicas of equal size, got {self.num_replicas} of {self.rank.size} ranks")

    @property
    def within(self) -> Rank:
        """The place among the ranks of its replica."""
        size = self.rank.size // self.num_replicas
        return Rank(self.rank.index % size, size)

    @property
    def replica(self) -> Rank:
        """The place of its replica among the replicas."""
        return Rank(self.rank.index * self.num_replicas // self.rank.size, self.num_replicas)

    def division(self, *, joins_experts: bool) -> Division:
        """How the model is divided. `joins_experts` divides experts among the ranks of all replicas."""
        return Division(self.within, self.rank if joins_experts else self.within)


@dataclass(frozen=True)
class Division:
    """The part of a model that a process has."""

    layers: Rank
    """Among whom heads, features and the vocabulary are divided: the ranks of a replica."""
    experts: Rank
    """Among whom experts are divided: the same ranks, or those of all replicas."""


FIRST = Place(ALONE, 1)
"""The place of a process without others."""
