"""Faults planted in the CPU kernels and the programs made of them: each is caught by a check that is named for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from sightline import LLM, SamplingParams
from sightline.attention.planner import PlannedBatch
from sightline.kernels.cpu import block_kernel, tile
from sightline.kernels.cpu.block_kernel import ProductArguments, product_kernel
from sightline.kernels.cpu.emitter import Emitter, Value
from sightline.kernels.cpu.input_blocks import INPUT_BLOCK_BYTES, SCALE_OFFSET, quantise_kernel
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.record import Record
from sightline.kernels.cpu.tile import PackedSpan, Tile
from sightline.layers import cpu_linear
from sightline.layers.cpu_compute import CpuCompute
from sightline.layers.cpu_linear import CodedLinear
from sightline.runner.recording import Recording
from sightline.runner.runner import Runner
from support.coded_weights import FORMS, defined_product, random_coded
from support.cpu_launchers import SerialLauncher
from support.tiny_models import make_model, random_prompts

pytestmark = pytest.mark.prove
CLOSE = 2e-6
Check = Callable[[Path], None]
Plant = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture(autouse=True)
def _fresh_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel with a fault is compiled anew, and nobody else gets it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kernels"))
    for kernels in (product_kernel, quantise_kernel):
        kernels.cache_clear()
    yield
    for kernels in (product_kernel, quantise_kernel):
        kernels.cache_clear()


def products_are_their_definition(folder: Path) -> None:
    """An odd number of blocks and outputs, several rows and threads, and a second input in the same memory."""
    del folder
    generator = torch.Generator().manual_seed(4)
    compute = CpuCompute.on(SerialLauncher(3), Processor.detect())
    for name in ("Q4_1", "Q8_0"):
        weights = random_coded(FORMS[name], 37, 96)
        linear = CodedLinear(compute.pack([weights]), None, compute)
        for rows in (1, 5, 5):
            x, out = torch.randn(rows, 96, generator=generator) + 0.5, torch.full((rows, 37), torch.nan)
            linear(x, out)
            expected = defined_product(weights, x)
            assert (out.double() - expected).abs().max() / expected.abs().max() < CLOSE, (name, rows)


def shuffle_pages(llm: LLM) -> None:
    """Takes pages and gives them back in random order."""
    store = llm.engine.runtime.store
    rows = [store.open_row() for _ in range(60)]
    for row in rows:
        store.grow_row(row, 4)
    Random(5).shuffle(rows)
    for row in rows:
        store.close_row(row)


def tokens_are_those_of_torch(folder: Path) -> None:
    """Recorded steps of rows whose pages are in random order."""
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in random_prompts([13, 3, 9])]
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    answers = []
    for name in ("torch", "numba"):
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            cache_tokens=512,
            page_size=4,
            layer_kernels=name,
            attention_backend=name,
        )
        shuffle_pages(llm)
        answers.append([each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[1] == answers[0]


def scale_of_the_next_block(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def splat(self: Tile, inputs: Value, offset: int) -> Value:
        return plain(self, inputs, offset + INPUT_BLOCK_BYTES if offset == SCALE_OFFSET else offset)

    plain = Tile._splat_float
    patch.setattr(Tile, "_splat_float", splat)


def nibbles_swapped(patch: pytest.MonkeyPatch, folder: Path) -> None:
    plain = PackedSpan._unpacked
    patch.setattr(PackedSpan, "_unpacked", lambda self, codes, quad, part: plain(self, codes, (quad + 4) % 8, part))


def last_block_of_an_odd_row_dropped(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def arguments(**given: int) -> ProductArguments:
        return ProductArguments(**given | {"spans": given["spans"] - given["spans"] % 2})

    patch.setattr(cpu_linear, "ProductArguments", arguments)


def thread_border_off_by_one(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def share(self: Emitter, total: Value, thread: Value, num_threads: Value) -> tuple[Value, Value]:
        first, stop = plain(self, total, thread, num_threads)
        return first, self.build.sub(stop, self.number(1))

    plain = Emitter.share
    patch.setattr(Emitter, "share", share)


def stale_quantised_input(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Inputs are rounded once for each number of rows."""

    def launch(self: SerialLauncher, record: Record) -> None:
        key = (record.name, int(record.arguments[3]))
        if not record.name.startswith("quantise") or key not in rounded:
            plain(self, record)
        rounded.add(key)

    rounded: set[tuple[str, int]] = set()
    plain = SerialLauncher.launch
    patch.setattr(SerialLauncher, "launch", launch)


def sum_not_reset(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(block_kernel._ProductWriter, "_clear", lambda *_: None)


def minimum_forgotten(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def add(self: Tile, weights: tile.BlockOfWeights, inputs: list[Value]) -> None:
        plain(self, weights._replace(minima=None), inputs)

    plain = Tile.add
    patch.setattr(Tile, "add", add)


def program_of_another_row_count(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Every step replays the program of one row."""

    def replay(self: Runner, recording: Recording, current: PlannedBatch) -> Tensor:
        smallest = min(self._recordings, key=lambda memory: memory.shape.size)  # type: ignore[attr-defined]
        return plain(self, self._recordings[smallest], current)

    plain = Runner._replay
    patch.setattr(Runner, "_replay", replay)


FAULTS: dict[Plant, Check] = {
    scale_of_the_next_block: products_are_their_definition,
    nibbles_swapped: products_are_their_definition,
    last_block_of_an_odd_row_dropped: products_are_their_definition,
    thread_border_off_by_one: products_are_their_definition,
    stale_quantised_input: products_are_their_definition,
    sum_not_reset: products_are_their_definition,
    minimum_forgotten: products_are_their_definition,
    program_of_another_row_count: tokens_are_those_of_torch,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("check", dict.fromkeys(FAULTS.values()), ids=lambda check: check.__name__)
def test_without_a_fault_the_check_passes(check: Check, folder: Path) -> None:
    check(folder)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_every_fault_is_caught(plant: Plant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, folder)
    with pytest.raises((AssertionError, RuntimeError)):
        FAULTS[plant](folder)
