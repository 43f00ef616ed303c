"""DeepSeek V4 is the same model with the names of transformers and those of the original repository, also packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.core.config import Quantization
from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.kernels.packed_weights import WeightForm
from sightline.layers.moe import ExpertCompute, ExpertMlp
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.opening import open_checkpoint
from sightline.models.loading.renamed import RULES, standard_name
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.quantised import model_facts
from support.attention_cases import CPU
from support.deepseek_v4_files import in_rows, save_original
from support.layers import feed
from support.tiny_deepseek_v4 import make_v4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves of a model whose experts have whole blocks."""
    folder = tmp_path_factory.mktemp("deepseek_v4")
    make_v4("deepseek_v4_wide").save_pretrained(folder)
    return folder


def load(stored: Checkpoint, ledger: Ledger) -> None:
    weights = WeightReader(stored, torch.float32, CPU, ledger, lambda _done, _all: None)
    define_model(stored.config, ledger).load(weights)


@pytest.mark.parametrize("packed", [False, True])
def test_both_layouts_hold_the_same_tensors(saved: Path, tmp_path: Path, packed: bool) -> None:
    exact = save_original(saved, tmp_path, packed=packed)
    theirs, ours = open_checkpoint(saved, Ledger()), open_checkpoint(tmp_path, Ledger(strict=True))
    assert set(ours.tensors) == {*theirs.tensors, "mtp.0.self_attn.q_a_proj.weight", "mtp.0.e_proj.weight"}
    for stored, tensor in exact.items():
        name = standard_name(stored, RULES["deepseek_v4"])
        assert torch.equal(ours.load(name).to(tensor.dtype), tensor), name


@pytest.mark.parametrize("packed", [False, True])
def test_predictors_are_left_and_named_and_nothing_else(saved: Path, tmp_path: Path, packed: bool) -> None:
    save_original(saved, tmp_path, packed=packed)
    ledger = Ledger(strict=True)
    load(open_checkpoint(tmp_path, ledger), ledger)
    assert [note.subject for note in ledger.notes] == ["multi-token prediction"]
    assert "2 tensors mtp.* are not loaded" in ledger.notes[0].fact


def test_experts_in_fp4_keep_the_form_that_products_decode(saved: Path, tmp_path: Path) -> None:
    save_original(saved, tmp_path, packed=True)
    stored = open_checkpoint(tmp_path, Ledger())
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert stored.tensors[name].packed is WeightForm.MXFP4
    codes, scales = stored.load_packed(name)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.uint8, (32, 32), torch.uint8, (32, 2))


@pytest.mark.prove
def test_experts_in_fp4_at_once_equal_those_one_by_one(saved: Path, tmp_path: Path) -> None:
    """On a CPU, Triton's interpreter runs them."""
    pytest.importorskip("triton")
    save_original(saved, tmp_path, packed=True)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    from sightline.layers.stacked_experts import StackedExperts  # needs Triton

    banks, found = [], []
    for compute in (ExpertCompute.ONE_BY_ONE, ExpertCompute.AT_ONCE):
        stored = open_checkpoint(tmp_path, Ledger())
        weights = WeightReader(stored, torch.float32, CPU, Ledger(), lambda *_: None, expert_compute=compute)
        mlp = define_model(stored.config, Ledger()).load(weights).states.layers[2].mlp
        assert isinstance(mlp, ExpertMlp)
        found.append(feed(mlp, x))
        banks.append(mlp.bank)
    assert isinstance(banks[1], StackedExperts)
    assert banks[1].gate_up.form is banks[1].down.form is WeightForm.MXFP4
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_packed_experts_are_counted_as_they_are_kept(saved: Path, tmp_path: Path) -> None:
    save_original(saved, tmp_path, packed=True)
    stored = open_checkpoint(tmp_path, Ledger())
    definition = define_model(stored.config, Ledger())
    facts = model_facts(Quantization.DEQUANTISE, stored, definition, definition.groups())
    weights = 4 * 12 * 3 * 32 * 64
    assert facts.packed_elements == weights
    assert facts.packed_bytes == weights // 2 + weights // 32


def test_numbers_in_fp4_are_near_what_they_stand_for() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    _, _, exact = in_rows(weight)
    assert 0.0 < float((exact - weight).abs().max()) < 0.7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.2.ffn.experts.1.w2.scale", "expected 'layers.2.ffn.experts.1.w2.weight' in .*, got I8"),
        ("layers.0.attn.wq_a.scale", "expected 'layers.0.attn.wq_a.weight' in .*, got F8_E4M3"),
    ],
)
def test_codes_without_scales_are_refused(saved: Path, tmp_path: Path, name: str, message: str) -> None:
    save_original(saved, tmp_path, packed=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=message):
        open_checkpoint(tmp_path, Ledger())


def test_scales_of_another_shape_are_refused(saved: Path, tmp_path: Path) -> None:
    save_original(saved, tmp_path, packed=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "layers.2.ffn.experts.1.w2.scale"
    tensors[name] = tensors[name][:, :0]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="a scale for each 32 inputs of an output"):
        open_checkpoint(tmp_path, Ledger())


def test_a_table_that_lists_experts_that_do_not_exist_is_refused(saved: Path, tmp_path: Path) -> None:
    save_original(saved, tmp_path, packed=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["layers.0.ffn.gate.tid2eid"][5, 1] = 12
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="to list experts from 0 to 11, got 0 to 12"):
        load(open_checkpoint(tmp_path, Ledger()), Ledger())
