"""What the policy decides about seeded workloads is what was recorded.

A deliberate change of the policy changes the digest: replace it by what the test then finds. The last change
gives a free row to the caller with the fewest rows, whatever it has used.
"""

from __future__ import annotations

import hashlib
from random import Random

from sightline.core.request import EffectiveParams, Request, Terms
from sightline.scheduler.sequence import SequenceState
from support.scheduling import Loop, make_store

LONGEST = 36
RECORDED = "95a8fd47657f1ece354e0092efb1f0b42640d438827cdf05512c5d5b13499898"


def draw_sequences(draw: Random, name: str) -> list[SequenceState]:
    """The continuations of a random request."""
    max_tokens = draw.randint(1, 12)
    prompt_len = min(draw.choice([1, 2, 3, 4, 5, 8, 9, 12, 13, 17, 24]), LONGEST - max_tokens + 1)
    params = EffectiveParams(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        skip_special_tokens=True,
        presence_penalty=draw.choice([0.0] * 6 + [0.5]),
        prompt_logprobs=draw.choice([None] * 6 + [1]),
    )
    first = draw.choice([0, 0, 0, 100, 200])
    terms = Terms(draw.choice("aaaabcd"), draw.choice([0, 0, 0, 0, 1, -1]))
    leader = SequenceState(Request(name, None, tuple(range(first, first + prompt_len)), params.needs, terms))
    count = draw.choice([1, 1, 1, 1, 2, 3])
    return [leader, *(SequenceState(leader.request, index, leader) for index in range(1, count))]


def observe(seed: int, num_steps: int = 40) -> tuple[list[object], Loop]:
    """All that the steps of a random workload did: rows, pages, retractions."""
    draw = Random(seed)
    store = make_store(draw.choice([9, 9, 10, 12, 16, 24, 40]), draw.choice([1, 2, 3, 4, 6]), LONGEST)
    budget = store.limits.max_rows + draw.choice([0, 1, 3, 8, 24])
    loop = Loop(store, budget, draw.choice([1, 2, 6]), caches=draw.random() < 0.6, depth=draw.choice([0, 1]))
    rate, submitted, seen = draw.choice([0.1, 0.3, 0.6]), list[SequenceState](), list[object]()
    for step in range(num_steps):
        while step < 30 and draw.random() < rate:
            for sequence in draw_sequences(draw, str(step)):
                loop.scheduler.submit(sequence)
                submitted.append(sequence)
        if submitted and draw.random() < 0.05:
            loop.remove(draw.choice(submitted))
        loop.step()
        flying = [(row.sequence.arrival, row.context_len, row.num_tokens) for rows in loop.flying for row in rows]
        seen.append(flying)
        for sequence in loop.scheduler.running:
            assert sequence.table_row is not None
            pages = [store.pages_at(sequence.table_row, index) for index in range(sequence.num_pages)]
            seen.append((sequence.arrival, sequence.num_scheduled, sequence.num_prefix_pages, pages))
        seen.append((loop.scheduler.num_waiting, loop.scheduler.num_retractions, store.num_free_pages))
    return seen, loop


def test_decisions_about_seeded_workloads_are_those_that_were_recorded() -> None:
    digest, num_retractions, num_hits = hashlib.sha256(), 0, 0
    for seed in range(40):
        seen, loop = observe(seed)
        digest.update(repr(seen).encode())
        num_retractions += loop.scheduler.num_retractions
        num_hits += loop.scheduler.num_hit_tokens
    assert num_retractions > 20, "the workloads leave nothing to decide"
    assert num_hits > 100
    assert digest.hexdigest() == RECORDED
