"""Coverages for tests that are about proofs and not about what was tried."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sightline.attention.coverage import Coverage
from sightline.attention.dimensions import Dimension, Point


def points_of(
    head_dims: Sequence[int] = (64,),
    group_sizes: Sequence[int] = (1,),
    page_sizes: Sequence[int] = (16,),
    dtypes: Sequence[str] = ("float32",),
    cache_dtypes: Sequence[str] = ("float32",),
) -> list[Point]:
    """Every combination of these values."""
    dimensions = (
        Dimension.HEAD_DIM,
        Dimension.GROUP_SIZE,
        Dimension.PAGE_SIZE,
        Dimension.DTYPE,
        Dimension.CACHE_DTYPE,
    )
    products = itertools.product(head_dims, group_sizes, page_sizes, dtypes, cache_dtypes)
    return [dict(zip(dimensions, values, strict=True)) for values in products]


def coverage_of(
    head_dims: Sequence[int] = (64,),
    group_sizes: Sequence[int] = (1,),
    page_sizes: Sequence[int] = (16,),
    dtypes: Sequence[str] = ("float32",),
    cache_dtypes: Sequence[str] = ("float32",),
) -> Coverage:
    return Coverage.of(points_of(head_dims, group_sizes, page_sizes, dtypes, cache_dtypes))
