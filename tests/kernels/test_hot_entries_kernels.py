"""Chosen entries become hot: the slots that are named hold them, and what was chosen longest ago makes room."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from sightline.cache.memory import allocate
from sightline.kernels import hot_entries
from sightline.kernels.hot_entries import FetchEntries, HotBuffer, TurnRows, drop_entries
from support.hot_faults import FAULTS

LAYERS, ROWS, PAGE, PAGES = 2, 5, 4, 12
LENGTH, NUM_SLOTS = PAGE * PAGES, PAGE * PAGES * ROWS
STEP = 120
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernels() -> list[object]:
    found: list[object] = [pytest.param(hot_entries.fetch_entries, id="torch")]
    try:
        from sightline.kernels.triton import hot_entries as with_triton
    except ImportError:
        return found
    return [*found, pytest.param(with_triton.fetch_entries, id="triton")]


def make_buffer(size: int, top_k: int, draw: random.Random, apart: int) -> HotBuffer:
    """Entries that say which layer and slot they are of; the plane on the device and the map of places are garbage.

    If they are of several tokens each, only every other page of a row has some.
    """
    host = torch.arange(LAYERS * NUM_SLOTS, dtype=torch.int64).view(LAYERS, NUM_SLOTS, 1).repeat(1, 1, 3)
    pages = list(range(ROWS * PAGES))
    draw.shuffle(pages)
    with DEVICE:
        return HotBuffer(
            plane=torch.full((LAYERS * ROWS * size + STEP, 3), -9, dtype=torch.int64),
            host=allocate(host.shape, host.dtype, DEVICE, on_host=True).copy_(host),
            pages=_apart(torch.tensor(pages).view(ROWS, PAGES), 1 if apart == 1 else 2),
            page_size=PAGE,
            apart=apart,
            held=torch.full((LAYERS, ROWS, size), -1, dtype=torch.int32),
            order=torch.arange(size, dtype=torch.int32).repeat(LAYERS, ROWS, 1),
            places=torch.randint(-(2**31), 2**31 - 1, (ROWS, LENGTH + 1), dtype=torch.int32),
            counts=torch.zeros(2, dtype=torch.int64),
            work=torch.full((2, 8, size), -7, dtype=torch.int32),
            sources=torch.zeros(64, top_k, dtype=torch.int64),
        )


def _apart(pages: Tensor, stride: int) -> Tensor:
    """The same pages as some columns of a wider table, whose others name no page."""
    wide = torch.full((pages.shape[0], stride * pages.shape[1]), 10**6)
    wide[:, stride - 1 :: stride] = pages
    return wide[:, stride - 1 :: stride]


def choice(draw: random.Random, context: int, new: int, top_k: int) -> list[int]:
    """Some places before `context + new`, increasing, with a preference for some, and -1 behind the last."""
    seen = range(context + new)
    liked = [place for place in seen if place % 3 or draw.random() < 0.3]
    places = sorted(draw.sample(liked or list(seen), min(top_k, len(liked or seen))))
    return places + [-1] * (top_k - len(places))


def play(
    copy: FetchEntries, size: int, top_k: int, tokens: int, seed: int, steps: int = 25, apart: int = 1
) -> str | None:
    """Fetches random choices of random rows in random layers; returns what is wrong, None if nothing is. `apart` is
    how many tokens an entry stands for."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    buffer, base = make_buffer(size, top_k, draw, apart), LAYERS * ROWS * size
    used: dict[tuple[int, int], dict[int, int]] = {}
    asked = copied = 0
    for step in range(steps):
        layer, rows = draw.randrange(LAYERS), [*draw.sample(range(1, ROWS), draw.randrange(1, ROWS)), 0]
        contexts = [draw.randrange(1, LENGTH - tokens) for _ in rows]
        for row, context in zip(rows, contexts, strict=True):
            buffer.held[:, row][buffer.held[:, row] >= context] = -1
            for each in range(LAYERS):
                known = used.setdefault((each, row), {})
                used[each, row] = {place: at for place, at in known.items() if place < context}
        chosen = [[choice(draw, context, 1 + token, top_k) for token in range(tokens)] for context in contexts]
        firsts = [base + 3 * apart * number + apart - 1 for number in range(len(rows))]
        slots = torch.full((len(rows) * tokens, top_k), -5, device=DEVICE)
        turn = TurnRows(*(torch.tensor(each, device=DEVICE) for each in (rows, contexts, firsts)))
        copy(buffer, layer, turn, torch.tensor(chosen, dtype=torch.int32, device=DEVICE), slots)
        if int(slots.min()) < 0 or int(slots.max()) >= buffer.plane.shape[0]:
            return "a slot that does not exist"
        for number, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            if row == 0:
                continue
            before, wanted = used[layer, row], {place for token in chosen[number] for place in token if place >= 0}
            old = {place for place in wanted if place < context}
            asked += sum(0 <= place < context for token in chosen[number] for place in token)
            copied += len(old - before.keys())
            for token in range(tokens):
                found, its = slots[number * tokens + token].tolist(), chosen[number][token]
                for place, slot in zip([its[0] if each < 0 else each for each in its], found, strict=True):
                    if place >= context:
                        if slot != firsts[number] + (place - context) * apart:
                            return "a new entry is looked for elsewhere"
                        continue
                    page = int(buffer.pages[row, place // PAGE])
                    right = layer * NUM_SLOTS + page * PAGE + place % PAGE
                    if buffer.plane[slot].tolist() != [right] * 3:
                        return "a slot has another entry than the chosen one"
            held = [place for place in buffer.held[layer, row].tolist() if place >= 0]
            if len(set(held)) != len(held) or not old <= set(held) or not set(held) <= before.keys() | old:
                return "the buffer holds something else than it says"
            if sorted(buffer.order[layer, row].tolist()) != list(range(size)):
                return "the order names a slot twice"
            left, stayed = before.keys() - set(held), before.keys() & (set(held) - old)
            if left and len(held) < size:
                return "an entry was forgotten while there was room"
            if left and stayed and max(before[place] for place in left) > min(before[place] for place in stayed):
                return "an entry was forgotten that was chosen later than one that stayed"
            used[layer, row] = {place: before[place] for place in stayed} | dict.fromkeys(old, step)
    return None if buffer.counts.tolist() == [asked, copied] else "hits or misses are counted wrongly"


@pytest.mark.parametrize("copy", kernels())
@pytest.mark.parametrize(
    ("size", "top_k", "tokens", "apart"), [(6, 6, 1, 1), (12, 6, 2, 4), (13, 4, 3, 1), (40, 6, 1, 1), (8, 6, 1, 4)]
)
def test_chosen_entries_are_where_their_slots_say(
    copy: FetchEntries, size: int, top_k: int, tokens: int, apart: int
) -> None:
    # The interpreter is slow.
    steps = 25 if copy is hot_entries.fetch_entries else 3
    assert play(copy, size, top_k, tokens, seed=size, steps=steps, apart=apart) is None


@pytest.mark.prove
@pytest.mark.parametrize("copy", kernels())
@pytest.mark.parametrize("seed", range(8))
def test_random_choices_are_found(copy: FetchEntries, seed: int) -> None:
    draw = random.Random(seed)
    top_k, tokens = draw.randrange(1, 9), draw.randrange(1, 4)
    assert play(copy, top_k * tokens + draw.randrange(9), top_k, tokens, seed) is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    make, expected = FAULTS[name]
    found = [play(make(), 8, 6, 1, seed) for seed in range(4)]
    assert any(each is not None and expected in each for each in found), found


def test_entries_of_another_owner_and_behind_the_context_are_forgotten() -> None:
    held = torch.tensor([[[0, 1], [3, 9], [4, -1]], [[0, 1], [9, 3], [5, 7]]], dtype=torch.int32)
    owners = torch.tensor([0, 5, 8])
    drop_entries(held, owners, torch.tensor([2, 1]), torch.tensor([9, 5]), torch.tensor([20, 9]))
    assert held.tolist() == [[[0, 1], [3, -1], [-1, -1]], [[0, 1], [-1, 3], [-1, -1]]]
    assert owners.tolist() == [0, 5, 9]
