"""The table of docs/conformance.md: what each check proves, and which broken backends it finds.

PYTHONPATH=tests .venv/bin/python -m conformance.mutant_table     # writes the page's table again
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from conformance.borrowed_mutants import BORROWED_MUTANTS
from conformance.compressed_mutants import COMPRESSED_MUTANTS, CompressedMutant
from conformance.index_mutants import INDEX_MUTANTS, IndexMutant
from conformance.latent_mutants import LATENT_MUTANTS, LatentMutant
from conformance.mutants import MUTANTS, Mutant
from conformance.sparse_mutants import SPARSE_MUTANTS
from conformance.state_mutants import STATE_MUTANTS, StateMutant
from sightline.attention.kinds import SpecKind
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.trial import Check

COMMAND = "PYTHONPATH=tests .venv/bin/python -m conformance.mutant_table"
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
AnyMutant: TypeAlias = Mutant | LatentMutant | StateMutant | IndexMutant | CompressedMutant
ALL_MUTANTS: tuple[AnyMutant, ...] = (
    *MUTANTS,
    *BORROWED_MUTANTS,
    *LATENT_MUTANTS,
    *SPARSE_MUTANTS,
    *INDEX_MUTANTS,
    *STATE_MUTANTS,
    *COMPRESSED_MUTANTS,
)
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def render() -> str:
    """A line for each check, in the order in which they run."""
    lines = ["| check | proves | builds on | mutants that fail it |", "| --- | --- | --- | --- |"]
    for check in CHECKS:
        found = [
            f"`{mutant.name}`: {mutant.fault}{' (on a GPU)' if mutant.cuda_only else ''}"
            for mutant in ALL_MUTANTS
            if mutant.caught_by == check.name
        ]
        lines.append(f"| {_named(check)} | {check.proves} | {', '.join(check.after) or '–'} | {'<br>'.join(found)} |")
    return "\n".join(lines)


def _named(check: Check) -> str:
    """With the kinds of attention that it is about, where that is not all of them."""
    kinds = "" if check.kinds == frozenset(SpecKind) else f" ({', '.join(sorted(kind.value for kind in check.kinds))})"
    return f"`{check.name}`{kinds}"


def with_table(page: str) -> str:
    """The page with its table made again."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
