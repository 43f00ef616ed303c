"""CORS: which other sites' pages may use the server from a browser.

Does not guard the server: a page of a site that is not listed can still send simple requests, which `ingress` refuses
by their content type. Credentials such as cookies are never allowed; keys come in the Authorization header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sightline.core.errors import ConfigError
from sightline.server.http.errors import ApiError
from sightline.server.http.routing import Header, Reply

ANY = "*"
MAX_AGE_SECONDS = 600
"""How long a browser may remember the answer to a preflight request."""
EXPOSED = b"x-request-id, x-sightline-sampling, x-sightline-unused, retry-after"
"""Headers of answers that pages may read."""
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://([^\s/?#@:*\[\]]+|\[[0-9a-f:.]+\])(:(?P<port>\d{1,5}))?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MAX_HEADER_NAMES = 2048
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class CorsPolicy:
    """The origins whose pages may use the server."""

    def __init__(self, origins: Iterable[str]) -> None:
        """Without origins, answers have no CORS headers. Raises `ConfigError` for what is no origin."""
        self._origins = frozenset(_checked(origin) for origin in origins)

    @property
    def allows_any(self) -> bool:
        return ANY in self._origins

    def headers(self, origin: bytes | None) -> list[Header]:
        """The headers that every answer to a request from `origin` has."""
        if not self._origins:
            return []
        allowed = self._allowed(origin)
        # Caches must not give one origin's answer to another, not even one that names no origin.
        varies = (b"vary", b"Origin")
        if allowed is None:
            return [varies]
        return [varies, (b"access-control-allow-origin", allowed), (b"access-control-expose-headers", EXPOSED)]

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> Reply | None:
        """The answer to a preflight request; None for any other request, and without origins.

        Raises `ApiError` if the origin is not allowed.
        """
        if not self._origins or method != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        origin = headers.get(b"origin")
        if self._allowed(origin) is None:
            shown = (origin or b"").decode("ascii", "replace")[:80]
            raise ApiError(
                403,
                f"expected an origin that is allowed, got {shown!r}; start the server with --cors-origin ORIGIN",
                code="origin_not_allowed",
            )
        granted: list[Header] = [
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
            (b"access-control-max-age", str(MAX_AGE_SECONDS).encode()),
        ]
        asked = headers.get(b"access-control-request-headers", b"")
        if len(asked) <= _MAX_HEADER_NAMES and _HEADER_NAMES.fullmatch(asked):
            # By name: `*` would not include Authorization, and clients send headers that no list foresees.
            granted.append((b"access-control-allow-headers", asked))
        return Reply(b"", headers=tuple(granted))

    def _allowed(self, origin: bytes | None) -> bytes | None:
        """The value of Access-Control-Allow-Origin; None if the origin may not read answers."""
        if self.allows_any:
            return ANY.encode()
        listed = origin is not None and origin.decode("latin-1").lower() in self._origins
        return origin if listed else None


def _checked(origin: str) -> str:
    lowered = origin.lower()
    match = _ORIGIN.fullmatch(lowered)
    is_named = match is not None and (match["port"] is None or _DEFAULT_PORTS.get(match["scheme"]) != match["port"])
    if origin != ANY and not is_named:
        raise ConfigError(
            f"expected --cors-origin as browsers send it, SCHEME://HOST or SCHEME://HOST:PORT without a path or a "
            f"default port, or *, got {origin!r}; write for example http://localhost:3000"
        )
    return lowered
