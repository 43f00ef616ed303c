"""Defaults for generation: honoured, neutral, informational or recorded."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from sightline.core.errors import CheckpointError, ConfigError
from sightline.core.ledger import Ledger
from sightline.core.request import SamplingParams
from sightline.models.loading.generation import GenerationDefaults, read_generation_defaults


def read(
    generation_config: dict[str, object],
    model_config: dict[str, object] | None = None,
    ledger: Ledger | None = None,
) -> GenerationDefaults:
    return read_generation_defaults(
        generation_config, model_config or {}, lambda: frozenset({99}), Ledger() if ledger is None else ledger
    )


def test_known_fields_are_read() -> None:
    fields: dict[str, object] = {
        "eos_token_id": [1, 106],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 1,
        "top_k": 64,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_new_tokens": 4,
    }
    ledger = Ledger()
    assert read(fields, ledger=ledger) == GenerationDefaults(
        frozenset({1, 106}),
        do_sample=True,
        temperature=0.6,
        top_p=1.0,
        top_k=64,
        min_p=0.05,
        repetition_penalty=1.1,
        min_tokens=4,
    )
    assert list(ledger) == []


@pytest.mark.parametrize(("stated", "expected"), [(-1, 0), (0, 0), (-1.0, 0), (50.0, 50), (2**31 - 1, 2**31 - 1)])
def test_top_k_of_all_tokens_is_zero(stated: float, expected: int) -> None:
    assert read({"top_k": stated}).top_k == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 1e-9, "min_p": 0, "top_k": -1, "repetition_penalty": 1e-4, "min_new_tokens": 0},
        {"temperature": 1e4, "top_p": 1, "min_p": 1, "top_k": 2**31 - 1, "repetition_penalty": 1e4},
    ],
)
def test_every_default_that_is_read_is_one_that_a_request_may_ask_for(fields: dict[str, object]) -> None:
    defaults = read(fields)
    asked = SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        min_tokens=defaults.min_tokens,
    )
    assert (asked.temperature, asked.top_p, asked.min_p, asked.repetition_penalty) == (
        fields["temperature"],
        fields["top_p"],
        fields["min_p"],
        fields["repetition_penalty"],
    )


def test_end_tokens_come_from_the_first_place_that_names_any() -> None:
    assert read({"eos_token_id": 3}, {"eos_token_id": 4}).eos_token_ids == {3}
    assert read({}, {"eos_token_id": [4, 5]}).eos_token_ids == {4, 5}
    assert read({"eos_token_id": None}, {"eos_token_id": None}).eos_token_ids == {99}


def test_what_transformers_saves_by_default_records_nothing() -> None:
    ledger = Ledger()
    read(GenerationConfig(bos_token_id=1, pad_token_id=0, eos_token_id=2).to_dict(), ledger=ledger)
    assert list(ledger) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.0),
        ("num_beams", 1),
        ("min_length", 0),
        ("bad_words_ids", None),
        ("suppress_tokens", []),
        ("transformers_version", "5.0"),
        ("_from_model_config", True),
        ("cache_implementation", "hybrid"),
        ("max_length", 4096),
    ],
)
def test_neutral_and_informational_fields_record_nothing(field: str, value: object) -> None:
    ledger = Ledger()
    read({field: value}, ledger=ledger)
    assert list(ledger) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 4),
        ("bad_words_ids", [[5]]),
        ("suppress_tokens", [7]),
        ("min_length", 5),
        ("no_repeat_ngram_size", 3),
        ("typical_p", 0.9),
        ("forced_bos_token_id", 3),
        ("a_field_of_the_future", 1),
    ],
)
def test_fields_that_change_the_output_are_recorded_and_refused_under_strict(field: str, value: object) -> None:
    ledger = Ledger()
    read({field: value}, ledger=ledger)
    assert [field in entry.subject for entry in ledger] == [True]
    with pytest.raises(ConfigError, match=field):
        read({field: value}, ledger=Ledger(strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_id", "x"),
        ("eos_token_id", [1, -1]),
        ("eos_token_id", True),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", 1.1e4),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_p", True),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("top_k", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.1),
        ("repetition_penalty", 1e5),
        ("repetition_penalty", float("nan")),
        ("min_new_tokens", -1),
        ("min_new_tokens", 1.5),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", float("nan")),
        ("do_sample", 1),
    ],
)
def test_values_of_the_wrong_kind_are_refused(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field):
        read({field: value})
