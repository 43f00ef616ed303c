"""Networks for multi-token prediction (MTP), which DeepSeek V3 and GLM publish as layers behind their last one.

There is a module for each depth d = 1, 2 and so on. For each place i of a text it takes the state that depth d - 1 made
there and the token i + d. It gives a state of its own, and the logits of the token i + d + 1. Depth 0 is the model
itself, and its state is the one behind the final norm.

    model      token i                            ──▶ state 0 of i, logits of token i + 1
    depth 1    state 0 of i, token i + 1          ──▶ state 1 of i, logits of token i + 2
    depth 2    state 1 of i, token i + 2          ──▶ state 2 of i, logits of token i + 3

A module is one decoder layer behind a projection that joins the two inputs. It has a cache of its own, in which the
entry of place i is at position i. Others count positions from d: only differences between them matter. The last d - 1
entries of depth d are made from guessed tokens; they must be made again when the tokens are known.

    model.layers.N.enorm, hnorm                       the norms of the token's embedding and of the state
    model.layers.N.eh_proj                            joins both, the embedding first
    model.layers.N.self_attn, mlp and two norms       the decoder layer, with experts
    model.layers.N.shared_head.norm                   the norm before the output projection
    model.layers.N.embed_tokens, shared_head.head     copies of the model's own; dropped

Does not know how guesses are made or checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec, IndexingSpec
from sightline.core.errors import ConfigError
from sightline.layers.linear import Projection
from sightline.layers.norm import RmsNorm
from sightline.layers.scratch import Scratch
from sightline.models.cache_scales import leave_cache_scales
from sightline.models.contract import Definition, ExpertStack, GivenStates, Model, Taps
from sightline.models.decoder import (
    EMBEDDING,
    OUTPUT_PROJECTION,
    PREDICTOR_TENSOR,
    Decoder,
    DecoderDefinition,
    DecoderStates,
    layer_prefix,
    load_layer,
    mlp_prefix,
)
from sightline.models.drafting import DraftDefinition, LoadedDraft
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.weights import WeightReader

FINAL = Taps(final=True)
"""What the model gives to depth 1, and each depth to the next: the state that the output projection takes."""


@dataclass(frozen=True)
class MtpModuleDefinition(Definition):
    """The module of one depth."""

    target: DecoderDefinition
    depth: int
    """From 1 on."""

    @property
    def prefix(self) -> str:
        """What the names of its tensors begin with, without the last dot."""
        return layer_prefix(len(self.target.layers) + self.depth - 1)

    @property
    def network(self) -> DecoderDefinition:
        """The decoder of one layer that follows the joined inputs."""
        return replace(self.target, layers=(self.target.predictors[self.depth - 1],), predictors=())

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def max_positions(self) -> int:
        return self.target.max_positions

    def attention_specs(self) -> tuple[AttentionSpec | None, ...]:
        return self.network.attention_specs()

    @property
    def indexers(self) -> Mapping[int, IndexingSpec]:
        return self.network.indexers

    def step_costs(self) -> tuple[float, float]:
        return self.network.step_costs()

    @property
    def copies(self) -> frozenset[str]:
        return frozenset(self._copied)

    @property
    def expert_stacks(self) -> tuple[ExpertStack, ...]:
        return self.network.layers[0].feed_forward.expert_stacks(mlp_prefix(self.prefix))

    @property
    def _copied(self) -> dict[str, str]:
        """Maps each tensor that the checkpoint may store a second time to the model's own."""
        head = EMBEDDING if self.target.tied_embedding else OUTPUT_PROJECTION
        return {f"{self.prefix}.embed_tokens.weight": EMBEDDING, f"{self.prefix}.shared_head.head.weight": head}

    def load(self, target: Decoder, weights: WeightReader) -> MtpModule:
        """Builds the module around the embedding, the rotations and the output projection of the target."""
        prefix, size, norms = self.prefix, self.target.hidden_size, self.target.norms
        for name, original in self._copied.items():
            weights.check_copy(
                name,
                original,
                "the modules for multi-token prediction share it with the model",
                "use another checkpoint, or another speculative method",
            )
        network = self.network
        states = DecoderStates(
            definition=network,
            embedding=target.states.embedding,
            layers=(load_layer(network, 0, weights, prefix),),
            final_norm=norms.load(weights, f"{prefix}.shared_head.norm", size),
            rotaries={
                layer.rotary: target.states.rotaries[layer.rotary]
                for layer in network.layers
                if layer.rotary is not None
            },
            taps=FINAL,
        )
        return MtpModule(
            embedding_norm=norms.load(weights, f"{prefix}.enorm", size),
            state_norm=norms.load(weights, f"{prefix}.hnorm", size),
            joint=weights.projection({f"{prefix}.eh_proj": size}, 2 * size, bias=False),
            decoder=Decoder(network, states, target.head),
        )


