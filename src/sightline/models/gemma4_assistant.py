"""Gemma 4's assistant: a drafter that has no cache and reads the keys and values of its target.

    target's embedding of the last token ┐
    state                                ┴─▶ projection ─▶ layers of queries alone ─▶ norm ─┬─▶ logits
                                                                                            └─▶ projection ─▶ next state

Every step of a round runs at one position, the first behind the target's entries, and sees those entries alone
(`MaskKind.CONTEXT`). The first state is the target's own, behind its final norm; the others come from the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sightline.attention.groups import LayerGroup, Lenders, borrow_layers
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec
from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.layers.embedding import Embedding
from sightline.layers.linear import Projection
from sightline.layers.scratch import Scratch
from sightline.models.attention import BorrowedAttentionDefinition
from sightline.models.config_reader import INFORMATIONAL, ConfigReader
from sightline.models.contract import Definition, GivenStates, MadeStates, Model, Taps
from sightline.models.decoder import Decoder, DecoderDefinition
from sightline.models.drafting import DraftDefinition, LoadedDraft
from sightline.models.field_effects import fields_without_effect
from sightline.models.gemma4 import read_kinds, read_layers
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.shared_config import FULL, SLIDING
from sightline.models.weights import WeightReader

ARCHITECTURE = "Gemma4AssistantForCausalLM"
_IDLE_NAMES = """
    attention_k_eq_v centroid_intermediate_top_k final_logit_softcapping global_head_dim moe_intermediate_size
    num_centroids num_experts num_global_key_value_heads num_kv_shared_layers sliding_window tie_word_embeddings
    top_k_experts use_bidirectional_attention vocab_size_per_layer_input
"""
_IDLE = frozenset(_IDLE_NAMES.split())
"""Fields that may have no effect: those of keys and values, of experts, of the target's logits, of unused clusters."""


@dataclass(frozen=True)
class OrderedTokens:
    """Tokens in clusters of one size. Only those of the clusters that a state is nearest to can be drafted."""

    num_clusters: int
    num_chosen: int
    """The number of clusters whose tokens can be drafted."""

    def load(self, weights: WeightReader, num_tokens: int, hidden_size: int) -> TokenClusters:
        name = "masked_embedding.token_ordering"
        order = weights.take(name, (num_tokens,), torch.int64)
        if not torch.equal(order.sort().values, torch.arange(num_tokens, device=order.device)):
            raise CheckpointError(f"expected each of {num_tokens} tokens once in {name}, got others; use another file")
        centroids = weights.projection({"masked_embedding.centroids": self.num_clusters}, hidden_size, bias=False)
        return TokenClusters(centroids, order.view(self.num_clusters, -1), self.num_chosen)


