"""When a rank is killed or stops, at any moment, every client is answered, and the service comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from random import Random
from threading import Thread

import pytest

from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.load import LoadResult, RequestOutcome, run_load
from sightline.bench.serving.work import Ask, Sampling
from support.serving import ServedProcess, serving
from support.tiny_served_model import save_tiny_served_model

CLIENTS, TIMEOUT_S, STALL_S = 6, 2.0, 8.0
FLAGS = ("--dist-timeout", str(TIMEOUT_S), "--stall-timeout", str(STALL_S))
GRIDS = {
    "two ranks": ("--tp", "2"),
    "two replicas": ("--dp", "2"),
    "two replicas of two ranks": ("--dp", "2", "--tp", "2"),
}
ANSWERED = {RequestOutcome.COMPLETED, RequestOutcome.REFUSED, RequestOutcome.FAILED}
SLACK_S = 6.0
"""For a busy machine, beyond the time after which a rank counts as lost."""


def ranks_of(server: ServedProcess) -> list[int]:
    """The processes that compute the model: the engine, then those that it started."""
    pid = server.engine_pid
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def load(server: ServedProcess, count: int, seed: int) -> LoadResult:
    order = Random(seed)
    asks = [Ask(tuple(order.randrange(5, 200) for _ in range(12)), 300) for _ in range(count)]
    return asyncio.run(
        run_load(
            Client(Address.parse(server.url)), asks, model="model", sampling=Sampling(temperature=0.0, ignore_eos=True)
        )
    )


def survives(server: ServedProcess, moment: int, number: int, kind: signal.Signals) -> tuple[list[str], float]:
    """Ends or stops one of the ranks under load. Returns the errors that clients were told, and the seconds until the
    service was back."""
    results: list[LoadResult] = []
    running = Thread(target=lambda: results.append(load(server, CLIENTS, moment)))
    running.start()
    time.sleep(Random(moment).uniform(0.05, 1.0))
    ranks = ranks_of(server)
    victim = ranks[number % len(ranks)]
    started = time.monotonic()
    os.kill(victim, kind)
    running.join(STALL_S + 2 * SLACK_S)
    assert results, f"no answer within {time.monotonic() - started:.0f} s"
    records = results[0].records
    assert {record.outcome for record in records} <= ANSWERED
    errors = [record.error or "" for record in records if record.outcome is RequestOutcome.FAILED]
    # Nobody is left to name the rank that leads.
    assert all(("rank" if number else "engine process") in error for error in errors), errors
    while load(server, 1, 0).records[0].outcome is not RequestOutcome.COMPLETED:
        assert time.monotonic() - started < 90.0, "the service does not come back"
        time.sleep(0.1)
    back = time.monotonic() - started
    assert not {pid for pid in ranks if Path(f"/proc/{pid}").exists()}, "processes are left"
    return errors, back


def survives_moments(server: ServedProcess, count: int) -> None:
    server.wait_for("open")
    numbers, ways = reversed(range(len(ranks_of(server)))), (signal.SIGKILL, signal.SIGSTOP)
    kinds = [(number, ways[place % 2]) for place, number in enumerate(numbers)]
    # Then the same ranks the other way.
    kinds += [(number, ways[kind is ways[0]]) for number, kind in kinds]
    num_errors, seconds = 0, list[float]()
    for moment in range(count):
        errors, back = survives(server, moment, *kinds[moment % len(kinds)])
        num_errors += len(errors)
        seconds.append(back)
    told = f"{num_errors} of {count * CLIENTS} requests failed"
    print(f"{count} moments: {told}; back after {min(seconds):.1f} to {max(seconds):.1f} s")
    assert num_errors


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_every_client_is_answered_and_the_ranks_return(tmp_path: Path) -> None:
    grid = GRIDS["two replicas"]
    with serving("--model", str(save_tiny_served_model(tmp_path / "model")), *grid, *FLAGS) as server:
        survives_moments(server, 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("grid", GRIDS)
def test_twenty_moments(grid: str, tmp_path: Path) -> None:
    with serving("--model", str(save_tiny_served_model(tmp_path / "model")), *GRIDS[grid], *FLAGS) as server:
        survives_moments(server, 20)
