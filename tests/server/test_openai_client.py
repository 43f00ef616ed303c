"""OpenAI's own client against a real server, parameter by parameter: whole answers. Streams are in another file."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from sightline import LLM, SamplingParams
from support.openai_suite import (
    MODEL,
    asking,
    chat,
    complete,
    num_cached,
    openai_client,
    said,
    scored,
    tokens_of,
    usage_of,
)
from support.serving import ServedProcess

QUESTION = "What is the capital of France?"
"""Answered in a few tokens, and ended by the model itself."""
BRIEF = "Answer with one word: yes or no?"
"""Answered in three tokens, the last of which ends the turn."""
STORY = "Once upon a time"
NUMBERS = "1, 2, 3, 4,"
CONVERSATIONS: dict[str, list[ChatCompletionMessageParam]] = {
    "text": asking(QUESTION),
    "parts": [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "a cat?"}]}],
    "system": [{"role": "system", "content": "You answer in French."}, {"role": "user", "content": QUESTION}],
    "developer": [{"role": "developer", "content": "You answer in rhyme."}, {"role": "user", "content": QUESTION}],
    "turns": [*asking("Hi"), {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Who are you?"}],
}
PROMPTS = (STORY, NUMBERS, "🦜🦜🦜🦜🦜")
NUM_COMPARED = 12


@pytest.fixture(scope="module")
def client(server: ServedProcess) -> Iterator[OpenAI]:
    with openai_client(server) as opened:
        yield opened


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(cache_tokens=2048, max_model_len=1024)


@pytest.fixture(scope="module")
def offline_texts(offline: LLM) -> dict[str, str]:
    """By conversation or prompt, what `LLM` says to it."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_COMPARED)
    answers = offline.chat(list(CONVERSATIONS.values()), greedy, use_tqdm=False)
    continued = offline.generate(list(PROMPTS), greedy, use_tqdm=False)
    return {
        name: output.outputs[0].text
        for name, output in zip([*CONVERSATIONS, *PROMPTS], [*answers, *continued], strict=True)
    }


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "sightline")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_greedy_answers_equal_those_offline(client: OpenAI, offline_texts: dict[str, str], name: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CONVERSATIONS[name], temperature=0, max_tokens=NUM_COMPARED
    )
    assert answer.choices[0].message.role == "assistant"
    assert said(answer) == [offline_texts[name]]
    assert offline_texts[name]


def test_greedy_continuations_equal_those_offline(client: OpenAI, offline_texts: dict[str, str]) -> None:
    answer = complete(client, list(PROMPTS), max_tokens=NUM_COMPARED)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (index, offline_texts[prompt]) for index, prompt in enumerate(PROMPTS)
    ]


def test_every_form_of_a_prompt_gives_the_same_continuation(client: OpenAI, offline: LLM) -> None:
    assert offline.engine.tokenizer is not None
    tokens = offline.engine.tokenizer.encode_prompt(STORY)
    answers = [complete(client, form, max_tokens=4) for form in (STORY, [STORY], tokens, [tokens], [STORY, STORY])]
    assert [len(answer.choices) for answer in answers] == [1, 1, 1, 1, 2]
    assert len({choice.text for answer in answers for choice in answer.choices}) == 1
    assert [usage_of(answer).prompt_tokens for answer in answers] == [len(tokens)] * 4 + [2 * len(tokens)]


def test_an_answer_has_its_own_time_name_and_id(client: OpenAI) -> None:
    before = int(time.time())
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=asking("Hi"), max_tokens=1)
    after = time.time()
    answer, again = raw.parse(), chat(client, "Hi", max_tokens=1)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert before <= answer.created <= after
    assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"
    assert answer.id != again.id
    assert complete(client, "Hi", max_tokens=1).object == "text_completion"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length_is_bounded_under_both_names(client: OpenAI, field: str) -> None:
    answer = chat(client, QUESTION, **{"max_tokens": None, field: 3})
    assert answer.choices[0].finish_reason == "length"
    usage = usage_of(answer)
    assert (usage.completion_tokens, usage.total_tokens) == (3, usage.prompt_tokens + 3)


