"""`Check`, and the `Trial` that a check works with: rigs of the plainest kind, and comparison with the oracle.

A check is about one thing. Everything else in its rigs is as plain as possible, so that a backend that gets only that
one thing wrong fails that check and no other.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from sightline.attention.dimensions import Point
from sightline.attention.groups import Lenders
from sightline.attention.kinds import ENTRY_KINDS, STATE_KINDS, Feature, SpecKind
from sightline.attention.oracle.dtypes import _DTYPES, cache_dtypes, compute_dtypes
from sightline.attention.spec import AttentionSpec
from sightline.cache.layout import Layout
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.batch import MaskKind
from sightline.testing.conformance.compressed_steps import CompressedIndexStep, CompressedStep
from sightline.testing.conformance.index_steps import IndexStep
from sightline.testing.conformance.layer_step import Asked, HostOutput, LayerStep
from sightline.testing.conformance.problem import Problem
from sightline.testing.conformance.rig import (
    GARBAGE_VALUE,
    PLAIN_SCALES,
    AttentionRig,
    Memory,
    RigSetting,
    Row,
    Subject,
    Unused,
)
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.state_steps import StateStep
from sightline.testing.conformance.steps import Step

_T = TypeVar("_T")
_TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Absolute and relative error that rounding weights and outputs once may cause, with a margin."""
_LSE_TOLERANCE = 1e-4
"""The LSE is float32 whatever the dtype of the inputs: only scores are rounded."""


_PAGED_STEPS: Mapping[SpecKind, type[Step]] = {**dict.fromkeys(ENTRY_KINDS, Step), SpecKind.INDEX: IndexStep}
_COMPRESSED_STEPS: Mapping[SpecKind, type[CompressedStep]] = {
    SpecKind.COMPRESSED: CompressedStep,
    SpecKind.COMPRESSED_INDEX: CompressedIndexStep,
}
_STATE_STEPS: Mapping[SpecKind, type[StateStep]] = {
    **dict.fromkeys(STATE_KINDS, StateStep),
    **_COMPRESSED_STEPS,
}
STEPS: Mapping[SpecKind, type[LayerStep]] = {**_PAGED_STEPS, **_STATE_STEPS}
"""The steps of each kind."""


class CheckFailed(Exception):  # noqa: N818 - the name is the condition
    """A backend did not do what its capability row, or the contract, says."""


class Effort(Enum):
    """How many of its cases a check tries."""

    QUICK = "quick"
    """A few, for use while a backend is written. Proves nothing."""
    FULL = "full"
    """All of them."""


@dataclass
class CheckProgress:
    """What a check has done so far."""

    num_steps: int = 0
    """Steps that were compared with the oracle."""
    case: str = ""
    """A description of what is being tried, for the report of a failure."""
    points: list[Point] = field(default_factory=list)
    """The cases that passed, as points of `attention.coverage`."""


@dataclass(frozen=True)
class CaseShare:
    """Every `count`-th case of a check, from case `number` on, so that several processes can divide a check."""

    number: int
    count: int

    def of(self, cases: Sequence[_T]) -> Sequence[_T]:
        return cases[self.number :: self.count]


WHOLE = CaseShare(0, 1)


