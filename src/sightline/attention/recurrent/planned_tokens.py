"""Planning shared by the GPU backends of recurrent layers and of convolutions: where tokens and states are.

Nothing is read on the host but bounds, so that a captured step serves any lengths and slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import StepView
from sightline.kernels.triton.recurrent_tokens import TokenRows, TokenSlots, find_tokens


@dataclass(frozen=True, eq=False)
class PlannedTokens:
    """The tokens of a step."""

    query_lens: Tensor
    """[num_rows] int64."""
    rows: TokenRows
    slots: TokenSlots | None
    """None under `TRANSIENT`."""
    longest: int
    """No row has more tokens."""

    @staticmethod
    def of(step: StepView, buffers: PlanBuffers) -> PlannedTokens:
        batch, states = step.batch, step.states
        rows = TokenRows(
            offsets=buffers.take("offsets", (batch.num_rows + 1,), torch.int64),
            rows=buffers.take("token rows", (batch.num_tokens,), torch.int32),
        )
        slots = None if states is None else TokenSlots(states.read_slots, states.write_slots)
        return PlannedTokens(batch.query_lens.device, rows, slots, max(batch.query_lens.bound, default=0))

    @property
    def num_rows(self) -> int:
        return self.query_lens.shape[0]

    def prepare(self) -> None:
        """Finds every token's row, on the device."""
        find_tokens(self.query_lens, self.rows)
