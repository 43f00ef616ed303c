"""Every row of the threat table against every route: docs/security.md says which test holds which."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sightline.server.http.access import Access
from sightline.server.http.routing import NO_BODY
from support import attacks
from support.attacks import ALPHA, BETA, bearer, is_error_body, metrics, until_idle
from support.serving import ServedProcess, serving

ANSWER_SECONDS = 5.0
"""In which anything that is refused, or costs little, is answered."""
STORY = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
ROUTES = attacks.routes()
KEYED = [route for route in ROUTES if route.access is Access.KEY]


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServedProcess]:
    """A server with two keys, from the environment."""
    with serving("--log-level", "debug", environment=attacks.KEYS) as running:
        assert running.url
        yield running


def attack(
    server: ServedProcess, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[int, bytes, dict[str, str], float]:
    """One request: status, body, headers and the front end's processor seconds.

    A connection that the server closes early has status 0.
    """
    begun = server.processor_seconds
    try:
        status, answer, told = server.send(method, path, body, headers, seconds=60.0)
    except ConnectionError:
        status, answer, told = 0, b"", {}
    return status, answer, dict(told), server.processor_seconds - begun


def told_story(server: ServedProcess) -> str:
    """A greedy stream to its end."""
    with server.streaming("/v1/completions", STORY, bearer(BETA)) as response:
        events = [line[6:] for line in response if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]", events[-1]
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


class Bystander:
    """Another client, who reads streams all the while."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.clean = told_story(server)
        self.told: list[str] = []

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self.told.append(told_story(self._server))
            except (OSError, AssertionError, LookupError) as error:
                self.told.append(repr(error))


@pytest.mark.prove
def test_the_whole_corpus_is_refused_in_time_and_harms_nobody(guarded: ServedProcess) -> None:
    """Statuses, error bodies, times; a bystander's greedy streams; engine starts; sequences and pages afterwards."""
    faults, num_sent = [], 0
    with Bystander(guarded) as bystander:
        for route in ROUTES:
            for name, body, headers, statuses in attacks.corpus(route) if route.body is not NO_BODY else ():
                num_sent += 1
                status, answer, _, seconds = attack(
                    guarded, route.method, attacks.path_of(route), body, {**headers, **bearer(ALPHA)}
                )
                is_told = status == 200 or is_error_body(answer) or (status == 0 and 413 in statuses)
                if (status not in statuses and not (status == 0 and 413 in statuses)) or not is_told:
                    faults.append(f"{route.path} {name[:100]}: {status} {answer[:100]!r}")
                elif seconds > ANSWER_SECONDS:
                    faults.append(f"{route.path} {name[:100]}: {seconds:.1f} s")
    assert num_sent > 100
    assert not faults, "\n".join(faults)
    assert bystander.told == [bystander.clean] * len(bystander.told)
    assert bystander.told
    assert guarded.num_engine_starts == 1
    assert set(until_idle(guarded).values()) == {0.0}
    assert [event for event in guarded.events if event["message"] == "handler failed"] == []


def test_a_sample_body_is_accepted_by_every_route() -> None:
    """Otherwise the corpus would be refused for the sample's sake."""
    for route in ROUTES:
        if route.body is not NO_BODY:
            msgspec.convert(attacks.sample_body(route), route.body)


@pytest.mark.prove
def test_while_the_server_parses_the_worst_body_it_answers_others(guarded: ServedProcess) -> None:
    fields = b",".join(b'"f%d":1' % place for place in range(350_000))
    worst = {
        "unused fields": b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,' + fields + b"}",
        "escaped quotes": b"[" * 65 + b'"' + b'\\"' * 30_000,
    }
    waited: dict[str, float] = {}
    for name, body in worst.items():
        sending = threading.Thread(
            target=attack,
            args=(guarded, "POST", "/v1/chat/completions", body, {**attacks.JSON_HEADER, **bearer(ALPHA)}),
        )
        sending.start()
        begun = guarded.processor_seconds
        while sending.is_alive():
            asked = guarded.processor_seconds
            guarded.get("/health")
            waited[name] = max(waited.get(name, 0.0), guarded.processor_seconds - asked)
        assert guarded.processor_seconds - begun < ANSWER_SECONDS, name
    assert all(seconds < 1.0 for seconds in waited.values()), waited


