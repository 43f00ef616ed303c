"""Whom an engine's settings let selection choose from, and what is told of the choices. Builds nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from sightline.attention.backends import registry
from sightline.attention.capability import ANY, Work
from sightline.attention.selection import Candidate, Offer, Selection
from sightline.attention.spec import LayerGroup
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig

GroupSelection: TypeAlias = Mapping[Work, Selection]
"""By kind of rows."""


def make_offers(config: ResolvedConfig, candidates: Sequence[Candidate]) -> Mapping[Work, Offer]:
    """For each kind of rows. Raises `ConfigError` for a name that nobody has, also where other settings go before."""
    offers = {setting: registry.offer(candidates, names, setting) for setting, names in _names(config).items()}
    return {work: offers[_setting_for(config, work)] for work in Work}


def tell_choices(
    config: ResolvedConfig, groups: Sequence[LayerGroup], selections: Sequence[GroupSelection], ledger: Ledger
) -> None:
    """What was asked for and serves nothing; and what no kernel for the device serves, though there are some."""
    for setting, names in _names(config).items():
        chosen = [each[work] for each in selections for work in Work if _setting_for(config, work) == setting]
        serving = {each.candidate.name for each in chosen}
        for name in () if names is None else registry.names_in(names):
            if name not in serving:
                reasons = dict(chosen[0].refused)[name] if chosen else ("the other two settings name who does",)
                ledger.record(setting, f"{name} serves nothing: {'; '.join(reasons)}", "leave it out")
    for group, selection in zip(groups, selections, strict=True):
        slow = {
            work: each
            for work, each in selection.items()
            if each.forgone and each.capability.compute_capabilities is ANY
        }
        if slow:
            kinds, first = ", ".join(work.value for work in slow), next(iter(slow.values()))
            others = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in first.forgone)
            ledger.record(
                "attention backend",
                f"{kinds} of {group.name} is served by {first.candidate.name}, which has no kernels for this device "
                f"alone; {others}",
                f"mend what they say, or ask for {first.candidate.name} by name",
            )


def import_chosen(selections: Sequence[GroupSelection]) -> None:
    """Raises `ConfigError` for a library that is broken: before the weights are read, which may take minutes."""
    for selection in selections:
        for each in selection.values():
            each.candidate.load()


def _names(config: ResolvedConfig) -> Mapping[str, str | None]:
    """By setting."""
    return {
        "attention_backend": config.attention_backend,
        "prefill_attention_backend": config.prefill_attention_backend,
        "decode_attention_backend": config.decode_attention_backend,
    }


def _setting_for(config: ResolvedConfig, work: Work) -> str:
    """The setting that says who serves a kind of rows."""
    own = "prefill_attention_backend" if work is Work.PREFILL else "decode_attention_backend"
    return "attention_backend" if _names(config)[own] is None else own
