"""The tiny models, saved once for all tests of this folder."""

from __future__ import annotations

import pytest

from support.tiny_models import FAMILIES, Models, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each family's model and the folder that it is saved in."""
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = make_model(family)
        model.save_pretrained(folder)
        made[family] = (model, folder)
    return made
