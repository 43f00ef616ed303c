"""The drafters by their names in `speculative_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from sightline.core.device import DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.speculation import METHODS, Speculation
from sightline.speculative.drafter import Drafter, DrafterOfTexts
from sightline.speculative.drafts import AdaptiveDrafts
from sightline.speculative.ngram import NgramDrafter


def _ngram(config: Speculation) -> Drafter:
    return DrafterOfTexts(partial(NgramDrafter.of, config))


DRAFTERS: Mapping[str, Callable[[Speculation], Drafter]] = MappingProxyType({METHODS[0]: _ngram})


MAX_STEP_TOKENS: Mapping[DeviceKind, int] = MappingProxyType({DeviceKind.CPU: 8, DeviceKind.CUDA: 128})
"""Up to so many tokens a step mostly reads weights, so that guesses cost little; beyond, each costs its own time."""


def make_drafts(config: Speculation, device: DeviceKind, ledger: Ledger) -> AdaptiveDrafts:
    """The drafts of all sequences of an engine. The ledger says if fewer tokens are guessed than asked for."""
    most, max_step_tokens = config.num_speculative_tokens, MAX_STEP_TOKENS[device]
    if most >= max_step_tokens:
        ledger.degrade(
            "num_speculative_tokens",
            f"at most {max_step_tokens - 1} tokens are guessed at once, not {most}: a larger step on this device costs "
            "more than its guesses save",
            f"ask for {max_step_tokens - 1} or fewer",
        )
    return AdaptiveDrafts(DRAFTERS[config.method](config), most, max_step_tokens)
