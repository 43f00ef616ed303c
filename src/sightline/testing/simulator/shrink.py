"""From a scenario in which something goes wrong to a short one in which something still does.

First fewer events, then simpler ones closer together, then a simpler scene. Knows scenarios. What "wrong" means is
the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sightline.testing.simulator.scenario import ClientSubmits, Event, RefuseAllocations, Scenario, Scene, SlowForward

_PLAIN: dict[str, object] = {
    "n": 1,
    "caller": "",
    "priority": 0,
    "timeout": None,
    "stop_token_ids": (),
    "temperature": 0.0,
    "seed": 0,
    "frequency_penalty": 0.0,
    "logprobs": None,
    "prompt_logprobs": None,
    "streams": False,
    "retries": 0,
}
"""The fields of a request that it need not have, as those have them that do without."""


def shrink(scenario: Scenario, wrong_step: Callable[[Scenario], int | None], max_replays: int = 300) -> Scenario:
    """A scenario that is wrong too; `wrong_step` plays one and says at which step it is, or None where it is right."""
    shrinking = _Shrinking(scenario, wrong_step, max_replays)
    shrinking.attempt(scenario)
    length = -1
    while length != shrinking.num_accepted:
        length = shrinking.num_accepted
        shrinking.drop_events()
        shrinking.draw_together()
        shrinking.simplify_events()
        shrinking.simplify_scene()
    return shrinking.scenario


class _Shrinking:
    """The shortest scenario so far."""

    def __init__(self, scenario: Scenario, wrong_step: Callable[[Scenario], int | None], max_replays: int) -> None:
        self.scenario = scenario
        self.num_accepted = 0
        self._wrong_step = wrong_step
        self._replays_left = max_replays

    def attempt(self, candidate: Scenario) -> bool:
        """Takes a candidate that is wrong too, up to where it is, while there are replays left."""
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
        """Runs of events, ever shorter ones, the last first: what comes late depends on what came before."""
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
        """Steps in which nothing happens, before an event and all after it."""
        for index in range(len(self.scenario.events)):
            if index >= len(self.scenario.events):
                return
            events = self.scenario.events
            gap = events[index].at - (events[index - 1].at if index else 0)
            for less in (gap, gap // 2, 1):
                moved = tuple(replace(event, at=event.at - less) for event in events[index:])
                if 0 < less <= gap and self.attempt(replace(self.scenario, events=events[:index] + moved)):
                    break

    def simplify_events(self) -> None:
        for index in range(len(self.scenario.events)):
            self._simplify_event(index)

    def _simplify_event(self, index: int) -> None:
        """Until nothing simpler is wrong too."""
        going = True
        while going and index < len(self.scenario.events):
            events = self.scenario.events
            going = any(
                self.attempt(replace(self.scenario, events=(*events[:index], event, *events[index + 1 :])))
                for event in _simpler_events(events[index])
            )

    def simplify_scene(self) -> None:
        going = True
        while going:
            going = any(self.attempt(replace(self.scenario, scene=scene)) for scene in _simpler_scenes(self.scenario))


def _simpler_events(event: Event) -> Iterator[Event]:
    match event:
        case ClientSubmits():
            plain = {name: value for name, value in _PLAIN.items() if vars(event)[name] != value}
            if len(plain) > 1:
                yield replace(event, **plain)  # type: ignore[arg-type]
            for name, value in plain.items():
                yield replace(event, **{name: value})  # type: ignore[arg-type]
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


def _simpler_scenes(scenario: Scenario) -> Iterator[Scene]:
    scene = scenario.scene
    for name in ("paranoid", "async_scheduling", "prefix_caching"):
        if vars(scene)[name]:
            yield replace(scene, **{name: False})
    if scene.max_rows > 1:
        yield replace(scene, max_rows=scene.max_rows - 1)
    smaller = replace(scene, max_len=max(1, scene.max_len * 3 // 4))
    asked = [event for event in scenario.events if isinstance(event, ClientSubmits)]
    if smaller != scene and all(smaller.fits(len(event.prompt), event.max_tokens) for event in asked):
        yield smaller
