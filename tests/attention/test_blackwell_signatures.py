"""The stand-ins for Blackwell's libraries take exactly the parameters that the libraries do."""

from __future__ import annotations

import pytest

from sightline.attention.backends.flashinfer.blackwell import rows as blackwell_rows
from sightline.attention.backends.tokenspeed import rows as tokenspeed_rows
from support import fake_blackwell
from support.library_signatures import BLACKWELL, LibraryFunction, of_function, of_source


@pytest.mark.parametrize("recorded", BLACKWELL, ids=lambda each: each.name)
def test_a_stand_in_has_the_recorded_signature(recorded: LibraryFunction) -> None:
    assert of_function(vars(fake_blackwell)[recorded.name]) == recorded.parameters


@pytest.mark.parametrize("recorded", BLACKWELL, ids=lambda each: each.name)
def test_a_recorded_signature_is_the_librarys(recorded: LibraryFunction) -> None:
    source = recorded.source()
    if source is None:
        pytest.skip(f"{recorded.distribution} {recorded.version} is neither installed nor in a folder of wheels")
    assert of_source(source, recorded.name) == recorded.parameters


def test_the_recorded_versions_are_those_that_the_rows_were_read_from() -> None:
    named = {(each.distribution, each.version) for each in BLACKWELL}
    documents = f"{blackwell_rows.__doc__} {tokenspeed_rows.__doc__}"
    assert len(named) == 2
    assert all(f"{distribution} {version}" in documents for distribution, version in named)


def test_a_signature_is_read_with_its_order_its_defaults_and_its_names() -> None:
    source = "def f(a, b: int, c=-1, d: str = 'x', *, e, g=(None, 0)) -> None: ..."

    def f(a, b, c=-1, d="x", *, e, g=(None, 0)):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    assert of_source(source, "f") == of_function(f) == ("a", "b", "c=-1", "d='x'", "*", "e", "g=(None, 0)")
