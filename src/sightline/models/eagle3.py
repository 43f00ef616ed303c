"""EAGLE-3 heads: one layer that guesses the tokens after the next one, from states of the network that it guesses for.

    target's states at `Taps` ──fuse──▶ state of a token ─┐
    state that the head gave for the token before ────────┴─▶ head(state, next token) ──▶ logits, state

The entry at position i is computed from the state of token i and from token i + 1. References count it as position
i + 1: attention is the same, because rotations are relative.

Owns the network and the names of its tensors. `eagle3_config` translates configs to the definition. Does not know how
guesses are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec
from sightline.core.errors import CheckpointError
from sightline.layers.embedding import Embedding
from sightline.layers.linear import Projection, Unnormed
from sightline.layers.norm import RmsNorm
from sightline.layers.operations import Operations
from sightline.layers.rotary import Rotary, RotarySpec, RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Added
from sightline.layers.source import Given, Normed
from sightline.models.attention import AttentionLayer
from sightline.models.contract import Definition, GivenStates, MadeStates, Model, Taps
from sightline.models.decoder import Decoder
from sightline.models.decoder_layer import TableBuffers
from sightline.models.drafting import DraftDefinition, LoadedDraft, likeliest
from sightline.models.feed_forward import FeedForwardLayer
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.weights import WeightReader

LAYER_PREFIXES = ("midlayer", "layers.0")
"""The names of the layer: in checkpoints of the original format, and of speculators."""
OUTER_PREFIXES = ("", "model.")
"""Prefixes that every name may have."""

NEVER = -1e30
"""The logit of a token that is never drawn. Finite, as logits must be."""


class InputNorms(Enum):
    """Which norms the target's states pass before they are fused."""

    NONE = "none"
    JOINED = "joined"
    """One over all states of a token side by side (`norm_before_fc`)."""
    EACH = "each"
    """One for each tapped state (`fc_norm`)."""


@dataclass(frozen=True)
class Eagle3Definition(Definition):
    """The properties of a head, for one target."""

    layer: LayerDefinition
    hidden_size: int
    num_tokens: int
    """The size of the target's vocabulary, from which the head takes tokens."""
    num_drafted: int
    """How many of them the head can guess: the size of its logits."""
    num_positions: int
    norm_epsilon: float
    target_size: int
    """The width of one of the target's states."""
    taps: Taps
    """The target's states that the head takes."""
    input_norms: InputNorms = InputNorms.NONE
    norm_before_residual: bool = False
    """True if the normalised state is the residual stream, and not the state itself."""
    norm_output: bool = False
    """True if the head continues from its normalised state."""

    @property
    def vocab_size(self) -> int:
        return self.num_tokens

    @property
    def max_positions(self) -> int:
        return self.num_positions

    @property
    def rotary(self) -> RotarySpec:
        """The rotary embedding of the one layer."""
        assert self.layer.rotary is not None, "a head's layer is one of Llama"
        return self.layer.rotary

    def attention_specs(self) -> tuple[AttentionSpec | None, ...]:
        return (self.layer.attention.spec,)

    def load(self, weights: WeightReader, target_embedding: Embedding) -> Eagle3Head:
        """Builds the network. If the checkpoint has no embedding, the head uses the target's."""
        names = _Names(weights)
        norms, size = NormDefinition(self.norm_epsilon), self.hidden_size
        layer = names.layer()
        head = Eagle3Head(
            definition=self,
            embedding=self._load_embedding(weights, names, target_embedding),
            input_norms=self._load_input_norms(weights, names, norms),
            fusion=weights.projection({names.module("fc"): size}, self.taps.count * self.target_size, bias=False),
            layer=HeadLayer(
                norm_before_residual=self.norm_before_residual,
                token_norm=norms.load(weights, f"{layer}.input_layernorm", size),
                state_norm=norms.load(weights, f"{layer}.hidden_norm", size),
                attention=self.layer.attention.load(weights, 0, f"{layer}.self_attn", size, in_features=2 * size),
                mlp_norm=norms.load(weights, f"{layer}.post_attention_layernorm", size),
                mlp=self.layer.feed_forward.load(weights, f"{layer}.mlp", size),
            ),
            rotary=Rotary(self.rotary, weights.device),
            final_norm=norms.load(weights, names.module("norm"), size),
            output=weights.projection({names.module("lm_head"): self.num_drafted}, size, bias=False),
            target_tokens=self._load_target_tokens(weights, names),
        )
        weights.finish()
        return head

    def _load_embedding(self, weights: WeightReader, names: _Names, target_embedding: Embedding) -> Embedding:
        if names.has("embed_tokens.weight"):
            return weights.embedding(names.module("embed_tokens"), self.num_tokens, self.hidden_size)
        if self.hidden_size != self.target_size:
            raise CheckpointError(
                f"expected tensor embed_tokens.weight of width {self.hidden_size}, got none: the target's embedding, "
                f"which the head would use, has width {self.target_size}; the file is incomplete"
            )
        return target_embedding

    def _load_input_norms(self, weights: WeightReader, names: _Names, norms: NormDefinition) -> tuple[RmsNorm, ...]:
        match self.input_norms:
            case InputNorms.NONE:
                return ()
            case InputNorms.JOINED:
                return (norms.load(weights, names.module("input_norm"), self.taps.count * self.target_size),)
            case InputNorms.EACH:
                count = self.taps.count
                return tuple(norms.load(weights, names.module(f"fc_norm.{i}"), self.target_size) for i in range(count))

    def _load_target_tokens(self, weights: WeightReader, names: _Names) -> Tensor | None:
        """The target's token for each logit, from the stored offsets; None if they are the same."""
        tokens = torch.arange(self.num_drafted)
        is_mapped = names.has("d2t") or self.num_drafted != self.num_tokens
        if is_mapped:
            tokens += weights.take(names.tensor("d2t"), (self.num_drafted,), torch.int64).cpu()
        is_guessed = torch.zeros(self.num_tokens, dtype=torch.bool)
        if not ((tokens >= 0) & (tokens < self.num_tokens)).all():
            raise CheckpointError(
                f"expected d2t to lead to tokens below {self.num_tokens}, got {int(tokens.min())} to "
                f"{int(tokens.max())}; the file is damaged or belongs to another model"
            )
        is_guessed[tokens] = True
        if int(is_guessed.sum()) != self.num_drafted:
            raise CheckpointError(
                f"expected d2t to lead to {self.num_drafted} different tokens, got {int(is_guessed.sum())}; the file "
                "is damaged, or the head was saved before it got its vocabulary"
            )
        if names.has("t2d"):
            told = weights.take(names.tensor("t2d"), (self.num_tokens,), torch.bool).cpu()
            if not torch.equal(told, is_guessed):
                raise CheckpointError(
                    f"expected t2d to mark the {self.num_drafted} tokens that d2t leads to, got "
                    f"{int((told != is_guessed).sum())} differences; the file is damaged"
                )
        return tokens.to(weights.device) if is_mapped else None


