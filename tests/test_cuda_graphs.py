"""On an NVIDIA GPU: steps captured in CUDA graphs and replayed are the eager ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from sightline.core.staging import NUM_BUFFERS, StagingRing
from sightline.runner.startup import startup_report
from support.captured_engines import make_engine
from support.graph_checks import CHECKS, runtime_of
from support.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Warnings of what FlashAttention 4 imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]
make = partial(make_engine, device="cuda", attention_backend="triton")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


@pytest.mark.parametrize("paranoid", [False, True], ids=["plain", "paranoid"])
@pytest.mark.parametrize("name", CHECKS)
def test_captured_steps(name: str, folder: Path, *, paranoid: bool) -> None:
    """Among them: captured at 8 rows, replayed at 5."""
    CHECKS[name](partial(make, paranoid=paranoid), folder)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_answers_are_those_of_eager_steps_with_the_chosen_backends(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    CHECKS["answers_are_those_of_eager_steps"](partial(make, attention_backend=None), tmp_path)


def test_the_memory_of_graphs_is_told(folder: Path) -> None:
    runtime = runtime_of(make, folder)
    assert runtime.graphs.num_bytes > 0
    assert any("7 CUDA graphs for 1, 2, 4, 8 rows" in line for line in startup_report(runtime))


def test_graphs_of_all_sizes_fit_in_what_is_reserved_for_them(folder: Path) -> None:
    runtime = runtime_of(make, folder, cuda_graph_sizes=None, max_num_seqs=64, max_num_batched_tokens=64)
    assert runtime.config.graph_sizes[-1] == 64
    assert runtime.graphs.num_bytes <= runtime.config.memory.reserve_bytes


def test_numbers_from_pinned_buffers_arrive_as_they_were_sent() -> None:
    device = torch.device("cuda")
    ring, size = StagingRing.of(1 << 16, device), 1 << 16
    busy = torch.randn(4096, 4096, device=device)
    targets = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(3 * NUM_BUFFERS)]
    for number, target in enumerate(targets):
        # The copy waits behind the product, long after the host has gone on.
        busy = busy @ busy
        ring.copy([[number] * size], target)
    for number, target in enumerate(targets):
        assert bool((target == number).all())
