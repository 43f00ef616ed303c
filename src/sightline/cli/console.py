"""What is said about an answer: standard error, in colour on a terminal. Does not know what the answer is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from sightline.core.errors import SightlineError

if TYPE_CHECKING:
    from sightline.attention.proof import ProofBook

notes = Console(stderr=True, highlight=False)


def print_error(error: SightlineError) -> None:
    notes.print(f"[bold red]error[/]: {escape(str(error))}", soft_wrap=True)


def print_distrusted(book: ProofBook) -> None:
    """Names every file that lies among the proofs and counts for nothing."""
    for file in book.distrusted():
        notes.print(f"not trusted, and counted as no proof: {escape(file)}", soft_wrap=True)
