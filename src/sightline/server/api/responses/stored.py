"""The handlers of stored responses."""

from __future__ import annotations

from sightline.server.api.fields import UNSUPPORTED_FIELD
from sightline.server.api.responses.answers import DeletedResponse
from sightline.server.http.errors import invalid, not_stored
from sightline.server.http.ingress import json_reply
from sightline.server.http.routing import Call, Reply
from sightline.server.store import ResponseStore


class StoredHandler:
    """Gives and forgets the responses that are stored under the caller's key."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def give(self, call: Call) -> Reply:
        response = self._store.find(call.caller, call.tail)
        if response is None:
            raise not_stored(call.tail, None)
        return Reply(response.body)

    async def delete(self, call: Call) -> Reply:
        if not self._store.delete(call.caller, call.tail):
            raise not_stored(call.tail, None)
        return json_reply(DeletedResponse(call.tail))

    async def cancel(self, call: Call) -> Reply:
        name, _, action = call.tail.rpartition("/")
        if action != "cancel":
            raise not_stored(call.tail, None)
        raise invalid(
            f"cancel is not supported: no response is generated in the background, so {name[:80]!r} is not under way; "
            "close the connection of a response to end it",
            code=UNSUPPORTED_FIELD,
        )
