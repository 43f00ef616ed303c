"""The shape of guesses: a chain, or a tree that is given by the parent of each guess. Knows numbers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index

from sightline.scheduler.sequence import Draft

ROOT = -1
"""The parent of guesses that follow the last known token."""


def checked_draft(draft: Draft, most: int, vocab_size: int, *, may_branch: bool) -> Draft:
    """A copy of the draft that its maker cannot change, with a tree of one branch as a chain.

    Raises `TypeError` or `ValueError` if it is malformed or too long, or if the model does not have one of its tokens.
    """
    tokens, parents = tuple(map(index, draft.tokens)), draft.parents
    if len(tokens) > most:
        raise ValueError(f"expected a draft of at most {most} tokens, got {len(tokens)}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"expected tokens from 0 to {vocab_size - 1}, got {tokens}")
    if parents is None:
        return Draft(tokens)
    parents = tuple(map(index, parents))
    if len(parents) != len(tokens):
        raise ValueError(f"expected a parent for each of {len(tokens)} guesses, got {len(parents)} parents")
    for guess, parent in enumerate(parents):
        if not ROOT <= parent < guess:
            raise ValueError(f"expected the parent of guess {guess} from {ROOT} to {guess - 1}, got {parent}")
    if len(set(zip(parents, tokens, strict=True))) != len(tokens):
        raise ValueError(f"expected children of one guess to be different tokens, got {tokens} behind {parents}")
    if parents == tuple(range(ROOT, len(tokens) - 1)):
        return Draft(tokens)
    if not may_branch:
        raise ValueError("expected one continuation, got a tree; give num_branches in speculative_config")
    return Draft(tokens, parents)


def admitted(draft: Draft, admits: Callable[[Sequence[int]], int] | None) -> Draft:
    """The draft without the guesses that cannot be right, and without those behind them.

    `admits` returns how many of some guesses, from the first on, may follow the known tokens; None: all may.
    """
    if admits is None or not draft.tokens:
        return draft
    if draft.parents is None:
        return Draft(draft.tokens[: admits(draft.tokens)])
    kept: dict[int, int] = {ROOT: ROOT}
    ways: dict[int, tuple[int, ...]] = {ROOT: ()}
    for guess, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        way = (*ways[parent], token) if parent in kept else ()
        if way and admits(way) == len(way):
            kept[guess], ways[guess] = len(kept) - 1, way
    tokens = tuple(draft.tokens[guess] for guess in kept if guess != ROOT)
    parents = tuple(kept[draft.parents[guess]] for guess in kept if guess != ROOT)
    return Draft(tokens, None if parents == tuple(range(ROOT, len(tokens) - 1)) else parents)


def depths(parents: Sequence[int]) -> list[int]:
    """How many guesses there are from the last known token to each guess, itself included."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


def check_path(path: Sequence[int], parents: Sequence[int], guesses: Sequence[int], tokens: Sequence[int]) -> None:
    """Raises `ValueError` unless a path goes down a tree from its root, and has these tokens."""
    if [parents[guess] for guess in path] != [ROOT, *path][: len(path)]:
        raise ValueError(f"expected a path down the tree {tuple(parents)} from its root, got {tuple(path)}")
    if [guesses[guess] for guess in path] != list(tokens):
        raise ValueError(f"expected a path of the tokens {tuple(tokens)}, got {tuple(path)} of {tuple(guesses)}")


def merged(continuations: Sequence[Sequence[int]], most: int) -> Draft:
    """A tree of the continuations, which shares what they have in common. The first ones are kept if there are more
    than `most` tokens."""
    places: dict[tuple[int, int], int] = {}
    for continuation in continuations:
        parent = ROOT
        for token in continuation:
            if len(places) == most and (parent, token) not in places:
                break
            parent = places.setdefault((parent, token), len(places))
    return Draft(tuple(token for _, token in places), tuple(parent for parent, _ in places))
