"""Prompts, lengths and arrivals depend on their seed alone and are as asked."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise

import pytest

from sightline.bench.serving.work import Arrivals, Ask, Dataset, DatasetName, Endpoint, Sampling, payload
from sightline.core.errors import ConfigError

SMALL = Dataset(num_prompts=4, input_len=5, output_len=3)


def test_arrivals_are_poisson_and_depend_on_the_seed_alone() -> None:
    offsets = Arrivals(request_rate=20.0, seed=3).offsets(4000)
    assert offsets == Arrivals(request_rate=20.0, seed=3).offsets(4000)
    assert offsets != Arrivals(request_rate=20.0, seed=4).offsets(4000)
    gaps = [later - first for first, later in pairwise(offsets)]
    assert offsets[0] == 0
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.08)
    even = Arrivals(request_rate=20.0, burstiness=100.0).offsets(4000)
    assert even[-1] / 3999 == pytest.approx(1 / 20, rel=0.06)
    assert statistics.stdev(y - x for x, y in pairwise(even)) == pytest.approx(0.005, rel=0.1)
    assert Arrivals().offsets(3) == [0, 0, 0]
    assert Arrivals(request_rate=1.0).offsets(0) == []


def test_prompts_are_drawn_by_seed_and_as_long_as_asked() -> None:
    asks = SMALL.draw(50)
    assert asks == SMALL.draw(50)
    assert asks != Dataset(num_prompts=4, input_len=5, output_len=3, seed=1).draw(50)
    assert all(isinstance(ask.prompt, tuple) and len(ask.prompt) == 5 and ask.max_tokens == 3 for ask in asks)
    assert {token for ask in Dataset(num_prompts=50).draw(7) for token in ask.prompt} == set(range(7))
    [words] = Dataset(num_prompts=1, input_len=9).draw(None)
    assert isinstance(words.prompt, str)
    assert len(words.prompt.split()) == 9
    ranged = Dataset(num_prompts=300, input_len=100, output_len=10, range_ratio=0.2).draw(50)
    assert {min(len(ask.prompt) for ask in ranged), max(len(ask.prompt) for ask in ranged)} == {80, 120}
    assert {ask.max_tokens for ask in ranged} == set(range(8, 13))


def test_conversations_are_log_normal_within_bounds() -> None:
    dataset = Dataset(DatasetName.SHAREGPT_LIKE, num_prompts=2000)
    asks = dataset.draw(50)
    lengths = [len(ask.prompt) for ask in asks]
    assert statistics.median(lengths) == pytest.approx(60, rel=0.15)
    assert statistics.median(ask.max_tokens for ask in asks) == pytest.approx(230, rel=0.1)
    assert (min(lengths), max(lengths)) == (4, 1024)
    assert "log-normal, median 60, sigma 1.4, 4 to 1024" in dataset.describe(50)


def test_a_request_is_what_openai_has() -> None:
    body = json.loads(payload(Ask((1, 2), 3), 4, "m", Endpoint.COMPLETIONS, Sampling(0.5, seed=10), stream=True))
    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 3,
        "temperature": 0.5,
        "ignore_eos": True,
        "seed": 14,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    plain = json.loads(payload(Ask("hi", 3), 0, "m", Endpoint.CHAT, Sampling(ignore_eos=False), stream=False))
    assert plain == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0.0,
    }


def test_loads_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a request rate above 0, got 0"):
        Arrivals(request_rate=0.0)
    with pytest.raises(ConfigError, match="expected a burstiness above 0, got -1"):
        Arrivals(burstiness=-1.0)
    with pytest.raises(ConfigError, match="expected a range ratio of at least 0 and below 1, got 1"):
        Dataset(range_ratio=1.0)
