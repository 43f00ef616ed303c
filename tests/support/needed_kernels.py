"""Tells which kernels random steps need that the warm-up of an engine did not compile. A script.

    python -m support.needed_kernels FOLDER SETTING=VALUE ...

Stands for an H200: Triton computes the key of every launch as it would there, and nothing is compiled or run. Prints
the number of kernels that the warm-up compiled, then a line for each that a step needed afterwards.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from sightline.core.batch import CAUSAL, RowMask
from sightline.core.config import EngineConfig, Task
from sightline.core.ledger import Ledger
from sightline.kernels.triton.chip import Chip
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.build import build_embedding_runtime, build_runtime
from sightline.runner.runtime import Runtime
from sightline.runner.warm_up import StepKind, WarmUp
from support import recorded_graphs
from support.recorded_graphs import RECORDING

NUM_STEPS = 200
H200 = Chip(multiprocessors=132, shared_bytes=232_448, overlaps=True)


class NoDriver:
    """Stands for the driver of a GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Kernels:
    """The kernels that launches asked for, each once."""

    def __init__(self) -> None:
        self.asked: dict[str, None] = {}

    def note(self, function: JITFunction[Any], key: str, *_: object) -> None:
        """In place of compiling; without a kernel, Triton launches nothing."""
        self.asked[f"{function.fn.__name__} {key}"] = None


def random_kind(draw: random.Random, runtime: Runtime, *, is_whole: bool) -> StepKind:
    """A step that a scheduler might make."""
    config = runtime.config
    room, pages = config.max_step_tokens, config.cache_tokens // config.page_size
    queries, page = list[int](), config.page_size
    context = 0 if is_whole else draw.choice([0, 1, page - 1, page, draw.randrange(config.max_model_len // 2)])
    most = draw.choice([1, 2, 4, 16, config.max_rows])
    scale = draw.choice([1, 4, 32, room])
    for _ in range(draw.randint(1, most)):
        tokens = 1 if draw.random() < 0.5 else draw.randint(1, min(scale, config.max_model_len - context))
        needed = -(-(context + tokens) // page)
        if tokens > room or (not is_whole and needed > pages):
            break
        queries.append(tokens)
        room, pages = room - tokens, pages - needed
    return StepKind(tuple(sorted(queries or [1])), context, draw.random() < 0.1, is_whole)


def build(config: EngineConfig) -> tuple[Runtime, RowMask, list[bool]]:
    """The runtime, its mask, and whether rows are whole texts."""
    ledger = Ledger()
    checkpoint = open_checkpoint(str(config.model), ledger)
    if Task(config.task) is Task.EMBED:
        runtime, definition = build_embedding_runtime(config, checkpoint, ledger)
        return runtime, definition.mask, [True]
    return build_runtime(config, checkpoint, ledger), CAUSAL, [False]


def main(folder: str, *settings: str) -> None:
    given: dict[str, Any] = dict(each.split("=", 1) for each in settings)
    given |= {name: int(value) for name, value in given.items() if value.isdecimal()}
    kernels, patch = Kernels(), pytest.MonkeyPatch()
    recorded_graphs.install(patch)
    driver.set_active(NoDriver())
    patch.setattr(JITFunction, "_do_compile", lambda self, key, *rest: kernels.note(self, key))
    patch.setattr(Chip, "of", staticmethod(lambda device: H200))
    patch.setattr("sightline.runner.build.detect_device", lambda _: RECORDING)
    runtime, mask, forms = build(EngineConfig(model=folder, enforce_eager=True, layer_kernels="triton", **given))
    warmed = dict(kernels.asked)
    draw = random.Random(0)
    steps = WarmUp(runtime.config, runtime.store, runtime.network, mask)
    kinds = [random_kind(draw, runtime, is_whole=draw.choice(forms)) for _ in range(NUM_STEPS)]
    needed = dict[str, StepKind]()
    for kind in kinds:
        before = len(kernels.asked)
        steps.run([kind], lambda _: None)
        needed |= dict.fromkeys(list(kernels.asked)[before:], kind)
    print(len(warmed))
    for key, kind in needed.items():
        print(f"{kind} {kind.queries}: {key}")


if __name__ == "__main__":
    main(*sys.argv[1:])
