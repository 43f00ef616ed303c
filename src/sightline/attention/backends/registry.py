"""The backends that selection may choose, in order of preference.

The only place that knows them by name.
"""

from __future__ import annotations

from sightline.attention.backends.reference_backend import ReferenceBackend
from sightline.attention.backends.torch_backend import TorchBackend
from sightline.attention.selection import Candidate

CANDIDATES: tuple[Candidate, ...] = (
    Candidate("torch", TorchBackend, by_default=True),
    Candidate("reference", ReferenceBackend, by_default=False),
)
