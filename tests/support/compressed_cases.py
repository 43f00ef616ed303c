"""Steps of compressed attention for tests of its kernels, and what they must write, computed from all raw tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sightline.kernels.triton.compressed_attention import CompressedLayer, SeenEntries, attend_compressed, pieces_of
from sightline.kernels.triton.compressed_steps import CompressionRule, NewChoice, NewEntries, NewKeys, keep_tokens
from sightline.kernels.triton.compressed_tokens import CompressedTokens, EntryPages, SeenKeys, count_keys
from sightline.kernels.triton.decode_shares import DecodeConfig, DecodeRows, DecodeScratch, divide
from sightline.kernels.triton.recurrent_tokens import TokenRows, TokenSlots, find_tokens
from support.extend_cases import DEVICE


@dataclass(frozen=True)
class Case:
    """A step: of each row, the tokens in its context and the new ones."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 3
    dim: int = 16
    window: int = 8
    ratio: int = 4
    overlap: bool = False
    rope_dim: int = 4
    page_size: int = 8
    top_k: int | None = None
    has_states: bool = True
    kept: tuple[int, ...] = ()
    """Tokens whose states are kept beside the last of each row."""
    padding: int = 0
    dtype: torch.dtype = torch.float32
    num_programs: int = 5
    block: int = 16
    unit_heads: int = 16
    seed: int = 0
    has_entries: bool = True

    @property
    def width(self) -> int:
        return self.dim * (2 if self.overlap else 1)

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.rows) + self.padding

    @property
    def one_by_one(self) -> bool:
        return self.has_states and all(count <= 1 for _, count in self.rows)


def entry_of(case: Case, values: Tensor, gates: Tensor, number: int, norm: Tensor, turns: Tensor) -> Tensor:
    """Entry `number` of a row with these raw values and gates, in fp32."""
    own = slice(number * case.ratio, (number + 1) * case.ratio)
    if case.overlap:
        before = slice((number - 1) * case.ratio, number * case.ratio) if number else slice(0, 0)
        value = torch.cat((values[before, : case.dim], values[own, case.dim :]))
        gate = torch.cat((gates[before, : case.dim], gates[own, case.dim :]))
    else:
        value, gate = values[own], gates[own]
    mixed = (value * gate.softmax(0)).sum(0)
    entry = mixed / (mixed.square().mean() + 1e-6).sqrt() * norm
    pairs = torch.view_as_complex(entry[case.dim - case.rope_dim :].reshape(-1, 2))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(turns[0]), number * case.ratio * turns[0]))
    return torch.cat((entry[: case.dim - case.rope_dim], turned.flatten()))


def sums_behind(case: Case, values: Tensor, gates: Tensor, count: int) -> Tensor:
    """[1 or 3, 3, dim]: the sums behind `count` tokens."""
    open_from = count // case.ratio * case.ratio
    own, ca = slice(case.width - case.dim, case.width), slice(0, case.dim)
    before = slice(max(open_from - case.ratio, 0), open_from)
    parts = [(slice(open_from, count), own), (slice(open_from, count), ca), (before, ca)]
    result = torch.zeros(3 if case.overlap else 1, 3, case.dim)
    for triple, (tokens, channels) in zip(result, parts, strict=False):
        gate, value = gates[tokens, channels], values[tokens, channels]
        if gate.shape[0]:
            triple[0] = gate.amax(0)
            weights = (gate - triple[0]).exp()
            triple[1], triple[2] = weights.sum(0), (weights * value).sum(0)
    return result


def ring_behind(case: Case, keys: Tensor, count: int) -> Tensor:
    """[window, dim]: the keys behind `count` tokens, zeros where there is none."""
    ring = torch.zeros(case.window, case.dim)
    for position in range(max(count - case.window, 0), count):
        ring[position % case.window] = keys[position]
    return ring