def test_one_callers_long_texts_do_not_hold_up_another_caller(guarded: ServedProcess) -> None:
    long = json.dumps({"prompt": "é1 " * 1_000_000, "max_tokens": 1}, ensure_ascii=False).encode()[: 4 << 20]
    long = long[:-40].rsplit(b" ", 1)[0] + b'", "max_tokens": 1}'
    headers = {**attacks.JSON_HEADER, **bearer(ALPHA)}
    senders = [
        threading.Thread(target=attack, args=(guarded, "POST", path, long, headers))
        for path in ("/v1/completions", "/tokenize", "/v1/completions")
    ]
    for sender in senders:
        sender.start()
    time.sleep(0.5)
    begun = guarded.processor_seconds
    status, _, _ = guarded.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, bearer(BETA))
    waited = guarded.processor_seconds - begun
    for sender in senders:
        sender.join()
    assert status == 200
    assert waited < ANSWER_SECONDS


def test_one_callers_sequences_leave_rows_for_another_caller(guarded: ServedProcess) -> None:
    info = json.loads(guarded.get("/server_info", bearer(ALPHA))[1])
    many = {"prompt": "a", "max_tokens": 450, "ignore_eos": True, "stream": True, "n": info["config"]["max_rows"]}
    with guarded.streaming("/v1/completions", many, bearer(ALPHA)) as response:
        for _ in range(4 * info["config"]["max_rows"]):
            assert response.readline()
        headers = {**attacks.JSON_HEADER, **bearer(BETA)}
        status, _, _, _ = attack(guarded, "POST", "/v1/completions", b'{"prompt": "b", "max_tokens": 1}', headers)
        assert status == 200
        # The first caller's sequences still run: the second was not kept waiting for their end.
        told = metrics(guarded)
        assert told["sightline_num_requests_running"] + told["sightline_num_requests_paused"] > 0


def test_every_route_that_wants_a_key_refuses_whoever_has_none(guarded: ServedProcess) -> None:
    faults = []
    for route in KEYED:
        for name, headers in attacks.NO_KEY_HEADERS.items():
            for query in ("", f"?api_key={ALPHA}&key={ALPHA}&access_token={ALPHA}"):
                body = None if route.body is NO_BODY else json.dumps(attacks.sample_body(route)).encode()
                path = attacks.path_of(route) + query
                status, answer, told, _ = attack(guarded, route.method, path, body, {**attacks.JSON_HEADER, **headers})
                if status != 401 or told.get("www-authenticate") != "Bearer" or not is_error_body(answer):
                    faults.append(f"{route.method} {path} {name}: {status}")
    assert not faults, "\n".join(faults)
    assert len(KEYED) >= 7


def test_every_route_that_wants_a_key_answers_whoever_has_one(guarded: ServedProcess) -> None:
    for route in KEYED:
        body = None if route.body is NO_BODY else json.dumps(attacks.sample_body(route)).encode()
        headers = {**attacks.JSON_HEADER, **bearer(BETA)}
        status, _, _, _ = attack(guarded, route.method, attacks.path_of(route), body, headers)
        assert status == (404 if "{" in route.path else 200), route.path


def test_paths_that_only_look_like_a_route_reach_none(guarded: ServedProcess) -> None:
    faults = []
    for route in ROUTES:
        body = None if route.body is NO_BODY else json.dumps(attacks.sample_body(route)).encode()
        # Below the files of the pages, which are public, a path that names none is not found by anybody.
        unknown = {400, 401, 404} if route.path == "/page/{file}" else {400, 401}
        for path in attacks.path_tricks(attacks.path_of(route)):
            for headers, statuses in (({}, unknown), (bearer(ALPHA), {400, 404})):
                status, _, _, _ = attack(guarded, route.method, path, body, {**attacks.JSON_HEADER, **headers})
                if status not in statuses:
                    faults.append(f"{route.method} {path} {'with' if headers else 'without'} a key: {status}")
    assert not faults, "\n".join(faults)


def test_headers_and_queries_do_not_move_a_request(guarded: ServedProcess) -> None:
    moved = {"X-Original-URL": "/v1/models", "X-Rewrite-URL": "/v1/models", "X-HTTP-Method-Override": "POST"}
    assert guarded.get("/health?path=/v1/models#/v1/models", moved)[1] == guarded.get("/health")[1]


