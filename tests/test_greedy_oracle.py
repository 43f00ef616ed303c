"""The oracle of greedy answers gives what transformers generates, whatever it is given as a draft."""

from __future__ import annotations

import pytest
import torch

from support.gguf_files import tiny_llama
from support.greedy import greedy_tokens

NEW_TOKENS = 12
PROMPT = [5, 9, 2, 17]


@pytest.mark.parametrize("wrong_from", [0, 1, 7, NEW_TOKENS - 1, NEW_TOKENS])
@pytest.mark.parametrize("length", [0, 3, NEW_TOKENS, NEW_TOKENS + 5])
def test_a_draft_changes_nothing(wrong_from: int, length: int) -> None:
    model = tiny_llama().eval()
    ids = torch.tensor([PROMPT])
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer = generated[0, len(PROMPT) :].tolist()
    draft = [*answer[:wrong_from], *((token + 1) % 32 for token in answer[wrong_from:]), *range(5)][:length]
    assert list(greedy_tokens(model, PROMPT, draft, NEW_TOKENS, eos=())) == answer
    ends = answer.index(answer[5]) + 1
    assert list(greedy_tokens(model, PROMPT, draft, NEW_TOKENS, eos=[answer[5]])) == answer[:ends]
