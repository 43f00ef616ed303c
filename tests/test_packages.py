"""The wheel and the source archive: the same bytes from every build, everything inside, and installable alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from sightline.version import __version__
from support.pinned import ROOT

SOURCE = ("src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")


def build(copy: Path, folder: Path) -> dict[str, bytes]:
    """The packages that a copy of the tree gives, by name. The copy's files have other times than the tree's."""
    copy.mkdir()
    for name in SOURCE:
        origin = ROOT / name
        if origin.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(origin, copy / name, copy_function=shutil.copyfile, ignore=ignored)
        else:
            shutil.copyfile(origin, copy / name)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=copy, env=environment, check=True, capture_output=True, timeout=120)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    build(folder / "tree", folder / "dist")
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found


@pytest.mark.prove
def test_two_builds_are_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "another-tree", tmp_path / "dist")
    assert sorted(again) == [f"sightline-{__version__}-py3-none-any.whl", f"sightline-{__version__}.tar.gz"]
    for name, content in again.items():
        assert (built / name).read_bytes() == content, name


@pytest.mark.prove
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "src" / "sightline"
    expected = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert "sightline/server/page/chat.html" in names


@pytest.mark.prove
def test_the_metadata_states_the_licence_as_pep_639_has_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"sightline-{__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    vendored = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("LICENSE"))
    assert metadata.get_all("License-File") == ["LICENSE", *vendored]
    assert metadata["Requires-Python"] == ">=3.11"


@pytest.mark.prove
def test_an_installed_wheel_works_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: str) -> str:
        ran = subprocess.run(command, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True, timeout=120)
        return ran.stdout

    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    output(*pip, "install", "--no-deps", "--no-index", str(wheel))
    [packages] = (environment / "lib").glob("python*/site-packages")
    # What Sightline depends on comes from this environment; Sightline itself from the wheel, which is found first.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = output(str(python), "-c", "import sightline; print(sightline.__version__, sightline.__file__)")
    assert where.split() == [__version__, str(packages / "sightline" / "__init__.py")]
    assert __version__ in output(str(environment / "bin" / "sightline"), "--version")
    assert "--port" in output(str(environment / "bin" / "sightline"), "serve", "--help")


@pytest.mark.slow
def test_the_wheel_works_with_every_python_at_hand(wheel: Path) -> None:
    ran = subprocess.run([ROOT / "tools" / "check_wheel.sh", wheel], check=True, capture_output=True, text=True)
    assert re.search(r"^ok: Python 3\.11", ran.stdout, re.MULTILINE)


def test_the_version_has_an_entry_in_the_changelog() -> None:
    entries = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == ("Unreleased", "")
    assert __version__ in dict(entries)
    assert all(date for _, date in entries[1:])


def test_the_classifiers_name_the_pythons_that_the_wheel_was_tried_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each}
    assert versions == {"3.11", "3.12", "3.13"}
    assert project["requires-python"] == ">=3.11"
