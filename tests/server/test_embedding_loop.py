"""The loop of an engine process that embeds: callers in turn, cancellations, refusals, probes. On a tiny decoder."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from sightline import LLM
from sightline.attention.planner import PlannedBatch
from sightline.core.request import Terms
from sightline.llm import TokensPrompt
from sightline.server.process.channel import Channel
from sightline.server.process.frames import LENGTH_BYTES
from sightline.server.process.loop import EmbeddingPurpose, Worker
from sightline.server.process.protocol import (
    Cancel,
    Command,
    Ended,
    Probe,
    Progress,
    Refused,
    Report,
    Stop,
    Vector,
    command_codec,
    report_codec,
)
from support.commands import submit
from support.tiny_models import make_model, random_prompts

STEP_TOKENS = 64


class FrontEnd:
    """The other end of a worker's socket. Commands that are sent before `start` come in together."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._socket, self._other = socket.socketpair()
        self._socket.settimeout(20)
        self._thread = Thread(
            target=Worker(EmbeddingPurpose(llm.embedder.embedder), Channel(self._other, lambda: None)).run
        )

    def start(self, *commands: Command) -> None:
        self._socket.sendall(command_codec().encode(commands))
        if self._thread.ident is None:
            self._thread.start()

    def receive(self) -> list[Report]:
        codec = report_codec()
        length = codec.length(self._socket.recv(LENGTH_BYTES, socket.MSG_WAITALL))
        return codec.decode(self._socket.recv(length, socket.MSG_WAITALL))

    def end(self) -> None:
        self.start(Stop())
        self._thread.join(20)
        self._socket.close()
        self._other.close()


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    make_model("llama").save_pretrained(tmp_path)
    settings = {"max_model_len": STEP_TOKENS, "max_num_batched_tokens": STEP_TOKENS}
    made = FrontEnd(LLM(str(tmp_path), task="embed", skip_tokenizer_init=True, **settings))  # type: ignore[arg-type]
    yield made
    made.end()


def texts(count: int, length: int, first: int) -> dict[int, tuple[int, ...]]:
    return {number: tuple(text) for number, text in enumerate(random_prompts([length] * count), first)}


def numbers(reports: list[Report]) -> list[int]:
    return [report.number for report in reports if isinstance(report, Vector)]


def test_vectors_are_those_of_the_model_and_one_text_that_cannot_be_is_refused_alone(front_end: FrontEnd) -> None:
    asked = texts(2, 9, 1)
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in asked.values()]
    expected = front_end.llm.embed(prompts, use_tqdm=False)
    front_end.start(submit({**asked, 3: (10**6,)}, None, Terms()))
    reports: list[Report] = []
    while len(numbers(reports)) < len(asked) or not any(isinstance(report, Refused) for report in reports):
        reports += front_end.receive()
    assert [report.number for report in reports if isinstance(report, Refused)] == [3]
    found = {report.number: np.frombuffer(report.numbers, "<f4") for report in reports if isinstance(report, Vector)}
    for number, each in zip(asked, expected, strict=True):
        np.testing.assert_allclose(found[number], each.outputs.embedding, atol=1e-6)


def test_a_caller_with_one_text_does_not_wait_for_one_with_many(front_end: FrontEnd) -> None:
    front_end.start(submit(texts(20, 16, 1), None, Terms("flood")), submit(texts(1, 16, 100), None, Terms("other")))
    first = numbers(front_end.receive())
    assert 100 in first
    assert len(first) <= STEP_TOKENS // 16
    left = [number for _ in range(5) for number in numbers(front_end.receive())]
    assert sorted(first + left) == [*range(1, 21), 100]
    assert [number for number in first + left if number != 100] == list(range(1, 21))


def test_a_cancelled_text_is_not_embedded(front_end: FrontEnd) -> None:
    front_end.start(submit(texts(3, 8, 1), None, Terms()), Cancel(2))
    assert numbers(front_end.receive()) == [1, 3]


def test_a_text_whose_states_are_no_numbers_fails_alone(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt, runner = texts(5, 8, 1), front_end.llm.embedder.embedder.runtime.runner
    forward = runner.forward

    def spoiling(planned: PlannedBatch) -> Tensor:
        states = forward(planned).clone()
        for row, tokens in enumerate(planned.batch.work.tokens):
            if tuple(tokens) == spoilt[4]:
                states[row] = torch.nan
        return states

    monkeypatch.setattr(runner, "forward", spoiling)
    front_end.start(submit(spoilt, None, Terms()))
    reports = front_end.receive()
    assert numbers(reports) == [1, 2, 3, 5]
    [ended] = [report for report in reports if isinstance(report, Ended) and report.error is not None]
    assert ended.number == 4
    assert "NaN" in str(ended.error)


def test_an_embedding_engine_reports_its_cache(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), task="embed", skip_tokenizer_init=True, max_model_len=64, prefix_caching=True, page_size=4)
    front_end = FrontEnd(llm)
    try:
        asked = texts(1, 17, 1)
        for number in (1, 2):
            front_end.start(submit({number: asked[1]}, None, Terms()))
            progress = front_end.receive()[-1]
        assert isinstance(progress, Progress)
        assert progress.metrics.prefix_cache_queries == 34
        assert progress.metrics.prefix_cache_hits == 16
        assert progress.metrics.kv_cache_usage_perc == 0.0
        assert progress.metrics.request_success == {"stop": 2}
        assert progress.metrics.prompt_tokens == 34
    finally:
        front_end.end()


def test_a_probe_makes_a_step(front_end: FrontEnd) -> None:
    front_end.start(Probe())
    first = front_end.receive()[-1]
    front_end.start(Probe())
    second = front_end.receive()[-1]
    assert isinstance(first, Progress)
    assert isinstance(second, Progress)
    assert 0 < first.metrics.steps < second.metrics.steps
