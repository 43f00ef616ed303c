"""Runtimes of a model with one feature taken out, and how far its logits move."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.operations import Operations
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner import build
from sightline.runner.build import assemble_runtime, make_store, select_backends
from sightline.runner.runtime import Runtime
from support.attention_cases import CPU
from support.features import Change
from support.tiny_models import load_runtime, random_prompts, reference_logits, relative_error, stepped_logits


@cache
def base_runtime(folder: Path) -> Runtime:
    return load_runtime(folder, EngineConfig(cache_tokens=256, max_model_len=256, max_num_seqs=2))


def changed_runtime(folder: Path, change: Change) -> Runtime:
    """A runtime for the same weights with one feature disabled."""
    ledger = Ledger()
    checkpoint = open_checkpoint(folder, ledger)
    base = base_runtime(folder)
    definition = change.define(define_model(checkpoint.config, ledger))
    decoder = change.build(
        definition.load(WeightReader(checkpoint, torch.float32, CPU, ledger, lambda done, total: None))
    )
    groups = definition.groups()
    candidates = [each.candidate for selection in base.selections for each in selection.values()]
    selections = select_backends(base.config, groups, list(dict.fromkeys(candidates)))
    return assemble_runtime(
        base.config, definition, decoder, groups, selections, make_store(base.config, groups), inline_launcher()
    )


def error_of(model: PreTrainedModel, folder: Path, change: Change) -> float:
    """How far the logits of the changed model are from those of transformers, relative to their scale."""
    [sequence] = random_prompts([48])
    [got] = stepped_logits(changed_runtime(folder, change), [sequence], [20], chunk=64)
    return relative_error(got, reference_logits(model, sequence)[19:])


def compute_with(patch: pytest.MonkeyPatch, operations: Operations) -> None:
    """Lets new runtimes compute with these operations. They run no step to warm up, which has nothing to compile and
    takes as long in Triton's interpreter as a test's own steps."""
    patch.setattr(build, "make_operations", lambda *_: operations)
    patch.setattr(build, "_warm_up", lambda *_: None)
