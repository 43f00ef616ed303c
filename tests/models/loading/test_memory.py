"""Loading takes the memory of the weights, not of copies of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM

from sightline.core.ledger import Ledger
from sightline.models.loading.gguf.quantization import dequantise
from sightline.models.loading.gguf.types import STORAGE_BY_CODE
from sightline.models.loading.opening import open_checkpoint
from sightline.models.weights import WeightReader
from support.case_marks import proofs
from support.gguf_files import random_blocks, tiny_llama, write_llama

MEASURE = """
import json, sys, threading, torch
from pathlib import Path
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
ledger = Ledger()
checkpoint = open_checkpoint(sys.argv[1], ledger)
definition = define_model(checkpoint.config, ledger)
before = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
model = definition.load(WeightReader(checkpoint, torch.float32, torch.device("cpu"), Ledger(), lambda *_: None))
done.set()
watcher.join()
print(json.dumps(max(peak, anonymous()) - before))
"""


@pytest.mark.parametrize("suffix", ["folder", "tiny.gguf"])
def test_weights_in_the_compute_dtype_share_the_pages_of_their_file(tmp_path: Path, suffix: str) -> None:
    model, path = tiny_llama(), tmp_path / suffix
    if suffix == "folder":
        model.save_pretrained(path)
    else:
        write_llama(path, model)
    checkpoint = open_checkpoint(path, Ledger())
    reader = WeightReader(checkpoint, torch.float32, torch.device("cpu"), Ledger(), lambda done, total: None)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        address = checkpoint.load(name).data_ptr()
        assert reader.take(name, checkpoint.tensors[name].shape).data_ptr() == address
        assert checkpoint.load(name).data_ptr() == address


@pytest.mark.prove
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of the process's memory")
@pytest.mark.parametrize("stored", [*proofs(torch.float32), torch.bfloat16])
def test_loading_peaks_near_the_weights_and_one_tensor(tmp_path: Path, stored: torch.dtype) -> None:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    model.to(stored).save_pretrained(tmp_path)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    allocator = 24 << 20
    assert json.loads(done.stdout) < weights + 2 * largest + allocator


def test_a_large_tensor_is_decoded_in_pieces_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = STORAGE_BY_CODE[GGMLQuantizationType.Q6_K]
    raw = memoryview(bytearray(random_blocks((7, 512), GGMLQuantizationType.Q6_K).tobytes()))
    whole = dequantise(raw, storage, (7, 512))
    monkeypatch.setattr("sightline.models.loading.gguf.quantization._PIECE_ELEMENTS", 1024)
    assert torch.equal(dequantise(raw, storage, (7, 512)), whole)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_the_pages_of_a_decoded_tensor_are_given_back_and_read_again(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama(vocab_size=64, hidden_size=1024), quantised="F16")
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf", Ledger())
    name = "model.layers.0.mlp.down_proj.weight"
    neighbours = {other: checkpoint.load(other).clone() for other in checkpoint.tensors}
    before = resident_file_bytes(tmp_path / "tiny.gguf")
    first = checkpoint.load(name)
    assert resident_file_bytes(tmp_path / "tiny.gguf") <= before
    assert before < (tmp_path / "tiny.gguf").stat().st_size / 2
    assert torch.equal(checkpoint.load(name), first)
    for other, expected in neighbours.items():
        assert torch.equal(checkpoint.load(other), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_the_pages_of_blocks_are_given_back_and_not_shared(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama(path, tiny_llama(hidden_size=1024), quantised=kind)
    checkpoint = open_checkpoint(path, Ledger())
    before = resident_file_bytes(path)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        blocks = checkpoint.load_blocks(name)
        assert blocks is not None
        blocks.dequantised()
        stored = blocks.codes.numel() * blocks.bits // 8
        # The system reads ahead into the neighbours' pages, by up to 64 KiB on either side.
        assert resident_file_bytes(path) - before < stored / 2


def resident_file_bytes(path: Path) -> int:
    """Of this process's mapping of the file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    total = 0
    for line in lines:
        if line.endswith(str(path)):
            total += next(int(field.split()[1]) << 10 for field in lines if field.startswith("Rss:"))
    return total
