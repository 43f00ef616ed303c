"""Who may ask: keys that cannot leak, and names that cannot be borrowed."""

from __future__ import annotations

import copy
import json
import pickle
import socket

import pytest

from sightline.core.errors import ConfigError
from sightline.server.http.access import Access, HostList, Keyring, Secret, first_header
from sightline.server.http.errors import ApiError
from sightline.server.http.routing import NO_BODY, Call, Reply, Route, RouteTable

KEYS = ("sk-first-key", "sk-second-key")


def test_each_key_is_a_caller_of_its_own() -> None:
    keys = Keyring(KEYS)
    assert keys.caller(b"Bearer sk-first-key") != keys.caller(b"bearer sk-second-key")


def test_a_callers_name_does_not_tell_the_key() -> None:
    assert not set(Keyring(KEYS).caller(b"Bearer sk-first-key").split("-")) & {"sk", "first"}


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer sk-first-ke",
        b"Bearer sk-first-keyy",
        b"Basic sk-first-key",
        b"sk-first-key",
    ],
)
def test_nothing_but_a_key_opens(authorization: bytes | None) -> None:
    with pytest.raises(ApiError) as caught:
        Keyring(KEYS).caller(authorization)
    assert caught.value.status == 401
    assert caught.value.code == "invalid_api_key"


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    keys = Keyring(KEYS)
    assert keys.caller(None, b"sk-second-key") == keys.caller(b"Bearer sk-second-key", b"sk-second-key") == "key-2"


@pytest.mark.parametrize(
    ("authorization", "api_key", "got"),
    [
        (None, b"", "an unknown one"),
        (None, b"Bearer sk-first-key", "an unknown one"),
        (b"Bearer sk-wrong-key", b"sk-first-key", "an unknown one"),
        (b"Basic sk-first-key", b"sk-first-key", "an unknown one"),
        (b"Bearer sk-first-key", b"sk-second-key", "two different ones"),
    ],
)
def test_two_headers_must_have_the_same_key(authorization: bytes | None, api_key: bytes, got: str) -> None:
    with pytest.raises(ApiError, match=got) as caught:
        Keyring(KEYS).caller(authorization, api_key)
    assert caught.value.status == 401


def test_without_keys_everybody_is_the_same_caller() -> None:
    assert Keyring(()).caller(None) == Keyring(()).caller(b"Bearer anything") == ""


@pytest.mark.parametrize("key", ["", "short", "with space", "ümlaut-key", "new\nline-key"])
def test_a_key_that_a_header_cannot_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Keyring([key])
    assert not key or key not in str(caught.value)


def test_a_secret_is_not_told_by_printing_copying_or_serialising() -> None:
    secret = Secret("sk-very-secret")
    assert "sk-very-secret" not in f"{secret!r} {secret}"
    assert secret.matches(b"sk-very-secret")
    assert not secret.matches(b"sk-very-secret2")
    for serialise in (pickle.dumps, copy.deepcopy, json.dumps):
        with pytest.raises(TypeError):
            serialise(secret)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1",
        "127.0.0.1:80",
        "[::1]:8000",
        "192.0.2.7:8000",
        "served.here:1",
        "localhost.",
    ],
)
def test_numbers_and_the_servers_own_names_are_good_hosts(host: str) -> None:
    HostList("served.here").check(host.encode())


def test_the_machines_own_name_is_a_good_host() -> None:
    HostList("127.0.0.1").check(socket.gethostname().encode())


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::1",
        "localhost:x",
        ":80",
        "[::1]x",
    ],
)
def test_a_borrowed_name_is_refused(host: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        HostList("127.0.0.1").check(None if host is None else host.encode())
    assert caught.value.status == 421


@pytest.mark.parametrize("host", ["sightline:8000", "host.docker.internal", "pod.ns.svc.cluster.local", "a.home.arpa"])
def test_private_names_are_good_hosts_of_a_server_that_others_can_reach(host: str) -> None:
    HostList("0.0.0.0").check(host.encode())
    with pytest.raises(ApiError):
        HostList("127.0.0.1").check(host.encode())


@pytest.mark.parametrize(
    "host", ["evil.example", "sightline.dev", "local.evil.example", "evillocal.example", "internal.example"]
)
def test_a_name_that_somebody_could_register_is_refused_wherever_the_server_listens(host: str) -> None:
    with pytest.raises(ApiError):
        HostList("0.0.0.0").check(host.encode())


def test_names_under_localhost_are_this_machines() -> None:
    HostList("127.0.0.1").check(b"app.localhost:8000")


def test_a_refusal_tells_the_flag_with_the_name() -> None:
    with pytest.raises(ApiError, match=r"container.* --allowed-host llm.prod.example$"):
        HostList("0.0.0.0").check(b"llm.prod.example:8000")
    with pytest.raises(ApiError, match=r"--allowed-host NAME$"):
        HostList("0.0.0.0").check(b":80")


def test_more_names_can_be_allowed_and_a_star_allows_all() -> None:
    HostList("127.0.0.1", ["My.Name"]).check(b"my.name:443")
    HostList("127.0.0.1", ["*"]).check(b"evil.example")


@pytest.mark.parametrize(
    "name", [b"host", b"authorization", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding"]
)
def test_a_header_that_decides_comes_once(name: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        first_header([(name, b"1"), (b"accept", b"a"), (name, b"2")])
    assert caught.value.status == 400


def test_other_headers_may_come_twice_and_the_first_counts() -> None:
    assert first_header([(b"accept", b"1"), (b"accept", b"2")]) == {b"accept": b"1"}


async def nothing(call: Call) -> Reply:
    return Reply(b"")


def route(path: str, access: object = Access.KEY, method: str = "GET") -> Route:
    return Route(method, path, access, nothing, "", NO_BODY, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("access", [None, "public", "", True])
def test_a_route_that_does_not_say_who_may_use_it_fails_at_start_up(access: object) -> None:
    with pytest.raises(ConfigError, match="/open"):
        RouteTable([route("/safe"), route("/open", access)])


def test_a_route_comes_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        RouteTable([route("/a"), route("/a")])
    RouteTable([route("/a"), route("/a", method="POST")])


@pytest.mark.parametrize(
    "path", [b"//a", b"/a/", b"/A", b"/%61", b"/a/../a", b"/./a", b"", b"a", b"/a?x", b"/a;b", b"/models/"]
)
def test_a_path_is_compared_as_it_came(path: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        RouteTable([route("/a"), route("/models/{model}")]).find("GET", path)
    assert caught.value.status == 404


def test_a_parameter_is_what_is_left_of_the_path() -> None:
    found, tail = RouteTable([route("/models"), route("/models/{model}")]).find("GET", b"/models/owner%2Fname")
    assert found.path == "/models/{model}"
    assert tail == "owner/name"


def test_a_known_path_under_another_method_tells_the_methods() -> None:
    table = RouteTable([route("/a"), route("/a", method="POST")])
    with pytest.raises(ApiError) as caught:
        table.find("DELETE", b"/a")
    assert caught.value.status == 405
    assert "GET, HEAD, POST" in caught.value.message
    assert table.find("HEAD", b"/a")[0].method == "GET"