class Trial:
    """One check of one subject, or a share of its cases."""

    def __init__(
        self,
        subject: Subject,
        effort: Effort,
        samples: Samples,
        dtype: torch.dtype | None = None,
        cache_dtype: torch.dtype | None = None,
        progress: CheckProgress | None = None,
        share: CaseShare = WHOLE,
    ) -> None:
        """By default in the row's first dtype, with a cache of the same dtype if the row declares it."""
        self.subject = subject
        self.row = subject.capability
        self.problem: Any = subject.problem
        """The problem of the subject's kind."""
        self.features = subject.features
        """Features that the row declares and the kind of attention has."""
        self.effort = effort
        self.samples = samples = samples.fitting(self.problem)
        self.progress = progress or CheckProgress()
        self.share = share
        """The cases that this trial tries, if the check can be divided."""
        caches, computed = cache_dtypes(self.row), compute_dtypes(self.row)
        if not caches or not computed:
            fail(f"expected a row with one of {_DTYPES} to compute in and to keep, got {self.row}")
        self.dtype = dtype or computed[0]
        self.cache_dtype = cache_dtype or (self.dtype if self.dtype in caches else caches[0])
        rounded = self.problem.roundings * _TOLERANCE[self.dtype]
        self.tolerance = rounded * (self.problem.half_slack if self.dtype.itemsize == 2 else 1.0)
        """Absolute and relative, for outputs."""
        exact_scores = self.problem.roundings == 1
        self.lse_tolerance = _LSE_TOLERANCE if exact_scores else max(_LSE_TOLERANCE, rounded)
        self.page_size = samples.of_page_sizes(self.row)[0]
        plain = self.problem.plain(
            samples.of_head_dims(self.row), samples.of_group_sizes(self.row), self.row.expanded_dims
        )
        self.plain: Any = self.problem.having(plain, self.row.only_with)
        """The plainest spec that the row allows."""

    def sized(self, head_dim: int) -> Any:
        """Returns the plain spec with another head dimension and the usual scale for it."""
        return self.spec(head_dim, self.plain.group_size, 2)

    def spec(self, head_dim: int, group_size: int, kv_heads: int) -> Any:
        """Returns a spec of that geometry that the row serves."""
        spec = self.problem.spec(head_dim, group_size, kv_heads, self.row.expanded_dims)
        return self.problem.having(spec, self.row.only_with)

    def step(self, bench: AttentionRig, rows: Sequence[Row], **options: Any) -> LayerStep:
        """Makes a step of the subject's kind on a rig. Takes the options of `LayerStep`."""
        return STEPS[self.subject.kind](bench, rows, **options)

    def paged_step(self, bench: AttentionRig, rows: Sequence[Row], **options: Any) -> Step:
        """Makes a step of a kind that has pages. Takes the options of `LayerStep`."""
        return _PAGED_STEPS[self.subject.kind](bench, rows, **options)

    def state_step(self, bench: AttentionRig, rows: Sequence[Row], **options: Any) -> StateStep:
        """Makes a step of a kind that has states. Takes the options of `LayerStep`."""
        return _STATE_STEPS[self.subject.kind](bench, rows, **options)

    def compressed_step(self, bench: AttentionRig, rows: Sequence[Row], **options: Any) -> CompressedStep:
        """Makes a step of a kind that compresses tokens. Takes the options of `LayerStep`."""
        return _COMPRESSED_STEPS[self.subject.kind](bench, rows, **options)

    def in_dtype(self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> Trial:
        """Returns the same trial in another dtype; its progress is counted here."""
        return Trial(self.subject, self.effort, self.samples, dtype, cache_dtype, self.progress, self.share)

    def some(self, values: Sequence[_T], quick: int = 2) -> tuple[_T, ...]:
        """Returns all values, or the first `quick` of them in a quick run."""
        return tuple(values if self.effort is Effort.FULL else values[:quick])

    @property
    def setting(self) -> RigSetting:
        """The plainest setting: pages in order, zeroed memory, finite numbers in unused slots, scales of 1."""
        return RigSetting(
            page_size=self.page_size,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            cache_scales=PLAIN_SCALES,
            layout=Layout.IN_ORDER,
            unused=Unused.GARBAGE,
            memory=Memory.ZEROS,
            max_seq_len=max(512, 8 * self.page_size),
            max_step_tokens=max(512, 5 * self.page_size),
        )

    def bench(
        self, *specs: AttentionSpec, setting: RigSetting | None = None, lenders: Lenders | None = None
    ) -> AttentionRig:
        specs, setting = specs or (self.plain,), setting or self.setting
        self.progress.case = "building for " + describe(self.problem, setting, *specs)
        return AttentionRig(self.subject, specs, setting, lenders)

    def run(self, step: LayerStep, needs: frozenset[Feature] = frozenset()) -> HostOutput:
        """Runs a step and notes it in the progress."""
        self.progress.case = describe_step(step)
        return step.run(needs)

    def try_step(self, step: LayerStep, needs: frozenset[Feature] = frozenset()) -> HostOutput:
        """Runs a step and compares its output, LSE and cache writes with the oracle."""
        answer = self.run(step, needs)
        self.hold(step, answer)
        self.require_lse(step, answer, wanted=Feature.LSE in needs)
        return answer

    def require_written(self, step: LayerStep, expected: HostOutput | None = None) -> None:
        """Fails unless what the step computes for later steps is in the cache. Does nothing for a TRANSIENT step."""
        if not step.batch.pools:
            return
        unwritten = step.unwritten(step.expected() if expected is None else expected, self.tolerance)
        if unwritten is not None:
            fail(unwritten)

    def require_lse(self, step: LayerStep, answer: HostOutput, *, wanted: bool) -> None:
        """Fails unless the LSE is returned exactly if it is wanted, as float32 [num_tokens, num_q_heads]."""
        self.require((answer.lse is not None) == wanted, f"expected {'the' if wanted else 'no'} LSE, got {answer.lse}")
        if answer.lse is not None:
            got = (answer.lse.dtype, tuple(answer.lse.shape))
            expected = (torch.float32, (step.batch.num_tokens, step.spec.num_q_heads))
            self.require(got == expected, f"expected an LSE of {expected}, got {got}")

    def try_rows(
        self,
        rows: Sequence[Row],
        spec: AttentionSpec | None = None,
        setting: RigSetting | None = None,
        needs: frozenset[Feature] = frozenset(),
    ) -> None:
        """Runs and compares one step with these rows on a new rig."""
        self.try_step(self.step(self.bench(spec or self.plain, setting=setting), rows), needs)

    def hold(self, step: LayerStep, answer: HostOutput, what: str = "", asked: Asked | None = None) -> None:
        """Compares an answer with the oracle's, and the cache with the step's new entries.

        If only some tokens are `asked` about, the outputs of the others must be finite.
        """
        self.progress.num_steps += 1
        self.progress.case = describe_step(step)
        expected = self.agree(step, answer, what, asked)
        if asked is not None:
            num_tokens = sum(row.query_len for row in step.rows)
            self.require(
                bool(answer.out[:num_tokens].isfinite().all()),
                f"expected a finite output{f' ({what})' if what else ''}, got NaN or infinity in it",
            )
        self.require_written(step, expected)
        self.require_unspoiled(step)

    def agree(self, step: LayerStep, answer: HostOutput, what: str = "", asked: Asked | None = None) -> HostOutput:
        """Compares an answer with the oracle's, which it returns. Does not look at the cache."""
        expected = step.expected(asked)
        num_tokens = sum(row.query_len for row in step.rows)
        places = torch.arange(num_tokens) if asked is None else step.places(asked)
        subject = f" ({what})" if what else ""
        expected = step.admitted(answer.out[places], expected, asked)
        self.compare(answer.out[places], expected.out, f"an output{subject}", step, places=places)
        if answer.lse is not None and expected.lse is not None:
            told = f"an LSE{subject}"
            self.compare(answer.lse[places], expected.lse, told, step, self.lse_tolerance, places)
        return expected

    def require_unspoiled(self, step: LayerStep) -> None:
        """Fails if something has changed that no step may change."""
        spoiled = step.spoiled()
        self.require(spoiled is None, spoiled or "")

    def compare(
        self,
        got: Tensor,
        expected: Tensor,
        what: str,
        step: LayerStep | None = None,
        tolerance: float | None = None,
        places: Tensor | None = None,
    ) -> None:
        """Fails unless the numbers agree within the tolerance. -inf equals -inf; NaN equals nothing.

        `places` are the indices of the compared tokens in the step.
        """
        if got.shape != expected.shape:
            fail(f"expected {what} of shape {tuple(expected.shape)}, got {tuple(got.shape)}")
        tolerance = tolerance or self.tolerance
        wanted = expected.float()
        error = torch.where(got.float() == wanted, 0.0, (got.float() - wanted).abs())
        # A tolerance relative to an infinite number would accept anything.
        wrong = ~(error <= tolerance * (1 + wanted.abs().masked_fill(wanted.isinf(), 0.0)))
        if wrong.any():
            first = tuple(int(index) for index in wrong.nonzero()[0])
            place = _place(first, wrong, step, places)
            fail(
                f"expected {what} within {tolerance:g} of the oracle, got {int(wrong.sum())} of {wrong.numel()} "
                f"numbers beyond it; the first, {place}: expected {float(wanted[first]):.6g}, "
                f"got {_told(float(got[first]))}"
            )

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            fail(otherwise)


def fail(message: str) -> NoReturn:
    raise CheckFailed(message)


def _place(first: tuple[int, ...], wrong: Tensor, step: LayerStep | None, places: Tensor | None) -> str:
    """Says where the first wrong number is, and which rows have any."""
    if step is None:
        return f"at {first}"
    ends = list(itertools.accumulate(row.query_len for row in step.rows))
    place = first[0] if places is None else int(places[first[0]])
    row = bisect.bisect_right(ends, place)
    lengths = step.rows[row]
    token = place - (ends[row] - lengths.query_len)
    found = wrong.flatten(1).any(1)
    tokens = (found.nonzero().flatten() if places is None else places[found]).tolist()
    rows = sorted({bisect.bisect_right(ends, each) for each in tokens})
    others = f"; rows with wrong numbers: {', '.join(map(str, rows))}" if len(step.rows) > 1 else ""
    return (
        f"row {row} ({lengths.context_len}+{lengths.query_len}), new token {token}, "
        f"{step.names_of_numbers[0]} {first[1]}"
        f"{f', {step.names_of_numbers[1]} {first[2]}' if len(first) > 2 else ''}{others}"
    )


def _told(got: float) -> str:
    """Formats a number, with a hint if it looks like an unused slot's."""
    hint = f" (values in slots of no row are ±{GARBAGE_VALUE:g} here)" if abs(got) > GARBAGE_VALUE / 2 else ""
    return f"{got:.6g}{hint}"


def describe_step(step: LayerStep) -> str:
    """Describes a step in one line."""
    rows = ", ".join(f"{row.context_len}+{row.query_len}" for row in step.rows)
    masks = {row.mask.kind.value for row in step.rows} - {MaskKind.CAUSAL.value}
    policy = "BORROWED; " if step.layer in step.bench.lenders else "" if step.batch.pools else "TRANSIENT; "
    return f"{policy}rows (context+new) {rows or 'none'}{''.join(f', {mask}' for mask in sorted(masks))}; " + describe(
        step.problem, step.bench.setting, step.spec
    )


def describe(problem: Problem[Any, Any], setting: RigSetting, *specs: AttentionSpec) -> str:
    """Describes a rig in one line."""
    told = [problem.describe(spec) for spec in specs]
    cache_dtype = setting.cache_dtype or setting.dtype
    scales = f" scaled by {', '.join(map(str, setting.cache_scales))}" if cache_dtype in SCALED_DTYPES else ""
    dtypes = f"{setting.dtype}, cache {cache_dtype}{scales}".replace("torch.", "")
    return f"{' and '.join(dict.fromkeys(told))}; page size {setting.page_size}, {setting.layout.value}; {dtypes}"


def _never(subject: Subject) -> None:
    del subject


@dataclass(frozen=True)
class Check:
    """One property that the kit proves of a backend."""

    name: str
    proves: str
    """One sentence."""
    run: Callable[[Trial], None]
    """Raises `CheckFailed`."""
    after: tuple[str, ...] = ()
    """Checks that it builds on. If one of them fails, this one is blocked."""
    excused: Callable[[Subject], str | None] = _never
    """Returns why a subject need not pass (not declared, or no room on the device), or None."""
    kinds: frozenset[SpecKind] = frozenset(SpecKind)
    """The kinds of attention that it applies to."""
    alone: bool = False
    """True if it needs so much device memory that no other process may use the device meanwhile."""
    num_shares: int = 1
    """How many processes can divide it. Above 1, it tries only the cases of `trial.share`."""

    def __post_init__(self) -> None:
        if self.num_shares < 1:
            raise ValueError(f"expected a check of at least one share, got {self.num_shares} of {self.name}")


def check(*after: str, name: str | None = None, **options: Any) -> Callable[[Callable[[Trial], None]], Check]:
    """Turns a function into a `Check` of the same name that proves what the function's docstring says.

    Underscores of the name become hyphens. An item of `after` may name several checks, separated by spaces. `options`
    are the other fields of `Check`.
    """

    def made(run: Callable[[Trial], None]) -> Check:
        proves = " ".join((run.__doc__ or "").split()).removesuffix(".")
        return Check(name or run.__name__.replace("_", "-"), proves, run, tuple(" ".join(after).split()), **options)

    return made


def needs_feature(feature: Feature) -> Callable[[Subject], str | None]:
    """Excuses subjects that do not declare the feature, or whose kind of attention does not have it."""

    def excused(subject: Subject) -> str | None:
        if feature not in subject.problem.features:
            return f"{subject.kind.value} attention has no {feature.value}"
        return None if feature in subject.features else f"{feature.value} is not declared"

    return excused


def ragged_rows(page: int) -> list[Row]:
    """Rows with contexts around a page's border, and with one and several new tokens, in no order."""
    contexts = [0, 1, max(page - 1, 0), page, page + 1, 3 * page + 2]
    decode = [Row(context, 1) for context in contexts]
    prefill = [Row(page + 1, 7), Row(0, 11), Row(0, 1), Row(1, 5), Row(0, 11)]
    return [prefill[0], *decode[:3], prefill[1], *decode[3:], *prefill[2:]]


def masked(rows: Sequence[Row], **changes: object) -> list[Row]:
    """Returns the rows with the same fields changed in each."""
    return [replace(row, **changes) for row in rows]  # type: ignore[arg-type]
