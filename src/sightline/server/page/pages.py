"""The pages for people: one file each, under a policy by which a browser runs nothing else and asks nobody else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from sightline.server.http.routing import HTML, Call, Reply


class Page:
    """A static page."""

    def __init__(self, name: str) -> None:
        self._body = files("sightline.server.page").joinpath(name).read_bytes()
        self._headers = (
            (b"content-security-policy", _policy(self._body.decode())),
            (b"referrer-policy", b"no-referrer"),
            (b"x-frame-options", b"DENY"),
        )

    async def show(self, call: Call[None]) -> Reply:
        del call
        return Reply(self._body, content_type=HTML, headers=self._headers)


def _policy(page: str) -> bytes:
    """Only the page's own script and style, told by their hashes, and requests to its own server."""
    scripts, styles = (_hashes(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ).encode()


def _hashes(page: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
