"""The engine process: builds what the front end asks for, and works until told to stop.

Owns the way to the front end and the end of the process: when told to, when the front end is gone, and when the device
has failed; whoever started it decides what then. In between, `loop` works.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from sightline.core.config import EngineConfig, Task
from sightline.core.errors import ConfigError, SightlineError
from sightline.engine.measuring import LEAST_SECONDS, choose_limit
from sightline.engine.steps import StepLoop
from sightline.models.loading.default_model import default_model_path
from sightline.opening import build_engine, open_embedder
from sightline.runner.progress import BuildPhase, BuildStep
from sightline.runner.startup import startup_report
from sightline.server.logs import log_as_json
from sightline.server.process.channel import Channel, FrontEndGoneError
from sightline.server.process.child import inherited_socket
from sightline.server.process.loop import EmbeddingPurpose, GeneratingPurpose, Worker
from sightline.server.process.protocol import Configure, Failed, Loading, Opened
from sightline.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("sightline.engine")
OPENAI_TEMPERATURE = 1.0
"""The default temperature, as in OpenAI's API, unless the model's own files say how to sample."""
ORPHAN_SECONDS = 10.0
"""Time that a running step has to end once the front end is gone."""


def model_name(model: str | None) -> str:
    """Returns a model's name: a Hugging Face id as it is, or the last part of a path."""
    if model is None:
        return default_model_path().stem
    path = Path(model)
    if not path.exists():
        return model
    return path.resolve().name.removesuffix(".gguf")


def describe(
    name: str, engine: StepLoop[Any, Any, Any], tokenizer: Tokenizer | None, vector_size: int | None
) -> Opened:
    """Returns what the front end needs to know."""
    if tokenizer is None:
        raise ConfigError("expected a model with its tokenizer, got one without; leave skip_tokenizer_init out")
    runtime, ledger, config, limit = engine.runtime, engine.ledger, engine.runtime.config, engine.pace.max_step_ms
    place = runtime.role.links.place
    shown = asdict(config) | {
        "device": config.device.name,
        "dtype": str(config.dtype).removeprefix("torch."),
        "cache_dtype": str(config.cache_dtype).removeprefix("torch."),
        "quantization": config.quantization.value,
        "layer_kernels": config.layer_kernels.value,
        "cache_tokens": config.cache_tokens,
        "tensor_parallel_size": place.within.size,
        "data_parallel_size": place.num_replicas,
        "memory": str(config.memory),
        "graph_sizes": ",".join(map(str, config.graph_sizes)),
        "max_step_ms": limit or 0.0,
        "speculation": None if config.speculation is None else str(config.speculation),
    }
    when = "while rows generate" if vector_size is None else "unless one text takes longer"
    told = ["no limit of a step's time" if limit is None else f"steps of at most {limit:.0f} ms {when}"]
    if engine.pace.has_decoded:
        told.append(f"one request gets about {1 / engine.pace.fastest_decode_seconds:,.0f} tokens/s, as just measured")
    return Opened(
        model=name,
        tokenizer=msgspec.msgpack.encode(tokenizer.to_data()),
        vocab_size=runtime.definition.vocab_size,
        vector_size=vector_size,
        max_model_len=config.max_model_len,
        max_rows=config.max_rows * place.num_replicas,
        max_queued=config.max_queued,
        config=shown,
        lines=(*startup_report(runtime, ledger.notes), *told),
        degradations=tuple(map(str, ledger.degradations)),
        notes=tuple(map(str, ledger.notes)),
        tools_refusal=tokenizer.answers.refusal,
    )


def build(config: EngineConfig, channel: Channel) -> tuple[Opened, Callable[[], None]]:
    """Builds the engine or embedder. Returns what the front end needs to know, and the loop."""
    name = model_name(config.model)

    begun = set[BuildPhase]()

    def tell(step: BuildStep) -> None:
        if step.phase not in begun:
            begun.add(step.phase)
            logger.info("starting: %s", step.phase.value)
        # A checkpoint may have thousands of tensors, each of which is read in no time.
        if step.done == 0 or step.phase is not BuildPhase.WEIGHTS:
            channel.send([Loading(str(step))])

    if Task(config.task) is Task.EMBED:
        texts = open_embedder(config, tell)
        embedder = texts.embedder
        if config.max_step_ms is None:
            # Steps are short, so that a caller with one text does not wait for many texts of another caller.
            embedder.pace.max_seconds = LEAST_SECONDS
        opened = describe(name, embedder, texts.tokenizer, embedder.definition.state_size)
        return opened, Worker(EmbeddingPurpose(embedder), channel).run
    engine = build_engine(config, tell, OPENAI_TEMPERATURE)
    if engine.grammars is not None:
        # Before anybody waits: no other thread of Python runs meanwhile.
        reason = engine.grammars.warm_up()
        if reason is not None:
            engine.ledger.note("structured_outputs", reason)
    if config.max_step_ms is None:
        choose_limit(engine)
    return describe(name, engine, engine.tokenizer, None), Worker(GeneratingPurpose(engine), channel).run


def work(run: Callable[[], None]) -> None:
    """Runs a loop with everything that is there by now left out of garbage collections, which take a tenth of a large
    step's time where they look through a model and a vocabulary again and again."""
    gc.collect()
    gc.freeze()
    run()


def _end_soon() -> None:
    """Ends the process even if a step hangs: nobody waits for its result."""
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def serve_engine(connection: socket.socket) -> int:
    """Builds what the front end asks for, and works until told to stop."""
    with connection:
        try:
            return _serve(Channel(connection, _end_soon))
        except FrontEndGoneError:
            logger.warning("the front end is gone; the engine process ends")
    return 0


def _serve(channel: Channel) -> int:
    match channel.take(wait=True):
        case [Configure(config, log_level)]:
            log_as_json(log_level)
        case _:
            logger.error("expected Configure first, got something else")
            return 1
    try:
        opened, run = build(config, channel)
    except SightlineError as error:
        channel.send([Failed(str(error))])
        return 1
    channel.send([opened])
    work(run)
    return 0


def main() -> None:
    """The entry point: `python -m sightline.server.process.worker DESCRIPTOR`, see `start_child`."""
    # A terminal's Ctrl-C reaches every process; the front end decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_as_json()
    try:
        sys.exit(serve_engine(inherited_socket(sys.argv[1])))
    except Exception as error:
        logger.critical("the engine process ends: %s", error, exc_info=error)
        sys.exit(1)


if __name__ == "__main__":
    main()
