"""What a simulation plays: the sizes of an engine, and what happens to it, when.

Plain frozen data, with an exact round trip through JSON, so that a run can be written down, cut shorter and played
again. Knows nothing of the engine: an event that finds nothing to act on has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import ClassVar, TypeAlias, TypeVar, get_type_hints

from sightline.core.errors import ConfigError
from sightline.testing.simulator.oracle import MAX_LEN

_T = TypeVar("_T")


@dataclass(frozen=True)
class Scene:
    """The engine that a scenario is played on."""

    page_size: int
    num_pages: int
    """That can be owned."""
    max_rows: int
    max_step_tokens: int
    max_len: int
    max_queued: int
    prefix_caching: bool
    async_scheduling: bool
    paranoid: bool
    """Plans are compared by content, too, and pages are filled with NaN when they come and when they go."""

    def __post_init__(self) -> None:
        sizes = (self.page_size, self.num_pages, self.max_rows, self.max_step_tokens, self.max_len, self.max_queued)
        if min(sizes) < 1 or self.max_len > MAX_LEN:
            raise ConfigError(f"expected sizes of at least 1 and max_len of at most {MAX_LEN}, got {self}")

    def fits(self, num_prompt: int, max_tokens: int) -> bool:
        """True where a request can run to its end: its last token takes no room in the cache."""
        longest = num_prompt + max_tokens
        return num_prompt > 0 and max_tokens > 0 and longest <= self.max_len and longest - 1 <= self.cache_tokens

    @property
    def cache_tokens(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True)
class ClientSubmits:
    """A client asks."""

    kind: ClassVar[str] = "submit"
    at: int
    """Of every event: the step before which it happens."""
    name: int
    """By which later events speak of it."""
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    caller: str = ""
    priority: int = 0
    timeout: float | None = None
    """Seconds of the virtual clock."""
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    streams: bool = False
    """The client reads after every step."""
    retries: int = 0
    """How often it asks again where it was refused, or its deadline passed."""


@dataclass(frozen=True)
class ClientCancels:
    """A client changes its mind, and takes what there is."""

    kind: ClassVar[str] = "cancel"
    at: int
    name: int


@dataclass(frozen=True)
class ClientGone:
    """A client hangs up: nobody will ask for what its request produced."""

    kind: ClassVar[str] = "client gone"
    at: int
    name: int


@dataclass(frozen=True)
class RefuseAllocations:
    """The next allocations fail, though there are pages."""

    kind: ClassVar[str] = "refuse allocations"
    at: int
    count: int


@dataclass(frozen=True)
class FailForward:
    """The next forward pass raises, once."""

    kind: ClassVar[str] = "fail forward"
    at: int


@dataclass(frozen=True)
class SlowForward:
    """The next forward pass takes so much longer."""

    kind: ClassVar[str] = "slow forward"
    at: int
    seconds: float


@dataclass(frozen=True)
class DeviceFault:
    """The device is gone from the next forward pass on."""

    kind: ClassVar[str] = "device fault"
    at: int


@dataclass(frozen=True)
class Close:
    """The engine is shut down with whatever it is doing."""

    kind: ClassVar[str] = "close"
    at: int


Event: TypeAlias = (
    ClientSubmits | ClientCancels | ClientGone | RefuseAllocations | FailForward | SlowForward | DeviceFault | Close
)
_EVENTS: Mapping[str, type[Event]] = {
    event.kind: event
    for event in (
        ClientSubmits,
        ClientCancels,
        ClientGone,
        RefuseAllocations,
        FailForward,
        SlowForward,
        DeviceFault,
        Close,
    )
}


@dataclass(frozen=True)
class Scenario:
    """Everything that a run depends on."""

    scene: Scene
    events: tuple[Event, ...]
    """By `at`; those of one step happen in this order."""

    def __post_init__(self) -> None:
        scene = self.scene
        if any(later.at < earlier.at for earlier, later in pairwise(self.events)):
            raise ConfigError("expected events in the order in which they happen, got an earlier one after a later one")
        for event in self.events:
            if isinstance(event, ClientSubmits) and not scene.fits(len(event.prompt), event.max_tokens):
                raise ConfigError(f"expected requests that the scene has room for, got {event}")

    def to_json(self) -> str:
        """One line for the scene and one for each event; what an event leaves at its default is left out."""
        events = ",\n  ".join(json.dumps(_told(event)) for event in self.events)
        return f'{{"scene": {json.dumps(asdict(self.scene))},\n "events": [\n  {events}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Scenario:
        """Raises `ConfigError` for a text that is no scenario."""
        try:
            read = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"expected a script in JSON, got a text that is none: {error}") from error
        if not isinstance(read, dict) or read.keys() != {"scene", "events"} or not isinstance(read["events"], list):
            raise ConfigError("expected a script with a scene and a list of events, got something else")
        return Scenario(_read(Scene, read["scene"]), tuple(_read_event(event) for event in read["events"]))


def _told(event: Event) -> dict[str, object]:
    defaults = {field.name: field.default for field in fields(event)}
    given = {name: value for name, value in asdict(event).items() if value != defaults[name]}
    return {"event": event.kind, **given}


def _read_event(given: object) -> Event:
    kind = given.get("event") if isinstance(given, dict) else None
    event = _EVENTS.get(kind) if isinstance(kind, str) else None
    if not isinstance(given, dict) or event is None:
        raise ConfigError(f"expected an event out of {sorted(_EVENTS)}, got {given!r}")
    return _read(event, {name: value for name, value in given.items() if name != "event"})


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)


_FITS: Mapping[object, Callable[[object], bool]] = {
    int: _is_integer,
    float: _is_number,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    int | None: lambda value: value is None or _is_integer(value),
    float | None: lambda value: value is None or _is_number(value),
    tuple[int, ...]: lambda value: isinstance(value, tuple) and all(map(_is_integer, value)),
}


def _read(target: type[_T], given: object) -> _T:
    """An object of a class of plain fields, each of which has the type that the class says."""
    if not isinstance(given, dict):
        raise ConfigError(f"expected the fields of {target.__name__}, got {given!r}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    hints = get_type_hints(target)
    for name, value in values.items():
        if name not in hints or name == "kind" or not _FITS[hints[name]](value):
            raise ConfigError(f"expected the fields of {target.__name__}, got {name} = {value!r}")
    try:
        return target(**values)
    except TypeError as error:
        raise ConfigError(f"expected every field of {target.__name__}, got {sorted(values)}") from error
