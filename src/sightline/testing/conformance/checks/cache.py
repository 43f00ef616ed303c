"""The cache: a plan reads what was committed before or what it writes itself, and writes nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sightline.attention.kinds import PAGED_KINDS
from sightline.cache.layout import Layout, walk_slots
from sightline.testing.conformance.rig import AttentionRig, Row, Unused
from sightline.testing.conformance.steps import bits
from sightline.testing.conformance.trial import Trial, check, fail, ragged_rows


def snapshot(bench: AttentionRig) -> dict[str, Tensor]:
    """Copies every plane of every pool, and of all states, to the host."""
    pools, groups = bench.store.pools, bench.store.groups
    planes = {f"{pool.key}.{plane.name}": pool.plane(plane.name) for pool in pools for plane in pool.spec.planes}
    planes |= {
        f"the {plane.name}s of {group.group}": group.states.plane(plane.name)
        for group in groups
        for plane in group.states.spec.planes
    }
    return {name: plane.detach().cpu().clone() for name, plane in planes.items()}


@check("built", kinds=PAGED_KINDS)
def cache_write(trial: Trial) -> None:
    """A PAGED plan writes the new keys and values to their slots."""
    for query_len in trial.some((trial.page_size, 1, 2)):
        step = trial.paged_step(trial.bench(), [Row(0, query_len)])
        trial.run(step)
        trial.require_written(step)


@check("cache-write", kinds=PAGED_KINDS)
def write_slots(trial: Trial) -> None:
    """A step writes its own slots, in its own layer, and nothing else."""
    page = trial.page_size
    rows = [Row(page, 1), Row(0, 2 * page + 1), Row(page - 1, 3), Row(2 * page + 1, page)]
    for padding in (0, 5):
        bench = trial.bench(trial.plain, trial.plain)
        step = trial.paged_step(bench, rows, layer=1)
        step.pad(1, padding, 7.0)
        before = snapshot(bench)
        trial.run(step)
        trial.require_written(step)
        written = {
            slot
            for row, table_row in zip(rows, step.table_rows, strict=True)
            for slot in walk_slots(step.pool, table_row, row.seq_len)[row.context_len :]
        }
        # Padding tokens write to the padding page, which no row reads.
        allowed = [*written, *range(step.pool.page_size)]
        for name, after in snapshot(bench).items():
            same = (bits(after) == bits(before[name])).view(*after.shape[:2], -1).all(-1)
            same[step.layer_in_group, allowed] = True
            if not same.all():
                layer, slot = (int(index) for index in (~same).nonzero()[0])
                fail(
                    f"expected a step of layer {step.layer_in_group} to write its {len(written)} slots only, got a "
                    f"change of {name} in layer {layer}, slot {slot}"
                )


@check("causal prompts ragged")
def transient(trial: Trial) -> None:
    """A TRANSIENT plan neither writes nor reads a cache."""
    for lengths in ((5,), (5, 1, 2 * trial.page_size + 3, 5)):
        bench = trial.bench(setting=replace(trial.setting, unused=Unused.NAN))
        before = snapshot(bench)
        trial.try_step(trial.step(bench, [Row(0, length) for length in lengths], transient=True))
        for name, after in snapshot(bench).items():
            trial.require(
                torch.equal(bits(after), bits(before[name])),
                f"expected a TRANSIENT plan to touch no cache, got a change of {name}",
            )


@check("transient", "padding", "idle", "next-batch", "unused-slots")
def transient_in_turn(trial: Trial) -> None:
    """PAGED and TRANSIENT steps may alternate, padded and idle ones included."""
    bench = trial.bench()
    for seed in range(2):
        prompt = trial.step(bench, [Row(3, 5), Row(0, 4)], seed=seed)
        trial.try_step(prompt)
        step = trial.step(bench, [Row(0, 5), Row(0, 4)], seed=10 + seed, transient=True)
        step.pad(2, 3, torch.nan)
        answer = trial.try_step(step)
        trial.require(
            bool(answer.out[9:].isnan().all()), "expected the output of padding tokens to be unchanged, got numbers"
        )
        idle = trial.step(bench, [], transient=True)
        idle.pad(seed, 2 * seed, torch.nan)
        trial.run(idle)
        trial.try_step(prompt.next_step(2, seed=20 + seed))


@check("page-order", kinds=PAGED_KINDS)
def read_back(trial: Trial) -> None:
    """The next step reads what is in the pool."""
    page = trial.page_size
    bench = trial.bench(setting=replace(trial.setting, layout=Layout.SHUFFLED))
    prompt = trial.paged_step(bench, [Row(0, 2 * page + 3), Row(0, page)])
    trial.try_step(prompt)
    follow = prompt.next_step(1, seed=1)
    trial.try_step(follow)
    # An entry that anyone changes in the pool is read as changed.
    changed = prompt.next_step(1, seed=1)
    trial.problem.make_noticed(changed.spec, changed.inputs, changed.contexts[0], page + 1)
    changed.write_contexts()
    trial.try_step(changed)


@check("last-page", kinds=PAGED_KINDS)
def prefix_tail(trial: Trial) -> None:
    """One new token after a prefix of whole pages sees what the backend itself wrote."""
    page = trial.page_size
    for pages in trial.some((1, 2, 4)):
        trial.try_rows([Row(pages * page, 1)])
        prompt = trial.paged_step(trial.bench(), [Row(0, pages * page)])
        trial.try_step(prompt)
        tail = prompt.next_step(1, seed=2)
        trial.try_step(tail)
        trial.try_step(tail.next_step(1, seed=3))
    trial.try_rows(ragged_rows(page)[1:3])
