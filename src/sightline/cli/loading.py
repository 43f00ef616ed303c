"""Builds the engine of a command, and says what was decided."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sightline.cli.console import notes

if TYPE_CHECKING:
    from sightline.llm import LLM


def load_llm(settings: Mapping[str, Any], *, quiet: bool) -> LLM:
    """The engine for some settings."""
    started = time.perf_counter()
    from sightline.llm import LLM
    from sightline.runner.startup import startup_report

    llm = LLM(**settings)
    if not quiet:
        for line in startup_report(llm.engine.runtime, llm.engine.ledger.notes):
            notes.print(f"[dim]{escape(line)}[/]")
        notes.print(f"[dim]ready in {time.perf_counter() - started:.1f} s[/]")
    return llm
