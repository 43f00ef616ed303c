"""The drafters by their names in `speculative_config`: Sightline's own, and those of installed packages.

A package registers a `DrafterKind` through the entry point group `sightline.drafters`. It is imported only if its
method is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sightline.core.config import EngineConfig
from sightline.core.device import DeviceKind
from sightline.core.errors import ConfigError
from sightline.core.extensions import Extension, extensions
from sightline.core.ledger import Ledger
from sightline.core.speculation import ENTRY_POINT_GROUP, Speculation, method_names, read_speculation
from sightline.models.contract import NO_TAPS, Taps
from sightline.models.drafting import DraftSource
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.registry import define_model
from sightline.runner.graphs import MAX_NEW_TOKENS
from sightline.speculative.draft_model import DRAFT_MODEL
from sightline.speculative.drafter import DrafterContext, DrafterKind, DraftTarget
from sightline.speculative.drafts import AdaptiveDrafts
from sightline.speculative.frozen import FROZEN_KV_MTP
from sightline.speculative.heads import EAGLE3, MTP
from sightline.speculative.ngram import NGRAM

BUILT_IN: Mapping[str, DrafterKind] = MappingProxyType(
    {each.method.name: each for each in (NGRAM, DRAFT_MODEL, EAGLE3, MTP, FROZEN_KV_MTP)}
)
MAX_STEP_TOKENS: Mapping[DeviceKind, int] = MappingProxyType({DeviceKind.CPU: 8, DeviceKind.CUDA: 128})
"""Steps of at most this many tokens are bound by reading weights, so guesses cost little; in larger ones each costs
its own time."""
PATIENCE: Mapping[DeviceKind, int] = MappingProxyType({DeviceKind.CPU: 0, DeviceKind.CUDA: 2})
"""Drafts of a sequence in a row that may fail before it rests. On a CPU every guess costs time."""


def find(name: str) -> DrafterKind:
    """The kind of drafter with that name. Raises `ConfigError`, listing what is installed, if there is none."""
    brought = {
        each.name: each for each in extensions(ENTRY_POINT_GROUP, "drafter", dict.fromkeys(BUILT_IN, "sightline"))
    }
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name not in brought:
        raise ConfigError(f"expected a speculative method out of {', '.join(method_names())}, got {name!r}")
    return _load(brought[name])


def _find_checked(speculation: Speculation) -> DrafterKind:
    """The kind of drafter that is asked for. Raises `ConfigError` if it cannot use the settings."""
    kind = find(speculation.method)
    kind.method.check(speculation)
    return kind


def _load(extension: Extension) -> DrafterKind:
    """The kind that a package registers."""
    loaded = extension.load()
    if not isinstance(loaded, DrafterKind) or loaded.method.name != extension.name:
        raise extension.refuse(f"a DrafterKind whose method is named {extension.name}", loaded)
    return loaded


class DraftNeeds(NamedTuple):
    """What a drafter needs of the engine that it guesses for."""

    taps: Taps = NO_TAPS
    source: DraftSource | None = None


def drafter_needs(config: EngineConfig, checkpoint: Checkpoint, ledger: Ledger) -> DraftNeeds:
    """Returns what a config's drafter needs of the engine; nothing if there is no drafter. Reads no weights."""
    speculation = read_speculation(config.speculative_config)
    if speculation is None:
        return DraftNeeds()
    kind = _find_checked(speculation)
    if kind.networks is None:
        return DraftNeeds(kind.taps)
    # The ledger is told what the definition ignores when the model is built.
    target = DraftTarget(checkpoint, define_model(checkpoint.config, Ledger()), ledger)
    source = kind.networks(speculation, target)
    return DraftNeeds(source.definition.taps, source)


def make_drafts(context: DrafterContext) -> AdaptiveDrafts:
    """The drafts of all sequences of an engine. The ledger says if fewer tokens are guessed than asked for."""
    config = context.speculation
    kind = _find_checked(config)
    most, max_step_tokens = config.num_speculative_tokens, MAX_STEP_TOKENS[context.device]
    if most >= max_step_tokens:
        context.ledger.degrade(
            "num_speculative_tokens",
            f"at most {max_step_tokens - 1} tokens are guessed at once, not {most}: a larger step on this device costs "
            "more than its guesses save",
            f"ask for {max_step_tokens - 1} or fewer",
        )
    elif context.device is DeviceKind.CUDA and most >= MAX_NEW_TOKENS:
        context.ledger.degrade(
            "num_speculative_tokens",
            f"steps with more than {MAX_NEW_TOKENS - 1} guesses in a row run eagerly: longer ones are not captured",
            f"ask for {MAX_NEW_TOKENS - 1} or fewer",
        )
    return AdaptiveDrafts(
        kind.make(context),
        most,
        max_step_tokens,
        context.ledger,
        vocab_size=context.vocab_size,
        patience=PATIENCE[context.device],
        num_branches=config.num_branches,
        on_failure=context.retire,
    )
