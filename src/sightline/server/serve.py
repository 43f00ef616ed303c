"""The composition root of the server, and its life cycle: start, serve, drain, end.

SIGTERM ─▶ new requests get 503 ─▶ open ones finish, or the deadline passes ─▶ engine process is stopped ─▶ exit 0
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

import uvicorn

from sightline.core.config import EngineConfig, Task
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.server.api.inspection import Inspection, Patience
from sightline.server.api.routes import route_table
from sightline.server.http.access import HostList, Keyring
from sightline.server.http.bounds import BoundedProtocol
from sightline.server.http.ingress import Ingress
from sightline.server.http.limits import Limits
from sightline.server.logs import log
from sightline.server.metrics import ServiceMetrics
from sightline.server.process.port import EnginePort, EngineStartError
from sightline.server.process.protocol import Configure, Opened
from sightline.server.process.supervisor import WORKER, Supervisor
from sightline.server.service import LoadedModel, Service

logger = logging.getLogger("sightline.server")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
END_SECONDS = 5.0
"""How long the engine process and open connections may take to end once every request is answered."""
KEEP_ALIVE_SECONDS = 75


@dataclass(frozen=True)
class ServerConfig:
    """How to serve; what to serve is an `EngineConfig`."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 chooses a free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
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
    strict: bool = False
    log_level: str = "info"


class Server:
    """A front end, and the engine process behind it."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineConfig,
        on_open: Callable[[str, Opened], None],
        worker: Sequence[str] = WORKER,
    ) -> None:
        """`on_open` is called with the address and the engine's report once the model is loaded.

        `worker` is the command that starts an engine process.
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
        if not keys and not _is_local(config.host):
            self._ledger.degrade(
                "--api-key",
                f"none is set, and {config.host} can be reached from other machines: anybody there can use the server",
                "set SIGHTLINE_API_KEY, or listen on 127.0.0.1",
            )
        self._loaded: Future[LoadedModel] = Future()
        self._service = Service(
            self._port, self._loaded, config.limits, config.served_names, config.request_timeout, self._ledger
        )
        patience = Patience(config.ready_seconds, config.probe_seconds)
        inspection = Inspection(self._service, self._supervisor, self._metrics, patience)
        self.table = route_table(self._service, inspection, Task(engine.task), needs_key=len(keys) > 0)
        ingress = Ingress(
            self.table,
            keys,
            HostList(config.host, config.allowed_hosts),
            config.limits,
            self._service.check_room,
            self._metrics,
            strict=config.strict,
        )
        self._stopping = asyncio.Event()
        self._num_signals = 0
        self._http = _QuietServer(_http_config(ingress))

    async def run(self) -> None:
        """Serves until a signal ends it. Raises `ConfigError` if the server or its engine cannot start."""
        listener = _listen(self._config.host, self._config.port)
        url = _url(listener)
        log(logger, logging.INFO, "listening", {"url": url})
        with self._signals():
            supervising = asyncio.ensure_future(self._supervisor.run())
            serving = asyncio.ensure_future(self._http.serve([listener]))
            opening = asyncio.ensure_future(self._announce(url))
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                ends = {supervising, serving, stopping}
                await asyncio.wait({*ends, opening}, return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    opening.result()
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if supervising.done():
                    supervising.result()
                await self._drain()
            except EngineStartError as error:
                raise ConfigError(str(error)) from error
            finally:
                opening.cancel()
                stopping.cancel()
                self._http.should_exit = True
                await self._supervisor.stop(END_SECONDS)
                supervising.cancel()
                with suppress(asyncio.CancelledError, EngineStartError):
                    await supervising
                await serving

    async def _announce(self, url: str) -> None:
        """Waits until the model is loaded, then lets requests in."""
        await self._port.until_open()
        opened = self._service.opened
        self._loaded.set_result(LoadedModel.build(opened, shared=self._has_several_callers))
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


def _http_config(ingress: Ingress) -> uvicorn.Config:
    return uvicorn.Config(
        ingress,
        loop="none",
        http=BoundedProtocol,
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


def _is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=kind, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"expected an address and a port that can be listened on, got {host}:{port}: {error}; use another"
        ) from error
