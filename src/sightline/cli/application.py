"""The `sightline` command: all its commands in one group, and what an error becomes."""

from __future__ import annotations

import sys

import click

from sightline.cli.bench.engine import bench
from sightline.cli.chat.command import chat
from sightline.cli.conformance.rows import conformance
from sightline.cli.console import print_error
from sightline.cli.doctor import doctor
from sightline.cli.embed import embed
from sightline.cli.explain import explain
from sightline.cli.generate import generate
from sightline.cli.inspection import capabilities, collect_env, version
from sightline.cli.serve import serve
from sightline.cli.simulate import simulate
from sightline.core.command_line import flag
from sightline.core.config import EngineConfig
from sightline.core.errors import SightlineError
from sightline.core.request import SamplingParams
from sightline.core.settings import stated
from sightline.core.words import answer_unknown
from sightline.version import __version__


class Commands(click.Group):
    """The commands. An option that one does not know is answered with those that are nearest in meaning."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if error.ctx is None or not error.option_name.startswith("--"):
                raise
            name, command = error.option_name.removeprefix("--").replace("-", "_"), error.ctx.command
            known = [str(each.name) for each in command.params if each.opts[0] == flag(str(each.name))]
            elsewhere = dict.fromkeys(stated(EngineConfig), "a setting of the engine")
            elsewhere |= dict.fromkeys(stated(SamplingParams), "a sampling parameter")
            answer = answer_unknown(name, known, f"an option of {command.name}", elsewhere, flag)
            raise click.UsageError(answer, error.ctx) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="sightline", message="%(prog)s %(version)s")
def app() -> None:
    """An LLM inference engine in which attention cannot be silently wrong."""


for command in (
    bench,
    capabilities,
    chat,
    collect_env,
    conformance,
    doctor,
    embed,
    explain,
    generate,
    serve,
    simulate,
    version,
):
    app.add_command(command)


def main() -> None:
    """The entry point: an error that Sightline raises on purpose is a message and exit code 1, not a traceback."""
    try:
        app.main(prog_name="sightline", standalone_mode=True)
    except SightlineError as error:
        print_error(error)
        sys.exit(1)
