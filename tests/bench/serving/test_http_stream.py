"""Bodies and events are the same however their bytes are cut, and an answer that is not HTTP is told as such."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.bench.serving.answers import MAX_EVENT, EventSplitter
from sightline.bench.serving.http_stream import Address, Client, Response
from sightline.core.errors import ConfigError, SightlineError
from support.stub_completions import Scripted, stub_server

CONTENT = "data: Zürich 🙂\n\n: comment\nevent: x\ndata: one\ndata:two\n\n\ndata: [DONE]\n\n".encode()
EVENTS = ["Zürich 🙂".encode(), b"one\ntwo", b"[DONE]"]
WIRE = b"5\r\n" + CONTENT[:5] + b"\r\n1a;name=value\r\n" + CONTENT[5:31] + b"\r\n%X\r\n" % (len(CONTENT) - 31)
WIRE += CONTENT[31:] + b"\r\n0\r\nTrailer: x\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise([0, *sorted(places), len(data)])]


def received(*pieces: bytes) -> tuple[Response, bytes]:
    """The response in these reads, after which the connection is closed, and its body."""
    reads = iter([piece for piece in pieces if piece])

    class Reads(asyncio.StreamReader):
        async def read(self, n: int = -1) -> bytes:
            return next(reads, b"")

    async def read() -> tuple[Response, bytes]:
        response = Response(Reads())
        await response.read_head()
        return response, await response.read()

    return asyncio.run(read())


def events_of(pieces: Sequence[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [event for piece in pieces if piece for event in splitter.feed(piece)]


def test_a_response_cut_in_two_anywhere_or_into_bytes_is_the_same() -> None:
    whole = HEAD + WIRE
    for place in range(len(whole) + 1):
        response, body = received(*cut(whole, [place]))
        assert (response.status, body) == (200, CONTENT)
        assert response.headers == {"transfer-encoding": "chunked"}
    assert received(*(bytes([byte]) for byte in whole))[1] == CONTENT


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.lists(st.integers(0, 300), max_size=6))
def test_any_content_in_any_chunks_cut_anywhere_comes_out(chunks: list[bytes], places: list[int]) -> None:
    wire = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    assert received(*cut(wire, [min(place, len(wire)) for place in places]))[1] == b"".join(chunks)


def test_a_chunk_that_holds_what_looks_like_a_chunk_is_content() -> None:
    assert received(HEAD + b"a\r\nXX", b"3\r\nabc\r\n", b"\r\n", b"0\r\n\r\n")[1] == b"XX3\r\nabc\r\n"


def test_a_body_is_not_over_before_its_last_byte() -> None:
    for place in range(len(WIRE)):
        with pytest.raises(ConnectionResetError, match="expected the rest of the body, got a closed connection"):
            received(HEAD, WIRE[:place])


@pytest.mark.parametrize(
    "wire",
    [b"xyz\r\n", b"-1\r\n", b"1_0\r\n", b"\r\n", b"2\r\nabc\r\n", b"3\r\nabcde", b"f" * 70_000],
    ids=["letters", "negative", "underscore", "empty", "short", "long", "endless"],
)
def test_chunks_that_are_wrong_are_refused(wire: bytes) -> None:
    with pytest.raises(SightlineError, match=r"expected an HTTP/1.1 response, got .*(chunk|Chunk)"):
        received(HEAD, wire)


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", "the end of the head"),
        (HEAD + b"3;name=", "content"),
        (HEAD + b"0\r\nTrailer: ", "content"),
    ],
)
def test_heads_extensions_and_trailers_without_an_end_are_refused(head: bytes, wanted: str) -> None:
    with pytest.raises(SightlineError, match=f"expected {wanted} within 65536 bytes of the response, got none"):
        received(head, *[b"y" * 1000] * 70)


def test_a_body_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.bench.serving.http_stream.MAX_BODY", 5)
    assert received(b"HTTP/1.1 200 OK\r\n\r\n", b"abc", b"de")[1] == b"abcde"
    with pytest.raises(SightlineError, match="expected a body of at most 5 bytes"):
        received(b"HTTP/1.1 200 OK\r\n\r\n", b"abc", b"def")


def test_repeated_headers_are_joined_and_trailers_are_none() -> None:
    response, _ = received(b"HTTP/1.1 200 OK\r\nA: 1\r\nTransfer-Encoding: chunked\r\na: 2\r\n\r\n", WIRE)
    assert response.headers == {"a": "1, 2", "transfer-encoding": "chunked"}


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_cut_anywhere_even_inside_characters_and_line_ends_are_the_same(line_end: bytes) -> None:
    stream = CONTENT.replace(b"\n", line_end)
    for place in range(len(stream) + 1):
        assert events_of(cut(stream, [place])) == EVENTS
    assert events_of([bytes([byte]) for byte in stream]) == EVENTS


def test_an_event_is_given_as_soon_as_it_is_over() -> None:
    splitter = EventSplitter()
    pieces = (b"data: a\n", b"\n", b"data: b\n\ndata: c\n\nda")
    assert [(splitter.feed(piece), splitter.unfinished) for piece in pieces] == [
        ([], True),
        ([b"a"], False),
        ([b"b", b"c"], True),
    ]


def test_an_event_without_an_end_is_refused() -> None:
    with pytest.raises(SightlineError, match="expected events of at most"):
        EventSplitter().feed(b"x" * (MAX_EVENT + 1))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost/", "http://localhost:80"),
        ("https://example.org/v1/", "https://example.org:443"),
        ("http://[::1]:9/proxy", "http://[::1]:9/proxy"),
    ],
)
def test_addresses_are_read(url: str, told: str) -> None:
    assert str(Address.parse(url)) == told


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://x?a=1", "http://x/a b"]
)
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Address.parse(url)


def test_secrets_in_an_address_or_a_bad_key_are_refused_and_not_told() -> None:
    with pytest.raises(ConfigError, match="with a user name in it") as raised:
        Address.parse("http://user:secret@host:1")
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError, match="in the API key, got others") as raised:
        Client(Address.parse("http://host"), "secret\r\nX: y")
    assert "secret" not in str(raised.value)


async def get(url: str, path: str = "/v1/models", key: str | None = None) -> tuple[int, bytes]:
    async with Client(Address.parse(url), key).exchange("GET", path) as response:
        return response.status, await response.read()


async def post(url: str) -> bytes:
    async with Client(Address.parse(url)).exchange("POST", "/v1/completions", b'{"prompt": "a"}') as response:
        return await response.read()


def test_a_get_carries_host_and_key_and_gives_status_and_body() -> None:
    with stub_server(models=("one",)) as server:
        status, body = asyncio.run(get(server.url, key="key"))
        missing, _ = asyncio.run(get(server.url, "/nowhere"))
    assert (status, json.loads(body)["data"][0]["id"], missing) == (200, "one", 404)
    assert server.heads[0].startswith("GET /v1/models HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{server.port}\r\n" in server.heads[0]
    assert "Authorization: Bearer key\r\n" in server.heads[0]
    assert "Authorization" not in server.heads[1]


@pytest.mark.parametrize(
    ("raw", "content"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.0 200 OK\r\nCONTENT-LENGTH: 3\r\n\r\nabcd", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", b"a"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
def test_bodies_are_framed_as_the_head_says(raw: bytes, content: bytes) -> None:
    with stub_server(Scripted(raw=raw)) as server:
        assert asyncio.run(post(server.url)) == content


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"", ConnectionResetError, "expected a response, got a closed connection"),
        (b"\x15\x03\x01", SightlineError, "expected an HTTP/1.1 response, got"),
        (b"SSH-2.0\r\n\r\n", SightlineError, "expected an HTTP/1.1 response, got b'SSH-2.0"),
        (b"HTTP/1.1 abc\r\n\r\n", SightlineError, "expected an HTTP/1.1 response, got .* Invalid status code"),
        (b"HTTP/2.0 200 OK\r\n\r\n", SightlineError, "expected an HTTP/1.1 response"),
        (b"RTSP/1.0 200 OK\r\n\r\n", SightlineError, "expected an HTTP/1.1 response"),
        (b"HTTP/1.1 101 Y\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\nx", SightlineError, "expected an HTTP/1.1 resp"),
        (b"HTTP/1.1 200 OK\r\nX: y", SightlineError, "expected an HTTP/1.1 response, got .* no whole head"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", SightlineError, "Invalid character in Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", ConnectionResetError, "expected the rest of the body"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, SightlineError, "expected the end of the head within"),
    ],
)
def test_what_is_not_a_whole_answer_raises(raw: bytes, error: type[Exception], message: str) -> None:
    with stub_server(Scripted(raw=raw)) as server, pytest.raises(error, match=message):
        asyncio.run(post(server.url))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https_works_with_a_certificate_that_is_trusted_and_not_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    named = ["-subj", "/CN=stub", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *made, *named, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with stub_server(tls=context) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            asyncio.run(get(server.url))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert asyncio.run(get(server.url))[0] == 200
