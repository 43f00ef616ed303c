"""The user's settings. Never mutated; `resolution.resolve` turns them into what runs, once.

Imports nothing heavy: a process that only passes settings on, such as a server's front end, needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum

from sightline.core import speculation_words
from sightline.core.errors import ConfigError
from sightline.core.hisparse import read_hisparse
from sightline.core.request import SamplingParams
from sightline.core.settings import alias, check_settings, keywords, setting, stated
from sightline.core.speculation import FROZEN_KV_MTP, read_speculation


class Task(Enum):
    """The purpose of a model."""

    GENERATE = "generate"
    """Generates text."""
    EMBED = "embed"
    """Embeds texts as vectors."""


class Quantization(Enum):
    """How quantised weights of a file are handled."""

    DEQUANTISE = "dequantise"
    """Converted to the compute dtype, exactly."""
    KEEP = "keep"
    """Kept quantised in memory and multiplied as such, where an op supports it."""


class LayerKernels(Enum):
    """The kernels that layers run between their matrix products."""

    TORCH = "torch"
    TRITON = "triton"
    """One fused kernel for each operation, on a GPU."""
    NUMBA = "numba"
    """One compiled kernel for each operation, on a CPU."""


DTYPE_NAMES = ("float32", "bfloat16", "float16")
CACHE_DTYPE_NAMES = (*DTYPE_NAMES, "fp8", "fp8_e4m3", "float8_e4m3fn")
"""`fp8` is e4m3, the more precise of the two 8-bit floats."""
PADDING_PAGES = 1
"""Pages of every pool that no sequence owns: padding tokens write there, and nothing reads them."""
ROWS = {Task.GENERATE: {"cpu": 64, "cuda": 256}, Task.EMBED: {"cpu": 1024, "cuda": 1024}}
STEP_TOKENS = {Task.GENERATE: {"cpu": 512, "cuda": 8192}, Task.EMBED: {"cpu": 4096, "cuda": 4096}}
"""On a GPU, a step of few tokens takes as long as one of many: its weights are read either way."""
PAGE_SIZES = {"cpu": 16, "cuda": 64}
"""On a GPU, as many tokens as kernels read at once: with smaller pages they look up every key separately."""
MEMORY_FRACTIONS = {"cpu": 0.5, "cuda": 0.9}
"""A CPU's memory is shared with others; a card is the engine's alone."""
MOST_RANKS = 64
"""Processes that may share a model."""
_answering = keywords(
    ConfigError, "a setting of the engine", dict.fromkeys(stated(SamplingParams), "a sampling parameter")
)


@dataclass(frozen=True, kw_only=True)
class KeptSettings:
    """Settings that arrive in the engine as the user gives them."""

    attention_backend: str | None = setting(
        None,
        "Attention backend, or one for each kind of layer: torch,torch-recurrent. A kind that none of them serves gets "
        "the one that is chosen without it.",
    )
    prefill_attention_backend: str | None = setting(None, "In place of attention_backend, for rows of many new tokens.")
    decode_attention_backend: str | None = setting(None, "In place of attention_backend, for rows of one new token.")
    max_step_ms: float | None = setting(
        None,
        "Longest step, in milliseconds, while rows generate: long prompts are read in chunks that fit; 0 is no limit. "
        "Without it, a server that generates measures the model and decides, one that embeds puts as many texts into a "
        "step as take 50 ms, and Python has no limit.",
        low=0,
        high=600_000,
    )
    require_proof: bool = setting(False, "Refuse attention backends that `sightline conformance` has not proven here.")
    seed: int | None = setting(
        None, "Derives the seeds of requests that bring none; random without it.", only_generates=True
    )
    skip_weight_check: bool = setting(
        False, "Load weights without looking for NaN and infinities, which saves one pass over them."
    )
    paranoid: bool = setting(False, "Fingerprint the contents of plans, and poison unused cache.")
    enable_two_batch_overlap: bool = setting(
        False,
        "With several processes, cut large steps in two, so that one half computes while the other waits for sums.",
        only_generates=True,
    )


@_answering
@dataclass(frozen=True)
class EngineConfig(KeptSettings):
    """The user's settings. None lets Sightline decide."""

    model: str | None = setting(
        None, "A folder, a .gguf file or a Hugging Face id; the default model without it.", flags=("-m",)
    )
    _: KW_ONLY
    task: str = setting(
        Task.GENERATE.value, "Generate text, or embed texts as vectors.", choices=tuple(each.value for each in Task)
    )
    device: str = setting("auto", "cpu, cuda, or auto: a GPU that torch can use, otherwise the CPU.")
    dtype: str = setting("auto", "Dtype of weights and activations.", choices=("auto", *DTYPE_NAMES))
    quantization: str = setting(
        Quantization.DEQUANTISE.value,
        "Quantised weights of a file: converted exactly, or kept small and multiplied with rounded inputs.",
        choices=tuple(each.value for each in Quantization),
    )
    max_model_len: int | None = setting(None, "Longest sequence, in tokens; the model's own limit without it.", low=1)
    max_num_seqs: int | None = setting(
        None,
        "Most sequences that run at once; without it {cpu} on a CPU and {cuda} on a GPU".format(**ROWS[Task.GENERATE])
        + ", or {cpu} to embed.".format(**ROWS[Task.EMBED]),
        low=1,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "Most tokens in one step; without it {cpu} on a CPU and {cuda} on a GPU".format(**STEP_TOKENS[Task.GENERATE])
        + ", or {cpu} to embed.".format(**STEP_TOKENS[Task.EMBED]),
        low=1,
    )
    page_size: int | None = setting(
        None, "Tokens in a cache page; without it {} on a CPU, {} on a GPU.".format(*PAGE_SIZES.values()), low=1
    )
    cache_tokens: int | None = setting(None, "Tokens that the cache holds; sized from free memory without it.", low=1)
    max_state_checkpoints: int | None = setting(
        None,
        "Recurrent states that are kept for requests that begin alike, in models with such layers; sized from free "
        "memory without it.",
        low=0,
        only_generates=True,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Dtype of the cache: auto is that of the engine, fp8 is e4m3 with the checkpoint's scales.",
        choices=("auto", *CACHE_DTYPE_NAMES),
    )
    memory_fraction: float | None = setting(
        None,
        "On a GPU, the share of the whole card that the process may take; {cuda:g} without it. On a CPU, the share of "
        "the memory left after the weights that the cache may take; {cpu:g} without it.".format(**MEMORY_FRACTIONS),
        low=0,
        high=1,
        excludes_low=True,
    )
    prefix_caching: bool | None = setting(
        None, "Keep computed prompts and answers for requests that begin alike; without it, only to generate."
    )
    host_cache_gib: float = setting(
        0.0,
        "GiB of host memory that keep pages of the prefix cache when the cache has no room for them, for requests that "
        "begin alike; pinned on a GPU. 0 is none. Needs prefix_caching.",
        low=0,
        high=65_536,
    )
    enable_hisparse: bool = setting(
        False,
        "Keep the entries of layers that attend to chosen entries in host memory, and hot ones of each sequence on the "
        "device: the cache holds longer and more texts.",
        only_generates=True,
    )
    hisparse_config: str | Mapping[str, object] | None = setting(
        None,
        'Sizes for enable_hisparse, as JSON: {"device_buffer_size": 4096, "host_to_device_ratio": 2}; its fields are '
        "below.",
        only_generates=True,
    )
    cuda_graph_sizes: str | None = setting(
        None,
        "Numbers of rows for which decode steps are captured in CUDA graphs, or recorded as programs on a CPU, such as "
        "1,2,4,8, or auto; a step is padded to the next. Without it, auto. On a CPU it needs layer_kernels numba.",
        only_generates=True,
    )
    enforce_eager: bool = setting(False, "Capture no CUDA graphs, and record no programs on a CPU.")
    async_scheduling: bool | None = setting(
        None,
        "Launch a step before the previous one is read: faster on a GPU. Without it, on a GPU only.",
        only_generates=True,
    )
    speculative_config: str | Mapping[str, object] | None = setting(
        None,
        'Guess several tokens and check them in one step, as JSON: {"method": "ngram", "num_speculative_tokens": 7}; '
        "its other fields are below. Answers are the same, and take fewer steps where guesses are right.",
        only_generates=True,
    )
    layer_kernels: str = setting(
        "auto",
        "Kernels of norms, rotations, gates, experts, products of few rows and greedy choice: torch; triton, fused, on "
        "a GPU; or numba, compiled for the processor, on a CPU. auto is triton on a GPU and numba on a CPU that "
        "generates, where they are installed, otherwise torch.",
        choices=("auto", *(each.value for each in LayerKernels)),
    )
    max_queued_requests: int = setting(1024, "Sequences that may wait; further ones are refused at once.", low=1)
    tensor_parallel_size: int = setting(
        1,
        "Processes among which every layer is divided, one for each GPU; on a CPU they share its cores.",
        low=1,
        high=MOST_RANKS,
        flags=("-tp",),
        only_generates=True,
    )
    data_parallel_size: int = setting(
        1,
        "Replicas of the model, each of tensor_parallel_size processes with rows and a cache of its own. Limits of "
        "rows, tokens and cache are for each of them.",
        low=1,
        high=MOST_RANKS,
        flags=("-dp",),
        only_generates=True,
    )
    enable_expert_parallel: bool = setting(
        False,
        "Divide experts among the processes of all replicas, instead of those of each. All replicas run steps of one "
        "size then.",
        only_generates=True,
    )
    dist_timeout: float = setting(
        20.0,
        "Seconds after which a process of a model that is divided, and that takes part in no step, counts as lost. All "
        "of them end then, and a server starts them again.",
        low=0,
        high=3600,
        excludes_low=True,
        only_generates=True,
    )
    chat_template: str | None = setting(
        None, "Path of a Jinja template that replaces the model's own.", only_generates=True
    )
    tool_call_parser: str = setting(
        "auto",
        "How the model writes calls of tools: auto finds out from its response_template or chat template; none refuses "
        "tools; otherwise a name of docs/tools.md.",
        only_generates=True,
    )
    reasoning_parser: str = setting(
        "auto", "How the model writes reasoning: auto, none or a name, as tool_call_parser.", only_generates=True
    )
    skip_tokenizer_init: bool = setting(False, "Do without a tokenizer: prompts are token ids.")
    strict: bool = setting(False, "Make every degradation an error.")

    def __post_init__(self) -> None:
        if self.model == "":
            raise ConfigError(
                "expected a folder, a .gguf file or a Hugging Face id, got an empty name; leave it out for the default"
            )
        if self.kv_cache_dtype == "fp8_e5m2":
            raise ConfigError(
                "expected kv_cache_dtype fp8_e4m3, got 'fp8_e5m2': it keeps two binary digits of a number where e4m3 "
                "keeps three, and no backend reads it; use fp8_e4m3"
            )
        check_settings(self, ConfigError)
        if self.num_ranks > 1:
            self._check_ranks()
        if self.tensor_parallel_size == 1 and self.enable_two_batch_overlap:
            raise ConfigError(
                "expected a tensor_parallel_size above 1 with enable_two_batch_overlap, which hides what several "
                "processes exchange, got 1; leave one out"
            )
        if read_speculation(self.speculative_config) is not None and self.async_scheduling:
            raise ConfigError(
                "expected speculative_config or async_scheduling, got both: tokens are guessed from those before them, "
                "which must have been read; leave one out"
            )
        read_hisparse(self.enable_hisparse, self.hisparse_config)
        if self.enable_hisparse and self.host_cache_gib:
            raise ConfigError(
                "expected enable_hisparse or host_cache_gib, got both: entries that are in host memory already need no "
                "tier below them; raise host_to_device_ratio in hisparse_config instead"
            )
        if self.enforce_eager and self.cuda_graph_sizes is not None:
            raise ConfigError("expected cuda_graph_sizes or enforce_eager, got both; leave one out")
        if self.skip_tokenizer_init and self.chat_template is not None:
            raise ConfigError(
                "expected no chat_template with skip_tokenizer_init, which has no use for it; leave one out"
            )
        for name, each in stated(type(self)).items():
            if each.only_generates and self.task == Task.EMBED.value and vars(self)[name] != each.default:
                raise ConfigError(f"expected no {name} with task embed, which has no use for it, got one; leave it out")

    @property
    def num_ranks(self) -> int:
        """The processes that compute the model."""
        return self.tensor_parallel_size * self.data_parallel_size

    def _check_ranks(self) -> None:
        """Raises for settings that several ranks do not have."""
        if self.num_ranks > MOST_RANKS:
            raise ConfigError(
                f"expected at most {MOST_RANKS} processes, got tensor_parallel_size {self.tensor_parallel_size} × "
                f"data_parallel_size {self.data_parallel_size}; lower one"
            )
        if self.data_parallel_size > 1 and self.enable_two_batch_overlap:
            raise ConfigError(
                "expected data_parallel_size 1 with enable_two_batch_overlap, got "
                f"{self.data_parallel_size}: steps of several replicas are not cut in two yet; leave one of them out"
            )
        speculation = read_speculation(self.speculative_config)
        method = "" if speculation is None else speculation.method
        refused = {
            "enable_hisparse": (self.enable_hisparse, "hot entries are looked up by one process"),
            f"the method {FROZEN_KV_MTP.name}": (
                method == FROZEN_KV_MTP.name,
                "it reads the keys and values of all heads, of which each process has some",
            ),
            "host_cache_gib": (self.host_cache_gib > 0, "pages of several ranks cannot be kept in host memory yet"),
        }
        for name, (is_asked, why) in refused.items():
            if is_asked:
                raise ConfigError(
                    f"expected one process with {name}, got {self.num_ranks} by tensor_parallel_size and "
                    f"data_parallel_size: {why}; leave one of them out"
                )


