"""On an NVIDIA GPU: random weights are made there, and a profile knows kernels and idle time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sightline.bench.engine.profile_step import COPIES, IDLE, KERNELS, profile_steps
from sightline.bench.engine.work import CONFIGS, load_subject
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.models.random_weights import RandomCheckpoint
from sightline.runner.build import build_runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CARD = torch.device("cuda", 0)
BACKENDS = {"llama-8b": "triton", "deepseek-v2-lite": "triton-latent", "gpt-oss-20b": "triton", "qwen3-0.6b": "triton"}
"""Those that compile in seconds."""


def cut(folder: Path, name: str, num_layers: int) -> Path:
    """One of Sightline's own configs with few layers."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text()) | {"num_hidden_layers": num_layers}))
    return path


@pytest.mark.parametrize("name", ["llama-8b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_weights_are_made_on_the_card_without_a_second_copy_of_the_model(name: str, tmp_path: Path) -> None:
    path = cut(tmp_path, name, 4)
    checkpoint = RandomCheckpoint(path, CARD, Ledger(strict=True))
    sizes = [2 * math.prod(info.shape) for info in checkpoint.tensors.values()]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    config = EngineConfig(device="cuda", cache_tokens=1024, max_model_len=512, attention_backend=BACKENDS[name])
    runtime = build_runtime(config, checkpoint, Ledger())
    rest = sum(pool.num_bytes for pool in runtime.store.pools) + runtime.workspace.num_bytes
    # A tensor and what is made of it: a joined, reordered or checked copy, and a layer's experts side by side.
    assert torch.cuda.max_memory_allocated() - before <= sum(sizes) + rest + 3 * max(sizes) + (1 << 28)


def test_a_profile_on_a_card_has_kernels_and_idle_time(tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "device": "cuda",
        "cache_tokens": 4096,
        "max_model_len": 1024,
        "attention_backend": BACKENDS["qwen3-0.6b"],
    }
    subject = load_subject(settings, str(cut(tmp_path, "qwen3-0.6b", 4)))
    profile = profile_steps(subject.llm.engine, rows=4, context=64, num_steps=8)
    assert list(profile.groups) == [KERNELS, COPIES, IDLE]
    assert profile.groups[KERNELS] > 0
    assert sum(profile.groups.values()) == pytest.approx(profile.step_seconds, rel=0.05)
    assert 4 < profile.calls_per_layer < 100
