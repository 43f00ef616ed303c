"""On an NVIDIA GPU: the memory ledger adds up to what the driver reports, and steps stay within what is reserved."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sightline.bench.engine.work import CONFIGS
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.core.memory import MemoryLedger, drawing_bytes
from sightline.core.request import EffectiveParams
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.opening import open_checkpoint
from sightline.models.random_weights import RandomCheckpoint
from sightline.runner.build import build_runtime
from sightline.runner.memory import memory_ledger
from sightline.runner.runtime import Runtime
from sightline.runner.sampling.sampler import RowSampling, choose
from support.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(600),
]
CARD = torch.device("cuda", 0)
LIBRARIES = 96 << 20
"""cuBLAS takes its work space from torch, some 32 MiB for each stream, and torch rounds to blocks of up to 20 MiB."""
PLAIN = EffectiveParams(1.0, 1.0, 0, 0.0, 5, 16, frozenset(), True)


def tiny(folder: Path) -> Checkpoint:
    make_model("llama").save_pretrained(folder)
    return open_checkpoint(folder, Ledger())


def llama_8b(folder: Path) -> Checkpoint:
    del folder
    return RandomCheckpoint(CONFIGS / "llama-8b.json", CARD, Ledger(strict=True))


def built(checkpoint: Checkpoint, *, is_eager: bool) -> tuple[Runtime, MemoryLedger]:
    gc.collect()
    torch.cuda.empty_cache()
    config = EngineConfig(
        device="cuda",
        memory_fraction=0.5,
        max_num_seqs=64,
        attention_backend="triton",
        enforce_eager=is_eager,
    )
    ledger = Ledger()
    runtime = build_runtime(config, checkpoint, ledger)
    assert [entry for entry in ledger.degradations if entry.subject == "memory_fraction"] == []
    memory = memory_ledger(runtime.config, runtime.memory_taken)
    assert memory is not None
    return runtime, memory


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info(CARD)
    return total - free


def check(runtime: Runtime, memory: MemoryLedger, *, is_eager: bool) -> None:
    """What holds for a model of any size."""
    held = {name: part.held for name, part in memory.parts.items()}
    assert sum(held.values()) == pytest.approx(used_bytes(), rel=0.02)
    assert min(held.values()) >= -LIBRARIES, "a part is counted that is not there"
    assert (held["CUDA graphs"] == 0) == is_eager
    assert held["CUDA graphs"] <= runtime.config.memory.reserve_bytes
    assert held["scratch"] <= runtime.config.memory.scratch_bytes
    assert held["kernels, libraries"] <= runtime.config.memory.kernel_bytes
    assert memory.held <= runtime.config.memory.allowed_bytes
    budget = runtime.config.memory
    # Each tensor begins at a multiple of 512 bytes, and norms, routers and rotations may be of fp32.
    assert abs(held["weights"] - budget.weight_bytes) <= 0.02 * budget.weight_bytes + (1 << 20)


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_the_ledger_of_a_tiny_model_adds_up(tmp_path: Path, *, is_eager: bool) -> None:
    runtime, memory = built(tiny(tmp_path), is_eager=is_eager)
    check(runtime, memory, is_eager=is_eager)
    assert abs(memory.other) <= max(0.02 * memory.total, LIBRARIES)


@pytest.mark.slow
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_the_ledger_of_a_model_of_8b_adds_up(tmp_path: Path, *, is_eager: bool) -> None:
    runtime, memory = built(llama_8b(tmp_path), is_eager=is_eager)
    check(runtime, memory, is_eager=is_eager)
    assert abs(memory.other) <= 0.02 * memory.total
    assert memory.held >= 0.5 * runtime.config.memory.allowed_bytes
    assert memory.taken.weights >= 15 * 10**9


@pytest.mark.parametrize(
    "changes", [{}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}], ids=str
)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(64, 128_256), (256, 32_000), (4, 151_936)])
def test_drawing_takes_no_more_than_is_reserved(num_rows: int, vocab_size: int, changes: dict[str, float]) -> None:
    logits = torch.randn(num_rows, vocab_size, device=CARD)
    rows = [RowSampling(replace(PLAIN, **changes), row) for row in range(num_rows)]  # type: ignore[arg-type]
    choose(logits, rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    choose(logits, rows)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert 0 < taken <= drawing_bytes(num_rows, vocab_size)