@dataclass(eq=False)
class Step:
    """A case with tensors, all random, and NaN wherever nothing may be read."""

    case: Case
    draw: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        self.draw = torch.Generator().manual_seed(case.seed)
        self.history = [self._history(sum(row)) for row in case.rows]
        self.norm = self._randn(case.dim).float()
        self.turns = torch.rand(1, case.rope_dim // 2, generator=self.draw)
        self.sinks, self.scale = self._randn(case.heads), case.dim**-0.5
        self.q = self._randn(case.num_tokens, case.heads, case.dim)
        num_rows = len(case.rows)
        # Slots and pages in any order; slot 0 is the empty state, page 0 padding.
        slots = (torch.randperm(num_rows + case.num_tokens, generator=self.draw) + 1).tolist()
        self.read = [slots.pop() if context else 0 for context, _ in case.rows]
        self.write = [0] * case.num_tokens
        firsts = [sum(count for _, count in case.rows[:row]) for row in range(num_rows)]
        self.firsts = firsts
        for token in (*case.kept, *(f + c - 1 for f, (_, c) in zip(firsts, case.rows, strict=True) if c)):
            self.write[token] = self.write[token] or slots.pop()
        triples = 3 if case.overlap else 1
        self.window = torch.full((num_rows + case.num_tokens + 1, case.window, case.dim), torch.nan, dtype=case.dtype)
        self.sums = torch.full((self.window.shape[0], triples, 3, case.dim), torch.nan)
        self.window[0], self.sums[0] = 0.0, 0.0
        self.max_pages = max(-(-sum(row) // case.page_size) for row in case.rows)
        pages = torch.randperm(num_rows * self.max_pages, generator=self.draw) + 1
        self.pages = torch.zeros(num_rows + 1, self.max_pages, dtype=torch.int64)
        self.pages[1:] = pages.view(num_rows, -1)
        self.table_rows = (torch.randperm(num_rows, generator=self.draw) + 1).tolist()
        in_page = max(1, case.page_size // case.ratio)
        num_entries = (num_rows * self.max_pages + 1) * in_page if case.has_states else case.num_tokens
        self.entries = torch.full((num_entries, case.dim), torch.nan, dtype=case.dtype)
        for row, (context, _) in enumerate(case.rows):
            keys, values, gates = self.history[row]
            if context:
                seen = ring_behind(case, keys, context)
                for position in range(max(context - case.window, 0), context):
                    self.window[self.read[row], position % case.window] = seen[position % case.window]
                self.sums[self.read[row]] = sums_behind(case, values, gates, context)
            for number in range(context // case.ratio):
                self.entries[self.slot_of(row, number)] = self.entry(row, number)
        self.chosen = None if case.top_k is None else self._choice()

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw).to(self.case.dtype)

    def _history(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and gates of a row, in fp32."""
        case = self.case
        gates = self._randn(count, case.width) * 3
        return self._randn(count, case.dim).float(), self._randn(count, case.width).float(), gates.float()

    def entry(self, row: int, number: int) -> Tensor:
        _, values, gates = self.history[row]
        return entry_of(self.case, values, gates, number, self.norm, self.turns)

    def slot_of(self, row: int, number: int) -> int:
        """Where an entry is, or in a step without states, in its own entries."""
        case = self.case
        if not case.has_states:
            return self.firsts[row] + number
        last = (number + 1) * case.ratio - 1
        page = int(self.pages[self.table_rows[row], last // case.page_size])
        return page * max(1, case.page_size // case.ratio) + last % case.page_size // case.ratio

    def tokens(self) -> list[tuple[int, int, int]]:
        """Row, token and position of every new token."""
        return [
            (row, self.firsts[row] + index, context + index)
            for row, (context, count) in enumerate(self.case.rows)
            for index in range(count)
        ]

    def _choice(self) -> Tensor:
        case = self.case
        assert case.top_k is not None
        chosen = torch.full((case.num_tokens, case.top_k), -1, dtype=torch.int32)
        for _, token, position in self.tokens():
            visible = (position + 1) // case.ratio
            numbers = torch.randperm(visible, generator=self.draw)[: case.top_k].sort().values
            chosen[token, : len(numbers)] = numbers.int()
        return chosen

    def run(self) -> Tensor:
        """Keeps the tokens and returns the output."""
        case = self.case
        gathered = [
            torch.cat([h[part][c:] for h, (c, _) in zip(self.history, case.rows, strict=True)]) for part in range(3)
        ]
        padded = [torch.cat((each, torch.full((case.padding, each.shape[1]), torch.nan))) for each in gathered]
        key, values, gates = (each.to(case.dtype).to(DEVICE) for each in padded)
        angles = torch.zeros(case.num_tokens, case.rope_dim // 2)
        written = [0] * case.num_tokens
        for row, token, position in self.tokens():
            angles[token] = position // case.ratio * case.ratio * self.turns[0]
            if (position + 1) % case.ratio == 0:
                written[token] = self.slot_of(row, position // case.ratio)

        def numbers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=DEVICE)

        found = TokenRows(numbers([0] * (len(case.rows) + 1)), numbers([0] * case.num_tokens).int())
        find_tokens(numbers([count for _, count in case.rows]), found)
        contexts = numbers([context for context, _ in case.rows]) if case.has_states else None
        slots = TokenSlots(numbers(self.read), numbers(self.write)) if case.has_states else None
        tokens = CompressedTokens(found, contexts, slots)
        rule = CompressionRule(case.ratio, case.overlap, case.rope_dim, 1e-6)
        if case.has_states:
            places = EntryPages.of(self.pages.to(DEVICE), numbers(self.table_rows), case.page_size, case.ratio)
        else:
            places = EntryPages(None, None, 1, 1)
        window, sums, entries = (each.to(DEVICE) for each in (self.window, self.sums, self.entries))
        new = NewEntries(
            values, gates, self.norm.to(DEVICE), angles.cos().to(DEVICE), angles.sin().to(DEVICE),
            sums if case.has_states else None, entries, numbers(written) if case.has_states else None,
        )  # fmt: skip
        chosen_slots, choice = None, None
        if self.chosen is not None:
            chosen_slots = torch.full(self.chosen.shape, -1, dtype=torch.int32, device=DEVICE)
            choice = NewChoice(self.chosen.to(DEVICE), places, chosen_slots)
        has_entries = case.has_entries
        given = NewKeys(key, window)
        keep_tokens(tokens, rule if has_entries else None, new if has_entries else None, given, choice)
        self.window, self.sums, self.entries = window.cpu(), sums.cpu(), entries.cpu()
        seen = SeenKeys(case.window, case.ratio if case.has_entries else 0, case.top_k or 0, case.one_by_one)
        config = DecodeConfig(case.block, case.unit_heads, case.num_programs, 4, 1)
        layer = CompressedLayer(key, window, entries if case.has_entries else None, self.sinks.to(DEVICE), self.scale)
        out = torch.full((case.num_tokens, case.heads, case.dim), torch.nan, dtype=case.dtype, device=DEVICE)
        lens, counts = numbers([0] * case.num_tokens), numbers([0] * case.num_tokens)
        count_keys(tokens, seen, config.block, lens, counts)
        half = max(1, case.num_tokens // 2)
        for part in (slice(0, half), slice(half, case.num_tokens)):
            size = part.stop - part.start
            rows = DecodeRows(lens[part], counts[part], found.rows[part], lens, lens, 1)
            starts, cuts = (
                torch.full((config.num_programs, 8), -1, dtype=torch.int32, device=DEVICE) for _ in range(2)
            )
            scratch = DecodeScratch(
                starts,
                cuts,
                torch.zeros(size, dtype=torch.int32, device=DEVICE),
                torch.full((2 * config.num_programs * case.unit_heads * case.dim,), torch.nan, device=DEVICE),
                torch.full((2 * config.num_programs, 2, case.unit_heads), torch.nan, device=DEVICE),
            )
            if size:
                subgroups = config.num_subgroups(case.heads) * pieces_of(config, case.dim)
                divide(rows, scratch, config, subgroups, None, by_row=True)
            entries_seen = SeenEntries(places, chosen_slots) if case.has_entries else None
            attend_compressed(self.q.to(DEVICE), layer, tokens, seen, entries_seen, part, rows, scratch, config, out)
        return out.cpu()

    def expected(self, row: int, token: int, position: int) -> Tensor:
        """[heads, dim]: what a query finds."""
        case = self.case
        keys = self.history[row][0][max(position + 1 - case.window, 0) : position + 1]
        numbers = list(range((position + 1) // case.ratio)) if case.has_entries else []
        if self.chosen is not None:
            numbers = [number for number in self.chosen[token].tolist() if number >= 0]
        if numbers:
            kept = torch.stack([self.entry(row, number) for number in numbers]).to(case.dtype).float()
            keys = torch.cat((keys, kept))
        scores = self.q[token].float() @ keys.T * self.scale
        return torch.cat((scores, self.sinks.float()[:, None]), 1).softmax(1)[:, :-1] @ keys


def check(case: Case) -> None:
    """Runs a step and compares everything that it writes, and that it writes nothing else."""
    step = Step(case)
    before = step.window.clone(), step.sums.clone(), step.entries.clone()
    out = step.run()
    tolerance = 2e-5 if case.dtype is torch.float32 else 2e-2

    def assert_close(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)

    entries, states = set[int](), set[int]()
    for row, token, position in step.tokens():
        assert_close(out[token].float(), step.expected(row, token, position))
        keys, values, gates = step.history[row]
        if case.has_entries and (position + 1) % case.ratio == 0:
            number = position // case.ratio
            slot = step.slot_of(row, number)
            entries.add(slot)
            assert_close(step.entries[slot].float(), step.entry(row, number))
        kept = step.write[token] if case.has_states else 0
        if kept:
            states.add(kept)
            assert_close(step.window[kept].float(), ring_behind(case, keys, position + 1))
            if case.has_entries:
                expected = sums_behind(case, values, gates, position + 1)
                # Another maximum gives other sums with the same meaning.
                found = step.sums[kept]
                is_there = expected[:, 1] > 0
                assert torch.equal(found[:, 1] > 0, is_there)
                logs = (found[:, 0] + found[:, 1].log())[is_there]
                assert_close(logs, (expected[:, 0] + expected[:, 1].log())[is_there])
                means = (found[:, 2] / found[:, 1])[is_there]
                assert_close(means, (expected[:, 2] / expected[:, 1])[is_there])
    for kind, (old, new, used) in {
        "window": (before[0], step.window, states),
        "sums": (before[1], step.sums, states),
        "entries": (before[2], step.entries, entries),
    }.items():
        others = [slot for slot in range(old.shape[0]) if slot not in used]
        assert torch.equal(old[others].nan_to_num(7e7), new[others].nan_to_num(7e7)), f"wrote other {kind}"
    assert out[case.num_tokens - case.padding :].isnan().all(), "wrote outputs of padding"
