"""Handlers that report on the server and its model."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from sightline.server.api.answers import (
    EngineState,
    HostCacheState,
    ModelCard,
    Models,
    ServerInfo,
    Status,
    Version,
)
from sightline.server.http.errors import check_model, unavailable
from sightline.server.http.ingress import json_reply
from sightline.server.http.routing import Call, Reply
from sightline.server.metrics import ServiceMetrics
from sightline.server.process.supervisor import Supervisor
from sightline.server.service import DRAIN_SECONDS, RESTART_SECONDS, Service
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

    async def models(self, call: Call) -> Reply:
        del call
        return json_reply(Models("list", [self._model(name) for name in self._service.names]))

    async def model(self, call: Call) -> Reply:
        return json_reply(self._model(check_model(call.tail, self._service.names)))

    async def health(self, call: Call) -> Reply:
        del call
        return json_reply(Status("alive"))

    async def ready(self, call: Call) -> Reply:
        del call
        port = self._service.port
        if self._service.is_draining:
            raise unavailable("the server is shutting down; use another one", DRAIN_SECONDS)
        if not port.is_open:
            doing = f": {port.doing}" if port.doing else ""
            raise unavailable(f"the engine process is starting{doing}", RESTART_SECONDS)
        if not self._service.is_reading:
            raise unavailable("the text processes are starting", RESTART_SECONDS)
        patience = self._patience
        is_stale = time.monotonic() - port.heard_at > patience.ready_seconds
        if is_stale and not await port.probe(patience.probe_seconds):
            raise unavailable(f"no forward pass finished in the last {patience.ready_seconds:g} s", RESTART_SECONDS)
        return json_reply(Status("ready"))

    async def metrics(self, call: Call) -> Reply:
        del call
        return Reply(
            await self._metrics.text(self._service.metrics_name),
            content_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def version(self, call: Call) -> Reply:
        del call
        return json_reply(Version(__version__))

    async def server_info(self, call: Call) -> Reply:
        del call
        service, opened = self._service, self._service.opened
        limits = asdict(service.limits) | {
            "max_cost": service.max_cost,
            "max_sequences": opened.max_rows + opened.max_queued,
            "request_timeout": service.request_timeout,
            "max_front_end_bytes": service.memory_bound,
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
                host_cache=self._host_cache(),
                tools_refusal=opened.tools_refusal,
            )
        )

    def _host_cache(self) -> HostCacheState | None:
        latest = self._metrics.engine.latest
        if latest is None or not latest.host_cache_bytes:
            return None
        return HostCacheState(
            bytes=latest.host_cache_bytes,
            blocks=latest.host_cache_blocks,
            usage=latest.host_cache_usage_perc,
            offloads=latest.host_cache_offloads,
            returns=latest.host_cache_returns,
            failures=latest.host_cache_failures,
            hit_tokens=latest.prefix_cache_host_hits,
        )

    def _model(self, name: str) -> ModelCard:
        service = self._service
        return ModelCard(name, "model", service.created, "sightline", service.opened.max_model_len)
