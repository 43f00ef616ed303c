"""Commands tell of every row of every backend whether it is proven, for which each reads all sources."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from sightline.attention import proof


@pytest.fixture(scope="package", autouse=True)
def _sources_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "_sources", cache(proof._sources))
        yield
