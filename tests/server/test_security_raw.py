"""Beneath HTTP's surface: bytes on the wire, clients that vanish, the engine's socket, the source itself."""

from __future__ import annotations

import ast
import copy
import hmac
import json
import os
import pickle
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from sightline.core.errors import ConfigError
from sightline.server.http.access import Access, Keyring, Secret
from sightline.server.http.routing import NO_BODY, Route, RouteTable
from sightline.server.process import protocol
from sightline.server.process.frames import ProtocolError
from sightline.server.process.protocol import Cancel, command_codec, report_codec
from support import attacks
from support.attacks import ALPHA, CLOSE, SMUGGLED, bearer, head, is_error_body, until_idle
from support.case_marks import routine
from support.serving import ServedProcess, serving
from support.source_rules import violations

ROUTES = attacks.routes()
HEAD_SECONDS, BODY_SECONDS = 15.0, 30.0
PATIENCE = 40.0
"""Seconds after its time in which a server on a busy machine closes a connection; one that does not close it hangs."""
"""What clients have to send a head and a body; the tests allow some more."""


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServedProcess]:
    """A server with two keys, from the environment."""
    with serving(environment=attacks.KEYS) as running:
        assert running.url
        yield running


def dial(server: ServedProcess, seconds: float = 10.0) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((str(parts.hostname), parts.port), timeout=seconds)


def posted(path: str, body: object, *lines: str) -> bytes:
    sent = json.dumps(body).encode()
    key = f"Authorization: Bearer {ALPHA}"
    return head("POST", path, key, "Content-Type: application/json", f"Content-Length: {len(sent)}", *lines) + sent


