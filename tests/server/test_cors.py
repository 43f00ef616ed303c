"""Pages of other sites: those that are allowed can use the server from a browser, others cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser
from playwright.sync_api import Error as BrowserError

from sightline.core.errors import ConfigError
from sightline.server.http.cors import CorsPolicy
from sightline.server.http.errors import ApiError
from support.browsers import chromium
from support.serving import ServedProcess, fake_serving

KEY = "sk-of-the-page"
SITE = "http://webui.example:3000"
PREFLIGHT = {
    "Origin": SITE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
BEARER = {"Authorization": f"Bearer {KEY}"}
OPEN_WEBUI = """
async ({base, key, body}) => {
  const headers = {Accept: "application/json", "Content-Type": "application/json", authorization: `Bearer ${key}`};
  const models = await (await fetch(`${base}/models`, {headers})).json();
  const ask = body => fetch(`${base}/chat/completions`, {method: "POST", headers, body});
  const response = await ask(JSON.stringify({model: models.data[0].id, ...body}));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) text += piece.value;
  const refused = await ask("{");
  return {
    models: models.data.map(each => each.id),
    text,
    id: response.headers.get("x-request-id"),
    sampling: response.headers.get("x-sightline-sampling"),
    refused: (await refused.json()).error.code,
  };
}
"""
"""The calls that Open WebUI makes from the browser for a direct connection: models, then a streamed conversation."""


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>another site</title>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The origin of a site that is not the server's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def open_server(site: str) -> Iterator[ServedProcess]:
    with fake_serving(api_keys=[KEY], cors_origins=[site, SITE]) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def ask_from_page(browser: Browser, site: str, server: ServedProcess) -> Any:
    body = {"stream": True, "messages": [{"role": "user", "content": "count"}], "max_tokens": 5}
    page = browser.new_page()
    try:
        page.goto(site)
        return page.evaluate(OPEN_WEBUI, {"base": server.base_url, "key": KEY, "body": body})
    finally:
        page.close()


@pytest.mark.timeout(300)
def test_open_webui_can_use_the_server_from_another_origin(
    browser: Browser, site: str, open_server: ServedProcess
) -> None:
    told = ask_from_page(browser, site, open_server)
    assert told["models"] == ["fake"]
    assert "data: [DONE]" in told["text"]
    assert '"content":"4 "' in told["text"]
    assert len(told["id"]) == 24
    assert '"n":1' in told["sampling"]
    assert told["refused"] == "invalid_json"


@pytest.mark.timeout(300)
def test_a_page_that_is_not_allowed_gets_nothing(browser: Browser, site: str) -> None:
    with (
        fake_serving(api_keys=[KEY], cors_origins=[SITE]) as server,
        pytest.raises(BrowserError, match="Failed to fetch"),
    ):
        ask_from_page(browser, site, server)


def test_a_preflight_needs_no_key_and_grants_what_was_asked(open_server: ServedProcess) -> None:
    status, body, told = open_server.send("OPTIONS", "/v1/chat/completions", None, PREFLIGHT)
    assert (status, body) == (200, b"")
    assert told["access-control-allow-origin"] == SITE
    assert told["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "POST" in told["access-control-allow-methods"]
    assert told["vary"] == "Origin"
    assert "access-control-allow-credentials" not in told


def test_a_preflight_from_elsewhere_is_refused(open_server: ServedProcess) -> None:
    for origin in ("http://evil.example", "null", f"{SITE}.evil.example", f"{SITE}0"):
        status, body, told = open_server.send("OPTIONS", "/v1/models", None, {**PREFLIGHT, "Origin": origin})
        assert (status, told["vary"]) == (403, "Origin")
        assert b"--cors-origin" in body
        assert not [name for name in told if name.startswith("access-control")]


def test_every_answer_has_the_headers_errors_and_streams_included(open_server: ServedProcess) -> None:
    ask = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 2}
    sent = {"Origin": SITE, **BEARER}
    answers = [
        open_server.send("GET", "/health", None, {"Origin": SITE}),
        open_server.send("GET", "/v1/models", None, {"Origin": SITE}),
        open_server.send("GET", "/nothing", None, sent),
        open_server.post("/v1/chat/completions", {**ask, "stream": True}, sent),
        open_server.post("/v1/chat/completions", ask, sent),
        open_server.send("GET", "/health", None, {"Origin": SITE, "Host": "evil.example"}),
    ]
    assert [status for status, _, _ in answers] == [200, 401, 404, 200, 200, 421]
    for _, _, told in answers:
        assert (told["access-control-allow-origin"], told["vary"]) == (SITE, "Origin")
        assert "x-request-id" in told["access-control-expose-headers"]


def test_a_simple_request_from_an_allowed_page_still_needs_json(open_server: ServedProcess) -> None:
    sent = {"Origin": SITE, "Content-Type": "text/plain", **BEARER}
    assert open_server.send("POST", "/v1/completions", b"{}", sent)[0] == 415


def test_answers_without_an_origin_vary_all_the_same(open_server: ServedProcess) -> None:
    _, _, told = open_server.send("GET", "/health", None, None)
    assert told["vary"] == "Origin"
    assert "access-control-allow-origin" not in told


def test_a_star_allows_every_page_and_no_credentials() -> None:
    policy = CorsPolicy(["*"])
    for origin in (b"http://a.example", b"null", None):
        assert (b"access-control-allow-origin", b"*") in policy.headers(origin)
    assert policy.preflight("OPTIONS", {b"origin": b"null", b"access-control-request-method": b"GET"}) is not None


def test_without_origins_nothing_changes() -> None:
    policy = CorsPolicy(())
    asked = {b"origin": b"http://a.example", b"access-control-request-method": b"POST"}
    assert policy.headers(b"http://a.example") == []
    assert policy.preflight("OPTIONS", asked) is None


def test_only_a_preflight_is_one() -> None:
    policy = CorsPolicy([SITE])
    asked = {b"origin": SITE.encode(), b"access-control-request-method": b"POST"}
    assert policy.preflight("POST", asked) is None
    assert policy.preflight("OPTIONS", {b"origin": SITE.encode()}) is None


def test_names_of_headers_are_granted_only_if_they_are_some() -> None:
    asked = {b"origin": SITE.encode(), b"access-control-request-method": b"POST"}
    for names in (b"", b"a b", b"a,,b", b"x" * 3000, b"a\xff"):
        reply = CorsPolicy([SITE]).preflight("OPTIONS", {**asked, b"access-control-request-headers": names})
        assert reply is not None
        assert b"access-control-allow-headers" not in dict(reply.headers)


def test_a_refusal_names_the_origin_briefly() -> None:
    asked = {b"origin": b"x" * 1000, b"access-control-request-method": b"POST"}
    with pytest.raises(ApiError) as caught:
        CorsPolicy([SITE]).preflight("OPTIONS", asked)
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    "origin",
    [
        *("", "example.com", "http://", "http://a/", "http://a/b", "http://a:80", "https://a:443", "http://a b"),
        *("null", "http://u@a", "http://a?b", "//a", "http://*"),
    ],
)
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        CorsPolicy([origin])


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "HTTPS://A.Example", "http://[::1]:8080", "chrome-extension://abcdef"]
)
def test_an_origin_is_compared_whole_and_without_case(origin: str) -> None:
    policy = CorsPolicy([origin])
    sent = origin.lower().encode()
    assert (b"access-control-allow-origin", sent) in policy.headers(sent)
    assert policy.headers(sent + b"0") == [(b"vary", b"Origin")]
