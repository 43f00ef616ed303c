"""The definition of per-layer inputs, and how checkpoints store them. Does not know model families."""

from __future__ import annotations

from dataclasses import dataclass

from sightline.layers.activation import Activation
from sightline.layers.per_layer import PerLayerGate, PerLayerInputs
from sightline.models.norms import NormDefinition
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class PerLayerDefinition:
    """A second embedding of each token, with a part for each layer."""

    num_tokens: int
    """The size of its vocabulary."""
    size: int
    """The size of the part of one layer."""
    activation: Activation

    def load(self, weights: WeightReader, num_layers: int, hidden_size: int, norms: NormDefinition) -> PerLayerInputs:
        """Loads what all layers share."""
        whole = num_layers * self.size
        return PerLayerInputs(
            num_layers=num_layers,
            size=self.size,
            embedding=weights.embedding("model.embed_tokens_per_layer", self.num_tokens, whole),
            embedding_scale=self.size**0.5,
            projection=weights.projection({"model.per_layer_model_projection": whole}, hidden_size, bias=False),
            projection_scale=hidden_size**-0.5,
            norm=norms.load(weights, "model.per_layer_projection_norm", self.size),
        )

    def load_gate(
        self,
        weights: WeightReader,
        inputs: PerLayerInputs,
        layer: int,
        prefix: str,
        hidden_size: int,
        norms: NormDefinition,
    ) -> PerLayerGate:
        """Loads what the layer does with its part."""
        return PerLayerGate(
            layer=layer,
            inputs=inputs,
            gate=weights.projection({f"{prefix}.per_layer_input_gate": self.size}, hidden_size, bias=False),
            activation=self.activation,
            projection=weights.projection({f"{prefix}.per_layer_projection": hidden_size}, self.size, bias=False),
            out_norm=norms.load(weights, f"{prefix}.post_per_layer_input_norm", hidden_size),
        )
