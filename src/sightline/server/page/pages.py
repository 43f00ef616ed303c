"""The pages for people, each served as one file.

A content security policy restricts a page to its own script and style, named by their hashes, and to requests to its
own server. The style and the script that both pages share are put into each page when the server starts.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from sightline.server.http.routing import HTML, Call, Reply

_SHARED = (("/* shared.css */\n", "shared.css"), ("// shared.js\n", "shared.js"))
"""Lines of a page that stand for a file."""


class Page:
    """A static page, by its name."""

    def __init__(self, name: str) -> None:
        page = page_text(name)
        self._body = page.encode()
        self._headers = (
            (b"content-security-policy", _policy(page)),
            (b"referrer-policy", b"no-referrer"),
            (b"x-frame-options", b"DENY"),
        )

    async def show(self, call: Call[None]) -> Reply:
        del call
        return Reply(self._body, content_type=HTML, headers=self._headers)


def page_text(name: str) -> str:
    """The HTML of a page, with the shared parts in place."""
    folder = files("sightline.server.page")
    page = folder.joinpath(f"{name}.html").read_text("utf-8")
    for line, shared in _SHARED:
        page = page.replace(line, folder.joinpath(shared).read_text("utf-8"))
    return page


def _policy(page: str) -> bytes:
    """Allows the page's own script and style, by their hashes, and requests to its own server; nothing else."""
    scripts, styles = (_hashes(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ).encode()


def _hashes(page: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
