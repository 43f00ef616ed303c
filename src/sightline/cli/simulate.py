"""`simulate`: traffic by seed on a real scheduler, cache and planner, played by `sightline.testing.simulator`."""

from __future__ import annotations

import sys
import time

import click

from sightline.cli.console import notes
from sightline.cli.options import measure_option


@click.command()
@click.option("--seed", type=int, default=0, show_default=True, help="The first seed.")
@measure_option("--seeds", default=1, help="How many seeds, one after the other.")
@measure_option("--steps", default=200, help="Steps of traffic for each; then it runs until nothing is left.")
def simulate(seed: int, seeds: int, steps: int) -> None:
    """Play random traffic on an engine whose model tells what it read, and check every page after every step.

    A seed repeats a run exactly. Fails at the first seed in which something is wrong.
    """
    from sightline.testing.simulator.simulation import Violation
    from sightline.testing.simulator.simulation import simulate as play

    started, num_steps, num_requests, num_retractions = time.perf_counter(), 0, 0, 0
    for current in range(seed, seed + seeds):
        try:
            played = play(current, steps)
        except Violation as violation:
            notes.print(f"[bold red]violation[/]: {violation}", soft_wrap=True)
            click.echo(f"run it again: sightline simulate --seed {current} --steps {steps}")
            sys.exit(1)
        num_steps += played.num_steps
        num_requests += played.num_finished
        num_retractions += played.engine.num_retractions
    seconds = time.perf_counter() - started
    click.echo(
        f"{seeds} seeds, {num_steps:,} steps, {num_requests:,} requests, {num_retractions:,} retractions: "
        f"nothing wrong ({seconds:.1f} s)"
    )
