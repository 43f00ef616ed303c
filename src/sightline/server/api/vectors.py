"""The handler of embeddings, and of what is computed from them."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from sightline.server.desks.protocol import EmbeddedTexts, FormName, Head
from sightline.server.http.errors import failed, unavailable
from sightline.server.http.routing import Call, Reply
from sightline.server.process.port import AnswerTooLargeError, EngineDownError, RefusedError, RequestFailedError
from sightline.server.service import RESTART_SECONDS, Service


class VectorHandler:
    """The handler of one kind of request for vectors."""

    def __init__(self, service: Service, form: FormName) -> None:
        self._service = service
        self._form = form

    async def handle(self, call: Call) -> Reply:
        service = self._service
        with ExitStack() as held:
            order = await service.order(call, self._form, held)
            try:
                answers = service.submit(call, order, held)
                async with asyncio.timeout(service.request_timeout):
                    vectors = await answers.vectors()
            except TimeoutError as error:
                raise unavailable(
                    f"the texts were not embedded within {service.request_timeout:g} s; send fewer", RESTART_SECONDS
                ) from error
            except (EngineDownError, AnswerTooLargeError) as error:
                raise unavailable(str(error), RESTART_SECONDS) from error
            except RequestFailedError as error:
                raise failed(f"the engine could not embed a text: {error}") from error
            except RefusedError as error:
                raise service.refusal(error, len(order.prompts), None) from error
            head = Head(f"{self._form}-{call.answer_id}", int(time.time()), order.model)
            call.trace.response_id = head.id
            outcome = EmbeddedTexts(sum(answers.prompt_lens.values()), [vector.numbers for vector in vectors])
            return await service.write(call, self._form, order.ticket, head, outcome, ())
