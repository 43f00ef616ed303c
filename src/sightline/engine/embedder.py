"""Texts to vectors: states of tokens from the network, pooled.

    texts ─ sorted, packed by tokens ─▶ Batch ─ Planner ─▶ PlannedBatch ─ Runner ─▶ states ─ pooled ─▶ vectors

A text that fits a step is computed whole, and touches no cache: `TRANSIENT`. One that does not, or every one where what
is computed of texts that begin alike is to be kept, goes through pages in chunks: `PAGED`. Which, is one value for what
is written and what is read, because it is the batch's. Owns packing and pooling. Does not know text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.attention.lanes import Depth
from sightline.attention.workspace import MAIN_LANE
from sightline.cache.prefix import PrefixCache
from sightline.core.batch import MaskKind, RowWork
from sightline.core.device import DeviceKind
from sightline.core.errors import RequestError, UnsupportedModelError
from sightline.core.request import EffectiveParams, Request, Terms, new_request_id
from sightline.models.contract import EmbedderDefinition
from sightline.models.loading.pooling import Pooling, PoolingKind
from sightline.runner.batching import assemble, assemble_transient
from sightline.runner.build import Runtime
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import ScheduledRow, SequenceState

NO_TERMS = Terms()
CPU_PACK_TOKENS = 1024
"""Tokens from which on a CPU gains nothing by more texts in a step: what lies between products then leaves its caches.

A longer text is a step of its own."""


@dataclass(frozen=True, eq=False)
class Embedded:
    """One text's vector."""

    vector: Tensor
    """[state_size] fp32 on the CPU."""
    num_cached: int
    """Tokens of it that were in the cache already."""


