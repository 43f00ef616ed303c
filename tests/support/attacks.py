"""What a hostile client sends, as data: bodies, fields, paths, headers and bytes on the wire.

Knows the server's table of routes, so that a route that is added later is attacked too. Does not know what is done
about an attack beyond the status codes that may come back.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from sightline.core.config import EngineConfig, Task
from sightline.server.http.routing import NO_BODY, Route
from sightline.server.serve import Server, ServerConfig
from support.serving import ServedProcess

ALPHA, BETA = "alpha-hq7w9Zk2Rr", "beta-Ux03mmTq8e"
KEYS = {"SIGHTLINE_API_KEY": f"{ALPHA},{BETA}", "OMP_NUM_THREADS": "1"}
JSON_HEADER = {"Content-Type": "application/json"}
REFUSED = frozenset({400, 404, 413, 415, 429})
"""What a client that asks for nonsense is told."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def routes(task: Task = Task.GENERATE) -> tuple[Route, ...]:
    """Every way in, as the server builds it."""
    return Server(ServerConfig(), EngineConfig(task=task.value), lambda url, opened: None).table.routes


def path_of(route: Route) -> str:
    """A path that leads to the route."""
    return route.path.partition("{")[0] + ("anything" if "{" in route.path else "")


def fields_of(route: Route) -> frozenset[str]:
    """Names that a body may have; none where the route reads no body."""
    if route.body is NO_BODY:
        return frozenset()
    return frozenset(each.encode_name for each in msgspec.structs.fields(route.body))


_SAMPLES: Mapping[str, object] = {
    "prompt": "One, two,",
    "input": "One, two,",
    "text_1": "One, two,",
    "text_2": ["three"],
    "query": "One, two,",
    "documents": ["three", "four"],
    "tokens": [1, 2, 3],
    "messages": [{"role": "user", "content": "One, two,"}],
    "max_tokens": 1,
    "max_output_tokens": 1,
}


def sample_body(route: Route) -> dict[str, object]:
    """A small body that the route accepts: each of the usual fields that it has, and one kind of prompt."""
    known = fields_of(route)
    names = [name for name in _SAMPLES if name in known and not (name == "messages" and "prompt" in known)]
    return {name: _SAMPLES[name] for name in names}


def sample_for(route: Route, name: str) -> dict[str, object]:
    """The sample in which a field matters: what is about a conversation comes with one."""
    sample = sample_body(route)
    if name in ("messages", "chat_template_kwargs") and "messages" in fields_of(route):
        sample = {key: value for key, value in sample.items() if key != "prompt"}
        sample["messages"] = _SAMPLES["messages"]
    return sample


