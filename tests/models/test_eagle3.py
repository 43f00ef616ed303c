"""EAGLE-3 heads give what a plain reference gives, for a prompt and for the steps of a draft behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sightline.layers.attention import SoftmaxAttention
from sightline.layers.mlp import GatedMlp
from sightline.layers.rotary import Rotary
from sightline.models.eagle3 import Eagle3Head
from support.eagle3_heads import CASES, HeadCase, make_weights, reference, save_head
from support.eagle3_reference import Eagle3Reference, ReferenceStep
from support.eagle3_runs import GivenRow, HeadRun, load_head, make_target
from support.layers import without_bias
from support.tiny_models import random_prompts, relative_error

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE
PROMPT_LENS = (5, 17, 9)
"""The page size is 4: pages end within and behind prompts, and within drafts."""
NUM_DRAFTED = 5


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folders of a target by the width of its states."""
    folders = {
        width: tmp_path_factory.mktemp(f"target{width}") for width in {case.target_hidden for case in CASES.values()}
    }
    for width, folder in folders.items():
        make_target(width).save_pretrained(folder)
    return folders


@dataclass(frozen=True)
class Setting:
    """A saved head, its reference, and prompts with random states."""

    target_folder: Path
    head: Eagle3Head
    expected: Eagle3Reference
    prompts: list[list[int]]
    later: list[list[int]]
    states: list[Tensor]
    """For each prompt, the target's states of the tokens before its own."""


def make_setting(case: HeadCase, targets: dict[int, Path], folder: Path) -> Setting:
    weights = make_weights(case)
    save_head(case, folder, weights)
    target_folder = targets[case.target_hidden]
    embedding = weights["embed_tokens.weight"]
    generator = torch.Generator().manual_seed(9)
    width = case.num_taps * case.target_hidden
    return Setting(
        target_folder,
        load_head(folder, target_folder, torch.zeros_like(embedding) if case.stores_embedding else embedding),
        reference(case, weights),
        random_prompts(PROMPT_LENS),
        random_prompts([NUM_DRAFTED] * len(PROMPT_LENS), seed=1),
        [torch.randn(length, width, generator=generator) * 3.0 for length in PROMPT_LENS],
    )


def drafted(setting: Setting, head: Eagle3Head) -> list[list[ReferenceStep]]:
    """For each prompt, a step over it, in two chunks, and steps over the later tokens, all prompts together."""
    run = HeadRun(setting.target_folder, head)
    rows, found = run.open_rows(len(setting.prompts)), []
    fused = [run.fuse(each) for each in setting.states]
    firsts = [
        GivenRow(row, prompt[:4], 0, state[:4]) for row, prompt, state in zip(rows, setting.prompts, fused, strict=True)
    ]
    rests = [
        GivenRow(row, prompt[4:], 4, state[4:]) for row, prompt, state in zip(rows, setting.prompts, fused, strict=True)
    ]
    chunks = [run.step(firsts), run.step(rests)]
    for index in range(len(rows)):
        logits, states = (torch.cat([chunk[part][index] for chunk in chunks]) for part in (0, 1))
        found.append([ReferenceStep(logits, states)])
    for number in range(NUM_DRAFTED):
        work = [
            GivenRow(row, [later[number]], len(prompt) + number, steps[-1].states[-1:])
            for row, prompt, later, steps in zip(rows, setting.prompts, setting.later, found, strict=True)
        ]
        for steps, logits, states in zip(found, *run.step(work), strict=True):
            steps.append(ReferenceStep(logits, states))
    return found


def expected_of(setting: Setting) -> list[list[ReferenceStep]]:
    asked = zip(setting.prompts, setting.states, setting.later, strict=True)
    return [setting.expected.run(*each) for each in asked]


