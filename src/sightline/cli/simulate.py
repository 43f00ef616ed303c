"""`simulate`: random traffic on a real scheduler, cache and planner, played by `sightline.testing.simulator`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sightline.cli.console import notes
from sightline.cli.options import measure_option, parse_target

if TYPE_CHECKING:
    from sightline.testing.simulator.scenario import Scenario


@click.command()
@click.option("--seed", type=int, default=0, show_default=True, help="The first seed.")
@measure_option("--seeds", default=1, help="How many seeds, one after the other.")
@measure_option("--steps", default=200, help="Steps of traffic for each; then the open requests run to their end.")
@measure_option("--jobs", default=1, help="Processes that play seeds.")
@click.option("--guesses", is_flag=True, help="Guess tokens with a drafter that lies at random, in chains and trees.")
@click.option(
    "--states", is_flag=True, help="Give the model a recurrent group, whose states must agree with its pages."
)
@click.option("--sparse", is_flag=True, help="Give the model a layer that attends to what an indexer chooses.")
@click.option("--host", is_flag=True, help="Keep pages in host memory, behind transfers that end late or fail.")
@click.option("--ranks", is_flag=True, help="Share the model among ranks and replicas, which die and stall.")
@click.option("--script", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Play this file instead.")
@click.option("--output", type=parse_target, metavar="FILE", help="Write the script of a failing seed here.")
def simulate(
    seed: int,
    seeds: int,
    steps: int,
    jobs: int,
    guesses: bool,
    states: bool,
    sparse: bool,
    host: bool,
    ranks: bool,
    script: Path | None,
    output: Path | None,
) -> None:
    """Play random traffic on an engine whose model reveals what it read, and check every page after every step.

    A seed repeats a run exactly. Fails at the first seed in which something goes wrong, and prints a short script of
    events that shows it; --script replays one.
    """
    from sightline.testing.simulator.counts import EventCounts
    from sightline.testing.simulator.seeds import SeedFailure, play_seeds
    from sightline.testing.simulator.workload import draw_scenario

    if script is not None:
        _play_script(script, output)
        return
    started, total = time.perf_counter(), EventCounts()
    kinds = {"guesses": guesses, "states": states, "sparse": sparse, "host": host, "ranks": ranks}
    for result in play_seeds(range(seed, seed + seeds), steps, jobs, **kinds):
        if isinstance(result, SeedFailure):
            _print_violation(result.what)
            again = "".join(f" --{name}" for name, is_asked in kinds.items() if is_asked)
            click.echo(f"run it again: sightline simulate --seed {result.seed} --steps {steps}{again}")
            _shorten(draw_scenario(result.seed, steps, **kinds), output)
            sys.exit(1)
        total += result
    click.echo(f"{total.told()}: nothing wrong ({time.perf_counter() - started:.1f} s)")


def _play_script(script: Path, output: Path | None) -> None:
    from sightline.testing.simulator.scenario import Scenario
    from sightline.testing.simulator.simulation import Simulation, Violation

    scenario = Scenario.from_json(script.read_text(encoding="utf-8"))
    try:
        counts = Simulation(scenario).run()
    except Violation as violation:
        _print_violation(str(violation))
        if output is not None:
            _shorten(scenario, output)
        sys.exit(1)
    click.echo(f"{counts.told()}: nothing wrong")


def _print_violation(what: str) -> None:
    notes.print("[bold red]violation[/]:", end=" ")
    notes.print(what, markup=False)


def _shorten(scenario: Scenario, output: Path | None) -> None:
    """Prints or saves a short script that shows the same violation."""
    from sightline.testing.simulator.seeds import shortened

    notes.print("looking for a short script that shows it")
    short, violation = shortened(scenario)
    _print_violation(str(violation))
    if output is None:
        click.echo(short.to_json(), nl=False)
    else:
        output.write_text(short.to_json(), encoding="utf-8")
        click.echo(f"or: sightline simulate --script {output}")
