"""The default model over a cache of 8-bit floats: a quarter of the memory, and answers that stay near."""

from __future__ import annotations

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.attention.capability import Work
from sightline.core.errors import NoBackendError
from sightline.runner.startup import startup_report
from support.tiny_models import stepped_logits

PROMPTS = ["The capital of France is", "Water is made of hydrogen and", "Q: What is 2 + 2?\nA:"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def wide() -> LLM:
    return LLM(cache_tokens=2048, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def narrow() -> LLM:
    return LLM(cache_tokens=2048, max_num_batched_tokens=64, kv_cache_dtype="fp8")


def test_the_cache_takes_a_quarter_and_every_group_is_served(wide: LLM, narrow: LLM) -> None:
    bytes_of = [sum(pool.num_bytes for pool in llm.engine.runtime.store.pools) for llm in (wide, narrow)]
    assert bytes_of[0] == 4 * bytes_of[1]
    assert [selection[Work.PREFILL].candidate.name for selection in narrow.engine.runtime.selections] == ["numba"]
    assert "in float8_e4m3fn" in startup_report(narrow.engine.runtime)[1]
    [line] = [str(entry) for entry in narrow.engine.ledger if entry.subject == "cache scales"]
    assert "60 of 60 are taken as 1" in line


def test_answers_are_made_of_words_and_begin_alike(wide: LLM, narrow: LLM) -> None:
    answers = [
        [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        for llm in (wide, narrow)
    ]
    assert [answer[0] for answer in answers[0]] == [answer[0] for answer in answers[1]]
    again = [output.outputs[0].token_ids for output in narrow.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert again == answers[1], "with prefixes out of the cache it answers the same"


def test_logits_are_within_a_sane_distance_of_those_of_a_wide_cache(wide: LLM, narrow: LLM) -> None:
    sequences = [wide.get_tokenizer().encode_prompt(prompt * 3) for prompt in PROMPTS]
    lens = [len(sequence) - 4 for sequence in sequences]
    exact, rounded = (
        torch.cat(stepped_logits(llm.engine.runtime, sequences, lens, chunk=11)) for llm in (wide, narrow)
    )
    away = (rounded - exact).abs()
    spread = exact.std()
    assert 1e-4 * spread < away.mean() < 0.15 * spread, (away.mean(), spread)
    divergence = torch.nn.functional.kl_div(
        rounded.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < 0.1


def test_a_cache_dtype_that_no_backend_reads_is_refused_with_every_reason() -> None:
    with pytest.raises(NoBackendError, match=r"torch: does not read a torch\.bfloat16 cache"):
        LLM(cache_tokens=256, dtype="float32", kv_cache_dtype="bfloat16", attention_backend="torch")
