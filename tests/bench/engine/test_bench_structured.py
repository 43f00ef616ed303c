"""`sightline bench structured` reports the cost of masks, and nothing if an answer does not hold."""

from __future__ import annotations

import pytest
import torch

from sightline.bench.engine.structured import MaskedWork, measure_structured
from sightline.core.errors import ConfigError, SightlineError
from sightline.runner.sampling import sampler as sampler_module
from support.tiny_served_model import save_tiny_served_model


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    torch.manual_seed(7)
    folder = save_tiny_served_model(tmp_path_factory.mktemp("tiny"))
    return {"model": str(folder), "cache_tokens": 2048, "dtype": "float32"}


def test_masks_are_measured_and_answers_are_checked(settings: dict[str, object]) -> None:
    seen: list[MaskedWork] = []
    report = measure_structured(settings, [1, 3], 4, 60, 1, seen.append)
    assert report.works == tuple(seen)
    assert [(each.rows, each.num_answers) for each in seen] == [(1, 1), (3, 3)]
    for each in seen:
        assert each.plain_seconds > 0
        assert each.filling == pytest.approx(each.rows * each.fill_seconds / each.plain_seconds)
        assert (each.overlaps, each.hidden) == (False, 0.0)
    lines = report.lines()
    assert "compiles in" in lines[0]
    assert len(lines) == 3 + 2 + len(seen)


def test_nothing_is_reported_of_answers_that_do_not_hold(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "row_masks", lambda masks: None)
    with pytest.raises(SightlineError, match="expected"):
        measure_structured(settings, [2], 4, 60, 1, lambda work: None)


def test_more_rows_than_there_is_room_for_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--rows or --output-len"):
        measure_structured(settings, [2], 4, 4000, 1, lambda work: None)


def test_what_is_hidden_is_what_does_not_lengthen_a_step() -> None:
    def hidden(masked: float) -> float:
        return MaskedWork(4, 10e-3, masked, 0.5e-3, 1, 4, overlaps=True).hidden

    assert hidden(10e-3) == 1.0
    assert hidden(9e-3) == 1.0
    assert hidden(11e-3) == pytest.approx(0.5)
    assert hidden(14e-3) == 0.0
