"""A stand-in for the server: the pages under the policy that the real one sends, and answers that a test scripts.

Speaks just enough of the API for the pages. Does not know models: each POST takes the next `Answer`, or echoes.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from sightline.server.http.errors import ApiError
from sightline.server.page.pages import FILES, POLICY, Page, PageFiles

MODEL = "SmolLM2-135M-Instruct"
PAGE_FILES = PageFiles()
PAGES = {"/": Page("chat", PAGE_FILES), "/docs": Page("docs", PAGE_FILES)}
PATIENCE = 20.0
"""Seconds after which a stream that a test forgot to release goes on."""
SAMPLING = (
    '{"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 18446744073709551557, "max_tokens": 512}'
)


@dataclass
class Answer:
    """How one request for a completion is answered."""

    pieces: Sequence[str] = ()
    """The content, a chunk each."""
    reasoning: Sequence[str] = ()
    """What comes before it as `reasoning_content`, a chunk each."""
    calls: Sequence[Mapping[str, object]] = ()
    """Pieces of calls of tools behind the content, a chunk each."""
    finish: str = "stop"
    """The reason why the answer ended."""
    status: int = 200
    message: str = ""
    """Of the error, where there is one."""
    param: str | None = None
    """The field that the error is about."""
    retry_after: str | None = None
    hold_after: int | None = None
    """Pieces after which the stream waits for `release`, or for the client to go."""
    fails: bool = False
    """An error event ends the stream."""
    breaks_off: bool = False
    """The stream ends without a last chunk and without [DONE]."""
    raw: Sequence[bytes] | None = None
    """The whole body, a write each, instead of pieces."""
    usage: Mapping[str, object] = field(
        default_factory=lambda: {
            "prompt_tokens": 34,
            "completion_tokens": 12,
            "total_tokens": 46,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
    )
    pause: float = 0.0
    """Seconds before each piece."""
    release: Event = field(default_factory=Event)
    disconnected: Event = field(default_factory=Event)
    """The client went before the stream ended."""


class StubServer(ThreadingHTTPServer):
    """Serves the two pages, the list of models, a description of the API, and the scripted answers."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.script: deque[Answer] = deque()
        self.bodies: list[dict[str, Any]] = []
        """Of the completions asked for, in order."""
        self.texts: list[str] = []
        """The same, as they came."""
        self.api_key: str | None = None
        self.tools_refusal: str | None = None
        """Why `/server_info` says that requests with tools are refused."""
        self.openapi: Mapping[str, object] = OPENAPI
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answers(self, *pieces: str, **options: Any) -> Answer:
        """Scripts the next answer."""
        answer = Answer(pieces, **options)
        self.script.append(answer)
        return answer

    def reset(self) -> None:
        for answer in self.script:
            answer.release.set()
        self.script.clear()
        self.bodies.clear()
        self.texts.clear()
        self.api_key = self.tools_refusal = None


