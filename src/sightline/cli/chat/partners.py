"""Who answers in a chat: a model in this process, or a server that speaks OpenAI's protocol.

Does not know terminals.
"""

from __future__ import annotations

import gc
import json
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from sightline.bench.serving.http_stream import Address
from sightline.cli.answers import Answer, Piece, streamed_answer
from sightline.core.errors import RequestError, SightlineError

if TYPE_CHECKING:
    from sightline.core.request import SamplingParams
    from sightline.llm import LLM

Messages: TypeAlias = Sequence[Mapping[str, object]]
ANSWER_SECONDS = 600.0
"""How long a server may take over the next piece of an answer."""
_SHOWN = 300


class Partner(Protocol):
    """Who answers."""

    @property
    def name(self) -> str:
        """The model's name."""

    def names(self) -> Sequence[str]:
        """Models that `switch` is known to take."""

    def switch(self, name: str) -> None:
        """Has another model answer. Raises `SightlineError`, and the model stays, if that cannot be."""

    def ask(self, messages: Messages) -> Answer:
        """Begins an answer. Raises `SightlineError`, here or with a piece, if there is none."""


class LocalModel:
    """A model in this process."""

    def __init__(self, name: str | None, load: Callable[[str | None], LLM], params: SamplingParams) -> None:
        self._name = name
        self._load = load
        self._params = params
        self._llm: LLM | None = load(name)

    @property
    def name(self) -> str:
        return self._name or "the default model"

    def names(self) -> Sequence[str]:
        return [self.name]

    def switch(self, name: str) -> None:
        if self._llm is not None:
            self._llm.close()
        # Two models may not fit in memory: the old one makes room, and is loaded again if the new one cannot be.
        self._llm = None
        gc.collect()
        try:
            self._llm = self._load(name)
            self._name = name
        except (SightlineError, KeyboardInterrupt):
            self._llm = self._load(self._name)
            raise

    def ask(self, messages: Messages) -> Answer:
        if self._llm is None:
            raise RequestError(
                "expected a model, got none: neither the new nor the old one could be loaded; try /model"
            )
        return streamed_answer(self._llm.stream_chat(messages, self._params))


class RemoteServer:
    """A server at a URL."""

    def __init__(self, url: str, key: str | None, model: str | None, sampling: Mapping[str, object]) -> None:
        """`sampling` are the parameters that are sent; the server has defaults for the others."""
        self._address = Address.parse(url)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._sampling = sampling
        self._name = model or ""
        if model is None:
            self._name = next(iter(self.names()), "")

    @property
    def name(self) -> str:
        return f"{self._name} at {self._address}"

    def names(self) -> Sequence[str]:
        with self._answered("GET", "/v1/models") as response:
            listed = json.loads(response.read())
            return [str(each["id"]) for each in listed["data"]]

    def switch(self, name: str) -> None:
        names = self.names()
        if name not in names:
            raise RequestError(f"expected a model of {self._address}, which are {', '.join(names)}, got {name!r}")
        self._name = name

    def ask(self, messages: Messages) -> Answer:
        body = {"model": self._name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        return Answer("", self._pieces({**body, **self._sampling}))

    def _pieces(self, body: Mapping[str, object]) -> Generator[Piece]:
        is_whole = False
        with self._answered("POST", "/v1/chat/completions", json.dumps(body)) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                piece = _read_chunk(json.loads(data))
                is_whole = is_whole or piece.finish_reason is not None
                yield piece
        if not is_whole:
            raise SightlineError(f"{self._address} ended the answer before it was whole; ask again")

    @contextmanager
    def _answered(self, method: str, path: str, body: str | None = None) -> Iterator[HTTPResponse]:
        """The response of a request that succeeded. Ends the connection."""
        address = self._address
        connection = HTTPConnection(address.host, address.port, timeout=ANSWER_SECONDS)
        if address.secure:
            tls = ssl.create_default_context()
            connection = HTTPSConnection(address.host, address.port, timeout=ANSWER_SECONDS, context=tls)
        with closing(connection):
            try:
                connection.request(method, address.path + path, body and body.encode(), self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise RequestError(_refusal(response.status, response.read()))
                yield response
            except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
                raise SightlineError(
                    f"expected an answer from {address}{path}, got {type(error).__name__}: {error}; check that a "
                    "server runs there"
                ) from error


def _read_chunk(chunk: Mapping[str, Any]) -> Piece:
    match chunk.get("error"):
        case None:
            pass
        case {"message": message}:
            raise RequestError(str(message))
        case told:
            raise RequestError(str(told))
    usage, choices = chunk.get("usage") or {}, chunk.get("choices") or [{}]
    text = (choices[0].get("delta") or {}).get("content") or ""
    # JSON can hold halves of characters, which cannot be printed.
    text = text.encode(errors="replace").decode()
    return Piece(text, usage.get("completion_tokens", 0), choices[0].get("finish_reason"))


def _refusal(status: int, body: bytes) -> str:
    """What a server says about a request that it does not answer."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"expected status 200, got {status}: {body[:_SHOWN].decode(errors='replace')}"
