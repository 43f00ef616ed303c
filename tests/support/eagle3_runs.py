"""Running EAGLE-3 heads and their targets as an engine does, over poisoned pools with shuffled pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sightline.attention.capability import Work
from sightline.attention.groups import group_layers
from sightline.attention.planner import PlannedBatch
from sightline.cache.layout import Layout, arrange_free_pages
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.embedding import DenseEmbedding
from sightline.models.contract import Definition, Model
from sightline.models.decoder import DecoderDefinition
from sightline.models.eagle3 import Eagle3Definition, Eagle3Head
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_eagle3, define_model
from sightline.models.weights import WeightReader
from sightline.runner.batching import assemble
from sightline.runner.build import assemble_runtime, make_store, select_backends
from sightline.runner.runtime import Runtime
from sightline.testing.conformance.rig import Unused, fill_pools
from support.attention_cases import CPU
from support.eagle3_heads import HIDDEN, TARGET_LAYERS
from support.tiny_models import VOCAB, load_runtime, with_weights


def make_target(hidden_size: int = HIDDEN) -> PreTrainedModel:
    """A tiny target with random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    return with_weights(LlamaForCausalLM(config).eval())


def reader_of(folder: Path, ledger: Ledger) -> WeightReader:
    return WeightReader(open_checkpoint(folder, ledger), torch.float32, CPU, ledger, lambda _done, _total: None)


def define_target(folder: Path) -> DecoderDefinition:
    definition = define_model(open_checkpoint(folder, Ledger()).config, Ledger(strict=True))
    assert isinstance(definition, DecoderDefinition)
    return definition


def define_head(folder: Path, target_folder: Path, ledger: Ledger | None = None) -> Eagle3Definition:
    ledger = ledger or Ledger(strict=True)
    return define_eagle3(open_checkpoint(folder, ledger).config, define_target(target_folder), ledger)


def load_head(folder: Path, target_folder: Path, target_embedding: Tensor) -> Eagle3Head:
    """The head that is saved in a folder. It may not degrade anything."""
    ledger = Ledger(strict=True)
    definition = define_head(folder, target_folder, ledger)
    return definition.load(reader_of(folder, ledger), DenseEmbedding(target_embedding))


@cache
def _base_runtime(target_folder: Path) -> Runtime:
    return load_runtime(target_folder, EngineConfig(cache_tokens=256, max_num_seqs=4, page_size=4))


def runtime_for(target_folder: Path, definition: Definition, model: Model) -> Runtime:
    """A runtime with pools of its own, in which every entry that was not written is NaN."""
    base = _base_runtime(target_folder)
    groups = group_layers(definition.attention_specs())
    selections = select_backends(base.config, groups, [base.selections[0][Work.PREFILL].candidate])
    store = make_store(base.config, groups)
    runtime = assemble_runtime(base.config, definition, model, groups, selections, store, inline_launcher())
    fill_pools(runtime.store, Unused.NAN)
    arrange_free_pages(runtime.store, Layout.SHUFFLED, seed=3)
    return runtime


@dataclass(frozen=True)
class GivenRow:
    """The work of one row in a step of a head."""

    row: int
    tokens: Sequence[int]
    context_len: int
    states: Tensor
    """[num_tokens, hidden_size]."""


class HeadRun:
    """Steps of a head."""

    def __init__(self, target_folder: Path, head: Eagle3Head) -> None:
        self.head = head
        self.runtime = runtime_for(target_folder, head.definition, head)

    def open_rows(self, count: int) -> list[int]:
        return [self.runtime.store.open_row() for _ in range(count)]

    def fuse(self, target_states: Tensor) -> Tensor:
        return self.head.fuse(target_states, self.runtime.operations)

    def step(self, rows: Sequence[GivenRow]) -> tuple[list[Tensor], list[Tensor]]:
        """The logits and the states of every token, for each row."""
        planned = self._plan(rows)
        logits = self.runtime.runner.forward(planned, torch.cat([each.states for each in rows]))
        states, lens = self.runtime.runner.states(planned), [len(each.tokens) for each in rows]
        return list(torch.split(logits, lens)), list(torch.split(states, lens))

    def best(self, logits: Tensor) -> Tensor:
        """The likeliest token of each row of logits, in the target's vocabulary."""
        assert logits.isfinite().all()
        return self.head.chosen(logits, self.runtime.operations)

    def _plan(self, rows: Sequence[GivenRow]) -> PlannedBatch:
        store = self.runtime.store
        for each in rows:
            store.grow_row(each.row, each.context_len + len(each.tokens))
        work = [RowWork(each.row, each.tokens, each.context_len, num_logits=len(each.tokens)) for each in rows]
        return self.runtime.planner.plan(assemble(work, store))
