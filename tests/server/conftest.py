"""One server with the default model for all tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.serving import ServedProcess, serving


@pytest.fixture(scope="session")
def server() -> Iterator[ServedProcess]:
    with serving() as running:
        assert running.url
        yield running
