"""llama.cpp through its C interface, as llama-cpp-python exposes it: one batch per step, with one sequence per row.

A step chooses the likeliest token of each row. Installed from source, llama.cpp is built for the processor at hand.
Does not know which file is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
from gguf import GGMLQuantizationType

from sightline.core.errors import SightlineError

_BATCH_TOKENS = 2048
_MICRO_BATCH_TOKENS = 512


@dataclass(frozen=True)
class LlamaSettings:
    """The resources of a context."""

    threads: int
    max_rows: int
    max_tokens: int
    """Length of the longest row."""
    cache_type: GGMLQuantizationType
    flash_attention: bool


class LlamaCpp:
    """A loaded model and its context."""

    def __init__(self, path: Path, settings: LlamaSettings) -> None:
        self._library: Any = import_module("llama_cpp")
        library = self._library
        self._log = library.llama_log_callback(lambda *_: None)
        library.llama_log_set(self._log, None)
        library.llama_backend_init()
        model_params = library.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise SightlineError(
                f"expected a model that llama.cpp loads, got {path.name}; leave llama.cpp out of --compare"
            )
        params = library.llama_context_default_params()
        params.n_ctx, params.n_seq_max = settings.max_rows * _padded(settings.max_tokens), settings.max_rows
        params.n_batch, params.n_ubatch = _BATCH_TOKENS, _MICRO_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = settings.threads
        params.type_k = params.type_v = settings.cache_type.value
        params.flash_attn_type = int(settings.flash_attention)
        params.no_perf = True
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise SightlineError(
                f"expected a context of {settings.max_rows} rows of {settings.max_tokens} tokens with a cache of "
                f"{settings.cache_type.name}, got none from llama.cpp; compare fewer or shorter rows"
            )
        self._vocab_size: int = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(_BATCH_TOKENS, 0, 1)

    @property
    def build(self) -> str:
        """The version, and the instructions of the processor that the library was built for."""
        found = self._library.llama_print_system_info().decode()
        parts = [part.strip().removeprefix("CPU : ") for part in found.split("|")]
        used = [part.removesuffix(" = 1") for part in parts if part.endswith(" = 1")]
        return f"llama-cpp-python {self._library.__version__}, built for {' '.join(used)}"

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
        """The likeliest `count` tokens behind each prompt."""
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        work = [
            (token, place, row, place == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        chosen: dict[int, int] = {}
        for start in range(0, len(work), _BATCH_TOKENS):
            chosen |= self._decode(work[start : start + _BATCH_TOKENS])
        tokens = [[chosen[row]] for row in range(len(prompts))]
        for step in range(count - 1):
            chosen = self._decode(
                [(row_tokens[-1], len(prompts[row]) + step, row, True) for row, row_tokens in enumerate(tokens)]
            )
            for row, row_tokens in enumerate(tokens):
                row_tokens.append(chosen[row])
        return [tuple(each) for each in tokens]

    def logits(self, tokens: Sequence[int]) -> numpy.ndarray[Any, numpy.dtype[numpy.float32]]:
        """The logits behind every token of a text, [len(tokens), vocab_size]."""
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        found = []
        for start in range(0, len(tokens), _BATCH_TOKENS):
            part = tokens[start : start + _BATCH_TOKENS]
            self._run([(token, start + place, 0, True) for place, token in enumerate(part)])
            found += [self._logits_of(place).copy() for place in range(len(part))]
        return numpy.stack(found)

    def _decode(self, work: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Computes tokens (id, position, row, whether the next is wanted). Returns the next token of each such row."""
        self._run(work)
        return {
            row: int(self._logits_of(place).argmax()) for place, (_, _, row, is_wanted) in enumerate(work) if is_wanted
        }

    def _run(self, work: Sequence[tuple[int, int, int, bool]]) -> None:
        library, batch = self._library, self._batch
        batch.n_tokens = len(work)
        for place, (token, position, row, is_wanted) in enumerate(work):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
            batch.seq_id[place][0], batch.logits[place] = row, is_wanted
        status = library.llama_decode(self._context, batch)
        if status != 0:
            raise SightlineError(f"expected llama.cpp to compute {len(work)} tokens, got status {status}")

    def _logits_of(self, place: int) -> numpy.ndarray[Any, numpy.dtype[numpy.float32]]:
        """The logits of a token of the last batch. The next batch overwrites them."""
        logits = self._library.llama_get_logits_ith(self._context, place)
        return numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,))


def _padded(num_tokens: int) -> int:
    """llama.cpp divides the context among sequences in blocks of 256 tokens."""
    return -(-num_tokens // 256) * 256
