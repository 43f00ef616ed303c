"""Domains: the values of each dimension of `attention.coverage` from which cases are made.

A scale has a span. Its two ends matter: a fault that begins or ends at some value shows at one of them. Any other
dimension has a list of values, the plainest first. The domains of a capability row are as wide as the time of a run
allows; those of a demand are what an engine can reach. Knows no case and no backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sightline.attention.capability import ANY
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
    is_sparse,
)
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.oracle.dtypes import cache_dtypes, compute_dtypes
from sightline.attention.proof import dtype_name
from sightline.cache.layout import Layout
from sightline.core.batch import MaskKind
from sightline.core.device import DeviceKind
from sightline.core.page_shape import fits
from sightline.testing.conformance.cases import MOST_POOL_BYTES
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.samples import Samples

_SPANS = {
    Dimension.ROWS: Span(1, 256),
    Dimension.NEW_TOKENS: Span(1, 768),
    Dimension.CONTEXT: Span(0, 8192),
    Dimension.STEP_TOKENS: Span(1, 768),
    Dimension.LAYERS: Span(1, 64),
    Dimension.KEY_HEADS: Span(1, 64),
    Dimension.WINDOW: Span(1, 4096),
    Dimension.POOL_SLOTS: Span(2048, 1 << 20),
}
_OF_PAGES = frozenset({Dimension.WINDOW, Dimension.POOL_SLOTS})
_STATE_SPANS: Mapping[Dimension, Span] = {scale: span for scale, span in _SPANS.items() if scale not in _OF_PAGES}
"""States have no pages and no window."""
_OF_SPEC = (
    Feature.WINDOW,
    Feature.SOFTCAP,
    Feature.SINKS,
    Feature.LSE,
    Feature.DELTA_RULE,
    Feature.CHANNEL_DECAY,
    Feature.SKIP,
    Feature.SPARSE,
)
"""Features that make up `Dimension.FEATURES`; masks have their own dimension."""
_MASKS = {MaskKind.FULL: Feature.NON_CAUSAL, MaskKind.TREE: Feature.TREE_MASK}
_ANY_POOL = {DeviceKind.CPU: MOST_POOL_BYTES, DeviceKind.CUDA: 1 << 62}
"""The largest pool of an engine's demand. On a GPU the demand is already limited to the free memory."""
_MOST_KEY_HEADS = 16
"""The most key heads of a layer with states: its states are large."""
_MOST_COMPRESSED = 1024
"""The longest context of compressed attention: the oracle computes all of it."""
_MOST_WINDOW = 256
"""The largest window that is part of a state."""
_COMPILE_SECONDS = {DeviceKind.CPU: 0.0, DeviceKind.CUDA: 4.0}


@dataclass(frozen=True)
class Domains:
    """The domains of one kind of attention."""

    kind: SpecKind
    scales: Mapping[Dimension, Span]
    values: Mapping[Dimension, tuple[Value, ...]]
    """Not empty; the plainest first."""
    compile_seconds: float = 0.0
    """Time that a backend may need to compile for a new spec. If it is not 0, cases share specs if they can."""
    most_pool_bytes: int = MOST_POOL_BYTES

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self.scales.items()), tuple(self.values.items()), self.compile_seconds))

    @property
    def most_q_heads(self) -> int:
        """The most heads of a case; the channels of a convolution stand beside each other as heads do."""
        if self.kind is SpecKind.CONVOLUTION:
            return max(map(int, self.values[Dimension.HEAD_DIM]))
        return self.scales[Dimension.KEY_HEADS].high * max(map(int, self.values[Dimension.GROUP_SIZE]))

    def demand(self) -> Demand:
        """Returns everything within the domains as a demand."""
        return Demand(self.scales, {dimension: frozenset(values) for dimension, values in self.values.items()})


def domains_of(subject: Subject, samples: Samples) -> Domains:
    """Returns the domains of a capability row, for the subject's kind of attention."""
    return _DOMAINS[subject.kind](subject, samples)


def _of_states(subject: Subject, samples: Samples) -> Domains:
    """Returns the domains of a row of recurrent layers. States have no pages, no cache dtype and no window."""
    row, head_dims = subject.capability, samples.of_head_dims(subject.capability)
    scales = dict(_STATE_SPANS)
    scales[Dimension.KEY_HEADS] = Span(1, _MOST_KEY_HEADS)
    if row.expanded_dims is ANY:
        value_dims: tuple[int, ...] = samples.value_dims
    else:
        # Values of a size that every key dimension goes with; if there is none, key dimensions that go with one.
        listed = {head_dim: {value for key, value in row.expanded_dims if key == head_dim} for head_dim in head_dims}
        value_dims = tuple(sorted(set.intersection(*listed.values()) or listed[head_dims[0]]))
        head_dims = tuple(each for each in head_dims if listed[each] >= set(value_dims))
    return Domains(
        subject.kind,
        scales,
        {
            **_of_any_step(subject),
            Dimension.HEAD_DIM: head_dims,
            Dimension.VALUE_DIM: value_dims,
            Dimension.CONV_WIDTH: (0, 4, 3),
            Dimension.UNIT_KEYS: (0, 1),
            Dimension.GROUP_SIZE: samples.of_group_sizes(row),
        },
        _COMPILE_SECONDS[subject.device.kind],
    )


