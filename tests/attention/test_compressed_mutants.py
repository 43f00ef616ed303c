"""Faults planted in the source of compressed attention with torch, each caught by the check it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from support.compressed_bench import Backends, CompressedBench, TextPart, branch, text_of
from support.planted_compressed import (
    ATTEND,
    COMPRESSOR,
    ENTRIES,
    INDEX,
    LAYOUT,
    STEP,
    SUMS,
    TILES,
    WINDOWS,
    plant,
)

pytestmark = pytest.mark.prove


def prompt(backends: Backends) -> None:
    """A prompt as one step."""
    bench, text = CompressedBench(backends), text_of(70, 0)
    bench.step([TextPart(bench.open_row(70), text, 0, 70)])


def short_prompt(backends: Backends) -> None:
    """A prompt that no entry is chosen for: there are no more than are read."""
    bench, text = CompressedBench(backends), text_of(70, 0)
    bench.step([TextPart(bench.open_row(70), text, 0, 13)])


def chunks(backends: Backends) -> None:
    """A text in steps that cut windows."""
    bench, text = CompressedBench(backends), text_of(70, 0)
    row = bench.open_row(70)
    for start, stop in ((0, 7), (7, 9), (9, 12), (12, 30), (30, 48), (48, 70)):
        bench.step([TextPart(row, text, start, stop)])


def ragged(backends: Backends) -> None:
    """Rows of different lengths, decode rows among them, and padding."""
    bench, lengths = CompressedBench(backends), [3, 40, 21, 1]
    texts = [text_of(70, seed) for seed in range(4)]
    rows = [bench.open_row(70) for _ in texts]
    bench.step([TextPart(row, text, 0, stop) for row, text, stop in zip(rows, texts, lengths, strict=True)], padded=2)
    for more in (1, 2, 9):
        parts = [TextPart(row, text, at, at + more) for row, text, at in zip(rows, texts, lengths, strict=True)]
        bench.step(parts[::-1] if more == 2 else parts)
        lengths = [at + more for at in lengths]


def guesses(backends: Backends) -> None:
    """Guesses that complete windows, of which the first is right."""
    bench, text, other = CompressedBench(backends), text_of(70, 0), text_of(70, 1)
    row, start = bench.open_row(70), 30
    bench.step([TextPart(row, text, 0, start)])
    bench.step([TextPart(row, branch(text, other, start + 1), start, start + 5, candidates=5)], commit=False)
    bench.store.lengths.commit(row, start + 1)
    bench.store.lengths.settle(row, start + 1)
    bench.step([TextPart(row, text, start + 1, start + 3)])
    bench.step([TextPart(row, text, start + 3, 50)])


def whole_texts(backends: Backends) -> None:
    """A step without a cache."""
    bench, texts = CompressedBench(backends), [text_of(70, 0), text_of(70, 1)]
    parts = [TextPart(place, text, 0, 70 - 9 * place) for place, text in enumerate(texts, 1)]
    bench.check(parts, bench.run(parts, transient=True))


@dataclass(frozen=True)
class Mutant:
    """A text of a module's source, and what stands there instead."""

    module: str
    original: str
    planted: str
    caught_by: Callable[[Backends], None]


_EARLIER = "row.place if window - 1 not in ended else self.num_rows + ended[window - 1]"
_READ = "torch.index_select(plane, 0, self.read_slots, out="
_OLD = "plane[self.write_slots]"
_TURN = "pairs[..., 0] = first * cos - second * sin"

