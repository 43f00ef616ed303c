"""Tiny hybrid models, saved once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_models import make_model


def save(family: str, factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp(family)
    make_model(family).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups: layers with a window and layers without."""
    return save("gemma3", tmp_path_factory)


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups, with sinks."""
    return save("gpt_oss", tmp_path_factory)
