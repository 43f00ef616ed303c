"""Checks a request's answer: its tokens, its end, its log probabilities and its cached tokens.

Knows requests and outputs. Does not know pages or the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sightline.core.request import CompletionOutput, EffectiveParams, PositionLogprobs, RequestOutput
from sightline.runner.sampling.noise import derived_seed
from sightline.scheduler.sequence import SequenceState
from sightline.testing.simulator.faults import UNBEARABLE
from sightline.testing.simulator.oracle import RAISING, SPOILING, expected_tokens, logprob, prefix_hashes
from sightline.testing.simulator.scenario import ClientSubmits

_FAILURES = {RAISING: UNBEARABLE, SPOILING: "NaN"}
"""The error of a request whose prompt has this token."""


@dataclass(eq=False)
class Attempt:
    """One submission that the engine accepted."""

    asked: ClientSubmits
    request_id: str
    params: EffectiveParams
    arrival: int
    """How many requests were accepted before it."""
    deadline: float
    """In seconds of the virtual clock; infinity if there is none."""
    num_tries: int
    """The client's tries before this one."""
    is_cancelled: bool = False
    is_gone: bool = False
    """The client disconnected, so nobody will ask for the output."""
    is_paused: bool = False
    """The client does not read."""
    admitted_at: int | None = None
    """The step in which it first ran."""
    sequences: dict[int, SequenceState] = field(default_factory=dict)
    """Continuations that have run, by index."""
    streamed: dict[int, list[int]] = field(default_factory=dict)
    """The streamed tokens of each continuation."""
    ended_streams: list[int] = field(default_factory=list)
    """Continuations whose end was streamed."""

    def goes_before(self, other: Attempt) -> bool:
        """True if it is more urgent, or equally urgent and an earlier request of the same caller."""
        mine, theirs = self.asked, other.asked
        same_line = mine.priority == theirs.priority and mine.caller == theirs.caller
        return mine.priority < theirs.priority or (same_line and self.arrival < other.arrival)

    @property
    def failures(self) -> frozenset[str]:
        """The errors that the special tokens of its prompt allow."""
        return frozenset(_FAILURES[token] for token in self.asked.prompt if token in _FAILURES)


def check_answer(
    attempt: Attempt, output: RequestOutput, *, may_abort: bool, failures: frozenset[str]
) -> Iterator[str]:
    """Yields everything that is wrong about an answer.

    A request that failed must name one of `failures`. `may_abort` is True for one that was cancelled or is late.
    """
    asked = attempt.asked
    if [answer.index for answer in output.outputs] != list(range(asked.n)):
        yield f"got continuations {[answer.index for answer in output.outputs]} of {asked.n}"
    for answer in output.outputs:
        yield from _check_tokens(attempt, answer)
        yield from _check_end(attempt.asked, answer, output.error, may_abort=may_abort)
        if answer.finish_reason == "error" and not any(failure in (output.error or "") for failure in failures):
            yield f"a request failed that should not have: {output.error}"
        if asked.streams and tuple(attempt.streamed.get(answer.index, ())) != answer.token_ids:
            yield f"a stream gave out {attempt.streamed.get(answer.index)} of the answer {answer.token_ids}"
        if asked.logprobs is not None:
            yield from _check_logprobs(asked.prompt, answer)
    if asked.streams and sorted(attempt.ended_streams) != list(range(asked.n)):
        yield f"streams of {asked.n} continuations ended: {sorted(attempt.ended_streams)}"
    whole = all(answer.finish_reason in ("stop", "length") for answer in output.outputs)
    if asked.prompt_logprobs is not None and whole:
        yield from _check_positions(asked.prompt, (output.prompt_logprobs or ())[1:], asked.prompt[1:])


def check_reuse(attempt: Attempt, num_cached: int, page_size: int, others: Sequence[Attempt]) -> Iterator[str]:
    """Yields an error unless the cached tokens of a request were left by another request of the same caller."""
    found = list(attempt.asked.prompt[:num_cached])
    if num_cached % page_size or num_cached >= len(attempt.asked.prompt):
        yield f"found {num_cached} tokens of {len(attempt.asked.prompt)}, in pages of {page_size}"
    left = (
        sequence.tokens
        for other in others
        if other is not attempt and other.asked.caller == attempt.asked.caller
        for sequence in other.sequences.values()
    )
    if num_cached and not any(tokens[:num_cached] == found for tokens in left):
        yield f"found {num_cached} tokens in the cache that no request of {attempt.asked.caller!r} had left"


def _check_tokens(attempt: Attempt, answer: CompletionOutput) -> Iterator[str]:
    params = replace(attempt.params, seed=derived_seed(attempt.params.seed, answer.index))
    expected = expected_tokens(attempt.asked.prompt, answer.token_ids, params)
    if list(answer.token_ids) != expected:
        place = next(place for place, token in enumerate(expected) if token != answer.token_ids[place])
        yield (
            f"expected token {expected[place]} after {len(attempt.asked.prompt) + place} tokens, got "
            f"{answer.token_ids[place]}: the cache that was read is not the request's own"
        )


def _check_end(asked: ClientSubmits, answer: CompletionOutput, error: str | None, *, may_abort: bool) -> Iterator[str]:
    tokens, reason = answer.token_ids, answer.finish_reason
    stop = next((place for place, token in enumerate(tokens) if token in asked.stop_token_ids), None)
    own = "stop" if stop is not None else "length" if len(tokens) == asked.max_tokens else None
    if (stop is not None and stop != len(tokens) - 1) or len(tokens) > asked.max_tokens:
        yield f"got {len(tokens)} tokens, of {asked.max_tokens}, with a stop at {stop}"
    if reason is None or (reason != own and reason != "error" and not (reason == "abort" and may_abort)):
        yield f"expected {asked.max_tokens} tokens or a stop, got {len(tokens)} and the end {reason}: {error}"
    if reason == "stop" and stop is not None and answer.stop_reason != tokens[stop]:
        yield f"expected the stop token {tokens[stop]} as the reason, got {answer.stop_reason}"


def _check_logprobs(prompt: Sequence[int], answer: CompletionOutput) -> Iterator[str]:
    history = [*prompt, *answer.token_ids]
    yield from _check_positions(history, answer.logprobs or (), answer.token_ids)


def _check_positions(
    history: Sequence[int], told: Sequence[PositionLogprobs | None], followers: Sequence[int]
) -> Iterator[str]:
    """Compares reported log probabilities with those of `followers`, the last tokens of a history."""
    if len(told) != len(followers):
        yield f"expected log probabilities of {len(followers)} tokens, got {len(told)}"
        return
    hashes = list(prefix_hashes(history))[len(history) - len(followers) - 1 : -1]
    for token, value, entry in zip(followers, hashes, told, strict=True):
        got = None if entry is None or token not in entry else entry[token].logprob
        if got is None or not math.isclose(got, logprob(value, token), abs_tol=1e-4):
            yield f"expected the log probability {logprob(value, token):.4f} of token {token}, got {got}"
            return
