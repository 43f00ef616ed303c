"""The steps that an engine may run, as ranges, derived from its resolved config before anything is built.

A demand is an upper bound: every step of the engine lies within one of the demands. Does not know proofs, nor how a
step is scheduled.
"""

from __future__ import annotations

from enum import Enum

from sightline.attention.bindings import MASK_FEATURES
from sightline.attention.capability import FEW_ROWS, Requirement, Work
from sightline.attention.contract import CachePolicy
from sightline.attention.coverage import Demand
from sightline.attention.dimensions import (
    Company,
    Dimension,
    KeptStates,
    LaneUse,
    Padding,
    Reuse,
    Sharing,
    Span,
    Value,
    features_name,
)
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import STATE_KINDS, Feature
from sightline.attention.proof import dtype_name
from sightline.core.batch import MaskKind
from sightline.core.resolution import ResolvedConfig

PAGE_ORDERS = ("in order", "shuffled", "descending")
"""The orders of a row's pages, and of state slots, that the conformance kit tests. An engine may have any order."""


class AttentionUsage(Enum):
    """How an engine calls attention."""

    GENERATE = "generate"
    """Every row uses the paged cache and a causal mask or, if several continuations are guessed, a tree."""
    EMBED = "embed"
    """Every row has a causal mask. Without prefix caching, a text that fits a step uses no cache."""
    EMBED_WHOLE = "embed texts whole"
    """Every token of a text sees every other, and nothing is cached."""

    def masks(self, config: ResolvedConfig, work: Work) -> frozenset[MaskKind]:
        """The masks of rows of this kind. Rows with trees of guesses are never decode."""
        if self is AttentionUsage.EMBED_WHOLE:
            return frozenset({MaskKind.FULL})
        if self is AttentionUsage.GENERATE and work is Work.PREFILL and config.has_trees:
            return frozenset({MaskKind.CAUSAL, MaskKind.TREE})
        return frozenset({MaskKind.CAUSAL})

    def needs(self, config: ResolvedConfig, work: Work) -> frozenset[Feature]:
        """Features that steps need in addition to those of the spec."""
        return frozenset(MASK_FEATURES[mask] for mask in self.masks(config, work) if mask in MASK_FEATURES)


def requirement(config: ResolvedConfig, group: LayerGroup, work: Work, usage: AttentionUsage) -> Requirement:
    """The features that a backend must support to serve this kind of rows of the group."""
    return Requirement(
        group.spec,
        config.device,
        config.dtype,
        group.cache_dtype(config.cache_dtype),
        config.page_size,
        usage.needs(config, work) | group.needs,
        demands_of(config, group, work, usage),
        hot_entries=config.hot_buffer_size > 0 and group.may_be_on_host,
    )


def demands_of(config: ResolvedConfig, group: LayerGroup, work: Work, usage: AttentionUsage) -> tuple[Demand, ...]:
    """The demands on the backend that serves this kind of rows: steps with a paged cache, without a cache, or both."""
    demands = []
    if config.num_pages:
        demands.append(_paged(config, group, work, usage))
    if usage is not AttentionUsage.GENERATE and not config.prefix_caching and work is Work.PREFILL:
        demands.append(_transient(config, group, usage))
    return tuple(part for demand in demands for part in _by_company(demand))


def _by_company(demand: Demand) -> tuple[Demand, ...]:
    """Splits a demand in two if a single row cannot fill a step: one row alone, and several rows."""
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
    """The demand of steps that read pages, and write them unless the group borrows its entries."""
    rows = _rows(config, work)
    longest = min(config.max_step_tokens, config.max_model_len) if work is Work.PREFILL else 1
    most = min(config.max_step_tokens, rows.high * longest)
    scales = {
        Dimension.ROWS: rows,
        Dimension.NEW_TOKENS: Span(1, longest),
        Dimension.CONTEXT: Span(0, config.max_model_len - 1),
        Dimension.STEP_TOKENS: Span(rows.low, most),
    }
    kept: dict[Dimension, frozenset[Value]] = {Dimension.REUSE: frozenset(each.value for each in Reuse)}
    if group.is_recurrent:
        kept |= _of_states(config, longest)
    if group.spec.kind in STATE_KINDS:
        return _demand(config, group, usage, work, CachePolicy.PAGED, scales, kept)
    # Continuations of one prompt share its pages even without prefix caching. A row shares whole pages of its context,
    # and computes at least its last token itself.
    may_share = config.prefix_caching or usage is AttentionUsage.GENERATE
    shares = may_share and rows.high > 1 and config.max_model_len > config.page_size
    return _demand(
        config,
        group,
        usage,
        work,
        CachePolicy.PAGED if group.loan is None else CachePolicy.BORROWED,
        {**scales, Dimension.POOL_SLOTS: _exactly(config.num_pages * config.page_size)},
        {
            **kept,
            Dimension.PAGE_SIZE: frozenset({config.page_size}),
            Dimension.CACHE_DTYPE: frozenset({dtype_name(config.cache_dtype)}),
            Dimension.PAGE_ORDER: frozenset(PAGE_ORDERS),
            Dimension.SHARING: frozenset(each.value for each in Sharing if shares or each is Sharing.NONE),
        },
    )


def _of_states(config: ResolvedConfig, longest: int) -> dict[Dimension, frozenset[Value]]:
    """Returns which states steps keep, and in which order of slots. Rows of one token keep only the state behind it."""
    may_keep = {
        KeptStates.LAST: True,
        KeptStates.CHECKPOINTS: longest > 1 and config.max_checkpoints > 0,
        KeptStates.GUESSES: longest > 1 and config.max_drafted > 0,
    }
    return {
        Dimension.KEPT: frozenset(each.value for each, may in may_keep.items() if may),
        Dimension.SLOT_ORDER: frozenset(PAGE_ORDERS),
    }


def _transient(config: ResolvedConfig, group: LayerGroup, usage: AttentionUsage) -> Demand:
    """The demand of steps of whole texts, without a cache."""
    longest = min(config.max_step_tokens, config.max_model_len)
    return _demand(
        config,
        group,
        usage,
        Work.PREFILL,
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
    work: Work,
    policy: CachePolicy,
    scales: dict[Dimension, Span],
    values: dict[Dimension, frozenset[Value]],
) -> Demand:
    """A demand of the given dimensions and those that are the same for every step."""
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
        **{dimension: frozenset({value}) for dimension, value in spec.proof_values.items()},
        Dimension.DTYPE: frozenset({dtype_name(config.dtype)}),
        Dimension.FEATURES: frozenset({features_name(feature.value for feature in spec.features)}),
        Dimension.MASK: frozenset(mask.value for mask in usage.masks(config, work)),
        Dimension.POLICY: frozenset({policy.value}),
        Dimension.PADDING: frozenset({Padding.NONE.value}),
        Dimension.COMPANY: frozenset(each.value for each in companies),
        Dimension.LANE: frozenset({LaneUse.MAIN.value}),
    }
    return Demand(scales, values)


def _rows(config: ResolvedConfig, work: Work) -> Span:
    """The possible numbers of rows of this kind in a step."""
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
