"""Commands of a front end, with prompts and parameters as a person writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sightline.core.request import SamplingParams, Terms
from sightline.server.process.frames import pack_tokens
from sightline.server.process.protocol import Submit
from sightline.server.process.window import UnreadLimit


def submit(
    prompts: Mapping[int, Sequence[int]],
    params: SamplingParams | None,
    terms: Terms,
    max_unread: UnreadLimit | None = None,
) -> Submit:
    """Prompts by number; without `params` it asks for vectors."""
    packed = {number: pack_tokens(prompt) for number, prompt in prompts.items()}
    return Submit(packed, None if params is None else msgspec.msgpack.encode(params), terms, max_unread)


class Unbounded:
    """Room for any number of bytes."""

    def take(self, count: int) -> bool:
        return count >= 0

    def give_back(self, count: int) -> None: ...


UNBOUNDED = Unbounded()
