"""Names of attention backends choose for the kinds of layers that they serve, and leave other kinds of a model open."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.attention.capability import Work
from sightline.core.errors import NoBackendError
from support.hybrids import make_hybrid
from support.speculating import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    make_hybrid("qwen3_next").save_pretrained(path)
    return path


def chosen(folder: Path, **settings: object) -> tuple[dict[str, str], list[str]]:
    """The backend for prompts of each kind of layer, and what the ledger notes about the settings."""
    llm = tiny(folder, **settings)
    runtime = llm.engine.runtime
    names = {
        binding.group.spec.kind.value: selection[Work.PREFILL].candidate.name
        for binding, selection in zip(runtime.bindings, runtime.selections, strict=True)
    }
    return names, [str(note) for note in llm.engine.ledger.notes if "attention_backend" in str(note)]


def test_a_name_for_one_kind_leaves_the_other_open_and_says_so(folder: Path) -> None:
    names, notes = chosen(folder, attention_backend="reference")
    assert names == {"recurrent": "numba-recurrent", "softmax": "reference"}
    assert any("reference serves no recurrent layers: numba-recurrent was chosen" in note for note in notes)


def test_names_for_every_kind_are_taken(folder: Path) -> None:
    names, notes = chosen(folder, attention_backend="reference,reference-recurrent")
    assert names == {"recurrent": "reference-recurrent", "softmax": "reference"}
    assert not notes


def test_a_name_that_serves_no_kind_of_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(NoBackendError, match="serves latent attention"):
        tiny(folder, attention_backend="torch-latent")
