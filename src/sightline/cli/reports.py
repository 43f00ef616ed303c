"""Output of a measurement's report: as text or as JSON, and into a file. Does not know what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

import click

from sightline.cli.options import collected, json_option, parse_target

json_settings = {
    "as_json": json_option,
    "save_result": click.option(
        "--save-result", type=parse_target, metavar="FILE", help="Also write the JSON object to this file."
    ),
}
report_file_options = collected("how", **json_settings)


class Reportable(Protocol):
    """A dataclass that can be printed as text."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def lines(self) -> list[str]: ...


def print_report(report: Reportable, how: dict[str, Any]) -> None:
    """Prints a report as text or as one JSON object, and writes the object to `--save-result` if given."""
    text = json.dumps(asdict(report), indent=2)
    click.echo(text if how["as_json"] else "\n".join(report.lines()))
    if how["save_result"] is not None:
        how["save_result"].write_text(text + "\n")
