"""Attention: specs, capabilities, plans, backends.

The exports are the contract for backends, both Sightline's own and those of other packages.
"""

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    Lse,
    SoftmaxInputs,
    SoftmaxQueries,
    StepLimits,
    StepView,
)
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.shared.merge import merge_parts
from sightline.attention.spec import SoftmaxSpec
from sightline.core.batch import MaskKind
from sightline.core.device import DeviceKind

__all__ = [
    "ANY",
    "AttentionBackend",
    "AttentionPlan",
    "BackendContext",
    "CachePolicy",
    "Capability",
    "DeviceKind",
    "Feature",
    "GraphLevel",
    "HostLengths",
    "Lse",
    "MaskKind",
    "PlanBuffers",
    "SoftmaxInputs",
    "SoftmaxQueries",
    "SoftmaxSpec",
    "SpecKind",
    "StepLimits",
    "StepView",
    "merge_parts",
]
