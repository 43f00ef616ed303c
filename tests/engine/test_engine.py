"""Requests in, tokens out: batching changes no answer, and one bad request harms no other."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy
import pytest
import torch

from sightline import LLM, RequestOutput, SamplingParams
from sightline.core.errors import ConfigError, EngineClosedError, RequestError
from sightline.core.request import FinishReason
from sightline.engine.live import LiveSequence
from sightline.llm import EngineSettings, TokensPrompt
from support.engines import is_at_rest
from support.tiny_models import VOCAB, make_model, random_prompts, reference_logits

LENGTHS = [3, 40, 1, 17, 64, 9]


# The hybrid has all that the plain model has, and windows: the plain one is a proof.
@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.prove), "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param))
    make_model(str(request.param)).save_pretrained(path)
    return path


def tiny(folder: Path, **changes: object) -> LLM:
    settings: EngineSettings = {"skip_tokenizer_init": True, "cache_tokens": 2048, "paranoid": True}
    settings.update(changes)
    return LLM(str(folder), **settings)


def tokens_of(lengths: list[int]) -> list[TokensPrompt]:
    return [{"prompt_token_ids": prompt} for prompt in random_prompts(lengths)]


def answers(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=12, ignore_eos=True)


def test_greedy_tokens_are_the_argmax_of_transformers(tmp_path: Path) -> None:
    model = make_model("gemma3")
    model.save_pretrained(tmp_path)
    [prompt] = random_prompts([12])
    [output] = tiny(tmp_path).generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=20, ignore_eos=True))
    sequence = [*prompt, *output.outputs[0].token_ids]
    assert reference_logits(model, sequence)[11:-1].argmax(-1).tolist() == list(output.outputs[0].token_ids)


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=12, ignore_eos=True), SAMPLED], ids=["greedy", "sampled"])
def test_batch_chunks_pages_and_neighbours_change_no_token(folder: Path, params: SamplingParams) -> None:
    prompts = tokens_of(LENGTHS)
    llm = tiny(folder, prefix_caching=False)
    alone = [answers(llm.generate(prompt, params))[0] for prompt in prompts]
    assert answers(tiny(folder).generate(prompts, params)) == alone
    assert answers(tiny(folder, max_num_batched_tokens=7, max_num_seqs=3).generate(prompts, params)) == alone
    assert answers(tiny(folder, page_size=1, cache_tokens=100, max_model_len=100).generate(prompts, params)) == alone


def test_a_pool_for_one_sequence_serves_them_one_after_another(folder: Path) -> None:
    llm = tiny(folder, cache_tokens=96, max_model_len=96)
    outputs = llm.generate(tokens_of(LENGTHS), SamplingParams(max_tokens=None, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) + length for output, length in zip(outputs, LENGTHS, strict=True)] == [
        96
    ] * 6
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert is_at_rest(llm)


def test_the_seed_decides_and_is_echoed(folder: Path) -> None:
    llm = tiny(folder)
    prompts = tokens_of([5] * 4)[:1] * 4
    free = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate(prompts, free)
    assert len(set(answers(outputs))) > 1, "without a seed each request draws its own"
    params = outputs[0].params
    assert params is not None
    assert all(output.params is not None and output.params.seed < 2**53 for output in outputs), "JSON cannot hold it"
    repeated = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=params.seed)
    assert answers(llm.generate(prompts, repeated)) == [outputs[0].outputs[0].token_ids] * 4


def test_the_engines_seed_makes_a_whole_run_repeatable(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = [answers(tiny(folder, seed=5).generate(tokens_of(LENGTHS), params)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_bad_requests_fail_alone_and_say_why(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny(folder, max_model_len=64)
    good = random_prompts([6])[0]
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": good},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [5] * 64},
        {"prompt_token_ids": [5, VOCAB]},
        {"prompt_token_ids": [5, -1]},
        {"prompt_token_ids": good},
    ]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert outputs[0].outputs[0].token_ids == outputs[5].outputs[0].token_ids
    assert len(outputs[0].outputs[0].token_ids) == 8
    errors = [str(output.error) for output in outputs[1:5]]
    assert "at least one token" in errors[0]
    assert "at most 63 tokens" in errors[1]
    assert f"from 0 to {VOCAB - 1}, got {VOCAB} at position 1" in errors[2]
    assert "got -1 at position 1" in errors[3]
    assert [output.outputs[0].finish_reason for output in outputs[1:5]] == ["error"] * 4
    assert caplog.text.count("was refused") == 4
    assert is_at_rest(llm)


def test_text_without_a_tokenizer_is_a_clear_error(folder: Path) -> None:
    [output] = tiny(folder).generate("hello")
    assert "prompt_token_ids" in str(output.error)
    with pytest.raises(RequestError, match="prompt_token_ids"):
        tiny(folder).stream("hello")


def test_a_nan_in_one_request_fails_that_request_alone(folder: Path) -> None:
    prompts = tokens_of([4, 9])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    healthy = answers(tiny(folder).generate(prompts, params))
    llm = tiny(folder)
    first, second = (llm.engine.submit(prompt["prompt_token_ids"], params) for prompt in prompts)
    llm.engine.step()
    for pool in llm.engine.runtime.store.pools:
        page = pool.table.owned(1)[0]
        pool.plane("k")[:, page * pool.page_size] = torch.nan
    while llm.engine.has_work:
        llm.engine.step()
    broken, whole = llm.engine.pop_output(first), llm.engine.pop_output(second)
    assert broken.outputs[0].finish_reason == "error"
    assert "NaN" in str(broken.error)
    assert whole.outputs[0].token_ids == healthy[1]
    assert is_at_rest(llm)


def test_end_tokens_stop_and_are_not_run_past(folder: Path) -> None:
    llm = tiny(folder)
    [free] = llm.generate(tokens_of([8])[0], SamplingParams(max_tokens=24, ignore_eos=True))
    stop = free.outputs[0].token_ids[5]
    first = free.outputs[0].token_ids.index(stop)
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    [stopped] = llm.generate(tokens_of([8])[0], params)
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[: first + 1]
    assert stopped.outputs[0].finish_reason == "stop"


def test_cancelling_frees_pages_in_every_phase(folder: Path) -> None:
    llm = tiny(folder, max_num_batched_tokens=8, max_num_seqs=2)
    engine = llm.engine
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    decoding, prefilling, waiting = (engine.submit(prompt, params) for prompt in random_prompts([4, 40, 5]))
    engine.step()
    engine.step()
    for request_id in (decoding, prefilling, waiting):
        thread = threading.Thread(target=engine.cancel, args=(request_id,))
        thread.start()
        thread.join()
    engine.step()
    outputs = [engine.pop_output(request_id) for request_id in (decoding, prefilling, waiting)]
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 3
    assert len(outputs[0].outputs[0].token_ids) == 2
    assert outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids == ()
    assert is_at_rest(llm)
    engine.cancel("no such request")
    engine.step()


def test_streams_interleave_and_closing_one_cancels_it(folder: Path) -> None:
    llm = tiny(folder)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = tokens_of([5, 9])
    expected = answers(llm.generate(prompts, params))
    left, right = (llm.stream(prompt, params) for prompt in prompts)
    head = [next(left), next(right), next(left)]
    assert [delta.finish_reason for delta in head] == [None] * 3
    rest = list(right)
    left.close()
    assert (*head[1].token_ids, *(token for delta in rest for token in delta.token_ids)) == expected[1]
    assert is_at_rest(llm)


def test_an_interrupted_generate_gives_everything_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny(folder)
    step = llm.engine.step

    def interrupted() -> None:
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(tokens_of([5, 9]))
    assert not llm.engine.has_work
    assert is_at_rest(llm)


def test_a_closed_engine_refuses_work(folder: Path) -> None:
    llm = tiny(folder)
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate(tokens_of([3]))


def test_parameters_one_for_each_prompt(folder: Path) -> None:
    llm = tiny(folder)
    counts = [1, 5, 3]
    outputs = llm.generate(
        tokens_of([4, 4, 4]), [SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == counts
    with pytest.raises(RequestError, match="one for each prompt"):
        llm.generate(tokens_of([4, 4]), [SamplingParams()])


def test_unknown_settings_and_shapes_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is not a setting of the engine; nearest: "):
        LLM(str(folder), tensor_parallel=2)  # type: ignore[call-arg]
    [output] = tiny(folder).generate([{"tokens": [1]}])  # type: ignore[list-item]
    assert "expected a prompt as text" in str(output.error)


def test_low_precision_runs_end_to_end(folder: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        [output] = tiny(folder, dtype=dtype).generate(tokens_of([9])[0], SamplingParams(max_tokens=6, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 6


def write_generation_config(folder: Path, **fields: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))


def test_the_models_own_sampling_defaults_apply_and_are_echoed(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    write_generation_config(
        tmp_path, do_sample=True, temperature=0.6, top_p=0.9, top_k=7, eos_token_id=[2, 50], transformers_version="5"
    )
    llm = tiny(tmp_path)
    [output] = llm.generate(tokens_of([4])[0], SamplingParams(max_tokens=2))
    assert output.params is not None
    assert (output.params.temperature, output.params.top_p, output.params.top_k) == (0.6, 0.9, 7)
    assert output.params.eos_token_ids == {2, 50}
    [asked] = llm.generate(tokens_of([4])[0], SamplingParams(max_tokens=2, temperature=0.0, top_p=0.5))
    assert asked.params is not None
    assert (asked.params.temperature, asked.params.top_p, asked.params.top_k) == (0.0, 0.5, 7)


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
    ],
)
def test_decoding_is_greedy_where_neither_caller_nor_model_asks_for_sampling(
    tmp_path: Path, fields: dict[str, object], temperature: float
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    write_generation_config(tmp_path, **fields)
    [output] = tiny(tmp_path).generate(tokens_of([4])[0], SamplingParams(max_tokens=1))
    assert output.params is not None
    assert output.params.temperature == temperature


def test_a_model_default_that_is_not_supported_is_in_the_ledger(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    write_generation_config(tmp_path, no_repeat_ngram_size=3)
    assert any("no_repeat_ngram_size" in entry.subject for entry in tiny(tmp_path).engine.ledger)
    with pytest.raises(ConfigError, match="no_repeat_ngram_size"):
        tiny(tmp_path, strict=True)


def test_a_stream_that_nobody_holds_any_more_is_ended(folder: Path) -> None:
    llm = tiny(folder)
    stream = llm.stream(tokens_of([5])[0], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert not is_at_rest(llm)
    del stream
    llm.engine.step()
    assert is_at_rest(llm)
    assert not llm.engine.has_work


def test_a_finished_stream_is_forgotten_and_ends(folder: Path) -> None:
    llm = tiny(folder)
    stream = llm.stream(tokens_of([5])[0], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(list(stream)) == 3
    assert list(stream) == []
    assert llm.engine._live == {}


def test_prompts_of_array_integers_are_taken_as_they_are(folder: Path) -> None:
    llm = tiny(folder)
    [prompt] = random_prompts([6])
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    as_array: TokensPrompt = {"prompt_token_ids": list(numpy.array(prompt))}
    assert answers(llm.generate([as_array, {"prompt_token_ids": prompt}], params)) == answers(
        llm.generate([{"prompt_token_ids": prompt}] * 2, params)
    )


def test_an_interrupted_commit_loses_and_repeats_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = random_prompts([4, 9, 6]), SamplingParams(max_tokens=10, ignore_eos=True)
    expected = answers(tiny(folder).generate([{"prompt_token_ids": prompt} for prompt in prompts], params))
    engine = tiny(folder).engine
    requests = [engine.submit(prompt, params) for prompt in prompts]
    take_in, calls = engine._take_in, iter(range(100))

    def interrupted(live: LiveSequence) -> None:
        if next(calls) in (1, 5, 9):
            raise KeyboardInterrupt
        take_in(live)

    monkeypatch.setattr(engine, "_take_in", interrupted)
    interruptions = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions == 3
    assert [engine.pop_output(request).outputs[0].token_ids for request in requests] == expected


def test_degradations_are_logged_by_whoever_starts_an_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("llama").save_pretrained(tmp_path)
    write_generation_config(tmp_path, no_repeat_ngram_size=3)
    tiny(tmp_path)
    assert "degraded: " in caplog.text
    assert "no_repeat_ngram_size" in caplog.text


def test_an_empty_model_name_is_not_the_default_model() -> None:
    with pytest.raises(ConfigError, match="got an empty name"):
        LLM("")


def test_a_prompt_with_keys_beside_it_is_refused(folder: Path) -> None:
    both = {"prompt": "hi", "prompt_token_ids": [7, 8]}
    [output] = tiny(folder).generate([both])  # type: ignore[list-item]
    assert "got keys prompt, prompt_token_ids" in str(output.error)
    assert output.prompt == "hi"


def test_a_stream_of_a_closed_engine_says_so(folder: Path) -> None:
    llm = tiny(folder)
    stream = llm.stream(tokens_of([5])[0])
    llm.close()
    with pytest.raises(EngineClosedError, match="ended with it"):
        next(stream)


def test_request_ids_are_unique_and_not_counted(folder: Path) -> None:
    outputs = tiny(folder).generate([*tokens_of([3, 3]), {"prompt_token_ids": []}], SamplingParams(max_tokens=1))
    ids = [output.request_id for output in outputs]
    assert len(set(ids)) == 3
    assert all(len(request_id) >= 16 for request_id in ids)


def test_an_interruption_while_a_request_ends_does_not_run_it_past_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny(folder)
    [free] = llm.generate(tokens_of([8])[0], SamplingParams(max_tokens=24, ignore_eos=True))
    stop = free.outputs[0].token_ids[5]
    expected = free.outputs[0].token_ids[: free.outputs[0].token_ids.index(stop) + 1]
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    request = llm.engine.submit(tokens_of([8])[0]["prompt_token_ids"], params)
    finish = LiveSequence.finish

    def interrupted(self: LiveSequence, reason: FinishReason) -> None:
        monkeypatch.setattr(LiveSequence, "finish", finish)
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveSequence, "finish", interrupted)
    interruptions = 0
    while llm.engine.has_work:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            interruptions += 1
    output = llm.engine.pop_output(request)
    assert interruptions == 1
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (expected, "stop")
    assert is_at_rest(llm)


def test_an_interruption_while_pages_go_back_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny(folder)
    stream = llm.stream(tokens_of([5])[0], SamplingParams(max_tokens=9, ignore_eos=True))
    next(stream)
    store = llm.engine.runtime.store
    with monkeypatch.context() as broken:
        broken.setattr(store, "close_row", lambda row: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    stream.close()
    llm.engine.step()
    assert is_at_rest(llm)


def test_prompt_log_probabilities_are_refused_where_a_stream_could_not_tell_them(folder: Path) -> None:
    with pytest.raises(RequestError, match="got them with a stream"):
        tiny(folder).stream(tokens_of([5])[0], SamplingParams(prompt_logprobs=1))
