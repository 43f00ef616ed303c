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

from sightline.core.config import EngineConfig, Task
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.ledger import Ledger
from sightline.llm import build_engine, open_embedder
from sightline.models.loading.default_model import default_model_path
from sightline.runner.build import Runtime
from sightline.runner.startup import startup_report
from sightline.server.logs import log_as_json
from sightline.server.process.channel import Channel, FrontEndGoneError
from sightline.server.process.loop import EmbeddingPurpose, GeneratingPurpose, Worker
from sightline.server.process.protocol import Configure, Failed, Opened
from sightline.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("sightline.engine")
ORPHAN_SECONDS = 10.0
"""What a step has to end in, once the front end is gone."""


def model_name(model: str | None) -> str:
    """What a model is called: a Hugging Face id as it is, a path by its last part."""
    if model is None:
        return default_model_path().stem
    path = Path(model)
    if not path.exists():
        return model
    return path.resolve().name.removesuffix(".gguf")


def describe(
    name: str, runtime: Runtime, tokenizer: Tokenizer | None, ledger: Ledger, vector_size: int | None
) -> Opened:
    """What the front end needs to know."""
    if tokenizer is None:
        raise ConfigError("expected a model with its tokenizer, got one without; leave skip_tokenizer_init out")
    config = runtime.config
    shown = asdict(config) | {
        "device": config.device.name,
        "dtype": str(config.dtype).removeprefix("torch."),
        "cache_dtype": str(config.cache_dtype).removeprefix("torch."),
        "quantization": config.quantization.value,
        "cache_tokens": config.cache_tokens,
    }
    return Opened(
        model=name,
        tokenizer=tokenizer.to_data(),
        vocab_size=runtime.definition.vocab_size,
        vector_size=vector_size,
        max_model_len=config.max_model_len,
        max_rows=config.max_rows,
        max_queued=config.max_queued,
        config=shown,
        lines=tuple(startup_report(runtime, ledger.notes)),
        degradations=tuple(map(str, ledger.degradations)),
        notes=tuple(map(str, ledger.notes)),
    )


def build(config: EngineConfig, channel: Channel) -> tuple[Opened, Callable[[], None]]:
    """What is built, and its loop."""
    name = model_name(config.model)
    if Task(config.task) is Task.EMBED:
        texts = open_embedder(config)
        embedder = texts.embedder
        opened = describe(name, embedder.runtime, texts.tokenizer, texts.ledger, embedder.definition.state_size)
        return opened, Worker(EmbeddingPurpose(embedder), channel).run
    engine = build_engine(config)
    return describe(name, engine.runtime, engine.tokenizer, engine.ledger, None), Worker(
        GeneratingPurpose(engine), channel
    ).run


def work(run: Callable[[], None]) -> None:
    """Runs a loop with everything that is there by now left out of garbage collections, which take a tenth of a large
    step's time where they look through a model and a vocabulary again and again."""
    gc.collect()
    gc.freeze()
    run()


def _end_soon() -> None:
    """A step that never ends keeps nobody waiting: there is nobody left."""
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def serve_engine(path: str) -> int:
    """Connects to the front end at `path`, builds what it asks for, and works until told to stop."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
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
    """The entry point: `python -m sightline.server.process.worker SOCKET`."""
    # A terminal's Ctrl-C reaches every process; the front end decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_as_json()
    try:
        sys.exit(serve_engine(sys.argv[1]))
    except Exception as error:
        logger.critical("the engine process ends: %s", error, exc_info=error)
        sys.exit(1)


if __name__ == "__main__":
    main()
