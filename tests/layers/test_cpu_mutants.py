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
from sightline.kernels.cpu import block_kernel, input_blocks, tile
from sightline.kernels.cpu.block_kernel import ProductArguments, product_kernel
from sightline.kernels.cpu.emitter import Emitter, Value
from sightline.kernels.cpu.input_blocks import INPUT_BLOCK_BYTES, SCALE_OFFSET, QuantiseArguments, quantise_kernel
from sightline.kernels.cpu.lookup_kernel import lookup_kernel
from sightline.kernels.cpu.processor import Instructions, Processor
from sightline.kernels.cpu.record import Record
from sightline.kernels.cpu.tile import PackedSpan, Tile
from sightline.kernels.cpu.vector_unit import NeonMatrixUnit
from sightline.layers import cpu_linear
from sightline.layers.cpu_compute import CpuCompute
from sightline.layers.cpu_embedding import CodedEmbedding
from sightline.layers.cpu_linear import CodedLinear
from sightline.layers.torch_operations import TorchOperations
from sightline.runner.recording import Recording
from sightline.runner.runner import Runner
from support.coded_weights import FORMS, defined_product, random_coded
from support.cpu_launchers import SerialLauncher
from support.spelled_units import SpelledMatrix, spelled_out
from support.tiny_models import make_model, random_prompts

pytestmark = pytest.mark.prove
CLOSE = 2e-6
Check = Callable[[Path], None]
Plant = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture(autouse=True)
def _fresh_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel with a fault is compiled anew, and nobody else gets it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kernels"))
    for kernels in (product_kernel, quantise_kernel, lookup_kernel):
        kernels.clear()
    yield
    for kernels in (product_kernel, quantise_kernel, lookup_kernel):
        kernels.clear()


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


def matrix_products_are_those_of_sdot(folder: Path) -> None:
    """Pairs of rows and a row without another, in tiles of all sizes: bit for bit, and close to the definition."""
    del folder
    generator = torch.Generator().manual_seed(4)
    weights = random_coded(FORMS["Q5_0"], 37, 96)
    for rows in (1, 2, 3, 7):
        x, outs = torch.randn(rows, 96, generator=generator) + 0.5, torch.full((2, rows, 37), torch.nan)
        with spelled_out() as spelled:
            for out, instructions in zip(outs, (Instructions.NEON_MATRIX, Instructions.NEON_DOT), strict=True):
                compute = spelled(instructions)
                CodedLinear(compute.pack([weights]), None, compute)(x, out)
        assert torch.equal(*outs), rows
        expected = defined_product(weights, x)
        assert (outs[0].double() - expected).abs().max() / expected.abs().max() < CLOSE, rows


def look_ups_in_panels_of_octets_are_exact(folder: Path) -> None:
    del folder
    weights, tokens, vectors = random_coded(FORMS["Q5_0"], 37, 96), torch.arange(37), torch.empty(37, 96)
    with spelled_out() as spelled:
        compute = spelled(Instructions.NEON_MATRIX)
        [matrix] = compute.pack([weights])
        CodedEmbedding(matrix, compute)(tokens, 1.0, vectors, TorchOperations())
    assert torch.equal(vectors, weights.dequantised())


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


def rows_of_a_pair_swapped(patch: pytest.MonkeyPatch, folder: Path) -> None:
    plain = NeonMatrixUnit._rows_of
    patch.setattr(NeonMatrixUnit, "_rows_of", lambda self, emitter, tile: plain(self, emitter, tile)[::-1])


def second_output_of_a_tile_dropped(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The next output has the sums of both."""

    def rows_of(self: NeonMatrixUnit, emitter: Emitter, tile: list[Value]) -> list[list[Value]]:
        return [[emitter.shuffle(part, [0, 0, 2, 2]) for part in row] for row in plain(self, emitter, tile)]

    plain = NeonMatrixUnit._rows_of
    patch.setattr(NeonMatrixUnit, "_rows_of", rows_of)


def second_output_of_an_odd_row_dropped(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def joined(self: NeonMatrixUnit, emitter: Emitter, halves: list[Value]) -> list[Value]:
        return [emitter.shuffle(part, [0, 0, 2, 2]) for part in plain(self, emitter, halves)]

    plain = NeonMatrixUnit._joined
    patch.setattr(NeonMatrixUnit, "_joined", joined)


def second_half_of_an_odd_row_dropped(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def add_neighbours(self: SpelledMatrix, emitter: Emitter, left: Value, right: Value) -> Value:
        return emitter.shuffle(left, [0, 2, 4, 6], right)

    patch.setattr(SpelledMatrix, "add_neighbours", add_neighbours)


def scale_of_the_other_row(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A row that has another takes the scale of that one."""

    def add(self: Tile, weights: tile.BlockOfWeights, inputs: list[Value]) -> None:
        last = len(inputs) - 1
        others.update({inputs[row]: inputs[min(row ^ 1, last)] for row in range(len(inputs))})
        plain_add(self, weights, inputs)

    def splat(self: Tile, inputs: Value, offset: int) -> Value:
        return plain_splat(self, others[inputs] if offset == SCALE_OFFSET else inputs, offset)

    others: dict[Value, Value] = {}
    plain_add, plain_splat = Tile.add, Tile._splat_float
    patch.setattr(Tile, "add", add)
    patch.setattr(Tile, "_splat_float", splat)


def octets_of_a_pair_in_the_order_of_a_row(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def octets(emitter: Emitter, given: Any, row: Value, codes: Value) -> list[Value]:
        return [emitter.add(codes, emitter.number(8 * octet)) for octet in range(4)]

    patch.setattr(input_blocks, "_octets_of_pairs", octets)


def odd_row_stored_as_one_of_a_pair(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def octets(emitter: Emitter, given: QuantiseArguments, row: Value, codes: Value) -> list[Value]:
        return plain(emitter, given._replace(rows=emitter.add(given.rows, emitter.number(1))), row, codes)

    plain = input_blocks._octets_of_pairs
    patch.setattr(input_blocks, "_octets_of_pairs", octets)


def look_up_in_the_first_half_of_a_panel_only(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def unpacked(self: PackedSpan, codes: Value, quad: int, part: int) -> Value:
        output, half = self._output, self._emitter.number(self._layout.panel // 2)
        self._output = self._emitter.build.urem(output, half)
        found = plain(self, codes, quad, part)
        self._output = output
        return found

    plain = PackedSpan._unpacked_quad
    patch.setattr(PackedSpan, "_unpacked_quad", unpacked)


def program_of_another_row_count(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Every step replays the program of one row."""

    def replay(self: Runner, recording: Recording, current: PlannedBatch) -> Tensor:
        smallest = min(self._recordings, key=lambda memory: 0 if memory.shape is None else memory.shape.size)
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
    rows_of_a_pair_swapped: matrix_products_are_those_of_sdot,
    second_output_of_a_tile_dropped: matrix_products_are_those_of_sdot,
    second_output_of_an_odd_row_dropped: matrix_products_are_those_of_sdot,
    second_half_of_an_odd_row_dropped: matrix_products_are_those_of_sdot,
    scale_of_the_other_row: matrix_products_are_those_of_sdot,
    octets_of_a_pair_in_the_order_of_a_row: matrix_products_are_those_of_sdot,
    odd_row_stored_as_one_of_a_pair: matrix_products_are_those_of_sdot,
    look_up_in_the_first_half_of_a_panel_only: look_ups_in_panels_of_octets_are_exact,
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
