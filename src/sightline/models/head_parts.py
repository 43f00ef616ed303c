"""How the heads of softmax attention are divided among ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sightline.attention.spec import SoftmaxSpec
from sightline.distributed.ranks import Rank


class HeadPart(NamedTuple):
    """The heads of one rank."""

    queries: range
    keys: range
    """Heads of keys and values. Ranks whose queries share one have it each."""

    def of(self, spec: SoftmaxSpec) -> SoftmaxSpec:
        """The spec of these heads alone."""
        return replace(spec, num_q_heads=len(self.queries), num_kv_heads=len(self.keys))


def heads_of_rank(spec: SoftmaxSpec, rank: Rank) -> HeadPart | None:
    """The heads of a rank; None if they cannot be divided.

    Either each rank has whole groups of queries with their keys, or several ranks have a part of one group each.
    """
    if spec.num_q_heads % rank.size:
        return None
    queries, num_keys = rank.share(spec.num_q_heads), spec.num_kv_heads
    if num_keys % rank.size == 0:
        return HeadPart(queries, rank.share(num_keys))
    if rank.size % num_keys == 0:
        key = queries.start // spec.group_size
        return HeadPart(queries, range(key, key + 1))
    return None


def heads_refusal(spec: SoftmaxSpec, rank: Rank) -> str:
    """Why the heads cannot be divided."""
    return f"{spec.num_q_heads} query heads on {spec.num_kv_heads} key heads cannot be divided among {rank.size} ranks"
