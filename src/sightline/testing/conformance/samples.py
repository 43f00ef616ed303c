"""Samples: the values that are tried, and proven, for `ANY` in a capability row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sightline.attention.capability import ANY, Capability, Wildcard
from sightline.testing.conformance.problem import Problem


@dataclass(frozen=True)
class Samples:
    """The values to try for `ANY` in a capability row."""

    head_dims: tuple[int, ...] = (16, 64, 80, 96, 128, 192, 256)
    group_sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 16)
    page_sizes: tuple[int, ...] = (16, 1, 3, 32, 64, 128)
    value_dims: tuple[int, ...] = (16, 64, 80, 128)
    """Value dimensions of recurrent layers."""
    top_ks: tuple[int, ...] = (8, 1, 64, 2048)
    """Numbers of chosen tokens; rows do not declare any."""
    ratios: tuple[int, ...] = (4, 128)
    """Tokens of compressed entries; rows do not declare any."""

    def of_head_dims(self, row: Capability) -> tuple[int, ...]:
        return _values(row.head_dims, self.head_dims)

    def of_group_sizes(self, row: Capability) -> tuple[int, ...]:
        return _values(row.group_sizes, self.group_sizes)

    def of_page_sizes(self, row: Capability) -> tuple[int, ...]:
        return _values(row.page_sizes, self.page_sizes)

    def and_more(
        self, head_dims: Sequence[int] = (), group_sizes: Sequence[int] = (), page_sizes: Sequence[int] = ()
    ) -> Samples:
        """Returns these samples followed by others."""
        return Samples(
            _joined(self.head_dims, head_dims),
            _joined(self.group_sizes, group_sizes),
            _joined(self.page_sizes, page_sizes),
            self.value_dims,
            self.top_ks,
            self.ratios,
        )

    def fitting(self, problem: Problem[Any, Any]) -> Samples:
        """Returns these samples without page sizes that a kind of attention cannot have."""
        return replace(self, page_sizes=tuple(size for size in self.page_sizes if problem.fits_page(size)))

    def for_problem(self, problem: Problem[Any, Any]) -> Samples:
        """Returns these samples followed by those of a kind of attention."""
        return self.and_more(problem.more_head_dims, problem.more_group_sizes)

    def not_listed(self, row: Capability) -> tuple[str, ...]:
        """Describes the values, other than the usual ones, that the row does not declare."""
        columns = (
            ("head dimension", row.head_dims, self.head_dims, Samples.head_dims),
            ("group size", row.group_sizes, self.group_sizes, Samples.group_sizes),
            ("page size", row.page_sizes, self.page_sizes, Samples.page_sizes),
        )
        return tuple(
            f"{name} {value}"
            for name, listed, asked, known in columns
            for value in asked
            if listed is not ANY and value not in (*listed, *known)
        )


def _values(declared: frozenset[int] | Wildcard, samples: tuple[int, ...]) -> tuple[int, ...]:
    return samples if declared is ANY else tuple(sorted(declared))


def _joined(usual: tuple[int, ...], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*usual, *more)))
