"""Scenarios: the sizes of an engine, and the events that happen to it.

A scenario is frozen data that goes through JSON unchanged, so that a run can be saved, shortened and replayed. An event
that finds nothing to act on has no effect. Knows nothing of the engine.
"""

from __future__ import annotations

import json
from enum import Enum
from itertools import pairwise
from typing import TypeAlias

import msgspec
from msgspec.structs import asdict, fields

from sightline.core.errors import ConfigError
from sightline.testing.simulator.oracle import MAX_LEN


class RankLoss(Enum):
    """How another rank is lost."""

    DIES = "dies"
    """Before it gets an order."""
    DIES_IN_A_STEP = "dies in a step"
    STALLS = "stalls"
    """It takes no part in a step, which is noticed after a while."""


class Drafting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are guessed."""

    honesty: float
    """How often a guess is the truth, from 0 to 1."""
    most: int
    """Tokens that are guessed at once, in each branch."""
    num_branches: int
    """Above 1, guesses are trees."""
    adapts: bool
    """True if guesses follow how many were right before."""
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.honesty <= 1.0 or min(self.most, self.num_branches) < 1:
            raise ConfigError(f"expected an honesty from 0 to 1 and sizes of at least 1, got {self}")


class HostScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How pages are kept in host memory."""

    num_blocks: int
    lateness: float
    """How often a transfer has not ended when it is asked for, from 0 to below 1."""
    failures: float
    """How often a transfer fails, from 0 to 1."""
    seed: int

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or not 0.0 <= self.lateness < 1.0 or not 0.0 <= self.failures <= 1.0:
            raise ConfigError(f"expected a block, a lateness from 0 to below 1 and failures from 0 to 1, got {self}")


class Scene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes and settings of the engine."""

    page_size: int
    num_pages: int
    """Without the padding page."""
    max_rows: int
    max_step_tokens: int
    max_len: int
    max_queued: int
    prefix_caching: bool
    async_scheduling: bool
    paranoid: bool
    """Also compares the contents of plans, and fills pages with NaN when they are allocated and freed."""
    max_step_ticks: int | None = None
    """Limit of the time of steps while rows generate. With it, logits take time too."""
    drafting: Drafting | None = None
    """How tokens are guessed; None if they are not."""
    max_checkpoints: int | None = None
    """States that may be kept for others, if the model has a recurrent group; None if it has none."""
    top_k: int | None = None
    """Tokens that the sparse layer of the model attends to; None if it has none."""
    hot_per_choice: int | None = None
    """Hot entries of each row per chosen one, with those that indexers choose from in host memory; None: all are on the
    device."""
    num_ranks: int = 1
    """Processes that share the model."""
    num_replicas: int = 1
    """Replicas of the model among them, with rows and a cache each."""
    pads_replicas: bool = False
    """True if the steps of all replicas have one size, as if they computed experts together."""
    host: HostScene | None = None
    """How pages are kept in host memory; None if they are not. Has no effect without `prefix_caching`."""

    def __post_init__(self) -> None:
        sizes = (self.page_size, self.num_pages, self.max_rows, self.max_step_tokens, self.max_len, self.max_queued)
        if min(sizes) < 1 or self.max_len > MAX_LEN:
            raise ConfigError(f"expected sizes of at least 1 and max_len of at most {MAX_LEN}, got {self}")
        if self.num_replicas < 1 or self.num_ranks % self.num_replicas:
            raise ConfigError(f"expected ranks in replicas of one size, got {self}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"expected at least 1 chosen token, got {self}")
        if self.hot_per_choice is not None and (self.top_k is None or self.host is not None):
            raise ConfigError(f"expected hot entries of a sparse layer and without a host tier, got {self}")
        if self.drafting is not None and (self.async_scheduling or self.max_step_ticks is not None):
            raise ConfigError("expected drafting without async_scheduling and max_step_ticks, got both")
        has_trees = self.drafting is not None and self.drafting.num_branches > 1
        if self.max_checkpoints is not None and (has_trees or self.max_checkpoints < 0):
            raise ConfigError(
                f"expected a model with states to guess chains, and no fewer checkpoints than 0, got {self}"
            )

    def fits(self, num_prompt: int, max_tokens: int) -> bool:
        """True if a request can run to its end. Its last token needs no room in the cache."""
        longest = num_prompt + max_tokens
        return num_prompt > 0 and max_tokens > 0 and longest <= self.max_len and longest - 1 <= self.cache_tokens

    @property
    def cache_tokens(self) -> int:
        return self.num_pages * self.page_size


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    at: int
    """The step before which it happens."""


class ClientSubmits(_Event, frozen=True, tag="submit"):
    """A client submits a request."""

    name: int
    """Identifies the request in later events."""
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
    """True if the client reads after every step."""
    retries: int = 0
    """How often the client retries if it is refused, or if its deadline passes."""


class ClientCancels(_Event, frozen=True, tag="cancel"):
    """A client cancels its request and takes the tokens so far."""

    name: int


class ClientGone(_Event, frozen=True, tag="client gone"):
    """A client disconnects. Nobody will ask for its request's output."""

    name: int


class ClientStalls(_Event, frozen=True, tag="stall"):
    """A client stops reading, so that its request is paused."""

    name: int


class ClientReads(_Event, frozen=True, tag="read"):
    """A client reads again, so that its request is resumed."""

    name: int


class RefuseAllocations(_Event, frozen=True, tag="refuse allocations"):
    """The next allocations fail, even if there are free pages."""

    count: int


class FailForward(_Event, frozen=True, tag="fail forward"):
    """The next forward pass raises, once."""


class SlowForward(_Event, frozen=True, tag="slow forward"):
    """The next forward pass takes longer."""

    seconds: float


class LoseRank(_Event, frozen=True, tag="lose rank"):
    """A rank is lost from its next order, or step, on."""

    how: RankLoss


class DeviceFault(_Event, frozen=True, tag="device fault"):
    """The device is lost from the next forward pass on."""


class Close(_Event, frozen=True, tag="close"):
    """The engine is closed, whatever it is doing."""


Event: TypeAlias = (
    ClientSubmits
    | ClientCancels
    | ClientGone
    | ClientStalls
    | ClientReads
    | RefuseAllocations
    | FailForward
    | SlowForward
    | LoseRank
    | DeviceFault
    | Close
)


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a run depends on."""

    scene: Scene
    events: tuple[Event, ...]
    """Sorted by `at`; events of one step happen in this order."""

    def __post_init__(self) -> None:
        scene = self.scene
        if any(later.at < earlier.at for earlier, later in pairwise(self.events)):
            raise ConfigError("expected events in the order in which they happen, got an earlier one after a later one")
        for event in self.events:
            if isinstance(event, ClientSubmits) and not scene.fits(len(event.prompt), event.max_tokens):
                raise ConfigError(f"expected requests that the scene has room for, got {event}")

    def to_json(self) -> str:
        """One line for the scene and one for each event, without fields that have their default value."""
        events = ",\n  ".join(json.dumps(_told(event)) for event in self.events)
        return f'{{"scene": {json.dumps(msgspec.to_builtins(self.scene))},\n "events": [\n  {events}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Scenario:
        """Raises `ConfigError` if the text is not a scenario."""
        try:
            return msgspec.json.decode(text, type=Scenario)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"expected a scenario with a scene and events in JSON, got something else: {error}"
            ) from error


def _told(event: Event) -> dict[str, object]:
    defaults = {field.name: field.default for field in fields(event)}
    given = {name: value for name, value in asdict(event).items() if value != defaults[name]}
    return {"event": event.__struct_config__.tag, **given}
