"""What a drafter sees of a step: the rows that are about to be committed, and the states that the model gave."""

from __future__ import annotations

import logging

import torch

from sightline.core.errors import DeviceFaultError
from sightline.engine.launch import LaunchedStep, LifeT, StepResults
from sightline.speculative.drafter import ObservedRow, ObservedStep
from sightline.speculative.drafts import AdaptiveDrafts

logger = logging.getLogger("sightline")


def show(drafts: AdaptiveDrafts, step: LaunchedStep[LifeT], results: StepResults) -> None:
    """Shows the drafter a step. Its rows still hold their pages, and whatever it computes is there when they are
    committed, so that its entries are shared with the model's."""
    rows: list[ObservedRow] = []
    start = 0
    for index, (row, live) in enumerate(zip(step.rows, step.lives, strict=True)):
        if not row.sequence.is_out:
            try:
                result = results.take(index)
                if live.error is None:
                    rows.append(ObservedRow(row, result, start))
            except (DeviceFaultError, torch.AcceleratorError):
                raise
            except Exception:
                logger.debug("row %d cannot be read: it raises again, and ends, when it is committed", index)
        start += row.num_tokens
    drafts.observe_step(ObservedStep(rows, step.states))