def test_a_method_that_a_route_does_not_have_is_refused(guarded: ServedProcess) -> None:
    for route in ROUTES:
        own = {each.method for each in ROUTES if each.path == route.path}
        own |= {"HEAD"} if "GET" in own else set()
        for method in sorted({"HEAD", "OPTIONS", "TRACE", "PUT", "PATCH", "DELETE", "POST", "GET"} - own):
            status, answer, told, _ = attack(guarded, method, attacks.path_of(route), None, bearer(ALPHA))
            assert (status, told["allow"]) == (405, ", ".join(sorted(own))), (method, route.path)
            assert method == "HEAD" or is_error_body(answer)
            assert attack(guarded, method, attacks.path_of(route), None, {})[0] == 401


def test_a_head_of_an_answer_is_told_to_whoever_may_have_the_answer(guarded: ServedProcess) -> None:
    for route in ROUTES:
        if route.method == "GET":
            for headers in ({}, bearer(ALPHA)):
                path = attacks.path_of(route)
                status, answer, _, _ = attack(guarded, "HEAD", path, None, headers)
                assert (status, answer) == (attack(guarded, "GET", path, None, headers)[0], b""), path


def test_a_name_that_is_not_the_servers_is_refused_on_every_route(guarded: ServedProcess) -> None:
    for route in ROUTES:
        for host in attacks.BAD_HOSTS:
            headers = {"Host": host, **bearer(ALPHA)}
            assert attack(guarded, route.method, attacks.path_of(route), None, headers)[0] == 421, (route.path, host)
    for host in attacks.GOOD_HOSTS:
        assert guarded.get("/health", {"Host": host})[0] == 200, host


def test_another_sites_page_can_send_nothing_and_read_nothing(guarded: ServedProcess) -> None:
    origin = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    for route in ROUTES:
        path = attacks.path_of(route)
        asked = {"Access-Control-Request-Method": route.method, "Access-Control-Request-Headers": "content-type"}
        assert attack(guarded, "OPTIONS", path, None, {**origin, **asked, **bearer(ALPHA)})[0] == 405
        body = None if route.body is NO_BODY else json.dumps(attacks.sample_body(route)).encode()
        plain = {"Content-Type": "text/plain;charset=UTF-8"}
        status, _, told, _ = attack(guarded, route.method, path, body, {**origin, **plain, **bearer(ALPHA)})
        assert body is None or status == 415
        assert not [name for name in told if name.startswith("access-control")]


def test_keys_appear_nowhere(guarded: ServedProcess) -> None:
    told = [guarded.get(path, bearer(ALPHA))[1].decode() for path in ("/server_info", "/metrics", "/openapi.json", "/")]
    wrong = "wrong-key-8841"
    told.append(guarded.get("/v1/models", bearer(wrong))[1].decode())
    pids = (guarded.process.pid, guarded.engine_pid)
    told += [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    told += guarded.lines
    assert not [text[:200] for text in told if ALPHA in text or BETA in text or wrong in text]


def test_nothing_is_fetched_on_a_clients_word(guarded: ServedProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(1.0)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        parts: list[dict[str, object]] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "file", "file": {"file_id": url}},
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        ]
        for route in ROUTES:
            if "messages" in attacks.fields_of(route):
                for part in parts:
                    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
                    assert guarded.post(route.path, body, bearer(ALPHA))[0] == 400, part
                short = {"max_tokens": 1} if "max_tokens" in route.body.__struct_fields__ else {}
                body = {"messages": [{"role": "user", "content": url}], "user": url, **short}
                assert guarded.post(route.path, body, bearer(ALPHA))[0] == 200
                for named in ({"documents": [{"url": url}]}, {"model_url": url}, {"lora_path": url}):
                    assert guarded.post(route.path, {**body, **named}, bearer(ALPHA))[0] == 400
        with pytest.raises(TimeoutError):
            trap.accept()


def test_a_request_brings_no_template(guarded: ServedProcess) -> None:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "a"}]}
    _, plain, _ = guarded.post("/tokenize", body, bearer(ALPHA))
    template = "{% for x in range(10**9) %}{{ cycler.__init__.__globals__ }}{% endfor %}"
    for brought in ({"chat_template": template}, {"template": template}):
        assert guarded.post("/tokenize", {**body, **brought}, bearer(ALPHA))[0] == 400
    switches = {"chat_template_kwargs": {"chat_template": template, "template": template}}
    status, answer, _ = guarded.post("/tokenize", {**body, **switches}, bearer(ALPHA))
    assert (status, answer) == (200, plain)


