"""Traffic over compressed layers whose chosen entries are in host memory; each step is compared with the oracle."""

from __future__ import annotations

from collections.abc import Mapping

from sightline.attention.contract import EntryCounts
from support.compressed_bench import CompressedBench, Text, TextPart, branch, text_of

LENGTH = 130


class Rows:
    """Rows of a bench, and how far their texts are computed."""

    def __init__(self, bench: CompressedBench) -> None:
        self.bench = bench
        self.done: dict[int, int] = {}
        self.texts: dict[int, Text] = {}

    def open(self, text: Text) -> int:
        row = self.bench.open_row(text.length)
        self.done[row], self.texts[row] = 0, text
        return row

    def parts(self, counts: Mapping[int, int]) -> list[TextPart]:
        return [TextPart(row, self.texts[row], self.done[row], self.done[row] + count) for row, count in counts.items()]

    def step(self, counts: Mapping[int, int], *, padded: int = 0) -> None:
        """Computes so many tokens of each row."""
        self.bench.step(self.parts(counts), padded=padded)
        self._settle(counts)

    def guess(self, counts: Mapping[int, int], kept: Mapping[int, int]) -> None:
        """Computes guesses for each row, of which so many are right. Others complete entries too, which are wrong, and
        which a step of one token behind the guesses reads as its context."""
        parts = []
        for part in self.parts(counts):
            wrong = text_of(part.text.length, 77)
            guessed = branch(part.text, wrong, part.start + kept[part.row])
            parts.append(part._replace(text=guessed, candidates=part.stop - part.start))
        self.bench.step(parts, commit=False)
        behind = [part._replace(start=part.stop, stop=part.stop + 1, candidates=1) for part in parts]
        self.bench.step(behind, commit=False)
        for row, count in kept.items():
            self.bench.store.lengths.commit(row, self.done[row] + count)
        self._settle(kept)

    def _settle(self, counts: Mapping[int, int]) -> None:
        for row, count in counts.items():
            self.done[row] += count
            self.bench.store.lengths.settle(row, self.done[row])


def traffic(bench: CompressedBench) -> EntryCounts:
    """Everything that can happen to a row: chunks, decode, guesses that are refused, another owner on the same pages, a
    prefix that is shared inside a window, and contexts that are copied whole. Returns what was read of contexts."""
    rows, page = Rows(bench), bench.store.limits.page_size
    first, second = rows.open(text_of(LENGTH, 0)), rows.open(text_of(LENGTH, 1))
    third = rows.open(text_of(LENGTH, 2))
    rows.step({first: 3, second: 33, third: 1})
    for number in range(6):
        rows.step({first: 1, second: 1, third: 1}, padded=number % 3)
    # Contexts that are copied whole, apart and side by side, beside one that is not.
    rows.step({first: 17, third: 2, second: 18}, padded=1)
    rows.step({first: 5, second: 21, third: 19})
    for kept in (1, 2, 4):
        rows.guess({first: 6, second: 1, third: 6}, {first: kept, second: 1, third: 1})
        rows.step({first: 1, second: 1, third: 1})
    # Another text in the row of the first, on the same pages.
    bench.store.close_row(first)
    again = rows.open(text_of(LENGTH, 3))
    assert again == first
    rows.step({again: 27, second: 1})
    for _ in range(3):
        rows.step({again: 1, second: 1, third: 3})
    shared_prefix(rows, second, third, page)
    return bench.coordinators["group0"].counts()


def shared_prefix(rows: Rows, owner: int, closed: int, page: int) -> None:
    """A row goes on from a checkpoint of another, in the place of a third one."""
    bench, states = rows.bench, rows.bench.store.main.states
    assert states is not None
    border = -(-(rows.done[owner] + 2) // page) * page
    if border + 9 > LENGTH:
        return
    states.pin(owner, border)
    rows.step({owner: border + 1 - rows.done[owner]})
    checkpoint = states.checkpoint(owner, border)
    assert checkpoint is not None
    bench.store.close_row(closed)
    shared = bench.store.open_row()
    bench.store.adopt(shared, [bench.store.committed_bundle(owner, index) for index in range(border // page)])
    bench.store.restore(shared, checkpoint)
    bench.store.grow_row(shared, LENGTH)
    rows.done[shared] = border
    rows.texts[shared] = branch(rows.texts[owner], text_of(LENGTH, 4), border)
    for count in (1, 5, 1):
        rows.step({shared: count, owner: 1})
