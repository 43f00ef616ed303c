"""How much may be under way, and who gets the places."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.core.ledger import Ledger
from sightline.server.desks.pool import DeskPool
from sightline.server.http.admission import MAX_RETRY_AFTER, UNKNOWN_RETRY_AFTER, AdmissionGate
from sightline.server.http.errors import ApiError
from sightline.server.http.limits import ByteBudget, Limits
from sightline.server.metrics import ServiceMetrics
from sightline.server.process.port import EnginePort
from sightline.server.service import Service


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(capacity: int, *, shared: bool = False, clock: Clock | None = None) -> AdmissionGate:
    return AdmissionGate(capacity, shared=shared, clock=clock or Clock())


def refused(made: AdmissionGate, caller: str, count: int) -> ApiError:
    with pytest.raises(ApiError) as caught, made.admitted(caller, count):
        pass
    return caught.value


def test_so_many_and_no_more() -> None:
    made = admission(3)
    with made.admitted("", 2), made.admitted("", 1):
        error = refused(made, "", 1)
        assert error.status == 429
        assert error.retry_after is not None
    assert made.num_held == 0
    with made.admitted("", 3):
        assert made.num_held == 3


def test_places_come_back_however_it_ends() -> None:
    made = admission(1)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), made.admitted("a", 1):
            raise error
    assert made.num_held == 0


def test_one_of_several_callers_fills_half_and_the_next_finds_room() -> None:
    made = admission(8, shared=True)
    with made.admitted("flood", 4):
        assert refused(made, "flood", 1).status == 429
        with made.admitted("other", 2):
            assert refused(made, "other", 1).status == 429
            with made.admitted("third", 1):
                pass


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=60), st.integers(2, 40))
def test_whoever_holds_nothing_finds_room_unless_everything_is_taken(
    asked: list[tuple[str, int]], capacity: int
) -> None:
    made = admission(capacity, shared=True)
    with ExitStack() as held:
        for caller, count in asked:
            with suppress(ApiError):
                held.enter_context(made.admitted(caller, count))
            assert made.num_held <= capacity
        if made.num_held < capacity:
            made.check_room("nobody yet")
    assert made.num_held == 0


def test_more_than_ever_fits_is_invalid_and_not_busy() -> None:
    assert refused(admission(4), "", 5).status == 400
    assert refused(admission(8, shared=True), "", 5).status == 400


def test_nothing_is_admitted_before_the_model_is_loaded_or_while_draining() -> None:
    ledger, loaded = Ledger(strict=False), Future[AdmissionGate]()
    desks, answers = DeskPool(1, shared=False, seconds=1.0), ByteBudget(100, shared=False)
    service = Service(EnginePort(ServiceMetrics(ledger)), desks, loaded, answers, Limits(), (), None, ledger)
    assert refused_at_the_door(service).retry_after == 2
    assert service.num_under_way == 0
    loaded.set_result(AdmissionGate(4, shared=False))
    service.check_room("")
    with service.admission.admitted("", 3):
        assert service.num_under_way == 3
        service.is_draining = True
        assert "shutting down" in str(refused_at_the_door(service))
        assert service.num_under_way == 3


def refused_at_the_door(service: Service) -> ApiError:
    with pytest.raises(ApiError) as caught:
        service.check_room("")
    assert caught.value.status == 503
    return caught.value


def test_the_time_to_wait_follows_the_rate_of_ends() -> None:
    clock = Clock()
    made = admission(10, clock=clock)
    assert made.retry_after(1) == UNKNOWN_RETRY_AFTER
    for _ in range(5):
        with made.admitted("", 1):
            pass
        clock.now += 2.0
    assert made.retry_after(1) == 2
    assert made.retry_after(5) == 10
    assert made.retry_after(10_000) == MAX_RETRY_AFTER
    clock.now += 1000.0
    assert made.retry_after(5) == UNKNOWN_RETRY_AFTER
