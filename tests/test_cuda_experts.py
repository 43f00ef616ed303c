"""On an NVIDIA GPU: experts computed at once are right, read nothing on the host, and can be captured in a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.core.ledger import Ledger
from sightline.layers.moe import ExpertCompute, ExpertMlp
from sightline.layers.scratch import Activations
from sightline.layers.sink import Written
from sightline.layers.source import Given
from sightline.models.decoder import Decoder
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from support.expert_cases import assert_right, computed, make_case
from support.layers import TORCH
from support.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v2_groups", "deepseek_v3"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300, 1000])
def test_large_experts_equal_one_choice_after_another(num_tokens: int, dtype: torch.dtype) -> None:
    """All sizes of tiles, with sizes that are whole blocks and sizes that are not."""
    for hidden, size in ((256, 192), (200, 136)):
        case = make_case(num_tokens, 4, 12, hidden, size, dtype=dtype, bias=True)
        assert_right(case, computed(case))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_layer_is_replayed_with_other_tokens(family: str, tmp_path: Path) -> None:
    """Captured at 8 tokens; the last three of a replay are padding that is not finite."""
    make_model(family).save_pretrained(tmp_path)
    expected, layer = (expert_layer(tmp_path, compute) for compute in (ExpertCompute.ONE_BY_ONE, ExpertCompute.AT_ONCE))
    x = torch.randn(8, layer.router.in_features, device="cuda")
    activations = Activations(Workspace(x.device, 1 << 28, poison=True), MAIN_LANE, 8, x.dtype, TORCH, turns=False)
    scratch, out = activations.shaped(8), torch.full_like(x, torch.nan)
    layer(Given(x), Written(out), scratch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(Given(x), Written(out), scratch)
    for seed in range(4):
        x.copy_(torch.randn(8, x.shape[1], generator=torch.Generator().manual_seed(seed)))
        x[5:] = torch.nan
        out.fill_(torch.nan)
        graph.replay()
        wanted = torch.full_like(x, torch.nan)
        expected(Given(x[:5]), Written(wanted[:5]), activations.shaped(5))
        torch.testing.assert_close(out[:5], wanted[:5], atol=1e-4, rtol=1e-4)
        assert out[5:].isnan().all()


def expert_layer(folder: Path, compute: ExpertCompute) -> ExpertMlp:
    checkpoint = open_checkpoint(folder, Ledger())
    reader = WeightReader(
        checkpoint, torch.float32, torch.device("cuda"), Ledger(), lambda *_: None, expert_compute=compute
    )
    decoder = define_model(checkpoint.config, Ledger()).load(reader)
    assert isinstance(decoder, Decoder)
    return next(layer.mlp for layer in decoder.states.layers if isinstance(layer.mlp, ExpertMlp))


def test_nothing_is_read_on_the_host(tmp_path: Path) -> None:
    make_model("deepseek_v3").save_pretrained(tmp_path)
    layer = expert_layer(tmp_path, ExpertCompute.AT_ONCE)
    x: Tensor = torch.randn(8, layer.router.in_features, device="cuda")
    scratch = Activations(Workspace(x.device, 1 << 28), MAIN_LANE, 8, x.dtype, TORCH, turns=False).shaped(8)
    out = torch.empty_like(x)
    layer(Given(x), Written(out), scratch)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(Given(x), Written(out), scratch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
