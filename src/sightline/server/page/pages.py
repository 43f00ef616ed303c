"""The pages for people, and the files that they load: scripts, styles and the vendored libraries.

A content security policy restricts a page to files and requests of its own server, and forbids it to turn text into
markup. The files are read when the server starts. Their address contains a digest of all of them, so that a browser
may keep them for good.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

from sightline.server.http.errors import ApiError
from sightline.server.http.routing import HTML, Call, Reply

FILES = "/page/"
"""Where the files are served; pages name them by this prefix and their path."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
"""What is served, by the end of its name. Licences and notes are not."""
_KEPT = b"public, max-age=31536000, immutable"


class Page:
    """A static page, by its name."""

    def __init__(self, name: str, page_files: PageFiles) -> None:
        page = files("sightline.server.page").joinpath(f"{name}.html").read_text("utf-8")
        self.body = page.replace(f'"{FILES}', f'"{FILES}{page_files.digest}/').encode()

    async def show(self, call: Call) -> Reply:
        del call
        return Reply(self.body, content_type=HTML, headers=_HEADERS)


class PageFiles:
    """The scripts and styles of all pages, by `digest/path`."""

    def __init__(self) -> None:
        found = dict(_served(files("sightline.server.page"), ""))
        names_and_texts = (part for name in sorted(found) for part in (name.encode(), found[name]))
        self.digest = hashlib.sha256(b"\0".join(names_and_texts)).hexdigest()[:16]
        self._files = {f"{self.digest}/{name}": body for name, body in found.items()}

    async def show(self, call: Call) -> Reply:
        return self.reply(call.tail)

    def reply(self, address: str) -> Reply:
        """The file at `digest/path`. Raises `ApiError` if there is none."""
        body = self._files.get(address)
        if body is None:
            raise ApiError(404, "there is no such file; reload the page", code="not_found")
        return Reply(body, content_type=_KINDS[address[address.rindex(".") :]], caching=_KEPT)


def _served(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _served(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(tuple(_KINDS)):
            yield prefix + entry.name, entry.read_bytes()
