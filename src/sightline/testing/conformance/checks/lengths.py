"""Lengths: contexts, new tokens, rows of different lengths in one step, empty rows and padding."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import HostLengths
from sightline.attention.kinds import PAGED_KINDS, Feature
from sightline.core.batch import FULL
from sightline.core.lengths import Lengths
from sightline.testing.conformance.rig import Row, Subject
from sightline.testing.conformance.trial import Trial, check, ragged_rows


def _needs_exact(subject: Subject) -> str | None:
    exact = subject.capability.host_lengths is HostLengths.EXACT
    return "the row declares that it needs exact lengths on the host" if exact else None


@check("first-read", "write-slots", kinds=PAGED_KINDS)
def causal(trial: Trial) -> None:
    """In a fresh prompt, scores, their scale and the softmax are right; a query sees itself and what precedes it."""
    for query_len in trial.some((5, 1, trial.page_size, 2)):
        trial.try_rows([Row(0, query_len)])


@check("causal", kinds=PAGED_KINDS)
def context(trial: Trial) -> None:
    """The whole context is read, and nothing else, for rows that end with a page."""
    page = trial.page_size
    for context_len, query_len in trial.some(((page - 1, 1), (page, page), (3 * page - 1, 1), (page - 1, page + 1)), 3):
        trial.try_rows([Row(context_len, query_len)])


@check("context", kinds=PAGED_KINDS)
def last_page(trial: Trial) -> None:
    """Contexts of 0, 1, page − 1, page, page + 1 and more tokens work, with one new token and with many."""
    page = trial.page_size
    for context_len in (0, 1, max(page - 1, 0), page, page + 1, 3 * page + 2):
        for query_len in trial.some((1, 5, page + 3)):
            trial.try_rows([Row(context_len, query_len)])


@check("last-page prompts state-rows")
def ragged(trial: Trial) -> None:
    """Rows of all lengths may be in one step, in any order."""
    rows = ragged_rows(trial.page_size)
    trial.try_rows(rows)
    trial.try_rows(rows[::-1])
    trial.try_rows([Row(trial.page_size, 1), Row(3, 1), Row(trial.page_size + 1, 1), Row(2, 1)])
    for count in trial.some((2, 7, 16)):
        trial.try_rows([Row(3 * index % 40, 1 + 5 * index % 9) for index in range(count)])


@check("ragged", "page-order", "kept-places")
def next_batch(trial: Trial) -> None:
    """A step takes nothing from the step before it."""
    bench = trial.bench()
    page = trial.page_size
    # Three rows and nine new tokens in each step.
    for seed, lengths in enumerate([((9, 3), (0, 5), (page, 1)), ((2, 1), (page + 3, 1), (0, 7)), ((0, 3),) * 3]):
        step = trial.step(bench, [Row(*length) for length in lengths], seed=seed)
        trial.try_step(step)
        following = step.next_step(3, seed=seed + 10)
        trial.try_step(following)
        for table_row in step.table_rows:
            bench.store.close_row(table_row)
    # The same lengths again, with other rows.
    for seed in range(2):
        trial.try_step(trial.step(bench, [Row(9, 3), Row(0, 5), Row(page, 1)], seed=20 + seed))


@check("split-merge", "ragged", kinds=PAGED_KINDS)
def long_beside_short(trial: Trial) -> None:
    """A row of thousands of keys may be beside rows of a few."""
    longest = 4000 if trial.subject.device.compute_capability is None else 20000
    setting = replace(trial.setting, max_seq_len=longest + 64, max_rows=8)
    trial.try_rows([Row(2, 1), Row(longest, 1), Row(40, 1), Row(0, 3)], setting=setting)
    trial.try_rows([Row(longest - 9, 3), *[Row(index, 1) for index in range(7)]], setting=setting)


@check("ragged")
def padding(trial: Trial) -> None:
    """Padding tokens do not affect any row, and their output is left unchanged."""
    for num_rows, num_tokens in trial.some(((2, 6), (0, 1), (3, 0))):
        for last in (Row(4, 3), Row(trial.page_size + 1, 1)):
            step = trial.step(trial.bench(), [Row(3, 2), Row(0, 5), last])
            real = step.batch.num_tokens
            step.pad(num_rows, num_tokens, torch.nan)
            answer = trial.try_step(step)
            trial.require(
                bool(answer.out[real:].isnan().all()),
                f"expected the output of {num_tokens} padding tokens to be unchanged, got numbers",
            )


@check("ragged")
def idle(trial: Trial) -> None:
    """A step without rows, with and without padding, changes nothing, and the step after it is right."""
    bench = trial.bench()
    going_on = trial.step(bench, [Row(3, 5), Row(0, 4)], seed=5)
    trial.try_step(going_on)
    for num_rows, num_tokens in ((0, 0), (2, 3)):
        step = trial.step(bench, [])
        step.pad(num_rows, num_tokens, torch.nan)
        answer = trial.run(step)
        trial.require(
            bool(answer.out.isnan().all()), "expected an idle step to leave the output unchanged, got numbers"
        )
        trial.try_step(trial.step(bench, [Row(9, 2), Row(0, 4)]))
        # The cache is as it was before the idle step.
        going_on = going_on.next_step(1, seed=6)
        trial.try_step(going_on)


@check("empty-rows", "padding", "window", excused=_needs_exact, kinds=PAGED_KINDS)
def host_bounds(trial: Trial) -> None:
    """Lengths may be known to the device only, with loose upper bounds on the host."""
    window = [replace(trial.plain, window=9)] if Feature.WINDOW in trial.features else []
    empty = [Row(5, 0), Row(3, 2), Row(0, 0), Row(trial.page_size, 1), Row(trial.page_size + 1, 0)]
    for spec in (trial.plain, *window):
        for slack in trial.some((3, 0, 2 * trial.page_size)):
            ragged = ragged_rows(trial.page_size)
            for rows, padding in ((ragged, (0, 0)), (ragged, (2, 5)), (empty, (0, 0))):
                step = trial.step(trial.bench(spec), rows)
                step.pad(*padding, torch.nan)
                step.batch = step.batch.bounded(
                    _loosened(step.batch.query_lens, slack), _loosened(step.batch.context_lens, slack), known=False
                )
                trial.try_step(step)


def _loosened(lengths: Lengths, slack: int) -> tuple[int, ...]:
    """Returns the bounds, raised by `slack`."""
    return tuple(bound + slack for bound in lengths.bound)


@check("ragged", "idle")
def empty_rows(trial: Trial) -> None:
    """Rows without new tokens, with and without a context, may be anywhere in a step."""
    page = trial.page_size
    rows = [Row(5, 0), Row(3, 2), Row(0, 0), Row(page, 1), Row(page + 1, 0), Row(0, 3), Row(9, 0)]
    trial.try_rows(rows)
    trial.try_rows(rows[::-1])
    trial.try_rows([Row(page + 1, 0)])


@check("long-prompts", "padding")
def limits(trial: Trial) -> None:
    """A step may have as many rows and tokens, and a row as many entries, as the limits allow."""
    page = trial.page_size
    # The last page of the longest row is not full, unless a page holds one entry.
    longest = 5 * page + (3 if page > 3 else 1)
    setting = replace(trial.setting, max_seq_len=longest, max_rows=5, max_step_tokens=longest + 4)
    trial.try_rows([Row(longest - 1, 1)], setting=setting)
    trial.try_rows([Row(longest - 4, 4), Row(longest - 1, 1)], setting=setting)
    trial.try_rows([Row(longest - 1, 1), Row(0, longest), Row(longest - 1, 1), Row(2, 1), Row(0, 1)], setting=setting)
    trial.try_step(trial.step(trial.bench(setting=setting), [Row(0, longest), *[Row(0, 1)] * 4], transient=True))
    step = trial.step(trial.bench(setting=setting), [Row(2, 1)])
    step.pad(4, longest + 3, torch.nan)
    trial.try_step(step)


@check("ragged")
def many_rows(trial: Trial) -> None:
    """A step may have hundreds of rows."""
    for count in trial.some((33, 130, 300), 1):
        setting = replace(trial.setting, max_rows=count, max_seq_len=4 * trial.page_size + 64)
        trial.try_rows([Row(7 * index % 40, 1 + (index % 5 == 3)) for index in range(count)], setting=setting)


@check("long-beside-short", "window", "non-causal", "transient", "ways-together")
def long_prompts(trial: Trial) -> None:
    """Prompts and chunks of hundreds of new tokens are right, also with windows and with full masks."""
    setting = replace(trial.setting, max_seq_len=1024, max_rows=4)
    specs = [trial.plain]
    if Feature.WINDOW in trial.features:
        specs += [replace(trial.plain, window=size) for size in (20, 150)]
    for spec in trial.some(specs, 1):
        for rows in trial.some(([Row(130, 70), Row(0, 65)], [Row(0, 300)], [Row(700, 129), Row(130, 140)]), 1):
            trial.try_rows(rows, spec, setting)
        trial.try_step(trial.step(trial.bench(spec, setting=setting), [Row(0, 70), Row(0, 129)], transient=True))
        if Feature.NON_CAUSAL in trial.features:
            trial.try_rows([Row(130, 70, FULL), Row(0, 65, FULL)], spec, setting)
