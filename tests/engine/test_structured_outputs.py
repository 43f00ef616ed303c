"""Answers are what their grammar allows, whatever else is asked for and whatever happens on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from sightline import LLM, RequestOutput, SamplingParams
from sightline.core.errors import EngineClosedError, GrammarError, RequestError
from sightline.core.request import FinishReason
from sightline.core.structured import StructuredOutputs
from sightline.engine import engine as engine_module
from sightline.engine import live as live_module
from sightline.engine.constraint import SequenceConstraint
from sightline.llm import EngineSettings
from sightline.runner.sampling import sampler as sampler_module
from sightline.runner.sampling.masks import TokenMasks, row_masks
from sightline.scheduler.sequence import Draft
from sightline.speculative import drafts as drafts_module
from sightline.structured.matcher import CompiledGrammar, GrammarMatcher
from sightline.testing.simulator.scenario import Drafting
from support.engines import is_at_rest
from support.guessing import lying_drafts
from support.structured import PERSON, checked, held_to, whole_schema
from support.tiny_served_model import save_tiny_served_model

MAX_TOKENS = 80
EOS = 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, structured_outputs=StructuredOutputs(json=PERSON))
SAMPLED = replace(GREEDY, temperature=1.0, seed=5)
WORD = SamplingParams(temperature=1.0, seed=3, max_tokens=40, structured_outputs=StructuredOutputs(regex="[a-f]{12}"))
TEXT = replace(SAMPLED, structured_outputs=StructuredOutputs(json={"type": "string", "maxLength": 60}))
"""Nearly every token may follow, so that guesses are admitted that are wrong."""
CHOICE = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(choice=["yes", "no"]))
PROMPTS = ["A person:", "Hello, world! " * 4]
NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    return save_tiny_served_model(tmp_path_factory.mktemp("tiny"))


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"cache_tokens": 4096, "page_size": 4, "dtype": "float32", "paranoid": True, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = tiny(folder)
    yield made
    made.close()


def ask(llm: LLM, params: SamplingParams, prompts: Sequence[str] = PROMPTS) -> list[RequestOutput]:
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    assert is_at_rest(llm)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def lie(patch: pytest.MonkeyPatch, llm: LLM, outputs: Sequence[RequestOutput], num_branches: int = 1) -> None:
    """Engines that guess do so with liars, who know these outputs of a model."""
    answers = [[*output.prompt_token_ids, *each.token_ids] for output in outputs for each in output.outputs]
    drafting = Drafting(honesty=0.8, most=5, num_branches=num_branches, adapts=False, seed=3)
    drafts = lying_drafts(answers, drafting, llm.engine.vocab_size)
    patch.setattr(engine_module, "make_drafts", lambda *_: drafts)


def follow_grammar(llm: LLM, outputs: Sequence[RequestOutput], constraint: dict[str, Any]) -> bool:
    """True if all answers are what a grammar admits: whole, or cut by the limit of their tokens."""
    assert llm.engine.grammars is not None
    grammar = llm.engine.grammars.prepare(StructuredOutputs(**constraint)).result()
    for output in outputs:
        assert output.error is None
        for each in output.outputs:
            matcher = grammar.matcher()
            matcher.consume(each.token_ids)
            ended = matcher.is_complete or EOS in each.token_ids
            assert each.finish_reason == ("stop" if ended else "length")
    return True


@pytest.mark.prove
@pytest.mark.parametrize("settings", [{}, {"speculative_config": NGRAM}], ids=["plain", "ngram"])
def test_answers_under_200_random_schemas_satisfy_them(folder: Path, settings: dict[str, object]) -> None:
    llm, seeds = tiny(folder, **settings), range(200)
    outputs = llm.generate(["x"] * len(seeds), [held_to(seed) for seed in seeds], use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(seeds)
    done = [checked(output.outputs[0], whole_schema(seed), 200) for seed, output in zip(seeds, outputs, strict=True)]
    assert sum(done) > 150
    assert is_at_rest(llm)
    if settings:
        assert llm.engine.metrics().spec_decode_num_accepted_tokens > 0
    llm.close()


@pytest.mark.parametrize(
    ("num_schemas", "num_streams"),
    [pytest.param(20, 3, marks=pytest.mark.prove), pytest.param(200, 20, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("settings", [{}, {"speculative_config": NGRAM}], ids=["plain", "ngram"])
def test_answers_of_the_default_model_under_random_schemas_satisfy_them(
    settings: dict[str, object], num_schemas: int, num_streams: int
) -> None:
    llm, seeds = (
        LLM(**cast("EngineSettings", {"cache_tokens": 8192, "max_num_seqs": 20, **settings})),
        range(num_schemas),
    )
    params = [held_to(seed, max_tokens=100) for seed in seeds]
    outputs = llm.generate(["A value, as JSON: "] * len(seeds), params, use_tqdm=False)
    done = [checked(each.outputs[0], whole_schema(seed), 100) for seed, each in zip(seeds, outputs, strict=True)]
    print(f"{sum(done)} of {num_schemas} answers ended")
    assert sum(done) > 0.6 * num_schemas
    for seed in seeds[:num_streams]:
        pieces = list(llm.stream("A value, as JSON: ", params[seed]))
        assert "".join(piece.text for piece in pieces) == outputs[seed].outputs[0].text
    llm.close()


def test_streams_give_the_same_answers_piece_by_piece(llm: LLM) -> None:
    seeds = range(4)
    outputs = llm.generate(["x"] * len(seeds), [held_to(seed) for seed in seeds], use_tqdm=False)
    for seed, output in zip(seeds, outputs, strict=True):
        pieces = list(llm.stream("x", held_to(seed)))
        assert "".join(piece.text for piece in pieces) == output.outputs[0].text
        assert pieces[-1].finish_reason == output.outputs[0].finish_reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"temperature": 1.0, "seed": 5}, marks=pytest.mark.prove),
        {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2},
        {"temperature": 0.9, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 1.0, "seed": 8, "logit_bias": {40: -20.0, EOS: 50.0}, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 9, "min_tokens": 10},
        {"temperature": 1.0, "seed": 10, "bad_words": ["b"]},
    ],
    ids=str,
)
def test_other_parameters_choose_among_what_the_grammar_allows(llm: LLM, changes: dict[str, Any]) -> None:
    params = replace(GREEDY, **changes)
    outputs = ask(llm, params)
    assert follow_grammar(llm, outputs, {"json": PERSON})
    for output in outputs:
        assert len({each.token_ids for each in output.outputs}) == (params.n if params.temperature else 1)
        for each in output.outputs:
            assert all(len(each.token_ids) == len(each.logprobs or ()) for _ in range(int(params.logprobs is not None)))
    assert tokens_of(ask(llm, params)) == tokens_of(outputs), "the prefix cache changes nothing"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 16}, marks=pytest.mark.prove),
        pytest.param({"prefix_caching": False}, marks=pytest.mark.prove),
        {"async_scheduling": True},
        pytest.param({"cache_tokens": 200, "max_model_len": 190}, marks=pytest.mark.prove),
        {"cache_tokens": 200, "max_model_len": 190, "async_scheduling": True, "max_num_batched_tokens": 24},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_how_steps_are_made(folder: Path, llm: LLM, settings: dict[str, object]) -> None:
    params = [replace(SAMPLED, n=3), replace(WORD, n=2), replace(SAMPLED, seed=8), SamplingParams(max_tokens=40)]
    expected = llm.generate(PROMPTS * 2, params, use_tqdm=False)
    other = tiny(folder, **settings)
    found = other.generate(PROMPTS * 2, params, use_tqdm=False)
    assert tokens_of(found) == tokens_of(expected)
    if "cache_tokens" in settings:
        assert other.engine.num_retractions > 0
    if settings.get("async_scheduling"):
        assert any(note.subject == "structured_outputs" for note in other.engine.ledger.notes)
    assert is_at_rest(other)
    other.close()


# Every two of them together; the rest is a proof.
@pytest.mark.parametrize(
    ("name", "num_branches", "is_cut"),
    [
        ("greedy", 1, False),
        ("sampled", 3, False),
        ("penalised", 1, True),
        *(
            pytest.param(*each, marks=pytest.mark.prove)
            for each in [("greedy", 3, True), ("sampled", 1, True), ("penalised", 3, False), ("sampled", 1, False)]
        ),
    ],
)
def test_guesses_change_no_answer(
    folder: Path, llm: LLM, name: str, num_branches: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {
        "greedy": replace(GREEDY, max_tokens=60),
        "sampled": replace(SAMPLED, n=2),
        "penalised": replace(WORD, n=2, repetition_penalty=1.2),
    }[name]
    expected = ask(llm, params)
    lie(monkeypatch, llm, expected, num_branches)
    if not is_cut:
        monkeypatch.setattr(drafts_module, "admitted", _not_cut)
    other = tiny(folder, speculative_config=NGRAM)
    assert tokens_of(ask(other, params)) == tokens_of(expected)
    metrics = other.engine.metrics()
    assert 0 < metrics.spec_decode_num_accepted_tokens <= metrics.spec_decode_num_draft_tokens
    assert is_cut or metrics.spec_decode_num_accepted_tokens < metrics.spec_decode_num_draft_tokens
    other.close()


def _not_cut(draft: Draft, admits: object) -> Draft:
    return draft


def test_an_answer_ends_where_its_grammar_does(llm: LLM) -> None:
    [output] = ask(llm, WORD, ["x"])
    [answer] = output.outputs
    assert re.fullmatch("[a-f]{12}", answer.text)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert EOS not in answer.token_ids, "no step is spent on an end that is certain"
    [cut] = ask(llm, replace(WORD, max_tokens=3), ["x"])[0].outputs
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    [exact] = ask(llm, replace(WORD, max_tokens=len(answer.token_ids)), ["x"])[0].outputs
    assert (exact.text, exact.finish_reason) == (answer.text, "stop")


def test_an_answer_may_end_where_its_grammar_lets_it(llm: LLM) -> None:
    params = replace(
        WORD, structured_outputs=StructuredOutputs(regex="[0-9]*"), logit_bias={EOS: 4.0}, n=8, max_tokens=60
    )
    for length in (0, 5):
        [output] = ask(llm, replace(params, min_tokens=length), ["x"])
        for each in output.outputs:
            assert re.fullmatch("[0-9]*", each.text)
            assert length <= len(each.token_ids) <= 60
        assert "stop" in {each.finish_reason for each in output.outputs}


@pytest.mark.parametrize("kind", ["json_object", "choice", "grammar"])
def test_every_kind_of_constraint_holds(llm: LLM, kind: str) -> None:
    constraints: dict[str, dict[str, Any]] = {
        "json_object": {"json_object": True},
        "choice": {"choice": ["yes", "no", "ünïcode 😀", 'q"uote\\']},
        "grammar": {"grammar": 'start: "SELECT " NAME " FROM " NAME ";"\nNAME: /[a-z]{1,4}/'},
    }
    constraint = constraints[kind]
    params = SamplingParams(
        temperature=1.0, seed=2, max_tokens=120, n=6, structured_outputs=StructuredOutputs(**constraint)
    )
    answers = [each for output in ask(llm, params) for each in output.outputs if each.finish_reason == "stop"]
    assert answers
    for each in answers:
        if kind == "json_object":
            assert type(json.loads(each.text)) is dict
        elif kind == "choice":
            assert each.text in constraint["choice"]
        else:
            assert re.fullmatch("SELECT [a-z]{1,4} FROM [a-z]{1,4};", each.text)


def test_a_stop_string_or_a_stop_token_ends_an_answer_early(llm: LLM) -> None:
    whole = ask(llm, GREEDY, ["x"])[0].outputs[0]
    stopped = ask(llm, replace(GREEDY, stop='"name"'), ["x"])[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"name"')
    assert whole.text.startswith(stopped.text)
    token = whole.token_ids[2]
    stopped = ask(llm, replace(GREEDY, stop_token_ids=[token]), ["x"])[0].outputs[0]
    assert stopped.stop_reason == token


def test_allowed_tokens_and_a_grammar_hold_together_or_fail_together(llm: LLM) -> None:
    letters = [llm.get_tokenizer().encode_text(each)[0] for each in "abc"]
    [answer] = ask(llm, replace(WORD, allowed_token_ids=letters), ["x"])[0].outputs
    assert re.fullmatch("[abc]{12}", answer.text)
    for contradiction in (
        replace(WORD, allowed_token_ids=llm.get_tokenizer().encode_text("z")),
        replace(WORD, min_tokens=30),
    ):
        neighbour, failed, other = llm.generate(["x"] * 3, [WORD, contradiction, CHOICE], use_tqdm=False)
        assert failed.error is not None
        assert "structured_outputs" in failed.error
        assert [each.finish_reason for each in failed.outputs] == ["error"]
        assert neighbour.outputs[0].finish_reason == "stop"
        assert other.outputs[0].text in ("yes", "no")
        assert is_at_rest(llm)


@pytest.mark.parametrize(
    "place",
    ["mask", "consume", *(pytest.param(each, marks=pytest.mark.prove) for each in ("num_admitted", "is_complete"))],
)
def test_a_fault_in_one_matcher_fails_its_sequence_alone(
    folder: Path, llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(["x"] * 3, [WORD, GREEDY, SAMPLED], use_tqdm=False)
    broken: list[GrammarMatcher] = []
    original = vars(GrammarMatcher)[place]

    def faulty(self: GrammarMatcher, *given: Any) -> Any:
        if self.num_consumed == 4 and not broken:
            broken.append(self)
        if broken and self is broken[0]:
            raise GrammarError("planted")
        return original.fget(self) if place == "is_complete" else original(self, *given)

    monkeypatch.setattr(GrammarMatcher, place, property(faulty) if place == "is_complete" else faulty)
    other = tiny(folder, speculative_config=NGRAM)
    found = other.generate(["x"] * 3, [WORD, GREEDY, SAMPLED], use_tqdm=False)
    failed = [output.error is not None and "planted" in output.error for output in found]
    # A guess that cannot be judged is not made, which is no fault of the answer.
    assert sum(failed) == (0 if place == "num_admitted" else 1)
    assert all(
        has_failed or each.outputs[0].token_ids == right.outputs[0].token_ids
        for has_failed, each, right in zip(failed, found, expected, strict=True)
    )
    assert is_at_rest(other)
    other.close()


def test_an_answer_goes_on_after_a_pause_and_ends_when_cancelled(folder: Path, llm: LLM) -> None:
    expected = ask(llm, SAMPLED, ["x"])[0].outputs[0].token_ids
    engine = tiny(folder).engine
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("x")
    paused, cancelled = engine.submit(prompt, SAMPLED), engine.submit(prompt, replace(SAMPLED, seed=11))
    for number in range(400):
        if number == 5:
            engine.pause(paused)
            engine.cancel(cancelled)
        if number == 9:
            engine.resume(paused)
        engine.step()
        if engine.is_finished(paused):
            break
    assert engine.pop_output(paused).outputs[0].token_ids == expected
    assert engine.pop_output(cancelled).outputs[0].finish_reason == FinishReason.ABORT
    engine.close()


def test_an_interruption_between_two_steps_loses_no_place_in_the_grammar(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(llm, SAMPLED, ["x"])[0].outputs[0].token_ids
    engine = tiny(folder).engine
    assert engine.tokenizer is not None
    request, original, calls = engine.submit(engine.tokenizer.encode("x"), SAMPLED), GrammarMatcher.consume, [0]

    def interrupted(self: GrammarMatcher, tokens: Sequence[int]) -> None:
        original(self, tokens)
        calls[0] += 1
        if calls[0] in (3, 9):
            raise KeyboardInterrupt

    monkeypatch.setattr(GrammarMatcher, "consume", interrupted)
    num_interrupted = 0
    while not engine.is_finished(request):
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupted += 1
    assert num_interrupted == 2
    assert engine.pop_output(request).outputs[0].token_ids == expected
    engine.close()


def test_what_cannot_be_held_is_refused_alone(folder: Path, llm: LLM) -> None:
    wrong = replace(GREEDY, structured_outputs=StructuredOutputs(json={"type": "array", "uniqueItems": True}))
    refused, fine = llm.generate(["x", "x"], [wrong, GREEDY], use_tqdm=False)
    assert refused.error is not None
    assert "'uniqueItems'" in refused.error
    assert fine.error is None
    with pytest.raises(RequestError, match="uniqueItems"):
        llm.stream("x", wrong)
    blind = tiny(folder, skip_tokenizer_init=True)
    [output] = blind.generate([{"prompt_token_ids": [5]}], GREEDY, use_tqdm=False)
    assert output.error is not None
    assert "the tokenizer was not loaded" in output.error
    blind.close()


def test_a_closed_engine_says_that_it_is_closed(folder: Path) -> None:
    llm = tiny(folder)
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate("x", WORD, use_tqdm=False)
    with pytest.raises(EngineClosedError):
        llm.stream("x", WORD)


def test_more_constraints_than_are_kept_are_compiled_once_each(folder: Path) -> None:
    llm = tiny(folder)
    params = [replace(WORD, structured_outputs=StructuredOutputs(regex=f"[a-f]{{2}}{each}")) for each in range(80)]
    outputs = llm.generate(["x"] * len(params), params, use_tqdm=False)
    assert [output.outputs[0].text[2:] for output in outputs] == [str(each) for each in range(80)]
    assert llm.engine.grammars is not None
    assert llm.engine.grammars.num_compiled == 80
    llm.close()


def _roll_rows(patch: pytest.MonkeyPatch) -> None:
    original = row_masks

    def rolled(masks: Sequence[Any]) -> TokenMasks | None:
        return original([*masks[1:], *masks[:1]])

    patch.setattr(sampler_module, "row_masks", rolled)


def _one_step_late(patch: pytest.MonkeyPatch) -> None:
    original = SequenceConstraint.mask
    before: dict[int, Any] = {}

    def late(self: SequenceConstraint, adjustment: Any) -> Any:
        found = original(self, adjustment)
        last = before.get(id(self), found)
        before[id(self)] = found
        return last

    patch.setattr(SequenceConstraint, "mask", late)


def _no_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GrammarMatcher, "rollback", lambda self, count: None)


def _shared_matcher(patch: pytest.MonkeyPatch) -> None:
    made: dict[int, GrammarMatcher] = {}
    original = CompiledGrammar.matcher
    patch.setattr(CompiledGrammar, "matcher", lambda self: made.setdefault(id(self), original(self)))


def _greedy_rows_free(patch: pytest.MonkeyPatch) -> None:
    original = live_module.LiveSequence._mask

    def free(self: live_module.LiveSequence, place: int) -> Any:
        found = original(self, place)
        return None if self.params.temperature == 0.0 else found

    patch.setattr(live_module.LiveSequence, "_mask", free)


def _end_allowed(patch: pytest.MonkeyPatch) -> None:
    original = GrammarMatcher.mask

    def early(self: GrammarMatcher) -> Any:
        found = original(self).copy()
        found[0] |= 1 << EOS
        return found

    patch.setattr(GrammarMatcher, "mask", early)


def _free_behind_guesses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceConstraint, "behind", lambda self, guesses, parents, adjustments: [None] * len(guesses))


def _mask_undone_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampler_module, "row_masks", lambda masks: None)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "mask of another row": _roll_rows,
    "mask one step late": _one_step_late,
    "no rollback behind guesses": _no_rollback,
    "matcher shared between continuations": _shared_matcher,
    "no mask for greedy rows": _greedy_rows_free,
    "end allowed early": _end_allowed,
    "no mask behind guesses": _free_behind_guesses,
    "no masks": _mask_undone_early,
}


@pytest.mark.prove
@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_mutants_are_caught(folder: Path, llm: LLM, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [GREEDY, replace(SAMPLED, n=2), replace(WORD, logit_bias={EOS: 20.0}), TEXT]
    expected = llm.generate(PROMPTS * 2, asked, use_tqdm=False)
    lie(monkeypatch, llm, expected)
    if name is not None:
        MUTANTS[name](monkeypatch)
    other = tiny(folder, speculative_config=NGRAM)
    found = other.generate(PROMPTS * 2, asked, use_tqdm=False)
    assert (tokens_of(found) == tokens_of(expected)) == (name is None)
    other.close()
