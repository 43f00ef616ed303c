"""Backends of compressed attention with one fault each, and the check that must find it.

What is said of `mutants.py` holds here. A fault is planted in the source of Sightline's own backends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sightline.attention.backends.torch.rows import COMPRESSED_INDEX_ROWS, COMPRESSED_ROWS
from sightline.attention.capability import Capability
from sightline.attention.kinds import SpecKind
from sightline.core.device import Device
from sightline.testing.conformance.rig import Subject
from support.planted_compressed import ATTEND, BACKEND, COMPRESSOR, ENTRIES, INDEX, LAYOUT, STEP, TILES, plant

_DTYPES = frozenset({torch.float32, torch.bfloat16})


def _row(row: Capability) -> Capability:
    """The row in two dtypes."""
    return replace(row, dtypes=_DTYPES, cache_dtypes=_DTYPES)


COMPRESSED, COMPRESSED_INDEX = _row(COMPRESSED_ROWS[0]), _row(COMPRESSED_INDEX_ROWS[0])
_ROWS = {SpecKind.COMPRESSED: COMPRESSED, SpecKind.COMPRESSED_INDEX: COMPRESSED_INDEX}


@dataclass(frozen=True)
class CompressedMutant:
    """One fault: a text of a module's source, and what stands there instead."""

    name: str
    fault: str
    """In one sentence."""
    caught_by: str
    """The one check that fails."""
    module: str
    original: str
    planted: str
    kind: SpecKind = SpecKind.COMPRESSED
    cuda_only: bool = False
    """The fault does not show on a CPU."""

    def subject(self, device: Device, declares: Capability | None = None) -> Subject:
        backend: type[Any] = plant(self.module, self.original, self.planted)[self.kind]
        return Subject(self.name, backend, _ROWS[self.kind] if declares is None else declares, device)


COMPRESSED_MUTANTS: tuple[CompressedMutant, ...] = (
    CompressedMutant(
        "no-window-of-long-entries",
        "Where windows do not overlap, an open window is lost between steps if it is longer than 8 tokens.",
        "entries",
        LAYOUT,
        "row.place if row.context >= begin else self.num_rows",
        "row.place if row.context >= begin and self.ratio <= 8 else self.num_rows",
    ),
    CompressedMutant(
        "sixth-step-of-three-lengths",
        "From the sixth step of rows of three lengths on, open windows are lost.",
        "cut-anywhere",
        STEP,
        "read_slots = None if states is None else",
        "steps = vars(pool)['steps'] = vars(pool).get('steps', 0) + (len({row.length for row in rows}) == 3)\n"
        "    read_slots = None if states is None or steps > 5 else",
    ),
    CompressedMutant(
        "refused-entry-kept",
        "An entry that is there already is not written again.",
        "refused-guesses",
        ENTRIES,
        "plane.index_copy_(0, self.write_slots, new)",
        "plane.index_copy_(0, self.write_slots, "
        "torch.where(plane[self.write_slots].isfinite(), plane[self.write_slots], new))",
    ),
    CompressedMutant(
        "adjacent-entry-pages",
        "Entries behind the fifteenth are taken to lie behind each other.",
        "entry-pages",
        ENTRIES,
        "return self.pool.entry_slots(rows, numbers)",
        "first = self.pool.entry_slots(rows, numbers.clamp(max=15))\n"
        "        return (first + (numbers - 15).clamp(min=0)) % self.pool.plane('entry').shape[1]",
    ),
    CompressedMutant(
        "least-window",
        "A window of one token has two.",
        "key-windows",
        TILES,
        "(distance >= window)",
        "(distance >= max(window, 2))",
    ),
    CompressedMutant(
        "small-sinks",
        "Sinks above 6 are cut off.",
        "sink-weights",
        ATTEND,
        "inputs.sinks.float()",
        "inputs.sinks.float().clamp(max=6.0)",
    ),
    CompressedMutant(
        "small-gates",
        "Gates are cut off at 30, above and below.",
        "gates",
        COMPRESSOR,
        "gates = gates.masked_fill(block.missing, -torch.inf)",
        "gates = gates.clamp(-30.0, 30.0).masked_fill(block.missing, -torch.inf)",
    ),
    CompressedMutant(
        "missing-choice-read",
        "A query that sees fewer entries than are chosen reads the first one again.",
        "chosen-numbers",
        ATTEND,
        "unseen = chosen < 0",
        "unseen = chosen < -1",
    ),
    CompressedMutant(
        "new-entries-on-the-device-alone",
        "What a step completes is not kept in host memory.",
        "hot-entries",
        BACKEND,
        "        self.hot.plan.keep(layer)\n",
        "",
    ),
    CompressedMutant(
        "six-chosen-entries",
        "No more than six entries are chosen.",
        "chosen-entries",
        INDEX,
        "        tokens.put(out, chosen)",
        "        chosen[:, 6:] = -1\n        tokens.put(out, chosen)",
        SpecKind.COMPRESSED_INDEX,
    ),
    CompressedMutant(
        "narrow-choice",
        "In half precision a query reads the entry before each that was chosen for it.",
        "compressed-together",
        ATTEND,
        "numbers = chosen.clamp(min=0).long()",
        "numbers = (chosen - int(source.dtype != torch.float32)).clamp(min=0).long()",
    ),
)