def test_an_answer_that_ends_by_itself_says_so(client: OpenAI) -> None:
    answer = chat(client, BRIEF, max_tokens=None)
    assert (said(answer), answer.choices[0].finish_reason) == (["Yes."], "stop")
    assert usage_of(answer).completion_tokens == 3


@pytest.mark.parametrize("field", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=lambda field: next(iter(field)))
def test_truncation_to_one_token_is_greedy_at_any_temperature(client: OpenAI, field: dict[str, float]) -> None:
    greedy = said(chat(client, QUESTION))
    hot = {"temperature": 2.0, "seed": 3}
    assert said(chat(client, QUESTION, **hot, extra_body=field)) == greedy
    assert said(chat(client, QUESTION, **hot)) != greedy


def test_a_seed_repeats_and_another_does_not(client: OpenAI) -> None:
    first, again, other = (said(chat(client, STORY, temperature=1, seed=seed, n=3)) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert len(set(first)) == 3


def test_without_a_seed_answers_differ(client: OpenAI) -> None:
    first, again = (said(chat(client, STORY, temperature=1.5, n=3)) for _ in range(2))
    assert first != again


@pytest.mark.prove
@pytest.mark.parametrize(
    ("prompt", "presence", "frequency"),
    [(STORY, 2.0, 0.0), ("the the the the the", -2.0, 0.0), (NUMBERS, 0.0, 2.0), ("the the the the the", 0.0, -1.0)],
)
def test_penalties_move_each_choice_by_exactly_their_amount(
    client: OpenAI, prompt: str, presence: float, frequency: float
) -> None:
    plain = complete(client, prompt, max_tokens=12)
    penalised = complete(
        client, prompt, max_tokens=12, logprobs=20, presence_penalty=presence, frequency_penalty=frequency
    )
    logprobs = scored(penalised.choices[0])
    counts: Counter[str] = Counter()
    for token, rivals in zip(logprobs.tokens, logprobs.rivals or [], strict=True):
        assert rivals is not None
        # Log probabilities are of the model's own distribution: what was chosen is the likeliest after the penalties.
        moved = {
            rival: value - presence * (counts[rival] > 0) - frequency * counts[rival] for rival, value in rivals.items()
        }
        assert token == max(moved, key=moved.__getitem__)
        counts[token] += 1
    assert penalised.choices[0].text != plain.choices[0].text


def test_a_repetition_penalty_keeps_the_prompts_words_out(client: OpenAI) -> None:
    assert "," in complete(client, NUMBERS).choices[0].text
    assert "," not in complete(client, NUMBERS, extra_body={"repetition_penalty": 100.0}).choices[0].text


def test_logit_bias_forces_and_forbids(client: OpenAI, offline: LLM) -> None:
    assert offline.engine.tokenizer is not None
    [cat], [the] = (offline.engine.tokenizer.encode_text(text) for text in (" cat", "The"))
    assert said(chat(client, QUESTION, max_tokens=3, logit_bias={str(cat): 100})) == [" cat cat cat"]
    assert said(chat(client, QUESTION, max_tokens=1)) == ["The"]
    assert said(chat(client, QUESTION, max_tokens=1, logit_bias={str(the): -100})) != ["The"]


@pytest.mark.parametrize("count", [None, 0, 1, 5, 20])
def test_log_probabilities_are_as_many_as_asked_for_and_sorted(client: OpenAI, count: int | None) -> None:
    answer = chat(client, QUESTION, max_tokens=4, logprobs=True, top_logprobs=count)
    places = tokens_of(answer)
    assert len(places) == 4
    assert "".join(place.token for place in places) == said(answer)[0]
    for place in places:
        values = [rival.logprob for rival in place.top_logprobs]
        assert len(values) == (count or 0)
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in [place.logprob, *values])
        assert sum(map(math.exp, values)) <= 1 + 1e-6
        assert bytes(place.bytes or []).decode() == place.token
        if count:
            chosen = place.top_logprobs[0]
            assert (chosen.token, chosen.logprob, chosen.bytes) == (place.token, place.logprob, place.bytes)


