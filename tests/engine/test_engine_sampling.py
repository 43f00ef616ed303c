"""Stop strings, several continuations, log probabilities and penalties, through the whole engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import tokenizers
import torch
from transformers import PreTrainedModel

from sightline import LLM, RequestOutput, SamplingParams, TextDelta
from sightline.core.errors import RequestError
from sightline.core.request import CompletionOutput, PositionLogprobs, Terms
from sightline.engine.calls import SharedEngine
from sightline.engine.engine import Engine
from sightline.engine.intake import Intake
from sightline.engine.live import LiveSequence
from sightline.engine.live import start as start_sequences
from sightline.llm import EngineSettings, TokensPrompt
from sightline.models.loading.generation import GenerationDefaults
from sightline.scheduler.sequence import SequenceState
from sightline.text.detokenizer import _ByteLevel
from sightline.text.tokenizers.tokenizer import PromptTokens, Tokenizer
from support.case_marks import proofs
from support.engines import is_at_rest
from support.tiny_models import VOCAB, make_model, random_prompts, reference_logits

LOGPROB_TOLERANCE = 1e-4
SAMPLED = SamplingParams(temperature=1.0, seed=8, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


def tiny(folder: Path, **changes: object) -> LLM:
    settings: EngineSettings = {"skip_tokenizer_init": True, "cache_tokens": 2048, "paranoid": True}
    settings.update(changes)
    return LLM(str(folder), **settings)


def spelling(token: int) -> str:
    """One to four letters, each spelling once; a few tokens are one byte of a character of two or three."""
    parts_of_characters = {90: "Ã", 91: "©", 92: "â", 93: "Ĥ", 94: "¬"}
    if token in parts_of_characters:
        return parts_of_characters[token]
    head = spelling(token // 4 - 1) if token >= 4 else ""
    return head + "abcd"[token % 4]


def with_text(llm: LLM) -> LLM:
    """Gives the engine a vocabulary of letters, so that text means something."""
    vocabulary = {spelling(token): token for token in range(VOCAB)}
    assert len(vocabulary) == VOCAB
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer, engine = Tokenizer(backend, PromptTokens(None, frozenset()), None), llm.engine
    llm._generating = SharedEngine(Engine(engine.runtime, tokenizer, engine.generation, engine.ledger))
    return llm


def one(llm: LLM, params: SamplingParams, length: int = 9) -> RequestOutput:
    [output] = llm.generate(tokens_of(length), params)
    assert output.error is None
    return output


def tokens_of(length: int) -> TokensPrompt:
    return {"prompt_token_ids": random_prompts([length])[0]}


def with_changes(params: SamplingParams, **changes: object) -> SamplingParams:
    return SamplingParams(**{**{name: getattr(params, name) for name in params.__dataclass_fields__}, **changes})


def text_of(llm: LLM, tokens: tuple[int, ...]) -> str:
    return llm.get_tokenizer().decode(tokens)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", [0, *proofs(*range(1, 6))])
def test_a_stop_string_cuts_the_text_that_would_have_come(folder: Path, seed: int, include: bool) -> None:
    llm = with_text(tiny(folder))
    free = one(llm, with_changes(SAMPLED, seed=seed)).outputs[0]
    for start, length in ((3, 1), (7, 4), (11, 9), (len(free.text) - 5, 5)):
        stop = free.text[start : start + length]
        cut = free.text.find(stop)
        params = with_changes(SAMPLED, seed=seed, stop=["never", stop], include_stop_str_in_output=include)
        stopped = one(llm, params).outputs[0]
        assert stopped.text == free.text[: cut + (len(stop) if include else 0)]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        pieces = list(llm.stream(tokens_of(9), params))
        assert "".join(piece.text for piece in pieces) == stopped.text
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", stop)
    assert is_at_rest(llm)


def test_a_stop_string_ends_the_request_with_the_token_that_completes_it(folder: Path) -> None:
    llm = with_text(tiny(folder))
    free = one(llm, SAMPLED).outputs[0]
    stop = free.text[4:10]
    stopped = one(llm, with_changes(SAMPLED, stop=stop)).outputs[0]
    assert stop in text_of(llm, stopped.token_ids)
    assert stop not in text_of(llm, stopped.token_ids[:-1])


def test_what_may_begin_a_stop_string_is_held_back_and_given_out_at_the_end(folder: Path) -> None:
    llm = with_text(tiny(folder))
    free = one(llm, SAMPLED).outputs[0]
    stop = free.text[-3:] + "never"
    pieces = list(llm.stream(tokens_of(9), with_changes(SAMPLED, stop=stop)))
    assert "".join(piece.text for piece in pieces) == free.text
    assert pieces[-1].text.endswith(free.text[-3:]), "it was shown before it was certain"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("length", None)


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_stops_are_found_across_retractions_chunks_and_steps_in_flight(folder: Path, in_flight: bool) -> None:
    lengths = [9, 14, 3, 11]
    prompts = [tokens_of(length) for length in lengths]
    free = with_text(tiny(folder)).generate(prompts, SAMPLED)
    stops = [output.outputs[0].text[30:36] for output in free]
    small = with_text(
        tiny(
            folder,
            cache_tokens=48,
            max_model_len=48,
            page_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=7,
            async_scheduling=in_flight,
        )
    )
    params = [with_changes(SAMPLED, stop=stop) for stop in stops[:3]]
    last_token = free[3].outputs[0].token_ids[20]
    params.append(with_changes(SAMPLED, stop_token_ids=[last_token]))
    outputs = small.generate(prompts, params)
    assert small.engine.num_retractions > 0
    for output, whole, stop in zip(outputs[:3], free, stops, strict=False):
        text = whole.outputs[0].text
        assert output.outputs[0].text == text[: text.find(stop)]
        assert output.outputs[0].stop_reason == stop
    tokens = free[3].outputs[0].token_ids
    assert outputs[3].outputs[0].token_ids == tokens[: tokens.index(last_token) + 1]
    assert is_at_rest(small)


def test_stop_strings_and_stop_tokens_wait_for_the_least_number_of_tokens(folder: Path) -> None:
    llm = with_text(tiny(folder))
    free = one(llm, SAMPLED).outputs[0]
    stop = free.text[:2]
    assert len(one(llm, with_changes(SAMPLED, stop=stop)).outputs[0].token_ids) <= 2
    late = one(llm, with_changes(SAMPLED, stop=stop, min_tokens=20)).outputs[0]
    assert len(late.token_ids) > 20
    assert late.token_ids == free.token_ids[: len(late.token_ids)], "a stop string changes no token"
    forbidden = one(llm, with_changes(SAMPLED, stop_token_ids=free.token_ids[:10], min_tokens=12)).outputs[0]
    assert not set(forbidden.token_ids[:12]) & set(free.token_ids[:10])


def test_the_reason_of_a_stop_is_the_callers_token_and_none_for_the_models_own(folder: Path) -> None:
    llm = with_text(tiny(folder))
    free = one(llm, with_changes(SAMPLED, max_tokens=6)).outputs[0]
    assert (free.finish_reason, free.stop_reason) == ("length", None)
    token = next(token for place, token in enumerate(free.token_ids) if place and token not in free.token_ids[:place])
    place = free.token_ids.index(token)
    for include in (False, True):
        params = with_changes(SAMPLED, stop_token_ids=[token], include_stop_str_in_output=include)
        stopped = one(llm, params).outputs[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
        assert stopped.text == text_of(llm, free.token_ids[: place + include])
    ended = one(llm, SamplingParams(max_tokens=8, logit_bias={2: 100.0})).outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ((2,), "stop", None)


def test_several_continuations_have_seeds_of_their_own_that_do_not_depend_on_how_many(folder: Path) -> None:
    llm = tiny(folder, max_num_seqs=3)
    five = one(llm, with_changes(SAMPLED, n=5)).outputs
    assert [output.index for output in five] == [0, 1, 2, 3, 4]
    assert len({output.token_ids for output in five}) == 5
    assert one(llm, with_changes(SAMPLED, n=2)).outputs == five[:2]
    assert one(llm, SAMPLED).outputs == five[:1]
    assert is_at_rest(llm)


def test_a_stream_of_several_continuations_says_whose_each_piece_is(folder: Path) -> None:
    llm = with_text(tiny(folder, max_num_seqs=2))
    params = with_changes(SAMPLED, n=3, max_tokens=7)
    expected = one(llm, params).outputs
    pieces: dict[int, list[TextDelta]] = {0: [], 1: [], 2: []}
    for delta in llm.stream(tokens_of(9), params):
        pieces[delta.index].append(delta)
    for output in expected:
        mine = pieces[output.index]
        assert "".join(delta.text for delta in mine) == output.text
        assert tuple(token for delta in mine for token in delta.token_ids) == output.token_ids
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["length"]
    assert llm.engine._live == {}


def test_cancelling_several_continuations_frees_all_in_every_phase(folder: Path) -> None:
    llm = tiny(folder, max_num_seqs=2, max_num_batched_tokens=8)
    engine = llm.engine
    request = engine.submit(random_prompts([20])[0], with_changes(SAMPLED, n=4))
    for _ in range(4):
        engine.step()
    engine.cancel(request)
    engine.step()
    output = engine.pop_output(request)
    assert [each.finish_reason for each in output.outputs] == ["abort"] * 4
    assert is_at_rest(llm)
    assert not engine.has_work
    stream = llm.stream(tokens_of(5), with_changes(SAMPLED, n=3))
    next(stream)
    stream.close()
    assert is_at_rest(llm)
    assert not engine.has_work


def check_position(entry: PositionLogprobs, expected: torch.Tensor, token: int, count: int) -> None:
    best = expected.argsort(descending=True)[:count].tolist()
    assert set(entry) == {token, *best}
    for named, told in entry.items():
        assert told.logprob == pytest.approx(float(expected[named]), abs=LOGPROB_TOLERANCE)
        assert told.rank == int((expected >= expected[named]).sum())


def check_logprobs(model: PreTrainedModel, prompt: list[int], output: CompletionOutput, count: int) -> None:
    expected = reference_logits(model, [*prompt, *output.token_ids]).log_softmax(-1)[len(prompt) - 1 :]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for place, (entry, token) in enumerate(zip(output.logprobs, output.token_ids, strict=True)):
        check_position(entry, expected[place], token, count)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_the_log_softmax_of_transformers_whatever_is_sampled(
    model: PreTrainedModel, folder: Path, count: int
) -> None:
    prompt = random_prompts([9])[0]
    params = with_changes(SAMPLED, n=2, temperature=0.7, top_k=30, repetition_penalty=1.3, logprobs=count)
    output = one(with_text(tiny(folder)), params)
    for continuation in output.outputs:
        check_logprobs(model, prompt, continuation, count)
    first = output.outputs[0]
    assert first.logprobs is not None
    token = first.token_ids[0]
    assert next(iter(first.logprobs[0])) == token, "the chosen token comes first"
    assert first.logprobs[0][token].decoded_token == text_of(with_text(tiny(folder)), (token,))
    assert output.prompt_logprobs is None


def test_a_stream_tells_the_logprobs_of_its_tokens(folder: Path) -> None:
    llm = tiny(folder)
    params = with_changes(SAMPLED, max_tokens=6, logprobs=2)
    told = [entry for delta in llm.stream(tokens_of(9), params) for entry in delta.logprobs or ()]
    assert tuple(told) == one(llm, params).outputs[0].logprobs


@pytest.mark.parametrize("chunk", [*proofs(1), 7, 512])
@pytest.mark.parametrize("scored", [1, 5, *proofs(1000)])
def test_prompt_logprobs_in_chunks_are_those_of_transformers(
    model: PreTrainedModel, folder: Path, chunk: int, scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.engine.engine._MAX_SCORED_LOGITS", scored * VOCAB)
    llm = tiny(folder, max_num_batched_tokens=chunk, max_num_seqs=min(3, chunk))
    prompts, counts = random_prompts([23, 1, 12, 2]), [3, 0, None, 1]
    params = [SamplingParams(max_tokens=4, prompt_logprobs=count, ignore_eos=True, n=2) for count in counts]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    plain = tiny(folder).generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(max_tokens=4, ignore_eos=True)
    )
    for prompt, count, output, alone in zip(prompts, counts, outputs, plain, strict=True):
        assert output.outputs[0].token_ids == output.outputs[1].token_ids == alone.outputs[0].token_ids
        if count is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        expected = reference_logits(model, prompt).log_softmax(-1)
        for place, entry in enumerate(output.prompt_logprobs[1:], 1):
            assert entry is not None
            check_position(entry, expected[place - 1], prompt[place], count)
    assert is_at_rest(llm)


def test_greedy_with_a_repetition_penalty_is_what_transformers_generates(model: PreTrainedModel, folder: Path) -> None:
    prompt = random_prompts([9])[0]
    output = one(tiny(folder), SamplingParams(max_tokens=20, repetition_penalty=1.5, ignore_eos=True))
    seen, expected = list(prompt), []
    for token in output.outputs[0].token_ids:
        logits = reference_logits(model, seen)[-1]
        held = torch.tensor(sorted(set(seen)))
        logits[held] = torch.where(logits[held] > 0, logits[held] / 1.5, logits[held] * 1.5)
        expected.append(int(logits.argmax()))
        seen.append(token)
    assert list(output.outputs[0].token_ids) == expected


def test_penalties_make_an_answer_repeat_itself_less(folder: Path) -> None:
    llm = tiny(folder)
    free = one(llm, SamplingParams(max_tokens=60, ignore_eos=True)).outputs[0].token_ids
    for penalty in ("frequency_penalty", "presence_penalty"):
        params = with_changes(SamplingParams(max_tokens=60, ignore_eos=True), **{penalty: 2.0})
        held = one(llm, params).outputs[0].token_ids
        assert max(Counter(held).values()) < max(Counter(free).values())


def test_options_of_neighbours_change_no_token(folder: Path) -> None:
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        with_changes(SAMPLED, repetition_penalty=1.4, n=2),
        with_changes(SAMPLED, logprobs=3, presence_penalty=1.0, frequency_penalty=-0.5),
        with_changes(SAMPLED, prompt_logprobs=2, logit_bias={5: 4.0, 6: -100.0}, min_tokens=5),
    ]
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([9, 30, 4, 17])]
    alone = [
        [each.token_ids for each in tiny(folder).generate(prompt, wanted)[0].outputs]
        for prompt, wanted in zip(prompts, params, strict=True)
    ]
    for changes in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}):
        outputs = tiny(folder, **changes).generate(prompts, params)
        assert [[each.token_ids for each in output.outputs] for output in outputs] == alone


def test_an_interruption_anywhere_in_a_commit_loses_and_repeats_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts([14, 9])
    params = with_changes(
        SAMPLED, max_tokens=8, n=2, logprobs=2, prompt_logprobs=1, repetition_penalty=1.4, frequency_penalty=0.3
    )
    listed: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [(out.outputs, out.prompt_logprobs) for out in tiny(folder).generate(listed, params)]
    engine = tiny(folder, max_num_batched_tokens=9, max_num_seqs=4).engine
    requests = [engine.submit(prompt, params) for prompt in prompts]
    calls = iter(range(10_000))
    commit, take_in, keep = engine._scheduler.commit, engine._take_in, LiveSequence.keep_logprobs

    def interrupting(function: object) -> object:
        def called(*arguments: object) -> None:
            number = next(calls)
            if number % 11 == 5:
                raise KeyboardInterrupt
            function(*arguments)  # type: ignore[operator]
            if number % 11 == 9:
                raise KeyboardInterrupt

        return called

    monkeypatch.setattr(engine._scheduler, "commit", interrupting(commit))
    monkeypatch.setattr(engine, "_take_in", interrupting(take_in))
    monkeypatch.setattr(LiveSequence, "keep_logprobs", interrupting(keep))
    interruptions = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions > 10
    outputs = [engine.pop_output(request) for request in requests]
    for output, (continuations, prompt_logprobs) in zip(outputs, expected, strict=True):
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in continuations]
        for got, wanted in pairwise([output.prompt_logprobs, prompt_logprobs]):
            assert [entry and list(entry) for entry in got or ()] == [entry and list(entry) for entry in wanted or ()]
        for each in output.outputs:
            assert each.logprobs is not None
            assert [next(iter(entry)) for entry in each.logprobs] == list(each.token_ids)


def test_an_interruption_while_a_token_becomes_text_loses_no_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_text(tiny(folder)).engine
    expected = one(with_text(tiny(folder)), SAMPLED).outputs[0]
    feed, calls = _ByteLevel.feed, iter(range(10_000))

    def interrupted(step: _ByteLevel, pieces: Iterable[str]) -> Iterable[str]:
        fed = feed(step, pieces)
        if next(calls) % 3 == 1:
            raise KeyboardInterrupt
        return fed

    monkeypatch.setattr(_ByteLevel, "feed", interrupted)
    request = engine.submit(tokens_of(9)["prompt_token_ids"], SAMPLED)
    interruptions = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions > 10
    assert engine.pop_output(request).outputs[0] == expected


def test_a_large_bias_is_read_once_for_all_prompts_and_continuations() -> None:
    """49,000 biases for 20 prompts took 2.6 s of the engine's loop, while everybody waited."""
    intake = Intake(
        vocab_size=50_000,
        max_model_len=64,
        generation=GenerationDefaults(frozenset()),
        tokenizer=None,
        seed=0,
    )
    params = SamplingParams(logit_bias=dict.fromkeys(range(49_000), 1), n=3)
    adjustments = []
    for _ in range(2):
        request, asked = intake.request([1], params, None, Terms(), 0.0)
        adjustments += [live.adjustment for live in start_sequences(request, asked, None)]
    first = adjustments[0]
    assert first is not None
    assert (first.bias_tokens[[0, -1]].tolist(), set(first.bias_values.tolist())) == ([0, 48_999], {1.0})
    for each in adjustments:
        assert each is not None
        assert numpy.shares_memory(each.bias_tokens, first.bias_tokens)
        assert numpy.shares_memory(each.bias_values, first.bias_values)


