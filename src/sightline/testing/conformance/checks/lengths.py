"""Lengths: what a row holds, what is new, what stands beside it, what belongs to nobody."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import HostLengths
from sightline.attention.spec import Feature
from sightline.core.batch import FULL
from sightline.core.lengths import Lengths
from sightline.testing.conformance.rig import Row, Subject
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Check, Trial, ragged_rows


def causal(trial: Trial) -> None:
    for query_len in trial.some((5, 1, trial.page_size, 2)):
        trial.try_rows([Row(0, query_len)])


def context(trial: Trial) -> None:
    page = trial.page_size
    for context_len, query_len in trial.some(((page - 1, 1), (page, page), (3 * page - 1, 1), (page - 1, page + 1)), 3):
        trial.try_rows([Row(context_len, query_len)])


def last_page(trial: Trial) -> None:
    page = trial.page_size
    for context_len in (0, 1, max(page - 1, 0), page, page + 1, 3 * page + 2):
        for query_len in trial.some((1, 5, page + 3)):
            trial.try_rows([Row(context_len, query_len)])


def ragged(trial: Trial) -> None:
    rows = ragged_rows(trial.page_size)
    trial.try_rows(rows)
    trial.try_rows(rows[::-1])
    trial.try_rows([Row(trial.page_size, 1), Row(3, 1), Row(trial.page_size + 1, 1), Row(2, 1)])
    for count in trial.some((2, 7, 16)):
        trial.try_rows([Row(3 * index % 40, 1 + 5 * index % 9) for index in range(count)])


def next_batch(trial: Trial) -> None:
    bench = trial.bench()
    page = trial.page_size
    # Three rows and nine tokens each time.
    for seed, lengths in enumerate([((9, 3), (0, 5), (page, 1)), ((2, 1), (page + 3, 1), (0, 7)), ((0, 3),) * 3]):
        step = Step(bench, [Row(*length) for length in lengths], seed=seed)
        trial.try_step(step)
        following = step.next_step(3, seed=seed + 10)
        trial.try_step(following)
        for table_row in step.table_rows:
            bench.store.close_row(table_row)
    # The same lengths again, of other rows.
    for seed in range(2):
        trial.try_step(Step(bench, [Row(9, 3), Row(0, 5), Row(page, 1)], seed=20 + seed))


def long_beside_short(trial: Trial) -> None:
    longest = 4000 if trial.subject.device.compute_capability is None else 20000
    setting = replace(trial.setting, max_seq_len=longest + 64, max_rows=8)
    trial.try_rows([Row(2, 1), Row(longest, 1), Row(40, 1), Row(0, 3)], setting=setting)
    trial.try_rows([Row(longest - 9, 3), *[Row(index, 1) for index in range(7)]], setting=setting)


def padding(trial: Trial) -> None:
    for num_rows, num_tokens in trial.some(((2, 6), (0, 1), (3, 0))):
        for last in (Row(4, 3), Row(trial.page_size + 1, 1)):
            step = Step(trial.bench(), [Row(3, 2), Row(0, 5), last])
            real = step.batch.num_tokens
            step.pad(num_rows, num_tokens, torch.nan)
            answer = trial.try_step(step)
            trial.require(
                bool(answer.out[real:].isnan().all()),
                f"expected the output of {num_tokens} padding tokens to be left as it was, got numbers written there",
            )


def idle(trial: Trial) -> None:
    bench = trial.bench()
    going_on = Step(bench, [Row(3, 5), Row(0, 4)], seed=5)
    trial.try_step(going_on)
    for num_rows, num_tokens in ((0, 0), (2, 3)):
        step = Step(bench, [])
        step.pad(num_rows, num_tokens, torch.nan)
        answer = trial.run(step)
        trial.require(
            bool(answer.out.isnan().all()), "expected an idle step to leave the output as it was, got numbers in it"
        )
        # What comes after an idle step is right.
        trial.try_step(Step(bench, [Row(9, 2), Row(0, 4)]))
        # And what was there before it is there after it.
        going_on = going_on.next_step(1, seed=6)
        trial.try_step(going_on)


def host_bounds(trial: Trial) -> None:
    window = [replace(trial.plain, window=9)] if Feature.WINDOW in trial.features else []
    empty = [Row(5, 0), Row(3, 2), Row(0, 0), Row(trial.page_size, 1), Row(trial.page_size + 1, 0)]
    for spec in (trial.plain, *window):
        for slack in trial.some((3, 0, 2 * trial.page_size)):
            ragged = ragged_rows(trial.page_size)
            for rows, padding in ((ragged, (0, 0)), (ragged, (2, 5)), (empty, (0, 0))):
                step = Step(trial.bench(spec), rows)
                step.pad(*padding, torch.nan)
                step.batch = step.batch.bounded(
                    _loosened(step.batch.query_lens, slack), _loosened(step.batch.context_lens, slack), known=False
                )
                trial.try_step(step)


def _loosened(lengths: Lengths, slack: int) -> tuple[int, ...]:
    """Bounds above the lengths."""
    return tuple(bound + slack for bound in lengths.bound)


def _needs_exact(subject: Subject) -> str | None:
    exact = subject.capability.host_lengths is HostLengths.EXACT
    return "it declares that it needs exact lengths on the host" if exact else None


def empty_rows(trial: Trial) -> None:
    page = trial.page_size
    rows = [Row(5, 0), Row(3, 2), Row(0, 0), Row(page, 1), Row(page + 1, 0), Row(0, 3), Row(9, 0)]
    trial.try_rows(rows)
    trial.try_rows(rows[::-1])
    trial.try_rows([Row(page + 1, 0)])


def limits(trial: Trial) -> None:
    page = trial.page_size
    # The last page of the longest row is never full, where a page can be.
    longest = 5 * page + (3 if page > 3 else 1)
    setting = replace(trial.setting, max_seq_len=longest, max_rows=5, max_step_tokens=longest + 4)
    trial.try_rows([Row(longest - 1, 1)], setting=setting)
    trial.try_rows([Row(longest - 4, 4), Row(longest - 1, 1)], setting=setting)
    trial.try_rows([Row(longest - 1, 1), Row(0, longest), Row(longest - 1, 1), Row(2, 1), Row(0, 1)], setting=setting)
    trial.try_step(Step(trial.bench(setting=setting), [Row(0, longest), *[Row(0, 1)] * 4], transient=True))
    step = Step(trial.bench(setting=setting), [Row(2, 1)])
    step.pad(4, longest + 3, torch.nan)
    trial.try_step(step)


def many_rows(trial: Trial) -> None:
    for count in trial.some((33, 130, 300), 1):
        setting = replace(trial.setting, max_rows=count, max_seq_len=4 * trial.page_size + 64)
        trial.try_rows([Row(7 * index % 40, 1 + (index % 5 == 3)) for index in range(count)], setting=setting)


def long_prompts(trial: Trial) -> None:
    setting = replace(trial.setting, max_seq_len=1024, max_rows=4)
    specs = [trial.plain]
    if Feature.WINDOW in trial.features:
        specs += [replace(trial.plain, window=size) for size in (20, 150)]
    for spec in trial.some(specs, 1):
        for rows in trial.some(([Row(130, 70), Row(0, 65)], [Row(0, 300)], [Row(700, 129), Row(130, 140)]), 1):
            trial.try_rows(rows, spec, setting)
        trial.try_step(Step(trial.bench(spec, setting=setting), [Row(0, 70), Row(0, 129)], transient=True))
        if Feature.NON_CAUSAL in trial.features:
            trial.try_rows([Row(130, 70, FULL), Row(0, 65, FULL)], spec, setting)


CHECKS = (
    Check(
        "causal",
        "a fresh prompt: scores, their scale and softmax; a query sees itself and what precedes it, no more",
        causal,
        ("first-read",),
    ),
    Check("context", "the whole context is read, and nothing but it, where rows end with a page", context, ("causal",)),
    Check(
        "last-page",
        "contexts of 0, 1, page − 1, page, page + 1 and more, with one and with many new tokens",
        last_page,
        ("context",),
    ),
    Check("ragged", "rows of all lengths in one step, in any order", ragged, ("last-page",)),
    Check("next-batch", "a step takes nothing from the step before it", next_batch, ("ragged", "page-order")),
    Check("padding", "padding tokens reach no row, and their output is left as it was", padding, ("ragged",)),
    Check("idle", "a step of no rows, with and without padding, and the step after it", idle, ("ragged",)),
    Check(
        "host-bounds",
        "lengths that only the device knows, with loose bounds on the host",
        host_bounds,
        ("empty-rows", "padding", "window"),
        _needs_exact,
    ),
    Check(
        "long-beside-short",
        "a row of thousands of keys beside rows of a few",
        long_beside_short,
        ("split-merge",),
    ),
    Check(
        "empty-rows",
        "rows of no new tokens, with and without a context, anywhere in a step",
        empty_rows,
        ("ragged", "idle"),
    ),
    Check(
        "limits",
        "as many rows, tokens and entries of a row as the limits allow",
        limits,
        ("long-prompts", "padding"),
    ),
    Check("many-rows", "hundreds of rows in a step", many_rows, ("ragged",)),
    Check(
        "long-prompts",
        "prompts and chunks of hundreds of new tokens, with windows and without a causal mask too",
        long_prompts,
        ("long-beside-short", "window", "non-causal", "transient", "ways-together"),
    ),
)
