"""Attention of rows with many new tokens gives what the oracle gives, the same bits however its work is divided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("numba")

from sightline.attention.backends.numba import calls
from sightline.kernels.cpu.attend_prompt import UNIT_QUERIES, tokens_of_unit
from sightline.kernels.cpu.processor import Processor
from support.cpu_attention import Heads, attended

CLOSE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ODD, PLAIN = Heads(kv_heads=2, group=5, dim=22), Heads(kv_heads=3, group=3, dim=64)
CONTEXTS, NEW = (1, 3, 64, 65, 200, 330), (1, 2, 64, 1, 130, 17)
"""Single tokens, whole texts, and prompts behind a context; around a block, and of several."""


@pytest.mark.parametrize("num_threads", [1, 7])
@pytest.mark.parametrize("heads", [ODD, PLAIN, Heads(1, 1, 4), Heads(1, 71, 16)], ids=str)
def test_prompts_and_whole_texts(heads: Heads, num_threads: int) -> None:
    assert attended(heads, contexts=CONTEXTS, new_tokens=NEW, num_threads=num_threads).error() < CLOSE[torch.float32]


@pytest.mark.parametrize("window", [1, 17, 64, 100])
def test_a_window_begins_anywhere(window: int) -> None:
    assert attended(ODD, contexts=CONTEXTS, new_tokens=NEW, window=window).error() < CLOSE[torch.float32]


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_every_cache(cache: torch.dtype) -> None:
    assert attended(PLAIN, cache, contexts=CONTEXTS, new_tokens=NEW).error() < CLOSE[torch.float32]
    assert attended(ODD, cache, contexts=CONTEXTS, new_tokens=NEW).error() < CLOSE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_and_outputs_in_low_precision(dtype: torch.dtype) -> None:
    assert attended(ODD, dtype, dtype, CONTEXTS, new_tokens=NEW).error() < CLOSE[dtype]


def test_the_portable_form(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = Processor.detect().portable()
    monkeypatch.setattr(calls, "Processor", SimpleNamespace(detect=lambda: portable))
    assert attended(ODD, contexts=CONTEXTS, new_tokens=NEW).error() < CLOSE[torch.float32]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [ODD, PLAIN], ids=str)
def test_a_token_has_the_same_bits_however_the_work_is_divided(heads: Heads, window: int | None) -> None:
    """Among threads, beside other rows, and in one step or the last of several."""
    alone = attended(heads, contexts=(330,), new_tokens=(330,), num_threads=1, window=window)
    for num_threads in (2, 13):
        divided = attended(heads, contexts=(330,), new_tokens=(330,), num_threads=num_threads, window=window)
        assert torch.equal(divided.out, alone.out)
        assert torch.equal(divided.lse, alone.lse)
    beside = attended(heads, contexts=(330, 40, 9), new_tokens=(330, 3, 9), num_threads=3, window=window)
    assert torch.equal(beside.out[:330], alone.out)
    for count in (1, 7, 100):
        last = attended(heads, contexts=(330,), new_tokens=(count,), num_threads=3, window=window)
        assert torch.equal(last.out, alone.out[-count:])
        assert torch.equal(last.lse, alone.lse[-count:])


def test_nan_in_a_value_is_nan_in_that_dimension_of_that_row_only() -> None:
    result = attended(PLAIN, contexts=(130, 70), new_tokens=(10, 70), nan_at=(100, 37))
    expected = torch.zeros(80, 9, 64, dtype=torch.bool)
    expected[:10, :, 37] = True
    assert torch.equal(result.out.isnan(), expected)


@pytest.mark.parametrize("group", [1, 3, 64, 1000])
def test_a_unit_has_a_whole_token_at_least(group: int) -> None:
    assert tokens_of_unit(group) >= 1
    assert tokens_of_unit(group) * group <= max(UNIT_QUERIES, group)
