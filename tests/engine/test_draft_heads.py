"""Heads that continue the model's states: answers are those without them, and guesses are those of the references.

A guess is a function of the text. So each draft that an engine made, at whatever page, chunk or round, is compared with
one that transformers, or the reference of EAGLE-3 heads, makes from the whole text at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sightline import LLM
from sightline.attention.planner import PlannedBatch, Planner
from sightline.core.batch import Batch
from sightline.core.device import DeviceKind
from sightline.core.errors import ConfigError
from sightline.core.request import EffectiveParams
from sightline.runner.sampling.sampler import RowSampling, choose
from sightline.scheduler.sequence import Draft, DraftRoom
from sightline.speculative import heads, methods
from sightline.speculative.drafter import Drafter, ObservedStep
from sightline.speculative.drafts import AdaptiveDrafts
from sightline.speculative.frozen import FrozenDrafter
from sightline.speculative.heads import HeadDrafter
from sightline.speculative.network_steps import DraftedRow, NetworkOutputs, NetworkSteps
from support.case_marks import proofs, routine
from support.eagle3_heads import CASES, make_weights, reference, save_head
from support.eagle3_runs import make_target
from support.speculating import EVERYTHING, GREEDY, PROMPTS, ask, tiny, tokens_of
from support.tiny_assistant import make_assistant, reference_round
from support.tiny_models import VOCAB, make_model, random_prompts
from support.tiny_mtp import Oracle, save_with_modules

MOST = 6
Plant = Callable[[pytest.MonkeyPatch], None]
"""Plants a fault."""
DRAWN = EffectiveParams(1.0, 1.0, 0, 0.0, 7, 64, frozenset(), skip_special_tokens=True)


Guess = Callable[[Sequence[int], int], list[int]]
"""The guesses for a text, as many as are asked for."""


class Case(NamedTuple):
    """A model, how it is drafted for, and the reference of its guesses."""

    folder: Path
    config: dict[str, object]
    guess: Guess
    """By the reference."""


def remembered(guess: Guess) -> Guess:
    """Asks for each text once, or again if more tokens are wanted: tests generate the same texts in many ways."""
    known: dict[tuple[int, ...], list[int]] = {}

    def find(text: Sequence[int], count: int) -> list[int]:
        key = tuple(text)
        if len(known.get(key, ())) < count:
            known[key] = guess(text, count)
        return known[key][:count]

    return find


def mtp_guesses(oracle: Oracle, text: Sequence[int], count: int) -> list[int]:
    """The guesses of each depth, then those of the last depth behind its own states."""
    modules, model, num_places = oracle.modules, oracle.model, len(text) - 1
    last = model.config.num_hidden_layers - 1
    tokens, guesses = list(text), list[int]()
    with torch.no_grad():
        given = model(torch.tensor([tokens[:num_places]]), output_hidden_states=[last], use_cache=False)
        states, inputs = given.hidden_states[-1], Tensor()
        for depth in range(1, count + 1):
            module = min(depth, len(modules.layers))
            if depth > len(modules.layers):
                # One place more, whose state is the one that was made last.
                num_places += 1
                states = torch.cat([inputs, states[:, -1:]], dim=1)
            inputs = states
            shifted = torch.tensor([tokens[module : module + num_places]])
            positions = torch.arange(module, module + num_places).unsqueeze(0)
            states = modules.forward_layer(module - 1, inputs, positions, None, input_ids=shifted)
            guesses.append(int(modules._project_to_logits(states)[0, -1].argmax()))
            tokens.append(guesses[-1])
    return guesses


def mtp_case(family: str, num_modules: int, folder: Path) -> Case:
    oracle = save_with_modules(family, num_modules, folder)
    config = {"method": "mtp", "num_speculative_tokens": MOST}
    return Case(folder, config, lambda text, count: mtp_guesses(oracle, text, count))


def eagle3_case(name: str, folder: Path) -> Case:
    model, case = make_target(), CASES[name]
    for part in ("target", "head"):
        (folder / part).mkdir()
    model.save_pretrained(folder / "target")
    weights = make_weights(case)
    if not case.stores_embedding:
        weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_head(case, folder / "head", weights)
    oracle, taps = reference(case, weights), case.layer_ids or (2, 3, 4)

    def guess(text: Sequence[int], count: int) -> list[int]:
        found: list[Tensor] = []
        modules = [*model.model.layers, model.model.norm]
        hooks = [each.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0])) for each in modules]
        with torch.no_grad():
            model(torch.tensor([text[:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        states, guesses = torch.cat([found[each] for each in taps], dim=1), list[int]()
        for _ in range(count):
            last = oracle.run(text[1:], states, guesses)[-1]
            guesses.append(int(oracle.target_tokens(last.logits[-1].argmax())))
        return guesses

    config = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": MOST}
    return Case(folder / "target", config, guess)


def frozen_case(family: str, folder: Path) -> Case:
    target = make_model(family)
    assistant = make_assistant(target)
    target.save_pretrained(folder / "target")
    assistant.save_pretrained(folder / "assistant")

    def guess(text: Sequence[int], count: int) -> list[int]:
        drafted = [text[-1]]
        for _ in range(count):
            drafted.append(int(reference_round(assistant, target, text[:-1], drafted)[-1].logits.argmax()))
        return drafted[1:]

    config = {"method": "frozen_kv_mtp", "model": str(folder / "assistant"), "num_speculative_tokens": MOST}
    return Case(folder / "target", config, guess)


MAKERS: dict[str, Callable[[Path], Case]] = {
    "deepseek_v3, one module": lambda folder: mtp_case("deepseek_v3", 1, folder),
    "deepseek_v3, three modules": lambda folder: mtp_case("deepseek_v3", 3, folder),
    "glm4_moe, two modules": lambda folder: mtp_case("glm4_moe", 2, folder),
    "gemma4, frozen": lambda folder: frozen_case("gemma4", folder),
    "eagle3": lambda folder: eagle3_case("plain", folder),
    "eagle3, original": lambda folder: eagle3_case("original", folder),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def find(name: str) -> Case:
        if name not in made:
            case = MAKERS[name](tmp_path_factory.mktemp("case"))
            made[name] = case._replace(guess=remembered(case.guess))
        return made[name]

    return find


class Recorded:
    """The drafts that engines make, as many tokens each as they may have."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.drafts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for kind in (HeadDrafter, FrozenDrafter):
            patch.setattr(kind, "propose", self._recorded(kind.propose))
        patch.setattr(AdaptiveDrafts, "limit", lambda drafts, _: drafts._most)
        patch.setattr(methods, "MAX_STEP_TOKENS", {DeviceKind.CPU: 64})

    def _recorded(self, propose: Callable[..., Sequence[Draft]]) -> Callable[..., Sequence[Draft]]:
        def recorded(drafter: Drafter, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
            found = propose(drafter, rooms)
            for room, draft in zip(rooms, found, strict=True):
                assert len(draft.tokens) == room.most
                self.drafts.append((tuple(room.sequence.tokens), draft.tokens))
            return found

        return recorded

    def num_wrong(self, case: Case) -> int:
        """Drafts that the reference does not make, of those for texts of every third length.

        The reference computes whole texts, which takes long. Three lengths and pages of four tokens meet in every way.
        """
        assert len(self.drafts) > 20
        compared = {text: draft for text, draft in self.drafts if len(text) % 3 == 0}
        return sum(case.guess(text, len(draft)) != list(draft) for text, draft in compared.items())


def drafting(case: Case, **changes: object) -> LLM:
    return tiny(case.folder, speculative_config=case.config, **changes)


@pytest.mark.parametrize("name", ["deepseek_v3, one module", *proofs("eagle3")])
def test_steps_that_are_planned_at_once_guess_the_same(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without recorded steps, a draft is one rollout."""
    case, rollouts = cases(name), list[int]()
    rollout = Planner.rollout

    def counted(planner: Planner, batches: Sequence[Batch]) -> tuple[PlannedBatch, ...]:
        rollouts.append(len(batches))
        return rollout(planner, batches)

    monkeypatch.setattr(Planner, "rollout", counted)
    recorded = Recorded(monkeypatch)
    llm = drafting(case, enforce_eager=True)
    ask(llm, GREEDY, PROMPTS)
    assert not has_failed(llm)
    assert max(rollouts) == MOST - 1
    assert recorded.num_wrong(case) == 0


def has_failed(llm: LLM) -> bool:
    return any(each.subject == "speculative_config" for each in llm.engine.ledger.degradations)


@pytest.mark.parametrize("name", routine({name: name for name in MAKERS}, "deepseek_v3, three modules", "eagle3"))
def test_guesses_are_those_of_the_reference_and_answers_those_without(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = cases(name)
    expected = ask(tiny(case.folder), GREEDY, PROMPTS)
    recorded = Recorded(monkeypatch)
    llm = drafting(case, max_num_batched_tokens=11, max_num_seqs=4)
    assert tokens_of(ask(llm, GREEDY, PROMPTS)) == tokens_of(expected)
    assert not has_failed(llm)
    assert recorded.num_wrong(case) == 0


SIZES: dict[str, dict[str, object]] = {
    "retraction": {"cache_tokens": 72, "max_model_len": 64, "max_num_seqs": 5},
    "chunks": {"prefix_caching": False, "max_num_batched_tokens": 5, "max_num_seqs": 2},
    "context": {"max_model_len": 48},
}


@pytest.mark.prove
@pytest.mark.parametrize(
    "sized",
    [
        *((size, "deepseek_v3, three modules") for size in SIZES),
        ("retraction", "eagle3"),
        ("context", "eagle3"),
        ("retraction", "gemma4, frozen"),
    ],
    ids=", ".join,
)
def test_room_and_sizes_change_nothing(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, sized: tuple[str, str]
) -> None:
    case, changes = cases(sized[1]), SIZES[sized[0]]
    expected = ask(tiny(case.folder, **changes), GREEDY, PROMPTS)
    recorded = Recorded(monkeypatch)
    llm = drafting(case, **changes)
    assert tokens_of(ask(llm, GREEDY, PROMPTS)) == tokens_of(expected)
    assert not has_failed(llm)
    if "cache_tokens" in changes:
        assert llm.engine.num_retractions > 0
    assert recorded.num_wrong(case) == 0


@pytest.mark.prove
@pytest.mark.parametrize(
    "name", ["deepseek_v3, one module", "gemma4, frozen", *proofs("glm4_moe, two modules", "eagle3")]
)
def test_every_parameter_and_shared_prefixes_give_the_same_answers(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    expected = ask(tiny(case.folder), EVERYTHING, PROMPTS)
    llm = drafting(case)
    for _ in range(2):
        found = ask(llm, EVERYTHING, PROMPTS)
        assert tokens_of(found) == tokens_of(expected)
    assert max(each.num_cached_tokens for each in found) > 0
    assert not has_failed(llm)
    assert llm.engine.metrics().spec_decode_num_draft_tokens > 30


@pytest.mark.prove
def test_a_text_that_goes_on_from_the_cache_is_drafted_for(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prefix that was found, the first depths have the entries that they would have computed."""
    case = cases("deepseek_v3, three modules")
    llm = drafting(case)
    [first] = ask(llm, GREEDY, PROMPTS[:1])
    recorded = Recorded(monkeypatch)
    longer = [[*first.prompt_token_ids, *first.outputs[0].token_ids]]
    [found] = ask(llm, replace(GREEDY, max_tokens=36), longer)
    assert found.num_cached_tokens > len(PROMPTS[0])
    assert recorded.num_wrong(case) == 0


@pytest.mark.parametrize("name", ["deepseek_v3, three modules", "eagle3", "gemma4, frozen"])
def test_a_sequence_that_waits_keeps_no_more_than_its_last_states(cases: Callable[[str], Case], name: str) -> None:
    """A view would keep the states of a whole step for as long as its sequence is paused."""
    engine = drafting(cases(name)).engine
    asked = engine.submit(random_prompts([60])[0], GREEDY)
    while not engine.metrics().generation_tokens:
        engine.step()
    engine.pause(asked)
    drafter = engine._drafts._drafter  # type: ignore[union-attr]
    found = vars(drafter)
    kept = [each.state for name in ("_ahead", "_seen") for each in found.get(name, {}).values()]
    kept += [each.states for held in found.get("_held", {}).values() for each in held.values()]
    assert kept
    assert all(each.untyped_storage().nbytes() <= 4 * each.shape[-1] * each.element_size() for each in kept)
    engine.forget(asked)
    assert not any(found.get(each) for each in ("_ahead", "_held", "_seen"))


def test_a_head_of_few_tokens_draws_as_the_model_would_from_them(cases: Callable[[str], Case]) -> None:
    case = cases("eagle3")
    draft = drafting(case).engine.runtime.draft
    logits = torch.randn(40, CASES["plain"].num_drafted, generator=torch.Generator().manual_seed(2))
    drawn = [RowSampling(DRAWN, place) if place % 3 else None for place in range(40)]
    wide = draft.loaded.spread(logits)
    assert wide.shape == (40, VOCAB)
    assert wide.isfinite().all()
    found = draft.choose(logits, drawn)
    expected = choose(wide, [each or RowSampling(replace(DRAWN, temperature=0.0), 0) for each in drawn]).tokens
    assert torch.equal(found, expected)
    assert len(set(found.tolist())) > 10


def states_of_the_wrong_place(patch: pytest.MonkeyPatch) -> None:
    observe = HeadDrafter.observe

    def shifted(drafter: HeadDrafter, step: ObservedStep) -> None:
        assert step.states is not None
        observe(drafter, step._replace(states=step.states.roll(1, 0)))

    patch.setattr(HeadDrafter, "observe", shifted)


def guessed_entries_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heads._Row, "num_right", lambda row, _: row.stop)


def position_frozen(patch: pytest.MonkeyPatch) -> None:
    """Every step of a draft is where the first one is."""
    patch.setattr(DraftedRow, "advance", 0)


def states_not_continued(patch: pytest.MonkeyPatch) -> None:
    """Every step of a draft takes the state of the first."""
    finish = NetworkSteps._finish

    def same(steps: NetworkSteps, planned: PlannedBatch, states: Tensor | None) -> NetworkOutputs:
        outputs = finish(steps, planned, states)
        return outputs if len(planned.batch.tokens) > len(planned.batch.rows) else outputs._replace(states=states)

    patch.setattr(NetworkSteps, "_finish", same)


def rejected_entries_kept(patch: pytest.MonkeyPatch) -> None:
    """A draft's entries count as right, whatever was accepted."""
    discard = NetworkSteps.discard

    def kept(steps: NetworkSteps, row: int, beyond: int | None = None) -> None:
        if beyond is None:
            steps.commit(row, steps._lengths.launched(row))
        discard(steps, row, beyond)

    patch.setattr(NetworkSteps, "discard", kept)


PLANTS: dict[str, Plant] = {
    each.__name__: each
    for each in (
        states_of_the_wrong_place,
        guessed_entries_kept,
        position_frozen,
        states_not_continued,
        rejected_entries_kept,
    )
}


@pytest.mark.parametrize("plant", routine(PLANTS, "position_frozen"))
def test_planted_faults_are_seen(cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    """Each fault changes a guess, or ends guessing. None changes an answer."""
    case = cases("deepseek_v3, three modules")
    expected = ask(tiny(case.folder), GREEDY, PROMPTS)
    plant(monkeypatch)
    recorded = Recorded(monkeypatch)
    llm = drafting(case)
    assert tokens_of(ask(llm, GREEDY, PROMPTS)) == tokens_of(expected)
    assert has_failed(llm) or len(recorded.drafts) < 20 or recorded.num_wrong(case) > 0


def test_a_model_without_modules_is_refused(cases: Callable[[str], Case]) -> None:
    with pytest.raises(ConfigError, match="multi-token prediction"):
        tiny(cases("eagle3").folder, speculative_config={"method": "mtp"})
