"""Drafters, which guess the next tokens of a sequence, and what becomes of their guesses.

The exports are the contract for drafters, both Sightline's own and those of other packages.
"""

from sightline.core.device import DeviceKind
from sightline.core.speculation import DraftMethod, Speculation
from sightline.models.contract import NO_TAPS, Taps
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.drafter import (
    Drafter,
    DrafterContext,
    DrafterKind,
    DrafterOfTexts,
    ObservedRow,
    ObservedStep,
    TextDrafter,
)

__all__ = [
    "NO_TAPS",
    "DeviceKind",
    "Draft",
    "DraftMethod",
    "DraftRoom",
    "Drafter",
    "DrafterContext",
    "DrafterKind",
    "DrafterOfTexts",
    "ObservedRow",
    "ObservedStep",
    "SequenceState",
    "Speculation",
    "Taps",
    "TextDrafter",
]