def test_a_refused_request_has_as_many_outputs_as_one_that_fails_while_it_runs(folder: Path) -> None:
    llm = tiny(folder)
    params = [with_changes(SAMPLED, n=3, max_tokens=2), with_changes(SAMPLED, n=2, max_tokens=2)]
    refused, fine = llm.generate([{"prompt_token_ids": []}, tokens_of(9)], params)
    assert "at least one token" in str(refused.error)
    assert [(each.index, each.finish_reason, each.token_ids) for each in refused.outputs] == [
        (index, "error", ()) for index in range(3)
    ]
    assert refused.finished
    assert [each.finish_reason for each in fine.outputs] == ["length"] * 2
    assert fine.error is None


def test_a_nan_in_the_prompt_fails_a_request_that_wants_its_logprobs(folder: Path) -> None:
    llm = tiny(folder, max_num_batched_tokens=8)
    broken, whole = (
        llm.engine.submit(prompt, SamplingParams(max_tokens=3, prompt_logprobs=1, ignore_eos=True))
        for prompt in random_prompts([20, 20])
    )
    llm.engine.step()
    for pool in llm.engine.runtime.store.pools:
        pool.plane("k")[:, pool.table.owned(1)[0] * pool.page_size] = torch.nan
    while llm.engine.has_work:
        llm.engine.step()
    assert "NaN" in str(llm.engine.pop_output(broken).error)
    assert llm.engine.pop_output(whole).outputs[0].finish_reason == "length"
    assert is_at_rest(llm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "x"}, "expected stop_token_ids, got stop strings: the tokenizer was not loaded"),
        ({"logit_bias": {VOCAB: 1.0}}, f"expected logit_bias below {VOCAB}, the vocabulary's size, got {VOCAB}"),
        ({"stop_token_ids": [VOCAB]}, f"expected stop_token_ids below {VOCAB}"),
        ({"stop_token_ids": range(VOCAB), "min_tokens": 1}, "leave a token to generate"),
        ({"min_tokens": 60, "max_tokens": None}, "expected min_tokens of at most 55, .* got 60; shorten the prompt"),
    ],
)
def test_what_the_model_cannot_do_is_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    llm = tiny(folder, max_model_len=64)
    with pytest.raises(RequestError, match=message):
        llm.stream(tokens_of(9), with_changes(SAMPLED, **changes))
    assert llm.engine._live == {}


