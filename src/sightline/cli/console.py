"""How answers reach a terminal, and what is said about them on standard error, in colour on a terminal.

Does not know what an answer is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from sightline.core.errors import SightlineError

if TYPE_CHECKING:
    from sightline.attention.proof import ProofBook

notes = Console(stderr=True, highlight=False, soft_wrap=True)
"""Wraps nothing, because a URL or a command that is cut in two cannot be copied."""


_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}
"""Characters that a terminal obeys, and visible ones in their place."""


def visible(text: str) -> str:
    """Text of a model or a server without the escape sequences by which it could control a terminal."""
    return text.translate(_CONTROLS)


def print_text(text: str, *, ends_line: bool = True) -> None:
    """Writes to standard output: into a file or a pipe as it is, on a terminal without control characters."""
    click.echo(visible(text) if sys.stdout.isatty() else text, nl=ends_line)


def print_error(error: SightlineError) -> None:
    notes.print(f"[bold red]error[/]: {escape(visible(str(error)))}")


def print_distrusted(book: ProofBook) -> None:
    """Names every file that lies among the proofs and counts for nothing."""
    for file in book.distrusted():
        notes.print(f"not trusted, and counted as no proof: {escape(file)}")
