"""Latent attention of a sparse step with the decode kernel: every token is a row, with what it chose as its context.

The slots of what tokens chose stand in as page tables of pages of one token, turn by turn as the group's coordinator
has them on the device. Lengths stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import EntryPlan, EntryTurn, LatentInputs, StepView
from sightline.attention.shared.tile_tokens import TileTokens
from sightline.core.batch import MaskKind
from sightline.kernels.triton.decode_shares import DecodeConfig, DecodeRows, DecodeScratch, divide
from sightline.kernels.triton.extend_tiles import FIELDS, Tiles, prepare_tiles
from sightline.kernels.triton.latent_decode import LatentLayer, decode_latent
from sightline.kernels.triton.slots import count_choices

SLOT_BYTES = 16 << 20
"""Memory for slots of chosen entries: those of 1,024 tokens that choose 2,048."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Tokens of a turn that are computed at once."""

    place: slice
    """The place of these tokens in the turn."""
    tokens: TileTokens
    rows: DecodeRows
    """Without pages: the slots are found layer by layer."""
    scratch: DecodeScratch

    def prepare(self, counts: Tensor, lens: Tensor) -> None:
        """Copies the counts and lengths of these tokens, unless they are views of the step's."""
        if self.tokens.contiguous is None:
            torch.index_select(counts, 0, self.tokens.indices, out=self.rows.context_lens)
            torch.index_select(lens, 0, self.tokens.indices, out=self.rows.query_lens)


@dataclass(frozen=True, eq=False)
class _Turn:
    entries: EntryTurn
    parts: tuple[_Part, ...]


@dataclass(frozen=True, eq=False)
class PlannedChoice:
    """A planned sparse step."""

    kept: EntryPlan
    """Keeps the new entries, and finds chosen ones."""
    query_lens: Tensor
    context_lens: Tensor | None
    """None under `TRANSIENT`, like the page-table rows."""
    table_rows: Tensor | None
    query_offsets: Tensor
    tiles: Tiles
    counts: Tensor
    """[num_tokens] int64: see `count_choices`, like the next."""
    lens: Tensor
    top_k: int
    turns: tuple[_Turn, ...]
    config: DecodeConfig
    subgroups: int
    """Groups of heads per token."""
    counts_ahead: bool
    """True if lengths tell how much every token chooses: no layer needs to count."""

    def prepare(self) -> None:
        """Finds out which tokens are real and, if it is known how much they choose, divides the work."""
        tokens = self.counts.shape[0]
        prepare_tiles(self.query_lens, self.context_lens, self.table_rows, tokens, self.query_offsets, self.tiles)
        count_choices(self.tiles, self.top_k, self.counts, self.lens)
        for part in [part for turn in self.turns for part in turn.parts]:
            part.prepare(self.counts, self.lens)
            if self.counts_ahead:
                divide(part.rows, part.scratch, self.config, self.subgroups, None)

    def run(
        self,
        number: int,
        layer: LatentLayer,
        inputs: LatentInputs,
        new: Tensor,
        q_latent: Tensor,
        found: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Keeps the `new` entries [num_tokens, latent + rope], and writes `found` [num_tokens, heads, latent_dim] and,
        if it is given, the LSE. `number` is that of the layer."""
        chosen = inputs.chosen
        assert chosen is not None, "a sparse step has a choice"
        self.kept.write(number, new)
        if self.kept.reads_step:
            layer = LatentLayer(new, None, layer.scale)
        else:
            layer = replace(layer, entries=self.kept.plane(number))
        for turn in self.turns:
            turn.entries.fetch(number, chosen)
            for part in turn.parts:
                rows = replace(part.rows, pages=turn.entries.slots(chosen, part.place))
                if not self.counts_ahead:
                    torch.sum(_of(part.tokens, chosen) >= 0, 1, out=rows.context_lens)
                    divide(rows, part.scratch, self.config, self.subgroups, None)
                self._attend(part, rows, layer, inputs, q_latent, found, lse)

    def _attend(
        self,
        part: _Part,
        rows: DecodeRows,
        layer: LatentLayer,
        inputs: LatentInputs,
        q_latent: Tensor,
        found: Tensor,
        lse: Tensor | None,
    ) -> None:
        tokens = part.tokens
        queries = _of(tokens, q_latent), _of(tokens, inputs.q_rope)
        where = tokens.contiguous
        if where is not None:
            its_lse = None if lse is None else lse[where]
            decode_latent(*queries, None, layer, rows, part.scratch, self.config, found[where], its_lse)
            return
        out = torch.empty_like(queries[0], memory_format=torch.contiguous_format)
        its_lse = None if lse is None else torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        decode_latent(*queries, None, layer, rows, part.scratch, self.config, out, its_lse)
        tokens.put(found, out)
        if lse is not None and its_lse is not None:
            tokens.put(lse, its_lse)


def _of(tokens: TileTokens, values: Tensor) -> Tensor:
    """[tokens, ...]: what these tokens have."""
    return values.index_select(0, tokens.indices) if tokens.contiguous is None else values[tokens.contiguous]


def plan_choice(
    step: StepView,
    kept: EntryPlan,
    top_k: int,
    config: DecodeConfig,
    subgroups: int,
    parts: DecodeScratch,
    numbers: Tensor,
    buffers: PlanBuffers,
) -> PlannedChoice:
    """Plans a sparse step. `parts` has the memory for parts of tiles, which all tokens use in turn; `numbers` are 0, 1,
    2, ..., as many as tokens are computed at once."""
    batch = step.batch
    count = batch.num_tokens
    counts, lens = (buffers.take(name, (count,), torch.int64) for name in ("counts", "lens"))

    def plan_part(name: str, turn: EntryTurn, place: slice) -> _Part:
        tokens, size = turn.tokens.part(place), place.stop - place.start
        where = tokens.contiguous
        its_lens, its_counts = (
            buffers.take(f"{name}.{what}", (size,), torch.int64) if where is None else whole[where]
            for what, whole in (("lens", lens), ("counts", counts))
        )
        scratch = DecodeScratch(
            starts=buffers.take(f"{name}.starts", (config.num_programs, 8), torch.int32),
            cuts=buffers.take(f"{name}.cuts", (config.num_programs, 8), torch.int32),
            row_tokens=buffers.take(f"{name}.row tokens", (size,), torch.int32),
            out=parts.out,
            stats=parts.stats,
        )
        # Nothing is written at slots, and pages come with the choice.
        rows = DecodeRows(its_lens, its_counts, numbers[:size], its_counts, numbers.view(1, -1), 1)
        return _Part(place, tokens, rows, scratch)

    def plan_turn(number: int, turn: EntryTurn) -> Iterator[_Part]:
        size = turn.tokens.indices.shape[0]
        for start in range(0, size, numbers.shape[0]):
            place = slice(start, min(start + numbers.shape[0], size))
            yield plan_part(f"turn{number}.{start}", turn, place)

    return PlannedChoice(
        kept=kept,
        query_lens=batch.query_lens.device,
        context_lens=None if step.is_transient else batch.context_lens.device,
        table_rows=None if step.is_transient else batch.table_rows,
        query_offsets=buffers.take("query offsets", (batch.num_rows + 1,), torch.int64),
        tiles=Tiles(buffers.take("token tiles", (count, FIELDS), torch.int32), 1),
        counts=counts,
        lens=lens,
        top_k=top_k,
        turns=tuple(_Turn(turn, tuple(plan_turn(number, turn))) for number, turn in enumerate(kept.turns)),
        config=config,
        subgroups=subgroups,
        counts_ahead=all(mask.kind is MaskKind.CAUSAL for mask in batch.masks),
    )
