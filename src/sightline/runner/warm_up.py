"""Runs a step of every kind that may be served, before anybody waits for one.

The first launch of a kernel compiles it, which takes from tenths of a second to minutes, and the first use of a library
loads it. Which variant of a kernel a step needs depends on its numbers of rows and tokens: one for each octave (the
sizes between two powers of two), and another where a different way of computing becomes faster. So each octave is tried
at both ends and in its middle. Rows and pages are given back afterwards.

Does not know kernels or backends: steps go through the ordinary planner and runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sightline.cache.store import CacheStore
from sightline.core.batch import PADDING_ROW, Batch, MaskKind, RowMask, RowWork, StepWork
from sightline.core.errors import ConfigError
from sightline.core.resolution import ResolvedConfig
from sightline.runner.networks import NetworkRuntime
from sightline.runner.progress import BuildPhase, BuildStep, OnBuildStep

MOST_TILED = 128
"""Rows of more new tokens than this are tiled alike, however many there are."""
SOME_ROWS = 32
"""A number of rows that is neither one nor the most."""


@dataclass(frozen=True)
class StepKind:
    """The shape of a step."""

    queries: tuple[int, ...]
    """New tokens of each row."""
    context_len: int = 0
    """Cached tokens of every row."""
    scores: bool = False
    """True if every token needs logits, as for the log probabilities of a prompt."""
    is_whole: bool = False
    """True if the rows are whole texts, which use no cache."""
    is_tree: bool = False
    """True if the new tokens of each row are a tree of guesses."""

    def __str__(self) -> str:
        rows, tokens = len(self.queries), sum(self.queries)
        cached = f" behind {self.context_len}" if self.context_len else ""
        shape = " in trees" if self.is_tree else ""
        return f"{rows} row{'s' if rows > 1 else ''}, {tokens} new token{'s' if tokens > 1 else ''}{shape}{cached}"


def octaves(most: int) -> list[int]:
    """1 and 2, then both ends and the middle of each octave (2, 4], (4, 8], ..., up to `most`, which is the last."""
    sizes, end = {1, min(2, most), most}, 2
    while end < most:
        sizes |= {end + 1, end + end // 2, 2 * end}
        end *= 2
    return sorted(size for size in sizes if size <= most)


def powers(most: int) -> list[int]:
    """The powers of two from 2 to `most`."""
    return [1 << exponent for exponent in range(1, most.bit_length())]


def paged_kinds(config: ResolvedConfig) -> list[StepKind]:
    """The steps to try of rows in the cache: decode, prompts, both together, and prompts that continue a context."""
    longest, page = config.max_model_len, config.page_size
    tiled = powers(min(MOST_TILED, longest - 1))
    behind = min(page, longest) - 1
    kinds = [
        *[StepKind((1,) * rows, behind) for rows in octaves(_most_rows(config))],
        *[StepKind(_spread(tokens, longest)) for tokens in octaves(min(config.max_step_tokens, config.cache_tokens))],
    ]
    # A context may be worth another way of computing if it is longer than the new tokens.
    for context_len in (1, behind):
        kinds += [StepKind((tokens,), min(context_len, longest - tokens)) for tokens in powers(longest)]
    for rows in _several_rows(config):
        kinds += [StepKind((2,) * (rows - 1) + (tokens,)) for tokens in tiled]
        for context_len in (1, behind):
            kinds += [StepKind((1,) * (rows - 1) + (tokens,), min(context_len, longest - tokens)) for tokens in tiled]
    kinds.append(StepKind((min(SOME_ROWS, longest),), scores=True))
    if config.has_trees:
        tiled = powers(min(MOST_TILED, longest - behind))
        kinds += [StepKind((tokens,), behind, is_tree=True) for tokens in tiled]
        kinds += [StepKind((2,) * rows, min(behind, longest - 2), is_tree=True) for rows in _several_rows(config)]
    return [kind for kind in dict.fromkeys(kinds) if _fits(kind, config)]


def whole_kinds(config: ResolvedConfig) -> list[StepKind]:
    """The steps to try of whole texts without a cache."""
    longest = config.max_model_len
    kinds = [
        StepKind(_spread(tokens, longest), scores=True, is_whole=True) for tokens in octaves(config.max_step_tokens)
    ]
    for rows in _several_rows(config):
        tiled = (1, *powers(min(MOST_TILED, longest)))
        kinds += [StepKind((1,) * (rows - 1) + (tokens,), scores=True, is_whole=True) for tokens in tiled]
    return [kind for kind in dict.fromkeys(kinds) if _fits(kind, config)]


def embedding_kinds(config: ResolvedConfig) -> list[StepKind]:
    """The steps to try of texts that are embedded: whole unless prefixes are cached, and in chunks if they are long."""
    whole = [] if config.prefix_caching else whole_kinds(config)
    return whole + (paged_kinds(config) if config.num_pages else [])


def few_kinds(kinds: Sequence[StepKind]) -> list[StepKind]:
    """Steps that need every kernel of a CPU, which are the same for all lengths: the smallest, and one of more tokens
    than products of few rows take, and a tree if there are some."""
    several = [kind for kind in kinds if 8 < sum(kind.queries) <= 16]
    trees = [kind for kind in kinds if kind.is_tree]
    return list(kinds[:1]) + several[:1] + trees[:1]


def _most_rows(config: ResolvedConfig) -> int:
    """The most rows of a step: each needs a page if there is a cache."""
    return min(config.max_rows, config.cache_tokens // config.page_size) if config.num_pages else config.max_rows


def _several_rows(config: ResolvedConfig) -> list[int]:
    most = _most_rows(config)
    return sorted({rows for rows in (2, SOME_ROWS, most) if 1 < rows <= most})


def _spread(num_tokens: int, longest: int) -> tuple[int, ...]:
    """Divides `num_tokens` among rows of at most `longest` tokens each."""
    full, rest = divmod(num_tokens, longest)
    return (longest,) * full + ((rest,) if rest else ())


def _fits(kind: StepKind, config: ResolvedConfig) -> bool:
    """True if the scheduler could make such a step."""
    lens = [kind.context_len + tokens for tokens in kind.queries]
    num_pages = sum(-(-each // config.page_size) for each in lens)
    return (
        min(kind.context_len, *kind.queries) >= 0
        and len(lens) <= config.max_rows
        and sum(kind.queries) <= config.max_step_tokens
        and max(lens) <= config.max_model_len
        and (kind.is_whole or num_pages * config.page_size <= config.cache_tokens)
    )


class WarmUp:
    """Tries steps on the parts of a runtime that has no open row yet."""

    def __init__(self, config: ResolvedConfig, store: CacheStore, network: NetworkRuntime, mask: RowMask) -> None:
        """`mask` is every row's."""
        self._config = config
        self._store = store
        self._sources = network.cache.sources
        self._planner = network.planner
        self._runner = network.runner
        self._mask = mask

    def run(self, kinds: Sequence[StepKind], on_step: OnBuildStep) -> None:
        """Runs a step of each kind. Raises `ConfigError` if one cannot run."""
        for done, kind in enumerate(kinds):
            on_step(BuildStep(BuildPhase.KERNELS, str(kind), done, len(kinds)))
            try:
                self._run(kind)
            except RuntimeError as error:
                raise ConfigError(
                    f"expected a step of {kind} that can run, got: {error}; if memory is short, lower memory_fraction, "
                    f"max_num_batched_tokens or max_num_seqs ({self._config.memory})"
                ) from error
        on_step(BuildStep(BuildPhase.KERNELS, "", len(kinds), len(kinds)))

    def _mask_of(self, kind: StepKind, num_tokens: int) -> RowMask:
        """The mask of a row. Kernels take any tree alike, so one of a single path will do."""
        if not kind.is_tree:
            return self._mask
        return RowMask(MaskKind.TREE, torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril())

    def _run(self, kind: StepKind) -> None:
        store, rows = self._store, list[int]()
        try:
            if not kind.is_whole:
                for tokens in kind.queries:
                    rows.append(store.open_row())
                    store.grow_row(rows[-1], kind.context_len + tokens)
                    store.fill_row(rows[-1], kind.context_len)
            work = [
                RowWork(row, [0] * tokens, kind.context_len, tokens if kind.scores else 1, self._mask_of(kind, tokens))
                for row, tokens in zip(rows or [PADDING_ROW] * len(kind.queries), kind.queries, strict=True)
            ]
            batch = Batch(StepWork.of(work), () if kind.is_whole else self._sources, store.device)
            planned = self._planner.plan(batch)
            states = self._runner.no_states(sum(kind.queries), store.device)
            # Read on the host, so that a kernel that fails is known here.
            self._runner.forward(planned, states)[:1, :1].tolist()
            self._planner.take_back(planned)
        finally:
            # In the order in which they were free before.
            for row in reversed(rows):
                store.close_row(row)
