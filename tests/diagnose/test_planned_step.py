"""The steps that are shown are those that the scheduler's policy and the engine's own planner would make."""

from __future__ import annotations

from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sightline.core.config import EngineConfig
from sightline.core.errors import ConfigError
from sightline.core.machines import find_device
from sightline.diagnose.explain import explain
from sightline.diagnose.explanation import Explanation
from sightline.diagnose.plan_picture import _runs, picture
from sightline.diagnose.planned_step import PlannedStep, RowLength, parse_rows
from support.model_configs import PUBLIC, write_config

SMALL: Mapping[str, Any] = {"max_model_len": 8192, "max_num_seqs": 8, "max_num_batched_tokens": 512}
"""Of every engine here."""


def explained(folder: Path, model: str, device: str, rows: str, **settings: Any) -> Explanation:
    config = dict(PUBLIC[model]) | ({"num_hidden_layers": 4} if model == "deepseek_v3" else {})
    path = write_config(folder / model, config)
    return explain(EngineConfig(str(path), **dict(SMALL) | settings), find_device(device), parse_rows(rows))


def shapes(step: PlannedStep) -> list[tuple[int, int, int]]:
    return [(row.asked, row.context_len, row.query_len) for row in step.rows]


def test_rows_are_read_as_context_and_new_tokens() -> None:
    assert parse_rows("8192+512, 0+2048") == (RowLength(8192, 512), RowLength(0, 2048))


@pytest.mark.parametrize("text", ["", "5", "5+", "+5", "5+0", "-1+5", "5+5+5", "1e3+5", "5+9999999999999"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected rows as context\\+new tokens"):
        parse_rows(text)


def test_decode_rows_come_first_and_a_prompt_is_cut_where_the_step_is_full(tmp_path: Path) -> None:
    first, second = explained(tmp_path, "llama", "h200", "0+700,300+1").steps
    assert shapes(first) == [(1, 300, 1), (0, 0, 511)]
    assert shapes(second) == [(0, 511, 189)]
    assert [row.first_token for row in first.rows] == [0, 1]


def test_each_backend_has_its_rows(tmp_path: Path) -> None:
    [step] = explained(tmp_path, "llama", "h200", "0+100,300+1,40+1").steps
    [group] = step.groups
    assert [(part.backend, part.first_token, part.num_tokens) for part in group.parts] == [
        ("triton", 0, 2),
        ("flashinfer", 2, 100),
    ]
    # Neither runs here.
    assert {part.planned_by for part in group.parts} == {"torch"}
    assert group.buffers == {}
    assert group.policy == "paged"


def test_on_this_machines_cpu_the_chosen_backend_plans_and_its_buffers_are_shown(tmp_path: Path) -> None:
    [step] = explained(tmp_path, "gemma3", "cpu", "70+9,0+20", attention_backend="torch", cache_tokens=8192).steps
    assert len(step.groups) == 2
    for group in step.groups:
        [part] = group.parts
        assert (part.backend, part.planned_by, part.num_tokens) == ("torch", "torch", 29)
        assert group.buffers
        assert all(name.startswith(f"{group.name}[") for name in group.buffers)


def test_a_step_of_decode_rows_is_padded_to_a_captured_one(tmp_path: Path) -> None:
    [step] = explained(tmp_path, "llama", "h200", "100+1,90+1,80+1").steps
    assert (step.num_tokens, step.num_padding) == (3, 1)
    assert step.bucket == "4 tokens, one a row"
    [eager] = explained(tmp_path, "llama", "h200", "100+1,90+1,80+1", enforce_eager=True).steps
    assert (eager.num_padding, eager.bucket) == (0, None)


def test_a_row_has_the_pages_of_its_tokens_and_no_other_row_has_them(tmp_path: Path) -> None:
    [step] = explained(tmp_path, "llama", "h200", "100+1,0+64,63+2").steps
    assert [len(row.pages) for row in sorted(step.rows, key=lambda row: row.asked)] == [2, 1, 2]
    pages = [page for row in step.rows for page in row.pages]
    assert len(set(pages)) == len(pages)
    # The padding page is nobody's.
    assert 0 not in pages


def test_latent_rows_are_told_with_their_cheapest_way(tmp_path: Path) -> None:
    [step] = explained(tmp_path, "deepseek_v3", "h200", "4000+1,0+500", tensor_parallel_size=1).steps
    assert step.groups[0].ways == ("absorbed", "one-shot")


@pytest.mark.parametrize(
    ("rows", "what"),
    [("8000+193", "tokens of a row"), (",".join(["1+1"] * 9), "rows"), ("1000+1,1000+1", "pages")],
)
def test_rows_that_the_engine_could_not_hold_are_refused(tmp_path: Path, rows: str, what: str) -> None:
    settings = {"cache_tokens": 1500, "max_model_len": 1400} if what == "pages" else {}
    with pytest.raises(ConfigError, match=f"expected at most [0-9,]+ {what}, as the engine has"):
        explained(tmp_path, "llama", "h200", rows, **settings)


class _Page(HTMLParser):
    """Collects tags, what they load, and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    return page


def test_the_picture_shows_rows_pages_offsets_parts_and_padding_and_loads_nothing(tmp_path: Path) -> None:
    mixed = read(picture(explained(tmp_path, "llama", "h200", "300+100,40+1")))
    assert mixed.loaded == []
    assert "script" not in mixed.tags
    for text in ("row 0: 300 + 100", "row 1: 40 + 1", "flashinfer", "triton", "page 1", "group0"):
        assert any(text in each for each in mixed.texts), text
    padded = read(picture(explained(tmp_path, "llama", "h200", "100+1,90+1,80+1")))
    assert "1 tokens of padding" in padded.texts
    assert any("replayed in the captured step of 4 tokens" in each for each in padded.texts)


def test_what_a_models_files_say_is_escaped_in_the_picture(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)</script>"
    page = read(picture(explained(folder, "llama", "h200", "0+5")))
    assert "script" not in page.tags


def test_pages_that_follow_one_another_are_told_as_a_range() -> None:
    assert list(_runs([4, 5, 6, 2, 9, 10])) == ["4 to 6", "2", "9 to 10"]
    assert list(_runs([])) == []
