"""Engines that capture and replay their steps where there is no CUDA: `recorded_graphs` stands for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.parts import CORRECT, Parts
from conformance.parts_backend import EVERYTHING, make_backend
from sightline import LLM
from sightline.attention.capability import GraphLevel
from sightline.attention.contract import BackendContext
from sightline.attention.selection import Candidate
from sightline.attention.spec import SoftmaxSpec
from support import recorded_graphs
from support.recorded_graphs import RECORDING


def enough_for_any(context: BackendContext[SoftmaxSpec], bounds: object, new: object) -> int:
    """Keys that launches look at: those of the longest row, as on a GPU."""
    del bounds, new
    return context.limits.max_seq_len


CAPTURABLE = replace(CORRECT, longest=enough_for_any)


def install(
    monkeypatch: pytest.MonkeyPatch, parts: Parts = CAPTURABLE, level: GraphLevel = GraphLevel.FULL
) -> Callable[..., LLM]:
    """Makes engines on a recorded device until the test ends; softmax attention is of these parts."""
    recorded_graphs.install(monkeypatch)
    backend = make_backend(parts, declares=replace(EVERYTHING, graph=level))
    candidate = Candidate.of("parts", backend, "sightline", by_default=True)
    monkeypatch.setattr("sightline.runner.build.detect_device", lambda _: RECORDING)
    monkeypatch.setattr("sightline.engine.calls.same_stream", lambda _: nullcontext)
    monkeypatch.setattr("sightline.runner.build.registry.installed", lambda: (candidate,))
    return make_engine


def make_engine(folder: Path, **changes: Any) -> LLM:
    settings = {
        "skip_tokenizer_init": True,
        "cache_tokens": 512,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "page_size": 4,
        "dtype": "float32",
        "paranoid": True,
        "cuda_graph_sizes": "1,2,4,8",
        "layer_kernels": "torch",
        "async_scheduling": False,
        **changes,
    }
    return LLM(str(folder), **settings)
