"""On an NVIDIA GPU: the kit passes there, and the engine answers as it does on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.attention.backends import registry
from sightline.core.device import detect_device
from sightline.llm import TokensPrompt
from sightline.testing.kit import try_row
from sightline.testing.report import RowToTry, list_rows
from support.tiny_models import FAMILIES, make_model, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def rows() -> list[RowToTry]:
    if not torch.cuda.is_available():
        return []
    return [row for row in list_rows(registry.BUILT_IN, detect_device("cuda")) if isinstance(row, RowToTry)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.candidate.name}-{row.label}")
def test_the_whole_kit_passes(row: RowToTry) -> None:
    report = try_row(row.subject)
    assert {result.check: result.detail for result in report.failed} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([3, 40, 1, 17])]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    answers = {
        device: [
            output.outputs[0].token_ids
            for output in LLM(
                str(tmp_path),
                skip_tokenizer_init=True,
                cache_tokens=2048,
                device=device,
                dtype="float32",
                paranoid=True,
            ).generate(prompts, params, use_tqdm=False)
        ]
        for device in ("cpu", "cuda")
    }
    assert answers["cuda"] == answers["cpu"]