@dataclass(frozen=True)
class BodyAttack:
    """A body that no route accepts, whatever it reads."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: dict(JSON_HEADER))
    statuses: frozenset[int] = frozenset({400})


def _typed(kind: str, body: bytes = b"{}") -> BodyAttack:
    return BodyAttack(body, {"Content-Type": kind}, frozenset({415}))


BODY_ATTACKS: Mapping[str, BodyAttack] = {
    "nothing": BodyAttack(b""),
    "not JSON": BodyAttack(b"<xml/>"),
    "a list": BodyAttack(b"[]"),
    "null": BodyAttack(b"null"),
    "a number": BodyAttack(b"1e308"),
    "not-a-number literal": BodyAttack(b'{"temperature": NaN}'),
    "infinity literal": BodyAttack(b'{"temperature": Infinity}'),
    "number beyond floats": BodyAttack(b'{"temperature": 1e999}'),
    "integer of a million digits": BodyAttack(b'{"seed": ' + b"9" * 1_000_000 + b"}"),
    "truncated": BodyAttack(b'{"prompt": "a'),
    "trailing characters": BodyAttack(b"{} {}"),
    "byte order mark": BodyAttack(b"\xef\xbb\xbf{}"),
    "UTF-16": BodyAttack('{"prompt": "a"}'.encode("utf-16")),
    "invalid UTF-8": BodyAttack(b'{"prompt": "\xff\xfe"}'),
    "encoded surrogate": BodyAttack(b'{"prompt": "\xed\xa0\x80"}'),
    "lone surrogate": BodyAttack(b'{"prompt": "\\ud800"}'),
    "lone low surrogate": BodyAttack(b'{"prompt": "\\udc00 and so on"}'),
    "raw control character": BodyAttack(b'{"prompt": "\x00"}'),
    "pickle": BodyAttack(b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."),
    "deep lists": BodyAttack(b"[" * 100_000 + b"]" * 100_000),
    "deep lists left open": BodyAttack(b"[" * 1_000_000),
    "deep objects": BodyAttack(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "deep in an unused field": BodyAttack(b'{"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}"),
    "deep behind a string of brackets": BodyAttack(b'{"a":"' + b"]" * 900 + b'","x":' + b"[" * 900 + b"]" * 900 + b"}"),
    "deep behind an escaped quote": BodyAttack(b'{"a":"\\"' + b"]" * 900 + b'","x":' + b"[" * 900 + b"]" * 900 + b"}"),
    "many containers": BodyAttack(b'{"x":[' + b"{}," * 400_000 + b"{}]}"),
    "escaped quotes in a string left open": BodyAttack(b"[" * 65 + b'"' + b'\\"' * 200_000),
    "escapes that end in a backslash": BodyAttack(b"[" * 65 + b'"' + b'\\"' * 200_000 + b"\\"),
    "quotes without end": BodyAttack(b"[" * 65 + b'"' * 300_001),
    "backslashes": BodyAttack(b"[" * 65 + b"\\" * 1_000_000),
    "gzip": BodyAttack(gzip.compress(b" " * 1_000_000), {**JSON_HEADER, "Content-Encoding": "gzip"}, frozenset({415})),
    "gzip that is not told": BodyAttack(gzip.compress(b" " * 1_000_000)),
    "body over the cap": BodyAttack(b" " * ((4 << 20) + 1), statuses=frozenset({413})),
    "plain text": _typed("text/plain"),
    "plain text that names JSON": _typed("text/plain; application/json"),
    "two types in one": _typed("text/plain, application/json"),
    "form": _typed("application/x-www-form-urlencoded", b"prompt=a"),
    "multipart": _typed("multipart/form-data; boundary=x", b"--x--"),
    "type of a sort": _typed("application/jsonp"),
    "no type": BodyAttack(b"{}", {}, frozenset({415})),
}

_LONG = "z" * 1_000_000
_ATTACKED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "model": ("nobody", "\x1b[31m\r\nnobody", "../" * 100, "x" * 600, 1, [], {"a": 1}),
    "max_tokens": (0, -1, 2**31, 10**30, 1.5, True, "1", [1]),
    "max_completion_tokens": (0, -1, 2**63, True, "1"),
    "temperature": (-0.1, 1e308, -1e308, 10**30, True, "1", [0.5], {}),
    "top_p": (0, -0.0, 1.0001, -1, True),
    "top_k": (-2, 2**31, 1.5, True),
    "min_p": (-1e-9, 1.5, True),
    "n": (0, -1, 129, 2**31, 1.5, True, "2"),
    "seed": (-1, 2**63, 2**64, 1.5, True),
    "stop": ("", _LONG, ["a"] * 100_000, [""], [1], [[["a"]]], {"a": 1}, ["z" * 2_000]),
    "stop_token_ids": ([-1], [2**31], [2**63], [1.5], [True], ["1"], [[1]], [1] * 100_000),
    "min_tokens": (-1, 2**31, True),
    "presence_penalty": (2.1, -2.1, 1e308, True),
    "frequency_penalty": (2.1, -2.1, -1e308),
    "repetition_penalty": (0, -1, 1e5, 1e308, True),
    "logit_bias": (
        *({token: 1} for token in ("-1", "4000000000", "2147483647", "1.5", "", "１", "a")),
        *({"1": value} for value in (101, 1e308, None, True)),
        {str(token): 1 for token in range(65_537)},
        [1],
    ),
    "prompt_logprobs": (-1, 21, 10**9, True),
    "logprobs": (-1, 21, 10**9, "5", [1]),
    "top_logprobs": (-1, 21, 5),
    "stream_options": ({"include_usage": True}, [], 1),
    "response_format": (
        {"type": "json_schema", "json_schema": {"a": "(x+x+)+y"}},
        {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"pattern": f"a{{{n},}}"} for n in range(40)]}}},
        {"type": 1},
    ),
    "tools": ([{"type": "function", "function": {"name": "f"}}] * 200, [{"url": "http://127.0.0.1/"}], "x"),
    "tool_choice": ("required", {"type": "function", "function": {"name": "f"}}),
    "suffix": ("x",),
    "best_of": (0, 64, 10**9),
    "messages": (
        [],
        [{}],
        [{"role": "user"}],
        [{"role": "", "content": "a"}],
        [{"role": "x" * 100, "content": "a"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [[["a"]]]}],
        [{"role": "user", "content": "a"}] * 5_000,
        "a",
    ),
    "prompt": (
        *([value] for value in ([], [[1]], -1, 2**31, 2**63, 2**31 - 1, 1.5, True, None)),
        *([], [""] * 3_000, [[1]] * 3_000, [1, "a"], [[1], "a"], [1] * 100_000, {"a": 1}, 1),
    ),
    "tokens": ([-1], [2**31], [2**31 - 1], [10**30], [True], ["1"], [[1]], "a", {}),
    "input": ([], [[]], [-1], [2**31], [True], [[1], "a"], {"a": 1}, 1),
    "max_output_tokens": (0, -1, 2**31, 10**30, 1.5, True, "1", [1]),
    "previous_response_id": ("", "resp_" + "0" * 24, "../" * 40, "\x1b[31m\r\n", _LONG, 1, ["a"], {}),
    "instructions": (1, ["a"], {}),
    "metadata": ({"a": 1}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(place): "" for place in range(17)}, [], "a"),
    "text": ({"format": {"type": "x"}}, {"format": {"type": "json_schema"}}, {"format": "text"}, "a"),
    "reasoning": ({"summary": "detailed"}, {"effort": 1}, {"effort": "x" * 33}, "low"),
    "include": (["x"], "x", [1]),
    "system": (1, [{"type": "image"}], [{"text": "a"}], {}),
    "thinking": ({"type": "enabled"}, {"type": "enabled", "budget_tokens": 0}, {"type": "x"}, {}, "on"),
    "stop_sequences": ([""], "a", ["a"] * 100_000, ["z" * 2_000], [1], _LONG),
    "output_config": ({"format": {"schema": True}}, {"format": {"type": "x", "schema": {}}}, {"effort": 1}, []),
    "dimensions": (0, -1, 10**9, True),
    "encoding_format": ("pickle", 1),
    "chat_template_kwargs": (
        *(
            {name: [1]}
            for name in ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
        ),
        "x",
    ),
}
"""By field, values that every route which has the field refuses."""

COSTLY_FIELDS: Mapping[str, tuple[object, ...]] = {
    "prompt": ("é1 " * 600_000, ["word " * 1_000] * 700),
    "messages": ([{"role": "user", "content": "é1 " * 600_000}],),
    "tokens": ([0] * 1_000_000,),
    "input": ("é1 " * 600_000,),
    "chat_template_kwargs": (
        {f"switch{place}": place for place in range(100_000)},
        {"range": 1, "namespace": 1, "raise_exception": 1, "strftime_now": 1},
        {"deep": json.loads("[" * 50 + "]" * 50), "wide": [[]] * 100_000},
        {"template": 1, "variables": 1, "self": 1, "environment": 1, "loop": 1, "cls": 1, "0": 1, "": 1},
    ),
    "unused": ([{}] * 100_000, "\\u0041" * 500_000, 10**400, -0.0, [[[[1]]]]),
}
"""By field, values that a route may take or refuse, in little time; "unused" stands for one that no route has."""

_TOO_MUCH: tuple[Mapping[str, object], ...] = (
    {"n": 128, "max_tokens": 1 << 20, "logprobs": 20},
    {"n": 128, "max_tokens": 1 << 20, "logprobs": True, "top_logprobs": 20},
    {"n": 128, "max_tokens": 1 << 20, "prompt_logprobs": 20},
    {"prompt": ["a"] * 2_000, "n": 128},
    {"prompt": ["a"] * 500, "max_tokens": 1 << 20},
    {"prompt": ["a"] * 400, "logit_bias": {str(token): 1 for token in range(49_000)}},
    {"prompt": ["a"] * 400, "stop": ["z" * 1_000 + str(place) for place in range(128)]},
    {"n": 128, "stop": ["z" * 1_000 + str(place) for place in range(128)]},
    {"n": 128, "logit_bias": {str(token): 1 for token in range(49_000)}},
    {"min_tokens": 100, "max_tokens": 1},
    {"stream": True, "prompt_logprobs": 1},
    {"stream": True, "echo": True, "logprobs": 1},
)
"""Fields that may each be as they are, and not together: sent to routes that have all of them."""


def field_attacks(route: Route) -> Iterator[tuple[str, bytes]]:
    """What is attacked, and the body: the route's own sample with fields that it must refuse."""
    known = fields_of(route)
    for name, values in _ATTACKED_FIELDS.items():
        is_flag = name == "logprobs" and "top_logprobs" in known
        for value in () if name not in known else (1,) if is_flag else values:
            yield f"{name}={json.dumps(value)[:60]}", json.dumps({**sample_for(route, name), name: value}).encode()
    for together in _TOO_MUCH:
        takes_flag = isinstance(together.get("logprobs"), bool) == ("top_logprobs" in known)
        if known >= set(together) and ("logprobs" not in together or takes_flag):
            told = ", ".join(f"{name}={json.dumps(value)[:20]}" for name, value in together.items())
            yield told, json.dumps({**sample_body(route), **together}).encode()


