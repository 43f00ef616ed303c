"""A small correct backend of latent attention, made of replaceable parts. Row by row, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from conformance.latent_parts import CORRECT, Kept, LatentParts, LatentRow, Piece, Way
from conformance.parts import get_entries, put_entries
from conformance.parts_backend import DTYPES, EVERYTHING
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability, GraphLevel, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    LatentInputs,
    Lse,
    StepView,
)
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.oracle.attention import stored_entries, visible_keys
from sightline.attention.spec import LatentSpec
from sightline.cache.pools import Pool

LATENT = replace(
    EVERYTHING,
    spec_kinds=frozenset({SpecKind.LATENT}),
    dtypes=DTYPES,
    features=frozenset(
        {
            Feature.NON_CAUSAL,
            Feature.TREE_MASK,
            Feature.LSE,
            Feature.SPARSE,
            Feature.DETERMINISTIC,
            Feature.SEVERAL_PLANS,
        }
    ),
    host_lengths=HostLengths.EXACT,
    graph=GraphLevel.NONE,
)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of one step: its numbers in fp32."""

    parts: LatentParts
    spec: LatentSpec
    q_nope: Tensor
    q_rope: Tensor
    key_up: Tensor
    value_up: Tensor

    def absorbed(self, row: LatentRow, entries: Tensor, visible: Tensor) -> Piece:
        """Queries meet entries [num_keys, latent + rope]: what they find of latents is made into values after."""
        taken = torch.einsum("qhn,hnl->hql", self.q_nope[row.tokens], self.key_up)
        queries = torch.cat([taken, self.q_rope[row.tokens].transpose(0, 1)], dim=-1)
        weights, lse = self._weigh(queries @ entries.T, visible)
        found = weights @ entries[:, : self.spec.latent_dim]
        return torch.einsum("hql,hvl->qhv", found, self.value_up), lse

    def expanded(self, row: LatentRow, entries: Tensor, visible: Tensor) -> Piece:
        """Queries meet keys that are made of the entries."""
        latents, ropes = entries[:, : self.spec.latent_dim], entries[:, self.spec.latent_dim :]
        made = torch.einsum("kl,hnl->hkn", latents, self.key_up)
        keys = torch.cat([made, ropes.expand(made.shape[0], -1, -1)], dim=-1)
        queries = torch.cat([self.q_nope[row.tokens], self.q_rope[row.tokens]], dim=-1).transpose(0, 1)
        weights, lse = self._weigh(queries @ keys.transpose(1, 2), visible)
        values = torch.einsum("kl,hvl->hkv", latents, self.value_up)
        return (weights @ values).transpose(0, 1), lse

    def _weigh(self, scores: Tensor, visible: Tensor) -> Piece:
        """Weights [heads, query_len, num_keys] and the LSE [query_len, heads]; of no keys 0 and -inf."""
        scores = (scores * self.parts.scale(self.spec)).masked_fill(~visible, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
        return weights, lse.T


class _Stored(NamedTuple):
    """What a layer has in the cache."""

    plane: Tensor
    """[num_slots, latent + rope]."""
    scale: float


@dataclass(frozen=True, eq=False)
class _LatentPlan(AttentionPlan[LatentInputs]):
    parts: LatentParts
    spec: LatentSpec
    pool: Pool
    write_slots: Tensor | None
    """None under TRANSIENT."""
    rows: tuple[LatentRow, ...]
    needs_lse: bool
    kept: Kept
    is_sparse: bool
    num_tokens: int
    kept_in_plan: Kept

    def prepare(self) -> None:
        """Layers share nothing but rows."""

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        new = self.parts.entry(inputs)
        stored = _Stored(self.pool.plane("entry")[layer], self.pool.scales("entry")[layer])
        if self.write_slots is not None:
            put_entries(stored.plane, self.write_slots, stored_entries(new, stored.plane.dtype, stored.scale))
        given = _Layer(
            self.parts,
            self.spec,
            inputs.q_nope.float(),
            self.parts.rotated(inputs.q_rope.float()),
            inputs.key_up.float(),
            self._value_up(inputs.value_up.float()),
        )
        lse = torch.full((out.shape[0], out.shape[1]), -torch.inf, device=out.device)
        answers = (
            self._chosen_answers(given, inputs, new, stored) if self.is_sparse else self._answers(given, new, stored)
        )
        for row, (found, row_lse) in answers:
            out[row.tokens] = found.to(out.dtype)
            lse[row.tokens] = row_lse
        return lse if self.needs_lse else None

    def _value_up(self, value_up: Tensor) -> Tensor:
        heads = value_up.shape[0]
        return value_up[[self.parts.value_head(head, heads) for head in range(heads)]]

    def _answers(self, layer: _Layer, new: Tensor, stored: _Stored) -> list[tuple[LatentRow, Piece]]:
        parts = self.parts
        answers = []
        chunked = [row for row in self.rows if parts.way(row) is Way.CHUNKED]
        for row in self.rows:
            if parts.way(row) is Way.ABSORBED:
                stop = row.seq_len if self.write_slots is None else parts.absorbed_stop(row, self.pool.page_size)
                seen = torch.nn.functional.pad(row.visible, (0, stop - row.seq_len), value=True)
                answers.append((row, layer.absorbed(row, self._read(row, 0, stop, new, stored), seen)))
            elif parts.way(row) is Way.ONE_SHOT:
                entries = self._read(row, 0, row.seq_len, new, stored)
                answers.append((row, layer.expanded(row, entries, parts.one_shot_sees(row, row.visible))))
        for index, (row, chunks) in enumerate(zip(chunked, parts.chunks(chunked, self.kept), strict=True)):
            owner = chunked[parts.chunk_row(index, len(chunked))]
            pieces = [
                layer.expanded(row, self._read(owner, start, stop, new, stored), row.visible[:, start:stop])
                for start, stop in chunks
            ]
            answers.append((row, self._merge(layer, row, pieces, new, stored)))
        return answers

    def _chosen_answers(
        self, layer: _Layer, inputs: LatentInputs, new: Tensor, stored: _Stored
    ) -> list[tuple[LatentRow, Piece]]:
        """One query at a time, over the entries that it chose."""
        assert inputs.chosen is not None, "a sparse step has a choice"
        answers = []
        for row in self.rows:
            choice = self.parts.chosen(row, inputs.chosen[row.tokens], self.kept_in_plan)
            for query in range(row.query_len):
                one = replace(row, first_token=row.first_token + query, query_len=1, context_len=row.seq_len - 1)
                places = self.parts.places(row, query, choice[query])
                entries = self._at(row, places, new, stored)
                seen = self.parts.weighed(places, choice[query])
                found, lse = layer.absorbed(one, entries, seen)
                answers.append(
                    (one, (found, self.parts.chosen_lse(lse, self._lse_of_all(layer, one, row, query, new, stored))))
                )
        if self.parts.reads_padding and self.num_tokens > sum(row.query_len for row in self.rows):
            self._at(self.rows[-1], inputs.chosen[-1].long(), new, stored)
        return answers

    def _lse_of_all(
        self, layer: _Layer, one: LatentRow, row: LatentRow, query: int, new: Tensor, stored: _Stored
    ) -> Callable[[], Tensor]:
        def found() -> Tensor:
            return layer.absorbed(one, self._read(row, 0, row.seq_len, new, stored), row.visible[query : query + 1])[1]

        return found

    def _at(self, row: LatentRow, places: Tensor, new: Tensor, stored: _Stored) -> Tensor:
        """The row's entries at these places, in fp32."""
        if self.write_slots is None:
            return new[places + row.first_token].float()
        size = self.parts.page_size(self.pool.page_size)
        slots = self.pool.table.slots(torch.full_like(places, row.table_row), places, size)
        return self.parts.load(get_entries(stored.plane, slots), stored.scale).float()

    def _merge(self, layer: _Layer, row: LatentRow, pieces: list[Piece], new: Tensor, stored: _Stored) -> Piece:
        """The chunks of a row, and its new tokens."""
        seen = self.parts.new_sees(row, row.visible[:, row.context_len :])
        last = layer.expanded(row, self._read(row, row.context_len, row.seq_len, new, stored), seen)
        out, lse = self.parts.merge([*pieces, last])
        return out, self.parts.merged_lse(lse, last[1])

    def _read(self, row: LatentRow, start: int, stop: int, new: Tensor, stored: _Stored) -> Tensor:
        """The row's entries in fp32: under TRANSIENT there are none but the new."""
        entries = torch.arange(start, stop, device=new.device)
        if self.write_slots is None:
            return new[entries + row.first_token].float()
        table_rows = torch.full_like(entries, row.table_row)
        slots = self.pool.table.slots(table_rows, entries, self.pool.page_size)
        return self.parts.load(get_entries(stored.plane, slots), stored.scale).float()


class LatentPartsBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """Made by `make_latent_backend`, which gives it its parts."""

    parts: LatentParts

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["latent"]
        self._device = context.device
        self._kept: Kept = {}

    def plan(self, step: StepView, buffers: PlanBuffers) -> _LatentPlan:
        del buffers
        batch = step.batch
        offsets = batch.query_offsets_host()
        rows = [
            LatentRow(
                first_token=offsets[row],
                query_len=query_len,
                context_len=context_len,
                table_row=batch.rows[row],
                kind=mask.kind,
                visible=visible_keys(
                    self._spec, mask, context_len, batch.positions[offsets[row] : offsets[row + 1]]
                ).to(self._device),
            )
            for row, (query_len, context_len, mask) in enumerate(
                zip(batch.query_lens.exact(), batch.context_lens.exact(), batch.masks, strict=True)
            )
            if query_len
        ]
        transient = step.policy is CachePolicy.TRANSIENT
        return _LatentPlan(
            parts=self.parts,
            spec=self._spec,
            pool=self._pool,
            write_slots=None if transient else batch.pools[self._pool.key].write_slots,
            rows=tuple(rows),
            needs_lse=Feature.LSE in step.needs,
            kept=self._kept,
            is_sparse=step.is_sparse,
            num_tokens=batch.num_tokens,
            kept_in_plan={},
        )


def make_latent_backend(parts: LatentParts = CORRECT, *, declares: Capability = LATENT) -> type[LatentPartsBackend]:
    """A backend of these parts that declares this row."""
    return type("MadeOfLatentParts", (LatentPartsBackend,), {"parts": parts, "capabilities": (declares,)})
