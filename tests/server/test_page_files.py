"""The files of the pages: what they may contain, how they are served, and where the vendored ones come from."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest

from sightline.server.http.errors import ApiError
from sightline.server.page.pages import FILES, POLICY, Page, PageFiles

FOLDER = Path(str(files("sightline.server.page")))
VENDORED = FOLDER / "vendor"
OWN = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*")
    if path.suffix in {".js", ".css", ".html"} and VENDORED not in path.parents
)
LARGEST = 700_000


@pytest.mark.parametrize("name", OWN)
def test_our_own_files_hold_nothing_that_the_policy_forbids(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)\w", text)
    if name.endswith(".js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    if name.endswith(".html"):
        assert not re.search(r"\s(on\w+|style)\s*=|<style|<script>", text)
        assert all(source.startswith(FILES) for source in re.findall(r'\ssrc="([^"]*)"', text))


def test_the_policy_names_one_server_and_no_markup() -> None:
    parts = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))
    assert parts["default-src"] == "'none'"
    assert {parts[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert parts["require-trusted-types-for"] == "'script'"
    assert parts["trusted-types"] == "'none'"


@pytest.mark.parametrize("page", ["chat", "docs"])
def test_every_file_that_a_page_names_is_served_and_may_be_kept(page: str) -> None:
    page_files = PageFiles()
    body = Page(page, page_files).body.decode()
    named = re.findall(rf'"{FILES}([^"]+)"', body)
    assert len(named) >= 3
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
    for address in named:
        reply = page_files.reply(address)
        assert reply.content_type == kinds[Path(address).suffix]
        assert b"immutable" in reply.caching


def test_every_import_of_a_module_is_served() -> None:
    page_files = PageFiles()
    for name in OWN:
        for target in re.findall(r'from "([^"]+)";', (FOLDER / name).read_text("utf-8")):
            path = ((FOLDER / name).parent / target).resolve().relative_to(FOLDER.resolve())
            assert page_files.reply(f"{page_files.digest}/{path.as_posix()}").body


@pytest.mark.parametrize(
    "address",
    ["", "chat/main.js", "{digest}/pages.py", "{digest}/../pages.py", "{digest}/vendor/VENDORED.md", "{digest}/"],
)
def test_nothing_else_is_served(address: str) -> None:
    page_files = PageFiles()
    with pytest.raises(ApiError, match="no such file"):
        page_files.reply(address.replace("{digest}", page_files.digest))


def test_vendored_files_are_those_that_the_table_names() -> None:
    table = (VENDORED / "VENDORED.md").read_text("utf-8")
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")
    ]
    named = {file: digest for _, version, _, file, _, digest in rows if re.match(r"\d", version)}
    found = {path.relative_to(VENDORED).as_posix(): path for path in VENDORED.rglob("*") if path.is_file()}
    del found["VENDORED.md"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()} == named
    assert {path.parent.name for path in found.values()} == {
        path.parent.name for name, path in found.items() if name.endswith("/LICENSE")
    }
    assert sum(path.stat().st_size for path in found.values()) < LARGEST
