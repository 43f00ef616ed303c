"""Handlers that report on the server and its model, and convert text to tokens and back."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from sightline.server.api.answers import (
    Detokenized,
    EngineState,
    ModelCard,
    Models,
    ServerInfo,
    Status,
    Tokens,
    Version,
)
from sightline.server.api.schema import DetokenizeRequest, TokenizeRequest
from sightline.server.http.errors import invalid, unavailable
from sightline.server.http.ingress import json_reply
from sightline.server.http.routing import Call, Reply
from sightline.server.metrics import ServiceMetrics
from sightline.server.process.supervisor import Supervisor
from sightline.server.service import RESTART_SECONDS, Service
from sightline.version import __version__


@dataclass(frozen=True)
class Patience:
    """When the engine counts as ready."""

    ready_seconds: float
    """A step that finished this recently is proof enough; otherwise one is requested."""
    probe_seconds: float
    """How long the requested step may take."""


class Inspection:
    """Handlers that generate nothing."""

    def __init__(self, service: Service, supervisor: Supervisor, metrics: ServiceMetrics, patience: Patience) -> None:
        self._service = service
        self._supervisor = supervisor
        self._metrics = metrics
        self._patience = patience

    async def models(self, call: Call[None]) -> Reply:
        del call
        return json_reply(Models("list", [self._model(name) for name in self._service.names]))

    async def model(self, call: Call[None]) -> Reply:
        return json_reply(self._model(self._service.check_model(call.tail)))

    async def tokenize(self, call: Call[TokenizeRequest]) -> Reply:
        request, desk = call.body, self._service.desk
        self._service.check_model(request.model)
        with self._service.admission.admitted(call.caller, 1):
            tokens = await self._tokens(call)
            spelled = await desk.spell(call.caller, tokens) if request.return_token_strs else None
        return json_reply(Tokens(tokens, len(tokens), self._service.opened.max_model_len, spelled))

    async def _tokens(self, call: Call[TokenizeRequest]) -> list[int]:
        request, desk = call.body, self._service.desk
        match request.prompt, request.messages:
            case None, list(messages):
                add = request.add_generation_prompt is not False
                switches = request.chat_template_kwargs
                return await desk.encode_chat(call.caller, messages, switches, add_generation_prompt=add)
            case str(text), None:
                encode = desk.encode_bare if request.add_special_tokens is False else desk.encode
                return await encode(call.caller, text)
            case _:
                raise invalid("expected either prompt or messages, got both or neither", "prompt")

    async def detokenize(self, call: Call[DetokenizeRequest]) -> Reply:
        service, tokens = self._service, call.body.tokens
        service.check_model(call.body.model)
        vocab_size, most = service.opened.vocab_size, service.opened.max_model_len
        if len(tokens) > most:
            raise invalid(f"expected at most {most} tokens, the size of the context, got {len(tokens)}", "tokens")
        if tokens and max(tokens) >= vocab_size:
            raise invalid(f"expected token ids from 0 to {vocab_size - 1}, got {max(tokens)}", "tokens")
        with service.admission.admitted(call.caller, 1):
            return json_reply(Detokenized(await service.desk.decode(call.caller, tokens)))

    async def health(self, call: Call[None]) -> Reply:
        del call
        return json_reply(Status("alive"))

    async def ready(self, call: Call[None]) -> Reply:
        del call
        port = self._service.port
        if self._service.is_draining:
            raise unavailable("the server is shutting down", RESTART_SECONDS)
        if not port.is_open:
            raise unavailable("the engine process is starting", RESTART_SECONDS)
        patience = self._patience
        is_stale = time.monotonic() - port.heard_at > patience.ready_seconds
        if is_stale and not await port.probe(patience.probe_seconds):
            raise unavailable(f"no forward pass finished in the last {patience.ready_seconds:g} s", RESTART_SECONDS)
        return json_reply(Status("ready"))

    async def metrics(self, call: Call[None]) -> Reply:
        del call
        return Reply(self._metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, call: Call[None]) -> Reply:
        del call
        return json_reply(Version(__version__))

    async def server_info(self, call: Call[None]) -> Reply:
        del call
        service, opened = self._service, self._service.opened
        limits = asdict(service.limits) | {
            "max_cost": service.max_cost,
            "max_sequences": opened.max_rows + opened.max_queued,
            "request_timeout": service.request_timeout,
        }
        return json_reply(
            ServerInfo(
                version=__version__,
                models=list(service.names),
                vocab_size=opened.vocab_size,
                engine=EngineState(service.port.is_open, self._supervisor.num_starts),
                config=opened.config,
                limits=limits,
                layers=list(opened.lines),
                degradations=[*opened.degradations, *map(str, service.ledger.degradations)],
                notes=[*opened.notes, *map(str, service.ledger.notes)],
            )
        )

    def _model(self, name: str) -> ModelCard:
        service = self._service
        return ModelCard(name, "model", service.created, "sightline", service.opened.max_model_len)
