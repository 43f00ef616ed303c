"""What an operator is told at start-up and in `/server_info`: the limits that were chosen."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sightline.core.config import EngineConfig
from sightline.core.errors import ConfigError, SightlineError
from sightline.engine.measuring import LEAST_SECONDS
from sightline.opening import build_engine
from sightline.server.http.limits import Limits
from sightline.server.process import worker
from sightline.server.process.channel import Channel
from sightline.server.process.protocol import Loading, Opened, Report
from sightline.server.serve import memory_bound
from support.embedding_folder import save_embedder
from support.led_engines import led_engine
from support.local_front_end import local_front_end
from support.serving import serving
from support.tiny_served_model import save_tiny_served_model

NO_LIMIT = "no limit of a step's time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_served_model(tmp_path_factory.mktemp("llama"))


class FrontEnd(Channel):
    """Hears what the engine process says while it starts."""

    def __init__(self) -> None:
        self.heard: list[Report] = []

    def send(self, reports: Sequence[Report]) -> None:
        self.heard += reports


def built(folder: Path, **settings: object) -> Opened:
    config = EngineConfig(model=str(folder), cache_tokens=2048, **settings)  # type: ignore[arg-type]
    front_end = FrontEnd()
    opened, _ = worker.build(config, front_end)
    assert {type(each) for each in front_end.heard} == {Loading}
    return opened


def test_a_model_that_is_missing_or_not_supported_is_known_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["UnheardOfModel"]}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for model, message in ((tmp_path / "none", "no such path"), (tmp_path, "UnheardOfModel")):
        front_end = FrontEnd()
        with pytest.raises(SightlineError, match=message):
            worker.build(EngineConfig(model=str(model)), front_end)
        assert front_end.heard == []


@pytest.mark.parametrize(
    ("given", "told", "line"), [(20.0, 20.0, "steps of at most 20 ms while rows generate"), (0.0, 0.0, NO_LIMIT)]
)
def test_a_limit_that_was_given_is_told(folder: Path, given: float, told: float, line: str) -> None:
    opened = built(folder, max_step_ms=given)
    assert opened.config["max_step_ms"] == told
    assert line in opened.lines


def test_a_limit_that_was_not_given_is_chosen_and_told(folder: Path) -> None:
    opened = built(folder)
    chosen = opened.config["max_step_ms"]
    assert isinstance(chosen, float)
    assert chosen >= LEAST_SECONDS * 1e3
    assert f"steps of at most {chosen:.0f} ms while rows generate" in opened.lines


def test_the_speed_of_one_request_is_told_if_it_was_measured(folder: Path) -> None:
    [told] = [line for line in built(folder).lines if "tokens/s" in line and line.startswith("one request")]
    found = re.fullmatch(r"one request gets about ([\d,]+) tokens/s, as just measured", told)
    assert found is not None
    assert 1 < int(found[1].replace(",", "")) < 1_000_000
    assert not [line for line in built(folder, max_step_ms=20.0).lines if line.startswith("one request")]


def test_an_engine_that_embeds_limits_steps_of_several_texts(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "embedder")
    opened = built(folder, task="embed")
    assert opened.config["max_step_ms"] == pytest.approx(LEAST_SECONDS * 1e3)
    assert "steps of at most 50 ms unless one text takes longer" in opened.lines
    assert NO_LIMIT in built(folder, task="embed", max_step_ms=0.0).lines
    assert opened.vector_size is not None
    assert built(folder, task="embed", max_step_ms=30.0).config["max_step_ms"] == 30.0


def test_what_is_built_is_described(folder: Path) -> None:
    opened = built(folder, max_queued_requests=7, max_num_seqs=3)
    assert (opened.model, opened.vector_size) == (folder.name, None)
    assert (opened.max_model_len, opened.max_rows, opened.max_queued) == (1024, 3, 7)
    assert opened.config["dtype"] == "float32"
    assert opened.config["device"] == "cpu"


def test_what_replicas_have_together_is_told(folder: Path) -> None:
    """As many requests are let in as all replicas can run, and what is of each is said to be."""
    config = EngineConfig(model=str(folder), cache_tokens=2048, max_num_seqs=3, data_parallel_size=2)
    with led_engine(folder, config) as engine:
        opened = worker.describe("m", engine, engine.tokenizer, None)
    assert opened.max_rows == 6
    assert (opened.config["max_rows"], opened.config["data_parallel_size"]) == (3, 2)


def test_a_model_without_a_tokenizer_is_not_served(folder: Path) -> None:
    engine = build_engine(EngineConfig(model=str(folder), cache_tokens=2048, skip_tokenizer_init=True))
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        worker.describe("m", engine, engine.tokenizer, None)


def test_server_info_tells_the_limit_of_steps_and_the_front_ends_memory(folder: Path) -> None:
    opened, limits = built(folder, max_step_ms=20.0), Limits(max_answer_bytes=1 << 20)

    async def work() -> None:
        async with local_front_end(opened, limits) as front_end:
            info = (await front_end.get("/server_info")).value
        assert info["config"]["max_step_ms"] == 20.0
        assert info["limits"]["max_front_end_bytes"] == memory_bound(limits)
        assert "steps of at most 20 ms while rows generate" in info["layers"]

    asyncio.run(work())


def test_a_server_prints_at_start_what_server_info_tells(folder: Path) -> None:
    words = ("--text-processes", "2", "--max-step-ms", "70", "--speculative-config", '{"method": "ngram"}')
    with serving(str(folder), *words) as server:
        info = json.loads(server.get("/server_info")[1])
        deadline = time.monotonic() + 10
        while not any("ready in" in line for line in server.lines):
            assert time.monotonic() < deadline, server.lines
            time.sleep(0.02)
    lines = "\n".join(server.lines)
    assert f"steps of at most {info['config']['max_step_ms']:.0f} ms while rows generate" in lines
    [(mebibytes, processes)] = re.findall(r"front end: at most (\d+) MiB, (\d+) text processes", lines)
    assert int(mebibytes) == info["limits"]["max_front_end_bytes"] >> 20
    assert (info["config"]["max_step_ms"], processes) == (70.0, "2")
    assert info["config"]["speculation"] == "ngram, at most 7 tokens"
