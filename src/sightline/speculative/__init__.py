"""Drafters, which guess the next tokens of a sequence, and what becomes of their guesses.

The exports are the contract for drafters, both Sightline's own and those of other packages.
"""

from sightline.core.device import DeviceKind
from sightline.core.speculation import DraftMethod, Speculation
from sightline.models.contract import NO_TAPS, Taps
from sightline.models.drafting import DraftDefinition, DraftSource, LoadedDraft
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.networks import DraftRuntime
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.drafter import (
    Drafter,
    DrafterContext,
    DrafterKind,
    DrafterOfTexts,
    DraftTarget,
    ObservedRow,
    ObservedStep,
    TextDrafter,
)
from sightline.speculative.network_steps import DraftedRow, NetworkSteps, choosing, drafts_in_order, longest_first

__all__ = [
    "NO_TAPS",
    "DeviceKind",
    "Draft",
    "DraftDefinition",
    "DraftMethod",
    "DraftRoom",
    "DraftRuntime",
    "DraftSource",
    "DraftTarget",
    "DraftedRow",
    "Drafter",
    "DrafterContext",
    "DrafterKind",
    "DrafterOfTexts",
    "LoadedDraft",
    "NetworkSteps",
    "ObservedRow",
    "ObservedStep",
    "SequenceState",
    "Speculation",
    "Taps",
    "TextDrafter",
    "choosing",
    "drafts_in_order",
    "longest_first",
    "open_checkpoint",
]
