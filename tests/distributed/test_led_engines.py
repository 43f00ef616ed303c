"""An engine whose model is divided among ranks answers as one that has it alone, with every feature of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from transformers import PreTrainedModel

from sightline.core.batch import Batch
from sightline.core.batch_memory import StepShape
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.distributed.collectives import LONE, Links
from sightline.distributed.orders import PartOrder
from sightline.distributed.ranks import Place, Rank
from sightline.models.loading.opening import open_checkpoint
from sightline.opening import build_engine_of
from sightline.runner.roles import Role
from sightline.runner.telling import PartTeller
from support.hybrids import make_hybrid
from support.led_engines import PROMPTS, alone, answers, config_of, led_engine, sampled
from support.tiny_deepseek_v4 import make_v4
from support.tiny_models import make_model
from support.tiny_mtp import save_with_modules
from support.tiny_sparse import make_sparse

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "dense": lambda: make_model("llama"),
    "windowed": lambda: make_model("gemma3"),
    "sinks and experts": lambda: make_model("gpt_oss"),
    "latent": lambda: make_model("deepseek_v3"),
    "hybrid": lambda: make_hybrid("qwen3_next"),
    "latent hybrid": lambda: make_hybrid("kimi_linear"),
    "sparse": lambda: make_sparse("deepseek_v32"),
    "compressed": lambda: make_v4("deepseek_v4"),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small pages and chunks": {"page_size": 4, "max_num_batched_tokens": 16},
    "retraction": {"page_size": 4, "cache_tokens": 112, "max_model_len": 80},
    "overlap": {"async_scheduling": True},
    "n-gram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "halves": {"enable_two_batch_overlap": True, "max_num_seqs": 8},
    "halves, guesses and small pages": {
        "enable_two_batch_overlap": True,
        "page_size": 4,
        "max_num_batched_tokens": 48,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
    "trees": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "num_branches": 2}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    saved: dict[str, Path] = {}

    def folder_of(model: str) -> Path:
        if model not in saved:
            saved[model] = tmp_path_factory.mktemp("model")
            MODELS[model]().save_pretrained(saved[model])
        return saved[model]

    return folder_of


WITH_STATES = ("hybrid", "latent hybrid", "compressed")
"""Models that cannot go back to the states behind refused branches: trees are refused."""


ROUTINE = {("dense", feature) for feature in FEATURES} | {("latent hybrid", "plain")}
"""What every run tries; `make prove` tries the others."""


def cells() -> list[ParameterSet]:
    """Models and features."""
    return [
        pytest.param(model, feature, marks=() if (model, feature) in ROUTINE else pytest.mark.prove)
        for model in MODELS
        for feature in FEATURES
        if feature != "trees" or model not in WITH_STATES
    ]


@pytest.mark.parametrize(("model", "feature"), cells())
def test_two_ranks_answer_as_one(model: str, feature: str, folders: Callable[[str], Path]) -> None:
    folder = folders(model)
    expected = answers(alone(folder, config_of()))
    with led_engine(folder, config_of(tensor_parallel_size=2, **FEATURES[feature])) as engine:
        assert answers(engine) == expected
        assert bool(engine.runtime.runner.num_halved) == feature.startswith("halves")
        assert answers(engine) == expected, "with prefixes that are cached"


TOGETHER = {"enable_expert_parallel": True}
REPLICAS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "experts together": TOGETHER,
    "experts together, in ranks": {"tensor_parallel_size": 2, **TOGETHER},
    "experts together, overlap and small pages": {"page_size": 4, "async_scheduling": True, **TOGETHER},
    "experts together, retraction": {"page_size": 4, "cache_tokens": 112, "max_model_len": 80, **TOGETHER},
    "experts together, n-gram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, **TOGETHER},
    "replicas, trees": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "num_branches": 2}},
}
WITHOUT_EXPERTS = ("dense", "windowed")
ROUTINE_REPLICAS = {("dense", "replicas"), ("sinks and experts", "experts together")}
IN_EVERY_MODEL = ("replicas", "experts together, in ranks")
WITH_EVERY_FEATURE = ("sinks and experts", "latent hybrid")


def cells_of_replicas() -> list[ParameterSet]:
    """Models and features."""
    return [
        pytest.param(model, feature, marks=() if (model, feature) in ROUTINE_REPLICAS else pytest.mark.prove)
        for model in MODELS
        for feature in REPLICAS
        if not (feature.endswith("trees") and model in WITH_STATES)
        if not (feature.startswith("experts") and model in WITHOUT_EXPERTS)
        if feature in IN_EVERY_MODEL or model in WITH_EVERY_FEATURE
    ]


@pytest.mark.parametrize(("model", "feature"), cells_of_replicas())
def test_two_replicas_answer_as_one(model: str, feature: str, folders: Callable[[str], Path]) -> None:
    folder = folders(model)
    expected = answers(alone(folder, config_of()))
    with led_engine(folder, config_of(data_parallel_size=2, **REPLICAS[feature])) as engine:
        assert answers(engine) == expected
        assert engine.runtime.definition.exchanges_rows == feature.startswith("experts")
        assert all(prefixes.num_pages for prefixes in engine.prefixes), "both computed some"
        assert answers(engine) == expected, "with prefixes that are cached"
        # One request at a time: the other replica is idle in every step.
        assert [*answers(engine, PROMPTS[:1]), *answers(engine, PROMPTS[1:2])] == expected[:2]


@pytest.mark.prove
@pytest.mark.parametrize("model", ["dense", "sinks and experts"])
def test_three_replicas_answer_as_one(model: str, folders: Callable[[str], Path]) -> None:
    folder, together = folders(model), model not in WITHOUT_EXPERTS
    expected = answers(alone(folder, config_of()))
    with led_engine(folder, config_of(data_parallel_size=3, enable_expert_parallel=together)) as engine:
        assert answers(engine) == expected


@pytest.mark.prove
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("model", ["dense", "sinks and experts", "latent"])
def test_more_ranks_answer_as_one(model: str, size: int, folders: Callable[[str], Path]) -> None:
    folder = folders(model)
    expected = answers(alone(folder, config_of()))
    with led_engine(folder, config_of(tensor_parallel_size=size)) as engine:
        assert answers(engine) == expected


@pytest.mark.prove
@pytest.mark.parametrize("model", ["dense", "hybrid", "compressed"])
def test_continuations_of_one_prompt_share_its_pages(model: str, folders: Callable[[str], Path]) -> None:
    folder, params = folders(model), {"n": 3, "seed": 5, "temperature": 1.0}
    expected = sampled(alone(folder, config_of()), **params)
    for ranks in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
        with led_engine(folder, config_of(**ranks)) as engine:
            assert sampled(engine, **params) == expected


@pytest.mark.parametrize(
    "ranks", [pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.prove), {"data_parallel_size": 2}]
)
def test_pages_of_a_step_that_was_never_sent_are_told_with_the_next_one(
    ranks: dict[str, Any], folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time that pages of a row are about to be told, the step fails, and is run again."""
    folder, whole, failed = folders("dense"), PartTeller.part, set[int]()

    def part(self: PartTeller, batch: Batch, shape: StepShape | None) -> PartOrder:
        found = whole(self, batch, shape)
        new = {each.row for each in found.pages} - failed
        failed.update(new)
        if new:
            raise ValueError("not sent")
        return found

    expected = answers(alone(folder, config_of()))
    with led_engine(folder, config_of(**ranks)) as engine:
        assert answers(engine) == expected
        monkeypatch.setattr(PartTeller, "part", part)
        assert answers(engine) == expected
        assert engine.metrics().steps_cut


