"""What an engine can ask of an attention backend, as ranges: from its resolved config, before anything is built.

A demand is an upper bound: every step that the engine runs lies within one of those that are returned here. Knows
configs, groups and kinds of rows. Does not know proofs, nor how a step is scheduled.
"""

from __future__ import annotations

from enum import Enum

from sightline.attention.capability import FEW_ROWS, Work
from sightline.attention.contract import CachePolicy
from sightline.attention.coverage import Demand
from sightline.attention.dimensions import (
    Company,
    Dimension,
    LaneUse,
    Padding,
    Reuse,
    Sharing,
    Span,
    Value,
    features_name,
)
from sightline.attention.proof import dtype_name
from sightline.attention.spec import Feature, LayerGroup
from sightline.core.batch import MaskKind
from sightline.core.resolution import ResolvedConfig

PAGE_ORDERS = ("in order", "shuffled", "descending")
"""How the pages of a row may lie in a pool, as the conformance kit lays them out. An engine meets any order."""


class AttentionUsage(Enum):
    """How an engine calls attention."""

    GENERATE = "generate"
    """Every row goes through pages, under a causal mask."""
    EMBED = "embed"
    """Under a causal mask. Without prefix caching, a text that fits a step touches no cache."""
    EMBED_WHOLE = "embed texts whole"
    """Every token of a text sees every other, and nothing is ever cached."""

    @property
    def mask(self) -> MaskKind:
        return MaskKind.FULL if self is AttentionUsage.EMBED_WHOLE else MaskKind.CAUSAL

    @property
    def needs(self) -> frozenset[Feature]:
        """Features that steps ask for, beyond those of the spec."""
        return frozenset({Feature.NON_CAUSAL}) if self is AttentionUsage.EMBED_WHOLE else frozenset()


def demands_of(config: ResolvedConfig, group: LayerGroup, work: Work, usage: AttentionUsage) -> tuple[Demand, ...]:
    """What the backend that serves this kind of rows of the group will be asked for: steps through pages, steps without
    a cache, or both."""
    demands = []
    if config.num_pages:
        demands.append(_paged(config, group, work, usage))
    if usage is not AttentionUsage.GENERATE and not config.prefix_caching and work is Work.PREFILL:
        demands.append(_transient(config, group, usage))
    return tuple(part for demand in demands for part in _by_company(demand))


def _by_company(demand: Demand) -> tuple[Demand, ...]:
    """The demand in two, where a row that is alone cannot have all the tokens that a step may have."""
    rows, tokens = demand.scales[Dimension.ROWS], demand.scales[Dimension.STEP_TOKENS]
    longest = demand.scales[Dimension.NEW_TOKENS]
    if rows.low > 1 or rows.high == 1 or longest.high >= tokens.high:
        return (demand,)
    alone, others = frozenset({Company.ALONE.value}), demand.values[Dimension.COMPANY] - {Company.ALONE.value}
    unshared = {Dimension.SHARING: frozenset({Sharing.NONE.value})} if Dimension.SHARING in demand.values else {}
    return (
        Demand(
            {**demand.scales, Dimension.ROWS: _exactly(1), Dimension.STEP_TOKENS: longest},
            {**demand.values, Dimension.COMPANY: alone, **unshared},
        ),
        Demand(
            {**demand.scales, Dimension.ROWS: Span(2, rows.high), Dimension.STEP_TOKENS: Span(2, tokens.high)},
            {**demand.values, Dimension.COMPANY: others},
        ),
    )


def _paged(config: ResolvedConfig, group: LayerGroup, work: Work, usage: AttentionUsage) -> Demand:
    """Steps that read and write pages."""
    rows = _rows(config, work)
    longest = min(config.max_step_tokens, config.max_model_len) if work is Work.PREFILL else 1
    most = min(config.max_step_tokens, rows.high * longest)
    # Continuations of one prompt share its pages, prefix caching or not. A row shares whole pages of its context, and
    # computes at least its last token itself.
    may_share = config.prefix_caching or usage is AttentionUsage.GENERATE
    shares = may_share and rows.high > 1 and config.max_model_len > config.page_size
    return _demand(
        config,
        group,
        usage,
        CachePolicy.PAGED,
        {
            Dimension.ROWS: rows,
            Dimension.NEW_TOKENS: Span(1, longest),
            Dimension.CONTEXT: Span(0, config.max_model_len - 1),
            Dimension.STEP_TOKENS: Span(rows.low, most),
            Dimension.POOL_SLOTS: _exactly(config.num_pages * config.page_size),
        },
        {
            Dimension.PAGE_SIZE: frozenset({config.page_size}),
            Dimension.CACHE_DTYPE: frozenset({dtype_name(config.cache_dtype)}),
            Dimension.PAGE_ORDER: frozenset(PAGE_ORDERS),
            Dimension.SHARING: frozenset(each.value for each in Sharing if shares or each is Sharing.NONE),
            Dimension.REUSE: frozenset(each.value for each in Reuse),
        },
    )


def _transient(config: ResolvedConfig, group: LayerGroup, usage: AttentionUsage) -> Demand:
    """Steps of whole texts, which touch no cache."""
    longest = min(config.max_step_tokens, config.max_model_len)
    return _demand(
        config,
        group,
        usage,
        CachePolicy.TRANSIENT,
        {
            Dimension.ROWS: Span(1, config.max_rows),
            Dimension.NEW_TOKENS: Span(1, longest),
            Dimension.CONTEXT: _exactly(0),
            Dimension.STEP_TOKENS: Span(1, min(config.max_step_tokens, config.max_rows * longest)),
        },
        {Dimension.REUSE: frozenset(each.value for each in Reuse if each is not Reuse.GOES_ON)},
    )


def _demand(
    config: ResolvedConfig,
    group: LayerGroup,
    usage: AttentionUsage,
    policy: CachePolicy,
    scales: dict[Dimension, Span],
    values: dict[Dimension, frozenset[Value]],
) -> Demand:
    """These, and the dimensions that are the same for every step."""
    spec = group.spec
    scales = scales | {
        Dimension.LAYERS: _exactly(len(group.layers)),
        Dimension.KEY_HEADS: _exactly(spec.num_q_heads // spec.group_size),
    }
    if spec.window is not None:
        scales[Dimension.WINDOW] = _exactly(spec.window)
    rows = scales[Dimension.ROWS]
    companies = [each for each in Company if (rows.low == 1 if each is Company.ALONE else rows.high > 1)]
    values = values | {
        Dimension.KIND: frozenset({spec.kind.value}),
        Dimension.GROUP_SIZE: frozenset({spec.group_size}),
        Dimension.HEAD_DIM: frozenset({spec.head_dim}),
        Dimension.DTYPE: frozenset({dtype_name(config.dtype)}),
        Dimension.FEATURES: frozenset({features_name(feature.value for feature in spec.features)}),
        Dimension.MASK: frozenset({usage.mask.value}),
        Dimension.POLICY: frozenset({policy.value}),
        Dimension.PADDING: frozenset({Padding.NONE.value}),
        Dimension.COMPANY: frozenset(each.value for each in companies),
        Dimension.LANE: frozenset({LaneUse.MAIN.value}),
    }
    return Demand(scales, values)


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


def _exactly(number: int) -> Span:
    return Span(number, number)