def everything(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection; an error where it does not."""
    pieces = []
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def told(server: ServedProcess, sent: bytes, seconds: float = 10.0) -> bytes:
    """What comes back for bytes, to the end of the connection."""
    with dial(server, seconds) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        return everything(connection)


def statuses(answer: bytes) -> list[int]:
    return [int(line.split(b" ")[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


@pytest.mark.prove
@pytest.mark.parametrize("routes", routine({"two routes": ROUTES[:2], "all others": ROUTES[2:]}, "two routes"))
def test_what_is_no_proper_request_is_refused_once_and_the_connection_ends(
    guarded: ServedProcess, routes: tuple[Route, ...]
) -> None:
    """What is smuggled behind it is never answered."""
    faults = []
    for route in routes:
        where = (route.method, attacks.path_of(route))
        sent = {name: head(*where, *lines) + b"0\r\n\r\n" + SMUGGLED for name, lines in attacks.BAD_HEADS.items()}
        for name, wrong in {**sent, **{name: make(*where) for name, make in attacks.NOT_HTTP.items()}}.items():
            try:
                answer = told(guarded, wrong, 3.0)
            except TimeoutError:
                faults.append(f"{route.method} {route.path} {name}: the connection goes on")
                continue
            got = statuses(answer)
            is_whole = is_error_body(answer.partition(b"\r\n\r\n")[2]) or not answer
            if len(got) > 1 or not set(got) <= {400, 413, 421, 431} or not is_whole or b'"version"' in answer:
                faults.append(f"{route.method} {route.path} {name}: {got} {answer[-100:]!r}")
    assert not faults, "\n".join(faults)
    assert guarded.get("/health")[0] == 200


def test_an_upgrade_is_not_made(guarded: ServedProcess) -> None:
    for kind in ("websocket", "h2c", "TLS/1.0"):
        lines = ("Connection: Upgrade", f"Upgrade: {kind}", "Sec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==")
        with dial(guarded) as connection:
            connection.sendall(head("GET", "/v1/models", *lines))
            assert statuses(connection.recv(1 << 16)) == [401], kind


def test_the_body_of_a_request_that_offers_another_protocol_is_no_request(guarded: ServedProcess) -> None:
    """However its bytes arrive. Java's HTTP client makes this offer."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    sent = posted("/tokenize", {"prompt": "\r\nUpgrade: a"}, *offer, CLOSE)
    assert statuses(told(guarded, sent)) == [200]
    hidden = head("GET", "/version", CLOSE)
    whole = head("POST", "/tokenize", "Content-Type: application/json", *offer, f"Content-Length: {len(hidden)}")
    for cut in (len(whole), whole.index(b"grade: h2c")):
        with dial(guarded) as connection:
            connection.sendall(whole[:cut])
            time.sleep(0.2)
            connection.sendall(whole[cut:] + hidden)
            connection.settimeout(5.0)
            answer = connection.recv(1 << 16)
            assert statuses(answer) in ([400], [401])
            with suppress(TimeoutError):
                answer += connection.recv(1 << 16)
        assert b'"version"' not in answer


def test_a_trailer_is_no_header(guarded: ServedProcess) -> None:
    for route in ROUTES:
        lines = ("Content-Type: application/json", "Transfer-Encoding: chunked", "Trailer: Authorization", CLOSE)
        body = json.dumps(attacks.sample_body(route)).encode()
        chunks = b"%x\r\n%b\r\n0\r\nAuthorization: Bearer %b\r\n\r\n" % (len(body), body, ALPHA.encode())
        got = statuses(told(guarded, head(route.method, attacks.path_of(route), *lines) + chunks))
        assert got == [401 if route.access is Access.KEY else 404 if "{" in route.path else 200], route.path


def test_a_body_that_goes_on_beyond_the_cap_is_cut_off(guarded: ServedProcess) -> None:
    for route in ROUTES:
        kept = [f"Authorization: Bearer {ALPHA}", "Content-Type: application/json"]
        sent = head(route.method, attacks.path_of(route), *kept, "Transfer-Encoding: chunked")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with dial(guarded) as connection:
            connection.sendall(sent)
            num_sent = 0
            with pytest.raises(OSError, match=r"(?i)reset|broken"):  # noqa: PT012 - which send fails is the server's choice
                while num_sent < 64 << 20:
                    connection.sendall(chunk)
                    num_sent += len(chunk)
            assert num_sent < 32 << 20, route.path


def test_a_length_that_is_too_large_is_refused_before_the_body(guarded: ServedProcess) -> None:
    for route in ROUTES:
        if route.body is not NO_BODY:
            lines = ["Content-Type: application/json", f"Content-Length: {1 << 40}", "Expect: 100-continue"]
            for key, status in ((f"Authorization: Bearer {ALPHA}", 413), ("X: y", 401)):
                answer = told(guarded, head(route.method, route.path, key, *lines))
                assert statuses(answer) == [status]


def test_a_client_that_waits_for_it_is_told_to_go_on(guarded: ServedProcess) -> None:
    request = posted("/tokenize", {"prompt": "a"}, "Expect: 100-continue", CLOSE)
    before, _, body = request.partition(b"\r\n\r\n")
    with dial(guarded) as connection:
        connection.sendall(before + b"\r\n\r\n")
        assert statuses(connection.recv(1 << 16)) == [100]
        connection.sendall(body)
        assert statuses(everything(connection)) == [200]


def test_requests_in_a_row_are_answered_in_order_or_not_at_all(guarded: ServedProcess) -> None:
    many = head("GET", "/version") * 500 + head("GET", "/health", CLOSE)
    answer = told(guarded, many)
    got = statuses(answer)
    assert 1 <= len(got) <= 501
    assert set(got) == {200}
    assert b'"alive"' not in answer or answer.index(b'"alive"') > answer.rindex(b'"version"')


@pytest.mark.prove
def test_a_head_that_does_not_end_and_a_body_that_is_not_wanted_hold_no_connection(guarded: ServedProcess) -> None:
    """Also where single bytes go on coming; nothing is written into the middle of an answer."""
    story = {"prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": True}
    trickled: dict[str, tuple[bytes, bytes]] = {
        "silence": (b"", b""),
        "a head in drops": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n"),
        "a second head in drops": (head("GET", "/health") + b"GET /he", b"a"),
        "a body that nobody reads": (head("GET", "/health", "Content-Length: 100000"), b"x"),
        "a body in chunks that nobody reads": (head("GET", "/health", "Transfer-Encoding: chunked"), b"1\r\nx\r\n"),
        "a refused body": (head("POST", "/tokenize", "Content-Length: 100000"), b"x"),
        "blank lines within an answer": (posted("/v1/completions", story, CLOSE), b"\r\n"),
    }

    def trickle(sent: bytes, drop: bytes) -> tuple[float, bytes]:
        begun, pieces = time.monotonic(), []
        with dial(guarded, 1.0) as connection:
            connection.sendall(sent)
            while time.monotonic() - begun < HEAD_SECONDS + PATIENCE:
                try:
                    piece = connection.recv(1 << 16)
                    pieces.append(piece)
                    if not piece:
                        break
                except TimeoutError:
                    pass
                except ConnectionError:
                    break
                with suppress(ConnectionError):
                    connection.sendall(drop)
        return time.monotonic() - begun, b"".join(pieces)

    with ThreadPoolExecutor(len(trickled)) as pool:
        ends = dict(zip(trickled, pool.map(lambda each: trickle(*each), trickled.values()), strict=True))
    assert b"bad_http" not in ends.pop("blank lines within an answer")[1]
    late = {name: round(seconds, 1) for name, (seconds, _) in ends.items() if seconds > HEAD_SECONDS + PATIENCE}
    assert late == {}


@pytest.mark.slow
def test_a_body_that_does_not_come_is_given_up(guarded: ServedProcess) -> None:
    wanted = [route for route in ROUTES if route.body is not NO_BODY]

    def trickle(route: Route) -> list[int]:
        lines = ("Content-Type: application/json", "Content-Length: 100000", f"Authorization: Bearer {ALPHA}")
        return statuses(told(guarded, head(route.method, route.path, *lines) + b"{", BODY_SECONDS + 5))

    with ThreadPoolExecutor(len(wanted)) as pool:
        assert list(pool.map(trickle, wanted)) == [[408]] * len(wanted)


@pytest.mark.prove
def test_a_client_that_leaves_in_any_phase_leaves_nothing_behind(guarded: ServedProcess) -> None:
    def generate(stream: bool, n: int = 1) -> bytes:
        body = {"prompt": "One, two,", "max_tokens": 4_000, "ignore_eos": True, "stream": stream, "n": n}
        return posted("/v1/completions", body)

    half = len(generate(stream=True)) - 20
    phases: dict[str, tuple[bytes, float]] = {
        "in the head": (generate(stream=True)[:30], 0.1),
        "in the body": (generate(stream=True)[:half], 0.1),
        "at once": (generate(stream=True), 0.0),
        "in the queue": (generate(stream=False, n=80), 0.3),
        "in a stream": (generate(stream=True), 1.0),
        "before a whole answer": (generate(stream=False), 1.0),
        "with another request behind a stream": (generate(stream=True) + head("GET", "/health"), 1.0),
        "with another request behind a whole answer": (generate(stream=False) + head("GET", "/health"), 1.0),
        "with half a request behind a whole answer": (generate(stream=False) + b"GET /hea", 1.0),
    }
    for name, (sent, seconds) in phases.items():
        with dial(guarded) as connection:
            connection.sendall(sent)
            time.sleep(seconds)
        held = until_idle(guarded, 5.0)
        assert not any(held.values()), (name, held)
    assert guarded.num_engine_starts == 1


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_let_go(guarded: ServedProcess) -> None:
    """Its answer is larger than what the system takes from the server's hands."""
    request = posted("/detokenize", {"tokens": [0] * 1_000_000})
    with dial(guarded) as connection:
        local = connection.getsockname()[1]

        def held() -> list[str]:
            """Sockets to us that a process has open, as the system lists them."""
            lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            return [line[4] for line in lines if int(line[2].rpartition(":")[2], 16) == local and line[9] != "0"]

        connection.sendall(request)
        time.sleep(10.0)
        assert len(held()) == 1
        time.sleep(90.0)
        assert held() == []


def test_many_idle_connections_keep_nobody_out(guarded: ServedProcess) -> None:
    idle = [dial(guarded) for _ in range(500)]
    try:
        assert guarded.get("/health")[0] == 200
        assert guarded.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, bearer(ALPHA))[0] == 200
    finally:
        for connection in idle:
            connection.close()


