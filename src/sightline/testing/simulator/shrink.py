"""Shortens a scenario in which something goes wrong, for as long as something still goes wrong.

Removes events, moves the others closer together, simplifies them, then simplifies the scene. Knows scenarios; the
caller says what "wrong" means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from msgspec import NODEFAULT
from msgspec.structs import asdict, fields, replace

from sightline.testing.simulator.scenario import ClientSubmits, Event, RefuseAllocations, Scenario, Scene, SlowForward


def shrink(scenario: Scenario, wrong_step: Callable[[Scenario], int | None], max_replays: int = 300) -> Scenario:
    """Returns a short scenario that goes wrong too.

    `wrong_step` plays a scenario and returns the step at which it goes wrong, or None.
    """
    shrinking = _Shrinking(scenario, wrong_step, max_replays)
    shrinking.attempt(scenario)
    before = -1
    while before != shrinking.num_accepted:
        before = shrinking.num_accepted
        shrinking.drop_events()
        shrinking.draw_together()
        for index in range(len(shrinking.scenario.events)):
            shrinking.simplify(partial(_with_simpler_event, index=index))
        shrinking.simplify(_with_simpler_scene)
    return shrinking.scenario


class _Shrinking:
    """The shortest scenario so far."""

    def __init__(self, scenario: Scenario, wrong_step: Callable[[Scenario], int | None], max_replays: int) -> None:
        self.scenario = scenario
        self.num_accepted = 0
        self._wrong_step = wrong_step
        self._replays_left = max_replays

    def attempt(self, candidate: Scenario) -> bool:
        """Accepts a candidate that goes wrong too, without the events after that step, while replays are left."""
        if self._replays_left == 0:
            return False
        self._replays_left -= 1
        step = self._wrong_step(candidate)
        if step is None:
            return False
        self.scenario = replace(candidate, events=tuple(event for event in candidate.events if event.at <= step))
        self.num_accepted += 1
        return True

    def drop_events(self) -> None:
        """Removes ever shorter runs of events, the last ones first: late events depend on early ones."""
        size = len(self.scenario.events) // 2
        while size > 0:
            stop = len(self.scenario.events)
            while stop > 0:
                start = max(0, stop - size)
                events = self.scenario.events
                self.attempt(replace(self.scenario, events=events[:start] + events[stop:]))
                stop = min(start, len(self.scenario.events))
            size //= 2

    def draw_together(self) -> None:
        """Removes steps without events before each event."""
        index = 0
        while index < len(self.scenario.events):
            events = self.scenario.events
            gap = events[index].at - (events[index - 1].at if index else 0)
            for less in (gap, gap // 2, 1):
                moved = tuple(replace(event, at=event.at - less) for event in events[index:])
                if 0 < less <= gap and self.attempt(replace(self.scenario, events=events[:index] + moved)):
                    break
            index += 1

    def simplify(self, simpler: Callable[[Scenario], Iterable[Scenario]]) -> None:
        """Replaces the scenario by a simpler one until none goes wrong too."""
        while any(self.attempt(candidate) for candidate in simpler(self.scenario)):
            pass


def _with_simpler_event(scenario: Scenario, index: int) -> Iterator[Scenario]:
    events = scenario.events
    for event in _simpler_events(events[index]) if index < len(events) else ():
        yield replace(scenario, events=(*events[:index], event, *events[index + 1 :]))


def _simpler_events(event: Event) -> Iterator[Event]:
    match event:
        case ClientSubmits():
            defaults = {field.name: field.default for field in fields(event) if field.default is not NODEFAULT}
            plain = {name: value for name, value in defaults.items() if asdict(event)[name] != value}
            if len(plain) > 1:
                yield replace(event, **plain)
            for name, value in plain.items():
                yield replace(event, **{name: value})
            if event.max_tokens > 1:
                yield replace(event, max_tokens=event.max_tokens // 2)
                yield replace(event, max_tokens=event.max_tokens - 1)
            if len(event.prompt) > 1:
                yield replace(event, prompt=event.prompt[: len(event.prompt) // 2])
                yield replace(event, prompt=event.prompt[:-1])
                yield replace(event, prompt=event.prompt[1:])
        case RefuseAllocations(count=count) if count > 1:
            yield replace(event, count=count - 1)
        case SlowForward(seconds=seconds) if seconds > 1.0:
            yield replace(event, seconds=seconds / 2)
        case _:
            return


def _with_simpler_scene(scenario: Scenario) -> Iterator[Scenario]:
    for scene in _simpler_scenes(scenario):
        yield replace(scenario, scene=scene)


def _simpler_scenes(scenario: Scenario) -> Iterator[Scene]:
    scene = scenario.scene
    for name in ("paranoid", "async_scheduling", "prefix_caching"):
        if asdict(scene)[name]:
            yield replace(scene, **{name: False})
    if scene.drafting is not None:
        yield replace(scene, drafting=None)
        if scene.drafting.num_branches > 1:
            yield replace(scene, drafting=replace(scene.drafting, num_branches=1))
    if scene.host is not None:
        yield replace(scene, host=None)
        yield replace(scene, host=replace(scene.host, lateness=0.0, failures=0.0))
    if scene.max_rows > 1:
        yield replace(scene, max_rows=scene.max_rows - 1)
    smaller = replace(scene, max_len=max(1, scene.max_len * 3 // 4))
    asked = [event for event in scenario.events if isinstance(event, ClientSubmits)]
    if smaller != scene and all(smaller.fits(len(event.prompt), event.max_tokens) for event in asked):
        yield smaller
