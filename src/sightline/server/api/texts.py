"""The handler of text to tokens and back, which needs no engine."""

from __future__ import annotations

from sightline.server.desks.protocol import FormName
from sightline.server.http.routing import Call, Reply
from sightline.server.service import Service


class TextHandler:
    """The handler of one kind of request that a desk answers alone."""

    def __init__(self, service: Service, form: FormName) -> None:
        self._service = service
        self._form = form

    async def handle(self, call: Call) -> Reply:
        return await self._service.answer_at_desk(call, self._form)