def test_log_probabilities_of_a_sampled_token_are_the_models_own(client: OpenAI) -> None:
    answer = chat(client, STORY, temperature=1.5, seed=1, logprobs=True, top_logprobs=5)
    surprising = 0
    for place in tokens_of(answer):
        shown = {rival.token: rival.logprob for rival in place.top_logprobs}
        assert place.logprob == shown.get(place.token, place.logprob)
        assert place.token in shown or place.logprob <= min(shown.values())
        surprising += place.token != place.top_logprobs[0].token
    assert surprising


def test_without_asking_there_are_no_log_probabilities(client: OpenAI) -> None:
    assert chat(client, QUESTION, max_tokens=1).choices[0].logprobs is None
    assert complete(client, STORY, max_tokens=1).choices[0].logprobs is None


@pytest.mark.parametrize("stop", [" France", ["Berlin", "ance is"]])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(client: OpenAI, stop: str | list[str]) -> None:
    answer = chat(client, QUESTION, max_tokens=16, stop=stop)
    found = stop if isinstance(stop, str) else stop[1]
    whole = "The capital of France is Paris."
    [choice] = answer.choices
    assert choice.message.content == whole[: whole.index(found)]
    assert (choice.finish_reason, (choice.model_extra or {})["stop_reason"]) == ("stop", found)
    kept = chat(client, QUESTION, max_tokens=16, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert said(kept) == [whole[: whole.index(found)] + found]


def test_a_stop_token_ends_the_answer(client: OpenAI, offline: LLM) -> None:
    assert offline.engine.tokenizer is not None
    [france] = offline.engine.tokenizer.encode_text(" France")
    answer = chat(client, QUESTION, extra_body={"stop_token_ids": [france]})
    assert said(answer) == ["The capital of"]
    assert (answer.choices[0].model_extra or {})["stop_reason"] == france
    kept = chat(client, QUESTION, extra_body={"stop_token_ids": [france], "include_stop_str_in_output": True})
    assert said(kept) == ["The capital of France"]


def test_an_end_token_can_be_ignored_put_off_and_shown(client: OpenAI) -> None:
    ignored = chat(client, BRIEF, max_tokens=6, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert ignored.choices[0].finish_reason == "length"
    assert said(ignored)[0].startswith("Yes.<|im_end|>")
    hidden = chat(client, BRIEF, max_tokens=6, extra_body={"ignore_eos": True})
    assert "<|" not in said(hidden)[0]
    put_off = chat(client, BRIEF, max_tokens=6, extra_body={"min_tokens": 5})
    assert usage_of(put_off).completion_tokens >= 5
    assert said(put_off)[0].startswith("Yes.")


def test_log_probabilities_of_the_prompt_come_with_the_answer(client: OpenAI) -> None:
    answer = chat(client, QUESTION, max_tokens=1, extra_body={"prompt_logprobs": 2})
    first, *others = (answer.model_extra or {})["prompt_logprobs"]
    assert first is None
    assert len(others) == usage_of(answer).prompt_tokens - 1
    for place in others:
        assert 2 <= len(place) <= 3
        assert all(each["logprob"] <= 0 and each["rank"] >= 1 for each in place.values())
    text = complete(client, "Paris is", max_tokens=1, extra_body={"prompt_logprobs": 0})
    _, *others = (text.choices[0].model_extra or {})["prompt_logprobs"]
    assert [next(iter(each.values()))["decoded_token"] for each in others] == [" is"]


def test_a_prompt_that_comes_again_is_found_in_the_cache(client: OpenAI) -> None:
    text = " ".join(f"{number} apples" for number in range(40))
    first, again = (complete(client, text, max_tokens=1) for _ in range(2))
    assert num_cached(first) == 0
    assert usage_of(again).prompt_tokens - 16 <= num_cached(again) < usage_of(again).prompt_tokens
    assert first.choices == again.choices


def test_a_field_that_has_no_effect_is_named_in_a_header(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=asking("Hi"), max_tokens=1, user="me", store=True, extra_body={"top_k": 3}
    )
    assert raw.headers["x-sightline-unused"] == "store, user"
    used = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=asking("Hi"), max_tokens=1, response_format={"type": "text"}, tool_choice="none"
    )
    assert "x-sightline-unused" not in used.headers
    assert '"max_tokens":1' in used.headers["x-sightline-sampling"]


def test_answers_differ_unless_a_temperature_or_a_seed_says_otherwise(client: OpenAI) -> None:
    """The default model brings no generation_config: as with OpenAI's API, the temperature is then 1."""
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=asking(STORY), max_tokens=12, n=3)
    assert '"temperature":1.0' in raw.headers["x-sightline-sampling"]
    assert '"top_p":1.0' in raw.headers["x-sightline-sampling"]
    assert len(set(said(raw.parse()))) > 1


