"""The first checks: the backend can be built for what it declares, and reads back what it wrote."""

from __future__ import annotations

from dataclasses import replace

from sightline.attention.kinds import ENTRY_KINDS
from sightline.attention.oracle.dtypes import compute_dtypes
from sightline.testing.conformance.rig import Row
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Trial, check


@check()
def built(trial: Trial) -> None:
    """The backend can be built for every declared dtype, head geometry and page size."""
    small = replace(trial.setting, max_seq_len=trial.page_size, max_rows=1, states_per_row=2, max_checkpoints=0)
    for dtype in compute_dtypes(trial.row):
        for head_dim in trial.samples.of_head_dims(trial.row):
            for size in trial.samples.of_group_sizes(trial.row):
                spec = trial.spec(head_dim, size, 1)
                trial.bench(spec, setting=replace(small, dtype=dtype, cache_dtype=trial.in_dtype(dtype).cache_dtype))
    for page_size in trial.samples.of_page_sizes(trial.row):
        trial.bench(setting=replace(small, page_size=page_size))


@check("write-slots", kinds=ENTRY_KINDS)
def first_read(trial: Trial) -> None:
    """A row of one token returns its own value: the slot that is read is the one that was written."""
    # A single key has weight 1, whatever its score.
    trial.try_rows([Row(0, 1)])
    bench = trial.bench()
    Step(bench, [Row(3, 1)])
    trial.try_step(Step(bench, [Row(0, 1)], seed=1))