def test_a_request_of_which_one_continuation_is_refused_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny(folder)
    submit = llm.engine._scheduler.submit

    def refusing(sequence: SequenceState) -> None:
        if sequence.index == 1:
            raise RequestError("no room")
        submit(sequence)

    monkeypatch.setattr(llm.engine._scheduler, "submit", refusing)
    with pytest.raises(RequestError, match="no room"):
        llm.stream(tokens_of(40), with_changes(SAMPLED, n=3))
    assert llm.engine._live == {}
    assert not llm.engine.has_work


def test_the_models_own_penalty_and_least_tokens_apply_and_are_echoed(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    fields = {"repetition_penalty": 1.3, "min_p": 0.1, "min_new_tokens": 3, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    llm = tiny(tmp_path, strict=True)
    output = one(llm, SamplingParams(max_tokens=8, logit_bias={2: 100.0}))
    assert output.params is not None
    echoed = output.params
    assert (echoed.repetition_penalty, echoed.min_p, echoed.min_tokens) == (1.3, 0.1, 3)
    assert len(output.outputs[0].token_ids) == 4
    neutral = one(llm, SamplingParams(max_tokens=2, repetition_penalty=1.0, min_tokens=0)).params
    assert neutral is not None
    assert (neutral.repetition_penalty, neutral.min_tokens) == (1.0, 0)
    short = one(llm, SamplingParams(max_tokens=2)).params
    assert short is not None
    assert short.min_tokens == 2, "the model's least is bounded by what was asked for"


def test_an_end_token_beyond_the_vocabulary_touches_no_neighbour(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, VOCAB + 5, 2**31]}))
    params = SamplingParams(max_tokens=6, min_tokens=6)
    forced = [params, SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={5: 100.0})]
    outputs = tiny(tmp_path).generate([tokens_of(9), tokens_of(9)], forced)
    assert outputs[0].params is not None
    assert outputs[0].params.eos_token_ids == {2}
    assert outputs[1].outputs[0].token_ids == (5,) * 6