def test_a_prompt_is_scored_without_generating(client: OpenAI) -> None:
    alone, longer = (complete(client, STORY, max_tokens=count, echo=True, logprobs=1) for count in (0, 2))
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == (STORY, "length")
    assert usage_of(alone).completion_tokens == 0
    ours, theirs = scored(alone.choices[0]), scored(longer.choices[0])
    assert len(ours.tokens) == usage_of(alone).prompt_tokens
    assert ours.tokens == theirs.tokens[:-2]
    assert ours.values == pytest.approx(theirs.values[:-2], abs=1e-4)
    assert complete(client, STORY, max_tokens=0, echo=True).choices[0].text == STORY


def test_bad_words_and_tokens_that_are_not_allowed_do_not_come(client: OpenAI) -> None:
    plain = complete(client, "The capital of France is", max_tokens=1).choices[0].text
    assert plain == " Paris"
    other = complete(client, "The capital of France is", max_tokens=1, extra_body={"bad_words": ["Paris"]})
    assert other.choices[0].text not in ("", " Paris")
    only = complete(client, "The capital of France is", max_tokens=3, extra_body={"allowed_token_ids": [260]})
    text = only.choices[0].text
    assert text
    assert text == 3 * text[: len(text) // 3]


def test_an_answer_continues_the_last_message(client: OpenAI) -> None:
    messages: Any = [
        *asking("Name the capital of France."),
        {"role": "assistant", "content": "The capital of France is"},
    ]
    body = {"continue_final_message": True}
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2, temperature=0, extra_body=body
    )
    assert said(answer)[0].startswith(" Paris")


def test_an_earlier_answer_without_content_is_no_fault(client: OpenAI) -> None:
    messages: Any = [*asking("Hi"), {"role": "assistant", "content": None}, *asking("Hello?")]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"


def test_continuations_are_numbered_prompt_by_prompt(client: OpenAI) -> None:
    answer = complete(client, [STORY, NUMBERS], n=2, temperature=1, seed=5, max_tokens=3)
    alone = complete(client, STORY, n=2, temperature=1, seed=5, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[:2]] == [choice.text for choice in alone.choices]
    assert usage_of(answer).completion_tokens == 12