@pytest.mark.parametrize(
    "error", [pytest.param(ValueError("not sampled"), marks=pytest.mark.prove), KeyboardInterrupt()]
)
def test_a_step_whose_outputs_are_not_read_is_taken_back_on_every_replica(
    error: BaseException, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("dense")
    expected = answers(alone(folder, config_of()))
    with led_engine(folder, config_of(data_parallel_size=2)) as engine:
        whole, calls, step = engine._launcher._consume, itertools.count(1), engine.step

        def consume(*given: Any) -> Any:
            if next(calls) % 3 == 0:
                raise error
            return whole(*given)

        def repeated() -> None:
            with suppress(KeyboardInterrupt):
                step()

        monkeypatch.setattr(engine._launcher, "_consume", consume)
        monkeypatch.setattr(engine, "step", repeated)
        assert answers(engine) == expected


def test_networks_that_guess_are_refused_for_replicas(tmp_path: Path) -> None:
    guessing = _guesses_of_a_model(tmp_path / "model", tmp_path / "other")
    role, config = Role(), config_of(data_parallel_size=2, speculative_config=guessing)
    role.links = Links(Place(Rank(0, 2), 2), LONE, LONE, LONE)
    with pytest.raises(ConfigError, match="data_parallel_size 1 with a drafter that is a network"):
        build_engine_of(config, open_checkpoint(tmp_path / "model", Ledger()), Ledger(), role=role)


def _guesses_of_a_model(folder: Path, other: Path) -> dict[str, Any]:
    make_model("llama").save_pretrained(folder)
    make_model("llama").save_pretrained(other)
    return {"method": "draft_model", "model": str(other), "num_speculative_tokens": 3}


def _guesses_of_modules(folder: Path, other: Path) -> dict[str, Any]:
    del other
    save_with_modules("deepseek_v3", 1, folder)
    return {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.prove
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("save", [_guesses_of_a_model, _guesses_of_modules])
def test_networks_that_guess_run_on_the_first_rank(
    save: Callable[[Path, Path], dict[str, Any]], tmp_path: Path, *, halves: bool
) -> None:
    guessing = save(tmp_path / "model", tmp_path / "other")
    expected = answers(alone(tmp_path / "model", config_of()))
    config = config_of(tensor_parallel_size=2, speculative_config=guessing, enable_two_batch_overlap=halves)
    with led_engine(tmp_path / "model", config) as engine:
        assert answers(engine) == expected
        assert engine.metrics().spec_decode_num_draft_tokens