MUTANTS = {
    "entry visible one token early": Mutant(
        TILES, "visible = (tile.positions + 1).div", "visible = (tile.positions + 2).div", short_prompt
    ),
    "entry visible one token late": Mutant(
        TILES, "visible = (tile.positions + 1).div", "visible = tile.positions.div", short_prompt
    ),
    "entry hidden while its tokens are in the window": Mutant(
        TILES, "numbers >= visible.unsqueeze(2)", "numbers >= (visible - 2).unsqueeze(2)", short_prompt
    ),
    "Ca of the wrong window": Mutant(LAYOUT, _EARLIER, _EARLIER.replace("[window - 1]", "[max(ended)]"), prompt),
    "Ca of the window before lost at a chunk border": Mutant(
        COMPRESSOR, "starts[:-1, BEFORE]", "0.0 * starts[:-1, BEFORE]", chunks
    ),
    "Ca and Cb swapped": Mutant(
        COMPRESSOR, "torch.cat([begun[:, NEXT], begun[:, OWN]]", "torch.cat([begun[:, OWN], begun[:, NEXT]]", chunks
    ),
    "Ca and Cb of the open window kept swapped": Mutant(
        COMPRESSOR, "sums[:, OWN], sums[:, NEXT] =", "sums[:, NEXT], sums[:, OWN] =", chunks
    ),
    "open window lost at a chunk border": Mutant(
        LAYOUT, "row.place if row.context >= begin else self.num_rows", "self.num_rows", chunks
    ),
    "open window kept behind its end": Mutant(
        LAYOUT, "window, stop = (position + 1) // self.ratio", "window, stop = position // self.ratio", chunks
    ),
    "sums of the open window not rescaled": Mutant(
        SUMS, "rest = torch.exp(begun - shift)", "rest = torch.exp(begun - begun)", chunks
    ),
    "padding of a window mixed": Mutant(COMPRESSOR, "gates.masked_fill(block.missing, -torch.inf)", "gates", chunks),
    "rope of another token of the window": Mutant(
        COMPRESSOR, "each.index_select(0, self.entry_tokens)", "each.index_select(0, self.entry_tokens - 1)", prompt
    ),
    "rope in the other direction": Mutant(SUMS, _TURN, _TURN.replace("- second", "+ second"), prompt),
    "norm of an entry without its weight": Mutant(SUMS, "    mixed *= norm.float()\n", "", prompt),
    "sink in the numerator": Mutant(
        ATTEND,
        "found = found.view(rows, heads, head_dim)",
        "found = found.view(rows, heads, head_dim) + weights[..., -1:]",
        short_prompt,
    ),
    "sink dropped": Mutant(
        ATTEND, "sinks = inputs.sinks.float()", "sinks = (inputs.sinks.float() - 1e9)", short_prompt
    ),
    "sinks of heads in another order": Mutant(
        ATTEND, "inputs.sinks.float().view(1, heads, 1)", "inputs.sinks.float().flip(0).view(1, heads, 1)", short_prompt
    ),
    "window key counted twice": Mutant(TILES, "(distance < 0) |", "(distance < -1) |", short_prompt),
    "window one token too long": Mutant(TILES, "(distance >= window)", "(distance > window)", short_prompt),
    "window one token too short": Mutant(TILES, "(distance >= window)", "(distance >= window - 1)", short_prompt),
    "window key of the ring one place off": Mutant(
        WINDOWS, "positions.remainder(window), firsts", "(positions + 1).remainder(window), firsts", chunks
    ),
    "ring kept one token off": Mutant(
        WINDOWS, "(positions.unsqueeze(1) - ring).remainder(window)", "(positions - 1).unsqueeze(1) - ring", chunks
    ),
    "ring not kept": Mutant(
        WINDOWS, "_kept_rings(window, rows, kept, num_ring_keys, scratch.device) if kept", "None if kept", chunks
    ),
    "rings of rows swapped": Mutant(WINDOWS, _READ, _READ.replace("slots", "slots.flip(0)"), ragged),
    "sums of rows swapped": Mutant(COMPRESSOR, _READ, _READ.replace("slots", "slots.flip(0)"), ragged),
    "entry of a refused guess kept": Mutant(
        ENTRIES,
        "plane.index_copy_(0, self.write_slots, new)",
        f"plane.index_copy_(0, self.write_slots, {_OLD}.where({_OLD}.isfinite(), new))",
        guesses,
    ),
    "entries of rows swapped": Mutant(
        ENTRIES, "self.table_rows[part.row]", "self.table_rows[len(self.table_rows) - 1 - part.row]", ragged
    ),
    "entries written where other tokens do": Mutant(
        STEP, ".index_select(0, compressor.entry_tokens)", ".index_select(0, compressor.entry_tokens.flip(0))", ragged
    ),
    "entries of a text without a cache taken from the next": Mutant(
        ENTRIES, "sum(counts[:place])", "sum(counts[: place + 1])", whole_texts
    ),
    "missing choices read": Mutant(ATTEND, "unseen = chosen < 0", "unseen = chosen < -1", prompt),
    "indexer sees an entry one token early": Mutant(
        INDEX,
        "numbers, keys = dense_entries(tile, self._spec.compression.ratio, most)",
        "numbers, keys = dense_entries(tile, self._spec.compression.ratio, most)\n"
        "        keys.unseen[:, :-1] = keys.unseen[:, 1:].clone()",
        prompt,
    ),
    "negative products of an indexer counted": Mutant(INDEX, ".relu_()", "", prompt),
    "weights of an indexer's heads in another order": Mutant(
        INDEX, "torch.bmm(weights.unsqueeze(1)", "torch.bmm(weights.flip(1).unsqueeze(1)", prompt
    ),
}
CHECKS = {mutant.caught_by.__name__: mutant.caught_by for mutant in MUTANTS.values()}


@pytest.mark.parametrize("name", CHECKS)
def test_the_backends_pass_the_checks(name: str) -> None:
    CHECKS[name](plant(SUMS, "import torch\n", "import torch\n"))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_catches_the_planted_fault(name: str) -> None:
    mutant = MUTANTS[name]
    planted = plant(mutant.module, mutant.original, mutant.planted)
    with pytest.raises(AssertionError):
        mutant.caught_by(planted)