def test_a_continuation_has_sixteen_tokens_unless_said_otherwise(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=STORY, temperature=0, extra_body={"ignore_eos": True})
    assert (usage_of(answer).completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_rivals_that_look_alike_do_not_replace_the_likeliest(client: OpenAI) -> None:
    # Parts of characters all look the same, and the older shape tells rivals by their looks.
    logprobs = scored(complete(client, "🦜🦜🦜🦜🦜", max_tokens=8, logprobs=10).choices[0])
    assert "\ufffd" in logprobs.tokens
    for token, value, rivals in zip(logprobs.tokens, logprobs.values, logprobs.rivals or [], strict=True):
        assert rivals is not None
        assert rivals[token] == value == max(rivals.values())


def test_older_log_probabilities_have_their_own_shape(client: OpenAI) -> None:
    [choice] = complete(client, STORY, max_tokens=5, logprobs=3).choices
    logprobs = scored(choice)
    assert "".join(logprobs.tokens) == choice.text
    assert len(logprobs.tokens) == 5
    for token, value, rivals, offset in zip(
        logprobs.tokens, logprobs.values, logprobs.rivals or [], logprobs.offsets, strict=True
    ):
        assert rivals is not None
        assert choice.text[offset:].startswith(token)
        assert next(iter(rivals.items())) == (token, value)
        assert list(rivals.values()) == sorted(rivals.values(), reverse=True)
        assert len(rivals) == 3
    alone = scored(complete(client, STORY, max_tokens=2, logprobs=0).choices[0])
    assert alone.rivals is None
    assert alone.values == logprobs.values[:2]


@pytest.mark.parametrize("prompt", [STORY, "A parrot 🦜 and a flag 🏴‍☠️, then é"])
def test_an_echo_gives_the_prompt_back_with_its_log_probabilities(client: OpenAI, prompt: str) -> None:
    plain = complete(client, prompt, max_tokens=4)
    [choice] = complete(client, prompt, max_tokens=4, echo=True).choices
    assert choice.text == prompt + plain.choices[0].text
    assert choice.logprobs is None
    [echoed] = complete(client, prompt, max_tokens=4, echo=True, logprobs=1).choices
    logprobs = scored(echoed)
    assert echoed.text == choice.text
    assert len(logprobs.tokens) == usage_of(plain).total_tokens
    assert logprobs.rivals is not None
    assert (logprobs.values[0], logprobs.rivals[0]) == (None, None)
    assert all(value is not None and value <= 0 for value in logprobs.values[1:])
    # A token that is a part of a character has no text of its own.
    placed = zip(logprobs.tokens, logprobs.offsets, strict=True)
    whole = [(token, echoed.text[offset : offset + len(token)]) for token, offset in placed if "�" not in token]
    assert len(whole) > 4
    assert [token for token, _ in whole] == [found for _, found in whole]


def test_tokens_make_the_round_trip(client: OpenAI) -> None:
    text = "Round and round: naïve 🦜 <|im_end|> caf\u00e9\n\ttab"
    tokens = client.post("/../tokenize", body={"prompt": text, "return_token_strs": True}, cast_to=dict[str, Any])
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    back = client.post("/../detokenize", body={"tokens": tokens["tokens"]}, cast_to=dict[str, Any])
    assert back == {"prompt": text}
    rendered = client.post("/../tokenize", body={"messages": asking(QUESTION)}, cast_to=dict[str, Any])
    assert rendered["count"] == usage_of(chat(client, QUESTION, max_tokens=1)).prompt_tokens


def test_many_ask_at_once_without_mixing_answers(server: ServedProcess, offline_texts: dict[str, str]) -> None:
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as several:

            async def ask(name: str) -> str:
                answer = await several.chat.completions.create(
                    model=MODEL, messages=CONVERSATIONS[name], temperature=0, max_tokens=NUM_COMPARED
                )
                return answer.choices[0].message.content or ""

            async def stream(name: str) -> str:
                pieces = await several.chat.completions.create(
                    model=MODEL, messages=CONVERSATIONS[name], temperature=0, max_tokens=NUM_COMPARED, stream=True
                )
                return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

            return await asyncio.gather(*map(ask, CONVERSATIONS), *map(stream, CONVERSATIONS))

    texts = [offline_texts[name] for name in CONVERSATIONS]
    assert asyncio.run(ask_all()) == texts + texts
