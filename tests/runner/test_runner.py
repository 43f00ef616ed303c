"""What a runner reserves when it is built is all that its steps ever use."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.attention.workspace import LeaseEntry
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.runner.batching import assemble
from sightline.runner.runtime import Runtime
from support.gguf_families import tiny, write_family
from support.gguf_files import tiny_llama, write_llama
from support.tiny_models import load_runtime


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3moe"])
def test_no_step_leases_memory(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    if family == "llama":
        write_llama(path, tiny_llama())
    else:
        write_family(path, family, tiny(family))
    runtime = load_runtime(path, EngineConfig(cache_tokens=256, max_num_batched_tokens=64))
    reserved = fixed_leases(runtime)
    for num_tokens in (1, 7, 8, 16, 48, 49, 64):
        row = runtime.store.open_row()
        runtime.store.grow_row(row, num_tokens)
        work = [RowWork(row, [5] * num_tokens, context_len=0, num_logits=1)]
        assert runtime.runner.forward(runtime.planner.plan(assemble(work, runtime.store))).isfinite().all()
        runtime.store.close_row(row)
    assert fixed_leases(runtime) == reserved


def fixed_leases(runtime: Runtime) -> list[LeaseEntry]:
    """All but the plan buffers, which grow to what the largest step needs."""
    return [entry for entry in runtime.workspace.ledger() if entry.name != "plan buffers"]
