"""An engine whose model is divided among ranks, which are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from sightline.core.config import EngineConfig
from sightline.core.device import detect_device
from sightline.core.errors import RankLostError
from sightline.core.ledger import Ledger
from sightline.core.request import SamplingParams
from sightline.distributed.channels import OrderReceiver, OrderSender
from sightline.distributed.collectives import connect
from sightline.distributed.ranks import Place, Rank
from sightline.engine.engine import Engine
from sightline.models.loading.opening import open_checkpoint
from sightline.opening import build_engine_of
from sightline.runner.build import build_runtime, make_recorder
from sightline.runner.following import Follower
from sightline.runner.roles import Follows, Leads
from support.tiny_models import prompts_alike, random_prompts

TIMEOUT_S = 20.0
PROMPTS = [*random_prompts([3, 41, 18, 9, 30], seed=4), *prompts_alike(24, 3, 5)]
FORKED = random_prompts([8, 12], seed=9)
"""Their continuations share whole pages of any size, and copy three tokens if pages have four."""
NUM_NEW = 20


class QueueSender(OrderSender):
    """Puts every message into a queue for each rank."""

    def __init__(self, queues: list[queue.SimpleQueue[bytes]]) -> None:
        self._queues = queues
        self.messages: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.messages.append(message)
        for each in self._queues:
            each.put(message)

    def why_lost(self) -> str:
        return ""

    def wait_until_ready(self) -> None:
        """Orders wait for the ranks."""

    def begin_serving(self) -> None:
        """Steps always have the same time."""

    def close(self) -> None:
        """The test waits for the threads."""


class QueueReceiver(OrderReceiver):
    def __init__(self, messages: queue.SimpleQueue[bytes]) -> None:
        self._messages = messages

    def receive(self) -> bytes:
        try:
            return self._messages.get(timeout=TIMEOUT_S)
        except queue.Empty as error:
            raise RankLostError("the leading rank says nothing") from error


@contextmanager
def led_engine(folder: Path, config: EngineConfig, timeout_s: float = TIMEOUT_S) -> Iterator[Engine]:
    """The engine of the first rank. The others end with it; what they raised is raised here."""
    size, store, device = config.num_ranks, HashStore(), detect_device("cpu")
    queues: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(size - 1)]
    errors: list[BaseException] = []

    def follow(index: int) -> None:
        try:
            role = Follows(connect(Place(Rank(index, size), config.data_parallel_size), store, device, timeout_s, 2))
            ledger = Ledger()
            runtime = build_runtime(config, open_checkpoint(folder, ledger), ledger, role=role)
            follower = Follower(role, runtime, QueueReceiver(queues[index - 1]), make_recorder(runtime))
            while follower.follow():
                pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=follow, args=(index,), daemon=True) for index in range(1, size)]
    for each in threads:
        each.start()
    ledger = Ledger()
    links = connect(Place(Rank(0, size), config.data_parallel_size), store, device, timeout_s, 2)
    role = Leads(links, QueueSender(queues))
    engine = build_engine_of(config, open_checkpoint(folder, ledger), ledger, role=role)
    try:
        yield engine
    finally:
        engine.close()
        for each in threads:
            each.join(TIMEOUT_S)
    if errors:
        raise errors[0]


def config_of(**settings: Any) -> EngineConfig:
    usual: dict[str, Any] = {
        "dtype": "float32",
        "cache_tokens": 1024,
        "max_num_seqs": 4,
        "max_model_len": 128,
        "skip_tokenizer_init": True,
    }
    return EngineConfig(**{**usual, **settings})


def answers(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, **params: Any) -> list[tuple[int, ...]]:
    """The tokens of every continuation, of requests that run together."""
    wanted = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, **params)
    names = [engine.submit(prompt, wanted) for prompt in prompts]
    while engine.has_work:
        engine.step()
    outputs = [engine.pop_output(name) for name in names]
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [tuple(each.token_ids) for output in outputs for each in output.outputs]


def alone(folder: Path, config: EngineConfig) -> Engine:
    ledger = Ledger()
    return build_engine_of(config, open_checkpoint(folder, ledger), ledger)


def sampled(engine: Engine, **params: Any) -> list[tuple[int, ...]]:
    names = [engine.submit(prompt, SamplingParams(max_tokens=NUM_NEW, **params)) for prompt in FORKED]
    while engine.has_work:
        engine.step()
    return [tuple(each.token_ids) for name in names for each in engine.pop_output(name).outputs]
