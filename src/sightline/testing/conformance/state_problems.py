"""Recurrent layers and convolutions as the kit tries them.

A capability row's head dimension is the key dimension of a recurrent layer, and the channels of a convolution, which
are one head. Keys and states are drawn so that states neither vanish nor grow, with and without the delta rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.capability import ANY
from sightline.attention.contract import ConvolutionInputs, ConvWeights, RecurrentInputs
from sightline.attention.kinds import PLAN_FEATURES, RECURRENT_ONLY, Feature, SpecKind
from sightline.attention.oracle.recurrent import convolve_row, recur_row
from sightline.attention.spec import ConvolutionSpec, RecurrentSpec
from sightline.testing.conformance.problem import ExpandedDims, Normal, State, StateAnswer, StateProblem

_LARGE = 128
"""Larger heads have values of their own size, as in models; smaller ones have others, so that no two are alike."""
_MORE_VALUES = 8
_DECAY = 0.3
_WIDTH = 3
"""The width of the plainest convolution."""


class RecurrentProblem(StateProblem[RecurrentSpec, RecurrentInputs]):
    """Linear attention with a state for each head. The plainest has a decay for each head and nothing else."""

    kind: ClassVar[SpecKind] = SpecKind.RECURRENT
    features: ClassVar[frozenset[Feature]] = RECURRENT_ONLY | PLAN_FEATURES
    per_token: ClassVar[tuple[str, ...]] = ("mixed", "decay", "beta")
    more_head_dims: ClassVar[tuple[int, ...]] = ()

    def plain(
        self, head_dims: Sequence[int], group_sizes: Sequence[int], expanded_dims: ExpandedDims = ANY
    ) -> RecurrentSpec:
        return self.spec(head_dims[0], group_sizes[0], 2, expanded_dims)

    def spec(self, head_dim: int, group_size: int, kv_heads: int, expanded_dims: ExpandedDims = ANY) -> RecurrentSpec:
        value_dim = head_dim if head_dim >= _LARGE else head_dim + _MORE_VALUES
        if expanded_dims is not ANY:
            listed = sorted(value for key, value in expanded_dims if key == head_dim)
            value_dim = listed[0] if listed else value_dim
        return RecurrentSpec(
            group_size * kv_heads,
            kv_heads,
            head_dim,
            value_dim,
            scale=head_dim**-0.5,
            delta_rule=False,
            channel_decay=False,
            unit_keys=False,
            conv_width=0,
        )

    def having(self, spec: RecurrentSpec, features: frozenset[Feature]) -> RecurrentSpec:
        return replace(
            spec,
            delta_rule=spec.delta_rule or Feature.DELTA_RULE in features,
            channel_decay=spec.channel_decay or Feature.CHANNEL_DECAY in features,
            skip=spec.skip or Feature.SKIP in features,
        )

    def another(self, spec: RecurrentSpec) -> RecurrentSpec:
        return replace(spec, scale=spec.scale / 2)

    def with_features(
        self, spec: RecurrentSpec, features: Iterable[str], conv_width: int, *, unit_keys: bool
    ) -> RecurrentSpec:
        named = set(features)
        return replace(
            spec,
            delta_rule=Feature.DELTA_RULE.value in named,
            channel_decay=Feature.CHANNEL_DECAY.value in named,
            skip=Feature.SKIP.value in named,
            conv_width=conv_width,
            unit_keys=unit_keys,
        )

    def describe(self, spec: RecurrentSpec) -> str:
        extras = ["keys of unit length"] if spec.unit_keys else []
        extras += [f"convolution over {spec.conv_width}"] if spec.conv_width else []
        extras += ["skip"] if spec.skip else []
        heads = f"{spec.num_heads} heads of {spec.key_dim} × {spec.value_dim} on {spec.num_key_heads} key heads"
        return ", ".join([spec.label, heads, f"scale {spec.scale:.4g}", *extras])

    def random_inputs(self, spec: RecurrentSpec, num_tokens: int, normal: Normal) -> RecurrentInputs:
        mixed, conv = normal(num_tokens, spec.channels), None
        _shorten_keys(spec, mixed)
        if spec.conv_width:
            conv = _weights(spec.channels, spec.conv_width, normal)
            assert conv.bias is not None, "the kit's convolutions have a bias"
            _shorten_keys(spec, conv.bias)
        rates = (spec.num_heads, spec.key_dim) if spec.channel_decay else (spec.num_heads,)
        return RecurrentInputs(
            mixed=mixed,
            decay=-_DECAY * normal(num_tokens, *rates).float().abs(),
            beta=torch.sigmoid(normal(num_tokens, spec.num_heads).float()),
            conv=conv,
            skip=normal(spec.num_heads).float() if spec.skip else None,
        )

    def random_state(self, spec: RecurrentSpec, normal: Normal) -> State:
        state, *tails = self.planes(spec)
        kept = normal(*state.shape).float() * spec.key_dim**-0.5
        inputs = [normal(*reversed(tail.shape)) for tail in tails]
        for each in inputs:
            _shorten_keys(spec, each)
        return kept, *(each.float().T.contiguous() for each in inputs)

    def answer(self, spec: RecurrentSpec, inputs: RecurrentInputs, state: State) -> StateAnswer:
        first, *tails = state
        found = recur_row(spec, inputs, first, tails[0] if tails else None)
        return StateAnswer(found.out, (found.states,) if found.tails is None else (found.states, found.tails))

    def strided(self, inputs: RecurrentInputs, device: torch.device) -> Iterator[tuple[str, RecurrentInputs]]:
        conv = None if inputs.conv is None else _moved(inputs.conv, device)
        skip = None if inputs.skip is None else inputs.skip.to(device)
        for what, lay in _LAYOUTS.items():
            parts = {name: lay(vars(inputs)[name], device) for name in self.per_token}
            yield what, replace(inputs, **parts, conv=conv, skip=skip)


class ConvolutionProblem(StateProblem[ConvolutionSpec, ConvolutionInputs]):
    """A causal convolution of every channel, which keeps its last inputs."""

    kind: ClassVar[SpecKind] = SpecKind.CONVOLUTION
    features: ClassVar[frozenset[Feature]] = PLAN_FEATURES
    per_token: ClassVar[tuple[str, ...]] = ("x",)
    more_head_dims: ClassVar[tuple[int, ...]] = (1024,)

    def plain(
        self, head_dims: Sequence[int], group_sizes: Sequence[int], expanded_dims: ExpandedDims = ANY
    ) -> ConvolutionSpec:
        del group_sizes, expanded_dims
        return ConvolutionSpec(head_dims[0], _WIDTH)

    def spec(self, head_dim: int, group_size: int, kv_heads: int, expanded_dims: ExpandedDims = ANY) -> ConvolutionSpec:
        del group_size, kv_heads, expanded_dims
        return ConvolutionSpec(head_dim, _WIDTH)

    def another(self, spec: ConvolutionSpec) -> ConvolutionSpec:
        return replace(spec, width=spec.width + 1)

    def with_features(
        self, spec: ConvolutionSpec, features: Iterable[str], conv_width: int, *, unit_keys: bool
    ) -> ConvolutionSpec:
        del features, unit_keys
        return replace(spec, width=conv_width)

    def describe(self, spec: ConvolutionSpec) -> str:
        return f"convolution of {spec.channels} channels over {spec.width}"

    def random_inputs(self, spec: ConvolutionSpec, num_tokens: int, normal: Normal) -> ConvolutionInputs:
        return ConvolutionInputs(normal(num_tokens, spec.channels), _weights(spec.channels, spec.width, normal))

    def random_state(self, spec: ConvolutionSpec, normal: Normal) -> State:
        return tuple(normal(*plane.shape).float() for plane in self.planes(spec))

    def answer(self, spec: ConvolutionSpec, inputs: ConvolutionInputs, state: State) -> StateAnswer:
        del spec
        found = convolve_row(inputs.x, inputs.conv, state[0])
        return StateAnswer(found.out.unsqueeze(1), (found.tails,))

    def strided(self, inputs: ConvolutionInputs, device: torch.device) -> Iterator[tuple[str, ConvolutionInputs]]:
        for what, lay in _LAYOUTS.items():
            yield what, ConvolutionInputs(lay(inputs.x, device), _moved(inputs.conv, device))


def _shorten_keys(spec: RecurrentSpec, mixed: Tensor) -> None:
    """Makes keys in `mixed` [..., channels] about as long as those that are divided by their length.

    With longer ones the delta rule would overshoot, and states would grow.
    """
    keys = spec.num_key_heads * spec.key_dim
    if not spec.unit_keys:
        mixed[..., keys : 2 * keys] *= spec.key_dim**-0.5


def _weights(channels: int, width: int, normal: Normal) -> ConvWeights:
    return ConvWeights(normal(channels, width), normal(channels) * 0.5)


def _moved(conv: ConvWeights, device: torch.device) -> ConvWeights:
    return ConvWeights(conv.weight.to(device), None if conv.bias is None else conv.bias.to(device))


def _within_nan(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device as a slice of the features of a wider one, whose rest is NaN."""
    nan = torch.full_like(tensor, torch.nan)
    return torch.cat([nan, tensor, nan], dim=-1).to(device).narrow(-1, tensor.shape[-1], tensor.shape[-1])


def _beside_nan(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device, with NaN between its tokens in memory."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=1).to(device)[:, 0]


_LAYOUTS = {"inputs that are parts of wider ones": _within_nan, "tokens that lie apart": _beside_nan}
