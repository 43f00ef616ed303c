"""Candidate backends per kind of work, and what is reported about the choice. Builds nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from sightline.attention.backends import registry
from sightline.attention.capability import ANY, Work, decode_work
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import SpecKind
from sightline.attention.selection import Candidate, Offer, Selection
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig

GroupSelection: TypeAlias = Mapping[Work, Selection]
"""The selection for each kind of rows that steps may have."""

_FOR_ALL = "attention_backend"
"""The setting for the kinds of rows that the other two settings do not cover."""


def works_of(config: ResolvedConfig) -> tuple[Work, ...]:
    """The kinds of rows that steps may have. Without a cache there are no decode rows."""
    decoding = range(1, config.max_rows + 1) if config.num_pages else ()
    possible = {Work.PREFILL, *(decode_work(num_rows) for num_rows in decoding)}
    return tuple(work for work in Work if work in possible)


def make_offers(config: ResolvedConfig, candidates: Sequence[Candidate]) -> Mapping[Work, Offer]:
    """The candidates for each kind of rows. Raises `ConfigError` for an unknown name, even in an unused setting."""
    offers = {setting: registry.offer(candidates, names, setting) for setting, names in _names(config).items()}
    return {work: offers[_setting_for(config, work)] for work in works_of(config)}


def offer_for(offer: Offer, group: LayerGroup, groups: Sequence[LayerGroup], candidates: Sequence[Candidate]) -> Offer:
    """The candidates for one group. Names that serve other kinds of layers of the model leave its own kind open."""
    kinds = _kinds(offer)
    if offer.asked is None or group.spec.kind in kinds or kinds.isdisjoint(each.spec.kind for each in groups):
        return offer
    return registry.offer(candidates, None)


def _kinds(offer: Offer) -> frozenset[SpecKind]:
    """The kinds of layers that some candidate serves."""
    return frozenset(kind for each in offer.candidates for row in each.rows() for kind in row.spec_kinds)


def tell_choices(
    config: ResolvedConfig, groups: Sequence[LayerGroup], selections: Sequence[GroupSelection], ledger: Ledger
) -> None:
    """Records backends that were asked for and serve nothing, and kinds of rows for which no fast kernel is usable."""
    for setting, names in _names(config).items():
        chosen = {
            group.name: [each for work, each in selection.items() if _setting_for(config, work) == setting]
            for group, selection in zip(groups, selections, strict=True)
        }
        serving = {each.candidate.name for group in chosen.values() for each in group}
        for name in () if names is None else registry.names_in(names):
            if name not in serving:
                reasons = _why_not(name, chosen) if serving else _nothing_to_serve(config, setting)
                ledger.degrade(setting, f"{name} serves nothing: {reasons}", "leave it out")
        for group, each in zip(groups, selections, strict=True):
            _tell_open(config, setting, names, group, each, ledger)
    for group, selection in zip(groups, selections, strict=True):
        _tell_slow(group, selection, ledger)


def _tell_open(
    config: ResolvedConfig,
    setting: str,
    names: str | None,
    group: LayerGroup,
    selection: GroupSelection,
    ledger: Ledger,
) -> None:
    """Notes a backend that was chosen for a kind of layers that the names of a setting do not serve."""
    if names is None:
        return
    chosen = {each.candidate.name for work, each in selection.items() if _setting_for(config, work) == setting}
    for name in sorted(chosen - set(registry.names_in(names))):
        ledger.note(setting, f"{names} serves no {group.spec.kind.value} layers: {name} was chosen for {group.name}")


def _why_not(name: str, chosen: Mapping[str, Sequence[Selection]]) -> str:
    """The reasons why a backend was refused, by group, or once if all groups have the same."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for group, selections in chosen.items():
        reasons = dict.fromkeys(reason for each in selections for reason in dict(each.refused)[name])
        groups.setdefault(tuple(reasons), []).append(group)
    if len(groups) == 1:
        return "; ".join(*groups)
    return "; ".join(f"{', '.join(names)}: {', '.join(reasons)}" for reasons, names in groups.items())


def _nothing_to_serve(config: ResolvedConfig, setting: str) -> str:
    """The reason why a setting applies to no kind of rows."""
    if setting != _FOR_ALL:
        return "without a cache no row decodes"
    deciding = dict.fromkeys(_setting_for(config, work) for work in works_of(config))
    return f"{' and '.join(deciding)} decide{'s' if len(deciding) == 1 else ''} instead"


def _tell_slow(group: LayerGroup, selection: GroupSelection, ledger: Ledger) -> None:
    slow: dict[str, dict[Work, Selection]] = {}
    for work, each in selection.items():
        if each.forgone and each.capability.compute_capabilities is ANY:
            slow.setdefault(each.candidate.name, {})[work] = each
    for name, served in slow.items():
        forgone = dict(refused for each in served.values() for refused in each.forgone)
        others = "; ".join(f"{other}: {', '.join(reasons)}" for other, reasons in forgone.items())
        ledger.degrade(
            "attention backend",
            f"{', '.join(work.value for work in served)} of {group.name} is served by {name}, which is slower here "
            f"than what was refused; {others}",
            f"remove the reasons, or ask for {name} by name",
        )


def import_chosen(selections: Sequence[GroupSelection]) -> None:
    """Imports the chosen backends before the weights are read. Raises `ConfigError` if a library is broken."""
    for selection in selections:
        for each in selection.values():
            each.candidate.load()


def _names(config: ResolvedConfig) -> Mapping[str, str | None]:
    """The value of each setting that names backends."""
    return {
        _FOR_ALL: config.attention_backend,
        "prefill_attention_backend": config.prefill_attention_backend,
        "decode_attention_backend": config.decode_attention_backend,
    }


def _setting_for(config: ResolvedConfig, work: Work) -> str:
    """The setting that decides which backend serves a kind of rows."""
    own = "prefill_attention_backend" if work is Work.PREFILL else "decode_attention_backend"
    return _FOR_ALL if _names(config)[own] is None else own
