"""Every field of every family's config, changed: the result equals transformers', or the config is refused.

Fields of the other families are added too. Whatever is accepted without being refused must equal transformers with
the same config and weights. What the ledger calls a degradation must be unknown to transformers and without effect
there; what it notes as without effect must have none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from torch import Tensor

from sightline.core.batch import CAUSAL, FULL, RowWork
from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.contract import Definition
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import EMBEDDERS, FAMILIES, define_embedder, define_model
from sightline.runner.batching import assemble, assemble_transient
from sightline.runner.build import build_embedding_runtime, build_runtime
from support.case_marks import seldom
from support.config_mutations import (
    BASES,
    OLDER,
    TOKENS,
    Config,
    Mutation,
    Subject,
    make_subject,
    mutated,
    mutations,
    sibling_values,
)
from support.tiny_models import relative_error

REFUSALS = (UnsupportedModelError, ConfigError, CheckpointError)
TOLERANCE = 1e-4
PROVEN = ("llama3", "bert", "gpt_oss", "deepseek_v3, older form", "deepseek_v4")
"""Families of which each field is read somewhere in `make prove`. The others run with `pytest -m slow`."""
SUBJECTS = [*BASES, *(f"{name}, older form" for name in OLDER)]
EXTRA: dict[str, list[object]] = {
    "is_causal": [False, True, 0],
    "per_layer_config": [{"0": {"hidden_act": "relu"}}],
    "rope_theta": [50.0, 100.0],
    "rope_local_base_freq": [77.0],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0}, "nonsense", {}],
    "rope_parameters": [{}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}],
    "original_max_position_embeddings": [16, 24],
    "partial_rotary_factor": [0.5, 1.0],
    "text_config": [{"hidden_act": "relu"}],
    "attention_chunk_size": [4],
    "no_rope_layers": [[0, 1]],
    "logit_scale": [0.5],
    "residual_multiplier": [0.5],
    "embedding_multiplier": [2.0],
    "attention_multiplier": [0.5],
    "clip_qkv": [1.0],
    "qk_layernorm": [True],
    "sliding_window_pattern": [2, 1],
    "sliding_window_size": [5, 7],
    "num_experts": [6, 4],
    "num_local_experts": [6, 4],
    "experts_per_token": [2, 3],
    "moe_layer_freq": [2],
    "n_layer": [1],
    "qk_head_dim": [14, 12],
    "use_mrope": [True],
    "torch_dtype": ["float16"],
    "novel_field": [3],
}
ROPE_FIELDS = {
    "layer_types",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
}
"""What the older form of a config is mutated in: the rest is as in the newer one."""


@dataclass
class Outcome:
    """What Sightline makes of a config."""

    result: Tensor
    ledger: Ledger


@dataclass
class Engine:
    """Sightline on one subject's weights. Equal definitions compute the same, so each is run once."""

    subject: Subject
    results: dict[Definition, Tensor] = field(default_factory=dict)

    def run(self, config: Config) -> Outcome:
        """Raises what Sightline refuses the config with."""
        (self.subject.folder / "config.json").write_text(json.dumps(config))
        ledger = Ledger()
        checkpoint = open_checkpoint(self.subject.folder, ledger)
        embeds = self.subject.config["model_type"] == "bert"
        definition = (define_embedder if embeds else define_model)(checkpoint.config, ledger)
        if definition not in self.results:
            self.results[definition] = compute(checkpoint, embeds=embeds)
        return Outcome(self.results[definition], ledger)


def compute(checkpoint: Checkpoint, *, embeds: bool) -> Tensor:
    """Logits, or states, of all tokens."""
    ledger = Ledger()
    if embeds:
        settings = EngineConfig(task="embed", dtype="float32", device="cpu")
        runtime, _ = build_embedding_runtime(settings, checkpoint, ledger)
    else:
        settings = EngineConfig(dtype="float32", device="cpu", cache_tokens=64, page_size=16, max_num_seqs=1)
        runtime = build_runtime(settings, checkpoint, ledger)
    row = RowWork(0, TOKENS, 0, len(TOKENS), FULL if embeds else CAUSAL)
    batch = assemble_transient([row], torch.device("cpu"))
    if runtime.definition.lenders:
        # A step without a cache has nothing to lend.
        row.table_row = runtime.store.open_row()
        runtime.store.grow_row(row.table_row, len(TOKENS))
        batch = assemble([row], runtime.store)
    with torch.inference_mode():
        return runtime.runner.forward(runtime.planner.plan(batch)).clone()


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    made = [make_subject(name, tmp_path_factory.mktemp(name)) for name in BASES]
    made += [make_subject(name, tmp_path_factory.mktemp(f"{name}_older"), older=True) for name in OLDER]
    yield {subject.name: subject for subject in made}
    transformers.logging.set_verbosity(before)


def fault_of(subject: Subject, engine: Engine, base: Outcome, mutation: Mutation) -> str | None:
    """What is wrong with Sightline's answer to a mutated config; None if nothing is."""
    config = mutated(subject.config, mutation)
    expected_before = subject.reference(subject.config)
    try:
        outcome = engine.run(config)
    except REFUSALS:
        return None
    except Exception as error:
        return f"not a clear refusal: {error!r}"
    try:
        expected = subject.reference(config)
    except Exception as error:
        moved = relative_error(outcome.result, base.result)
        return f"moves by {moved:.1e}, transformers refuses: {str(error)[:80]!r}" if moved > TOLERANCE else None
    difference = relative_error(outcome.result, expected)
    if difference > TOLERANCE:
        return f"differs from transformers by {difference:.1e}"
    effect = relative_error(expected, expected_before)
    name = mutation[0][0]
    noted = f"config field {'.'.join(mutation[0])}"
    subjects_of = {entry.subject for entry in outcome.ledger.degradations if entry.subject.startswith("config field")}
    if subjects_of and (name in subject.known_fields() - {"model_type"} or effect > 0.0):
        return f"is a degradation; transformers knows it, or it has an effect of {effect:.1e}: {subjects_of}"
    if any(noted == note.subject for note in outcome.ledger.notes) and any(
        noted == note.subject for note in base.ledger.notes
    ):
        return f"is noted as without effect and has one of {effect:.1e}" if effect > 0.0 else None
    return None


@pytest.mark.prove
@pytest.mark.parametrize("name", seldom(SUBJECTS, *PROVEN))
def test_a_changed_field_gives_what_transformers_gives_or_is_refused(subjects: dict[str, Subject], name: str) -> None:
    subject = subjects[name]
    engine = Engine(subject)
    base = engine.run(subject.config)
    assert base.ledger.degradations == ()
    assert relative_error(base.result, subject.reference(subject.config)) < TOLERANCE
    siblings = sibling_values([other.config for other in subjects.values()])
    for extra, values in EXTRA.items():
        siblings[extra] = [*siblings.get(extra, []), *values]
    faults = {
        f"{'.'.join(mutation[0])} = {str(mutation[1])[:60]}": fault_of(subject, engine, base, mutation)
        for mutation in mutations(subject.config, siblings)
        if not subject.is_older or set(mutation[0][:1]) & ROPE_FIELDS
    }
    assert len(faults) > (40 if subject.is_older else 200)
    assert {mutation: fault for mutation, fault in faults.items() if fault is not None} == {}


def test_every_family_is_mutated(subjects: dict[str, Subject]) -> None:
    """Architectures with vision are read by the same function as those without."""
    families = {**FAMILIES, **EMBEDDERS}
    mutated = {families[subject.config["architectures"][0]] for subject in subjects.values()}
    assert mutated == set(families.values())
