"""Tiny hybrid models, saved once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from support.tiny_kimi import make_kimi
from support.tiny_models import make_model


def save(model: PreTrainedModel, factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp(model.config.model_type)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups: layers with a window and layers without."""
    return save(make_model("gemma3"), tmp_path_factory)


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups, with sinks."""
    return save(make_model("gpt_oss"), tmp_path_factory)


@pytest.fixture(scope="session")
def kimi_linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups: layers with latent attention and recurrent ones."""
    return save(make_kimi("kimi_linear"), tmp_path_factory)


@pytest.fixture(scope="session")
def bailing_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups: layers with latent attention and recurrent ones."""
    return save(make_kimi("bailing_hybrid"), tmp_path_factory)


@pytest.fixture(scope="session")
def minimax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups: layers with softmax attention and recurrent ones."""
    return save(make_kimi("minimax"), tmp_path_factory)
