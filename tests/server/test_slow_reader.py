"""A client of a real server that stops reading its stream: its rows pause, and it can read on."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from support.serving import ServedProcess, serving
from support.tiny_served_model import save_tiny_served_model

BODY = {
    "prompt": "once upon a time",
    "max_tokens": 400,
    "temperature": 0.9,
    "seed": 3,
    "logprobs": 20,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A model that is fast enough to fill what the system buffers."""
    folder = save_tiny_served_model(tmp_path_factory.mktemp("llama"))
    with serving(str(folder)) as running:
        yield running


def gauge(server: ServedProcess, name: str) -> float:
    [value] = re.findall(
        rf"^sightline_{name}{{model_name=.*}} (\S+)$", server.get("/metrics")[1].decode(), re.MULTILINE
    )
    return float(value)


def dial_with_little_room(server: ServedProcess) -> socket.socket:
    """A connection for which the system keeps as little unread data as it can, on either side."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.settimeout(120)
    parts = urlsplit(server.url)
    connection.connect((str(parts.hostname), parts.port))
    return connection


def texts_of(body: str) -> str:
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


@pytest.mark.prove
def test_a_client_that_reads_nothing_pauses_its_request_and_gets_the_whole_stream_when_it_reads(
    tiny_server: ServedProcess,
) -> None:
    server = tiny_server
    status, whole, _ = server.post("/v1/completions", BODY)
    assert status == 200
    expected = json.loads(whole)["choices"][0]["text"]
    request = json.dumps({**BODY, "stream": True}).encode()
    with dial_with_little_room(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(request), request)
        )
        deadline = time.monotonic() + 60
        while gauge(server, "num_requests_paused") < 1:
            assert time.monotonic() < deadline, "a client that reads nothing is never paused"
            time.sleep(0.1)
        before = gauge(server, "generation_tokens_total")
        assert gauge(server, "kv_cache_usage_perc") == 0.0
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "ignore_eos": True})[0] == 200
        assert gauge(server, "generation_tokens_total") - before == 5, "a paused request gains nothing"
        assert gauge(server, "num_requests_paused") == 1
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = bytearray()
        while piece := connection.recv(1 << 16):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    # Chunks are whole events, so that the lines with their sizes can be left out.
    assert texts_of(body.decode()) == expected
    while gauge(server, "num_requests_running"):
        time.sleep(0.1)
    assert gauge(server, "num_requests_paused") == 0
