"""Kinds of attention, and the features that specs, steps and callers may need.

Knows names. Does not know what a layer computes.
"""

from __future__ import annotations

from enum import Enum


class SpecKind(Enum):
    """Families of attention; each has its own inputs and pools."""

    SOFTMAX = "softmax"
    LATENT = "latent"
    RECURRENT = "recurrent"
    CONVOLUTION = "convolution"
    INDEX = "index"
    """Chooses the tokens that a layer of sparse attention reads."""
    COMPRESSED = "compressed"
    """Attends to a window of tokens and to entries that each stand for several tokens."""
    COMPRESSED_INDEX = "compressed-index"
    """Chooses entries that each stand for several tokens."""


class Feature(Enum):
    """Features that a spec, a batch or a caller may need beyond plain causal attention."""

    WINDOW = "window"
    SOFTCAP = "softcap"
    SINKS = "sinks"
    NON_CAUSAL = "non-causal"
    TREE_MASK = "tree-mask"
    LSE = "lse"
    SHARED_CACHE = "shared-cache"
    """Layers read entries that another layer wrote, and write none (`CachePolicy.BORROWED`); new tokens may see the
    context alone (`MaskKind.CONTEXT`)."""
    DETERMINISTIC = "deterministic"
    """The same step gives bitwise equal results."""
    BATCH_INVARIANT = "batch-invariant"
    """A row's result does not depend, bit for bit, on the other rows."""
    SEVERAL_PLANS = "several-plans"
    """Several plans of one lane may be alive at once: all that they derive is in their own plan buffers."""
    DELTA_RULE = "delta-rule"
    """A recurrent layer stores the difference between a value and what its key recalls, not the value itself."""
    CHANNEL_DECAY = "channel-decay"
    """Every key dimension of a recurrent state decays at its own rate, not all of a head at one."""
    SKIP = "skip"
    """A recurrent layer adds a multiple of each value to its output."""
    SPARSE = "sparse"
    """A query attends only to the entries that an indexer chose for it."""


SOFTMAX_ONLY = frozenset({Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS, Feature.SHARED_CACHE})
"""Features that latent attention does not have."""
LATENT_ONLY = frozenset({Feature.SPARSE})
"""Features that softmax attention over keys and values does not have."""
RECURRENT_ONLY = frozenset({Feature.DELTA_RULE, Feature.CHANNEL_DECAY, Feature.SKIP})
"""Features of recurrent layers alone."""
PLAN_FEATURES = frozenset({Feature.DETERMINISTIC, Feature.BATCH_INVARIANT, Feature.SEVERAL_PLANS})
"""Features that say how a backend computes, not what."""
ENTRY_KINDS = frozenset({SpecKind.SOFTMAX, SpecKind.LATENT})
"""Layers that attend to an entry of each token."""
PAGED_KINDS = ENTRY_KINDS | {SpecKind.INDEX}
"""Layers that keep something of each token in pages."""
STATE_KINDS = frozenset({SpecKind.RECURRENT, SpecKind.CONVOLUTION})
"""Layers that keep a state for each sequence."""
COMPRESSED_KINDS = frozenset({SpecKind.COMPRESSED, SpecKind.COMPRESSED_INDEX})
"""Layers that keep a state for each sequence and, in pages, entries that each stand for several tokens."""
KEEPING_KINDS = STATE_KINDS | COMPRESSED_KINDS
"""Layers that keep a state for each sequence, with or without entries beside it."""
CHOOSING_KINDS = frozenset({SpecKind.INDEX, SpecKind.COMPRESSED_INDEX})
"""Indexers: what they give is a choice, not an output of attention."""
RECURRENT_FEATURES = RECURRENT_ONLY | PLAN_FEATURES
"""Every feature that a recurrent layer may need."""
CONVOLUTION_FEATURES = PLAN_FEATURES
"""Every feature that a convolution may need."""
INDEX_FEATURES = LATENT_ONLY | PLAN_FEATURES | {Feature.NON_CAUSAL, Feature.TREE_MASK}
"""Every feature that an indexer may need."""
COMPRESSED_FEATURES = LATENT_ONLY | PLAN_FEATURES | {Feature.WINDOW}
"""Every feature that compressed attention may need; it always has a window."""
COMPRESSED_INDEX_FEATURES = LATENT_ONLY | PLAN_FEATURES
"""Every feature that an indexer over compressed keys may need."""