@dataclass(frozen=True)
class MtpDefinition(DraftDefinition):
    """The modules of a model, the first of those that it has."""

    target: DecoderDefinition
    num_modules: int

    @property
    def modules(self) -> tuple[MtpModuleDefinition, ...]:
        """The module of each depth, which has a cache of its own."""
        return tuple(MtpModuleDefinition(self.target, depth) for depth in range(1, self.num_modules + 1))

    @property
    def networks(self) -> tuple[Definition, ...]:
        return self.modules

    @property
    def taps(self) -> Taps:
        return FINAL

    @property
    def target_tensors(self) -> tuple[str, ...]:
        return tuple(f"{module.prefix}." for module in self.modules)

    def load(self, target: Decoder, weights: WeightReader) -> LoadedDraft:
        """Builds the modules. Every tensor that the checkpoint has for them must be used."""
        loaded = tuple(module.load(target, weights) for module in self.modules)
        leave_cache_scales(weights, self.target_tensors)
        weights.finish(within=self.target_tensors)
        return LoadedDraft(loaded)


class JointBuffers:
    """The two inputs of a module side by side, and views of them."""

    def __init__(self, scratch: Scratch, hidden_size: int) -> None:
        self.joined = scratch.take("mtp.joined", 2 * hidden_size)
        self.embedded, self.state = self.joined[:, :hidden_size], self.joined[:, hidden_size:]


@dataclass(frozen=True, eq=False)
class MtpModule(Model):
    """The network of one depth."""

    embedding_norm: RmsNorm
    state_norm: RmsNorm
    joint: Projection
    """From the norms of embedding and state, side by side, to the input of the layer."""
    decoder: Decoder
    """The layer, with the target's embedding and output projection."""

    @property
    def states_in(self) -> int:
        return self.decoder.definition.hidden_size

    @property
    def states_out(self) -> int:
        return self.decoder.states_out

    @property
    def turns(self) -> bool:
        return self.decoder.turns

    def reserve(self, scratch: Scratch) -> None:
        self.decoder.reserve(scratch)
        self._buffers(scratch)

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        states, operations, buffers = self.decoder.states, scratch.operations, self._buffers(scratch)
        stream = states.stream(scratch)
        states.embed(planned, stream.normed, scratch)
        operations.norm(stream.normed, self.embedding_norm, buffers.embedded)
        operations.norm(scratch.of(GivenStates, self.states_in).states, self.state_norm, buffers.state)
        self.joint(buffers.joined, stream.hidden)
        return self.decoder.logits(states.wanted_of_stream(planned, scratch), scratch)

    def _buffers(self, scratch: Scratch) -> JointBuffers:
        return scratch.of(JointBuffers, self.states_in)


def define_mtp(target: DecoderDefinition, checkpoint: Checkpoint, num_modules: int | None = None) -> MtpDefinition:
    """The first `num_modules` modules of a model, by default all that it has. Raises `ConfigError` if it has fewer."""
    described = len(target.predictors)
    wanted = max(described, 1) if num_modules is None else num_modules
    if not 1 <= wanted <= described:
        raise ConfigError(
            f"expected a model with {wanted} or more layers for multi-token prediction, which the method mtp needs, "
            f"got one whose config has {described} (num_nextn_predict_layers); use another model or another method"
        )
    found = MtpDefinition(target, wanted)
    for module in found.modules:
        if f"{module.prefix}.{PREDICTOR_TENSOR}" not in checkpoint.tensors:
            raise ConfigError(
                f"expected tensors {module.prefix}.* for multi-token prediction, which the method mtp needs and the "
                f"config announces, got none in {checkpoint.location}; use a checkpoint that has them, or another "
                "method"
            )
    return found
