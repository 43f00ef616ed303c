"""Gemma 4's assistant gives what transformers gives, in every step of a round, and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sightline.attention.contract import CachePolicy
from sightline.cache.layout import Layout, arrange_free_pages
from sightline.core.batch import CONTEXT, RowWork, StepWork
from sightline.core.config import EngineConfig
from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.decoder import DecoderDefinition
from sightline.models.drafting import DraftSource
from sightline.models.gemma4_assistant import AssistantDefinition, AssistantDraft, define_assistant
from sightline.models.layer_definition import LayerDefinition
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.runner.batching import assemble
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from sightline.testing.conformance.rig import Unused, fill_pools
from support.attention_cases import BACKENDS
from support.tiny_assistant import AssistantStep, make_assistant, reference_round, target_outputs
from support.tiny_gemma4 import GEMMA4
from support.tiny_models import _common, make_model, random_prompts, relative_error, with_weights

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE
CONTEXT_LENS = (5, 37, 1, 12, 16)
"""The window is 10, and the page size is 4."""
NUM_DRAFTED = 4
TARGETS = ("gemma4", "gemma4_large")


@dataclass(frozen=True)
class Pair:
    """A target and its assistant, and where they are saved."""

    target: PreTrainedModel
    assistant: PreTrainedModel
    target_folder: Path
    folder: Path

    def definition(self, ledger: Ledger) -> AssistantDefinition:
        return define_assistant(self.config, self.target_definition, ledger)

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    @property
    def target_definition(self) -> DecoderDefinition:
        definition = define_model(open_checkpoint(self.target_folder, Ledger()).config, Ledger())
        assert isinstance(definition, DecoderDefinition)
        return definition

    def runtime(self, definition: AssistantDefinition, backend: str = "torch") -> Runtime:
        """Both networks over poisoned, shuffled pools."""
        ledger = Ledger(strict=True)
        draft = AssistantDraft(definition)
        config = EngineConfig(page_size=4, attention_backend=backend, dtype="float32", cache_tokens=512, max_num_seqs=8)
        runtime = build_runtime(
            config,
            open_checkpoint(self.target_folder, ledger),
            ledger,
            taps=draft.taps,
            draft=DraftSource(draft, open_checkpoint(self.folder, ledger)),
        )
        fill_pools(runtime.store, Unused.NAN)
        arrange_free_pages(runtime.store, Layout.SHUFFLED, seed=3)
        return runtime


ORDERED = "gemma4 whose assistant has clusters of tokens"
LARGE: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
"""The large target has one key head in layers with full attention."""


def make_pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    if name != ORDERED:
        target = make_model(name)
        return target, make_assistant(target, **LARGE if name == "gemma4_large" else {})
    target = with_weights(GEMMA4["gemma4"](_common() | {"vocab_size": 104}).eval())
    return target, make_assistant(target, clusters=(13, 4))


@pytest.fixture(scope="module", params=[*TARGETS, ORDERED])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target_folder, folder = (tmp_path_factory.mktemp(name) for name in ("target", "assistant"))
    target, assistant = make_pair(request.param)
    target.save_pretrained(target_folder)
    assistant.save_pretrained(folder)
    return Pair(target, assistant, target_folder, folder)


CONTEXTS = random_prompts(CONTEXT_LENS)
DRAFTED = random_prompts([NUM_DRAFTED] * len(CONTEXT_LENS), seed=1)


def bits(runtime: Runtime) -> list[Tensor]:
    return [
        pool.plane(plane.name).view(torch.int32).clone() for pool in runtime.store.pools for plane in pool.spec.planes
    ]


class Rounds:
    """The target has computed the contexts; the assistant drafts behind them."""

    def __init__(self, runtime: Runtime, contexts: Sequence[Sequence[int]]) -> None:
        assert runtime.draft is not None
        self.runtime, self.contexts = runtime, contexts
        [self.network] = runtime.draft.networks
        self.rows = [runtime.store.open_row() for _ in contexts]
        for row, context in zip(self.rows, contexts, strict=True):
            runtime.store.grow_row(row, len(context))
        work = [RowWork(row, context, 0, 1) for row, context in zip(self.rows, contexts, strict=True)]
        planned = runtime.planner.plan(assemble(work, runtime.store))
        runtime.runner.forward(planned)
        ends = torch.tensor([len(context) for context in contexts]).cumsum(0) - 1
        self.states = runtime.runner.states(planned)[ends]
        """The target's, of each context's last token."""

    def run(self, drafted: Sequence[Sequence[int]]) -> list[list[AssistantStep]]:
        """A round of all rows together, at one position each, with given tokens."""
        steps: list[list[AssistantStep]] = [[] for _ in self.rows]
        states, lens = self.states, [len(context) for context in self.contexts]
        for tokens in zip(*drafted, strict=True):
            rows = zip(self.rows, tokens, lens, strict=True)
            work = [RowWork(row, [token], length, 1, CONTEXT) for row, token, length in rows]
            planned = self.network.planner.plan(self.network.graphs.assemble(StepWork.of(work)))
            assert {group.policy for group in planned.plan.groups} == {CachePolicy.BORROWED}
            logits = self.network.runner.forward(planned, states)
            states = self.network.runner.states(planned)
            for index, row_steps in enumerate(steps):
                row_steps.append(AssistantStep(logits[index], states[index]))
        return steps


def largest_error(pair: Pair, definition: AssistantDefinition, backend: str = "torch") -> float:
    found = Rounds(pair.runtime(definition, backend), CONTEXTS).run(DRAFTED)
    expected = [reference_round(pair.assistant, pair.target, *each) for each in zip(CONTEXTS, DRAFTED, strict=True)]
    return max(
        relative_error(got, wanted)
        for steps, references in zip(found, expected, strict=True)
        for step, reference in zip(steps, references, strict=True)
        for got, wanted in zip(step, reference, strict=True)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_of_a_round_gives_what_transformers_gives(pair: Pair, backend: str) -> None:
    assert largest_error(pair, pair.definition(Ledger(strict=True)), backend) <= TOLERANCE


def test_the_targets_state_is_the_one_that_transformers_gives_to_its_assistant(pair: Pair) -> None:
    rounds = Rounds(pair.runtime(pair.definition(Ledger())), CONTEXTS)
    for context, state in zip(CONTEXTS, rounds.states, strict=True):
        assert relative_error(state, target_outputs(pair.target, context).state) <= TOLERANCE


def test_a_round_writes_nothing_and_leaves_the_rows_as_they_were(pair: Pair) -> None:
    rounds = Rounds(pair.runtime(pair.definition(Ledger())), CONTEXTS)
    runtime = rounds.runtime
    assert rounds.network.cache.lengths is runtime.store.lengths
    assert set(rounds.network.cache.pools) <= set(runtime.store.main.pools)
    assert len(runtime.store.networks) == 1, "an assistant has no cache"
    before, pages = bits(runtime), runtime.store.num_free_pages
    first = rounds.run(DRAFTED)
    assert all(torch.equal(*planes) for planes in zip(before, bits(runtime), strict=True))
    assert runtime.store.num_free_pages == pages
    assert [runtime.store.lengths.launched(row) for row in rounds.rows] == list(CONTEXT_LENS)
    again = rounds.run(DRAFTED)
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one[-1], other[-1], strict=True)), "a round leaves no trace"


def changed_lenders(definition: AssistantDefinition) -> AssistantDefinition:
    """Reads the first layer of each kind with the same entries instead of the last."""
    first = definition.attention_specs()[0]
    assert first is not None
    assert first.window is not None
    return replace(definition, lender_layers=(0, *definition.lender_layers[1:]))


def changed_window(definition: AssistantDefinition, by: int) -> AssistantDefinition:
    def changed(layer: LayerDefinition) -> LayerDefinition:
        spec: Any = layer.attention.spec
        spec = replace(spec, window=spec.window and spec.window + by)
        return replace(layer, attention=replace(layer.attention, spec=spec))

    layers = tuple(map(changed, definition.decoder.layers))
    return replace(definition, decoder=replace(definition.decoder, layers=layers))


@pytest.mark.prove
@pytest.mark.parametrize(
    "change",
    [
        changed_lenders,
        lambda definition: changed_window(definition, 1),
        lambda definition: changed_window(definition, -1),
        lambda definition: replace(definition, target_scale=1.0),
    ],
    ids=["another lender", "a wider window", "a narrower window", "unscaled embeddings"],
)
def test_disabling_a_feature_would_be_seen(pair: Pair, change: Any) -> None:
    assert largest_error(pair, change(pair.definition(Ledger()))) >= VISIBLE


def with_text(config: dict[str, Any], **fields: object) -> dict[str, Any]:
    return config | {"text_config": config["text_config"] | fields}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda config: config | {"use_ordered_embeddings": True, "num_centroids": 7}, "num_centroids that divides 10"),
        (lambda config: config | {"backbone_hidden_size": 47}, "use the assistant of this model"),
        (lambda config: with_text(config, vocab_size=117), "use the assistant of this model"),
        (lambda config: with_text(config, num_kv_shared_layers=2), "all 3 layers to share"),
        (lambda config: with_text(config, enable_moe_block=True), "enable_moe_block = True"),
        (
            lambda config: {key: value for key, value in config.items() if key != "text_config"},
            "expected a text_config",
        ),
    ],
)
def test_configs_that_do_not_fit_are_refused(pair: Pair, change: Any, told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        define_assistant(change(pair.config), pair.target_definition, Ledger())


def test_an_assistant_of_other_heads_than_its_target_is_refused(pair: Pair) -> None:
    config = with_text(pair.config, head_dim=4)
    definition = define_assistant(config, pair.target_definition, Ledger())
    with pytest.raises(ValueError, match="layer 0 to read entries of the shape that layer"):
        definition.groups("draft.", pair.target_definition.groups())
