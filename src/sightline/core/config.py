"""The user's settings. Never mutated; `resolution.resolve` turns them into what runs, once.

Imports nothing heavy: a process that only passes settings on, such as a server's front end, needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sightline.core.errors import ConfigError


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


DTYPE_NAMES = ("float32", "bfloat16", "float16")
CACHE_DTYPE_NAMES = (*DTYPE_NAMES, "fp8", "fp8_e4m3", "float8_e4m3fn")
"""`fp8` is e4m3, the more precise of the two 8-bit floats."""
PADDING_PAGES = 1
"""Pages of every pool that no sequence owns: padding tokens write there, and nothing reads them."""


@dataclass(frozen=True)
class EngineConfig:
    """The user's settings. None lets Sightline decide."""

    model: str | None = None
    task: str = Task.GENERATE.value
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = Quantization.DEQUANTISE.value
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """None: 64 to generate, 1024 to embed."""
    max_num_batched_tokens: int | None = None
    """None: 512 to generate, 4096 to embed."""
    page_size: int | None = None
    """Tokens in a cache page; None: 16 on a CPU, 64 on a GPU."""
    cache_tokens: int | None = None
    """Total tokens that the cache must hold; None sizes it from the available memory."""
    kv_cache_dtype: str = "auto"
    """Dtype of cached entries; auto is the compute dtype."""
    memory_fraction: float = 0.5
    """Share of the memory left after the weights that the cache may take."""
    prefix_caching: bool | None = None
    """Keep computed prompts and answers, while there is room, for requests with the same prefix.

    None: only to generate.
    """
    max_queued_requests: int = 1024
    """Sequences that may wait; further ones are refused at once."""
    async_scheduling: bool = False
    """Schedule and launch a step before the previous one is read back: faster if the device runs asynchronously."""
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    """Overrides `attention_backend` for rows of many new tokens."""
    decode_attention_backend: str | None = None
    """Overrides `attention_backend` for rows of one new token."""
    require_proof: bool = False
    """Refuse an attention backend that the conformance kit has not proven on this machine."""
    seed: int | None = None
    chat_template: str | None = None
    """Path of a Jinja template that replaces the model's own."""
    skip_tokenizer_init: bool = False
    strict: bool = False
    paranoid: bool = False

    def __post_init__(self) -> None:
        if self.model == "":
            raise ConfigError(
                "expected a folder, a .gguf file or a Hugging Face id, got an empty name; leave it out for the default"
            )
        if self.dtype not in ("auto", *DTYPE_NAMES):
            raise ConfigError(f"expected dtype auto, {', '.join(DTYPE_NAMES)}, got {self.dtype!r}")
        self._check_cache_dtype()
        tasks = [task.value for task in Task]
        if self.task not in tasks:
            raise ConfigError(f"expected task {' or '.join(tasks)}, got {self.task!r}")
        for name, is_set in (
            ("seed", self.seed is not None),
            ("chat_template", self.chat_template is not None),
            ("async_scheduling", self.async_scheduling),
        ):
            if is_set and self.task == Task.EMBED.value:
                raise ConfigError(f"expected no {name} with task embed, which has no use for it, got one; leave it out")
        kinds = [kind.value for kind in Quantization]
        if self.quantization not in kinds:
            raise ConfigError(f"expected quantization {' or '.join(kinds)}, got {self.quantization!r}")
        for name, value in (
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("page_size", self.page_size),
            ("max_queued_requests", self.max_queued_requests),
            ("max_model_len", self.max_model_len),
            ("cache_tokens", self.cache_tokens),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"expected {name} to be a whole number of at least 1, got {value!r}")
        if self.seed is not None and type(self.seed) is not int:
            raise ConfigError(f"expected seed to be a whole number, got {self.seed!r}")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"expected memory_fraction in (0, 1], got {self.memory_fraction}")

    def _check_cache_dtype(self) -> None:
        if self.kv_cache_dtype in ("auto", *CACHE_DTYPE_NAMES):
            return
        why = ""
        if self.kv_cache_dtype == "fp8_e5m2":
            why = (
                ": it keeps two binary digits of a number where e4m3 keeps three, and no backend reads it; use fp8_e4m3"
            )
        raise ConfigError(
            f"expected kv_cache_dtype auto, {', '.join(CACHE_DTYPE_NAMES)}, got {self.kv_cache_dtype!r}{why}"
        )
