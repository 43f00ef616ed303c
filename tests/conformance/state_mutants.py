"""Backends of recurrent layers and convolutions with one fault each, and the check that must find it.

What is said of `mutants.py` holds here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.state_parts import CHUNK, CORRECT, Kept, StateParts, StateRow, Token, read_of_plane, write_to_plane
from conformance.state_parts_backend import CONVOLUTION, RECURRENT, make_state_backend
from sightline.attention.capability import Capability
from sightline.attention.spec import RecurrentSpec
from sightline.attention.workspace import Lane
from sightline.core.device import Device
from sightline.testing.conformance.rig import Subject


@dataclass(frozen=True)
class StateMutant:
    """One fault."""

    name: str
    fault: str
    """In one sentence."""
    caught_by: str
    """The one check that fails."""
    parts: StateParts
    declares: Capability = RECURRENT
    cuda_only: bool = False
    """The fault does not show on a CPU."""

    def subject(self, device: Device, declares: Capability | None = None) -> Subject:
        row = declares or self.declares
        return Subject(self.name, make_state_backend(self.parts, declares=row), row, device)


def only_of_longer_rows(row: StateRow) -> tuple[int, ...]:
    """A row of one token keeps nothing."""
    return row.kept if row.query_len > 1 else (0,)


def stale_slot(row: StateRow, rows: tuple[StateRow, ...], kept: Kept) -> int:
    """Where the row of that number was in the first step of three rows that had as many tokens there."""
    if len(rows) != 3:
        return row.read_slot
    slots: dict[tuple[int, int], int] = kept.setdefault("slots", {})
    return slots.setdefault((row.number, row.query_len), row.read_slot)


def of_the_row_before(row: StateRow, rows: tuple[StateRow, ...], kept: Kept) -> int:
    """A row with a context takes the state of the row before it, if that has a context too."""
    del kept
    before = [each for each in rows if each.number < row.number and each.read_slot]
    return before[-1].read_slot if row.read_slot and before else row.read_slot


def missed_first(decay: Tensor, token: Token) -> Tensor:
    """The first token of a row with a context does not decay the state."""
    return torch.zeros_like(decay) if token.place == 0 and token.row.context_len else decay


def missed_at_chunks(decay: Tensor, token: Token) -> Tensor:
    """The first token of each chunk but the first does not decay the state."""
    return torch.zeros_like(decay) if token.place and token.place % CHUNK == 0 else decay


def missed_in_long_rows(decay: Tensor, token: Token) -> Tensor:
    """The second token of a row does not decay the state."""
    return torch.zeros_like(decay) if token.place == 1 else decay


def of_the_position_before(row: StateRow) -> tuple[int, ...]:
    """A checkpoint inside a row goes with the token before it."""
    kept = list(row.kept)
    for place, slot in enumerate(row.kept[:-1]):
        if slot and place and not kept[place - 1]:
            kept[place - 1], kept[place] = slot, 0
    return tuple(kept)


def checkpoints_dropped(row: StateRow) -> tuple[int, ...]:
    """Only the first checkpoint of a row is kept besides its last token."""
    inside = [place for place, slot in enumerate(row.kept[:-1]) if slot]
    return tuple(slot if place in (*inside[:1], row.query_len - 1) else 0 for place, slot in enumerate(row.kept))


def begins_where_it_stopped(state: Tensor, row: StateRow, kept: Kept) -> Tensor:
    """If the same plan runs again, it goes on from what the run before left."""
    if kept.get("plan") != row.plan:
        kept["plan"], kept["ends"] = row.plan, {}
    ends: dict[StateRow, Tensor] = kept["ends"]
    return ends.get(row, state)


def keeps_its_end(state: Tensor, row: StateRow, kept: Kept) -> None:
    kept["ends"][row] = state


def in_place(plane: Tensor, row: StateRow) -> None:
    """The state that is read is marked as read."""
    if row.read_slot:
        plane[row.read_slot] *= 1.0 + 2e-7


def write_slot_0(plane: Tensor, slot: int, numbers: Tensor) -> None:
    """States that are not kept are written to slot 0, which is cleared before it is read."""
    plane[slot] = numbers


def read_empty(plane: Tensor, slot: int) -> Tensor:
    return plane[slot].clone() if slot else torch.zeros_like(plane[slot])


def write_neighbour(plane: Tensor, slot: int, numbers: Tensor) -> None:
    """What is written reaches one number of the next slot."""
    write_to_plane(plane, slot, numbers)
    if slot and slot + 1 < plane.shape[0]:
        plane[slot + 1].view(-1)[0] = numbers.reshape(-1)[0]


def blended(plane: Tensor, slot: int) -> Tensor:
    """The last slot is read too, with weight 0."""
    return plane[slot] + 0.0 * plane[-1]


def in_32_bits(plane: Tensor, slot: int) -> int:
    """The offset of a slot, as 32 bits hold it."""
    offset = slot * plane[0].numel()
    wrapped = (offset + (1 << 31)) % (1 << 32) - (1 << 31)
    return slot if wrapped == offset else wrapped % (plane.shape[0] * plane[0].numel()) // plane[0].numel()


def tail_of_the_row_alone(tail: Tensor, row: StateRow, x: Tensor) -> Tensor:
    """The tail has only inputs of this step: what came before a short row is lost."""
    del x
    old = max(0, tail.shape[1] - row.query_len)
    return torch.cat([torch.zeros_like(tail[:, :old]), tail[:, old:]], dim=1)


def tail_of_padding(tail: Tensor, row: StateRow, x: Tensor) -> Tensor:
    """The tail of the last row ends with the token behind the row, if there is one."""
    behind = row.first_token + row.query_len
    if behind < x.shape[0] and x[behind].isnan().all():
        return torch.cat([tail[:, 1:], x[behind].float()[:, None]], dim=1)
    return tail


def unit_without_epsilon(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True))


def by_modulo(heads: Tensor, spec: RecurrentSpec) -> Tensor:
    """Head h has key head h % number of key heads."""
    return heads.repeat(spec.group_size, 1)


def never_fast(decay: Tensor, kept: Kept) -> Tensor:
    """Decays below -5 are taken for -5."""
    del kept
    return torch.exp(decay.clamp(min=-5.0))


def as_contiguous(numbers: Tensor) -> Tensor:
    """Reads token after token in memory, whatever the stride is."""
    if numbers.stride(0):
        return numbers
    wanted = numbers.numel()
    memory = numbers.as_strided((numbers[0].numel(),), (1,))
    return torch.nn.functional.pad(memory, (0, wanted - memory.numel())).view(numbers.shape)


def rows_of_the_last_plan(rows: tuple[StateRow, ...], kept: Kept, lane: Lane) -> tuple[StateRow, ...]:
    """Slots are those of the plan that was made last in the lane."""
    last: tuple[StateRow, ...] = kept["rows", lane]
    return tuple(
        replace(row, read_slot=other.read_slot, kept=(*row.kept[:-1], other.kept[-1]))
        if row.kept and other.kept
        else row
        for row, other in zip(rows, (*last, *rows[len(last) :]), strict=False)
    )


STATE_MUTANTS: tuple[StateMutant, ...] = (
    StateMutant(
        "one-token-not-kept",
        "The state behind the last token of a row is not kept if the row has only that one.",
        "state-write",
        replace(CORRECT, kept=only_of_longer_rows),
    ),
    StateMutant("beta-ignored", "Values are stored whole.", "state-write", replace(CORRECT, beta=torch.ones_like)),
    StateMutant(
        "context-taken-for-none",
        "Every row begins with the empty state.",
        "state-read",
        replace(CORRECT, read_slot=lambda row, rows, kept: 0),
    ),
    StateMutant(
        "decay-missed",
        "The first token behind a context does not decay the state.",
        "state-read",
        replace(CORRECT, decay=missed_first),
    ),
    StateMutant(
        "state-of-another-row",
        "A row continues the state of the row before it.",
        "state-rows",
        replace(CORRECT, read_slot=of_the_row_before),
    ),
    StateMutant(
        "decay-missed-in-a-row",
        "The second token of a row does not decay the state.",
        "prompts",
        replace(CORRECT, decay=missed_in_long_rows),
    ),
    StateMutant(
        "decay-missed-between-chunks",
        "The first token of a chunk does not decay the state of the chunk before.",
        "prompts",
        replace(CORRECT, decay=missed_at_chunks),
    ),
    StateMutant(
        "checkpoint-of-the-wrong-position",
        "A checkpoint inside a row is the state behind the token before it.",
        "kept-places",
        replace(CORRECT, kept=of_the_position_before),
    ),
    StateMutant(
        "second-checkpoint-dropped",
        "Only the first of a row's checkpoints is kept.",
        "kept-places",
        replace(CORRECT, kept=checkpoints_dropped),
    ),
    StateMutant(
        "guesses-behind-the-first-dropped",
        "Of more than two guesses, the last and the first keep a state.",
        "guesses",
        replace(
            CORRECT,
            kept=lambda row: (
                row.kept
                if 0 in row.kept
                else (row.kept[0], *(0,) * (row.query_len - 2), row.kept[-1])
                if row.query_len > 2
                else row.kept
            ),
        ),
    ),
    StateMutant(
        "read-slot-changed",
        "The state that a row reads is changed in place.",
        "other-slots",
        replace(CORRECT, around=in_place),
    ),
    StateMutant(
        "slot-0-written",
        "States that are not kept are written to slot 0.",
        "other-slots",
        replace(CORRECT, write=write_slot_0, read=read_empty),
    ),
    StateMutant(
        "neighbouring-slot-written",
        "A write reaches the beginning of the next slot.",
        "state-rows",
        replace(CORRECT, write=write_neighbour),
    ),
    StateMutant(
        "unnamed-slot-read",
        "The last slot is read too, with weight 0.",
        "poisoned-slots",
        replace(CORRECT, read=blended),
    ),
    StateMutant(
        "stale-slot",
        "Where a row's state is was kept from an earlier step with as many rows and tokens.",
        "next-batch",
        replace(CORRECT, read_slot=stale_slot),
    ),
    StateMutant(
        "goes-on-when-run-again",
        "A step that runs again begins with the state that it left.",
        "run-again",
        replace(CORRECT, begin=begins_where_it_stopped, end=keeps_its_end),
    ),
    StateMutant(
        "state-of-the-first-layer",
        "All layers have their states in the first one's planes.",
        "layers",
        replace(CORRECT, layer=lambda layer: 0),
    ),
    StateMutant(
        "slots-of-the-last-plan",
        "Slots are looked up when a plan runs, among those of the plan that was made last.",
        "plans-alive",
        replace(CORRECT, slots=rows_of_the_last_plan),
    ),
    StateMutant(
        "states-in-32-bits",
        "Offsets of slots wrap at 2^31 numbers.",
        "large-states",
        replace(
            CORRECT,
            read=lambda plane, slot: read_of_plane(plane, in_32_bits(plane, slot)),
            write=lambda plane, slot, numbers: write_to_plane(plane, in_32_bits(plane, slot) if slot else 0, numbers),
        ),
    ),
    StateMutant(
        "decays-cut-off",
        "Decays below -5 are taken for -5, so that products of them stay above 0.",
        "decays",
        replace(CORRECT, survives=never_fast),
    ),
    StateMutant(
        "not-activated",
        "What the convolution gives goes on without SiLU.",
        "convolutions",
        replace(CORRECT, activate=lambda mixed: mixed),
    ),
    StateMutant(
        "bias-dropped",
        "The bias of the convolution is left out.",
        "convolutions",
        replace(CORRECT, bias=lambda result, bias: result),
    ),
    StateMutant(
        "tail-lost-at-a-border",
        "Behind a row shorter than the convolution, the tail has only that row's inputs.",
        "chunk-borders",
        replace(CORRECT, last_tail=tail_of_the_row_alone),
    ),
    StateMutant(
        "tail-of-padding",
        "The tail of the last row ends with the padding behind it.",
        "padding",
        replace(CORRECT, last_tail=tail_of_padding),
        CONVOLUTION,
    ),
    StateMutant(
        "recurrent-tail-of-padding",
        "The tail of a recurrent layer's last row ends with the padding behind it.",
        "chunk-borders",
        replace(CORRECT, last_tail=tail_of_padding),
    ),
    StateMutant(
        "unit-length-without-epsilon",
        "Keys are divided by their length as it is, which may be 0.",
        "unit-keys",
        replace(CORRECT, unit_key=unit_without_epsilon),
    ),
    StateMutant(
        "queries-as-long-as-they-are",
        "Only keys are divided by their lengths.",
        "unit-keys",
        replace(CORRECT, unit_query=lambda query: query),
    ),
    StateMutant(
        "key-heads-by-modulo",
        "Head h has the query and key of key head h % number of key heads.",
        "key-heads",
        replace(CORRECT, heads=by_modulo),
    ),
    StateMutant(
        "recalled-before-the-decay",
        "The delta rule recalls from the state before it decays.",
        "delta-rule",
        replace(CORRECT, recalled_from=lambda decayed, before: before),
    ),
    StateMutant(
        "decay-of-the-first-channel",
        "All channels of a head decay as its first one does.",
        "channel-decay",
        replace(CORRECT, decay=lambda decay, token: decay[:, :1].expand_as(decay)),
    ),
    StateMutant(
        "skip-of-the-first-head",
        "Every head's value is multiplied with the first head's skip.",
        "skip",
        replace(CORRECT, skip=lambda skip, spec: skip[:1].expand_as(skip)),
    ),
    StateMutant(
        "skip-before-the-convolution",
        "The value that is skipped to the output is the one before the convolution.",
        "states-together",
        replace(CORRECT, skipped=lambda convolved, given: given),
    ),
    StateMutant(
        "strides-ignored",
        "Rates that all tokens share are read as if each token had its own.",
        "shared-rates",
        replace(CORRECT, rates=as_contiguous),
    ),
)
