"""Clients share the turns of the event loop: what a crowd begins at one moment lets others through in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count, pairwise

from sightline.server.http.turns import ExchangeStage, LoopTurns


def ticking(step: float) -> Iterator[float]:
    """A clock that goes on by `step` whenever it is read."""
    return (number * step for number in count())


async def turns_until_done(turns: LoopTurns, num_clients: int) -> list[int]:
    """In which turn of the event loop each client went on."""
    turn = 0
    went_on: list[int] = []

    async def client() -> None:
        await turns.take("", ExchangeStage.BEGINS)
        went_on.append(turn)

    clients = asyncio.gather(*(client() for _ in range(num_clients)))
    while not clients.done():
        await asyncio.sleep(0)
        turn += 1
    return went_on


def test_clients_whose_work_fits_go_on_in_one_turn() -> None:
    clock = ticking(0.0)
    assert asyncio.run(turns_until_done(LoopTurns(1.0, lambda: next(clock)), 50)) == [0] * 50


def test_a_crowd_goes_on_one_by_one_once_a_turn_is_over() -> None:
    clock = ticking(0.4)
    went_on = asyncio.run(turns_until_done(LoopTurns(1.0, lambda: next(clock)), 12))
    assert went_on == sorted(went_on)
    late = went_on[3:]
    assert all(later > earlier for earlier, later in pairwise(late))


def test_whoever_is_cancelled_holds_up_nobody() -> None:
    async def run() -> list[str]:
        clock = ticking(10.0)
        turns = LoopTurns(1.0, lambda: next(clock))
        done: list[str] = []

        async def client(name: str) -> None:
            await turns.take("", ExchangeStage.BEGINS)
            done.append(name)

        tasks = {name: asyncio.ensure_future(client(name)) for name in "abcdef"}
        await asyncio.sleep(0)
        for name in "bce":
            tasks[name].cancel()
        async with asyncio.timeout(10):
            await asyncio.wait(tasks.values())
        return done

    assert asyncio.run(run()) == ["a", "d", "f"]


def test_a_client_cancelled_in_the_moment_of_its_turn_passes_it_on() -> None:
    async def run() -> list[str]:
        clock = ticking(10.0)
        turns = LoopTurns(1.0, lambda: next(clock))
        done: list[str] = []

        async def client(name: str) -> None:
            await turns.take("", ExchangeStage.BEGINS)
            done.append(name)

        first = asyncio.ensure_future(client("a"))
        second, third = (asyncio.ensure_future(client(name)) for name in "bc")
        while not first.done():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        second.cancel()
        async with asyncio.timeout(10):
            await asyncio.wait({second, third})
        return done

    assert asyncio.run(run())[-1] == "c"


def test_a_crowd_holds_up_neither_another_caller_nor_answers_that_are_being_sent() -> None:
    async def run() -> list[str]:
        clock = ticking(10.0)
        turns = LoopTurns(1.0, lambda: next(clock))
        done: list[str] = []

        async def client(name: str, caller: str, stage: ExchangeStage) -> None:
            await turns.take(caller, stage)
            done.append(name)

        await asyncio.gather(
            *(client("crowd", "a", ExchangeStage.BEGINS) for _ in range(50)),
            client("sent", "a", ExchangeStage.GOES_ON),
            client("other", "b", ExchangeStage.BEGINS),
        )
        return done

    done = asyncio.run(run())
    assert len(done) == 52
    assert {"sent", "other"} <= set(done[:5])
