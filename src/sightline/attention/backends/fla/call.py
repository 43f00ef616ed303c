"""Calls fla-core: the gated delta rule, Kimi delta attention and lightning attention over ragged segments.

Owns which of its functions compute a spec, and how its terms map to ours. Its inputs have a first dimension of 1 in
front of the tokens, and `cu_seqlens` are the borders of segments. It remembers the chunks of a step by the identity of
these tensors, so that they must be new in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import fused_recurrent_kda
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
from torch import Tensor

from sightline.attention.backends.fla.kimi_prompts import kimi_prompts
from sightline.attention.recurrent.waves import Borders, WaveInputs
from sightline.attention.spec import RecurrentSpec

SHORT_SEGMENT = 16
"""Segments of at most this many tokens are computed token by token, in one launch instead of seven."""
_NOTHING_LEFT = -128.0
"""A decay below which nothing is left of a state in fp32. Replaces stronger ones: the library subtracts sums of decays,
and differences of infinite ones are not numbers."""


@dataclass(frozen=True)
class _Operation:
    """An operation of the library, in its two forms."""

    chunked: Callable[..., tuple[Tensor, Tensor]] | None
    """None if `kimi_prompts` takes its place."""
    stepwise: Callable[..., tuple[Tensor, Tensor]]


_GATED_DELTA = _Operation(chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
_KIMI_DELTA = _Operation(None, fused_recurrent_kda)
_LIGHTNING = _Operation(chunk_simple_gla, fused_recurrent_simple_gla)


class FlaRecurrence:
    """Computes the segments of one group's layers."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self._scale = spec.scale
        self._has_delta_rule = spec.delta_rule
        self._operation = _LIGHTNING
        if spec.delta_rule:
            self._operation = _KIMI_DELTA if spec.channel_decay else _GATED_DELTA

    def __call__(self, given: WaveInputs, borders: Borders, first: Tensor) -> tuple[Tensor, Tensor]:
        """See `SegmentKernel`; states are [segments, num_heads, key_dim, value_dim]."""
        chunked = self._operation.chunked
        if borders.longest > SHORT_SEGMENT and chunked is None:
            return kimi_prompts(given, borders, first, scale=self._scale, least=_NOTHING_LEFT)
        v, beta = given.v, given.beta
        gates: dict[str, Any] = {"g": given.decay.clamp(min=_NOTHING_LEFT).unsqueeze(0)}
        if self._has_delta_rule:
            gates["beta"] = beta.contiguous().unsqueeze(0)
        else:
            # The library stores whole values.
            v = (v * beta.unsqueeze(-1)).to(v.dtype)
        run = self._operation.stepwise
        if borders.longest > SHORT_SEGMENT and chunked is not None:
            run, gates["cu_seqlens_cpu"] = chunked, borders.host
        found, states = run(
            q=given.q.unsqueeze(0),
            k=given.k.unsqueeze(0),
            v=v.unsqueeze(0),
            scale=self._scale,
            initial_state=first,
            output_final_state=True,
            cu_seqlens=borders.device,
            **gates,
        )
        return found.squeeze(0), states