def test_a_clients_request_id_names_its_request(guarded: ServedProcess) -> None:
    for given in ("mine-1", "x" * 128, '{"a":"<b>"}'):
        _, _, told, _ = attack(guarded, "GET", "/v1/models/none", None, {"X-Request-Id": given, **bearer(ALPHA)})
        assert told["x-request-id"] == given
        event = guarded.wait_for("request", lambda event, given=given: event["id"] == given, seconds=10.0)  # type: ignore[misc]
        assert (event["status"], len(event["answer_id"])) == (404, 24)
    for bad in ("x" * 129, "a b", "a\tb", "\x7f", "é", ""):
        status, _, told, _ = attack(guarded, "GET", "/health", None, {"X-Request-Id": bad})
        # The parser refuses some of them before there is a request to name.
        assert status == 400 or re.fullmatch("[0-9a-f]{24}", told["x-request-id"])


def test_ids_of_answers_are_ours_unguessable_and_unique(guarded: ServedProcess) -> None:
    told = set()
    for _ in range(20):
        body = {"prompt": "a", "max_tokens": 1, "request_id": "1", "rid": "1", "user": "1"}
        _, answer, headers = guarded.post("/v1/completions", body, {**bearer(ALPHA), "X-Request-Id": "1"})
        told.add(json.loads(answer)["id"])
        assert headers["x-request-id"] == "1"
    assert len(told) == 20
    assert all(re.fullmatch("cmpl-[0-9a-f]{24}", each) for each in told)


def test_one_key_learns_nothing_of_anothers_prompts_from_the_cache(guarded: ServedProcess) -> None:
    body = {"prompt": f"The secret of {time.time_ns()} is " + "one two three " * 60, "max_tokens": 1}

    def cached(key: str) -> int:
        _, answer, _ = guarded.post("/v1/completions", body, bearer(key))
        return int(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(ALPHA) == 0
    assert cached(BETA) == 0
    assert cached(ALPHA) > 0
    assert cached(BETA) > 0


def test_series_of_metrics_come_from_closed_sets(guarded: ServedProcess) -> None:
    def shoot(place: int) -> None:
        attack(guarded, "GET", f"/{place}/x{{route}}", None, bearer(ALPHA))
        attack(guarded, "GET", f"/v1/models/m{place}", None, bearer(ALPHA))
        guarded.post("/v1/completions", {"prompt": "a", "model": f"m{place}"}, bearer(ALPHA))
        attack(guarded, ("PUT", "TRACE", "LINK", "MKCOL")[place % 4], f"/health?{place}", None, bearer(ALPHA))

    for place in range(4):
        shoot(place)
    before = set(metrics(guarded))
    for place in range(4, 40):
        shoot(place)
    assert set(metrics(guarded)) == before
    told = {found for series in before for found in re.findall(r'route="([^"]*)"', series)}
    assert told <= {route.path for route in ROUTES} | {"none"}


def test_logs_stay_one_object_a_line_and_hold_no_texts(guarded: ServedProcess) -> None:
    mark = f"mark{time.time_ns()}"
    nasty = f"{mark}\x1b[2J\x9b31m\u2028"
    for route in ROUTES:
        headers = {
            name: nasty.encode("utf-8") for name in ("User-Agent", "X-Request-Id", "Referer", "Cookie", "Origin")
        }
        sent: dict[str, Any] = {**headers, **bearer(ALPHA), **attacks.JSON_HEADER}
        sample = {
            name: nasty if isinstance(value, str) else value for name, value in attacks.sample_body(route).items()
        }
        attack(guarded, route.method, f"{attacks.path_of(route)}?{mark}%0d%0a%1b", None, sent)
        attack(guarded, route.method, f"/{mark}%0d%0a%1b[2J", json.dumps(sample).encode(), sent)
        attack(guarded, route.method, attacks.path_of(route), json.dumps({**sample, mark: mark}).encode(), sent)
    end = json.loads(guarded.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, bearer(ALPHA))[1])["id"]
    guarded.wait_for("request", lambda event: event["id"] in end, seconds=10.0)
    opened = next(place for place, line in enumerate(guarded.lines) if '"open"' in line)
    logged = [line for line in guarded.lines[opened + 1 :] if line.startswith("{") or mark in line or "\x1b" in line]
    assert len(logged) > len(ROUTES)
    assert all(isinstance(json.loads(line), dict) and line.isprintable() for line in logged)
    assert not [line for line in guarded.lines if mark in line]
