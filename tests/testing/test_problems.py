"""What checks do to inputs and entries is what they say, for every kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.kinds import ENTRY_KINDS, STATE_KINDS, Feature, SpecKind
from sightline.attention.spec import LatentSpec, RecurrentSpec
from sightline.core.device import detect_device
from sightline.core.errors import ConfigError
from sightline.testing.conformance.given_inputs import tensors_of
from sightline.testing.conformance.problem import EntryProblem, Problem, StateProblem
from sightline.testing.conformance.problems import PROBLEMS
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.state_problems import RecurrentProblem
from sightline.testing.conformance.trial import needs_feature


def of_kinds(kinds: frozenset[SpecKind]) -> pytest.MarkDecorator:
    chosen = [problem for kind, problem in PROBLEMS.items() if kind in kinds]
    return pytest.mark.parametrize("problem", chosen, ids=lambda problem: problem.kind.value)


ALL = of_kinds(frozenset(SpecKind))
OF_ENTRIES = of_kinds(ENTRY_KINDS)
OF_STATES = of_kinds(STATE_KINDS)
NUM_KEYS = 9


def normal(seed: int = 0) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def one_query(problem: EntryProblem[Any, Any]) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """A plain spec, inputs of one token, and entries of a context."""
    spec, draw = problem.plain((16, 64), (1, 2)), normal()
    [pool] = spec.pools(1, torch.float32)
    entries = tuple(draw(NUM_KEYS, *plane.shape) for plane in pool.planes)
    return spec, problem.random_inputs(spec, 1, draw), entries


def attend(
    problem: EntryProblem[Any, Any], spec: Any, inputs: Any, entries: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    visible = torch.ones(1, entries[0].shape[0], dtype=torch.bool)
    return problem.answer(spec, inputs, slice(0, 1), entries, visible)


def test_every_kind_of_attention_has_a_problem() -> None:
    assert {kind: problem.kind for kind, problem in PROBLEMS.items()} == {kind: kind for kind in SpecKind}


@of_kinds(frozenset(SpecKind) - {SpecKind.CONVOLUTION})
def test_a_spec_has_the_geometry_that_was_asked_for(problem: Problem[Any, Any]) -> None:
    for head_dim in (16, 80, 256, 576):
        spec = problem.spec(head_dim, 6, 1)
        assert (spec.kind, spec.head_dim, spec.group_size) == (problem.kind, head_dim, 6)
        assert spec.features <= problem.features
    assert problem.plain((16,), (1, 2)).num_q_heads == 2
    assert problem.plain((16,), (5,)).group_size == 5


def test_the_channels_of_a_convolution_are_one_head() -> None:
    spec = PROBLEMS[SpecKind.CONVOLUTION].spec(80, 6, 3)
    assert (spec.kind, spec.head_dim, spec.num_q_heads, spec.group_size) == (SpecKind.CONVOLUTION, 80, 1, 1)


@ALL
def test_another_spec_of_the_same_geometry_is_another(problem: Problem[Any, Any]) -> None:
    spec = problem.spec(64, 2, 2)
    other = problem.another(spec)
    assert other != spec
    assert (other.head_dim, other.num_q_heads) == (spec.head_dim, spec.num_q_heads)


def test_values_have_a_size_that_the_row_declares() -> None:
    problem = PROBLEMS[SpecKind.RECURRENT]
    assert problem.spec(64, 1, 2).expanded_dims == (64, 72)
    assert problem.spec(64, 1, 2, frozenset({(64, 128), (128, 64)})).expanded_dims == (64, 128)
    assert problem.plain((128,), (1,), frozenset({(64, 128), (128, 64)})).expanded_dims == (128, 64)


def recurrent(features: str, conv_width: int = 0, *, unit_keys: bool = False) -> RecurrentSpec:
    problem = RecurrentProblem()
    return problem.with_features(problem.spec(16, 2, 2), features.split("+"), conv_width, unit_keys=unit_keys)


WAYS = {
    "delta-rule": recurrent("delta-rule", unit_keys=True),
    "skip": recurrent("skip", unit_keys=True),
    "a convolution": recurrent("", 4, unit_keys=True),
    "keys as they are": recurrent(""),
}


@pytest.mark.parametrize("name", WAYS)
def test_each_feature_of_a_recurrent_layer_changes_what_the_oracle_answers(name: str) -> None:
    problem, plain, spec = RecurrentProblem(), recurrent("", unit_keys=True), WAYS[name]
    inputs = problem.random_inputs(spec, 6, normal())
    state = problem.random_state(spec, normal(1))
    answer = problem.answer(spec, inputs, state)
    without = problem.answer(plain, replace(inputs, conv=None), state[:1])
    assert ((answer.out - without.out).abs().amax((1, 2)) > 1e-2).float().mean() > 0.5
    assert ((answer.states[0] - without.states[0]).abs().amax() > 1e-2) == (name != "skip")


def test_decays_per_channel_change_what_the_oracle_answers() -> None:
    problem, spec = RecurrentProblem(), recurrent("channel-decay")
    inputs = problem.random_inputs(spec, 6, normal())
    state = problem.random_state(spec, normal(1))
    of_heads = problem.answer(recurrent(""), replace(inputs, decay=inputs.decay[..., 0]), state)
    assert ((problem.answer(spec, inputs, state).out - of_heads.out).abs().amax((1, 2)) > 1e-2).all()


@OF_STATES
def test_the_state_behind_a_context_changes_every_heads_output(problem: StateProblem[Any, Any]) -> None:
    spec = problem.plain((16,), (1, 2))
    inputs = problem.random_inputs(spec, 2, normal())
    [one, two] = [problem.answer(spec, inputs, problem.random_state(spec, normal(seed))) for seed in (1, 2)]
    assert ((one.out - two.out).abs().amax(-1) > 1e-2).all()


@OF_STATES
def test_states_have_the_shapes_of_the_planes(problem: StateProblem[Any, Any]) -> None:
    spec = problem.with_features(problem.plain((16,), (1, 2)), (), 4, unit_keys=False)
    shapes = [plane.shape for plane in spec.states(1, torch.float32).planes]
    assert [tuple(each.shape) for each in problem.random_state(spec, normal())] == shapes
    assert [tuple(each.shape) for each in problem.empty(spec)] == shapes
    answer = problem.answer(spec, problem.random_inputs(spec, 3, normal()), problem.empty(spec))
    assert [tuple(each.shape) for each in answer.states] == [(3, *shape) for shape in shapes]


def test_an_entry_of_576_is_cut_as_deepseek_cuts_it() -> None:
    spec = PROBLEMS[SpecKind.LATENT].spec(576, 16, 1)
    assert (spec.latent_dim, spec.rope_dim, spec.nope_dim, spec.value_dim) == (512, 64, 128, 128)


def test_a_small_latent_spec_has_no_two_dimensions_alike() -> None:
    spec: LatentSpec = PROBLEMS[SpecKind.LATENT].spec(16, 2, 1)
    assert len({spec.latent_dim, spec.rope_dim, spec.nope_dim, spec.value_dim}) == 4


@OF_ENTRIES
def test_entries_are_what_the_pools_planes_hold(problem: EntryProblem[Any, Any]) -> None:
    spec, inputs, _ = one_query(problem)
    [pool] = spec.pools(1, torch.float32)
    assert [tuple(plane.shape[1:]) for plane in problem.entries(inputs)] == [plane.shape for plane in pool.planes]


@OF_ENTRIES
def test_scores_climb_as_they_are_asked_to(problem: EntryProblem[Any, Any]) -> None:
    spec, inputs, entries = one_query(problem)
    zeros = tuple(torch.zeros_like(plane) for plane in entries)
    for score in (-6.0, 0.0, 4.0):
        climbing = problem.climbing(spec, inputs, zeros, torch.full((NUM_KEYS,), score))
        _, lse = attend(problem, spec, inputs, tuple(plane[:1] for plane in climbing))
        torch.testing.assert_close(lse, torch.full_like(lse, score), atol=1e-4, rtol=1e-4)


@OF_ENTRIES
def test_without_queries_all_keys_weigh_the_same(problem: EntryProblem[Any, Any]) -> None:
    spec, inputs, entries = one_query(problem)
    for queries in problem.queries(inputs):
        queries.zero_()
    _, lse = attend(problem, spec, inputs, entries)
    torch.testing.assert_close(lse, torch.full_like(lse, float(NUM_KEYS)).log())


@OF_ENTRIES
def test_values_are_a_view_and_where_they_are_0_so_is_the_output(problem: EntryProblem[Any, Any]) -> None:
    spec, inputs, entries = one_query(problem)
    problem.values(spec, entries).zero_()
    out, _ = attend(problem, spec, inputs, entries)
    assert out.eq(0).all()


@OF_ENTRIES
def test_a_noticed_entry_changes_every_heads_output(problem: EntryProblem[Any, Any]) -> None:
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
            assert torch.equal(tensor, tensors_of(inputs)[name])
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
    with pytest.raises(
        ConfigError,
        match="expected one kind of attention to try, got compressed, compressed-index, convolution, index, "
        "latent, recurrent, softmax",
    ):
        PROBLEMS[both.kind].plain((16,), (1,))
