"""Models that several tests of engines ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.hybrids import HYBRIDS, make_hybrid
from support.tiny_deepseek_v4 import V4, make_v4
from support.tiny_models import make_model
from support.tiny_sparse import SPARSE, make_sparse


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Finds the checkpoint of a family's tiny model. It is saved once."""
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            makers = dict.fromkeys(HYBRIDS, make_hybrid) | dict.fromkeys(SPARSE, make_sparse)
            makers |= dict.fromkeys(V4, make_v4)
            makers.get(family, make_model)(family).save_pretrained(made[family])
        return made[family]

    return find
