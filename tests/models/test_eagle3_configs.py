"""Configs and checkpoints of EAGLE-3 heads: every field and tensor is used, refused, or in the ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.core.errors import CheckpointError, SightlineError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.contract import Taps
from sightline.models.decoder import DecoderDefinition
from sightline.models.eagle3 import Eagle3Definition, InputNorms
from sightline.models.registry import define_eagle3, define_model
from support.eagle3_heads import CASES, DRAFTED, HIDDEN, make_config, make_weights, save_head
from support.eagle3_runs import load_head, make_target
from support.tiny_models import VOCAB

Config = dict[str, Any]


def target_of(**changed: Any) -> DecoderDefinition:
    config = make_target().config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"]} | changed
    definition = define_model(config, Ledger())
    assert isinstance(definition, DecoderDefinition)
    return definition


def define(config: Config, ledger: Ledger | None = None, target: DecoderDefinition | None = None) -> Eagle3Definition:
    return define_eagle3(config, target or target_of(), ledger or Ledger(strict=True))


def speculators(**changed: Any) -> Config:
    return make_config(CASES["plain"]) | changed


def original(**changed: Any) -> Config:
    return make_config(CASES["original_usual_layers"]) | changed


def in_layer(**changed: Any) -> Config:
    config = speculators()
    return config | {"transformer_layer_config": config["transformer_layer_config"] | changed}


def without(config: Config, name: str) -> Config:
    return {each: value for each, value in config.items() if each != name}


def test_both_formats_describe_the_same_head() -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    assert define(speculators()) == define(original(**ids))


def test_ids_in_the_section_name_the_layers_whose_output_is_taken() -> None:
    section = {"eagle_aux_hidden_state_layer_ids": [0, 2, 6], "use_aux_hidden_state": True}
    assert define(original(eagle_config=section)).taps == Taps((1, 3, 7))


@pytest.mark.parametrize(
    "empty", [{}, {"eagle_aux_hidden_state_layer_ids": None}, {"eagle_aux_hidden_state_layer_ids": []}]
)
def test_the_usual_layers_depend_on_the_depth_of_the_target(empty: Config) -> None:
    deeper = target_of(num_hidden_layers=32)
    assert define(original(**empty)).taps == Taps((2, 3, 4))
    assert define(original(**empty), target=deeper).taps == Taps((2, 16, 29))


def test_a_head_serves_every_position_of_its_target() -> None:
    ledger = Ledger()
    assert define(original(max_position_embeddings=64), ledger).max_positions == 256
    assert [note.subject for note in ledger.notes] == ["config field max_position_embeddings"]


def test_a_vocabulary_that_is_not_told_is_that_of_the_target() -> None:
    assert define(without(original(), "draft_vocab_size")).num_drafted == VOCAB


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"])
@pytest.mark.parametrize("make", [speculators, original])
def test_an_option_changes_the_definition(make: Callable[..., Config], name: str) -> None:
    assert define(make(**{name: True})) != define(make())


def test_each_kind_of_input_norm_is_known() -> None:
    assert define(speculators(norm_before_fc=True)).input_norms is InputNorms.JOINED
    assert define(speculators(fc_norm=True)).input_norms is InputNorms.EACH


REFUSED: dict[str, tuple[Config, str]] = {
    "no residual order": (without(speculators(), "norm_before_residual"), "speculators takes it for false and vLLM"),
    "both input norms": (speculators(norm_before_fc=True, fc_norm=True), "norm_before_fc or fc_norm, got both"),
    "other speculator": (speculators(speculators_model_type="dflash"), "expected speculators_model_type 'eagle3'"),
    "section is no object": (speculators(transformer_layer_config=3), "transformer_layer_config to be an object"),
    "two values": (speculators(hidden_size=HIDDEN + 2), "one value of config field hidden_size"),
    "two layers": (in_layer(num_hidden_layers=2), "num_hidden_layers = 2 changes the result"),
    "other layer": (in_layer(model_type="gemma2"), "model_type to be one of llama, qwen3"),
    "other vocabulary": (in_layer(vocab_size=VOCAB + 1), "expected a head for a target with 101 tokens"),
    "more than the vocabulary": (speculators(draft_vocab_size=VOCAB + 1), "guesses 102 of 101 tokens"),
    "other width": (speculators(target_hidden_size=HIDDEN * 2), "from states of width 96"),
    "partial rotation": (in_layer(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "no causal mask": (in_layer(is_causal=False), "is_causal = False"),
    "qkv bias": (original(qkv_bias=True), "qkv_bias"),
    "bias": (original(bias=True), "config field bias = True"),
    "other architecture": (original(architectures=["LlamaForCausalLM"]), "expected an EAGLE-3 head"),
    "tied embedding": (original(tie_word_embeddings=True), "tie_word_embeddings = True changes the result"),
    "parallel drafts": (original(parallel_drafting=True), "parallel_drafting = True changes the result"),
    "other name of the layers": (original(target_layer_ids=[1, 2, 3]), "target_layer_ids"),
    "layer beyond the last": (speculators(eagle_aux_hidden_state_layer_ids=[1, 3, 8]), "a target with 7 layers"),
    "layers in disorder": (speculators(eagle_aux_hidden_state_layer_ids=[3, 1, 6]), "ascending layers"),
    "one layer twice": (speculators(eagle_aux_hidden_state_layer_ids=[1, 1, 6]), "ascending layers"),
    "negative layer": (speculators(eagle_aux_hidden_state_layer_ids=[-1, 1, 6]), "ascending layers"),
    "layer that is no number": (speculators(eagle_aux_hidden_state_layer_ids=[1, "2", 6]), "a list of integers"),
    "layers twice": (
        original(
            eagle_aux_hidden_state_layer_ids=[1, 3, 6], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
        ),
        "both outside and inside eagle_config",
    ),
    "no states": (original(eagle_config={"use_aux_hidden_state": False}), "got use_aux_hidden_state = False"),
    "other norms": (original(eagle_config={"use_mtp_layernorm": True}), "got use_mtp_layernorm = True"),
    "unknown switch": (original(eagle_config={"use_magic": True}), "got use_magic = True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_is_refused_by_name(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message.replace("(", r"\(")):
        define(config, Ledger())


def test_the_usual_layers_of_a_shallow_target_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="the usual ones, because the config lists none"):
        define(original(), target=target_of(num_hidden_layers=4))


@pytest.mark.parametrize("make", [speculators, original])
def test_an_unknown_field_is_in_the_ledger(make: Callable[..., Config]) -> None:
    with pytest.raises(SightlineError, match="mystery"):
        define(make(mystery=1))


def replaced(name: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights.pop(name, None)
        if value is not None:
            weights[name] = value

    return change


def all_marked(weights: dict[str, Tensor]) -> None:
    weights["t2d"] = torch.ones(VOCAB, dtype=torch.bool)


def beyond(weights: dict[str, Tensor]) -> None:
    weights["d2t"][-1] += VOCAB


def twice(weights: dict[str, Tensor]) -> None:
    weights["d2t"][1] = weights["d2t"][0] - 1


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no offsets": (replaced("d2t", None), "expected tensor d2t"),
    "offsets beyond": (beyond, "expected d2t to lead to tokens below 101"),
    "offsets to one token": (twice, f"expected d2t to lead to {DRAFTED} different tokens"),
    "marks of other tokens": (all_marked, "expected t2d to mark the 40 tokens that d2t leads to, got 61 differences"),
    "unknown tensor": (replaced("verifier_norm.weight", torch.ones(HIDDEN)), "that it would ignore: verifier_norm"),
    "two layers": (replaced("layers.1.hidden_norm.weight", torch.ones(HIDDEN)), "layers.1.hidden_norm.weight"),
    "no fusion": (replaced("fc.weight", None), "expected tensor fc.weight"),
    "no output": (replaced("lm_head.weight", None), "expected tensor lm_head.weight"),
    "norm that the config does not have": (replaced("input_norm.weight", torch.ones(3 * HIDDEN)), "input_norm.weight"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGED[name]
    weights = make_weights(CASES["shared_embedding"])
    damage(weights)
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path, "shared_embedding", weights)


def test_a_head_with_other_states_needs_an_embedding_of_its_own(tmp_path: Path) -> None:
    weights = without(make_weights(CASES["wide_target"]), "embed_tokens.weight")
    with pytest.raises(CheckpointError, match=r"expected tensor embed_tokens\.weight of width 48, got none"):
        loaded(tmp_path, "wide_target", weights)


def test_a_table_of_tokens_must_be_of_integers(tmp_path: Path) -> None:
    weights = make_weights(CASES["shared_embedding"])
    weights["d2t"] = weights["d2t"].float()
    with pytest.raises(UnsupportedModelError, match="expected 'd2t' in one of I64, I32, BOOL, got F32"):
        loaded(tmp_path, "shared_embedding", weights)


def loaded(folder: Path, name: str, weights: dict[str, Tensor]) -> object:
    for each in ("target", "head"):
        (folder / each).mkdir()
    case = CASES[name]
    make_target(case.target_hidden).save_pretrained(folder / "target")
    save_head(case, folder / "head", weights)
    return load_head(folder / "head", folder / "target", torch.zeros(VOCAB, case.target_hidden))


def test_names_may_begin_with_model(tmp_path: Path) -> None:
    weights = make_weights(CASES["shared_embedding"])
    body = {name if name == "lm_head.weight" else f"model.{name}": each for name, each in weights.items()}
    assert loaded(tmp_path, "shared_embedding", without(body, "model.embed_tokens.weight"))
    assert json.loads((tmp_path / "head/config.json").read_text())["speculators_model_type"] == "eagle3"
