"""The backends that selection may choose, in order of preference.

The only place that knows them by name.
"""

from __future__ import annotations

from sightline.attention.backends.reference_backend import ReferenceBackend
from sightline.attention.backends.torch_backend import TorchBackend
from sightline.attention.selection import Candidate

CANDIDATES: tuple[Candidate, ...] = (
    Candidate(
        "torch",
        TorchBackend,
        "fused scaled_dot_product_attention where it fits, else plain products",
        by_default=True,
    ),
    Candidate("reference", ReferenceBackend, "the fp32 oracle: slow, for checking", by_default=False),
)
