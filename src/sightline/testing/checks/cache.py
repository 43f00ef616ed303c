"""The law of the cache: what a plan reads was committed before, or is written by it; and it writes nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sightline.testing.bench import Bench, Layout, Row, Unused, walk_slots
from sightline.testing.steps import Step
from sightline.testing.trial import Check, Trial, fail, ragged_rows


def _snapshot(bench: Bench) -> dict[str, Tensor]:
    """Every plane of every pool, on the host."""
    return {
        f"{pool.key}.{plane.name}": pool.plane(plane.name).detach().cpu().clone()
        for pool in bench.store.pools
        for plane in pool.spec.planes
    }


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN in bits."""
    return tensor.contiguous().view(torch.uint8)


def _require_written(step: Step) -> None:
    """Each new token's key and value are in its slot, in the step's layer."""
    start = 0
    for row, table_row in zip(step.rows, step.table_rows, strict=True):
        slots = walk_slots(step.pool, table_row, row.seq_len)[row.context_len :]
        for name, values in (("k", step.inputs.k), ("v", step.inputs.v)):
            got = step.pool.plane(name)[step.layer_in_group][slots].cpu()
            wanted = step.stored(values[start : start + row.query_len])
            if not torch.equal(got, wanted):
                fail(
                    f"expected the {name} of the {row.query_len} new tokens after a context of {row.context_len} in "
                    f"slots {slots[:4]}{'…' if len(slots) > 4 else ''}, got other contents there"
                )
        start += row.query_len


def cache_write(trial: Trial) -> None:
    for query_len in trial.some((trial.page_size, 1, 2)):
        step = Step(trial.bench(), [Row(0, query_len)])
        trial.run(step)
        _require_written(step)


def write_slots(trial: Trial) -> None:
    page = trial.page_size
    rows = [Row(page, 1), Row(0, 2 * page + 1), Row(page - 1, 3), Row(2 * page + 1, page)]
    for padding in (0, 5):
        bench = trial.bench(trial.plain, trial.plain)
        step = Step(bench, rows, layer=1)
        step.pad(1, padding, 7.0)
        before = _snapshot(bench)
        trial.run(step)
        _require_written(step)
        written = {
            slot
            for row, table_row in zip(rows, step.table_rows, strict=True)
            for slot in walk_slots(step.pool, table_row, row.seq_len)[row.context_len :]
        }
        # Padding tokens write to the padding page, which nobody reads.
        allowed = [*written, *range(step.pool.page_size)]
        for name, after in _snapshot(bench).items():
            same = (_bits(after) == _bits(before[name])).view(*after.shape[:2], -1).all(-1)
            same[step.layer_in_group, allowed] = True
            if not same.all():
                layer, slot = (int(index) for index in (~same).nonzero()[0])
                fail(
                    f"expected a step of layer {step.layer_in_group} to write its {len(written)} slots alone, got a "
                    f"change of {name} in layer {layer}, slot {slot}"
                )


def transient(trial: Trial) -> None:
    for lengths in ((5,), (5, 1, 2 * trial.page_size + 3, 5)):
        bench = trial.bench(setting=replace(trial.setting, unused=Unused.NAN))
        before = _snapshot(bench)
        trial.try_step(Step(bench, [Row(0, length) for length in lengths], transient=True))
        for name, after in _snapshot(bench).items():
            trial.require(
                torch.equal(_bits(after), _bits(before[name])),
                f"expected a TRANSIENT plan to touch no pool, got a change of {name}",
            )


def read_back(trial: Trial) -> None:
    page = trial.page_size
    bench = trial.bench(setting=replace(trial.setting, layout=Layout.SHUFFLED))
    prompt = Step(bench, [Row(0, 2 * page + 3), Row(0, page)])
    trial.try_step(prompt)
    follow = prompt.next_step(1, seed=1)
    trial.try_step(follow)
    # The pool is what counts: an entry that is changed there, by whoever, is read as changed.
    changed = prompt.next_step(1, seed=1)
    keys, values = changed.contexts[0]
    keys[page + 1] = 3 * changed.inputs.q[0, :: changed.spec.group_size]
    values[page + 1] = 5.0
    changed.write_contexts()
    trial.try_step(changed)


def prefix_tail(trial: Trial) -> None:
    page = trial.page_size
    for pages in trial.some((1, 2, 4)):
        trial.try_rows([Row(pages * page, 1)])
        prompt = Step(trial.bench(), [Row(0, pages * page)])
        trial.try_step(prompt)
        tail = prompt.next_step(1, seed=2)
        trial.try_step(tail)
        trial.try_step(tail.next_step(1, seed=3))
    trial.try_rows(ragged_rows(page)[1:3])


CHECKS = (
    Check("cache-write", "a PAGED plan puts the new keys and values into their slots", cache_write, ("built",)),
    Check("write-slots", "it writes those slots, in that layer, and nothing else", write_slots, ("cache-write",)),
    Check("transient", "a TRANSIENT plan touches no pool, neither to write nor to read", transient, ("causal",)),
    Check(
        "prefix-tail",
        "one new token after a prefix of whole pages, read from what the backend itself wrote",
        prefix_tail,
        ("last-page",),
    ),
    Check("read-back", "what the next step reads is what stands in the pool", read_back, ("page-order",)),
)