def corpus(route: Route) -> Iterator[tuple[str, bytes, dict[str, str], frozenset[int]]]:
    """Everything that is sent to a route that reads a body: what, body, headers, and what may come back."""
    for name, each in BODY_ATTACKS.items():
        yield name, each.body, dict(each.headers), each.statuses
    for name, body in field_attacks(route):
        yield name, body, JSON_HEADER, REFUSED
    known = {*fields_of(route), "unused"}
    for name, values in COSTLY_FIELDS.items():
        for value in values if name in known else ():
            sample = sample_for(route, name)
            body = json.dumps({**sample, name: value}, ensure_ascii=False).encode()
            yield f"costly {name}={str(value)[:40]}", body, JSON_HEADER, REFUSED | {200}


def path_tricks(path: str) -> list[str]:
    """Paths that a careless server, or a proxy before it, takes for `path`."""
    first = f"%{ord(path[1]):02x}" if len(path) > 1 else "%2f"
    spelled = path[1:] or "/"
    return [
        f"/{path}",
        f"//x{path}",
        f"/.{path}",
        f"/health/..{path}",
        f"/docs/%2e%2e{path}",
        f"/health;{path}",
        f"/health%2f..{path}",
        f"/{first}{spelled[1:]}",
        f"/%25{first[1:]}{spelled[1:]}",
        f"/{spelled.replace('/', '%2f')}%2f",
        f"{path}.",
        f"{path}%00",
        f"{path}%20",
        f"{path};x=/health",
        f"{path}/.",
        f"{path}%3f",
        f"{path}\\",
        path.upper() + "X",
    ]