@_answering
@dataclass(frozen=True, kw_only=True)
class EngineKeywords(EngineConfig):
    """The keywords of `LLM(...)`: every setting, and the names that other engines have for some of them.

    The command line takes the same names. An alias is read as its setting, and is None in every instance.
    """

    context_length: int | None = alias("max_model_len")
    max_running_requests: int | None = alias("max_num_seqs")
    chunked_prefill_size: int | None = alias("max_num_batched_tokens")
    block_size: int | None = alias("page_size")
    gpu_memory_utilization: float | None = alias("memory_fraction")
    mem_fraction_static: float | None = alias("memory_fraction")
    enable_prefix_caching: bool | None = alias("prefix_caching")
    disable_radix_cache: bool | None = alias("prefix_caching", is_negated=True)
    kv_offloading_size: float | None = alias("host_cache_gib")
    hicache_size: float | None = alias("host_cache_gib")
    disable_overlap_schedule: bool | None = alias("async_scheduling", is_negated=True)
    cudagraph_capture_sizes: str | None = alias("cuda_graph_sizes")
    cuda_graph_bs: str | None = alias("cuda_graph_sizes")
    disable_cuda_graph: bool | None = alias("enforce_eager")
    tp: int | None = alias("tensor_parallel_size")
    tp_size: int | None = alias("tensor_parallel_size")
    dp: int | None = alias("data_parallel_size")
    dp_size: int | None = alias("data_parallel_size")
    speculative_algorithm: str | None = alias("speculative_config", fields=speculation_words.algorithm)
    speculative_num_steps: int | None = alias(
        "speculative_config", fields=speculation_words.the_field("num_speculative_tokens")
    )
    speculative_num_draft_tokens: int | None = alias("speculative_config", fields=speculation_words.draft_tokens)
    speculative_eagle_topk: int | None = alias("speculative_config", fields=speculation_words.branches)
    speculative_draft_model_path: str | None = alias("speculative_config", fields=speculation_words.the_field("model"))
    speculative_draft_attention_backend: str | None = alias(
        "speculative_config", fields=speculation_words.the_field("attention_backend")
    )
    speculative_ngram_max_match_window_size: int | None = alias(
        "speculative_config", fields=speculation_words.the_field("prompt_lookup_max")
    )
    speculative_ngram_min_match_window_size: int | None = alias(
        "speculative_config", fields=speculation_words.the_field("prompt_lookup_min")
    )
    speculative_ngram_capacity: int | None = alias(
        "speculative_config", fields=speculation_words.the_field("corpus_tokens")
    )
    speculative_model: str | None = alias("speculative_config", fields=speculation_words.draft_model)
    num_speculative_tokens: int | None = alias(
        "speculative_config", fields=speculation_words.the_field("num_speculative_tokens")
    )
    ngram_prompt_lookup_max: int | None = alias(
        "speculative_config", fields=speculation_words.the_field("prompt_lookup_max")
    )
    ngram_prompt_lookup_min: int | None = alias(
        "speculative_config", fields=speculation_words.the_field("prompt_lookup_min")
    )
    speculative_draft_tensor_parallel_size: int | None = alias(
        "speculative_config", fields=speculation_words.the_field("draft_tensor_parallel_size")
    )