@dataclass(frozen=True, eq=False)
class TokenClusters:
    """The clusters with their weights."""

    centroids: Projection
    tokens: Tensor
    """[num_clusters, tokens of a cluster] int64."""
    num_chosen: int

    def limited(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """The logits [num_rows, vocab_size] with those of other tokens just below the least that can be drafted."""
        scores = hidden.new_empty((len(hidden), len(self.tokens)))
        self.centroids(hidden, scores)
        tokens = self.tokens[scores.topk(self.num_chosen, dim=1).indices].flatten(1)
        kept = logits.gather(1, tokens)
        least = kept.amin(dim=1, keepdim=True) - 1.0
        return least.expand_as(logits).scatter(1, tokens, kept)


@dataclass(frozen=True)
class AssistantDefinition(Definition):
    """The network."""

    decoder: DecoderDefinition
    """Its layers, which have queries alone."""
    lender_layers: tuple[int, ...]
    """For each of its layers, the layer of the target whose keys and values it reads."""
    target_size: int
    """The width of the target's states and embeddings."""
    target_scale: float
    """The factor on the target's embeddings."""
    ordered: OrderedTokens | None = None
    """None if every token can be drafted."""

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def max_positions(self) -> int:
        return self.decoder.max_positions

    def attention_specs(self) -> tuple[AttentionSpec | None, ...]:
        return self.decoder.attention_specs()

    def groups(self, network: str = "", target: Sequence[LayerGroup] = ()) -> tuple[LayerGroup, ...]:
        lenders: Lenders = dict(enumerate(self.lender_layers))
        specs = {layer: spec for layer, spec in enumerate(self.attention_specs()) if spec is not None}
        return borrow_layers(specs, lenders, target, network)

    def load(self, weights: WeightReader, target_embedding: Embedding) -> Assistant:
        """Builds the network, which uses the target's embedding."""
        size = self.decoder.hidden_size
        entry = weights.projection({"pre_projection": size}, 2 * self.target_size, bias=False)
        leave = weights.projection({"post_projection": self.target_size}, size, bias=False)
        clusters = None
        if self.ordered is not None:
            clusters = self.ordered.load(weights, self.vocab_size, size)
        return Assistant(self, target_embedding, entry, self.decoder.load(weights), leave, clusters)


class AssistantBuffers:
    """The token's embedding and the state side by side, and the normalised stream."""

    def __init__(self, scratch: Scratch, target_size: int, hidden_size: int) -> None:
        self.joined = scratch.take_rows("assistant.joined", 2 * target_size)
        self.token, self.state = self.joined.chunk(2, dim=1)
        self.normed = scratch.take_rows("assistant.normed", hidden_size)


@dataclass(frozen=True, eq=False)
class Assistant(Model):
    """The network with its weights. A step takes a token and a state for each row, and gives logits and a state."""

    definition: AssistantDefinition
    target_embedding: Embedding
    entry: Projection
    decoder: Decoder
    leave: Projection
    clusters: TokenClusters | None

    @property
    def states_in(self) -> int:
        return self.definition.target_size

    @property
    def states_out(self) -> int:
        return self.definition.target_size

    @property
    def turns(self) -> bool:
        return self.decoder.turns

    def reserve(self, scratch: Scratch) -> None:
        self._buffers(scratch)
        self.decoder.reserve(scratch)

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        buffers, operations, states = self._buffers(scratch), scratch.operations, self.decoder.states
        given = scratch.of(GivenStates, self.states_in).states
        made = scratch.of(MadeStates, self.states_out).states
        self.target_embedding(planned.batch.tokens, self.definition.target_scale, buffers.token, operations)
        operations.copy(given, buffers.state)
        hidden = states.stream(scratch).hidden
        self.entry(buffers.joined, hidden)
        wanted = states.wanted_of_stream(planned, scratch)
        operations.norm(hidden, states.final_norm, buffers.normed)
        self.leave(buffers.normed, made)
        logits = self.decoder.logits(wanted, scratch)
        return logits if self.clusters is None else self.clusters.limited(logits, wanted)

    def _buffers(self, scratch: Scratch) -> AssistantBuffers:
        return scratch.of(AssistantBuffers, self.definition.target_size, self.definition.decoder.hidden_size)


@dataclass(frozen=True)
class AssistantDraft(DraftDefinition):
    """The assistant as what drafts for its target."""

    assistant: AssistantDefinition

    @property
    def taps(self) -> Taps:
        return Taps(final=True)

    @property
    def networks(self) -> tuple[Definition, ...]:
        return (self.assistant,)

    def load(self, target: Decoder, weights: WeightReader) -> LoadedDraft:
        return LoadedDraft((self.assistant.load(weights, target.states.embedding),))


def define_assistant(config: Mapping[str, object], target: DecoderDefinition, ledger: Ledger) -> AssistantDefinition:
    """The assistant that a config describes, for this target. Raises `UnsupportedModelError` if they do not fit.

    The ledger says which fields of the config have no effect.
    """
    definition = _define(config, target)
    described = _described(config) | {"text_config": _described(_text_section(config))}
    choices = {"layer_types": (FULL, SLIDING)}
    for path in fields_without_effect(described, lambda changed: _define(changed, target), definition, choices):
        field = f"config field {'.'.join(path)}"
        if path[-1] in _IDLE:
            ledger.note(field, "has no effect on an assistant")
        else:
            ledger.degrade(
                field, "is not known to an assistant and was not used", "check that it does not change the output"
            )
    return definition


def _described(section: Mapping[str, object]) -> dict[str, object]:
    """The fields of a section that may change what a forward computes."""
    return {name: value for name, value in section.items() if name not in INFORMATIONAL and name != "model_type"}


def _text_section(config: Mapping[str, object]) -> Mapping[str, object]:
    section = ConfigReader(config, ARCHITECTURE).optional_section("text_config")
    if section is None:
        raise UnsupportedModelError(f"{ARCHITECTURE}: expected a text_config, got none")
    return section


def _define(config: Mapping[str, object], target: DecoderDefinition) -> AssistantDefinition:
    reader = ConfigReader(config, ARCHITECTURE)
    reader.require("architectures", [ARCHITECTURE])
    reader.require("quantization_config", None)
    text = ConfigReader(_text_section(config), f"{ARCHITECTURE}: text_config")
    kinds = read_kinds(text)
    lenders = _target_lenders(target, kinds)
    decoder = _read_decoder(text, kinds, lenders, tied=reader.boolean("tie_word_embeddings", default=True))
    target_size = reader.count("backbone_hidden_size", 1536)
    expected = (target.num_tokens, target.hidden_size)
    if (decoder.num_tokens, target_size) != expected:
        raise UnsupportedModelError(
            f"{ARCHITECTURE}: expected a vocabulary and a backbone_hidden_size of {expected}, as the target has, got "
            f"{(decoder.num_tokens, target_size)}; use the assistant of this model"
        )
    ordered = _read_order(reader, decoder.num_tokens)
    return AssistantDefinition(decoder, lenders, target_size, target.embedding_scale, ordered)


def _read_order(reader: ConfigReader, num_tokens: int) -> OrderedTokens | None:
    count = reader.count("num_centroids", 2048)
    chosen = reader.count("centroid_intermediate_top_k", 32)
    if not reader.boolean("use_ordered_embeddings", default=False):
        return None
    if num_tokens % count or chosen > count:
        raise UnsupportedModelError(
            f"{ARCHITECTURE}: expected num_centroids that divides {num_tokens} tokens, and no more of them in "
            f"centroid_intermediate_top_k, got {count} and {chosen}"
        )
    return OrderedTokens(count, chosen)


def _read_decoder(text: ConfigReader, kinds: Sequence[str], lenders: Sequence[int], *, tied: bool) -> DecoderDefinition:
    for name, neutral in (
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("hidden_size_per_layer_input", 0),
        ("enable_moe_block", False),
        ("use_double_wide_mlp", False),
        ("quantization_config", None),
    ):
        text.require(name, neutral)
    if text.count("num_kv_shared_layers", len(kinds), least=0) not in (0, len(kinds)):
        raise UnsupportedModelError(f"{ARCHITECTURE}: expected all {len(kinds)} layers to share the target's cache")
    norms = NormDefinition(text.positive("rms_norm_eps", 1e-6))
    return DecoderDefinition(
        num_tokens=text.count("vocab_size"),
        num_positions=text.count("max_position_embeddings", 131_072),
        hidden_size=text.count("hidden_size"),
        layers=tuple(_seen_from_behind(layer) for layer in read_layers(text, kinds, lenders, norms)),
        norm_epsilon=norms.epsilon,
        tied_embedding=tied,
        sandwich_norms=True,
        scaled_layers=True,
    )


def _target_lenders(target: DecoderDefinition, kinds: Sequence[str]) -> tuple[int, ...]:
    """For each layer of the assistant, the last layer of its kind in the target that has keys of its own."""
    last = {
        FULL if spec.window is None else SLIDING: index
        for index, (layer, spec) in enumerate(zip(target.layers, target.attention_specs(), strict=True))
        if layer.lender is None and spec is not None
    }
    missing = set(kinds) - set(last)
    if missing:
        raise UnsupportedModelError(
            f"{ARCHITECTURE}: expected a target with layers of kind {' and '.join(sorted(missing))}, got none"
        )
    return tuple(last[kind] for kind in kinds)


def _seen_from_behind(layer: LayerDefinition) -> LayerDefinition:
    """The layer with the window that transformers gives an assistant.

    It sees `sliding_window` + 1 entries of the target. Its query is one position behind the last of them, and a window
    counts the query's own position too.
    """
    attention = layer.attention
    assert isinstance(attention, BorrowedAttentionDefinition), "a layer with a lender borrows"
    window = attention.spec.window
    wider = None if window is None else window + 2
    return replace(layer, attention=replace(attention, spec=replace(attention.spec, window=wider)), lender=None)
