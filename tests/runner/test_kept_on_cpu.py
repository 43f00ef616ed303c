"""`--quantization keep` on a CPU: our kernels where Numba is installed, otherwise torch's ops and a ledger entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.kernels.cpu.processor import Instructions, Processor
from sightline.kernels.cpu.program import inline_launcher
from sightline.models.kept_codes import KeptCodes
from sightline.models.kept_weights import BlockRule, CodeRule, KeptBlocks
from sightline.models.loading.opening import open_checkpoint
from sightline.runner import quantised
from sightline.runner.build import build_runtime
from sightline.runner.environment import collect_environment
from sightline.runner.runtime import Runtime
from support.gguf_files import VOCABULARY, tiny_llama, write_llama
from support.graph_checks import Rows

AVX2 = Processor("x86_64-unknown-linux-gnu", "haswell", "", Instructions.AVX2)


@pytest.fixture
def q4_k(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_llama(path, tiny_llama(hidden_size=256, intermediate_size=256, head_dim=64), quantised="Q4_K")
    return path


def logits_of(path: Path, quantization: str = "keep", **settings: Any) -> tuple[Runtime, Tensor]:
    """The logits of steps of one to three rows, over poisoned and shuffled pools."""
    ledger = Ledger(strict=True)
    config = EngineConfig(cache_tokens=256, max_num_seqs=4, paranoid=True, quantization=quantization, **settings)
    runtime = build_runtime(config, open_checkpoint(path, ledger), ledger)
    rows = Rows(runtime, [5, 1, 21], vocab=VOCABULARY)
    steps = [([0], [[7]]), ([0, 1, 2], [[5], [9], [4]]), ([2, 1], [[3], [8]]), ([0, 1, 2], [[6], [6], [5]])]
    return runtime, torch.cat([rows.forward(indices, tokens) for indices, tokens in steps])


def test_a_file_of_k_quants_is_recorded_whole_and_gives_the_logits_of_eager_steps(q4_k: Path) -> None:
    runtime, recorded = logits_of(q4_k)
    assert [bucket.shape.size for bucket in runtime.graphs.buckets if bucket.shape.query_bound == 1] == [1, 2, 4]
    assert runtime.runner.num_replayed >= 4
    _, eager = logits_of(q4_k, enforce_eager=True)
    assert torch.equal(recorded, eager)
    _, exact = logits_of(q4_k, "dequantise", layer_kernels="torch", attention_backend="torch")
    # The file's blocks are random, so that rounded inputs change much. Another model's logits would be 1.4 away.
    assert 0 < float((recorded - exact).norm() / exact.norm()) < 0.25


def test_our_kernels_are_chosen_where_numba_is_installed() -> None:
    ledger = Ledger()
    assert isinstance(quantised.kept_on_cpu(inline_launcher(), ledger), KeptCodes)
    assert isinstance(quantised.keep_rule(), CodeRule)
    assert not ledger.degradations


def test_the_ledger_says_that_products_take_the_portable_form(monkeypatch: pytest.MonkeyPatch) -> None:
    for processor, told in ((AVX2, []), (AVX2.portable(), ["--quantization keep"])):
        monkeypatch.setattr(Processor, "detect", lambda processor=processor: processor)
        ledger = Ledger(strict=True)
        quantised.kept_on_cpu(inline_launcher(), ledger)
        assert [note.subject for note in ledger.notes] == told
    assert "haswell" in ledger.notes[0].fact


def test_the_environment_tells_the_instructions_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processor, "detect", lambda: AVX2)
    assert collect_environment()["cpu products"] == "avx2 on haswell"
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    assert collect_environment()["cpu products"] == "torch's: numba is not installed"


def test_without_numba_torch_multiplies_and_the_ledger_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    ledger = Ledger()
    assert isinstance(quantised.kept_on_cpu(inline_launcher(), ledger), KeptBlocks)
    assert isinstance(quantised.keep_rule(), BlockRule)
    [entry] = ledger.degradations
    assert entry.subject == "--quantization keep"
    assert "numba is not installed" in entry.outcome
    assert "pip install 'sightline[cpu]'" in entry.remedy
