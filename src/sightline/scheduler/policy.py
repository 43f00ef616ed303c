"""The scheduling policy: a pure function from the state to the rows of the next step.

    1. pages   every running sequence needs pages for its tokens; if there are too few, those of the lowest rank
               are retracted, or held back until the step that they are in is over
    2. decode  rows with one pending token go first, so that none stalls
    3. turns   the rest of the token budget, or of the time that rows that generate may wait, goes to prompts, running
               or new, in turn: by priority, then by their callers' usage, then by arrival; among new ones of a
               priority, callers with fewer rows than others come first; a sequence that cannot be admitted is not
               overtaken
       urgency if a new sequence cannot be admitted, rows of a higher priority number give way to it
       rows    if no row or pages are free for a new sequence, the lowest-ranked row of the caller with the most rows
               gives way: only if it has at least two more than the caller of the new one, and never a more urgent one

The first in rank can have every page there is, and no request needs more, so some sequence always makes progress. (It
gives way itself only if it holds pages twice, its own and the cache's, and shares them when it is admitted again.) Each
time a row is taken, the two callers hold numbers of rows that are closer to each other, so rows are not taken back and
forth.

Knows values only, and changes none: each step returns a new `PartialDecision`. The scheduler carries the decision out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from sightline.scheduler.costs import StepLimit
from sightline.scheduler.decision import (
    Decision,
    Finding,
    Inquiry,
    RunningSequence,
    SchedulerState,
    WaitingLines,
    WaitingSequence,
)
from sightline.scheduler.tally import Holding, Tally
from sightline.scheduler.turns import QueuePosition, in_turn, usage_after
from sightline.scheduler.victims import LEAST_LEAD, victims

Entry: TypeAlias = tuple[QueuePosition, RunningSequence | WaitingSequence]
"""A prompt, running or new, and when it is its turn."""


class PartialDecision(NamedTuple):
    """A decision in progress."""

    going: tuple[RunningSequence, ...]
    """Running sequences that keep their pages, by rank."""
    held: Mapping[str, int]
    """Rows per caller, both kept and admitted."""
    tally: Tally
    num_free_rows: int
    num_tokens: int
    """Remaining token budget."""
    num_scored: int
    """Remaining tokens that may all need logits."""
    growth: Mapping[int, int]
    """Pages given to each running sequence."""
    rows: Mapping[int, int]
    """Tokens computed of each sequence."""
    limit: StepLimit | None
    """What prompts may cost; None is no limit."""
    retracted: tuple[int, ...] = ()
    sits_out: frozenset[int] = frozenset()
    """Running sequences that this step does not compute."""
    leaving: frozenset[str] = frozenset()
    """Callers of sequences that give way when a running step is over."""
    admitted: tuple[int, ...] = ()
    forked: frozenset[int] = frozenset()
    """Running sequences whose pages admitted ones share."""
    num_new: int = 0
    """Pages given to admitted sequences."""
    is_full: bool = False
    """True if a sequence that must not be overtaken could not be admitted."""
    awaited: int | None = None
    """Priority of a sequence whose admission waits for rows that are freed at the end of a step."""
    inquiry: Inquiry | None = None
    """Facts without which the draft cannot be continued."""


def decide(state: SchedulerState) -> Decision | Inquiry:
    """Returns the next step, or the facts that are missing to decide about it. Deterministic."""
    draft = give_pages(state)
    if draft.inquiry is None:
        draft = take_turns(state, decode(draft))
    return draft.inquiry or Decision(
        retracted=draft.retracted,
        growth=draft.growth,
        admitted=draft.admitted,
        num_pages=draft.num_new + sum(draft.growth.values()),
        rows=draft.rows,
    )


def give_pages(state: SchedulerState) -> PartialDecision:
    """Decides which running sequences grow and which give way."""
    draft = PartialDecision(
        state.running,
        state.held,
        state.tally,
        state.num_free_rows,
        num_tokens=state.max_step_tokens,
        num_scored=state.max_scored_tokens,
        growth={},
        rows={},
        limit=state.limit if state.generates_beside or generates(state.running) else None,
    )
    lacking = {each.arrival: each.num_lacking for each in state.running if each.num_lacking > 0 and each.num_pending}
    num_coming = state.num_coming
    while lacking and not _has_pages(draft, sum(lacking.values()) - num_coming):
        victim = draft.going[-1]
        holding = state.holdings.get(victim.arrival)
        if holding is None:
            asked = draft.going[-2 * len(draft.sits_out) - 1 :]
            return draft._replace(inquiry=Inquiry(holdings=tuple(each.arrival for each in asked)))
        if len(draft.going) == 1 and not _holds_copies(draft, victim, holding):
            break
        lacking.pop(victim.arrival, None)
        if victim.num_steps:
            draft = _hold_back(draft, victim)
            num_coming += victim.num_pages
        else:
            draft = _retract(draft, victim, holding)
    left = draft.tally.num_pages
    if sum(lacking.values()) > left:
        left += _num_unused(draft)
    growth = {}
    for arrival, count in lacking.items():
        if count <= left:
            growth[arrival] = count
            left -= count
    return draft._replace(growth=growth, sits_out=draft.sits_out.union(lacking.keys() - growth.keys()))


def decode(draft: PartialDecision) -> PartialDecision:
    """Adds rows of one token each. None of them scores a prompt: its last token predicts nothing within it."""
    arrivals = [each.arrival for each in draft.going if each.num_pending == 1]
    if draft.sits_out:
        arrivals = [arrival for arrival in arrivals if arrival not in draft.sits_out]
    rows = dict.fromkeys(arrivals[: draft.num_tokens], 1)
    limit = draft.limit
    if limit is not None:
        limit = limit.beside(len(rows), sum([each.context_len for each in draft.going if each.arrival in rows]))
    return draft._replace(rows=rows, num_tokens=draft.num_tokens - len(rows), limit=limit)


def take_turns(state: SchedulerState, draft: PartialDecision) -> PartialDecision:
    """Gives the rest of the budget to prompts, and admits waiting sequences."""
    prompts: dict[int, list[Entry]] = {}
    for each in [each for each in draft.going if each.num_pending > 1]:
        if each.arrival not in draft.sits_out:
            position = QueuePosition(each.priority, state.shares[each.caller], each.arrival)
            prompts.setdefault(each.priority, []).append((position, each))
    waiting = WaitingLines({}, {}, frozenset())
    if _can_admit(state, draft):
        if state.waiting is None:
            return draft._replace(inquiry=Inquiry(waiting=True))
        waiting = state.waiting
    usage = _usage(state, waiting)
    # If decode rows use the whole budget, a newcomer gets only the tokens that its victims would have had.
    is_crowded = draft.num_tokens <= 0
    is_open = True
    for priority in sorted(prompts.keys() | waiting.levels.keys()):
        lines = waiting.levels.get(priority, {}) if is_open else {}
        newcomers = in_turn(priority, lines, usage, draft.held)
        in_order = sorted(prompts.get(priority, ()), key=_turn)
        entries: Iterator[Entry] = heapq.merge(in_order, newcomers, key=_turn)
        for _, sequence in entries:
            if draft.num_tokens <= 0 and not is_crowded:
                return draft
            if isinstance(sequence, RunningSequence):
                draft = _continue(draft, sequence)
            elif draft.is_full and not (priority == draft.awaited and _is_behind(draft, sequence.caller)):
                # Only prompts are left.
                is_open = False
                newcomers.close()
            elif sequence.leader not in waiting.busy_leaders:
                draft = _admit(state, draft, sequence)
                if draft.inquiry is not None:
                    return _ask_ahead(draft, newcomers)
        usage = usage_after(usage, lines)
    return draft


def generates(running: Sequence[RunningSequence]) -> bool:
    """True if a row waits for its next token: with one token pending, or none while it is in flight."""
    return any(each.num_pending <= 1 for each in running)


def _turn(entry: Entry) -> QueuePosition:
    return entry[0]


def _usage(state: SchedulerState, waiting: WaitingLines) -> Mapping[str, int]:
    """Usage of every waiting caller, including all pending tokens of admitted prompts."""
    usage = dict(waiting.shares)
    if usage:
        for each in state.running:
            if each.num_pending > 1 and each.caller in usage:
                usage[each.caller] += each.num_pending
    return usage


def _can_admit(state: SchedulerState, draft: PartialDecision) -> bool:
    """True if there is a row for a waiting sequence, or one may give way, so that the queue is worth listing."""
    if not state.urgencies:
        return False
    if draft.num_free_rows or (draft.going and draft.going[-1].priority > min(state.urgencies.values())):
        return True
    most_rows: dict[int, int] = {}
    for each in draft.going:
        most_rows[each.priority] = max(most_rows.get(each.priority, 0), draft.held[each.caller])
    return any(
        draft.held.get(caller, 0) + LEAST_LEAD <= most_rows.get(priority, 0)
        for caller, priority in state.urgencies.items()
    )


def _is_behind(draft: PartialDecision, caller: str) -> bool:
    """True if the caller may take a row of the one with the most, and none of its own is on its way out."""
    lead = max(draft.held.values(), default=0) - draft.held.get(caller, 0)
    return lead >= LEAST_LEAD and caller not in draft.leaving


def _admit(state: SchedulerState, draft: PartialDecision, newcomer: WaitingSequence) -> PartialDecision:
    """Admits a waiting sequence if a row and pages are available or can be freed; otherwise the draft is full."""
    full = draft._replace(is_full=True)
    if newcomer.scores_prompt and draft.num_scored <= 0:
        return full
    if draft.is_full:
        return _hold_back_for(draft, newcomer)
    if not (draft.num_free_rows and draft.num_tokens > 0) and not any(_victims(draft, newcomer)):
        return full
    finding = state.findings.get(newcomer.arrival)
    if finding is None:
        return draft._replace(inquiry=Inquiry(findings=(newcomer.arrival,)))
    if finding.fork_of in draft.retracted:
        return full
    needed = -(-newcomer.num_tokens // state.page_size) - finding.num_pages
    if not _fits(draft, needed, finding):
        draft = _make_way(state, draft, newcomer, needed, finding)
        if draft.is_full or draft.inquiry is not None:
            return draft
    draft = draft._replace(
        num_new=draft.num_new + needed,
        num_free_rows=draft.num_free_rows - 1,
        held=_held(draft, newcomer.caller, 1),
        admitted=(*draft.admitted, newcomer.arrival),
        forked=draft.forked if finding.fork_of is None else draft.forked | {finding.fork_of},
        tally=draft.tally.shared(finding.path),
    )
    return _compute(draft, newcomer, newcomer.num_tokens - finding.num_tokens, finding.num_tokens)


def _ask_ahead(draft: PartialDecision, newcomers: Iterator[tuple[QueuePosition, WaitingSequence]]) -> PartialDecision:
    """Asks about more newcomers, as many as were admitted, so that the number of inquiries stays small."""
    if draft.inquiry is None or not draft.inquiry.findings:
        return draft
    ahead = [newcomer.arrival for _, newcomer in islice(newcomers, len(draft.admitted))]
    return draft._replace(inquiry=Inquiry(findings=(*draft.inquiry.findings, *ahead)))


def _continue(draft: PartialDecision, prompt: RunningSequence) -> PartialDecision:
    """Adds a row for a running prompt, unless it gives way or the budget is used up."""
    is_allowed = draft.num_tokens > 0 and (draft.num_scored > 0 or not prompt.scores_prompt)
    if prompt.arrival in draft.sits_out or not is_allowed:
        return draft
    return _compute(draft, prompt, prompt.num_pending, prompt.context_len)


def _compute(
    draft: PartialDecision, sequence: RunningSequence | WaitingSequence, num_pending: int, context_len: int
) -> PartialDecision:
    """Adds a row with as many of the pending tokens as the budget and the time allow."""
    count = wanted = min(num_pending, draft.num_tokens, draft.num_scored if sequence.scores_prompt else num_pending)
    limit, is_over = draft.limit, False
    if limit is not None:
        count, limit = limit.take(wanted, context_len, scored=sequence.scores_prompt)
        is_over = count < wanted or limit.is_used_up
    return draft._replace(
        rows={**draft.rows, sequence.arrival: count},
        num_tokens=0 if is_over else draft.num_tokens - count,
        num_scored=draft.num_scored - count if sequence.scores_prompt else draft.num_scored,
        limit=limit,
    )


def _fits(draft: PartialDecision, needed: int, finding: Finding) -> bool:
    """True if there is a row, a token, and pages, with one page to spare for each running sequence.

    The spare pages avoid admitting a sequence only to retract it at the next step.
    """
    beside = len(draft.going) + len(draft.admitted) + draft.tally.cost(finding.path)
    return draft.num_free_rows > 0 and draft.num_tokens > 0 and _has_pages(draft, needed + beside)


def _victims(draft: PartialDecision, newcomer: WaitingSequence) -> Iterator[RunningSequence]:
    """Sequences that may give way to a waiting one, in order."""
    # A caller whose row is on its way out does not take another's for it.
    num_held = None if newcomer.caller in draft.leaving else draft.held.get(newcomer.caller, 0)
    return victims(draft.going, draft.held, newcomer.priority, num_held, draft.forked)


def _make_way(
    state: SchedulerState, draft: PartialDecision, newcomer: WaitingSequence, needed: int, finding: Finding
) -> PartialDecision:
    """Makes as many others give way as a waiting sequence needs.

    The draft is full if all of them would not be enough, or if some are in a running step: then all are held back, and
    none is retracted for nothing.
    """
    tally, num_tokens, chosen = draft.tally, draft.num_tokens, []
    reserved = _num_unused(draft) - draft.num_new - sum(draft.growth.values())
    num_beside = len(draft.going) + len(draft.admitted)
    for victim in _victims(draft, newcomer):
        chosen.append(victim)
        holding = state.holdings.get(victim.arrival)
        if holding is None:
            asked = islice(_victims(draft, newcomer), 2 * len(chosen) - 1)
            return draft._replace(inquiry=Inquiry(holdings=tuple(each.arrival for each in asked)))
        tally = tally.retracted(holding)
        num_tokens += draft.rows.get(victim.arrival, 0)
        reserved += draft.growth.get(victim.arrival, 0) - victim.num_unused
        left = tally.num_pages - tally.cost(finding.path) + reserved
        if num_tokens > 0 and needed + num_beside - len(chosen) <= left:
            break
    else:
        return draft._replace(is_full=True)
    if any(victim.num_steps for victim in chosen):
        for victim in chosen:
            draft = _hold_back(draft, victim)
        return draft._replace(held=_held(draft, newcomer.caller, 1), awaited=newcomer.priority, is_full=True)
    for victim in chosen:
        draft = _retract(draft, victim, state.holdings[victim.arrival])
    return draft


def _hold_back_for(draft: PartialDecision, newcomer: WaitingSequence) -> PartialDecision:
    """Frees a row for the next decision, although nothing overtakes the awaited sequence."""
    for victim in islice(_victims(draft, newcomer), 1):
        draft = _hold_back(draft, victim)
    return draft._replace(held=_held(draft, newcomer.caller, 1))


def _hold_back(draft: PartialDecision, victim: RunningSequence) -> PartialDecision:
    """Leaves a running sequence out, so that it can be retracted when the step that it is in is over."""
    return _set_aside(draft, victim)._replace(leaving=draft.leaving | {victim.caller})


def _retract(draft: PartialDecision, victim: RunningSequence, holding: Holding) -> PartialDecision:
    return _set_aside(draft, victim)._replace(
        retracted=(*draft.retracted, victim.arrival),
        tally=draft.tally.retracted(holding),
        num_free_rows=draft.num_free_rows + 1,
    )


def _set_aside(draft: PartialDecision, victim: RunningSequence) -> PartialDecision:
    """Cancels what this step was to give a running sequence."""
    arrival = victim.arrival
    return draft._replace(
        going=tuple([each for each in draft.going if each.arrival != arrival]),
        held=_held(draft, victim.caller, -1),
        sits_out=draft.sits_out | {arrival},
        num_tokens=draft.num_tokens + draft.rows.get(arrival, 0),
        rows={each: count for each, count in draft.rows.items() if each != arrival},
        growth={each: count for each, count in draft.growth.items() if each != arrival},
    )


def _held(draft: PartialDecision, caller: str, change: int) -> Mapping[str, int]:
    """Rows per caller, with `change` added to one."""
    held = dict(draft.held)
    count = held.pop(caller, 0) + change
    return {**held, caller: count} if count > 0 else held


def _holds_copies(draft: PartialDecision, sequence: RunningSequence, holding: Holding) -> bool:
    """True if it holds its own copies of pages that are also cached: admitted again, it would share them."""
    return draft.tally.retracted(holding).num_pages - draft.tally.num_pages > sequence.num_pages


def _has_pages(draft: PartialDecision, count: int) -> bool:
    """True if `count` pages are left, including those reserved and unused."""
    left = draft.tally.num_pages - draft.num_new - sum(draft.growth.values())
    return count <= left or count <= left + _num_unused(draft)


def _num_unused(draft: PartialDecision) -> int:
    """Pages that running sequences have reserved and do not need yet."""
    return sum([each.num_unused for each in draft.going if each.num_lacking < 0])