NO_KEY_HEADERS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "wrong": bearer("wrong-key-000000"),
    "empty": {"Authorization": ""},
    "scheme alone": {"Authorization": "Bearer"},
    "no scheme": {"Authorization": ALPHA},
    "another scheme": {"Authorization": f"Basic {ALPHA}"},
    "a part": bearer(ALPHA[:-1]),
    "one more": bearer(ALPHA + "x"),
    "another case": bearer(ALPHA.upper()),
    "both": bearer(f"{ALPHA} {BETA}"),
    "list": bearer(f"{ALPHA},{BETA}"),
    "quoted": bearer(f'"{ALPHA}"'),
    "wildcard": bearer("*"),
    "cookie": {"Cookie": f"Authorization=Bearer {ALPHA}"},
    "another header": {"X-Key": ALPHA, "Api-Key": ALPHA, "Proxy-Authorization": f"Bearer {ALPHA}"},
    "a proxy's word": {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-User": "root", "X-Real-Ip": "127.0.0.1"},
    "another path": {"X-Original-Url": "/health", "X-Rewrite-Url": "/health", "X-Forwarded-Prefix": "/health"},
}
"""Ways not to have a key."""

BAD_HOSTS = (
    "evil.example",
    "localhost.evil.example",
    "evil.example:80",
    "127.0.0.1.evil.example",
    "localhost@evil",
    "",
    "evil.example#localhost",
    "[::1",
    "[::1]x",
    "localhost:80x",
    "2130706433",
    "0x7f.1",
    "localhost,evil",
    "*",
)
GOOD_HOSTS = ("localhost", "LOCALHOST:9", "127.0.0.1:1", "[::1]:8000", "localhost.")


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode("latin-1")


