"""Backends of attention to chosen entries with one fault each, and the check that must find it.

What is said of `mutants.py` holds here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from conformance.latent_mutants import LatentMutant
from conformance.latent_parts import CORRECT, Kept, LatentRow, taken_places


def reads_all(row: LatentRow, query: int, choice: Tensor) -> Tensor:
    del choice
    return row.visible[query].nonzero().flatten()


def counts_chosen(places: Tensor, choice: Tensor) -> Tensor:
    return torch.isin(places, choice.long())


def last_for_none(row: LatentRow, query: int, choice: Tensor) -> Tensor:
    """-1 is read as a place, counted from the end of the row."""
    del query
    return choice.long() % row.seq_len


def with_its_own(row: LatentRow, query: int, choice: Tensor) -> Tensor:
    places = taken_places(row, query, choice)
    own = torch.tensor([row.context_len + query], device=places.device)
    return torch.cat([places[places != own], own])


def without_the_last(row: LatentRow, query: int, choice: Tensor) -> Tensor:
    places = taken_places(row, query, choice)
    return places[:-1] if places.shape[0] > 1 else places


def first_64(row: LatentRow, query: int, choice: Tensor) -> Tensor:
    return taken_places(row, query, choice)[:64]


def choice_of_the_first_layer(row: LatentRow, chosen: Tensor, kept: Kept) -> Tensor:
    first: Tensor = kept.setdefault(row.first_token, chosen.clone())
    return first


def choice_of_the_last_query(row: LatentRow, chosen: Tensor, kept: Kept) -> Tensor:
    """All new tokens of a row attend to what the last one chose, as far as they see it."""
    del kept
    last = chosen[-1:].expand_as(chosen)
    positions = torch.arange(row.context_len, row.seq_len, device=chosen.device).unsqueeze(1)
    return torch.where((last <= positions) & (row.kind.value == "causal"), last, chosen)


SPARSE_MUTANTS: tuple[LatentMutant, ...] = (
    LatentMutant(
        "choice-ignored", "A query attends to all entries that it sees.", "sparse", replace(CORRECT, places=reads_all)
    ),
    LatentMutant(
        "none-taken-for-the-last",
        "-1, which stands behind the last chosen entry, is read as the row's last entry.",
        "sparse",
        replace(CORRECT, places=last_for_none),
    ),
    LatentMutant(
        "new-token-always-added",
        "A query attends to its own entry even if it did not choose it.",
        "sparse",
        replace(CORRECT, places=with_its_own),
    ),
    LatentMutant(
        "last-choice-dropped", "The last chosen entry is not read.", "sparse", replace(CORRECT, places=without_the_last)
    ),
    LatentMutant("first-64-chosen", "No more than 64 entries are read.", "sparse", replace(CORRECT, places=first_64)),
    LatentMutant(
        "choice-of-the-last-query",
        "All new tokens of a row attend to what the last of them chose.",
        "sparse",
        replace(CORRECT, chosen=choice_of_the_last_query),
    ),
    LatentMutant(
        "lse-over-all-entries",
        "The LSE is over all entries that a query sees.",
        "sparse",
        replace(CORRECT, chosen_lse=lambda chosen, of_all: of_all()),
    ),
    LatentMutant(
        "unchosen-entries-weigh-nothing",
        "All entries are read, and those that were not chosen get the weight 0.",
        "unchosen-entries",
        replace(CORRECT, places=reads_all, weighed=counts_chosen),
    ),
    LatentMutant(
        "chosen-in-pages-of-16",
        "Chosen entries are looked up as if a page had 16 of them.",
        "chosen-pages",
        replace(CORRECT, page_size=lambda page_size: 16),
    ),
    LatentMutant(
        "choice-kept-from-the-first-layer",
        "Every layer of a plan takes the choice of the first one that runs.",
        "choices-in-turn",
        replace(CORRECT, chosen=choice_of_the_first_layer),
    ),
    LatentMutant(
        "padding-looked-up",
        "What padding tokens chose is looked up.",
        "choices-in-turn",
        replace(CORRECT, reads_padding=True),
    ),
)
