"""The gated delta layer equals transformers' module, in either way of storing it and in either order of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from sightline.attention.contract import RecurrentInputs
from sightline.attention.oracle.recurrent import empty_state, empty_tail, recur_row
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import RecurrentSpec
from sightline.core.ledger import Ledger
from sightline.layers.recurrent.gated_delta import GatedDelta
from sightline.layers.sink import Written
from sightline.layers.source import Given
from sightline.models.loading.safetensors.folder import FolderCheckpoint
from sightline.models.norms import NormDefinition
from sightline.models.recurrent.gated_delta import DeltaStorage, GatedDeltaDefinition
from sightline.models.weights import WeightReader
from support.layers import scratch_for
from support.tiny_models import scale_weights
from support.tiny_qwen_hybrid import HEADS, LINEAR, SLOW

HIDDEN, EPSILON = 24, 1e-3
SPEC = RecurrentSpec(4, 2, 8, 12, 8**-0.5, delta_rule=True, channel_decay=False, unit_keys=True, conv_width=4)
MODULES: dict[DeltaStorage, tuple[Any, Any]] = {
    DeltaStorage.BY_KEY_HEAD: (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    DeltaStorage.SEPARATE: (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
}


class OracleBatch:
    """Stands in for a planned batch of one row without context: the oracle computes it."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> None:
        assert out.is_contiguous()
        assert inputs.mixed.stride(-1) == inputs.decay.stride(-1) == inputs.beta.stride(-1) == 1
        self.layers.append(layer)
        out.copy_(recur_row(SPEC, inputs, empty_state(SPEC), empty_tail(SPEC)).out)


def make_module(storage: DeltaStorage) -> Any:
    make_config, make = MODULES[storage]
    config = make_config(hidden_size=HIDDEN, rms_norm_eps=EPSILON, layer_types=[LINEAR], num_hidden_layers=1, **HEADS)
    module = make(config, 0).eval()
    module.A_log.data.fill_(SLOW)
    scale_weights(module, seed=5)
    return module


def load_layer(module: Any, storage: DeltaStorage, folder: Path) -> GatedDelta:
    save_file(
        {f"x.{name}": each.contiguous() for name, each in module.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text("{}")
    weights = WeightReader(
        FolderCheckpoint(folder, Ledger()), torch.float32, torch.device("cpu"), Ledger(), lambda done, total: None
    )
    layer = GatedDeltaDefinition(SPEC, storage, NormDefinition(EPSILON)).load(weights, 3, "x", HIDDEN)
    weights.finish()
    return layer


@pytest.mark.parametrize("storage", DeltaStorage)
@pytest.mark.parametrize("num_tokens", [1, 5, 20, 64])
def test_the_layer_equals_the_module(storage: DeltaStorage, num_tokens: int, tmp_path: Path) -> None:
    module = make_module(storage)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(8))
    planned, out = OracleBatch(), torch.full_like(x, torch.nan)
    load_layer(module, storage, tmp_path)(Given(x), Written(out), cast(PlannedBatch, planned), None, scratch_for(x))
    with torch.no_grad():
        expected = module(x[None])[0]
    assert planned.layers == [3]
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("storage", DeltaStorage)
def test_a_definition_counts_the_weights_of_its_products(storage: DeltaStorage) -> None:
    matrices = [each for each in make_module(storage).parameters() if each.dim() == 2]
    definition = GatedDeltaDefinition(SPEC, storage, NormDefinition(EPSILON))
    assert definition.num_weights(HIDDEN) == sum(each.numel() for each in matrices)
