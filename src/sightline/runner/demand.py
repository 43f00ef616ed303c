"""What an engine can ask of an attention backend, as ranges: from its resolved config, before anything is built.

A demand is an upper bound: every step that the engine runs lies within one of those that are returned here. Knows
configs, groups and kinds of rows. Does not know proofs, nor how a step is scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from sightline.attention.capability import FEW_ROWS, Work
from sightline.attention.contract import CachePolicy
from sightline.attention.coverage import (
    Company,
    Demand,
    Dimension,
    Padding,
    PageOrder,
    Reuse,
    Sharing,
    Span,
    Value,
    joined_features,
)
from sightline.attention.proof import dtype_name
from sightline.attention.spec import Feature, LayerGroup
from sightline.attention.workspace import MAIN_LANE
from sightline.core.batch import MaskKind
from sightline.core.resolution import ResolvedConfig


class Usage(Enum):
    """How an engine calls attention."""

    GENERATE = "generate"
    """Every row goes through pages, under a causal mask."""
    EMBED = "embed"
    """Under a causal mask. Without prefix caching, a text that fits a step touches no cache."""
    EMBED_WHOLE = "embed texts whole"
    """Every token of a text sees every other, and nothing is ever cached."""

    @property
    def mask(self) -> MaskKind:
        return MaskKind.FULL if self is Usage.EMBED_WHOLE else MaskKind.CAUSAL

    @property
    def needs(self) -> frozenset[Feature]:
        """Features that steps ask for, beyond those of the spec."""
        return frozenset({Feature.NON_CAUSAL}) if self is Usage.EMBED_WHOLE else frozenset()


def demands_of(config: ResolvedConfig, group: LayerGroup, work: Work, usage: Usage) -> tuple[Demand, ...]:
    """What the backend that serves this kind of rows of the group will be asked for.

    Several, because not everything comes together: a row that is alone shares no page, and a step without a cache has
    no context. Together they hold every step.
    """
    boxes: list[Demand] = []
    if config.num_pages:
        boxes += _paged(config, group, work, usage)
    is_whole = usage is not Usage.GENERATE and not config.prefix_caching
    if is_whole and work is Work.PREFILL:
        boxes += _alone_and_beside(_transient(config, group, usage), Span(1, config.max_rows), config.max_step_tokens)
    return tuple(boxes)


def _paged(config: ResolvedConfig, group: LayerGroup, work: Work, usage: Usage) -> list[Demand]:
    """Steps that read and write pages."""
    base = _common(config, group, usage, CachePolicy.PAGED)
    decodes = work is not Work.PREFILL
    scales = {
        Dimension.NEW_TOKENS: Span(1, 1 if decodes else min(config.max_step_tokens, config.max_model_len)),
        Dimension.CONTEXT: Span(0, config.max_model_len - 1),
        Dimension.POOL_SLOTS: _exactly(config.num_pages * config.page_size),
    }
    values: dict[Dimension, frozenset[Value]] = {
        Dimension.PAGE_SIZE: frozenset({config.page_size}),
        Dimension.CACHE_DTYPE: frozenset({dtype_name(config.cache_dtype)}),
        Dimension.PAGE_ORDER: frozenset(order.value for order in PageOrder),
        Dimension.SHARING: frozenset({Sharing.NONE.value}),
    }
    rows = _rows(config, work)
    boxes = _alone_and_beside(_with(base, scales, values), rows, None if decodes else config.max_step_tokens)
    # A row shares whole pages of its context, and computes at least its last token itself.
    if config.prefix_caching and rows.high > 1 and config.max_model_len > config.page_size:
        shared = _with(
            boxes[-1],
            {Dimension.CONTEXT: Span(config.page_size, config.max_model_len - 1)},
            {Dimension.SHARING: frozenset({Sharing.PREFIX.value})},
        )
        boxes.append(shared)
    return boxes


def _transient(config: ResolvedConfig, group: LayerGroup, usage: Usage) -> Demand:
    """Steps of whole texts, which touch no cache."""
    scales = {
        Dimension.NEW_TOKENS: Span(1, min(config.max_step_tokens, config.max_model_len)),
        Dimension.CONTEXT: _exactly(0),
    }
    return _with(_common(config, group, usage, CachePolicy.TRANSIENT), scales, {})


def _common(config: ResolvedConfig, group: LayerGroup, usage: Usage, policy: CachePolicy) -> Demand:
    """The dimensions that every step has, but for its rows and lengths."""
    spec = group.spec
    scales = {Dimension.LAYERS: _exactly(len(group.layers)), Dimension.KEY_HEADS: _exactly(key_heads(group))}
    if spec.window is not None:
        scales[Dimension.WINDOW] = _exactly(spec.window)
    features = spec.features | usage.needs
    values: dict[Dimension, frozenset[Value]] = {
        Dimension.KIND: frozenset({spec.kind.value}),
        Dimension.GROUP_SIZE: frozenset({spec.group_size}),
        Dimension.HEAD_DIM: frozenset({spec.head_dim}),
        Dimension.DTYPE: frozenset({dtype_name(config.dtype)}),
        Dimension.FEATURES: frozenset({joined_features(feature.value for feature in features)}),
        Dimension.MASK: frozenset({usage.mask.value}),
        Dimension.POLICY: frozenset({policy.value}),
        Dimension.PADDING: frozenset({Padding.NONE.value}),
        Dimension.REUSE: frozenset(reuse.value for reuse in Reuse),
        Dimension.LANE: frozenset({int(MAIN_LANE)}),
    }
    return Demand(scales, values)


def key_heads(group: LayerGroup) -> int:
    """Heads of an entry: one for latent attention, where all query heads read the same."""
    return group.spec.num_q_heads // group.spec.group_size


def _rows(config: ResolvedConfig, work: Work) -> Span:
    """How many rows a step, or the part of it that is of this kind, may have."""
    match work:
        case Work.PREFILL:
            return Span(1, config.max_rows)
        case Work.DECODE:
            return Span(FEW_ROWS + 1, config.max_rows)
        case Work.FEW:
            return Span(2, min(FEW_ROWS, config.max_rows))
        case Work.ALONE:
            return Span(1, 1)


def _alone_and_beside(demand: Demand, rows: Span, max_step_tokens: int | None) -> list[Demand]:
    """A step of one row, and a step of several, as far as `rows` allows either.

    The tokens of a step are its row's, or as many as rows that decode: of such steps, where `max_step_tokens` is None,
    the demand does not name them.
    """
    boxes = []
    if rows.low == 1:
        boxes.append(
            _with(demand, {Dimension.ROWS: _exactly(1)}, {Dimension.COMPANY: frozenset({Company.ALONE.value})})
        )
    if rows.high > 1:
        least = max(2, rows.low)
        scales = {Dimension.ROWS: Span(least, rows.high)}
        if max_step_tokens is not None:
            scales[Dimension.STEP_TOKENS] = Span(least, max_step_tokens)
        boxes.append(_with(demand, scales, {Dimension.COMPANY: frozenset({Company.BESIDE.value})}))
    return boxes


def _with(demand: Demand, scales: Mapping[Dimension, Span], values: Mapping[Dimension, frozenset[Value]]) -> Demand:
    return replace(demand, scales={**demand.scales, **scales}, values={**demand.values, **values})


def _exactly(number: int) -> Span:
    return Span(number, number)
