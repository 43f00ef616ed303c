"""What `speculative_config` may be."""

from __future__ import annotations

import pytest

from sightline.core.config import EngineConfig
from sightline.core.errors import ConfigError
from sightline.core.speculation import Speculation, read_speculation

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 1}


def test_json_and_a_mapping_say_the_same() -> None:
    wanted = Speculation(num_speculative_tokens=3, prompt_lookup_max=5, prompt_lookup_min=1)
    assert read_speculation(NGRAM) == wanted
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 1}'
    assert read_speculation(text) == wanted
    assert read_speculation(None) is None
    assert read_speculation({"method": "ngram"}) == Speculation()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "expected speculative_config as JSON, got 'ngram'"),
        ("[1]", 'expected speculative_config such as {"method": "ngram"'),
        ({"num_speculative_tokens": 3}, "expected speculative_config such as"),
        (
            {"method": "medusa"},
            "expected a speculative method out of ngram, .*, got 'medusa', which Sightline does not have yet",
        ),
        ({"method": "magic"}, "expected a speculative method out of ngram, .*, got 'magic'$"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "expected num_speculative_tokens between 1 and 64, got 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "expected num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "expected prompt_lookup_min of at most prompt_lookup_max 4"),
        ({"method": "ngram", "num_speculative_token": 3}, "num_speculative_tokens"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "expected draft_tensor_parallel_size 1, got 2"),
        ({"method": "ngram", "corpus_tokens": 63}, "expected corpus_tokens 0, or at least 64"),
        ({"method": 3}, "expected method to be text, got 3"),
        (
            {"method": "ngram", "model": "small"},
            "expected no model in speculative_config with the method ngram, which has no use for it, got 'small'; "
            "leave it out",
        ),
        ({"method": "ngram", "attention_backend": "torch"}, "expected no attention_backend in speculative_config with"),
    ],
)
def test_anything_else_is_refused_with_what_to_do(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=given)  # type: ignore[arg-type]


def test_what_is_guessed_from_tokens_that_are_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected speculative_config or async_scheduling, got both"):
        EngineConfig(speculative_config=NGRAM, async_scheduling=True)
    with pytest.raises(ConfigError, match="expected no speculative_config with task embed"):
        EngineConfig(speculative_config=NGRAM, task="embed")