@contextmanager
def serving() -> Iterator[StubServer]:
    server = StubServer()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def event(data: object) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def chunk(content: str | None, finish_reason: str | None = None) -> dict[str, object]:
    delta = {} if content is None else {"role": "assistant", "content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def do_GET(self) -> None:
        if self.path in PAGES:
            headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
            self._send(PAGES[self.path].body, "text/html; charset=utf-8", headers=headers)
        elif self.path.startswith(FILES):
            self._send_file(self.path.removeprefix(FILES))
        elif not self._is_known():
            self._refuse(401, "This server needs an API key.")
        elif self.path == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "sightline", "max_model_len": 8192}
            self._send_json({"object": "list", "data": [model]})
        elif self.path == "/server_info":
            self._send_json({"tools_refusal": self.server.tools_refusal})
        elif self.path == "/openapi.json":
            self._send_json(self.server.openapi)
        else:
            self._refuse(404, f"There is nothing at {self.path}.")

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        body = json.loads(text)
        if not self._is_known():
            self._refuse(401, "The API key is not right.")
            return
        self.server.bodies.append(body)
        self.server.texts.append(text)
        answer = self.server.script.popleft() if self.server.script else Answer([f"You said: {_question(body)}"])
        if answer.status == 200:
            self._stream(answer)
        else:
            self._refuse(answer.status, answer.message, answer.retry_after, answer.param)

    def _is_known(self) -> bool:
        key = self.server.api_key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def _stream(self, answer: Answer) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("x-sightline-sampling", SAMPLING)
        self.end_headers()
        try:
            for data in answer.raw if answer.raw is not None else _events(answer):
                self.wfile.write(data)
                self.wfile.flush()
                if data == _HOLD:
                    self._hold(answer)
        except (BrokenPipeError, ConnectionResetError):
            answer.disconnected.set()

    def _hold(self, answer: Answer) -> None:
        """Waits for the test, and watches for the client to go meanwhile."""
        ends = time.monotonic() + PATIENCE
        self.connection.settimeout(0.01)
        while not answer.release.is_set() and time.monotonic() < ends:
            try:
                if self.connection.recv(1, socket.MSG_PEEK) == b"":
                    raise ConnectionResetError
            except TimeoutError:
                continue
        self.connection.settimeout(None)

    def _refuse(self, status: int, message: str, retry_after: str | None = None, param: str | None = None) -> None:
        error = {"message": message, "type": "error", "param": param, "code": None}
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        self._send_json({"error": error}, status, headers)

    def _send_json(self, body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(json.dumps(body).encode(), "application/json", status, headers)

    def _send_file(self, address: str) -> None:
        try:
            reply = PAGE_FILES.reply(address)
        except ApiError as error:
            self._refuse(error.status, str(error))
        else:
            headers = {"Cache-Control": reply.caching.decode(), "X-Content-Type-Options": "nosniff"}
            self._send(reply.body, reply.content_type, headers=headers)

    def _send(self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


_HOLD = b": held\n\n"


def _delta(delta: Mapping[str, object]) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def _events(answer: Answer) -> Iterator[bytes]:
    for piece in answer.reasoning:
        yield _delta({"reasoning_content": piece})
    for index, piece in enumerate(answer.pieces):
        if index == answer.hold_after:
            yield _HOLD
        time.sleep(answer.pause)
        yield event(chunk(piece))
    for call in answer.calls:
        yield _delta({"tool_calls": [call]})
    if answer.hold_after == len(answer.pieces):
        yield _HOLD
    if answer.fails:
        yield event({"error": {"message": answer.message, "type": "server_error", "param": None, "code": None}})
    elif not answer.breaks_off:
        yield event(chunk(None, answer.finish))
        yield event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": answer.usage})
        yield b"data: [DONE]\n\n"


def _question(body: Mapping[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


OPENAPI: Mapping[str, object] = {
    "openapi": "3.1.0",
    "info": {"title": "Sightline", "version": "0.0.0", "description": "An OpenAI-compatible API."},
    "paths": {
        "/v1/chat/completions": {
            "post": {
                "tags": ["Generation"],
                "summary": "Answer a conversation",
                "description": "With `stream` the answer comes as server-sent events.",
                "x-access": "key",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatRequest"}}},
                },
                "responses": {
                    "200": {
                        "description": "The answer.",
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatAnswer"}}},
                    },
                    "429": {"description": "The queue is full; `Retry-After` says when to come back."},
                },
            }
        },
        "/v1/models": {
            "get": {
                "tags": ["Models"],
                "summary": "The models served",
                "x-access": "key",
                "responses": {"200": {"description": "The list."}},
            }
        },
        "/health": {
            "get": {
                "tags": ["Operation"],
                "summary": "Whether the process is alive",
                "x-access": "public",
                "parameters": [
                    {
                        "name": "verbose",
                        "in": "query",
                        "schema": {"type": "boolean", "default": False},
                        "description": "Say more.",
                    }
                ],
                "responses": {"200": {"description": "Alive."}},
            }
        },
    },
    "components": {
        "schemas": {
            "ChatRequest": {
                "type": "object",
                "required": ["messages"],
                "properties": {
                    "model": {"type": "string", "description": "As `/v1/models` names it."},
                    "messages": {
                        "type": "array",
                        "minItems": 1,
                        "items": {"$ref": "#/components/schemas/Message"},
                        "description": "The conversation so far.",
                    },
                    "temperature": {
                        "anyOf": [{"type": "number", "minimum": 0, "maximum": 10000}, {"type": "null"}],
                        "default": None,
                        "description": "0 is greedy; left out, the model's own default.",
                    },
                    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
                    "stream": {"type": "boolean", "default": False, "description": "<img src=x onerror=alert(1)>"},
                },
            },
            "Message": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["system", "user", "assistant"]},
                    "content": {"type": "string"},
                },
            },
            "ChatAnswer": {"type": "object", "properties": {"id": {"type": "string"}}},
        }
    },
}