CLOSE = "Connection: close"
SMUGGLED = head("GET", "/version", CLOSE)
BAD_HEADS: dict[str, tuple[str, ...]] = {
    "both lengths": ("Content-Length: 5", "Transfer-Encoding: chunked"),
    "two lengths": ("Content-Length: 0", "Content-Length: 9"),
    "two lengths in one": ("Content-Length: 0, 9",),
    "signed length": ("Content-Length: +0",),
    "negative length": ("Content-Length: -1",),
    "length in hexadecimal": ("Content-Length: 0x0",),
    "length beyond 64 bits": (f"Content-Length: {2**64}",),
    "another coding": ("Transfer-Encoding: xchunked",),
    "chunked first": ("Transfer-Encoding: chunked, identity",),
    "space before the colon": ("Transfer-Encoding : chunked",),
    "folded header": ("X: a", " Transfer-Encoding: chunked", "\tb"),
    "bare carriage return": ("X: a\rTransfer-Encoding: chunked",),
    "NUL in a header": ("X: a\0b",),
    "two hosts": ("Host: evil.example",),
    "long header": ("X: " + "x" * 40_000,),
    "longer header": ("X: " + "x" * 2_000_000,),
    "long name of a header": ("x" * 40_000 + ": x",),
    "10,000 headers": ("a: b",) * 10_000,
    "100,000 headers": ("a: b",) * 100_000,
}
"""By what is wrong, headers of a request; another request follows it."""
NOT_HTTP: dict[str, Callable[[str, str], bytes]] = {
    "bare line feeds": lambda method, path: head(method, path, CLOSE).replace(b"\r\n", b"\n"),
    "NUL in the path": lambda method, path: head(method, f"{path}\0", CLOSE),
    "letters beyond ASCII in the path": lambda method, path: head(method, f"{path}\xff", CLOSE),
    "bad chunk size": lambda method, path: head(method, path, "Transfer-Encoding: chunked", CLOSE) + b"zz\r\n\r\n",
    "HTTP/2": lambda method, path: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 32,
    "HTTP/9": lambda method, path: head(method, path).replace(b"HTTP/1.1", b"HTTP/9.9"),
    "another method": lambda method, path: head("HACK", path, CLOSE),
    "CONNECT": lambda method, path: head("CONNECT", "127.0.0.1:22", CLOSE),
    "TLS": lambda method, path: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
    "no host": lambda method, path: head(method, path, CLOSE).replace(b"Host: localhost\r\n", b""),
    "HTTP/1.0": lambda method, path: f"{method} {path} HTTP/1.0\r\n\r\n".encode(),
    "nothing but a path": lambda method, path: f"{method} {path}\r\n\r\n".encode(),
    "path in parts": lambda method, path: head(method, f"{path} /version", CLOSE),
    "long path": lambda method, path: head(method, path + "x" * 40_000, CLOSE),
    "long query": lambda method, path: head(method, f"{path}?{'x' * 100_000}", CLOSE),
}
"""By what is wrong, bytes that are no request of HTTP/1.1 within the limits."""


def is_error_body(body: bytes) -> bool:
    try:
        told = json.loads(body)
        error = told["error"]
    except (ValueError, LookupError, TypeError):
        return False
    names = {"message", "type"} if told.get("type") == "error" else {"message", "type", "param", "code"}
    return set(error) == names and bool(error["message"])


def metrics(server: ServedProcess) -> dict[str, float]:
    """By series, without the label of the model's name."""
    status, body = server.get("/metrics", bearer(ALPHA))
    assert status == 200
    text = re.sub(r'(\{)model_name="[^"]*",?|,model_name="[^"]*"', r"\1", body.decode()).replace("{}", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def until_idle(server: ServedProcess, seconds: float = 10.0) -> dict[str, float]:
    """What the metrics say of sequences and pages once nothing runs, or when the time is over."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + seconds
    while True:
        told = metrics(server)
        held = {name: told[f"sightline_{name}"] for name in names}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        time.sleep(0.2)
