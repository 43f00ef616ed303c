"""Indexers with one fault each, and the check that must find it.

What is said of `mutants.py` holds here. A scale of the scores is no fault: a positive factor changes no choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.index_parts import CORRECT_INDEX, INDEX, IndexParts, IndexRow, Kept, make_index_backend, rank, walk
from sightline.attention.capability import Capability
from sightline.attention.contract import StepView
from sightline.attention.oracle.index import stored_keys
from sightline.cache.table import PageTable
from sightline.core.device import Device
from sightline.testing.conformance.rig import Subject


@dataclass(frozen=True)
class IndexMutant:
    """One fault."""

    name: str
    fault: str
    """In one sentence."""
    caught_by: str
    """The one check that fails."""
    parts: IndexParts
    cuda_only: bool = False
    """The fault does not show on a CPU."""

    def subject(self, device: Device, declares: Capability = INDEX) -> Subject:
        return Subject(self.name, make_index_backend(self.parts, declares=declares), declares, device)


def sees_one_more(row: IndexRow) -> Tensor:
    """Every new token but the last sees the next."""
    visible = row.visible.clone()
    for query in range(row.query_len - 1):
        visible[query, row.context_len + query + 1] = True
    return visible


def highest_places_first(scores: Tensor) -> Tensor:
    return scores.shape[1] - 1 - rank(scores.flip(1))


def first_if_alone(layer: int, choice: Tensor, kept: Kept) -> Tensor:
    del layer, kept
    return choice if choice.shape[1] > 1 else choice.clamp(max=0)


def pages_of_the_first_owner(table: PageTable, row: IndexRow, page_size: int, kept: Kept) -> Tensor:
    """The slots of a table row are remembered, whoever has the row now."""
    slots = walk(table, row, page_size, kept)
    known: Tensor = kept.setdefault(row.table_row, slots)
    count = min(known.shape[0], slots.shape[0])
    return torch.cat([known[:count], slots[count:]])


def first_of_the_plan(layer: int, choice: Tensor, kept: Kept) -> Tensor:
    first: Tensor = kept.setdefault("choice", choice)
    return first


def no_small_scales(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales below 2^-12 are rounded up to it."""
    _, scales = stored_keys(keys, dtype)
    scales = scales.clamp(min=2.0**-12)
    return (keys.float() / scales).to(dtype), scales


def no_large_scales(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales above 2^6 are cut off."""
    _, scales = stored_keys(keys, dtype)
    scales = scales.clamp(max=2.0**6)
    limit = torch.finfo(dtype).max
    return (keys.float() / scales).clamp(-limit, limit).to(dtype), scales


def nan_last(scores: Tensor) -> Tensor:
    """NaN is below every score, but above what is not visible."""
    return rank(scores.nan_to_num(nan=-1e30, neginf=-torch.inf))


def first_heads(weights: Tensor) -> Tensor:
    """Heads behind the 16th do not count."""
    return weights * (torch.arange(weights.shape[1], device=weights.device) < 16)


def overwrite(out: Tensor) -> None:
    out.fill_(-1)


def at_top_k_too(step: StepView, top_k: int) -> bool:
    lengths = zip(step.batch.context_lens.exact(), step.batch.query_lens.exact(), strict=True)
    return max((sum(each) for each in lengths), default=0) >= top_k


def changed(**parts: object) -> IndexParts:
    return replace(CORRECT_INDEX, **parts)  # type: ignore[arg-type]


INDEX_MUTANTS: tuple[IndexMutant, ...] = (
    IndexMutant(
        "index-sees-the-next-token",
        "A new token may choose the one behind it.",
        "causal",
        changed(sees=sees_one_more),
    ),
    IndexMutant(
        "one-token-fewer", "One token fewer is chosen than asked for.", "causal", changed(count=lambda k: max(k - 1, 1))
    ),
    IndexMutant(
        "one-token-more",
        "One token more is ranked than fits, and the last place falls off.",
        "causal",
        changed(count=lambda k: k + 1),
    ),
    IndexMutant("weights-ignored", "All heads count alike.", "context", changed(weights=torch.ones_like)),
    IndexMutant(
        "products-not-cut-off",
        "Negative products lower a score.",
        "context",
        changed(cut_off=lambda products: products),
    ),
    IndexMutant("choice-by-score", "Places are in the order of scores.", "causal", changed(order=lambda best: best)),
    IndexMutant("zero-behind-the-last", "Place 0 stands behind the last chosen one.", "causal", changed(filling=0)),
    IndexMutant(
        "choice-of-the-row-before",
        "A row takes the choice of the row before it.",
        "ragged",
        changed(row_of=lambda row: max(row - 1, 0)),
    ),
    IndexMutant("padding-chosen", "Padding tokens get a choice.", "padding", changed(padding=overwrite)),
    IndexMutant(
        "keys-of-a-stale-page",
        "Keys are read from the pages that the table row had first.",
        "next-batch",
        changed(slots=pages_of_the_first_owner),
    ),
    IndexMutant(
        "indexer-of-the-first-layer",
        "Every layer chooses by the first layer's keys.",
        "layers",
        changed(read_layer=lambda layer: 0),
    ),
    IndexMutant(
        "choice-of-the-first-layer",
        "Every layer of a plan takes the first one's choice.",
        "layers",
        changed(of_layer=first_of_the_plan),
    ),
    IndexMutant(
        "scale-of-the-neighbour",
        "An 8-bit key is read with the scale in the slot before its own.",
        "cache-dtypes",
        changed(scale_slots=lambda slots: (slots - 1).clamp(min=0)),
    ),
    IndexMutant(
        "single-choice-of-the-first",
        "If a single token is chosen, it is the first one.",
        "choice",
        changed(of_layer=first_if_alone),
    ),
    IndexMutant(
        "chooses-at-the-border",
        "A step whose longest row has just as many tokens as are chosen writes a choice.",
        "nothing-to-choose",
        changed(chooses=at_top_k_too),
    ),
    IndexMutant(
        "tie-order-reversed", "Of equal scores the highest places win.", "ties", changed(rank=highest_places_first)
    ),
    IndexMutant(
        "small-scales-rounded-up",
        "Keys of very small numbers are kept with too large a scale.",
        "key-scales",
        changed(code=no_small_scales),
    ),
    IndexMutant(
        "large-scales-cut-off",
        "Keys of very large numbers are kept with too small a scale.",
        "key-scales",
        changed(code=no_large_scales),
    ),
    IndexMutant("nan-chosen-last", "A score that is NaN counts as the lowest.", "nan-scores", changed(rank=nan_last)),
    IndexMutant("sixteen-heads", "Only 16 heads count.", "heads", changed(weights=first_heads)),
)
