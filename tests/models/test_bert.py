"""BERT gives transformers' states on random weights, and the lack of any one feature would be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import BertModel

from sightline.attention.backends import registry
from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.capability import Capability, Work
from sightline.attention.groups import group_layers
from sightline.attention.kinds import Feature
from sightline.attention.selection import Candidate
from sightline.core.batch import CAUSAL, RowMask
from sightline.core.errors import NoBackendError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.engine.embedder import Embedder
from sightline.engine.text_embedder import TextEmbedder
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.activation import Activation
from sightline.layers.norm import LayerNorm
from sightline.models.bert import bert
from sightline.models.config_reader import ConfigReader
from sightline.models.encoder import Encoder, EncoderDefinition, EncoderLayer
from sightline.models.loading.opening import open_checkpoint
from sightline.models.loading.pooling import Pooling, PoolingKind
from sightline.models.registry import define_embedder, define_model
from sightline.models.weights import WeightReader
from sightline.runner.build import assemble_runtime, make_store, select_backends
from support.attention_cases import CPU
from support.layers import without_bias
from support.tiny_bert import (
    POSITIONS,
    VOCAB,
    make_bert,
    open_tiny,
    reference_vector,
    save_embedder,
    vectors,
    write_modules,
)
from support.tiny_models import random_prompts, relative_error

TOLERANCE = 2e-6
VISIBLE = 100 * TOLERANCE
LENGTHS = [1, 2, 5, 5, 9, 17, 5, 33, POSITIONS, 2]
ACTIVATIONS = {"gelu": Activation.GELU, "gelu_new": Activation.GELU_TANH, "relu": Activation.RELU} | {
    "silu": Activation.SILU
}
TEXTS = random_prompts(LENGTHS, seed=1, vocab=VOCAB)


@pytest.fixture(scope="module")
def model() -> BertModel:
    return make_bert()


@pytest.fixture(scope="module")
def folder(model: BertModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(model, tmp_path_factory.mktemp("bert"), normalise=False)


def expected(model: BertModel, pooling: str, *, normalise: bool = False) -> torch.Tensor:
    return torch.stack([reference_vector(model, text, pooling, normalise=normalise) for text in TEXTS])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_transformers(tmp_path: Path, activation: str, pooling: str) -> None:
    model = make_bert(activation=activation)
    found = vectors(open_tiny(save_embedder(model, tmp_path, pooling=pooling, normalise=False)), TEXTS)
    assert relative_error(found, expected(model, pooling)) <= TOLERANCE


def test_vectors_have_length_1_where_the_files_say_so(model: BertModel, folder: Path, tmp_path: Path) -> None:
    found = vectors(open_tiny(save_embedder(model, tmp_path)), TEXTS)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(TEXTS)))
    torch.testing.assert_close(found, expected(model, "mean", normalise=True), atol=TOLERANCE, rtol=0)
    assert not torch.allclose(vectors(open_tiny(folder), TEXTS).norm(dim=1), torch.ones(len(TEXTS)), atol=0.1)


def test_older_files_with_the_buffer_of_positions_load(model: BertModel, tmp_path: Path) -> None:
    state = model.state_dict() | {"embeddings.position_ids": torch.arange(POSITIONS).unsqueeze(0)}
    model.save_pretrained(tmp_path, state_dict=state)
    write_modules(tmp_path, normalise=False)
    assert relative_error(vectors(open_tiny(tmp_path), TEXTS), expected(model, "mean")) <= TOLERANCE


@dataclass(frozen=True)
class Change:
    """One feature taken out, of the definition or of the loaded network."""

    name: str
    define: Callable[[EncoderDefinition], EncoderDefinition] = lambda definition: definition
    build: Callable[[Encoder], Encoder] = lambda encoder: encoder


def in_layers(name: str, change: Callable[[EncoderLayer], EncoderLayer]) -> Change:
    return Change(name, build=lambda encoder: replace(encoder, layers=tuple(change(each) for each in encoder.layers)))


def no_norm(norm: LayerNorm) -> LayerNorm:
    """Takes away the mean and nothing else: next to its epsilon, no variance counts."""
    return LayerNorm(torch.full_like(norm.weight, 1e5), torch.zeros_like(norm.bias), 1e10)


def no_shift(norm: LayerNorm) -> LayerNorm:
    return LayerNorm(norm.weight, torch.zeros_like(norm.bias), norm.epsilon)


def without_positions(encoder: Encoder) -> Encoder:
    """Every token is at the first position."""
    return replace(encoder, places=encoder.places[:1].expand_as(encoder.places))


def in_spec(definition: EncoderDefinition) -> EncoderDefinition:
    return replace(definition, spec=replace(definition.spec, scale=1.0))


class CausalDefinition(EncoderDefinition):
    """An encoder whose tokens see only those before them."""

    @property
    def mask(self) -> RowMask:
        return CAUSAL


def as_causal(definition: EncoderDefinition) -> EncoderDefinition:
    return CausalDefinition(**{name: getattr(definition, name) for name in definition.__dataclass_fields__})


def less_segment(model: BertModel) -> Change:
    """The tokens' kind, of which the loaded network has only the sum with the position."""
    segment = model.embeddings.token_type_embeddings.weight.detach()[0]
    return Change("token types", build=lambda encoder: replace(encoder, places=encoder.places - segment))