def _of_convolutions(subject: Subject, samples: Samples) -> Domains:
    """Returns the domains of a row of convolutions, whose channels are one head."""
    scales = dict(_STATE_SPANS)
    scales[Dimension.KEY_HEADS] = Span(1, 1)
    values = {
        **_of_any_step(subject),
        Dimension.HEAD_DIM: samples.of_head_dims(subject.capability),
        Dimension.CONV_WIDTH: (3, 4, 2),
        Dimension.GROUP_SIZE: (1,),
    }
    return Domains(subject.kind, scales, values, _COMPILE_SECONDS[subject.device.kind])


def _of_any_step(subject: Subject) -> dict[Dimension, tuple[Value, ...]]:
    """Returns the values that steps of all layers with states have."""
    return {
        Dimension.KIND: (subject.kind.value,),
        Dimension.DTYPE: tuple(map(dtype_name, compute_dtypes(subject.capability))),
        Dimension.FEATURES: tuple(_feature_sets(subject.features, subject.capability.only_with)),
        Dimension.MASK: (MaskKind.CAUSAL.value,),
        Dimension.POLICY: (CachePolicy.PAGED.value, CachePolicy.TRANSIENT.value),
        Dimension.KEPT: tuple(each.value for each in KeptStates),
        Dimension.SLOT_ORDER: tuple(layout.value for layout in Layout),
        Dimension.PADDING: tuple(each.value for each in Padding),
        Dimension.REUSE: tuple(each.value for each in Reuse),
        Dimension.COMPANY: (Company.SHORTER.value, Company.ALONE.value, Company.SAME.value),
        Dimension.LANE: tuple(each.value for each in LaneUse),
    }


def _of_entries(subject: Subject, samples: Samples) -> Domains:
    """Returns the domains of a row of attention."""
    row, features = subject.capability, subject.features
    scales = dict(_SPANS)
    if subject.kind is not SpecKind.SOFTMAX:
        scales[Dimension.KEY_HEADS] = Span(1, 1)
    if Feature.WINDOW not in features:
        del scales[Dimension.WINDOW]
    head_dims = samples.of_head_dims(row)
    scales[Dimension.POOL_SLOTS] = _pool_span(subject.kind, min(head_dims))
    masks = [MaskKind.CAUSAL, *(mask for mask, feature in _MASKS.items() if feature in features)]
    values: dict[Dimension, tuple[Value, ...]] = {
        Dimension.KIND: (subject.kind.value,),
        Dimension.GROUP_SIZE: samples.of_group_sizes(row),
        Dimension.HEAD_DIM: head_dims,
        Dimension.PAGE_SIZE: samples.of_page_sizes(row),
        Dimension.DTYPE: tuple(map(dtype_name, compute_dtypes(row))),
        Dimension.CACHE_DTYPE: tuple(map(dtype_name, cache_dtypes(row))),
        Dimension.FEATURES: tuple(_feature_sets(features, frozenset())),
        Dimension.MASK: tuple(mask.value for mask in masks),
        Dimension.POLICY: (CachePolicy.PAGED.value, CachePolicy.TRANSIENT.value),
        Dimension.SHARING: tuple(each.value for each in Sharing),
        Dimension.PAGE_ORDER: tuple(layout.value for layout in Layout),
        Dimension.PADDING: tuple(each.value for each in Padding),
        Dimension.REUSE: tuple(each.value for each in Reuse),
        Dimension.COMPANY: (Company.SHORTER.value, Company.ALONE.value, Company.SAME.value),
        Dimension.LANE: tuple(each.value for each in LaneUse),
    }
    if Feature.SPARSE in features:
        values[Dimension.TOP_K] = (0, *samples.top_ks)
    return Domains(subject.kind, scales, values, _COMPILE_SECONDS[subject.device.kind])


def _of_indexers(subject: Subject, samples: Samples) -> Domains:
    """Returns the domains of a row of indexers, each of which chooses some number of tokens."""
    usual = _of_entries(subject, samples)
    always: dict[Dimension, tuple[Value, ...]] = {
        Dimension.FEATURES: (Feature.SPARSE.value,),
        Dimension.TOP_K: samples.top_ks,
    }
    return replace(usual, values={**usual.values, **always})


