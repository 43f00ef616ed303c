"""The page that says what the kit catches says what it catches."""

from __future__ import annotations

from conformance.mutant_table import ALL_MUTANTS, COMMAND, PAGE, with_table


def test_the_table_of_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), f"{PAGE.name} is out of date; make it again: {COMMAND}"


def test_the_page_names_every_mutant() -> None:
    page = PAGE.read_text()
    assert [mutant.name for mutant in ALL_MUTANTS if f"`{mutant.name}`" not in page] == []
