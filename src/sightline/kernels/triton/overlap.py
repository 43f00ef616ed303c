"""Launches that begin before the previous one ends (programmatic dependent launch, from SM90 on).

    launch 1   |start|■■■■■■■■■■■■|
    launch 2         |start, weights|wait|■■■■■■■■■■■■|

A launch with `overlaps` may do only two things before it waits: read memory that no launch of the step writes, such as
weights, and let the next launch begin. Every one of them waits, also if it needs nothing of the previous launch:
otherwise the next would not know that the launches before it are over.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_OVERLAPPING = frozenset({(9, 0)})
"""Compute capabilities on which it was tried."""


def overlaps_on(device: torch.device) -> bool:
    """True if launches on the device may overlap."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in _OVERLAPPING


def overlap_settings(overlaps: bool) -> dict[str, object]:
    """The settings of a launch. `launch_pdl` is left out if unused, because the interpreter does not know it."""
    return {"OVERLAPS": overlaps, **({"launch_pdl": True} if overlaps else {})}


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Lets the next launch begin once all programs of this one have. It waits for this one's results all the same."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_results(OVERLAPS: tl.constexpr):
    """Waits until the results of the launches before are there."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Both, for a launch that reads nothing before its inputs: then there is no hurry to let the next one begin."""
    wait_for_results(OVERLAPS)
    let_next_begin(OVERLAPS)
