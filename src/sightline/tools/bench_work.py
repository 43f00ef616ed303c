"""What `sightline bench` measures: the prompts, how many tokens, and the floor of each piece of work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sightline.core.ledger import Ledger
from sightline.llm import LLM, EngineSettings
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.opening import open_checkpoint
from sightline.tools.bench import (
    Generate,
    Machine,
    Result,
    Work,
    check_equal,
    decode_floor,
    measure,
    prefill_floor,
    random_prompts,
    sightline_engine,
)
from sightline.tools.peers import peer_engines

DECODE_PROMPT_LEN = 32


@dataclass(frozen=True)
class ModelSize:
    """Weights that a step multiplies with; a model with experts multiplies with fewer."""

    layers: int
    vocabulary: int
    """Of the output projection."""
    item_bytes: int
    """Of a weight as it is multiplied."""

    @property
    def weights(self) -> int:
        return self.layers + self.vocabulary

    @property
    def num_bytes(self) -> int:
        return self.weights * self.item_bytes


@dataclass(frozen=True)
class Report:
    """A whole run."""

    machine: Machine
    threads: int
    results: tuple[Result, ...]


def open_model(model: str | None) -> Checkpoint:
    """The model that is measured; what of it is ignored, the engine says."""
    return open_checkpoint(default_model_path() if model is None else model, Ledger())


def model_size(checkpoint: Checkpoint, dtype: torch.dtype) -> ModelSize:
    """Counted from the headers; no weight is read."""
    sizes = {name: math.prod(info.shape) for name, info in checkpoint.tensors.items()}
    embedding = sizes.get("model.embed_tokens.weight", 0)
    head = sizes.get("lm_head.weight", 0)
    return ModelSize(sum(sizes.values()) - embedding - head, head or embedding, dtype.itemsize)


def latency_works(
    size: ModelSize, machine: Machine, vocab_size: int, lengths: tuple[int, int], rows: int
) -> list[Work]:
    """A prompt read, and rows that generate."""
    input_len, output_len = lengths
    step = decode_floor(machine, size.weights, size.num_bytes, rows)
    return [
        Work(
            f"prefill {input_len}",
            random_prompts(1, input_len, vocab_size),
            1,
            prefill_floor(machine, size.layers, input_len),
        ),
        Work(
            f"decode {rows} × {output_len}",
            random_prompts(rows, DECODE_PROMPT_LEN, vocab_size),
            output_len,
            step * (output_len - 1),
        ),
    ]


def throughput_works(
    size: ModelSize, machine: Machine, vocab_size: int, lengths: tuple[int, int], count: int
) -> list[Work]:
    """Many prompts at once, read and continued."""
    input_len, output_len = lengths
    floor = prefill_floor(machine, size.layers, input_len * count)
    floor += (output_len - 1) * decode_floor(machine, size.weights, size.num_bytes, count)
    prompts = random_prompts(count, input_len, vocab_size)
    return [Work(f"{count} × ({input_len} in, {output_len} out)", prompts, output_len, floor)]


def load_engines(
    checkpoint: Checkpoint, compared: Sequence[str], settings: EngineSettings
) -> tuple[dict[str, Generate], LLM]:
    """Sightline first, then the engines to compare with, all on the same file and dtype."""
    llm = LLM(str(checkpoint.location), **(settings | {"skip_tokenizer_init": True}))
    engines = {"sightline": sightline_engine(llm)}
    return engines | peer_engines(tuple(compared), checkpoint.location, llm.engine.runtime.config.dtype), llm


def run_works(
    engines: dict[str, Generate], works: Sequence[Work], machine: Machine, rounds: int, threads: int
) -> Report:
    """Checks that the engines agree, then measures each piece of work."""
    check_equal(engines, works[0].prompts[:4])
    return Report(machine, threads, tuple(result for work in works for result in measure(engines, work, rounds)))
