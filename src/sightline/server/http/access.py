"""Access control: API keys, and the host names that the server answers to.

Keys are kept as digests. A given key is compared with every one of them, each in constant time. Does not know routes:
each declares its own `Access`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from enum import Enum

from sightline.core.errors import ConfigError
from sightline.server.http.errors import ApiError

MIN_KEY_CHARACTERS = 8
LOCAL_NAMES = frozenset({"localhost"})
PRIVATE_DOMAINS = (".local", ".internal", ".home.arpa")
"""Reserved: nobody can register a name under them."""


class Access(Enum):
    """The callers that may use a route."""

    PUBLIC = "public"
    """Open to everybody; such a route shows no client's data and does no costly work."""
    KEY = "key"
    """Needs a key; open to everybody if the server has no keys."""


class Secret:
    """A value that cannot be printed, logged or serialised by accident: only its digest is kept."""

    __slots__ = ("_digest",)

    def __init__(self, value: str) -> None:
        self._digest = hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()

    def matches(self, given: bytes) -> bool:
        """Whether `given` is the value; takes the same time for every input."""
        return hmac.compare_digest(self._digest, hashlib.sha256(given).digest())

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        raise TypeError("a Secret cannot be serialised")


class Keyring:
    """The accepted keys. Without keys, everybody counts as the same caller."""

    def __init__(self, keys: Iterable[str]) -> None:
        listed = list(dict.fromkeys(keys))
        for key in listed:
            if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"expected API keys of at least {MIN_KEY_CHARACTERS} printable ASCII characters without spaces, "
                    f"got one of {len(key)} characters that breaks this; choose another"
                )
        self._secrets = {f"key-{place}": Secret(key) for place, key in enumerate(listed, 1)}

    def __len__(self) -> int:
        return len(self._secrets)

    def caller(self, authorization: bytes | None, api_key: bytes | None = None) -> str:
        """The caller's name: the place of its key in the list.

        `api_key` is the header `x-api-key`, as Anthropic's clients send it. Raises `ApiError` if no key matches, and if
        the two headers have different keys.
        """
        if not self._secrets:
            return ""
        scheme, _, given = (authorization or b"").partition(b" ")
        sent = [] if authorization is None else [given if scheme.lower() == b"bearer" else b""]
        sent += [] if api_key is None else [api_key]
        callers = {self._matching(each.strip()) for each in sent}
        if len(callers) != 1 or None in callers:
            raise ApiError(
                401,
                "expected an API key in the header 'Authorization: Bearer KEY' or 'x-api-key: KEY', got "
                + ("none" if not sent else "an unknown one" if None in callers else "two different ones"),
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return callers.pop() or ""

    def _matching(self, given: bytes) -> str | None:
        matching = [name for name, secret in self._secrets.items() if secret.matches(given)]
        return matching[0] if matching else None


class HostList:
    """Host names that the server answers to.

    Guards against DNS rebinding, in which a page's own domain is made to lead here. IP literals are always accepted. If
    other machines can reach the server, so are names that nobody outside their network can own: those without a dot,
    as containers and services of a cluster have, and those of private domains.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        self._names = {*LOCAL_NAMES, bound.lower(), socket.gethostname().lower(), *(name.lower() for name in allowed)}
        self._private_domains = () if is_local(bound) else PRIVATE_DOMAINS

    def check(self, host: bytes | None) -> None:
        if "*" in self._names:
            return
        shown = (host or b"").decode("ascii", "replace")[:80]
        name = host_name(shown)
        if name is None or not (name in self._names or _is_address(name) or self._is_private(name)):
            raise ApiError(
                421,
                f"expected a Host header with a name of this server, got {shown!r}; if clients reach it under this "
                "name, such as a container's, a cluster service's or a proxy's, start it with --allowed-host "
                f"{name or 'NAME'}",
                code="unknown_host",
            )

    def _is_private(self, name: str) -> bool:
        is_single = bool(self._private_domains) and "." not in name
        return is_single or name.endswith((".localhost", *self._private_domains))


def host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None if the header is malformed."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            return None
        port = port[1:]
    else:
        name, _, port = host.partition(":")
    if not name or (port and not port.isdecimal()):
        return None
    return name.lower().removesuffix(".")


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def first_header(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """Headers by name, the first of each. Raises `ApiError` if one of `SINGLE_HEADERS` is repeated."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in found and name in SINGLE_HEADERS:
            raise ApiError(400, f"expected one {name.decode()} header, got two", code="repeated_header")
        found.setdefault(name, value)
    return found


SINGLE_HEADERS = frozenset(
    {b"host", b"authorization", b"x-api-key", b"content-length", b"content-type", b"content-encoding"}
    | {b"transfer-encoding"}
)
"""Headers that decide how a request is treated: two of them would be ambiguous."""
