"""The requests of a load and when they are sent: prompts, lengths, sampling parameters and arrivals, all from a seed.

Knows no connection and no clock.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from random import Random

from sightline.core.errors import ConfigError

_COMMON_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new "
    "sound take only little work know place year live me back give most very after thing our just name good sentence "
    "man think say great where help through much before line right too mean old any same tell boy follow came want "
    "show also around form three small set put end does another well large must big even such because turn here why "
    "ask went men read need land different home us move try kind hand picture again change off play spell air away "
    "animal house point page letter mother answer found study still learn should world high every near add food "
    "between own below country plant"
)


class Endpoint(Enum):
    """The API endpoint."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class DatasetName(Enum):
    """How the lengths of prompts and answers are drawn."""

    RANDOM = "random"
    SHAREGPT_LIKE = "sharegpt-like"


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths in tokens, clipped to bounds."""

    median: int
    sigma: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        return round(min(max(random.lognormvariate(math.log(self.median), self.sigma), self.least), self.most))

    def __str__(self) -> str:
        return f"log-normal, median {self.median}, sigma {self.sigma:g}, {self.least} to {self.most}"


CONVERSATION_PROMPTS = LogNormal(median=60, sigma=1.4, least=4, most=1024)
CONVERSATION_ANSWERS = LogNormal(median=230, sigma=0.9, least=4, most=1024)
"""Fitted to published means, not to the data: before clipping the means are 160 and 345, close to the 161 and 338 that
the PagedAttention paper (2023) gives for ShareGPT."""


@dataclass(frozen=True)
class Ask:
    """One request: a prompt, as text or token ids, and the number of tokens to generate."""

    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Dataset:
    """A seeded set of random prompts. Equal datasets draw equal prompts."""

    name: DatasetName = DatasetName.RANDOM
    num_prompts: int = 100
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    """Random lengths differ from the lengths above by at most this share."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"expected a range ratio of at least 0 and below 1, got {self.range_ratio:g}")

    def draw(self, vocab_size: int | None) -> list[Ask]:
        """Draws token ids below `vocab_size`, or common English words as text if it is None."""
        random = Random(self.seed)
        asks = []
        for _ in range(self.num_prompts):
            length, max_tokens = self._lengths(random)
            asks.append(Ask(_draw_prompt(random, length, vocab_size), max_tokens))
        return asks

    def describe(self, vocab_size: int | None) -> str:
        """Describes the prompts in words."""
        kind = "English words as text" if vocab_size is None else f"token ids below {vocab_size}"
        unit = "words" if vocab_size is None else "tokens"
        if self.name is DatasetName.SHAREGPT_LIKE:
            lengths = f"prompts in {unit}: {CONVERSATION_PROMPTS}; answers in tokens: {CONVERSATION_ANSWERS}"
        else:
            spread = f", each within {self.range_ratio:.0%}" if self.range_ratio else ""
            lengths = f"prompts of {self.input_len} {unit}, answers of {self.output_len} tokens{spread}"
        return f"{self.name.value}: {kind}, {lengths}; seed {self.seed}"

    def _lengths(self, random: Random) -> tuple[int, int]:
        if self.name is DatasetName.SHAREGPT_LIKE:
            return CONVERSATION_PROMPTS.draw(random), CONVERSATION_ANSWERS.draw(random)
        return self._near(random, self.input_len), self._near(random, self.output_len)

    def _near(self, random: Random, length: int) -> int:
        return max(1, random.randint(round(length * (1 - self.range_ratio)), round(length * (1 + self.range_ratio))))


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of every request."""

    temperature: float = 0.0
    ignore_eos: bool = True
    """Gives answers the requested length. Sent only if true, because not every server knows the field."""
    seed: int = 0
    """Seed of the first request, plus one for each later one. Sent only if the temperature is above 0."""

    def fields(self, index: int) -> dict[str, object]:
        """The request fields of request `index`."""
        sent: dict[str, object] = {"temperature": self.temperature}
        if self.ignore_eos:
            sent["ignore_eos"] = True
        if self.temperature > 0:
            sent["seed"] = self.seed + index
        return sent


@dataclass(frozen=True)
class Arrivals:
    """When requests are sent."""

    request_rate: float | None = None
    """Requests per second; None sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the intervals: 1 is Poisson, less gives bursts."""
    max_concurrency: int | None = None
    """Most requests at once. Others wait in the client, which no latency includes."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("request rate", self.request_rate), ("burstiness", self.burstiness)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"expected a {name} above 0, got {value:g}")

    def offsets(self, count: int) -> list[float]:
        """Seconds after the first request, in order."""
        if self.request_rate is None:
            return [0.0] * count
        random, scale = Random(self.seed), 1 / (self.request_rate * self.burstiness)
        gaps = (random.gammavariate(self.burstiness, scale) for _ in range(count - 1))
        return list(accumulate(gaps, initial=0.0))[:count]

    def __str__(self) -> str:
        if self.request_rate is None:
            when = "all at once"
        else:
            shape = "Poisson" if self.burstiness == 1 else f"gamma with burstiness {self.burstiness:g}"
            when = f"{self.request_rate:g} per second ({shape}, seed {self.seed})"
        return when if self.max_concurrency is None else f"{when}, at most {self.max_concurrency} at once"


def payload(ask: Ask, index: int, model: str, endpoint: Endpoint, sampling: Sampling, *, stream: bool) -> bytes:
    """The body of request `index`."""
    body: dict[str, object] = {"model": model, "max_tokens": ask.max_tokens, **sampling.fields(index)}
    if endpoint is Endpoint.CHAT:
        body["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        body["prompt"] = ask.prompt
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


def _draw_prompt(random: Random, length: int, vocab_size: int | None) -> str | tuple[int, ...]:
    if vocab_size is None:
        return " ".join(random.choices(_COMMON_WORDS.split(), k=length))
    return tuple(random.choices(range(vocab_size), k=length))