def _of_compressed(subject: Subject, samples: Samples) -> Domains:
    """Returns the domains of a row of compressed attention, or of indexers over compressed keys."""
    entries, ratios = _of_entries(subject, samples), samples.ratios
    always = frozenset({Feature.WINDOW, Feature.SPARSE} & subject.features)
    scales = {**entries.scales, Dimension.CONTEXT: Span(0, _MOST_COMPRESSED)}
    if subject.kind is SpecKind.COMPRESSED:
        always -= {Feature.SPARSE}
        scales[Dimension.WINDOW] = Span(1, _MOST_WINDOW)
    values: dict[Dimension, tuple[Value, ...]] = {
        **entries.values,
        **_of_any_step(subject),
        Dimension.FEATURES: tuple(_feature_sets(subject.features, always)),
        Dimension.RATIO: ratios,
        Dimension.OVERLAP: (1, 0),
        Dimension.PAGE_SIZE: tuple(
            size for size in samples.of_page_sizes(subject.capability) if all(fits(size, ratio) for ratio in ratios)
        ),
    }
    if subject.kind is SpecKind.COMPRESSED_INDEX:
        values[Dimension.TOP_K] = samples.top_ks
    return replace(entries, scales=scales, values=values)


def domains_of_demand(demand: Demand, subject: Subject, samples: Samples) -> Domains:
    """Returns the domains of a capability row, narrowed or widened to what an engine demands.

    Dimensions that the demand does not mention are unchanged.
    """
    usual = domains_of(subject, samples)
    values = dict(usual.values)
    for dimension, asked in demand.values.items():
        known = [value for value in usual.values.get(dimension, ()) if value in asked]
        values[dimension] = (*known, *sorted((value for value in asked if value not in known), key=str))
    if Dimension.TOP_K in values:
        ways = {is_sparse(features) for features in values[Dimension.FEATURES]}
        values[Dimension.TOP_K] = tuple(top_k for top_k in values[Dimension.TOP_K] if (int(top_k) > 0) in ways)
    scales = {**usual.scales, **demand.scales}
    if not any(Feature.WINDOW.value in str(value).split("+") for value in values[Dimension.FEATURES]):
        scales.pop(Dimension.WINDOW, None)
    return Domains(usual.kind, scales, values, usual.compile_seconds, _ANY_POOL[subject.device.kind])


def borders(span: Span, page_size: int = 16) -> tuple[int, ...]:
    """Returns numbers of a span at which kernels tend to switch: its ends, powers of two, pages, and neighbours."""
    powers = [1 << power for power in range(span.high.bit_length())]
    pages = [page_size * count for count in (1, 2, 3)]
    near = {border + delta for border in (*powers, *pages) for delta in (-1, 0, 1)}
    return tuple(sorted({span.low, span.high} | {number for number in near if span.low <= number <= span.high}))


def _feature_sets(declared: Iterable[Feature], always: frozenset[Feature]) -> list[str]:
    """Returns every set of the declared features that has those of `always`, the smaller ones first."""
    able = [feature for feature in _OF_SPEC if feature in set(declared)]
    sets = itertools.chain.from_iterable(itertools.combinations(able, size) for size in range(len(able) + 1))
    return [features_name(feature.value for feature in chosen) for chosen in sets if always <= set(chosen)]


def _pool_span(kind: SpecKind, head_dim: int) -> Span:
    """Returns the sizes of pools that are possible with the most layers or the most key heads, on any machine."""
    planes, heads = (2, _SPANS[Dimension.KEY_HEADS].high) if kind is SpecKind.SOFTMAX else (1, 1)
    # Two key heads of the most layers, or two layers of the most key heads.
    entry_bytes = 4 * planes * head_dim * 2 * max(heads, _SPANS[Dimension.LAYERS].high)
    span = _SPANS[Dimension.POOL_SLOTS]
    return Span(span.low, max(span.low, min(span.high, 1 << (MOST_POOL_BYTES // entry_bytes).bit_length() - 1)))


_DOMAINS: Mapping[SpecKind, Callable[[Subject, Samples], Domains]] = {
    SpecKind.SOFTMAX: _of_entries,
    SpecKind.LATENT: _of_entries,
    SpecKind.RECURRENT: _of_states,
    SpecKind.CONVOLUTION: _of_convolutions,
    SpecKind.INDEX: _of_indexers,
    SpecKind.COMPRESSED: _of_compressed,
    SpecKind.COMPRESSED_INDEX: _of_compressed,
}
"""The domains of each kind."""