class _Names:
    """Finds the names under which a checkpoint stores the parts of a head."""

    def __init__(self, weights: WeightReader) -> None:
        self._stored = frozenset(weights.names)

    def tensor(self, name: str) -> str:
        """The stored name of a tensor; the plain one if it is not stored, for the reader to ask for."""
        return next((each for prefix in OUTER_PREFIXES if (each := prefix + name) in self._stored), name)

    def module(self, name: str) -> str:
        """The stored name of a part with a weight."""
        return self.tensor(f"{name}.weight").removesuffix(".weight")

    def has(self, name: str) -> bool:
        return self.tensor(name) in self._stored

    def layer(self) -> str:
        """The stored name of the layer, told by a tensor that only heads have."""
        telling = "hidden_norm.weight"
        found = (each for each in LAYER_PREFIXES if self.has(f"{each}.{telling}"))
        return self.tensor(f"{next(found, LAYER_PREFIXES[0])}.{telling}").removesuffix(f".{telling}")


class HeadBuffers:
    """The layer's input, and room for the norm before the feed-forward."""

    def __init__(self, scratch: Scratch, hidden_size: int) -> None:
        self.joined = scratch.take("eagle3.joined", 2 * hidden_size)
        """The token's vector and its state, both normalised."""
        self.token, self.state = self.joined.chunk(2, dim=1)
        self.normed = scratch.take("eagle3.normed", hidden_size)


@dataclass(frozen=True, eq=False)
class HeadLayer:
    """The layer. Its attention takes token and state side by side; the residual stream is the state alone."""

    norm_before_residual: bool
    token_norm: RmsNorm
    state_norm: RmsNorm
    attention: AttentionLayer
    mlp_norm: RmsNorm
    mlp: FeedForwardLayer

    def __call__(
        self, given: Tensor, made: Tensor, planned: PlannedBatch, rotary: RotaryTable, scratch: Scratch
    ) -> None:
        """Writes the state `made` from the state `given`. The tokens' vectors are in `HeadBuffers.token`."""
        operations, buffers = scratch.operations, scratch.of(HeadBuffers, given.shape[1])
        operations.norm(buffers.token, self.token_norm, buffers.token)
        operations.norm(given, self.state_norm, buffers.state)
        if self.norm_before_residual:
            operations.norm(given, self.state_norm, made)
        else:
            operations.copy(given, made)
        stream = Added(made)
        self.attention(Given(buffers.joined), stream, planned, rotary, scratch)
        self.mlp(Normed(Unnormed(made, self.mlp_norm, buffers.normed)), stream, scratch)


