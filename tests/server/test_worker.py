"""The engine process's loop: commands in, reports out, on a real engine with a tiny model."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.core.config import EngineConfig
from sightline.core.errors import DeviceFaultError
from sightline.core.request import Terms
from sightline.server.process import worker
from sightline.server.process.channel import Channel, FrontEndGoneError
from sightline.server.process.frames import LENGTH_BYTES, ProtocolError
from sightline.server.process.loop import GeneratingPurpose
from sightline.server.process.protocol import (
    Accepted,
    Cancel,
    Configure,
    Delta,
    Ended,
    Failed,
    Probe,
    Progress,
    Refused,
    Report,
    command_codec,
    report_codec,
)
from sightline.server.process.worker import model_name
from support.commands import submit
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts
from support.worker_front_end import FrontEnd

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def front_end(folder: Path) -> Iterator[FrontEnd]:
    llm = LLM(str(folder), skip_tokenizer_init=True, cache_tokens=512, page_size=4, max_queued_requests=8)
    made = FrontEnd(llm)
    yield made
    made.end()


def numbered(lengths: list[int]) -> dict[int, tuple[int, ...]]:
    return {number: tuple(prompt) for number, prompt in enumerate(random_prompts(lengths), 1)}


def test_every_prompt_is_accepted_first_gains_its_tokens_in_order_and_ends_once(front_end: FrontEnd) -> None:
    front_end.send(submit(numbered([5, 9]), PARAMS, Terms()))
    reports = front_end.until(Ended, 2)
    about = [report for report in reports if not isinstance(report, Progress)]
    assert [type(report) for report in about[:2]] == [Accepted, Accepted]
    for number in (1, 2):
        deltas = [report for report in about if isinstance(report, Delta) and report.number == number]
        assert sum(delta.num_tokens for delta in deltas) == PARAMS.max_tokens
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        [ended] = [report for report in about if isinstance(report, Ended) and report.number == number]
        assert about.index(ended) > about.index(deltas[-1])
        assert ended.error is None
        assert ended.phases.queue >= 0.0


def test_many_prompts_are_taken_in_between_steps_and_none_is_lost(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run go on meanwhile, and another command's prompt does not wait for the last of them."""
    monkeypatch.setattr("sightline.server.process.loop.TAKE_IN_SECONDS", 0.0)
    prompts = numbered([4, 5, 6, 7, 4, 5])
    many = {number: prompts[number] for number in (1, 2, 3, 4, 5)}
    front_end.send(submit(many, PARAMS, Terms()), submit({6: prompts[6]}, PARAMS, Terms()), Cancel(5))
    reports = [report for report in front_end.until(Ended, 5) if not isinstance(report, Progress)]
    order = [report.number for report in reports if isinstance(report, Accepted)]
    assert sorted(order) == [1, 2, 3, 4, 6]
    assert order.index(6) <= 1
    first_delta = next(place for place, report in enumerate(reports) if isinstance(report, Delta))
    assert any(isinstance(report, Accepted) for report in reports[first_delta:])
    assert is_at_rest(front_end.llm)


def test_what_cannot_run_is_refused_and_the_rest_runs(front_end: FrontEnd) -> None:
    front_end.send(submit({1: (10**6,), 2: (1, 2, 3)}, PARAMS, Terms()))
    reports = front_end.until(Ended)
    refused = next(report for report in reports if isinstance(report, Refused))
    assert (refused.number, refused.is_full) == (1, False)
    assert "token ids" in refused.message


