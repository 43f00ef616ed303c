"""Decoders that were saved without their head, whose tensors' names lack the prefix, are the same models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sightline.core.config import EngineConfig
from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from support.case_marks import routine
from support.tiny_bert import make_bert, open_tiny, reference_vector, save_embedder, vectors
from support.tiny_gemma4 import SHARING
from support.tiny_models import FAMILIES, make_model, random_prompts

TEXTS = random_prompts([1, 9, 4, 25], seed=2)
CONFIG = EngineConfig(max_model_len=32)


@pytest.mark.parametrize(
    "family", routine({each: each for each in FAMILIES if each not in SHARING}, "llama", "gpt_oss", "deepseek_v3")
)
def test_a_bare_decoder_gives_the_vectors_of_the_whole_one(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    whole = save_embedder(model, tmp_path / "whole", pooling="lasttoken")
    bare = save_embedder(model.model, tmp_path / "bare", pooling="lasttoken")
    found = vectors(open_tiny(bare, CONFIG), TEXTS)
    assert torch.equal(found, vectors(open_tiny(whole, CONFIG), TEXTS))
    expected = torch.stack([reference_vector(model.model, text, "lasttoken") for text in TEXTS])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", SHARING)
def test_decoders_whose_layers_share_a_cache_do_not_embed(tmp_path: Path, family: str) -> None:
    folder = save_embedder(make_model(family), tmp_path, pooling="lasttoken")
    with pytest.raises(UnsupportedModelError, match="layers 4, 5, 6 read the cache of other layers"):
        open_tiny(folder, CONFIG)


def test_every_name_has_the_prefix_once(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "bare")
    whole, bare = (open_checkpoint(tmp_path / name, Ledger()) for name in ("whole", "bare"))
    assert set(bare.tensors) == set(whole.tensors) - {"lm_head.weight"}
    for name, info in bare.tensors.items():
        assert info == whole.tensors[name]
        assert torch.equal(bare.load(name), whole.load(name))


def test_an_encoder_keeps_its_names(tmp_path: Path) -> None:
    make_bert().save_pretrained(tmp_path)
    assert "embeddings.word_embeddings.weight" in open_checkpoint(tmp_path, Ledger()).tensors
