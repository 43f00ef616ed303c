"""A stand-in for the hub on this machine: the few addresses that a download of a model asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "owner/gated"


class HubServer(ThreadingHTTPServer):
    """Serves repositories, each the files of a folder, at one commit called "main"."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path]) -> None:
        self.repositories = repositories
        self.fetched: list[str] = []
        """Paths of the files whose content went out."""
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(repositories: Mapping[str, Path]) -> Iterator[HubServer]:
    server = HubServer(repositories)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        owner, name, verb, revision, *rest = [*parts[2:], "", ""] if api else parts
        repository = f"{owner}/{name}"
        if repository == GATED:
            self._refuse(403, "GatedRepo")
        elif repository not in self.server.repositories:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif api:
            self._describe(repository, verb)
        else:
            self._send_file(self.server.repositories[repository], "/".join(rest))

    def _refuse(self, status: int, code: str) -> None:
        self._send(json.dumps({"error": code}).encode(), status, {"X-Error-Code": code})

    def _describe(self, repository: str, verb: str) -> None:
        folder = self.server.repositories[repository]
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        tree = [
            {
                "type": "file",
                "path": path.relative_to(folder).as_posix(),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in files
        ]
        info = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": entry["path"]} for entry in tree]}
        self._send(json.dumps(tree if verb == "tree" else info).encode())

    def _send_file(self, folder: Path, name: str) -> None:
        path = folder / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        content = path.read_bytes()
        if self.command == "GET":
            self.server.fetched.append(name)
        self._send(content, 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
