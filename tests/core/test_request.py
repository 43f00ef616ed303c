"""A request is checked before anything runs, and whatever is wrong with it is its own `RequestError`."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from sightline.core.errors import RequestError
from sightline.core.request import (
    MAX_CONTINUATIONS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    FinishReason,
    SamplingParams,
    check_prompt,
)

NAN, INFINITY = float("nan"), float("inf")
NUMBERS = {
    "temperature": (0.0, 1e4),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-4, 1e4),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
INTEGERS = {
    "seed": (0, MAX_SEED),
    "max_tokens": (0, 2**31 - 1),
    "truncate_prompt_tokens": (-1, 2**31 - 1),
    "n": (1, MAX_CONTINUATIONS),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NEVER_OPEN = {"presence_penalty", "frequency_penalty", "n"}
NO_NUMBERS = [NAN, INFINITY, -INFINITY, True, False, "0.5", [0.5], 1j]
NO_INTEGERS = [1.0, NAN, True, False, "5", [5]]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_taken_at_both_ends_of_its_range(name: str) -> None:
    for value in NUMBERS[name]:
        assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_finite_number_is_refused(name: str, value: object) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"expected {name} to be a finite number, got "):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 10001),
        ("min_p", -1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.2),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 3),
        ("frequency_penalty", -3),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=rf"expected {name} between [-.\d]+ and \d+, got {value}"):
        SamplingParams(**settings)


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_top_p_out_of_range_is_refused_with_the_range(value: float) -> None:
    with pytest.raises(RequestError, match=rf"expected top_p in \(0, 1\], got {value}"):
        SamplingParams(top_p=value)


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_top_p_of_zero_is_refused_with_the_way_to_say_greedy(zero: float) -> None:
    with pytest.raises(RequestError, match=r"top_p in \(0, 1\], got 0.0; use temperature 0"):
        SamplingParams(top_p=zero)


def test_an_integer_stands_for_a_number() -> None:
    assert SamplingParams(temperature=1, top_p=1, min_p=0).temperature == 1


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_too_large_for_a_float_is_refused(name: str) -> None:
    settings: dict[str, Any] = {name: 10**400}
    with pytest.raises(RequestError, match=f"expected {name}"):
        SamplingParams(**settings)


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_is_taken_at_both_ends_of_its_range_and_refused_beyond(name: str) -> None:
    low, high = INTEGERS[name]
    scored = {"prompt_logprobs": 0} if name == "max_tokens" else {}
    for value in (low, high):
        assert getattr(SamplingParams(**scored | {name: value}), name) == value  # type: ignore[arg-type]
    for value in (low - 1, high + 1):
        settings: dict[str, Any] = {name: value}
        with pytest.raises(RequestError, match=f"expected {name} between {low} and {high}, got {value}"):
            SamplingParams(**settings)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer_is_refused(name: str, value: object) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"expected {name} to be a whole number, got "):
        SamplingParams(**settings)


@pytest.mark.parametrize("name", sorted({*NUMBERS, *INTEGERS, "min_tokens", "logit_bias"} - NEVER_OPEN))
def test_every_choice_can_be_left_open(name: str) -> None:
    assert getattr(SamplingParams(**{name: None}), name) is None  # type: ignore[arg-type]


def test_stop_tokens_become_a_tuple_of_their_own() -> None:
    given = [3, 5]
    params = SamplingParams(stop_token_ids=given)
    given.append(7)
    assert params.stop_token_ids == (3, 5)


@pytest.mark.parametrize("token", [-1, 2**31, True, 1.0, "5"], ids=repr)
def test_a_stop_token_that_is_no_token_is_refused(token: object) -> None:
    with pytest.raises(RequestError, match="expected every stop_token_ids entry"):
        SamplingParams(stop_token_ids=(3, token))  # type: ignore[arg-type]


def test_none_is_no_stop_token() -> None:
    with pytest.raises(RequestError, match="expected every stop_token_ids entry"):
        SamplingParams(stop_token_ids=(3, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [None, 5], ids=repr)
def test_stop_tokens_that_are_no_sequence_are_refused(tokens: object) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(NEVER_OPEN))
def test_what_no_model_has_a_default_for_is_not_left_open(name: str) -> None:
    settings: dict[str, Any] = {name: None}
    with pytest.raises(RequestError, match=f"expected {name} to be a (whole|finite) number, got None"):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("given", "kept"), [(None, ()), ("x", ("x",)), ([], ()), (["a", "b"], ("a", "b")), (("a",), ("a",))]
)
def test_stop_is_a_string_or_several(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == SamplingParams(stop=given).stop_strings == kept


@pytest.mark.parametrize("stop", [5, [5], ["a", None], {"a"}], ids=repr)
def test_a_stop_that_is_no_string_is_refused(stop: Any) -> None:
    with pytest.raises(RequestError, match="expected stop to be a string or a list of strings, got"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(RequestError, match="at least one character, got an empty one"):
        SamplingParams(stop=stop)


def test_too_many_stop_strings_are_refused() -> None:
    stops = [str(number) for number in range(MAX_STOP_STRINGS + 1)]
    assert len(SamplingParams(stop=stops[1:]).stop_strings) == MAX_STOP_STRINGS
    with pytest.raises(RequestError, match=f"at most {MAX_STOP_STRINGS} stop strings, got {MAX_STOP_STRINGS + 1}"):
        SamplingParams(stop=stops)


def test_a_bias_is_kept_as_a_copy() -> None:
    given = {3: 1.5, 4: -100.0}
    params = SamplingParams(logit_bias=given)
    given[5] = 1.0
    assert params.logit_bias == {3: 1.5, 4: -100.0}


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ([1, 2], "expected logit_bias to map token ids to numbers"),
        ({-1: 1.0}, "expected every logit_bias token between 0"),
        ({"5": 1.0}, "expected every logit_bias token to be a whole number, got '5'"),
        ({None: 1.0}, "expected every logit_bias token to be a whole number, got None"),
        ({5: 100.5}, "expected logit_bias of token 5 between -100 and 100, got 100.5"),
        ({5: NAN}, "expected logit_bias of token 5 to be a finite number"),
        ({5: None}, "expected logit_bias of token 5 to be a finite number, got None"),
    ],
)
def test_a_bias_that_is_none_is_refused(bias: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(logit_bias=bias)


def test_the_least_number_of_tokens_is_not_above_the_most() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=2**31 - 1, max_tokens=None).min_tokens == 2**31 - 1
    with pytest.raises(RequestError, match="expected min_tokens of at most max_tokens, 16, got 17; raise max_tokens"):
        SamplingParams(min_tokens=17)
    with pytest.raises(RequestError, match="expected min_tokens between 0"):
        SamplingParams(min_tokens=-1)


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"])
def test_a_flag_that_is_no_boolean_is_refused(name: str) -> None:
    settings: dict[str, Any] = {name: "false"}
    with pytest.raises(RequestError, match=f"expected {name}"):
        SamplingParams(**settings)


def test_top_k_of_minus_one_keeps_every_token_as_zero_does() -> None:
    assert SamplingParams(top_k=-1).top_k == SamplingParams(top_k=0).top_k == 0
    assert SamplingParams(top_k=2**31 - 1).top_k == 2**31 - 1
    for value in (-2, 2**31):
        with pytest.raises(RequestError, match=f"expected top_k between -1 and 2147483647, got {value}"):
            SamplingParams(top_k=value)


def test_sampling_params_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


def test_finish_reasons_are_the_words_that_clients_know() -> None:
    assert {str(reason) for reason in FinishReason} == {"stop", "length", "tool_calls", "abort", "error"}


def test_a_prompt_may_fill_the_context_less_one() -> None:
    check_prompt([0, 9] * 4 + [3], vocab_size=10, max_model_len=10)
    with pytest.raises(RequestError, match=r"at most 9 tokens \(max_model_len 10 less one to generate\), got 10"):
        check_prompt([0] * 10, vocab_size=10, max_model_len=10)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="expected a prompt of at least one token"):
        check_prompt([], vocab_size=10, max_model_len=10)


@pytest.mark.parametrize("token", [-1, 10, True, 1.0, NAN, "1", None], ids=repr)
def test_a_token_outside_the_vocabulary_is_named_with_its_position(token: object) -> None:
    with pytest.raises(RequestError, match=r"token ids from 0 to 9, got .* at position 2"):
        check_prompt([1, 2, token, 4], vocab_size=10, max_model_len=10)


def test_a_prompt_that_is_an_array_is_a_request_error() -> None:
    with pytest.raises(RequestError):
        check_prompt(np.array([1, 2, 30]), vocab_size=10, max_model_len=10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "expected max_tokens of at least 1, got 0"),
        ({"truncate_prompt_tokens": 0}, "expected truncate_prompt_tokens of at least 1, or -1, got 0"),
        ({"allowed_token_ids": []}, "expected allowed_token_ids with at least one token"),
        ({"allowed_token_ids": [1, -1]}, "every allowed_token_ids entry"),
        ({"allowed_token_ids": "1"}, "expected allowed_token_ids to be a list"),
        ({"bad_words": "word"}, "expected bad_words to be a list of strings"),
        ({"bad_words": [5]}, "expected bad_words to be a list of strings"),
        ({"bad_words": ["a", " "]}, "expected bad_words with more than spaces"),
        ({"bad_words": ["a"] * 129}, "expected at most 128 bad_words"),
        ({"bad_words": ["a" * 8193]}, "of 8192 characters in all, got 1 of 8193"),
    ],
)
def test_what_no_token_can_be_chosen_with_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


def test_allowed_tokens_are_kept_in_order_and_once() -> None:
    params = SamplingParams(allowed_token_ids=[5, 1, 5])
    assert params.allowed_token_ids == (1, 5)
    assert params.allowed is not None
    assert params.allowed.packed is params.allowed.packed


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 30),
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": 99}, 30),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5}, 15),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, 19),
        ({"truncate_prompt_tokens": -1, "max_tokens": 50}, 1),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0, "prompt_logprobs": 0}, 19),
    ],
)
def test_truncation_keeps_the_last_tokens_of_a_prompt(settings: dict[str, Any], kept: int) -> None:
    prompt = list(range(30))
    assert SamplingParams(**settings).cut(prompt, 20) == prompt[30 - kept :]
