"""EAGLE-3 heads behind a real target: they take the states of the layers that they were trained with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sightline.core.batch import RowWork
from sightline.core.ledger import Ledger
from sightline.models.contract import Taps
from sightline.runner.batching import assemble
from support.eagle3_heads import CASES, TARGET_LAYERS, make_weights, reference, save_head
from support.eagle3_reference import ReferenceStep
from support.eagle3_runs import (
    GivenRow,
    HeadRun,
    define_target,
    load_head,
    make_target,
    reader_of,
    runtime_for,
)
from support.tiny_models import random_prompts, relative_error

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE
FORMATS = {"plain": (1, 3, 6), "original": (1, 3, 6), "original_usual_layers": (2, 3, 4), "fc_norm": (0, 2, 5, 7)}
"""The states that each head takes: what these of the 7 layers take, and 7 is what the last one gives."""
NUM_GIVEN = 13
"""Tokens of the target's step. The others are guesses."""


@dataclass(frozen=True)
class Pair:
    """A saved target and a saved head that guesses for it."""

    model: PreTrainedModel
    target: Path
    head: Path
    weights: dict[str, Tensor]
    name: str

    def expected(self, tokens: list[int]) -> list[ReferenceStep]:
        """The reference, behind the states of transformers."""
        states: list[Tensor] = []
        modules = [*self.model.model.layers, self.model.model.norm]
        hooks = [each.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0])) for each in modules]
        with torch.no_grad():
            self.model(torch.tensor([tokens[:NUM_GIVEN]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        joined = torch.cat([states[each] for each in FORMATS[self.name]], dim=1)
        oracle = reference(CASES[self.name], self.weights)
        return oracle.run(tokens[1 : NUM_GIVEN + 1], joined, tokens[NUM_GIVEN + 1 :])


@pytest.fixture(params=FORMATS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    model, case = make_target(), CASES[request.param]
    for folder in ("target", "head"):
        (tmp_path / folder).mkdir()
    model.save_pretrained(tmp_path / "target")
    weights = make_weights(case)
    if not case.stores_embedding:
        weights["embed_tokens.weight"] = embedding_of(model)
    save_head(case, tmp_path / "head", weights)
    return Pair(model, tmp_path / "target", tmp_path / "head", weights, request.param)


def embedding_of(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.detach().clone()


def tapped(folder: Path, taps: Taps, tokens: list[int]) -> Tensor:
    """The target's states for the tokens, which come in two steps."""
    definition = define_target(folder)
    runtime = runtime_for(folder, definition, definition.load(reader_of(folder, Ledger(strict=True)), taps))
    row, found = runtime.store.open_row(), []
    for start, stop in ((0, 6), (6, len(tokens))):
        runtime.store.grow_row(row, stop)
        planned = runtime.planner.plan(assemble([RowWork(row, tokens[start:stop], start, num_logits=1)], runtime.store))
        runtime.runner.forward(planned)
        found.append(runtime.runner.states(planned))
    return torch.cat(found)


def drafted_error(pair: Pair, shift: int) -> float:
    """The largest error of a draft whose states were taken `shift` layers too late; before the first comes the last."""
    [tokens] = random_prompts([NUM_GIVEN + 4])
    head = load_head(pair.head, pair.target, embedding_of(pair.model))
    run = HeadRun(pair.target, head)
    streams = tuple((each + shift) % (TARGET_LAYERS + 1) for each in head.definition.taps.streams)
    [row], errors = run.open_rows(1), []
    states = run.fuse(tapped(pair.target, Taps(streams), tokens[:NUM_GIVEN]))
    new, context = tokens[1 : NUM_GIVEN + 1], 0
    for step in pair.expected(tokens):
        [logits], [states] = run.step([GivenRow(row, new, context, states)])
        errors += [relative_error(logits, step.logits), relative_error(states, step.states)]
        context += len(new)
        new, states = tokens[context + 1 : context + 2], states[-1:]
    assert context == len(tokens) - 1
    return max(errors)


def test_a_head_continues_from_the_states_of_its_layers(pair: Pair) -> None:
    assert load_head(pair.head, pair.target, embedding_of(pair.model)).definition.taps == Taps(FORMATS[pair.name])
    assert drafted_error(pair, shift=0) <= TOLERANCE


def test_states_of_the_wrong_layer_would_be_seen(pair: Pair) -> None:
    assert drafted_error(pair, shift=-1) >= VISIBLE


def test_a_head_without_an_embedding_shares_that_of_its_target(pair: Pair) -> None:
    own = "embed_tokens.weight" in {name.removeprefix("model.") for name in reader_of(pair.head, Ledger()).names}
    others = load_head(pair.head, pair.target, torch.zeros_like(embedding_of(pair.model)))
    out = torch.full((1, others.definition.hidden_size), torch.nan)
    others.embedding(torch.tensor([5]), 1.0, out, HeadRun(pair.target, others).runtime.operations)
    assert own == bool(out.any())
    assert own == CASES[pair.name].stores_embedding


@pytest.mark.parametrize("streams", [(1, 1, 4), (8,), (-1, 3)])
def test_states_that_a_target_does_not_have_once_are_refused(tmp_path: Path, streams: tuple[int, ...]) -> None:
    make_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected different states, each between 0 and 7 layers"):
        tapped(tmp_path, Taps(streams), [1, 2])
