"""A proxy that passes requests on to a server, and records which fields they had."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

NOT_PASSED = {"connection", "transfer-encoding", "keep-alive", "content-length", "host"}


@dataclass
class Calls:
    """What was sent to one path."""

    statuses: Counter[int] = field(default_factory=Counter)
    fields: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    """Fields that the server says it did not use."""


@dataclass
class Recording:
    """Where the proxy listens, and the calls so far by path."""

    url: str = ""
    calls: dict[str, Calls] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, path: str, body: bytes, status: int, unused: str) -> None:
        with self.lock:
            calls = self.calls.setdefault(path, Calls())
            calls.statuses[status] += 1
            calls.unused |= set(filter(None, unused.split(", ")))
            if body:
                calls.fields |= set(named(json.loads(body)))


def named(body: dict[str, object]) -> Iterator[str]:
    """The fields of a body, and the fields within those that are objects. Null is told apart: it asks for nothing."""
    for name, value in body.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield f"{name}=null" if value is None else name


@contextmanager
def recording(url: str) -> Iterator[Recording]:
    """A proxy before the server at `url`."""
    target = urlsplit(url)
    record = Recording()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = HTTPConnection(str(target.hostname), target.port, timeout=300)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED}
            connection.request(self.command, self.path, body or None, {**headers, "Host": target.netloc})
            answer = connection.getresponse()
            record.note(self.path.partition("?")[0], body, answer.status, answer.getheader("x-sightline-unused", ""))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in NOT_PASSED:
                    self.send_header(name, value)
            # One answer on a connection, so that its end needs no length.
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            # A client that leaves is one of the things to try: closing the connection tells the server.
            with closing(connection), suppress(ConnectionError):
                while piece := answer.read1(65536):
                    self.wfile.write(piece)
                    self.wfile.flush()

        do_GET = do_POST = pass_on  # noqa: N815

        def log_message(self, format: str, *arguments: object) -> None:
            """Clients print what matters."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    record.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield record
    finally:
        server.shutdown()
        server.server_close()
