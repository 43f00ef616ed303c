"""What checks do to inputs and entries is what they say, for every kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.spec import Feature, LatentSpec, SpecKind
from sightline.core.device import detect_device
from sightline.core.errors import ConfigError
from sightline.testing.conformance.problem import Problem
from sightline.testing.conformance.problems import PROBLEMS
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.steps import tensors_of
from sightline.testing.conformance.trial import needs_feature

ALL = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=lambda problem: problem.kind.value)
NUM_KEYS = 9


def normal(seed: int = 0) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def one_query(problem: Problem[Any, Any]) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """A plain spec, inputs of one token, and entries of a context."""
    spec, draw = problem.plain((16, 64), (1, 2)), normal()
    [pool] = spec.pools(1, torch.float32)
    entries = tuple(draw(NUM_KEYS, *plane.shape) for plane in pool.planes)
    return spec, problem.random_inputs(spec, 1, draw), entries


def attend(problem: Problem[Any, Any], spec: Any, inputs: Any, entries: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    visible = torch.ones(1, entries[0].shape[0], dtype=torch.bool)
    return problem.answer(spec, inputs, slice(0, 1), entries, visible)


def test_every_kind_of_attention_has_a_problem() -> None:
    assert {kind: problem.kind for kind, problem in PROBLEMS.items()} == {kind: kind for kind in SpecKind}


@ALL
def test_a_spec_has_the_geometry_that_was_asked_for(problem: Problem[Any, Any]) -> None:
    for head_dim in (16, 80, 256, 576):
        spec = problem.spec(head_dim, 6, 1)
        assert (spec.kind, spec.head_dim, spec.group_size) == (problem.kind, head_dim, 6)
        assert spec.features <= problem.features
    assert problem.plain((16,), (1, 2)).num_q_heads == 2
    assert problem.plain((16,), (5,)).group_size == 5


def test_an_entry_of_576_is_cut_as_deepseek_cuts_it() -> None:
    spec = PROBLEMS[SpecKind.LATENT].spec(576, 16, 1)
    assert (spec.latent_dim, spec.rope_dim, spec.nope_dim, spec.value_dim) == (512, 64, 128, 128)


def test_a_small_latent_spec_has_no_two_dimensions_alike() -> None:
    spec: LatentSpec = PROBLEMS[SpecKind.LATENT].spec(16, 2, 1)
    assert len({spec.latent_dim, spec.rope_dim, spec.nope_dim, spec.value_dim}) == 4


@ALL
def test_entries_are_what_the_pools_planes_hold(problem: Problem[Any, Any]) -> None:
    spec, inputs, _ = one_query(problem)
    [pool] = spec.pools(1, torch.float32)
    assert [tuple(plane.shape[1:]) for plane in problem.entries(inputs)] == [plane.shape for plane in pool.planes]


@ALL
def test_scores_climb_as_they_are_asked_to(problem: Problem[Any, Any]) -> None:
    spec, inputs, entries = one_query(problem)
    zeros = tuple(torch.zeros_like(plane) for plane in entries)
    for score in (-6.0, 0.0, 4.0):
        climbing = problem.climbing(spec, inputs, zeros, torch.full((NUM_KEYS,), score))
        _, lse = attend(problem, spec, inputs, tuple(plane[:1] for plane in climbing))
        torch.testing.assert_close(lse, torch.full_like(lse, score), atol=1e-4, rtol=1e-4)


@ALL
def test_without_queries_all_keys_weigh_the_same(problem: Problem[Any, Any]) -> None:
    spec, inputs, entries = one_query(problem)
    for queries in problem.queries(inputs):
        queries.zero_()
    _, lse = attend(problem, spec, inputs, entries)
    torch.testing.assert_close(lse, torch.full_like(lse, float(NUM_KEYS)).log())


@ALL
def test_values_are_a_view_and_where_they_are_0_so_is_the_output(problem: Problem[Any, Any]) -> None:
    spec, inputs, entries = one_query(problem)
    problem.values(spec, entries).zero_()
    out, _ = attend(problem, spec, inputs, entries)
    assert out.eq(0).all()


@ALL
def test_a_noticed_entry_changes_every_heads_output(problem: Problem[Any, Any]) -> None:
    spec, inputs, entries = one_query(problem)
    before, _ = attend(problem, spec, inputs, entries)
    problem.make_noticed(spec, inputs, entries, 4)
    after, _ = attend(problem, spec, inputs, entries)
    assert ((after - before).abs() > 1e-2).any(-1).all()


@ALL
def test_strided_inputs_are_the_same_numbers_lying_otherwise(problem: Problem[Any, Any]) -> None:
    spec = problem.plain((16,), (1, 2))
    inputs = problem.random_inputs(spec, 5, normal())
    ways = list(problem.strided(inputs, torch.device("cpu")))
    assert len({what for what, _ in ways}) == len(ways) > 1
    for _, strided in ways:
        for name, tensor in tensors_of(strided).items():
            assert torch.equal(tensor, vars(inputs)[name])
            assert tensor.stride(-1) == 1, "a head is one run of numbers"
            assert name not in problem.per_token or not tensor.is_contiguous()


ROW = TorchLatentBackend.capabilities[0]
SUBJECT = Subject("mine", TorchLatentBackend, ROW, detect_device("cpu"))


def test_a_feature_that_the_kind_does_not_have_is_excused_even_where_it_is_declared() -> None:
    row = replace(ROW, features=frozenset({Feature.WINDOW, Feature.LSE}))
    subject = replace(SUBJECT, capability=row)
    assert subject.features == {Feature.LSE}
    assert needs_feature(Feature.WINDOW)(subject) == "latent attention has no window"
    assert needs_feature(Feature.TREE_MASK)(subject) == "tree-mask is not declared"
    assert needs_feature(Feature.LSE)(subject) is None


def test_of_a_row_of_two_kinds_one_is_named() -> None:
    both = replace(SUBJECT, capability=replace(ROW, spec_kinds=frozenset(SpecKind)))
    assert replace(both, named_kind=SpecKind.LATENT).problem is PROBLEMS[SpecKind.LATENT]
    with pytest.raises(ConfigError, match="expected one kind of attention to try, got latent, softmax"):
        PROBLEMS[both.kind].plain((16,), (1,))
