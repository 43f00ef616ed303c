"""What the user asked for, and what it resolved to on this machine for this model.

`EngineConfig` holds wishes; `resolve` turns it into `ResolvedConfig`, once, with everything decided.
Neither is ever mutated. Knows nothing of tensors' contents or of how a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from sightline.core.device import Device, DeviceKind, available_bytes
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger


class Quantization(Enum):
    """What becomes of weights that the file quantises."""

    DEQUANTISE = "dequantise"
    """They are exact: what the file's numbers stand for, in the compute dtype."""
    KEEP = "keep"
    """They stay quantised in memory and are multiplied as such, where an op can."""


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PADDING_PAGES = 1
"""Pages of every pool that no sequence ever owns: padding tokens write there, nobody reads."""
SCRATCH_SHARE = 8
"""Scratch memory may take one part in so many of what the weights leave; the cache is sized from the rest."""


@dataclass(frozen=True)
class EngineConfig:
    """The user's wishes. None means: let Sightline decide."""

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = Quantization.DEQUANTISE.value
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    page_size: int = 16
    cache_tokens: int | None = None
    """Tokens that the cache must hold in all; None sizes it from the memory that is there."""
    memory_fraction: float = 0.5
    """Share of the memory left after the weights that the cache may take."""
    prefix_caching: bool = True
    """Keep what is computed of prompts and answers, as long as there is room, for requests that begin alike."""
    max_queued_requests: int = 1024
    """Sequences that may wait; whoever comes when so many do is refused at once."""
    async_scheduling: bool = False
    """Schedule and launch a step before the one before it is read: gains where the device works on its own."""
    attention_backend: str | None = None
    require_proof: bool = False
    """Refuse an attention backend that the conformance kit has not proven on this machine."""
    seed: int | None = None
    skip_tokenizer_init: bool = False
    strict: bool = False
    paranoid: bool = False

    def __post_init__(self) -> None:
        if self.model == "":
            raise ConfigError(
                "expected a folder, a .gguf file or a Hugging Face id, got an empty name; leave it out for the default"
            )
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"expected dtype auto, {', '.join(DTYPES)}, got {self.dtype!r}")
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


@dataclass(frozen=True)
class ModelFacts:
    """What `resolve` needs to know of a model, read from its headers before any weight is loaded."""

    max_positions: int
    weight_elements: int
    """That are kept in the compute dtype."""
    quantised_bytes: int
    """Of the weights that stay quantised."""
    cache_elements_per_token: int
    """Over all layers and pools."""


@dataclass(frozen=True)
class ResolvedConfig:
    """Every decision, made. What runs is exactly this."""

    device: Device
    dtype: torch.dtype
    quantization: Quantization
    max_model_len: int
    max_rows: int
    max_step_tokens: int
    page_size: int
    num_pages: int
    """Pages of each pool, the padding page included."""
    scratch_bytes: int
    """Most that backends may lease."""
    prefix_caching: bool
    max_queued: int
    """Sequences that may wait."""
    async_scheduling: bool
    attention_backend: str | None
    seed: int | None
    paranoid: bool
    require_proof: bool

    @property
    def cache_tokens(self) -> int:
        """Tokens that sequences can hold in the cache at once."""
        return (self.num_pages - PADDING_PAGES) * self.page_size


def resolve(config: EngineConfig, facts: ModelFacts, device: Device, ledger: Ledger) -> ResolvedConfig:
    """Decides everything that the config left open. Raises `ConfigError` for what cannot work."""
    dtype = _resolve_dtype(config.dtype, device)
    asked_len = config.max_model_len
    if asked_len is not None and asked_len > facts.max_positions:
        raise ConfigError(
            f"expected max_model_len of at most {facts.max_positions}, the model's trained positions, "
            f"got {asked_len}; lower it"
        )
    model_len = asked_len or facts.max_positions
    max_rows = _resolve_rows(config, ledger)
    left = available_bytes(device) - facts.weight_elements * dtype.itemsize - facts.quantised_bytes
    scratch_bytes = max(0, left) // SCRATCH_SHARE
    useful = max_rows * -(-model_len // config.page_size)
    num_pages = _resolve_pages(config, facts, dtype, left - scratch_bytes, useful)
    capacity = num_pages * config.page_size
    if capacity < model_len:
        if asked_len is not None:
            raise ConfigError(
                f"expected a cache of at least max_model_len = {asked_len} tokens, got room for {capacity}; "
                "lower max_model_len, or raise cache_tokens or memory_fraction"
            )
        ledger.record(
            "max_model_len",
            f"lowered from the model's {model_len} to {capacity}, what the cache holds",
            "raise cache_tokens or memory_fraction, or ask for a smaller max_model_len",
        )
        model_len = capacity
    return ResolvedConfig(
        device=device,
        dtype=dtype,
        quantization=Quantization(config.quantization),
        max_model_len=model_len,
        max_rows=max_rows,
        max_step_tokens=config.max_num_batched_tokens,
        page_size=config.page_size,
        num_pages=num_pages + PADDING_PAGES,
        scratch_bytes=scratch_bytes,
        prefix_caching=config.prefix_caching,
        max_queued=config.max_queued_requests,
        async_scheduling=config.async_scheduling,
        attention_backend=config.attention_backend,
        seed=config.seed,
        paranoid=config.paranoid,
        require_proof=config.require_proof,
    )


def _resolve_rows(config: EngineConfig, ledger: Ledger) -> int:
    max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    if max_rows < config.max_num_seqs:
        ledger.record(
            "max_num_seqs",
            f"lowered from {config.max_num_seqs} to {max_rows}: each running sequence needs a token of every step",
            "raise max_num_batched_tokens or lower max_num_seqs",
        )
    return max_rows


def _resolve_dtype(name: str, device: Device) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.kind is DeviceKind.CPU else torch.bfloat16


def _resolve_pages(config: EngineConfig, facts: ModelFacts, dtype: torch.dtype, left: int, useful: int) -> int:
    """Pages for sequences: as asked, else what the memory allows, never more than the `useful` ones.

    `left` are the bytes that weights and scratch memory leave.
    """
    page_bytes = facts.cache_elements_per_token * dtype.itemsize * config.page_size
    if config.cache_tokens is not None:
        asked = -(-config.cache_tokens // config.page_size)
        needed = (asked + PADDING_PAGES) * page_bytes
        if needed > left:
            raise ConfigError(
                f"expected a cache that fits the {max(0, left):,} bytes left beside the weights, got cache_tokens = "
                f"{config.cache_tokens}, which takes {needed:,}; lower cache_tokens"
            )
        return asked
    affordable = int(max(0, left) * config.memory_fraction) // page_bytes - PADDING_PAGES
    if affordable < 1:
        raise ConfigError(
            f"expected memory for at least one cache page of {page_bytes:,} bytes beside the weights, "
            f"got {left:,} bytes left; use a smaller model or dtype, or free memory"
        )
    return min(useful, affordable)
