"""`doctor`: whether this machine is fit for an engine. What is examined is in `sightline.diagnose.doctor`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sightline.cli.console import visible
from sightline.cli.options import engine_options, json_option, with_model

if TYPE_CHECKING:
    from sightline.diagnose.doctor import Diagnosis

_MARKS = {"fit": ("✓", "green"), "note": ("·", "dim"), "failed": ("✗", "bold red")}
_TOPIC_WIDTH = 28


@click.command()
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("--no-self-test", is_flag=True, help="Build no engine: look at device, versions and proofs alone.")
@json_option
@engine_options
def doctor(name: str | None, no_self_test: bool, as_json: bool, settings: dict[str, Any]) -> None:
    """Say whether this machine is fit for MODEL: device, versions, proofs, and answers that must be the same.

    The self-test builds a small engine for each way to compute the same greedy answers: other pages, other chunks, one
    request at a time, cached prefixes, captured steps, other backends. It takes a minute or two with the default model.
    The exit code is 1 if anything failed.
    """
    from sightline.core.config import EngineConfig
    from sightline.diagnose.doctor import Fitness, examine

    config = with_model(EngineConfig(**settings), name)
    console = Console(highlight=False)
    found: list[Diagnosis] = []
    for each in examine(config, is_short=no_self_test):
        found.append(each)
        if not as_json:
            console.print(_line(each))
    failed = sum(each.verdict is Fitness.FAILED for each in found)
    if as_json:
        click.echo(json.dumps({"fit": not failed, "findings": [each.to_data() for each in found]}, indent=2))
    else:
        told = Text(f"{failed} failed", style="bold red") if failed else Text("fit", style="bold green")
        console.print(Text.assemble(told, f", of {len(found)} findings"))
    sys.exit(1 if failed else 0)


def _line(found: Diagnosis) -> Table:
    mark, style = _MARKS[found.verdict.value]
    line = Table.grid(padding=(0, 1))
    line.add_column(width=1)
    line.add_column(width=_TOPIC_WIDTH, no_wrap=True)
    line.add_column(ratio=1, overflow="fold")
    text = Text(visible(found.text), style="" if found.verdict.value != "note" else "dim")
    if found.remedy:
        text.append(f"\n→ {visible(found.remedy)}", style="dim")
    line.add_row(Text(mark, style=style), Text(found.topic, style=style), text)
    return line
