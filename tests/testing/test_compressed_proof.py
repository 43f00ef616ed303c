"""What an engine with compressed attention will ask of its backends is covered, group by group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runner.test_demand import HYBRID
from sightline.attention.backends import registry
from sightline.attention.capability import Work
from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.attention.coverage import Coverage
from sightline.attention.groups import LayerGroup
from sightline.core.device import detect_device
from sightline.runner.demand import AttentionUsage, requirement
from sightline.testing.conformance.case_run import try_case
from sightline.testing.conformance.domains import domains_of_demand
from sightline.testing.conformance.generator import cases_for
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Effort, Trial

pytestmark = pytest.mark.prove
CONFIG = replace(
    HYBRID,
    dtype=torch.float32,
    cache_dtype=torch.float32,
    max_model_len=300,
    max_rows=6,
    max_step_tokens=64,
    num_pages=130,
)
FOUR = Compression(4, overlap=True, rope_dim=8, norm_eps=1e-6)
MANY = Compression(128, overlap=False, rope_dim=8, norm_eps=1e-6)
SPECS: dict[str, CompressedSpec | CompressedIndexSpec] = {
    "chosen entries": CompressedSpec(6, 16, 0.25, 20, FOUR, 8),
    "all entries": CompressedSpec(6, 16, 0.25, 20, MANY),
    "a window alone": CompressedSpec(6, 16, 0.25, 20, None),
    "an indexer": CompressedIndexSpec(4, 16, 8, FOUR),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_step_that_an_engine_may_ask_for_is_tried(name: str) -> None:
    spec = SPECS[name]
    [candidate] = [
        each for each in registry.BUILT_IN if each.name.startswith("torch") and spec.kind in each.rows()[0].spec_kinds
    ]
    subject = Subject(candidate.name, candidate.load(), candidate.rows()[0], detect_device("cpu"))
    samples = Samples((spec.head_dim,), (spec.group_size,), (CONFIG.page_size,))
    need = requirement(CONFIG, LayerGroup("group", spec, (0, 1, 2)), Work.PREFILL, AttentionUsage.GENERATE)
    trial = Trial(subject, Effort.FULL, samples)
    for demand in need.demands:
        cases = cases_for(domains_of_demand(demand, subject, samples))
        for case in cases:
            try_case(trial, case)
        assert list(map(str, Coverage.of([case.point() for case in cases]).gaps(demand))) == []
