"""Backends of latent attention with one fault each, and the check that must find it.

What is said of `mutants.py` holds here. Faults that any attention can have are there; these are of the latent, of the
ways in which a row can be computed, and of the parts that are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.latent_parts import (
    CHUNK,
    CORRECT,
    Chunks,
    Kept,
    LatentParts,
    LatentRow,
    Piece,
    as_given,
    in_rounds,
    merge,
)
from conformance.latent_parts_backend import LATENT, make_latent_backend
from sightline.attention.capability import Capability
from sightline.attention.contract import LatentInputs
from sightline.core.device import Device
from sightline.testing.conformance.rig import Subject


@dataclass(frozen=True)
class LatentMutant:
    """One fault."""

    name: str
    fault: str
    """In one sentence."""
    caught_by: str
    """The one check that fails."""
    parts: LatentParts
    cuda_only: bool = False
    """The fault does not show on a CPU."""

    def subject(self, device: Device, declares: Capability = LATENT) -> Subject:
        return Subject(self.name, make_latent_backend(self.parts, declares=declares), declares, device)


def normalised(inputs: LatentInputs) -> Tensor:
    latent = torch.nn.functional.rms_norm(inputs.latent, inputs.latent.shape[-1:])
    return as_given(replace(inputs, latent=latent))


def to_the_end_of_the_page(row: LatentRow, page_size: int) -> int:
    return -(-row.seq_len // page_size) * page_size if row.context_len else row.seq_len


def sees_next_at_the_border(row: LatentRow, visible: Tensor) -> Tensor:
    """The first new token after a context sees the second."""
    visible = visible.clone()
    if row.context_len:
        visible[0, row.context_len + 1] = True
    return visible


def all_see_all(row: LatentRow, visible: Tensor) -> Tensor:
    del row
    return torch.ones_like(visible)


def chunks_of_the_previous_batch(rows: Sequence[LatentRow], kept: Kept) -> tuple[Chunks, ...]:
    """Where a batch has as many rows in chunks as the one before, its chunks are taken from there."""
    chunks: tuple[Chunks, ...] = kept.setdefault(len(rows), in_rounds(rows, kept))
    return chunks


def whole_chunks(rows: Sequence[LatentRow], kept: Kept) -> tuple[Chunks, ...]:
    """What is left of a context after whole chunks is dropped."""
    return tuple(
        tuple((start, stop) if stop - start == CHUNK else (start, start) for start, stop in chunks)
        for chunks in in_rounds(rows, kept)
    )


def merge_empty_as_found(pieces: Sequence[Piece]) -> Piece:
    """A chunk without keys is merged as if its LSE were 0."""
    return merge([(out, lse.masked_fill(lse.isneginf(), 0.0)) for out, lse in pieces])


LATENT_MUTANTS: tuple[LatentMutant, ...] = (
    LatentMutant(
        "latent-normalised-again",
        "The latent is normalised on its way into the cache.",
        "cache-write",
        replace(CORRECT, entry=normalised),
    ),
    LatentMutant(
        "rope-dropped",
        "Scores leave out the rotated part of queries and keys.",
        "causal",
        replace(CORRECT, rotated=torch.zeros_like),
    ),
    LatentMutant(
        "border-of-the-prefix",
        "In one shot, the first new token after a context sees the second.",
        "context",
        replace(CORRECT, one_shot_sees=sees_next_at_the_border),
    ),
    LatentMutant(
        "absorbed-beyond-the-row",
        "Absorbed rows are read to the end of their last page.",
        "last-page",
        replace(CORRECT, absorbed_stop=to_the_end_of_the_page),
    ),
    LatentMutant(
        "scale-without-its-factor",
        "Scores are scaled by the size of a head, without the factor that the spec's scale has.",
        "scale",
        replace(CORRECT, scale=lambda spec: (spec.nope_dim + spec.rope_dim) ** -0.5),
    ),
    LatentMutant(
        "values-of-the-next-head",
        "Above two heads, a head's values are made by the projection of the next.",
        "heads",
        replace(CORRECT, value_head=lambda head, heads: head if heads <= 2 else (head + 1) % heads),
    ),
    LatentMutant(
        "entry-scale-not-read",
        "Entries are read from an 8-bit cache without their scale.",
        "cache-scales",
        replace(CORRECT, load=lambda stored, scale: stored.float()),
    ),
    LatentMutant(
        "rest-of-the-prefix-dropped",
        "Of a context in chunks, what is left after whole chunks is not read.",
        "ways",
        replace(CORRECT, chunks=whole_chunks),
    ),
    LatentMutant(
        "new-tokens-see-all",
        "Where the context goes in chunks, new tokens see those after them.",
        "ways",
        replace(CORRECT, new_sees=all_see_all),
    ),
    LatentMutant(
        "lse-of-the-new-tokens",
        "The LSE of a row in chunks is that of its new tokens alone.",
        "ways",
        replace(CORRECT, merged_lse=lambda merged, new: new),
    ),
    LatentMutant(
        "empty-chunk-merged",
        "A chunk in which a row has nothing is merged as if something had been found.",
        "ways-together",
        replace(CORRECT, merge=merge_empty_as_found),
    ),
    LatentMutant(
        "chunks-of-the-first-row",
        "Every row's chunks are read from the pages of the first row that has any.",
        "ways-together",
        replace(CORRECT, chunk_row=lambda row, num_rows: 0),
    ),
    LatentMutant(
        "chunks-of-the-previous-batch",
        "Where chunks begin and end is taken from the last batch with as many rows in chunks.",
        "ways-in-turn",
        replace(CORRECT, chunks=chunks_of_the_previous_batch),
    ),
)
