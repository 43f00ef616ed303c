"""The composition root of the server, and its life cycle: start, serve, drain, end.

SIGTERM ─▶ new requests get 503 ─▶ open ones finish, or the deadline passes ─▶ engine process is stopped ─▶ exit 0
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import uvicorn

from sightline.core.config import EngineConfig, Task
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.request import MAX_TIMEOUT, Terms
from sightline.core.settings import stated
from sightline.server.api.inspection import Inspection, Patience
from sightline.server.api.openapi import openapi_document
from sightline.server.api.routes import route_table
from sightline.server.desks.pool import DESK, DeskPool
from sightline.server.desks.protocol import MAX_JOB_BYTES, Setup
from sightline.server.http.access import HostList, Keyring, is_local
from sightline.server.http.admission import AdmissionGate
from sightline.server.http.bounds import NOTSENT_LOWAT, UNSENT_BYTES, BoundedProtocol, bounded
from sightline.server.http.cors import CorsPolicy
from sightline.server.http.ingress import Ingress
from sightline.server.http.limits import ByteBudget, Limits
from sightline.server.logs import log
from sightline.server.metrics import ServiceMetrics
from sightline.server.process.port import EnginePort, EngineStartError
from sightline.server.process.protocol import Configure, Opened
from sightline.server.process.supervisor import WORKER, Supervisor
from sightline.server.service import Service
from sightline.server.store import ResponseStore
from sightline.server.traces import open_traces

logger = logging.getLogger("sightline.server")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
END_SECONDS = 5.0
"""How long the engine process and open connections may take to end once every request is answered."""
KEEP_ALIVE_SECONDS = 75
BASE_BYTES = 192 << 20
"""Memory of a front end without requests, with the frames that it reads and the tokenizer that it hands to desks."""
CONNECTION_BYTES = 96 << 10
"""Memory of a connection: its headers, a full write buffer, and the objects that serve it."""


@dataclass(frozen=True)
class ServerConfig:
    """How to serve; what to serve is an `EngineConfig`."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 chooses a free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    """Sites whose pages may use the server."""
    otlp_traces_endpoint: str | None = None
    """Where traces are sent, by OTLP over HTTP."""
    limits: Limits = field(default_factory=Limits)
    request_timeout: float | None = None
    drain_seconds: float = 30.0
    """How long open requests may go on after the server is told to end."""
    stall_seconds: float = 300.0
    """An engine process that has work and finishes no step for this long is replaced."""
    ready_seconds: float = 10.0
    """A step that finished this recently shows that the engine works; otherwise `/ready` asks for one."""
    probe_seconds: float = 5.0
    """How long a step that `/ready` asks for may take."""
    text_processes: int = 2
    """Desks: processes that read bodies and write answers."""
    text_seconds: float = 10.0
    """How long a desk may take over one body or answer."""
    strict: bool = False
    allows_unknown_fields: bool = False
    """Names fields of bodies that no route knows in a header, instead of refusing them."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("request_timeout", "drain_seconds", "stall_seconds", "text_seconds"):
            seconds: float | None = getattr(self, name)
            if seconds is not None and not 0 <= seconds <= MAX_TIMEOUT:
                raise ConfigError(f"expected {name} between 0 and {MAX_TIMEOUT:g} seconds, got {seconds:g}")
        for name in ("max_body_bytes", "max_answer_bytes", "max_stored_bytes"):
            most: int = getattr(self.limits, name)
            if most > MAX_JOB_BYTES // 2:
                raise ConfigError(f"expected {name} of at most {MAX_JOB_BYTES // 2:,}, got {most:,}")


