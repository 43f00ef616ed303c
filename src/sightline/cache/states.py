"""Recurrent states: which slot has whose state, behind how many tokens, and who may read it.

    row of a sequence   ── behind 32 ▶ slot 7 (committed)      read by the next step
                        ── behind 33 ▶ slot 4 (launched)       written by a step in flight
                        ── behind 34 ▶ slot 9 (claimed)        the step that is being assembled will write it
    prefix tree         ── behind 32 ▶ slot 7                  a checkpoint, the same slot with two owners

A state is never changed in place. A step reads the state behind a row's context and writes the states behind its new
tokens into other slots, so it can run again with the same result, a step that fails loses nothing, and a checkpoint is
another owner of a slot, not a copy. Slot 0 is the empty state, all zeros: what a sequence begins with. Nothing writes
it; a token whose state is not kept has slot 0.

Every slot has a tag: the sequence that wrote it, the number of tokens that it is behind, and how far it is. A tag that
is not the expected one is an error, on the host, before anything is computed. Owns slots, tags and the tensors. Does
not know pages, nor what a state means.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from sightline.cache.pages import PageAllocator
from sightline.cache.spec import StateSpec
from sightline.cache.table import next_table_id
from sightline.core.batch import PADDING_SLOT
from sightline.core.errors import BatchError, OutOfPages
from sightline.core.interruption import uninterrupted
from sightline.core.lengths import picked

STATES = "states"
"""The key of the states of a network among the pools of a batch."""
_sequences = itertools.count(1)


class StateStage(IntEnum):
    """How far the state in a slot is."""

    FREE = 0
    """Nobody owns the slot."""
    CLAIMED = 1
    """A batch names the slot, and is not launched."""
    LAUNCHED = 2
    """A launched step writes it. It is speculative: only its own sequence may read it, in stream order."""
    COMMITTED = 3
    """The tokens before it are final. Others may share it."""


class StateTag(NamedTuple):
    """Where the state in a slot comes from."""

    sequence: int
    """The sequence that wrote it: a number that no other row, and no later use of the same row, has."""
    position: int
    """The number of tokens that it is behind."""
    stage: StateStage


_FREE, _CLAIMED, _LAUNCHED, _COMMITTED = StateStage
_Held: TypeAlias = tuple[int, int]
"""A slot that a row owns, and its generation when the row got it."""


class StateCheckpoint(NamedTuple):
    """A committed state that others may share. Only `StateTable.checkpoint` makes one.

    The generation guards against use after free: once the slot is freed or written anew, the checkpoint is refused.
    """

    slot: int
    generation: int
    position: int


class StatePool:
    """The states of one layer group in every slot."""

    def __init__(self, spec: StateSpec, num_slots: int, device: torch.device) -> None:
        self.spec = spec
        self._planes: Mapping[str, Tensor] = {
            plane.name: torch.empty(spec.num_layers, num_slots, *plane.shape, dtype=plane.dtype, device=device)
            for plane in spec.planes
        }
        for plane in self._planes.values():
            plane[:, PADDING_SLOT : PADDING_SLOT + 1].zero_()

    @property
    def is_used(self) -> bool:
        """False for a group that keeps entries per token only."""
        return bool(self._planes)

    @property
    def num_slots(self) -> int:
        """Slots of every plane, the empty state included; 0 if there are no planes."""
        return min([plane.shape[1] for plane in self._planes.values()], default=0)

    def plane(self, name: str) -> Tensor:
        """[num_layers, num_slots, ...]: one tensor of the states."""
        return self._planes[name]

    def fill(self, slots: Sequence[int], value: float) -> None:
        """Fills slots with a number."""
        for plane in self._planes.values():
            plane[:, list(slots)] = value

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in self._planes.values())


class StateTable:
    """The states that rows hold. All recurrent groups of a network share it, because a step updates all of them.

    Every row of every step comes here a few times, so the usual case of each method is short.
    """

    key = STATES

    def __init__(
        self, num_rows: int, allocator: PageAllocator, max_checkpoints: int, pools: Sequence[StatePool], *, poison: bool
    ) -> None:
        """`max_checkpoints` states may be kept for others beside what rows need to go on."""
        self.table_id = next_table_id()
        self.num_table_rows = num_rows
        self.max_checkpoints = max_checkpoints
        self.pools = tuple(pool for pool in pools if pool.is_used)
        self._allocator = allocator
        self._poison = poison
        self._held: list[dict[int, _Held]] = [{} for _ in range(num_rows + 1)]
        """For each row, the slots that it owns by the number of tokens that they are behind."""
        self._claims: list[list[int]] = [[] for _ in range(num_rows + 1)]
        """For each row, the positions of its claimed states."""
        self._pins: list[set[int]] = [set() for _ in range(num_rows + 1)]
        """For each row, the positions at which it keeps a state for others until it is unpinned."""
        self._sequences = [0] * (num_rows + 1)
        self._versions = [0] * (num_rows + 1)
        # The tags, one list for each of their parts.
        self._writers = [0] * (allocator.num_usable + 1)
        self._positions = [0] * (allocator.num_usable + 1)
        self._stages = [StateStage.FREE] * (allocator.num_usable + 1)
        self._num_shared = 0

    @property
    def is_used(self) -> bool:
        """False if no group of the network is recurrent."""
        return bool(self.pools)

    @property
    def allocator(self) -> PageAllocator:
        """The free list of slots."""
        return self._allocator

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_usable(self) -> int:
        """Slots that can be owned."""
        return self._allocator.num_usable

    @property
    def num_checkpoints(self) -> int:
        """States that are kept, or will be, for others."""
        return self._num_shared + sum(map(len, self._pins))

    @property
    def has_room(self) -> bool:
        """True if one more state may be kept for others."""
        return self.num_checkpoints < self.max_checkpoints

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return sum(pool.num_bytes for pool in self.pools)

    def tag(self, slot: int) -> StateTag:
        return StateTag(self._writers[slot], self._positions[slot], self._stages[slot])

    def positions(self, row: int) -> tuple[int, ...]:
        """The numbers of tokens behind which the row holds a state, in increasing order."""
        return tuple(sorted(self._held[row]))

    def held(self, row: int) -> dict[int, int]:
        """The slots of the states that the row holds, by the number of tokens that they are behind."""
        return {position: slot for position, (slot, _) in self._held[row].items()}

    def pinned(self, row: int) -> frozenset[int]:
        """The numbers of tokens behind which the row keeps a state for others."""
        return frozenset(self._pins[row])

    def versions(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Returns a number per row that changes whenever the row gives up a slot that a batch may name."""
        return picked(self._versions, rows)

    def slots_of(self, rows: Tensor, entries: Tensor) -> Tensor:
        """Always raises `BatchError`: the host must know which state is read."""
        del rows, entries
        raise BatchError("contexts", None, "lengths that the host knows in a model with states", "those of the device")

    def slots_to_read(self, rows: Sequence[int], contexts: Sequence[int]) -> list[int]:
        """The slot of the state behind each row's context. Raises `BatchError` if its tag is another."""
        return [
            self._readable(row, context, index) if context else PADDING_SLOT
            for index, (row, context) in enumerate(zip(rows, contexts, strict=True))
        ]

    def _readable(self, row: int, position: int, index: int | None) -> int:
        """The slot of a state that was written by the row's own sequence, or is committed."""
        found = self._held[row].get(position)
        if found is None:
            held = f"states behind {self.positions(row)}" if self._held[row] else "none"
            remedy = "restore a checkpoint at that position, or compute the row from its beginning"
            raise BatchError(STATES, index, f"one behind {position} tokens in row {row}", held, remedy)
        slot, generation = found
        stage = self._stages[slot]
        is_there = stage is _COMMITTED or (stage is _LAUNCHED and self._writers[slot] == self._sequences[row])
        if not is_there or self._positions[slot] != position or self._allocator.generation(slot) != generation:
            wanted = f"slot {slot} to have row {row}'s state behind {position} tokens"
            raise BatchError(STATES, index, wanted, f"{self.tag(slot)}", "run the step that writes it first")
        return slot

    def slots_to_write(
        self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int], candidates: Sequence[int]
    ) -> list[int]:
        """Claims the slots of a step: for each token, that of the state behind it, or slot 0 if it is not kept.

        States are kept behind a row's last `candidates` tokens and at its pins. Idempotent; claims of an earlier batch
        that was not launched are given up, which makes that batch stale.
        """
        slots: list[int] = []
        # An interruption after a slot is allocated and before the row has it would lose the slot.
        with uninterrupted():
            for index, (row, first, count, most) in enumerate(zip(rows, firsts, counts, candidates, strict=True)):
                if count == 1 and not self._claims[row] and not self._pins[row]:
                    slots.append(self._claim(row, first + 1, index))
                else:
                    slots += self._claim_all(row, first, count, most, index)
        return slots

    def _claim_all(self, row: int, first: int, count: int, most: int, index: int) -> list[int]:
        """The slots of one row's tokens."""
        stop = first + count
        wanted = range(max(first, stop - most) + 1, stop + 1)
        pins = [position for position in self._pins[row] if first < position <= stop and position not in wanted]
        for position in [each for each in self._claims[row] if each not in wanted and each not in pins]:
            self._drop(row, position)
            self._versions[row] += 1
        slots = [PADDING_SLOT] * count
        for position in (*pins, *wanted):
            slots[position - first - 1] = self._claim(row, position, index)
        return slots

    def _claim(self, row: int, position: int, index: int) -> int:
        held = self._held[row].get(position)
        if held is None:
            slot = self._allocator.allocate_one()
            self._held[row][position] = (slot, self._allocator.generation(slot))
            self._writers[slot], self._positions[slot] = self._sequences[row], position
            self._stages[slot] = _CLAIMED
            self._claims[row].append(position)
            return slot
        if self._stages[held[0]] is _COMMITTED:
            wanted = f"new states in row {row}, which has a committed one"
            raise BatchError(STATES, index, wanted, f"one behind {position} tokens", "build the batch from there")
        return held[0]

    def launch(self, row: int, start: int, stop: int) -> None:
        """Records that a step writes the row's states behind `start` and up to `stop` tokens."""
        if start == stop:
            return
        held, claims = self._held[row], self._claims[row]
        if stop not in held:
            raise BatchError(STATES, None, f"a slot for the state behind {stop} tokens in row {row}", tuple(held))
        for position in tuple(claims):
            if start < position <= stop:
                self._stages[held[position][0]] = _LAUNCHED
                claims.remove(position)

    def unlaunch(self, row: int, launched: int) -> None:
        """Records that states behind more than `launched` tokens were not written: the step that should have failed."""
        for position, (slot, _) in self._held[row].items():
            if position > launched and self._stages[slot] is _LAUNCHED:
                self._stages[slot] = _CLAIMED
                self._claims[row].append(position)

    def commit(self, row: int, length: int) -> None:
        """Makes the state behind `length` tokens the row's committed one and gives up those before it, except pins.

        Raises `BatchError` if there is no such state. Idempotent.
        """
        if not length:
            return
        self._stages[self._readable(row, length, None)] = _COMMITTED
        held, pins = self._held[row], self._pins[row]
        for position in tuple(held):
            if position < length:
                if position in pins:
                    self._stages[held[position][0]] = _COMMITTED
                else:
                    self._drop(row, position)

    def settle(self, row: int, launched: int) -> None:
        """Gives up states behind more than `launched` tokens: their tokens were not accepted."""
        held = self._held[row]
        if held and max(held) > launched:
            for position in [each for each in held if each > launched]:
                self._drop(row, position)
                self._versions[row] += 1

    def fill(self, row: int, length: int) -> None:
        """Gives up every state of a row but a committed one behind `length` tokens."""
        for position, (slot, _) in tuple(self._held[row].items()):
            if position != length or self._stages[slot] is not _COMMITTED:
                self._drop(row, position)
        self._claims[row].clear()
        self._pins[row].clear()
        self._versions[row] += 1

    def open(self, row: int) -> None:
        """Begins a new sequence in a row."""
        self.fill(row, 0)
        self._sequences[row] = next(_sequences)

    def put(self, row: int, length: int) -> None:
        """Gives a row an empty committed state behind `length` tokens, for states that no step wrote: imported ones, or
        a test's."""
        self.fill(row, 0)
        if length:
            slot = self._claim(row, length, 0)
            self._claims[row].clear()
            self._stages[slot] = _COMMITTED
            for pool in self.pools:
                pool.fill([slot], 0.0)

    def receive(self, row: int, position: int) -> int:
        """Gives a row a slot for the state behind `position` tokens, which a transfer fills.

        The row may not read it before `received`. The transfer owns the slot too, until `let_go`. It may outlive the
        row, so the state counts as a checkpoint. Raises `OutOfPages` if there is no room for one.
        """
        if position in self._held[row]:
            raise ValueError(f"expected row {row} to hold no state behind {position} tokens, got one")
        if not self.has_room:
            raise OutOfPages(f"expected room for a checkpoint, got {self.num_checkpoints} of {self.max_checkpoints}")
        # As in `slots_to_write`, an interruption would lose the slot.
        with uninterrupted():
            slot = self._claim(row, position, 0)
            self._claims[row].remove(position)
            self._allocator.share([slot])
            self._num_shared += 1
        return slot

    def received(self, row: int, position: int, slot: int) -> bool:
        """Says that the slot holds the state. Returns False if the row does not hold it any more."""
        held = self._held[row].get(position)
        if held is None or held[0] != slot or self._writers[slot] != self._sequences[row]:
            return False
        self._stages[slot] = _COMMITTED
        return True

    def let_go(self, row: int, position: int, slot: int) -> None:
        """Removes the transfer as an owner of a slot and, unless the state was received, the row too."""
        held = self._held[row].get(position)
        if held is not None and held[0] == slot and self._stages[slot] is _CLAIMED:
            self._drop(row, position)
        self._num_shared -= 1
        self._free(slot)

    def slot(self, row: int, position: int) -> int:
        """The slot of a row's state. Raises `BatchError` if it has none that can be read."""
        return self._readable(row, position, None)

    def pin(self, row: int, position: int) -> None:
        """Keeps the state behind `position` tokens, once a step has computed it, until `unpin`. Idempotent."""
        if position not in self._pins[row] and not self.has_room:
            raise ValueError(f"expected room for a checkpoint, got {self.num_checkpoints} of {self.max_checkpoints}")
        self._pins[row].add(position)

    def unpin(self, row: int, position: int) -> None:
        """Gives up a pin, and its state unless the row goes on from it. Idempotent."""
        self._pins[row].discard(position)
        committed = [each for each, (slot, _) in self._held[row].items() if self._stages[slot] is _COMMITTED]
        if position in committed and position < max(committed):
            self._drop(row, position)

    def checkpoint(self, row: int, position: int) -> StateCheckpoint | None:
        """A row's committed state behind `position` tokens, for others to share; None if it holds none there."""
        held = self._held[row].get(position)
        if held is None or self._stages[held[0]] is not _COMMITTED:
            return None
        return StateCheckpoint(self._readable(row, position, None), held[1], position)

    def share(self, checkpoint: StateCheckpoint) -> None:
        """Adds an owner outside the rows to a state."""
        self._require_kept(checkpoint)
        self._allocator.share([checkpoint.slot])
        self._num_shared += 1

    def release(self, checkpoint: StateCheckpoint) -> None:
        """Removes such an owner."""
        self._require_kept(checkpoint)
        self._num_shared -= 1
        self._free(checkpoint.slot)

    def restore(self, row: int, checkpoint: StateCheckpoint) -> None:
        """Lets a row go on from a shared state."""
        self._require_kept(checkpoint)
        if checkpoint.position in self._held[row]:
            raise ValueError(f"expected row {row} to hold no state behind {checkpoint.position} tokens, got one")
        self._allocator.share([checkpoint.slot])
        self._held[row][checkpoint.position] = (checkpoint.slot, checkpoint.generation)

    def tell(self, row: int, read: Mapping[int, int], written: Mapping[int, int]) -> None:
        """Gives a row exactly these slots, by the number of tokens that their states are behind: committed ones to
        `read`, and claims to be `written`. For tables whose slots another one allocates."""
        self._held[row] = {
            position: (slot, self._allocator.generation(slot)) for position, slot in {**read, **written}.items()
        }
        self._claims[row], self._pins[row] = list(written), set(written)
        for stage, told in ((_COMMITTED, read), (_CLAIMED, written)):
            for position, slot in told.items():
                self._writers[slot], self._positions[slot] = self._sequences[row], position
                self._stages[slot] = stage

    def _require_kept(self, checkpoint: StateCheckpoint) -> None:
        slot, generation, position = checkpoint
        is_same = self._allocator.generation(slot) == generation and self._positions[slot] == position
        if not is_same or self._stages[slot] is not _COMMITTED:
            raise ValueError(
                f"expected slot {slot} to hold the state behind {position} tokens, got {self.tag(slot)}, written anew "
                "since; find the prefix again"
            )

    def _drop(self, row: int, position: int) -> None:
        slot, _ = self._held[row].pop(position)
        if position in self._claims[row]:
            self._claims[row].remove(position)
        self._free(slot)

    def _free(self, slot: int) -> None:
        """Removes an owner. A slot without one loses its tag."""
        if self._allocator.release_one(slot):
            self._stages[slot] = _FREE
            if self._poison:
                for pool in self.pools:
                    pool.fill([slot], torch.nan)