def test_a_full_queue_is_told_apart_from_what_is_invalid(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    # No step runs between two prompts, however slow the machine is.
    monkeypatch.setattr("sightline.server.process.loop.TAKE_IN_SECONDS", 60.0)
    front_end.send(submit(numbered([3] * 10), PARAMS, Terms()))
    reports = front_end.until(Refused, 2)
    assert [report.is_full for report in reports if isinstance(report, Refused)] == [True, True]


def test_a_cancelled_request_is_not_heard_of_again_and_its_pages_are_free(front_end: FrontEnd) -> None:
    front_end.send(submit({7: (1, 2, 3)}, SamplingParams(max_tokens=400, ignore_eos=True), Terms()))
    front_end.until(Delta)
    front_end.send(Cancel(7))
    last = None
    while last is None or last.metrics.num_requests_running:
        [last] = [report for report in front_end.until(Progress) if isinstance(report, Progress)][-1:]
    assert last.metrics.kv_cache_usage_perc == 0.0
    front_end.send(submit({8: (1, 2)}, PARAMS, Terms()))
    assert {report.number for report in front_end.until(Ended) if isinstance(report, Accepted | Delta | Ended)} == {8}
    front_end.end()
    assert is_at_rest(front_end.llm)


def test_a_probe_makes_a_step_where_nothing_runs(front_end: FrontEnd) -> None:
    steps = []
    for _ in range(2):
        front_end.send(Probe())
        [progress] = front_end.until(Progress)
        assert isinstance(progress, Progress)
        assert progress.metrics.num_requests_running == 0
        steps.append(progress.metrics.steps)
    assert 0 < steps[0] < steps[1]


def test_probes_change_nobodys_seed(folder: Path) -> None:
    """The seeds of requests come from the engine's: how often a load balancer asks `/ready` must not change them."""
    seeds = []
    for num_probes in (0, 3):
        purpose = GeneratingPurpose(LLM(str(folder), skip_tokenizer_init=True, cache_tokens=512, seed=7).engine)
        for _ in range(num_probes):
            purpose.engine.forget(purpose.probe())
        seeds.append(purpose.engine.params(purpose.submit([1, 2], SamplingParams(), Terms())).seed)
    assert seeds[0] == seeds[1]


def test_a_device_that_fails_answers_everybody_and_ends_the_process(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: object) -> torch.Tensor:
        raise torch.AcceleratorError("the device is gone")

    monkeypatch.setattr(front_end.llm.engine.runtime.runner, "forward", failing)
    front_end.send(submit(numbered([5, 9]), PARAMS, Terms()))
    reports = front_end.until(Ended, 2)
    assert all("the device" in (report.error or "") for report in reports if isinstance(report, Ended))
    front_end._thread.join(20)
    [raised] = front_end.raised
    assert isinstance(raised, DeviceFaultError)


def test_reports_that_are_too_much_for_a_frame_go_in_several() -> None:
    near, far = socket.socketpair()
    with near, far:
        channel = Channel(near, lambda: None, max_report_bytes=200)
        sent = [Delta(number, 0, "x" * 40, 1, None) for number in range(20)]
        channel.send(sent)
        codec, received = report_codec(), list[Report]()
        while len(received) < len(sent):
            length = codec.length(far.recv(LENGTH_BYTES, socket.MSG_WAITALL))
            assert length <= 200
            received += codec.decode(far.recv(length, socket.MSG_WAITALL))
        assert received == sent
        with pytest.raises(ProtocolError):
            channel.send([Delta(1, 0, "x" * 400, 1, None)])


def test_a_front_end_that_goes_ends_the_loop(front_end: FrontEnd) -> None:
    front_end.close()
    [raised] = front_end.raised
    assert isinstance(raised, FrontEndGoneError)


def test_a_model_is_called_by_the_last_part_of_its_path_or_by_its_id(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "file.Q8_0.gguf").touch()
    assert model_name(str(tmp_path / "my-model")) == "my-model"
    assert model_name(str(tmp_path / "file.Q8_0.gguf")) == "file.Q8_0"
    assert model_name("owner/name") == "owner/name"
    assert model_name(None).startswith("SmolLM2")


def test_what_is_built_is_no_matter_of_garbage_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    loop = (Failed("nobody reads it"), lambda: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr(worker, "build", lambda config, channel: loop)
    monkeypatch.setattr(worker, "log_as_json", lambda level=None: None)
    monkeypatch.setattr(worker, "_end_soon", lambda: None)
    front_end, connection = socket.socketpair()
    with front_end:
        thread = Thread(target=worker.serve_engine, args=(connection,))
        thread.start()
        front_end.sendall(command_codec().encode([Configure(EngineConfig(), "INFO")]))
        thread.join(20)
    gc.unfreeze()
    assert frozen[0] > 10_000


def test_the_state_after_the_last_request_is_told(front_end: FrontEnd) -> None:
    front_end._socket.settimeout(5)
    for _ in range(2):  # The second ends before another report is due.
        front_end.send(submit({1: (1, 2, 3)}, PARAMS, Terms()))
        reports = front_end.until(Ended)
        while not isinstance(reports[-1], Progress):
            reports += front_end.receive()
        assert reports[-1].metrics.num_requests_running == 0
