"""The decoder network. All decoder families share it and differ only in their `DecoderDefinition`.

Owns the forward. A family's module translates its config to a definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from sightline.attention.groups import Lenders
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec, IndexingSpec
from sightline.core.batch import CAUSAL, FULL, RowMask
from sightline.core.errors import ConfigError
from sightline.distributed.ranks import Division
from sightline.layers.embedding import Embedding
from sightline.layers.linear import Projection
from sightline.layers.norm import RmsNorm
from sightline.layers.per_layer import PerLayerInputs
from sightline.layers.rotary import Rotary, RotarySpec, RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.step_tokens import TokenBuffers
from sightline.layers.stream_mix import StreamRule
from sightline.layers.streams import StreamHead
from sightline.layers.summed import JoinedProjection, SummedEmbedding
from sightline.models.contract import (
    NO_TAPS,
    EmbedderDefinition,
    ExpertStack,
    MadeStates,
    Model,
    ModelDefinition,
    Taps,
)
from sightline.models.decoder_layer import DecoderLayer, StreamBuffers, StreamedLayer, TableBuffers
from sightline.models.layer_definition import LayerDefinition, Summed
from sightline.models.norms import NormDefinition
from sightline.models.parts import RankPart, TensorCut, rows
from sightline.models.per_layer_inputs import PerLayerDefinition
from sightline.models.residual_streams import load_connection, load_head, num_stream_weights
from sightline.models.weights import WeightReader

EMBEDDING = "model.embed_tokens.weight"
OUTPUT_PROJECTION = "lm_head.weight"
PREDICTOR_TENSOR = "eh_proj.weight"
"""A tensor that only layers for multi-token prediction have. It joins a token's embedding with its state."""


class BesideTensors(NamedTuple):
    """Tensors that are not loaded."""

    prefix: str
    """What their names begin with."""
    what: str
    why: str