class Server:
    """A front end, and the engine process behind it."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineConfig,
        on_open: Callable[[str, Opened], None],
        worker: Sequence[str] = WORKER,
        desk: Sequence[str] = DESK,
    ) -> None:
        """`on_open` is called with the address and the engine's report once the model is loaded.

        `worker` is the command that starts an engine process, `desk` the one that starts a desk.
        """
        self._config = config
        self._on_open = on_open
        self._ledger = Ledger(strict=config.strict)
        self._metrics = ServiceMetrics(self._ledger)
        self._port = EnginePort(self._metrics)
        self._supervisor = Supervisor(
            Configure(engine, config.log_level), self._port, stall_seconds=config.stall_seconds, command=worker
        )
        keys = Keyring(config.api_keys)
        self._has_several_callers = len(keys) > 1
        cors = CorsPolicy(config.cors_origins)
        self._note_exposure(keys, cors)
        self._traces = open_traces(config.otlp_traces_endpoint, self._metrics.spans_dropped)
        self._loaded: Future[AdmissionGate] = Future()
        self._desks = DeskPool(
            config.text_processes, shared=self._has_several_callers, seconds=config.text_seconds, command=desk
        )
        self._service = Service(
            self._port,
            self._desks,
            self._loaded,
            ByteBudget(
                config.limits.max_answer_bytes, shared=self._has_several_callers, always=config.limits.small_bytes
            ),
            config.limits,
            config.served_names,
            config.request_timeout,
            self._ledger,
            ResponseStore(config.limits.max_stored_responses, config.limits.max_stored_bytes),
            memory_bound(config.limits),
        )
        patience = Patience(config.ready_seconds, config.probe_seconds)
        inspection = Inspection(self._service, self._supervisor, self._metrics, patience)
        document = partial(openapi_document, needs_key=len(keys) > 0, allows_unknown=config.allows_unknown_fields)
        self.table = route_table(self._service, inspection, Task(engine.task), document)
        ingress = Ingress(
            self.table,
            keys,
            HostList(config.host, config.allowed_hosts),
            config.limits,
            self._service.check_room,
            self._metrics,
            cors,
            self._traces,
        )
        self._stopping = asyncio.Event()
        self._num_signals = 0
        self._http = _QuietServer(_http_config(ingress, bounded(self._metrics.slow_client_cut)))

    def _note_exposure(self, keys: Keyring, cors: CorsPolicy) -> None:
        """Tells who can use a server without keys."""
        if not keys and not is_local(self._config.host):
            self._ledger.degrade(
                "--api-key",
                f"none is set, and {self._config.host} can be reached from other machines: anybody there can use the "
                "server",
                "set SIGHTLINE_API_KEY, or listen on 127.0.0.1",
            )
        if not keys and cors.allows_any:
            self._ledger.degrade(
                "--cors-origin *",
                "no API key is set: every page that a browser on this network opens can use the server",
                "set SIGHTLINE_API_KEY, or name the origins",
            )

    async def run(self) -> None:
        """Serves until a signal ends it. Raises `ConfigError` if the server or its engine cannot start."""
        listener = _listen(self._config.host, self._config.port)
        url = _url(listener)
        with self._signals():
            self._setup: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
            reading = asyncio.ensure_future(self._desks.run(self._setup))
            supervising = asyncio.ensure_future(self._supervisor.run())
            serving = asyncio.ensure_future(self._serve(listener, url))
            opening = asyncio.ensure_future(self._announce(url))
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                ends = {supervising, serving, stopping, reading}
                await asyncio.wait({*ends, opening}, return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    opening.result()
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in (supervising, reading):
                    if task.done():
                        task.result()
                await self._drain()
            except EngineStartError as error:
                raise ConfigError(str(error)) from error
            finally:
                opening.cancel()
                stopping.cancel()
                reading.cancel()
                self._http.should_exit = True
                await self._supervisor.stop(END_SECONDS)
                supervising.cancel()
                with suppress(asyncio.CancelledError, EngineStartError):
                    await supervising
                if not self._port.is_loading:
                    serving.cancel()
                for task in (serving, reading):
                    with suppress(asyncio.CancelledError):
                        await task
                listener.close()
                await asyncio.to_thread(self._traces.close)

    async def _serve(self, listener: socket.socket, url: str) -> None:
        """Answers clients from when the engine process has found that it can load the model."""
        await self._port.until_loading()
        log(logger, logging.INFO, "listening", {"url": url})
        await self._http.serve([listener])

    async def _announce(self, url: str) -> None:
        """Waits until the model is loaded, then lets requests in."""
        await self._port.until_open()
        opened, service = self._service.opened, self._service
        setup = Setup(
            opened.tokenizer,
            service.names,
            opened.vocab_size,
            opened.vector_size,
            opened.max_model_len,
            service.max_cost,
            self._config.allows_unknown_fields,
            # Among several callers nobody may go before the others.
            0 if self._has_several_callers else int(stated(Terms)["priority"].low or 0),
            self._config.log_level,
            self._config.text_seconds,
            service.answers.most,
            service.limits.max_kept_bytes,
        )
        self._setup.set_result(setup)
        await self._desks.until_ready()
        self._loaded.set_result(AdmissionGate(opened.max_rows + opened.max_queued, shared=self._has_several_callers))
        # What is there by now stays: a garbage collection that looks through it again holds the loop for tens of ms.
        gc.collect()
        gc.freeze()
        for entry in self._ledger.degradations:
            log(logger, logging.WARNING, "degraded", {"what": str(entry)})
        log(logger, logging.INFO, "open", {"url": url, "model": opened.model})
        self._on_open(url, opened)

    async def _drain(self) -> None:
        """Waits until every open request is answered, the deadline passes, or a second signal arrives."""
        self._service.is_draining = True
        log(logger, logging.INFO, "draining", {"under_way": self._service.num_under_way})
        deadline = asyncio.get_running_loop().time() + self._config.drain_seconds
        while self._service.num_under_way and asyncio.get_running_loop().time() < deadline and self._num_signals < 2:
            await asyncio.sleep(0.02)
        log(logger, logging.INFO, "drained", {"left": self._service.num_under_way})
        self._port.give_up("the server shut down before the request was finished")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handles signals: the first one drains the server, the second one ends it at once."""
        loop = asyncio.get_running_loop()

        def received(number: int, frame: FrameType | None) -> None:
            del number, frame
            self._num_signals += 1
            loop.call_soon_threadsafe(self._stopping.set)

        before = {number: signal.signal(number, received) for number in _ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def default_text_processes() -> int:
    """The number of workers: at least two, so that one caller's long text does not stop another's."""
    return min(4, max(2, (os.cpu_count() or 1) // 2))


def memory_bound(limits: Limits) -> int:
    """Most bytes of memory that the front end may take.

    Bodies and answers count twice: once as they are held, and once more on their way to a desk or from it.
    """
    held = 2 * (limits.max_held_bytes + limits.max_answer_bytes)
    # A request has four accounts: its body, its order, its reports and its answer.
    connections = BoundedProtocol.max_connections * (CONNECTION_BYTES + 4 * limits.small_bytes)
    return BASE_BYTES + held + limits.max_stored_bytes + connections


def _http_config(ingress: Ingress, protocol: type[BoundedProtocol]) -> uvicorn.Config:
    return uvicorn.Config(
        ingress,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(END_SECONDS),
    )


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop listening at once: new clients would get no answer."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=kind, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"expected an address and a port that can be listened on, got {host}:{port}: {error}; use another"
        ) from error
    if NOTSENT_LOWAT is not None:
        # Connections inherit it. Unlike a small SO_SNDBUF, it does not slow down clients that are far away.
        listener.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, UNSENT_BYTES)
    return listener
