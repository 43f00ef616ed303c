"""Callers share the engine evenly: nobody saves up by being away, and nobody pays for having been alone."""

from __future__ import annotations

from sightline.scheduler.shares import Shares


def test_a_newcomer_starts_with_the_least_that_those_present_have_had() -> None:
    shares = Shares()
    shares.join("a")
    shares.join("b")
    shares.charge("a", 50)
    shares.charge("b", 20)
    shares.join("c")
    assert [shares.of(caller) for caller in "abc"] == [50, 20, 20]


def test_time_away_saves_up_nothing_and_costs_nothing() -> None:
    shares = Shares()
    for caller in "ab":
        shares.join(caller)
    shares.charge("a", 30)
    shares.charge("b", 10)
    shares.leave("a")
    shares.charge("b", 5)
    shares.join("a")
    assert (shares.of("a"), shares.of("b")) == (30, 15)
    shares.leave("b")
    shares.charge("a", 100)
    shares.join("b")
    assert shares.of("b") == 130


def test_what_a_caller_had_while_it_was_alone_is_nobodys_loss() -> None:
    shares = Shares()
    shares.join("a")
    shares.charge("a", 1000)
    shares.leave("a")
    shares.join("b")
    shares.join("a")
    assert shares.of("a") == shares.of("b") == 1000


def test_a_caller_is_present_until_its_last_sequence_is_gone() -> None:
    shares = Shares()
    shares.join("a")
    shares.join("a")
    shares.charge("a", 7)
    shares.leave("a")
    shares.join("b")
    assert shares.of("b") == 7


def test_callers_that_do_not_come_back_are_forgotten() -> None:
    shares = Shares()
    for index in range(10_000):
        shares.join(str(index))
        shares.charge(str(index), 3)
        shares.leave(str(index))
    assert len(shares._tokens) < 200
    assert shares.of("never seen") == shares.of("9999")