@dataclass(frozen=True)
class DecoderDefinition(ModelDefinition, EmbedderDefinition):
    """The properties of a decoder."""

    layers: tuple[LayerDefinition, ...]
    norm_epsilon: float
    tied_embedding: bool
    norm_offset: float = 0.0
    """Added to every stored norm weight."""
    embedding_scale: float = 1.0
    sandwich_norms: bool = False
    """True if the outputs of attention and feed-forward are normalised before they are added."""
    logit_softcap: float | None = None
    predictors: tuple[LayerDefinition, ...] = ()
    """Additional layers for multi-token prediction that a checkpoint may hold. Only a drafter uses them."""
    causal: bool = True
    """False for embedders whose tokens attend to the tokens after them too."""
    per_layer: PerLayerDefinition | None = None
    """A second embedding of the tokens, of which each layer takes a part."""
    scaled_layers: bool = False
    """True if the stream behind each layer is multiplied by a stored number."""
    beside: tuple[BesideTensors, ...] = ()
    """Tensors of other networks that a checkpoint may hold beside the decoder, which is the same without them."""
    residual_scale: float = 1.0
    """Multiplies what each part of a layer adds to the stream. The stream is kept divided by it, so that a product adds
    its result as it is; the norms, which do not see the factor, have another epsilon."""
    logit_scale: float = 1.0
    """Multiplies the logits."""
    streams: StreamRule | None = None
    """How several residual streams are read and written; None if there is one, to which parts of layers add."""
    vocabulary: range | None = None
    """The tokens whose vectors and logits a rank has; None if it has all."""

    def __post_init__(self) -> None:
        windows = [spec.window for spec in self.attention_specs() if spec is not None]
        if not self.causal and any(window is not None for window in windows):
            raise ValueError("a sliding window of a model that is not causal (is_causal = false) is not supported yet")

    @property
    def norms(self) -> NormDefinition:
        return NormDefinition(self.norm_epsilon / self.residual_scale**2, self.norm_offset)

    def norms_behind(self, num_layers: int) -> NormDefinition:
        """The norm that follows the first `num_layers` layers."""
        before = self.layers[num_layers - 1].residual if num_layers else None
        return self.norms if before is None else self.norms.of_divided(before.feed_forward_added)

    def of_rank(self, division: Division, *, whole_vocabulary: bool = False) -> RankPart[DecoderDefinition]:
        layers = [
            each.of_rank(layer_prefix(i), mlp_prefix(layer_prefix(i)), division) for i, each in enumerate(self.layers)
        ]
        for index, lender in self.lenders.items():
            heads, lent = (layers[i].definition.attention.spec for i in (index, lender))
            if heads is None or lent is None or heads.expanded_dims != lent.expanded_dims or not _agree(heads, lent):
                raise ConfigError(
                    f"expected layers {lender} and {index}, which share keys and values, to be divided alike among "
                    f"{division.layers.size} ranks, got {lent} and {heads}; use another tensor_parallel_size"
                )
        cuts: dict[str, TensorCut] = {name: cut for each in layers for name, cut in each.cuts.items()}
        ranks = division.layers
        vocabulary = None if whole_vocabulary or ranks.is_alone else ranks.share(self.num_tokens)
        if vocabulary is not None:
            cuts |= rows(["model.embed_tokens", "lm_head"], vocabulary)
        definition = replace(self, layers=tuple(each.definition for each in layers), vocabulary=vocabulary)
        return RankPart(definition, cuts, whole=tuple(reason for each in layers for reason in each.whole))

    def attention_specs(self) -> tuple[AttentionSpec | None, ...]:
        return tuple(layer.attention.spec for layer in self.layers)

    @property
    def lenders(self) -> Lenders:
        return {index: each.lender for index, each in enumerate(self.layers) if each.lender is not None}

    @property
    def indexers(self) -> Mapping[int, IndexingSpec]:
        found = {index: each.attention.indexer for index, each in enumerate(self.layers)}
        return {index: indexer.spec for index, indexer in found.items() if indexer is not None}

    @property
    def token_weights(self) -> int:
        size = self.hidden_size
        streams = 0 if self.streams is None else num_stream_weights(self.streams, size) * len(self.layers)
        second = 0 if self.per_layer is None else 3 * size * self.per_layer.size * len(self.layers)
        return (
            second
            + streams
            + sum(each.attention.num_weights(size) + each.feed_forward.num_weights(size) for each in self.layers)
        )

    @property
    def reads_tokens(self) -> bool:
        """True if a layer reads the tokens of a step, and not only what the network made of them."""
        return any(layer.feed_forward.reads_tokens for layer in self.layers)

    @property
    def exchanges_rows(self) -> bool:
        return any(layer.feed_forward_sum is Summed.ALL for layer in self.layers)

    @property
    def mask(self) -> RowMask:
        return CAUSAL if self.causal else FULL

    @property
    def copies(self) -> frozenset[str]:
        return frozenset({OUTPUT_PROJECTION}) if self.tied_embedding else frozenset()

    @property
    def beside_prefixes(self) -> tuple[str, ...]:
        return tuple(each.prefix for each in self.beside)

    @property
    def expert_stacks(self) -> tuple[ExpertStack, ...]:
        return tuple(
            stack
            for index, each in enumerate(self.layers)
            for stack in each.feed_forward.expert_stacks(mlp_prefix(layer_prefix(index)))
        )

    def load(self, weights: WeightReader, taps: Taps = NO_TAPS) -> Decoder:
        """Builds the network from tensors with Hugging Face names."""
        for name in self.copies:
            weights.check_copy(
                name,
                EMBEDDING,
                "tie_word_embeddings, true in the config or by default",
                "set tie_word_embeddings to false in config.json if both are to be used, or remove the tensor",
            )
        embedding, head = self._load_vocabulary(weights)
        states = self._load_states(weights, embedding, taps)
        weights.finish()
        return Decoder(self, states, head)

    def load_states(self, weights: WeightReader) -> DecoderStates:
        """Like `load`, without the output projection."""
        states = self._load_states(weights, weights.embedding("model.embed_tokens", self.num_tokens, self.hidden_size))
        weights.finish(ignorable=(OUTPUT_PROJECTION,))
        return states

    def _load_states(self, weights: WeightReader, embedding: Embedding, taps: Taps = NO_TAPS) -> DecoderStates:
        if not set(range(len(self.layers) + 1)).issuperset(taps.streams) or len(set(taps.streams)) < len(taps.streams):
            raise ValueError(
                f"expected different states, each between 0 and {len(self.layers)} layers, got those at {taps.streams}"
            )
        if taps.streams and self.residual_scale != 1.0:
            raise ValueError(
                "the states between the layers of a model with a residual multiplier are not supported yet"
            )
        if taps.streams and self.streams is not None:
            raise ValueError("the states between the layers of a model with several residual streams are not supported")
        if taps.streams and any(layer.residual is not None for layer in self.layers):
            raise ValueError("the states between layers that add to a norm are not supported yet")
        per_layer = None
        if self.per_layer is not None:
            per_layer = self.per_layer.load(weights, len(self.layers), self.hidden_size, self.norms)
        layers = tuple(
            load_layer(self, index, weights, layer_prefix(index), per_layer)
            if self.streams is None
            else load_streamed_layer(self, self.streams, index, weights)
            for index in range(len(self.layers))
        )
        head = None if self.streams is None else load_head(self.streams, weights, self.hidden_size)
        final_norm = self.norms_behind(len(self.layers)).load(weights, "model.norm", self.hidden_size)
        self._leave_predictors(weights)
        for each in self.beside:
            weights.leave(each.prefix, each.what, each.why)
        specs = {layer.rotary: None for layer in self.layers if layer.rotary is not None}
        rotaries = {spec: Rotary(spec, weights.device) for spec in specs}
        return DecoderStates(self, embedding, layers, final_norm, rotaries, taps, per_layer, head)

    def _leave_predictors(self, weights: WeightReader) -> None:
        """Skips the layers for multi-token prediction. A plain layer in their place is refused as unused."""
        for index in range(len(self.layers), len(self.layers) + len(self.predictors)):
            if f"{layer_prefix(index)}.{PREDICTOR_TENSOR}" in weights.names:
                weights.leave(
                    f"{layer_prefix(index)}.",
                    "multi-token prediction",
                    "they predict tokens after the next one, which does not need them; the answers are the same",
                )

    def _load_vocabulary(self, weights: WeightReader) -> tuple[Embedding, Projection]:
        own, size = self.vocabulary, self.hidden_size
        num_tokens = self.num_tokens if own is None else len(own)
        if self.tied_embedding:
            embedding, head = weights.tied_embedding("model.embed_tokens", num_tokens, size)
        else:
            embedding = weights.embedding("model.embed_tokens", num_tokens, size)
            head = weights.projection({"lm_head": num_tokens}, size, bias=False)
        if own is None:
            return embedding, head
        collectives = weights.links.within
        widths = [len(part) for part in collectives.rank.shares(self.num_tokens)]
        return SummedEmbedding(embedding, own, collectives), JoinedProjection(head, widths, collectives)


