"""Replicas whose steps are captured and replayed, on the device that stands for a GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.runner.recording import Recording
from sightline.runner.runner import Runner
from support.captured_engines import install
from support.led_engines import PROMPTS, alone, answers, config_of, led_engine
from support.tiny_models import make_model

CAPTURED = {"layer_kernels": "torch", "async_scheduling": False, "page_size": 4, "cuda_graph_sizes": "1,2,4"}


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_replicas_replay_the_buckets_that_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path)
    expected = answers(alone(tmp_path, config_of()))
    install(monkeypatch)
    threads, replay = set[str](), Runner._replay

    def watched(self: Runner, recording: Recording, current: PlannedBatch) -> Tensor:
        threads.add(threading.current_thread().name)
        return replay(self, recording, current)

    monkeypatch.setattr(Runner, "_replay", watched)
    with led_engine(tmp_path, config_of(data_parallel_size=2, **CAPTURED)) as engine:
        runner = engine.runtime.runner
        assert answers(engine) == expected
        assert runner.num_replayed
        before = runner.num_replayed
        assert answers(engine, PROMPTS[:1]) == expected[:1], "while the other replica waits"
        assert runner.num_replayed > before
    assert len(threads) == 2, "both replicas replayed steps"
