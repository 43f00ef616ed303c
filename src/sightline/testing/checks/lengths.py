"""Lengths: what a row holds, what is new, what stands beside it, what belongs to nobody."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import HostLengths
from sightline.core.batch import Lengths
from sightline.testing.bench import Row, Subject
from sightline.testing.steps import Step
from sightline.testing.trial import Check, Trial, ragged_rows


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
    for num_rows, num_tokens in ((0, 0), (2, 3)):
        step = Step(bench, [])
        step.pad(num_rows, num_tokens, torch.nan)
        answer = trial.run(step)
        trial.require(
            bool(answer.out.isnan().all()), "expected an idle step to leave the output as it was, got numbers in it"
        )
        # What comes after an idle step is right.
        trial.try_step(Step(bench, [Row(9, 2), Row(0, 4)]))


def host_bounds(trial: Trial) -> None:
    for slack in trial.some((3, 0, 2 * trial.page_size)):
        step = Step(trial.bench(), ragged_rows(trial.page_size))
        step.batch = replace(
            step.batch,
            query_lens=_loosen(step.batch.query_lens, slack),
            context_lens=_loosen(step.batch.context_lens, slack),
        )
        trial.try_step(step)


def _loosen(lengths: Lengths, slack: int) -> Lengths:
    """Lengths that only the device knows, with bounds above them."""
    return Lengths(lengths.device, tuple(bound + slack for bound in lengths.bound), None)


def _needs_exact(subject: Subject) -> str | None:
    exact = subject.capability.host_lengths is HostLengths.EXACT
    return "it declares that it needs exact lengths on the host" if exact else None


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
        ("ragged",),
        _needs_exact,
    ),
    Check(
        "long-beside-short",
        "a row of thousands of keys beside rows of a few",
        long_beside_short,
        ("split-merge",),
    ),
)
