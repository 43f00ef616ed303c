"""The oracle against attention written out: one query and one head at a time, over the keys that it sees."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sightline.attention.oracle.attention import attend_latent_row, attend_row
from sightline.attention.spec import LatentSpec, SoftmaxSpec

SPEC = SoftmaxSpec(num_q_heads=6, num_kv_heads=2, head_dim=8, scale=0.3)
LATENT = LatentSpec(num_q_heads=3, latent_dim=16, rope_dim=4, nope_dim=8, value_dim=6, scale=0.3)
QUERIES, KEYS = 5, 9


def by_hand(
    scores: Callable[[int, int, int], float], values: Callable[[int, int], Tensor], visible: Tensor, sinks: list[float]
) -> tuple[list[list[Tensor]], list[list[float]]]:
    """Outputs and log-sum-exps by query and head, in Python's numbers."""
    outs: list[list[Tensor]] = []
    lses: list[list[float]] = []
    for query in range(visible.shape[0]):
        seen = [key for key in range(visible.shape[1]) if visible[query, key]]
        outs.append([])
        lses.append([])
        for head, sink in enumerate(sinks):
            weights = [math.exp(scores(query, head, key)) for key in seen]
            total = sum(weights) + math.exp(sink)
            zero = 0.0 * values(0, head).double()
            shares = (weight / total * values(key, head).double() for weight, key in zip(weights, seen, strict=True))
            outs[-1].append(sum(shares, zero))
            lses[-1].append(math.log(total) if total else -math.inf)
    return outs, lses


def assert_alike(found: tuple[Tensor, Tensor], wanted: tuple[list[list[Tensor]], list[list[float]]]) -> None:
    outs = torch.stack([torch.stack(heads) for heads in wanted[0]])
    torch.testing.assert_close(found[0].double(), outs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1].double(), torch.tensor(wanted[1]).double(), atol=1e-5, rtol=1e-5)


def sight() -> Tensor:
    """Any keys, and of one query none."""
    visible = torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.6
    visible[2] = False
    return visible


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softmax(softcap: float | None, has_sinks: bool) -> None:
    torch.manual_seed(2)
    spec = SoftmaxSpec(SPEC.num_q_heads, SPEC.num_kv_heads, SPEC.head_dim, SPEC.scale, softcap=softcap)
    q, k, v = torch.randn(QUERIES, 6, 8), torch.randn(KEYS, 2, 8), torch.randn(KEYS, 2, 8)
    sinks = torch.randn(6) if has_sinks else None

    def score(query: int, head: int, key: int) -> float:
        plain = float(q[query, head].double() @ k[key, head // 3].double()) * spec.scale
        return plain if softcap is None else softcap * math.tanh(plain / softcap)

    shares = [-math.inf] * 6 if sinks is None else sinks.tolist()
    wanted = by_hand(score, lambda key, head: v[key, head // 3], sight(), shares)
    assert_alike(attend_row(spec, q, k, v, sight(), sinks), wanted)


def test_latent() -> None:
    torch.manual_seed(3)
    q_nope, q_rope, entries = torch.randn(QUERIES, 3, 8), torch.randn(QUERIES, 3, 4), torch.randn(KEYS, 20)
    key_up, value_up = torch.randn(3, 8, 16), torch.randn(3, 6, 16)

    def score(query: int, head: int, key: int) -> float:
        made = key_up[head].double() @ entries[key, :16].double()
        nope = float(q_nope[query, head].double() @ made)
        return LATENT.scale * (nope + float(q_rope[query, head].double() @ entries[key, 16:].double()))

    def value(key: int, head: int) -> Tensor:
        return value_up[head].double() @ entries[key, :16].double()

    wanted = by_hand(score, value, sight(), [-math.inf] * 3)
    assert_alike(attend_latent_row(LATENT, q_nope, q_rope, entries, key_up, value_up, sight()), wanted)


def test_what_is_not_seen_may_be_anything() -> None:
    torch.manual_seed(4)
    visible = sight()
    visible[:, 3] = False
    q, k, v = torch.randn(QUERIES, 6, 8), torch.randn(KEYS, 2, 8), torch.randn(KEYS, 2, 8)
    entries, parts = torch.randn(KEYS, 20), (torch.randn(QUERIES, 3, 8), torch.randn(QUERIES, 3, 4))
    up = torch.randn(3, 8, 16), torch.randn(3, 6, 16)
    wanted = attend_row(SPEC, q, k, v, visible, None), attend_latent_row(LATENT, *parts, entries, *up, visible)
    for tensor in (k, v, entries):
        tensor[3] = torch.nan
    found = attend_row(SPEC, q, k, v, visible, None), attend_latent_row(LATENT, *parts, entries, *up, visible)
    for one, other in zip(found, wanted, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 4), (3, 0), (3, 4)])
def test_nothing_asked_and_nothing_seen(queries: int, keys: int) -> None:
    visible, k = torch.zeros(queries, keys, dtype=torch.bool), torch.randn(keys, 2, 8)
    q = torch.randn(queries, 6, 8)
    out, lse = attend_row(SPEC, q, k, k, visible, None)
    assert torch.equal(out, torch.zeros(queries, 6, 8))
    assert torch.equal(lse, torch.full((queries, 6), -torch.inf))
    out, lse = attend_row(SPEC, q, k, k, visible, torch.arange(6.0))
    assert torch.equal(out, torch.zeros(queries, 6, 8))
    assert torch.equal(lse, torch.arange(6.0).expand(queries, 6))
    up = torch.randn(3, 8, 16), torch.randn(3, 6, 16)
    parts = torch.randn(queries, 3, 8), torch.randn(queries, 3, 4)
    out, lse = attend_latent_row(LATENT, *parts, torch.randn(keys, 20), *up, visible)
    assert torch.equal(out, torch.zeros(queries, 3, 6))
    assert torch.equal(lse, torch.full((queries, 3), -torch.inf))