@dataclass(frozen=True, eq=False)
class Eagle3Head(Model):
    """The network. A step takes the next token and a state for each position, and gives logits and a state."""

    definition: Eagle3Definition
    embedding: Embedding
    input_norms: tuple[RmsNorm, ...]
    fusion: Projection
    layer: HeadLayer
    rotary: Rotary
    final_norm: RmsNorm
    output: Projection
    target_tokens: Tensor | None
    """[num_drafted] int64: the target's token for each logit; None if they are the same."""

    @property
    def states_in(self) -> int:
        return self.definition.hidden_size

    @property
    def states_out(self) -> int:
        return self.definition.hidden_size

    @property
    def turns(self) -> bool:
        return self.layer.attention.turns

    def reserve(self, scratch: Scratch) -> None:
        scratch.of(HeadBuffers, self.definition.hidden_size)
        self._table(scratch)
        self.layer.attention.buffers(scratch)
        self.layer.mlp.buffers(scratch)

    def fuse(self, states: Tensor, operations: Operations) -> Tensor:
        """The states [num_tokens, hidden_size] that the head takes, from the target's.

        `states` are [num_tokens, taps * target_size], as the target gives them for `Eagle3Definition.taps`.
        """
        with torch.inference_mode(), torch.autocast(states.device.type, enabled=False):
            normed = states
            if self.input_norms:
                normed = torch.empty_like(states)
                parts = zip(*(each.chunk(len(self.input_norms), dim=1) for each in (states, normed)), strict=True)
                for norm, (source, room) in zip(self.input_norms, parts, strict=True):
                    operations.norm(source, norm, room)
            fused = states.new_empty((states.shape[0], self.definition.hidden_size))
            self.fusion(normed, fused)
            return fused

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        """Logits [num_logits, num_drafted]. `chosen` turns them into tokens of the target."""
        batch, operations, size = planned.batch, scratch.operations, self.definition.hidden_size
        given, made = scratch.of(GivenStates, size).states, scratch.of(MadeStates, size).states
        # Not scaled, also if the embedding is that of a target that scales it: heads are trained so.
        self.embedding(batch.tokens, 1.0, scratch.of(HeadBuffers, size).token, operations)
        table = self._table(scratch)
        operations.rotary_table(self.rotary, batch.positions, table)
        self.layer(given, made, planned, table, scratch)
        wanted = made.new_empty((len(batch.logit_indices), size))
        operations.norm_rows(made, batch.logit_indices, self.final_norm, wanted)
        if self.definition.norm_output:
            operations.norm(made, self.final_norm, made)
        out = scratch.empty_rows(len(wanted), self.output.out_features, wanted, turns=self.output.turns)
        self.output(wanted, out)
        return operations.widened(out)

    def chosen(self, logits: Tensor, operations: Operations) -> Tensor:
        """The target's token that each row of this head's logits prefers, [num_rows] int64."""
        tokens = likeliest(logits, operations)
        return tokens if self.target_tokens is None else self.target_tokens[tokens]

    def spread(self, logits: Tensor) -> Tensor:
        """The logits as those of the target's tokens. Tokens that the head cannot guess are never drawn."""
        if self.target_tokens is None:
            return logits
        wide = logits.new_full((logits.shape[0], self.definition.num_tokens), NEVER)
        return wide.index_copy_(1, self.target_tokens, logits)

    def _table(self, scratch: Scratch) -> RotaryTable:
        return scratch.of(TableBuffers, 0, self.definition.rotary.head_dim).table


@dataclass(frozen=True)
class Eagle3Draft(DraftDefinition):
    """A head as what drafts for its target."""

    head: Eagle3Definition

    @property
    def taps(self) -> Taps:
        return self.head.taps

    @property
    def networks(self) -> tuple[Definition, ...]:
        return (self.head,)

    def load(self, target: Decoder, weights: WeightReader) -> LoadedDraft:
        head = self.head.load(weights, target.states.embedding)
        return LoadedDraft((head,), head.fuse, head.chosen, head.spread)
