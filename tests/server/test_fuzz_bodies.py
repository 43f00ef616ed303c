"""The fuzzer of legal bodies: its bodies are legal and can be made again; `slow`: ten minutes of search."""

from __future__ import annotations

import random

import msgspec
import pytest

from sightline.bench.serving.http_stream import Address
from sightline.core.config import Task
from sightline.server.http.limits import check_nesting
from support import attacks
from support.fuzz_bodies import GENES, PATHS, Recipe, fuzzed
from support.hostile_tenants import Target


def target(task: Task) -> Target:
    embeds = task is Task.EMBED
    return Target(
        address=Address.parse("http://127.0.0.1:1"),
        task=task,
        vocab_size=30_522 if embeds else 49_152,
        max_model_len=256 if embeds else 8_192,
        max_body_bytes=4 << 20,
        max_cost=32_768 if embeds else 1 << 20,
        max_characters=4_608 if embeds else 663_552,
        max_step_seconds=None,
        max_front_end_bytes=None,
    )


@pytest.mark.parametrize("task", list(PATHS), ids=lambda task: task.value)
def test_bodies_are_legal_in_size_nesting_and_types(task: Task) -> None:
    kinds = {route.path: route.body for route in attacks.routes(task)}
    source, largest = random.Random(1), 0
    recipes = [Recipe.drawn(source, task) for _ in range(8)]
    recipes += [Recipe(number, path, dict.fromkeys(GENES, 1.0)) for number, path in enumerate(PATHS[task])]
    for recipe in recipes + [each.mutated(source) for each in recipes[:4]]:
        body = recipe.shot(target(task)).body
        largest = max(largest, len(body))
        assert len(body) <= 4 << 20
        check_nesting(body)
        msgspec.convert(msgspec.json.decode(body), kinds[recipe.path], str_keys=True)
    assert largest > 3 << 20


def test_a_recipe_that_was_printed_makes_the_same_body() -> None:
    source = random.Random(2)
    for task in PATHS:
        recipe = Recipe.drawn(source, task)
        assert Recipe.parse(str(recipe)) == recipe
        assert Recipe.parse(str(recipe)).shot(target(task)) == recipe.shot(target(task))
        assert recipe.path in recipe.describe(target(task))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("task", list(PATHS), ids=lambda task: task.value)
def test_five_minutes_of_search_find_no_body_that_stalls_others(task: Task) -> None:
    assert fuzzed(task, 300.0)