CHANGES = [
    Change("positions", build=without_positions),
    Change("positions by one", build=lambda x: replace(x, places=x.places.roll(1, 0))),
    Change("norm epsilon", define=lambda x: replace(x, norm_epsilon=1e-12)),
    Change("tanh in gelu", define=lambda x: replace(x, activation=Activation.GELU_TANH)),
    Change("relu", define=lambda x: replace(x, activation=Activation.RELU)),
    Change("score scale", define=in_spec),
    Change("full mask", define=as_causal),
    Change("norm of the embedding", build=lambda x: replace(x, norm=no_norm(x.norm))),
    Change("bias of that norm", build=lambda x: replace(x, norm=no_shift(x.norm))),
    in_layers(
        "query, key and value biases",
        lambda x: replace(x, attention=replace(x.attention, qkv=without_bias(x.attention.qkv))),
    ),
    in_layers(
        "output bias", lambda x: replace(x, attention=replace(x.attention, output=without_bias(x.attention.output)))
    ),
    in_layers("bias of up", lambda x: replace(x, mlp=replace(x.mlp, up=without_bias(x.mlp.up)))),
    in_layers("bias of down", lambda x: replace(x, mlp=replace(x.mlp, down=without_bias(x.mlp.down)))),
    in_layers("norm after attention", lambda x: replace(x, attention_norm=no_norm(x.attention_norm))),
    in_layers("norm after feed-forward", lambda x: replace(x, mlp_norm=no_norm(x.mlp_norm))),
    in_layers("biases of norms", lambda x: replace(x, mlp_norm=no_shift(x.mlp_norm))),
]


def changed_vectors(folder: Path, change: Change) -> torch.Tensor:
    base = open_tiny(folder).embedder.runtime
    ledger = Ledger()
    checkpoint = open_checkpoint(folder, ledger)
    original = define_embedder(checkpoint.config, ledger)
    assert isinstance(original, EncoderDefinition)
    definition = change.define(original)
    reader = WeightReader(checkpoint, torch.float32, CPU, ledger, lambda done, total: None)
    encoder = change.build(definition.load_states(reader))
    groups = group_layers(definition.attention_specs())
    selections = select_backends(
        base.config, groups, [selection[Work.PREFILL].candidate for selection in base.selections]
    )
    runtime = assemble_runtime(
        base.config, definition, encoder, groups, selections, make_store(base.config, groups), inline_launcher()
    )
    embedder = Embedder(runtime, definition, Pooling(PoolingKind.MEAN, normalise=False), ledger)
    return vectors(TextEmbedder(embedder, None, ledger), TEXTS)


def test_an_unchanged_network_is_within_the_tolerance(model: BertModel, folder: Path) -> None:
    assert relative_error(changed_vectors(folder, Change("nothing")), expected(model, "mean")) <= TOLERANCE


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_disabling_a_feature_would_be_seen(model: BertModel, folder: Path, change: Change) -> None:
    assert relative_error(changed_vectors(folder, change), expected(model, "mean")) >= VISIBLE


def test_leaving_token_types_out_would_be_seen(model: BertModel, folder: Path) -> None:
    assert relative_error(changed_vectors(folder, less_segment(model)), expected(model, "mean")) >= VISIBLE


def config(**values: object) -> ConfigReader:
    stated: dict[str, object] = {
        "vocab_size": 10,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "max_position_embeddings": 16,
    }
    return ConfigReader(stated | values, "BertModel")


def test_a_config_that_says_little_has_the_defaults_of_bert() -> None:
    definition = bert(config())
    assert (definition.num_segments, definition.activation) == (2, Activation.GELU)
    assert definition.norm_epsilon == 1e-12
    assert (definition.spec.num_q_heads, definition.spec.num_kv_heads, definition.spec.head_dim) == (3, 3, 4)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "5 heads"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"layer_norm_eps": 0}, "layer_norm_eps"),
    ],
)
def test_what_is_not_as_in_bert_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        bert(config(**values))


def test_a_bert_that_is_to_generate_is_refused_with_the_remedy(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"BertModel.*it is an embedding model: use task embed"):
        define_model(open_checkpoint(folder, Ledger()).config, Ledger())


def test_a_backend_that_knows_causal_rows_alone_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CausalOnly(TorchBackend):
        capabilities: ClassVar[tuple[Capability, ...]] = tuple(
            replace(row, features=row.features - {Feature.NON_CAUSAL}) for row in TorchBackend.capabilities
        )

    candidate = Candidate.of("causal-only", CausalOnly, "a test", by_default=True)
    monkeypatch.setattr(registry, "installed", lambda: (candidate,))
    with pytest.raises(NoBackendError, match="causal-only: lacks non-causal"):
        open_tiny(folder)