@dataclass(frozen=True, eq=False)
class DecoderStates(Model):
    """The network without its output projection."""

    definition: DecoderDefinition
    embedding: Embedding
    layers: tuple[DecoderLayer | StreamedLayer, ...]
    final_norm: RmsNorm
    rotaries: dict[RotarySpec, Rotary]
    taps: Taps
    per_layer: PerLayerInputs | None = None
    head: StreamHead | None = None
    """How the residual streams are joined; None if there is one."""

    @property
    def turns(self) -> bool:
        return all(layer.attention.turns for layer in self.layers)

    @property
    def states_out(self) -> int:
        return self.taps.count * self.definition.hidden_size

    def reserve(self, scratch: Scratch) -> None:
        self.stream(scratch)
        self._tables(scratch)
        for layer in self.layers:
            layer.attention.buffers(scratch)
            layer.mlp.buffers(scratch)
        if self.per_layer is not None:
            self.per_layer.buffers(scratch)
        if self.head is not None:
            self.head.rooms(scratch)
        if self.definition.reads_tokens:
            scratch.of(TokenBuffers)

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        return scratch.operations.widened(self.wanted(planned, scratch))

    def wanted(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        """A copy of the states of the tokens that the batch asks for, [num_logits, hidden_size]."""
        self.embed(planned, self.stream(scratch).hidden, scratch)
        return self.wanted_of_stream(planned, scratch)

    def embed(self, planned: PlannedBatch, out: Tensor, scratch: Scratch) -> None:
        """Writes the embeddings of the batch's tokens, [num_tokens, hidden_size]."""
        scale = self.definition.embedding_scale / self.definition.residual_scale
        self.embedding(planned.batch.tokens, scale, out, scratch.operations)

    def wanted_of_stream(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        """Like `wanted`, if the input of the first layer is in the stream already."""
        batch, stream, operations = planned.batch, self.stream(scratch), scratch.operations
        tables = self._tables(scratch)
        self._begin(planned, tables, scratch)
        taps = self._tapped(scratch)
        for index, layer in enumerate(self.layers):
            if index in taps:
                operations.copy(stream.hidden, taps[index])
            layer(stream, planned, None if layer.rotary is None else tables[layer.rotary], scratch)
        if len(self.layers) in taps:
            operations.copy(stream.hidden, taps[len(self.layers)])
        if self.head is not None:
            self.head.join(stream.hidden, scratch)
        if self.taps.final:
            operations.norm(stream.hidden, self.final_norm, self._made(scratch, self.taps.count - 1))
        wanted = stream.hidden.new_empty((len(batch.logit_indices), self.definition.hidden_size))
        operations.norm_rows(stream.hidden, batch.logit_indices, self.final_norm, wanted)
        return wanted

    def _begin(self, planned: PlannedBatch, tables: Mapping[RotarySpec, RotaryTable], scratch: Scratch) -> None:
        """Computes what all layers share. The embeddings are in the stream."""
        batch, stream, operations = planned.batch, self.stream(scratch), scratch.operations
        for spec, table in tables.items():
            operations.rotary_table(self.rotaries[spec], batch.positions, table)
            if spec.window is not None and table.windows is not None:
                operations.window_table(self.rotaries[spec], batch.positions, spec.window, table.windows)
        if self.per_layer is not None:
            self.per_layer(batch.tokens, stream.hidden, scratch)
        if self.definition.reads_tokens:
            scratch.of(TokenBuffers).tokens.copy_(batch.tokens)
        if self.head is not None:
            self.head.rooms(scratch).fill(stream.hidden, scratch)

    def _tapped(self, scratch: Scratch) -> dict[int, Tensor]:
        """Where the states between layers go, by the number of layers before them."""
        return {stream: self._made(scratch, number) for number, stream in enumerate(self.taps.streams)}

    def _made(self, scratch: Scratch, number: int) -> Tensor:
        """Room for one state of each token."""
        size = self.definition.hidden_size
        return scratch.of(MadeStates, self.states_out).states[:, number * size : (number + 1) * size]

    def _tables(self, scratch: Scratch) -> dict[RotarySpec, RotaryTable]:
        return {
            spec: scratch.of(TableBuffers, number, spec.head_dim, spec.window is not None).table
            for number, spec in enumerate(self.rotaries)
        }

    def stream(self, scratch: Scratch) -> StreamBuffers:
        """The residual stream of a step."""
        return scratch.of(StreamBuffers, self.definition.hidden_size)


@dataclass(frozen=True, eq=False)
class Decoder(Model):
    """The whole network."""

    definition: DecoderDefinition
    states: DecoderStates
    head: Projection

    @property
    def turns(self) -> bool:
        return self.states.turns

    @property
    def states_out(self) -> int:
        return self.states.states_out

    def reserve(self, scratch: Scratch) -> None:
        self.states.reserve(scratch)

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        return self.logits(self.states.wanted(planned, scratch), scratch)

    def logits(self, hidden: Tensor, scratch: Scratch) -> Tensor:
        """The logits [num_logits, vocab_size] fp32 of states behind the final norm."""
        out = scratch.empty_rows(hidden.shape[0], self.head.out_features, hidden, turns=self.head.turns)
        self.head(hidden, out)
        logits = scratch.operations.widened(out)
        if self.definition.logit_scale != 1.0:
            scratch.operations.scale(logits, self.definition.logit_scale)
        if self.definition.logit_softcap is not None:
            scratch.operations.softcap(logits, self.definition.logit_softcap)
        return logits


def load_layer(
    definition: DecoderDefinition,
    index: int,
    weights: WeightReader,
    prefix: str,
    per_layer: PerLayerInputs | None = None,
) -> DecoderLayer:
    """The layer `index` of the definition, which is stored under `prefix`."""
    hidden_size = definition.hidden_size
    described, sandwich = definition.layers[index], definition.sandwich_norms

    def norm(name: str, norms: NormDefinition = definition.norms) -> RmsNorm:
        return norms.load(weights, f"{prefix}.{name}", hidden_size)

    residual = described.residual
    before_mlp = definition.norms if residual is None else definition.norms.of_divided(residual.attention_added)
    first = norm("input_layernorm", definition.norms_behind(index))
    after_attention = first if described.has_one_part else norm("post_attention_layernorm", before_mlp)
    gate = None
    if definition.per_layer is not None and per_layer is not None:
        norms = definition.norms
        gate = definition.per_layer.load_gate(weights, per_layer, index, prefix, hidden_size, norms)
    return DecoderLayer(
        rotary=described.rotary,
        attention_norm=first,
        attention=described.load_attention(weights, index, prefix, hidden_size),
        # In plain models this name is the norm before the feed-forward, in sandwich models the one after attention.
        attention_out_norm=after_attention if sandwich else None,
        mlp_norm=norm("pre_feedforward_layernorm") if sandwich else after_attention,
        mlp=described.load_feed_forward(weights, mlp_prefix(prefix), hidden_size),
        mlp_out_norm=norm("post_feedforward_layernorm") if sandwich else None,
        per_layer=gate,
        scale=weights.take(f"{prefix}.layer_scalar", (1,)) if definition.scaled_layers else None,
        attention_kept=None if residual is None else first.times(residual.attention_factor),
        mlp_kept=None if residual is None else after_attention.times(residual.feed_forward_factor),
    )


def load_streamed_layer(
    definition: DecoderDefinition, rule: StreamRule, index: int, weights: WeightReader
) -> StreamedLayer:
    """The layer `index` of a definition with several residual streams."""
    size, prefix, described = definition.hidden_size, layer_prefix(index), definition.layers[index]
    return StreamedLayer(
        rotary=described.rotary,
        attention_norm=definition.norms.load(weights, f"{prefix}.input_layernorm", size),
        attention=described.load_attention(weights, index, prefix, size),
        attention_streams=load_connection(rule, weights, f"{prefix}.attn_hc", size),
        mlp_norm=definition.norms.load(weights, f"{prefix}.post_attention_layernorm", size),
        mlp=described.load_feed_forward(weights, mlp_prefix(prefix), size),
        mlp_streams=load_connection(rule, weights, f"{prefix}.ffn_hc", size),
    )


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}"


def mlp_prefix(layer: str) -> str:
    """What the names of a feed-forward's tensors begin with, in a layer with this prefix."""
    return f"{layer}.mlp"


def _agree(heads: AttentionSpec, lent: AttentionSpec) -> bool:
    """True if both have as many heads of keys."""
    return heads.num_q_heads // heads.group_size == lent.num_q_heads // lent.group_size