class Embedder:
    """Computes vectors, many texts at a time."""

    def __init__(self, runtime: Runtime, definition: EmbedderDefinition, pooling: Pooling) -> None:
        if pooling.kind is PoolingKind.CLS and definition.mask.kind is not MaskKind.FULL:
            raise UnsupportedModelError(
                "expected cls pooling of a model whose first token sees the others, got one where it sees nothing"
            )
        self.runtime = runtime
        self.definition = definition
        self.pooling = pooling
        config = runtime.config
        on_cpu = config.device.kind is DeviceKind.CPU
        self._pack_tokens = min(config.max_step_tokens, CPU_PACK_TOKENS) if on_cpu else config.max_step_tokens
        self._prefixes = PrefixCache(runtime.store) if config.prefix_caching else None
        self._scheduler = Scheduler(
            runtime.store,
            self._prefixes,
            max_step_tokens=config.max_step_tokens,
            max_scored_tokens=config.max_step_tokens,
        )

    @property
    def is_transient(self) -> bool:
        """True if no text needs a page."""
        return self.runtime.config.num_pages == 0

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises `RequestError` for a text that cannot be embedded."""
        most, vocab_size = self.runtime.config.max_model_len, self.definition.vocab_size
        if not 0 < len(token_ids) <= most:
            raise RequestError(
                f"expected a text of 1 to {most} tokens, got {len(token_ids)}; shorten it, ask for it to be truncated, "
                "or raise max_model_len"
            )
        for position, token in enumerate(token_ids):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestError(
                    f"expected token ids from 0 to {vocab_size - 1}, got {token!r} at position {position}"
                )

    def embed(
        self,
        texts: Sequence[Sequence[int]],
        terms: Terms = NO_TERMS,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> list[Embedded]:
        """A vector for each text, in order. `on_progress` is told of so many more, as they come.

        Raises `LaneBusyError` if another thread is inside: `TextEmbedder` has them wait.
        """
        return self.runtime.planner.lanes.run(MAIN_LANE, Depth.ENGINE, self._embed, texts, terms, on_progress)

    def _embed(
        self, texts: Sequence[Sequence[int]], terms: Terms, on_progress: Callable[[int], None]
    ) -> list[Embedded]:
        for text in texts:
            self.check(text)
        done: dict[int, Embedded] = {}
        by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        paged = [index for index in by_length if self._needs_pages(texts[index])]
        with torch.inference_mode():
            for found in chain(
                self._embed_paged(paged, texts, terms), self._embed_whole(by_length[len(paged) :], texts)
            ):
                done |= found
                on_progress(len(found))
        return [done[index] for index in range(len(texts))]

    def _needs_pages(self, text: Sequence[int]) -> bool:
        return self._prefixes is not None or len(text) > self.runtime.config.max_step_tokens

    def _embed_whole(self, indices: Sequence[int], texts: Sequence[Sequence[int]]) -> Iterator[dict[int, Embedded]]:
        """Without a cache: as many texts as a step holds, those of one length side by side."""
        device = self.runtime.config.device.torch_device
        for packed in self._packs(indices, texts):
            lens = [len(texts[index]) for index in packed]
            work = [
                RowWork(0, texts[index], 0, self._num_wanted(length), self.definition.mask)
                for index, length in zip(packed, lens, strict=True)
            ]
            planned = self.runtime.planner.plan(assemble_transient(work, device))
            vectors = self._vectors(pool(self.runtime.runner.forward(planned), lens, self.pooling.kind))
            yield {index: Embedded(vector, 0) for index, vector in zip(packed, vectors, strict=True)}

    def _packs(self, indices: Sequence[int], texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        config = self.runtime.config
        packed: list[int] = []
        num_tokens = 0
        for index in indices:
            if packed and (num_tokens + len(texts[index]) > self._pack_tokens or len(packed) == config.max_rows):
                yield packed
                packed, num_tokens = [], 0
            packed.append(index)
            num_tokens += len(texts[index])
        if packed:
            yield packed

    def _embed_paged(
        self, indices: Sequence[int], texts: Sequence[Sequence[int]], terms: Terms
    ) -> Iterator[dict[int, Embedded]]:
        """Through pages, in chunks, sharing what texts have in common where that is kept."""
        sequences = {SequenceState(self._request(texts[index], terms)): index for index in indices}
        sums: dict[SequenceState, Tensor] = {}
        try:
            for sequence in sequences:
                self._scheduler.submit(sequence)
            while self._scheduler.has_work:
                found: dict[int, Embedded] = {}
                for row, state in self._step():
                    sequence = row.sequence
                    sums[sequence] = sums[sequence] + state if row.context_len and sequence in sums else state
                    if row.completes:
                        total = sums.pop(sequence) / self._num_wanted(row.seq_len)
                        [vector] = self._vectors(total[None])
                        # Only what gave numbers is kept for others.
                        self._scheduler.commit(row, 0)
                        self._scheduler.remove(sequence)
                        found[sequences[sequence]] = Embedded(vector, sequence.num_cached)
                    else:
                        self._scheduler.commit(row, None)
                    self._scheduler.landed([row])
                yield found
        finally:
            for sequence in sequences:
                self._scheduler.remove(sequence)
            # Nothing is in flight here, though a step that failed was launched.
            self._scheduler.recount(())

    def _step(self) -> list[tuple[ScheduledRow, Tensor]]:
        """One step: of every row, the sum of the states that are wanted."""
        rows = self._scheduler.schedule().rows
        work = [
            RowWork(
                row.table_row,
                row.sequence.tokens[row.context_len : row.seq_len],
                row.context_len,
                row.num_logits,
                self.definition.mask,
            )
            for row in rows
        ]
        planned = self.runtime.planner.plan(assemble(work, self.runtime.store))
        states = self.runtime.runner.forward(planned)
        self._scheduler.launched(rows)
        return list(zip(rows, sums_of(states, [row.num_logits for row in rows]), strict=True))

    def _request(self, text: Sequence[int], terms: Terms) -> Request:
        wants_all = self.pooling.kind is not PoolingKind.LAST
        params = EffectiveParams(0.0, 1.0, 0, 0.0, 0, 1, frozenset(), True, prompt_logprobs=0 if wants_all else None)
        return Request(new_request_id(), None, tuple(text), params, terms)

    def _num_wanted(self, length: int) -> int:
        """Tokens of a text whose states make its vector."""
        return 1 if self.pooling.kind is PoolingKind.LAST else length

    def _vectors(self, pooled: Tensor) -> Sequence[Tensor]:
        if not bool(pooled.isfinite().all()):
            raise RequestError(
                f"expected states that are numbers, got others: {self.runtime.config.dtype} may be too narrow for this "
                "model; use dtype float32"
            )
        vectors = F.normalize(pooled, dim=-1) if self.pooling.normalise else pooled
        return vectors.cpu().unbind(0)


def pool(states: Tensor, lens: Sequence[int], kind: PoolingKind) -> Tensor:
    """[num_texts, state_size] from the wanted states of texts of these lengths, side by side."""
    match kind:
        case PoolingKind.LAST:
            return states
        case PoolingKind.CLS:
            ends = torch.tensor([0, *lens[:-1]], device=states.device).cumsum(0)
            return states.index_select(0, ends)
        case PoolingKind.MEAN:
            return sums_of(states, lens) / torch.tensor(lens, device=states.device, dtype=states.dtype)[:, None]


def sums_of(states: Tensor, counts: Sequence[int]) -> Tensor:
    """[len(counts), state_size]: the sum of each row's states, which lie side by side."""
    rows = torch.repeat_interleave(torch.tensor(counts, device=states.device))
    return states.new_zeros((len(counts), states.shape[1])).index_add_(0, rows, states)
