"""What must hold of captured steps, as checks that a planted fault can fail.

Each takes a maker of engines (`captured_engines`) and a model's folder, and raises `AssertionError`, or what the engine
raises by itself, if something is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import MappingProxyType
from unittest.mock import patch

import torch
from torch import Tensor

from sightline import LLM, SamplingParams
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.workspace import MAIN_LANE
from sightline.core.batch import PADDING_SLOT, Batch, RowWork, StepWork
from sightline.core.errors import StalePlanError
from sightline.llm import TokensPrompt
from sightline.runner.recording import Recorder
from sightline.runner.runner import Runner
from sightline.runner.runtime import Runtime
from support.tiny_models import VOCAB, random_prompts

Make = Callable[..., LLM]
Check = Callable[[Make, Path], None]

PROMPTS = random_prompts([9, 14, 3, 30, 6])
VARIED = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, n=3),
    SamplingParams(temperature=0.8, seed=5, max_tokens=9, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=1, ignore_eos=True),
]
"""Rows that join and leave at different steps."""


class Rows:
    """Sequences in a runtime, stepped by hand."""

    def __init__(self, runtime: Runtime, prompt_lens: Sequence[int], vocab: int = VOCAB) -> None:
        """Reads the prompts, of tokens below `vocab`, one step each."""
        self.runtime = runtime
        self.prompts = random_prompts(prompt_lens, seed=7, vocab=vocab)
        self.rows = [runtime.store.open_row() for _ in prompt_lens]
        self.lens = [0 for _ in prompt_lens]
        for index, prompt in enumerate(self.prompts):
            self.forward([index], [prompt])

    def restart(self, index: int) -> None:
        """Ends a sequence and begins another in its place, with its prompt unread."""
        self.runtime.store.close_row(self.rows[index])
        self.rows[index], self.lens[index] = self.runtime.store.open_row(), 0

    def plan(self, indices: Sequence[int], tokens: Sequence[Sequence[int]]) -> PlannedBatch:
        """A planned step of new tokens of some sequences, each with the logits of its last token."""
        work = []
        for index, new in zip(indices, tokens, strict=True):
            self.runtime.store.grow_row(self.rows[index], self.lens[index] + len(new))
            work.append(RowWork(self.rows[index], list(new), self.lens[index], num_logits=1))
        return self.runtime.planner.plan(self.runtime.graphs.assemble(StepWork.of(work)))

    def forward(self, indices: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        logits = self.runtime.runner.forward(self.plan(indices, tokens))
        for index, new in zip(indices, tokens, strict=True):
            self.lens[index] += len(new)
        return logits


def runtime_of(make: Make, folder: Path, **changes: object) -> Runtime:
    return make(folder, **changes).engine.runtime


def eager_of(make: Make, folder: Path) -> Runtime:
    return runtime_of(make, folder, cuda_graph_sizes=None, enforce_eager=True)


def answers_are_those_of_eager_steps(make: Make, folder: Path) -> None:
    """With rows that join and leave, and with a step in flight."""
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    engines = [
        make(folder, cuda_graph_sizes=None, enforce_eager=True),
        make(folder),
        make(folder, async_scheduling=True),
    ]
    found = [engine.generate(prompts, VARIED, use_tqdm=False) for engine in engines]
    assert [engine.engine.runtime.runner.num_replayed > 8 for engine in engines] == [False, True, True]
    for outputs in found[1:]:
        for output, wanted in zip(outputs, found[0], strict=True):
            for one, other in zip(output.outputs, wanted.outputs, strict=True):
                assert one.token_ids == other.token_ids
                assert [list(entry) for entry in one.logprobs or ()] == [list(entry) for entry in other.logprobs or ()]


STEPS: tuple[tuple[Sequence[int], Sequence[Sequence[int]]], ...] = (
    ((0, 1, 2, 3, 4), ((5,), (6,), (7,), (8,), (9,))),
    ((4, 2, 0), ((15,), (16,), (17,))),
    ((1,), ((21,),)),
    ((0, 1, 2, 3, 4), ((31,), (32,), (33,), (34,), (35,))),
    ((3, 0), ((41,), (42, 43, 44))),
    ((2,), ((51, 52, 53, 54, 55, 56),)),
    ((0, 1, 2, 3, 4), ((61,), (62,), (63,), (64,), (65,))),
)
"""Sequences and their new tokens. Five rows go to a bucket of eight, twice with other lengths."""


def a_step_of_five_rows_in_a_bucket_of_eight_is_the_eager_one(make: Make, folder: Path) -> None:
    eager, captured = (Rows(each, [5, 11, 3, 8, 1]) for each in (eager_of(make, folder), runtime_of(make, folder)))
    before = captured.runtime.runner.num_replayed
    for indices, tokens in STEPS:
        expected, found = eager.forward(indices, tokens), captured.forward(indices, tokens)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), "the logits are not those of the eager step"
    assert captured.runtime.runner.num_replayed - before == len(STEPS)


def random_steps_are_the_eager_ones(make: Make, folder: Path) -> None:
    """Decode, short and long steps of any rows, in which sequences end and others begin in their place."""
    draw = Random(5)
    both = [Rows(each, [5, 11, 3, 8, 1, 2, 7]) for each in (eager_of(make, folder), runtime_of(make, folder))]
    for number in range(40):
        indices = draw.sample(range(7), draw.randint(1, 7))
        longest = draw.choice([1, 1, 1, 3, 8, 12]) if len(indices) < 4 else 1
        for index in indices:
            if both[0].lens[index] + longest > 60:
                for rows in both:
                    rows.restart(index)
        tokens = [[draw.randrange(3, VOCAB) for _ in range(draw.randint(1, longest))] for _ in indices]
        expected, found = (rows.forward(indices, tokens) for rows in both)
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3), f"step {number} is not the eager one"
    assert both[1].runtime.runner.num_replayed > 25


def padding_touches_no_live_page(make: Make, folder: Path) -> None:
    rows = Rows(runtime_of(make, folder), [5, 11, 3, 8, 1])
    planes = [pool.plane(name) for pool in rows.runtime.store.pools for name in ("k", "v")]
    planned = rows.plan((0, 1, 2, 3, 4), [[1]] * 5)
    before = [plane.clone() for plane in planes]
    rows.runtime.runner.forward(planned)
    written = [rows_of.write_slots[:5].tolist() for rows_of in planned.batch.pools.values() for _ in ("k", "v")]
    for plane, old, slots in zip(planes, before, written, strict=True):
        per_slot = (plane != old) & ~(plane.isnan() & old.isnan())
        changed = per_slot.flatten(2).any(2).any(0).nonzero().flatten().tolist()
        assert set(changed) <= {*slots, PADDING_SLOT}, "a slot was written that is no row's of the step"
        expected = {slot for pool_row in planned.batch.pools.values() for slot in pool_row.write_slots[5:].tolist()}
        assert expected == {PADDING_SLOT}, "padding tokens write somewhere else than the padding slot"


def a_stale_bucket_is_not_replayed(make: Make, folder: Path) -> None:
    rows = Rows(runtime_of(make, folder), [5, 11])
    older = rows.plan((0,), [[1]])
    newer = rows.plan((1,), [[2]])
    assert older.batch.memory is newer.batch.memory
    assert raises_stale(rows.runtime, older), "a bucket was replayed with another batch in it"
    rows.runtime.runner.forward(newer)
    stale = rows.plan((0,), [[1]])
    rows.runtime.store.trim_row(rows.rows[0], 0)
    assert raises_stale(rows.runtime, stale), "a batch was replayed whose pages changed owner"


def raises_stale(runtime: Runtime, planned: PlannedBatch) -> bool:
    try:
        runtime.runner.forward(planned)
    except StalePlanError:
        return True
    return False


def logits_outlive_the_next_step(make: Make, folder: Path) -> None:
    rows = Rows(runtime_of(make, folder), [5, 11, 3])
    first = rows.forward((0, 1, 2), [[1]] * 3)
    kept = first.clone()
    rows.forward((0, 1, 2), [[2]] * 3)
    assert torch.equal(first, kept), "the next replay overwrote the logits of the one before"


def a_bucket_is_planned_once_before_it_is_captured(make: Make, folder: Path) -> None:
    planned: list[int] = []
    recorded: list[int] = []

    def plan(planner: Planner, batch: Batch) -> PlannedBatch:
        planned.append(id(batch.memory))
        return plan_now(planner, batch)

    def capture(runner: Runner, step: PlannedBatch, recorder: Recorder) -> None:
        recorded.append(planned.count(id(step.batch.memory)))
        capture_now(runner, step, recorder)
        assert planned.count(id(step.batch.memory)) == recorded[-1], "planned inside the capture"

    plan_now, capture_now = Planner.plan, Runner.capture
    with patch.object(Planner, "plan", plan), patch.object(Runner, "capture", capture):
        runtime = runtime_of(make, folder)
    made = (len(runtime.graphs.buckets), recorded, runtime.planner.num_rebuilt)
    assert made == (7, [1] * 7, 0), f"expected 7 buckets, each planned once before its capture, got {made}"


def eager_steps_move_nothing_that_a_graph_reads(make: Make, folder: Path) -> None:
    """A long prompt grows the eager plan buffers between two replays."""
    rows = Rows(runtime_of(make, folder), [5, 11])
    eager = Rows(eager_of(make, folder), [5, 11])
    for each in (rows, eager):
        each.forward((0, 1), [[1], [2]])
    memory = rows.runtime.planner._memory[MAIN_LANE]
    memory.take("much", (4 * memory._block.numel(),), torch.uint8)
    for each in (rows, eager):
        each.forward((0,), [random_prompts([20])[0]])
    found, expected = rows.forward((0, 1), [[3], [4]]), eager.forward((0, 1), [[3], [4]])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), "an eager step changed what a graph reads"


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        check.__name__: check
        for check in (
            answers_are_those_of_eager_steps,
            a_step_of_five_rows_in_a_bucket_of_eight_is_the_eager_one,
            random_steps_are_the_eager_ones,
            padding_touches_no_live_page,
            a_stale_bucket_is_not_replayed,
            logits_outlive_the_next_step,
            a_bucket_is_planned_once_before_it_is_captured,
            eager_steps_move_nothing_that_a_graph_reads,
        )
    }
)
