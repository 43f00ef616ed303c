"""Names that other engines have for fields of `speculative_config`: what they mean, and that they must agree."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from sightline.cli.application import app
from sightline.core.command_line import flag
from sightline.core.config import EngineKeywords
from sightline.core.errors import ConfigError
from sightline.core.settings import aliases_of, stated
from sightline.core.speculation import METHODS, Speculation
from sightline.core.speculation_words import ALGORITHMS

NGRAM = {"method": "ngram"}
WORDS: dict[str, tuple[Any, dict[str, object]]] = {
    "speculative_algorithm": ("NGRAM", {}),
    "speculative_num_steps": (5, {"num_speculative_tokens": 5}),
    "speculative_num_draft_tokens": (6, {"num_speculative_tokens": 5}),
    "speculative_eagle_topk": (1, {}),
    "speculative_ngram_max_match_window_size": (9, {"prompt_lookup_max": 9}),
    "speculative_ngram_min_match_window_size": (1, {"prompt_lookup_min": 1}),
    "speculative_ngram_capacity": (4096, {"corpus_tokens": 4096}),
    "speculative_model": ("[ngram]", {}),
    "num_speculative_tokens": (5, {"num_speculative_tokens": 5}),
    "ngram_prompt_lookup_max": (9, {"prompt_lookup_max": 9}),
    "ngram_prompt_lookup_min": (1, {"prompt_lookup_min": 1}),
    "speculative_draft_tensor_parallel_size": (1, {"draft_tensor_parallel_size": 1}),
}
"""A value for each that the method ngram takes, and what it means."""
OF_NETWORKS: dict[str, tuple[Any, dict[str, object]]] = {
    "speculative_draft_model_path": ("small", {"model": "small"}),
    "speculative_draft_attention_backend": ("torch", {"attention_backend": "torch"}),
}


def parsed(*words: str) -> Any:
    """The setting that a command line gives."""
    with app.commands["serve"].make_context("serve", list(words)) as context:
        return context.params["speculative_config"]


def refusal(*words: str) -> str:
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def test_every_name_is_here_with_the_type_of_its_field() -> None:
    named = {name: each for name, each in aliases_of(EngineKeywords).items() if each.fields is not None}
    assert named.keys() == WORDS.keys() | OF_NETWORKS.keys()
    for name, (value, fields) in {**WORDS, **OF_NETWORKS}.items():
        assert named[name].kind is type(value)
        for field in fields:
            assert stated(Speculation)[field].kind is type(value)


@pytest.mark.parametrize("name", WORDS)
def test_a_name_adds_its_field_in_python_and_on_the_command_line(name: str) -> None:
    value, fields = WORDS[name]
    for config in (NGRAM, '{"method": "ngram"}', {**NGRAM, **fields}):
        assert EngineKeywords(speculative_config=config, **{name: value}).speculative_config == {**NGRAM, **fields}
    own = ("--speculative-config", '{"method": "ngram"}')
    words = (flag(name), str(value))
    assert parsed(*own, *words) == parsed(*words, *own) == {**NGRAM, **fields}


@pytest.mark.parametrize("name", OF_NETWORKS)
def test_a_name_of_a_network_adds_its_field(name: str) -> None:
    value, fields = OF_NETWORKS[name]
    wanted = {"method": "draft_model", "model": "small", **fields}
    given = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "small", name: value}
    assert EngineKeywords(**given).speculative_config == wanted
    assert parsed(*(word for each, said in given.items() for word in (flag(each), said))) == wanted


def test_a_command_line_of_either_engine_makes_the_same_setting() -> None:
    sglang = ("--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "6", "--speculative-num-steps", "5")
    vllm = ("--speculative-model", "[ngram]", "--num-speculative-tokens", "5")
    assert parsed(*sglang) == parsed(*vllm) == {**NGRAM, "num_speculative_tokens": 5}
    assert EngineKeywords(speculative_model="small", num_speculative_tokens=5).speculative_config == {
        "method": "draft_model",
        "model": "small",
        "num_speculative_tokens": 5,
    }
    assert parsed() is None


def test_every_method_of_sightline_that_sglang_has_has_its_name() -> None:
    assert {each.name for each in METHODS} - {"frozen_kv_mtp"} <= set(ALGORITHMS.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"speculative_num_steps": 3, "speculative_num_draft_tokens": 3},
            "expected one num_speculative_tokens of {of}, got 3 by {0} and 2 by {1}; leave one out",
        ),
        (
            {"num_speculative_tokens": 3, "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'},
            "expected one num_speculative_tokens of {of}, got 3 by {0} and 4 by {of}; leave one out",
        ),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_model": "small"},
            "expected one method of {of}, got 'eagle3' by {0} and 'draft_model' by {1}; leave one out",
        ),
        ({"speculative_algorithm": "MAGIC"}, "expected speculative_algorithm out of NGRAM, STANDALONE, EAGLE, EAGLE3"),
        ({"speculative_eagle_topk": 4}, "expected speculative_eagle_topk 1, got 4: several guesses for one place"),
        ({"speculative_num_draft_tokens": 1}, "expected speculative_num_draft_tokens of at least 2, the last known"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_names_that_contradict_each_other_or_mean_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    names = tuple(given)
    with pytest.raises(ConfigError) as caught:
        EngineKeywords(**given)
    assert message.format(*names, of="speculative_config") in str(caught.value)
    told = message.format(*map(flag, names), of="--speculative-config")
    words = [word for name, value in given.items() for word in (flag(name), str(value))]
    assert told in refusal(*words)


def test_a_field_without_a_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected speculative_config such as"):
        EngineKeywords(num_speculative_tokens=5)
    with pytest.raises(ConfigError, match="expected speculative_config as JSON, got 'ngram'"):
        EngineKeywords(speculative_config="ngram", num_speculative_tokens=5)