def largest_error(setting: Setting, head: Eagle3Head) -> float:
    """Of logits and states of all steps."""
    pairs = zip(drafted(setting, head), expected_of(setting), strict=True)
    return max(
        relative_error(got, wanted)
        for steps, references in pairs
        for step, other in zip(steps, references, strict=True)
        for got, wanted in zip(step, other, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_a_head_gives_what_the_reference_gives(name: str, targets: dict[int, Path], tmp_path: Path) -> None:
    setting = make_setting(CASES[name], targets, tmp_path)
    assert largest_error(setting, setting.head) <= TOLERANCE


@pytest.mark.parametrize("name", ["plain", "all_tokens"])
def test_a_greedy_draft_is_of_target_tokens(name: str, targets: dict[int, Path], tmp_path: Path) -> None:
    setting = make_setting(CASES[name], targets, tmp_path)
    run = HeadRun(setting.target_folder, setting.head)
    [row], prompt, drafts = run.open_rows(1), setting.prompts[1], []
    work = GivenRow(row, prompt, 0, run.fuse(setting.states[1]))
    for number in range(NUM_DRAFTED):
        [logits], [states] = run.step([work])
        drafts.append(int(run.best(logits)[-1]))
        work = GivenRow(row, drafts[-1:], len(prompt) + number, states[-1:])
    steps = setting.expected.run(prompt, setting.states[1], drafts[:-1])
    assert drafts == [int(setting.expected.target_tokens(step.logits[-1].argmax())) for step in steps]


def test_a_new_round_replaces_the_entries_of_rejected_guesses(targets: dict[int, Path], tmp_path: Path) -> None:
    setting = make_setting(CASES["plain"], targets, tmp_path)
    run = HeadRun(setting.target_folder, setting.head)
    [row], prompt, kept = run.open_rows(1), setting.prompts[1], 11
    fused = run.fuse(setting.states[1])
    _, [states] = run.step([GivenRow(row, prompt[:kept], 0, fused[:kept])])
    for number, token in enumerate(setting.later[1]):
        _, [states] = run.step([GivenRow(row, [token], kept + number, states[-1:])])
    run.runtime.store.lengths.settle(row, kept)
    [logits], _ = run.step([GivenRow(row, prompt[kept:], kept, fused[kept:])])
    [expected] = setting.expected.run(prompt, setting.states[1], [])
    assert relative_error(logits, expected.logits[kept:]) <= TOLERANCE


def in_layer(**fields: Callable[[Eagle3Head], object]) -> Callable[[Eagle3Head], Eagle3Head]:
    """A change of the layer's fields."""

    def change(head: Eagle3Head) -> Eagle3Head:
        return replace(head, layer=replace(head.layer, **{name: make(head) for name, make in fields.items()}))  # type: ignore[arg-type]

    return change


def attention_of(head: Eagle3Head) -> SoftmaxAttention:
    assert isinstance(head.layer.attention, SoftmaxAttention)
    return head.layer.attention


def feed_forward_without_bias(head: Eagle3Head) -> GatedMlp:
    assert isinstance(head.layer.mlp, GatedMlp)
    return replace(head.layer.mlp, down=without_bias(head.layer.mlp.down))


def without_norm_output(head: Eagle3Head) -> Eagle3Head:
    return replace(head, definition=replace(head.definition, norm_output=not head.definition.norm_output))


def without_scaling(head: Eagle3Head) -> Eagle3Head:
    return replace(head, rotary=Rotary(replace(head.definition.rotary, scaling=None), torch.device("cpu")))


OTHER_RESIDUAL = in_layer(norm_before_residual=lambda head: not head.layer.norm_before_residual)
CHANGES: dict[str, tuple[str, Callable[[Eagle3Head], Eagle3Head]]] = {
    "no norm before the residual": ("before_residual", OTHER_RESIDUAL),
    "a norm before the residual": ("plain", OTHER_RESIDUAL),
    "no norm of the target's states together": ("norm_before_fc", lambda head: replace(head, input_norms=())),
    "no norm of each of the target's states": ("fc_norm", lambda head: replace(head, input_norms=())),
    "norms of other states": ("fc_norm", lambda head: replace(head, input_norms=head.input_norms[::-1])),
    "continues from the state before the norm": ("norm_output", without_norm_output),
    "continues from the state after the norm": ("plain", without_norm_output),
    "no norm of the token": ("plain", in_layer(token_norm=lambda head: head.layer.state_norm)),
    "no query, key and value biases": (
        "biases",
        in_layer(attention=lambda head: replace(attention_of(head), qkv=without_bias(attention_of(head).qkv))),
    ),
    "no output bias": (
        "biases",
        in_layer(attention=lambda head: replace(attention_of(head), output=without_bias(attention_of(head).output))),
    ),
    "no feed-forward biases": ("biases", in_layer(mlp=feed_forward_without_bias)),
    "no rope scaling": ("rope", without_scaling),
    "no query and key norms": ("qwen3", in_layer(attention=lambda head: replace(attention_of(head), norms=None))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_that_is_ignored_would_be_seen(name: str, targets: dict[int, Path], tmp_path: Path) -> None:
    case, change = CHANGES[name]
    setting = make_setting(CASES[case], targets, tmp_path)
    assert largest_error(setting, change(setting.head)) >= VISIBLE


def test_ignored_offsets_to_target_tokens_would_be_seen(targets: dict[int, Path], tmp_path: Path) -> None:
    setting = make_setting(CASES["plain"], targets, tmp_path)
    logits = setting.expected.run(setting.prompts[1], setting.states[1], [])[0].logits
    expected = setting.expected.target_tokens(logits.argmax(-1))
    right, wrong = (
        HeadRun(setting.target_folder, head).best(logits)
        for head in (setting.head, replace(setting.head, target_tokens=None))
    )
    assert right.equal(expected)
    assert not wrong.equal(expected)
