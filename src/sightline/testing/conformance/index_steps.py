"""One step of an indexer over random tensors, and which choices are right.

Scores that differ by no more than rounding can be ranked either way, so that several choices may be right. In a step of
small integers every score is exact, and only one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sightline.attention.contract import Lse
from sightline.attention.oracle.attention import visible_keys
from sightline.attention.oracle.index import chosen_mask, index_scores, stored_keys
from sightline.attention.planner import GroupPlan, PlannedBatch
from sightline.attention.spec import IndexSpec
from sightline.cache.spec import SCALED_DTYPES, PlaneSpec
from sightline.testing.conformance.layer_step import Asked, HostOutput
from sightline.testing.conformance.problem import Entries
from sightline.testing.conformance.steps import Step, best_places, positions_of

UNTOUCHED = -7
"""Stands in the memory of a choice before an indexer writes there."""
_ROUNDING = 4e-6
"""How far a score may be off, relative to the largest that its factors could give."""


class IndexStep(Step):
    """A step of an indexer, with keys in the slots where earlier steps would put them."""

    names_of_numbers: ClassVar[tuple[str, ...]] = ("choice",)

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the options of `LayerStep`."""
        self.is_exact = False
        """True if scores are computed without rounding: equal scores are then equal, and the lowest places win."""
        self._is_disturbed = False
        super().__init__(*args, **options)

    @property
    def inputs_choose(self) -> bool:
        return False

    def _random_contexts(self) -> list[Entries]:
        keys = [self._normal(row.context_len, self.spec.head_dim) for row in self.rows]
        return [self._per_plane(each) for each in keys]

    def _per_plane(self, keys: Tensor) -> Entries:
        """Gives every plane the same keys: `stored` derives 8-bit numbers and scales from them."""
        return (keys,) * len(self.planes)

    def _new_entries(self) -> Entries:
        return self._per_plane(self.problem.entries(self.inputs)[0])

    def stored(self, plane: PlaneSpec, values: Tensor) -> Tensor:
        dtype = self.planes[0].dtype
        if dtype not in SCALED_DTYPES:
            return super().stored(plane, values)
        codes, scales = stored_keys(values, dtype)
        return (codes if plane is self.planes[0] else scales).contiguous()

    def kept_keys(self, keys: Tensor) -> Tensor:
        """Returns keys as they are read back from the cache, fp32. A TRANSIENT step reads them as they are."""
        dtype = self.planes[0].dtype
        if not self.batch.pools:
            return keys.float()
        if dtype not in SCALED_DTYPES:
            return super().kept(self.planes[0], keys).float()
        codes, scales = stored_keys(keys, dtype)
        return codes.float() * scales

    def make_exact(self) -> None:
        """Replaces all numbers by small integers, so that scores are exact and many are equal."""
        self.change_inputs(_small)
        self.contexts = [self._per_plane(_small(context[0])) for context in self.contexts]
        self.become_exact()

    def become_exact(self) -> None:
        """Declares that all numbers are small integers, and writes the contexts again."""
        self.is_exact = True
        if self.batch.pools:
            self.write_contexts()

    def room(self, planned: PlannedBatch) -> Tensor:
        choice = self._group(planned).choice
        assert choice is not None, "indexers have memory for their choice"
        room = choice[: self.batch.num_tokens]
        self.clear(room)
        return room

    def clear(self, out: Tensor) -> None:
        out.fill_(UNTOUCHED)

    def _group(self, planned: PlannedBatch) -> GroupPlan:
        return planned.plan.groups[planned.plan.indexers[self.layer].group]

    def launch(self, planned: PlannedBatch, inputs: Any, out: Tensor) -> Lse | None:
        del out  # the planner's
        planned.choose(self.layer, inputs)
        return None

    def answer_in(self, planned: PlannedBatch, out: Tensor, lse: Lse | None) -> HostOutput:
        """Places as fp32, NaN where nothing was written. No columns if the step is not sparse."""
        found = out.cpu().float()
        found = found.masked_fill(found == UNTOUCHED, torch.nan)
        if not self._group(planned).is_sparse:
            self._is_disturbed |= not bool(found.isnan().all())
            found = found[:, :0]
        return HostOutput(found, lse)

    def spoiled(self) -> str | None:
        if self._is_disturbed:
            return "expected a step that is not sparse to leave the memory of its choice unchanged, got places in it"
        return None

    def _scored(self, asked: Asked | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields, for each row with tokens that are asked about: their scores and what is visible, both
        [num_asked, seq_len], and how far each query's scores may be off [num_asked, 1]."""
        spec: IndexSpec = self.spec
        for number, (row, (tokens, entries)) in enumerate(zip(self.rows, self._whole_rows(), strict=True)):
            queries = None if asked is None else asked.get(number, ())
            if (queries is not None and not queries) or row.query_len == 0:
                continue
            places = (
                torch.arange(tokens.start, tokens.stop) if queries is None else torch.tensor(queries) + tokens.start
            )
            keys = self.kept_keys(entries[0])
            q, weights = self.inputs.q[places], self.inputs.weights[places]
            visible = visible_keys(spec, row.mask, row.context_len, positions_of(row), queries)
            largest = keys.norm(dim=-1).amax() * (weights.float().abs() * q.float().norm(dim=-1)).sum(-1, keepdim=True)
            slack = 0.0 if self.is_exact else _ROUNDING
            yield index_scores(q, keys, weights), visible, slack * largest

    def expected(self, asked: Asked | None = None) -> HostOutput:
        top_k = self.spec.top_k
        if not self.is_sparse:
            count = len(self.places(asked)) if asked is not None else sum(row.query_len for row in self.rows)
            return HostOutput(torch.zeros(count, 0), None)
        found = [best_places(scores, visible, top_k).float() for scores, visible, _ in self._scored(asked)]
        return HostOutput(torch.cat(found) if found else torch.zeros(0, top_k), None)

    @property
    def is_sparse(self) -> bool:
        """True if some row may have more tokens than are chosen, as far as the batch's bounds tell."""
        bounds = zip(self.batch.context_lens.bound, self.batch.query_lens.bound, strict=True)
        longest = max((context + new for context, new in bounds), default=0)
        return bool(longest > self.spec.top_k)

    def admitted(self, answer: Tensor, expected: HostOutput, asked: Asked | None) -> HostOutput:
        if self.is_exact or not self.is_sparse or answer.shape != expected.out.shape:
            return expected
        out, start = expected.out.clone(), 0
        for scores, visible, slack in self._scored(asked):
            tokens = slice(start, start + scores.shape[0])
            start = tokens.stop
            right = is_right(answer[tokens], scores, visible, slack)
            out[tokens] = torch.where(right.unsqueeze(1), answer[tokens], out[tokens])
        return replace(expected, out=out)


def _small(numbers: Tensor) -> Tensor:
    """Integers from -2 to 2."""
    return numbers.float().mul(1.3).round().clamp(-2, 2).to(numbers.dtype)


def is_right(choice: Tensor, scores: Tensor, visible: Tensor, slack: Tensor) -> Tensor:
    """[num_queries] bool: whether a choice [num_queries, top_k] has as many visible places as it must, in increasing
    order, -1 behind them, and no score that is clearly below one that was left out."""
    top_k = choice.shape[1]
    counts = visible.sum(1, keepdim=True).clamp(max=top_k)
    inside = torch.arange(top_k) < counts
    in_row = (choice >= 0) & (choice < scores.shape[1]) & (choice == choice.round())
    right = torch.where(inside, in_row, choice == -1).all(1)
    right &= ((choice[:, 1:] > choice[:, :-1]) | ~inside[:, 1:]).all(1)
    places = torch.where(inside & in_row, choice, -1).to(torch.int32)
    taken = chosen_mask(places, scores.shape[1])
    right &= (visible | ~taken).all(1)
    ranked = scores.masked_fill(~visible, -torch.inf).sort(dim=1, descending=True).values
    last = ranked.gather(1, (counts - 1).clamp(min=0))
    right &= (scores >= last - slack).logical_or(~taken).all(1)
    return right & (scores <= last + slack).logical_or(taken | ~visible).all(1)