def test_the_engines_socket_has_no_name_and_only_its_two_ends(guarded: ServedProcess) -> None:
    inodes = {pid: _unix_sockets(pid) for pid in (guarded.process.pid, guarded.engine_pid)}
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    ours = [words for words in listed if words[6] in inodes[guarded.process.pid] | inodes[guarded.engine_pid]]
    assert ours
    assert all(len(words) == 7 for words in ours), "a path is an eighth word"
    assert not inodes[guarded.process.pid] & inodes[guarded.engine_pid], "a process holds the other's end"
    assert len(inodes[guarded.engine_pid]) == 1


def _unix_sockets(pid: int) -> set[str]:
    """The inodes of a process's Unix sockets."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # A connection may be closed meanwhile.
        with suppress(FileNotFoundError):
            links.append(os.readlink(path))
    sockets = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    return sockets & {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}


def test_frames_that_nobody_may_send_are_refused() -> None:
    deep = b"\x91" * 100_000 + b"\x90"
    for codec in (command_codec(), report_codec()):
        bad = [b"", b"\xc1", deep, b"\x91\xc0", b"\x91\x80", b"\xdd\xff\xff\xff\xff", b"\x91\x81\xa4type\xa7unknown"]
        wrong: tuple[object, ...] = ([{"type": "cancel"}], [{"type": "cancel", "number": "1"}], {}, [[1]])
        bad += [msgspec.msgpack.encode(each) for each in wrong]
        bad += [command_codec().encode([Cancel(1)])[4:-1], pickle.dumps(Cancel(1))]
        for frame in bad:
            with pytest.raises(ProtocolError):
                codec.decode(frame)
    with pytest.raises(ProtocolError):
        command_codec().length(struct.pack(">I", protocol.MAX_COMMAND_BYTES + 1))


@pytest.mark.slow
def test_an_engine_that_stands_still_is_not_ready_and_is_alive_again_when_it_goes_on() -> None:
    with serving(environment={"OMP_NUM_THREADS": "1"}) as running:
        assert running.url
        os.kill(running.engine_pid, signal.SIGSTOP)
        status, body, headers = running.send("GET", "/ready", None, None, seconds=20.0)
        assert (status, is_error_body(body)) == (503, True)
        assert int(headers["retry-after"]) > 0
        assert running.get("/health")[0] == 200
        os.kill(running.engine_pid, signal.SIGCONT)
        assert running.get("/ready")[0] == 200


@pytest.mark.prove
def test_a_server_without_asserts_refuses_the_same() -> None:
    with serving(environment={**attacks.KEYS, "PYTHONOPTIMIZE": "2"}) as running:
        assert running.get("/v1/models")[0] == 401
        assert running.get("/v1/models", {**bearer(ALPHA), "Host": "evil.example"})[0] == 421
        for body, status in (({"prompt": [2**30]}, 400), ({"prompt": "a", "max_tokens": 1}, 200)):
            assert running.post("/v1/completions", body, bearer(ALPHA))[0] == status
        assert running.stop() == 0


def _asserts(module: ast.Module) -> list[int]:
    return [node.lineno for node in ast.walk(module) if isinstance(node, ast.Assert)]


def _unsafe_imports(module: ast.Module) -> list[int]:
    """Modules that run what they read."""
    unsafe = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "xmlrpc", "multiprocessing"}
    found = []
    for node in ast.walk(module):
        match node:
            case ast.Import(names=aliases, lineno=line):
                found += [line for each in aliases if each.name.partition(".")[0] in unsafe]
            case ast.ImportFrom(module=str(name), lineno=line) if name.partition(".")[0] in unsafe:
                found.append(line)
            case _:
                pass
    return found


def test_the_server_checks_nothing_by_assert_and_nothing_is_pickled() -> None:
    assert violations(_asserts, "server") == []
    # These speak over a pipe with processes that they started themselves; no server imports `testing`.
    excepted = ["testing/simulator/seeds.py", "testing/conformance/worker.py", "testing/conformance/crew.py"]
    assert violations(_unsafe_imports, excepted=excepted) == []
    assert _asserts(ast.parse("x = 1\nassert x")) == [2]
    assert _unsafe_imports(
        ast.parse("import os\nimport pickle as p\nfrom multiprocessing.connection import Client")
    ) == [2, 3]


def test_a_route_that_does_not_say_who_may_use_it_fails_construction() -> None:
    open_to_whom: Any = None

    async def handler(call: Any) -> Any:
        raise NotImplementedError

    with pytest.raises(ConfigError, match="to declare who may use it"):
        RouteTable([Route("GET", "/new", open_to_whom, handler, "", NO_BODY, None)])


def test_a_key_is_compared_with_all_keys_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    compare = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        assert len(one) == len(other)
        return compare(one, other)

    ring = Keyring(["first-key-1", "second-key-2", "third-key-3"])
    monkeypatch.setattr(hmac, "compare_digest", counted)
    assert ring.caller(b"Bearer first-key-1") == "key-1"
    assert compared == [32, 32, 32]


def test_a_secret_cannot_be_printed_or_serialised() -> None:
    secret = Secret(ALPHA)
    assert ALPHA not in f"{secret!r} {secret} {[secret]!r} {Keyring([ALPHA])!r}"
    for serialise in (pickle.dumps, copy.copy, copy.deepcopy, json.dumps, msgspec.json.encode, msgspec.msgpack.encode):
        with pytest.raises(TypeError):
            serialise(secret)
    with pytest.raises(ConfigError) as refused:
        Keyring(["bad key!"])
    assert "bad key!" not in str(refused.value)
