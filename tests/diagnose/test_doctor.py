"""Each examination of the doctor can fail, and a failure of the self-test names the pair that differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from sightline.attention.backends import registry
from sightline.attention.proof import ProofBook
from sightline.core.config import EngineConfig
from sightline.core.device import Device, DeviceKind, DeviceMemory, detect_device
from sightline.core.errors import ConfigError
from sightline.diagnose import doctor
from sightline.diagnose.doctor import (
    PLAIN,
    Diagnosis,
    Fitness,
    answers_of,
    examine,
    examine_answers,
    examine_device,
    examine_proofs,
    examine_versions,
    ways_for,
)
from sightline.diagnose.self_test import Asking, GreedyAnswer, Variant, compare, ways
from support.wrong_backends import wrong_candidate

CPU = detect_device("cpu")
MEMORY = DeviceMemory(1 << 34, 1 << 34, 0)
ANSWER = GreedyAnswer((5, 6, 7), ({5: -0.1, 9: -3.0}, {6: -0.2, 8: -2.0}, {7: -0.69, 3: -0.6905}), 0)
WAYS = ways(16, has_graphs=True, backends=("torch", "other"))


def verdicts(found: Sequence[Diagnosis], topic: str) -> list[Fitness]:
    return [each.verdict for each in found if each.topic == topic]


def card(capability: tuple[int, int]) -> Device:
    return Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", capability, MEMORY)


def answering(change: Callable[[Variant], GreedyAnswer]) -> Callable[[Variant], list[GreedyAnswer]]:
    """Answers one prompt as ever, and another one as `change` says; prefixes are found the second time."""

    def ask(way: Variant) -> list[GreedyAnswer]:
        cached = 4 if way.asking is Asking.AGAIN else 0
        return [ANSWER._replace(num_cached=cached), change(way)]

    return ask


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ways_for", lambda config: (WAYS, 1e-3))


@pytest.mark.usefixtures("tried")
def test_equal_answers_are_fit() -> None:
    found = list(examine_answers(EngineConfig(), answering(lambda way: ANSWER)))
    assert len(found) == len(WAYS)
    assert {each.verdict for each in found} == {Fitness.FIT}


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("faulty", WAYS, ids=lambda way: f"{way.subject} {way.name}")
def test_a_fault_in_one_way_fails_it_alone_and_names_the_pair(faulty: Variant) -> None:
    wrong = ANSWER._replace(tokens=(5, 8, 7))
    found = list(examine_answers(EngineConfig(), answering(lambda way: wrong if way == faulty else ANSWER)))
    [failed] = [each for each in found if each.verdict is Fitness.FAILED]
    assert failed.topic == f"self-test: {faulty.subject}"
    assert f"the plain engine and {faulty.name} differ: prompt 1, token 1 of the answer: 6 became 8" in failed.text


@pytest.mark.usefixtures("tried")
def test_tokens_that_are_equally_likely_are_a_tie_and_no_failure() -> None:
    tied = ANSWER._replace(tokens=(5, 6, 3))
    found = list(examine_answers(EngineConfig(), answering(lambda way: tied if way.subject == "page size" else ANSWER)))
    assert verdicts(found, "self-test: page size") == [Fitness.NOTE]
    assert Fitness.FAILED not in {each.verdict for each in found}


def test_a_real_difference_behind_a_tie_of_another_prompt_is_told() -> None:
    tied, wrong = ANSWER._replace(tokens=(5, 6, 3)), ANSWER._replace(tokens=(9, 6, 7))
    difference = compare([ANSWER, ANSWER], [tied, wrong], 1e-3)
    assert difference is not None
    assert (difference.prompt, difference.place, difference.is_tie(1e-3)) == (1, 0, False)


@pytest.mark.parametrize("tokens", [(5, 6), (5, 6, 7, 7)])
def test_an_answer_that_ends_elsewhere_differs(tokens: tuple[int, ...]) -> None:
    assert compare([ANSWER], [ANSWER._replace(tokens=tokens)], 1e-3) is not None


@pytest.mark.usefixtures("tried")
def test_a_cache_that_finds_no_prefix_fails() -> None:
    found = list(examine_answers(EngineConfig(), lambda way: [ANSWER, ANSWER]))
    assert verdicts(found, "self-test: prefix hits") == [Fitness.FAILED]
    assert [each.verdict for each in found].count(Fitness.FAILED) == 1


@pytest.mark.usefixtures("tried")
def test_a_way_that_cannot_be_tried_is_told_and_a_plain_engine_that_cannot_fails() -> None:
    def refusing(refused: Variant) -> Callable[[Variant], list[GreedyAnswer]]:
        def ask(way: Variant) -> list[GreedyAnswer]:
            if way == refused:
                raise ConfigError("it has no such pages")
            return answering(lambda each: ANSWER)(way)

        return ask

    found = list(examine_answers(EngineConfig(), refusing(WAYS[0])))
    assert verdicts(found, "self-test: page size") == [Fitness.NOTE]
    assert "it has no such pages" in found[0].text
    [only] = examine_answers(EngineConfig(), refusing(PLAIN))
    assert only.verdict is Fitness.FAILED


def test_every_subject_is_tried_and_each_other_backend_that_can_serve() -> None:
    tried, tie = ways_for(EngineConfig())
    assert {way.subject for way in tried} >= {"page size", "chunk size", "batch size", "prefix hits", "backend"}
    chosen = registry.find("torch", registry.installed())
    assert chosen.name in {way.name for way in tried} or "numba" in {way.name for way in tried}
    assert tie == 1e-3


def test_a_wrong_backend_is_found_by_the_answers_of_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # It is wrong wherever a row has a context: prompts are right, and the tokens behind them are not.
    wrong = wrong_candidate("wrong", lambda step, layer: layer == 20 and max(step.batch.context_lens.bound) > 0)
    installed = (*registry.installed(), replace(wrong, by_default=False))
    monkeypatch.setattr(registry, "installed", lambda: installed)
    monkeypatch.setattr(
        doctor, "ways_for", lambda config: ((Variant("backend", "wrong", {"attention_backend": "wrong"}),), 1e-3)
    )
    config = EngineConfig(attention_backend="torch")
    [found] = examine_answers(config, lambda way: answers_of(config, way))
    assert found.verdict is Fitness.FAILED
    assert "the plain engine and wrong differ: prompt" in found.text


def test_a_gpu_that_no_kernel_lists_fails_and_one_that_some_list_is_fit(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580.1\nGCC version: 13\n")
    assert {each.verdict for each in examine_device(card((9, 0)), driver)} == {Fitness.FIT}
    assert any("580.1" in each.text for each in examine_device(card((9, 0)), driver))
    [failed] = [each for each in examine_device(card((7, 5)), driver) if each.verdict is Fitness.FAILED]
    assert "no kernel but torch's lists compute capability (7, 5)" in failed.text


def test_a_device_that_is_not_there_fails() -> None:
    [only] = examine(EngineConfig(device="npu"))
    assert (only.topic, only.verdict) == ("device", Fitness.FAILED)


def test_a_version_other_than_the_one_that_is_needed_fails() -> None:
    requirements = [
        "flashinfer-python==0.7.2.post1 ; extra == 'cuda'",
        "torch>=2.11",
        "fla-core==0.6.0; extra == 'fla'",
    ]

    def versions(name: str) -> str:
        if name == "fla-core":
            raise metadata.PackageNotFoundError(name)
        return {"torch": "2.11", "flashinfer-python": "0.8"}[name]

    found = list(examine_versions(CPU, requirements, versions))
    [failed] = [each for each in found if each.verdict is Fitness.FAILED]
    assert "expected flashinfer-python 0.7.2.post1" in failed.text
    assert "got 0.8" in failed.text
    assert failed.remedy == "pip install 'flashinfer-python==0.7.2.post1'"


def test_a_proof_that_is_not_trusted_fails_and_one_that_is_missing_is_told_with_its_command(tmp_path: Path) -> None:
    book = ProofBook(tmp_path)
    (tmp_path / "forged.json").write_text("{}")
    found = list(examine_proofs(EngineConfig(max_model_len=256, cache_tokens=512), CPU, book))
    [failed] = [each for each in found if each.verdict is Fitness.FAILED]
    assert "forged.json" in failed.text
    missing = [each for each in found if each.verdict is Fitness.NOTE and each.topic == "proofs"]
    assert missing
    assert all(each.remedy.startswith("sightline conformance --model") for each in missing)


def test_a_model_that_cannot_be_opened_fails(tmp_path: Path) -> None:
    found = list(examine_proofs(EngineConfig(str(tmp_path / "nothing")), CPU, ProofBook(tmp_path)))
    assert verdicts(found, "engine") == [Fitness.FAILED]
