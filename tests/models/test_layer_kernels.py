"""Whole models compute the same with fused kernels, and a dense layer takes few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sightline.core.config import EngineConfig, LayerKernels
from sightline.core.errors import ConfigError
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.cpu_operations import CpuOperations
from sightline.layers.linear import Linear, Projection
from sightline.layers.moe import SeparateExperts
from sightline.layers.operations import Operations
from sightline.layers.torch_operations import TorchOperations
from sightline.layers.triton_operations import TritonOperations
from sightline.runner import build, compute
from sightline.runner.runtime import Runtime
from support.case_marks import proofs, routine
from support.changed_runtimes import compute_with
from support.tiny_bert import CLS, SEP, make_bert, open_tiny, save_embedder, vectors
from support.tiny_models import FAMILIES, Models, load_runtime, random_prompts, relative_error, stepped_logits

# While an engine warms up, attention reads a cache that nobody has written: Triton's interpreter warns of overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOLERANCE = 1e-4
"""Of the logits' scale."""
PROMPT_LENS = (5, 1)
QUICK = "qwen3"
"""Runs in `make test`."""
PROVEN = ("gemma3", "gemma4", "gpt_oss", "qwen3_moe", "deepseek_v3")
"""Run in `make prove`; the other families, with the same operations, if slow tests are asked for."""
OFTEN = (QUICK, *PROVEN)
DENSE = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
MOST_KERNELS = 9
OUTSIDE = ("embed", "rotary_table", "norm_rows", "softcap")
"""Operations of a step, not of a layer."""
every_family = pytest.mark.parametrize(
    "family",
    [QUICK, *proofs(*PROVEN), *[pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in OFTEN]],
)


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, operations: Operations) -> Runtime:
    """A runtime with operations that its settings would not choose: on a CPU, Triton's are for tests only."""
    compute_with(monkeypatch, operations)
    return load_runtime(folder, EngineConfig(cache_tokens=256, max_num_seqs=4))


def logits_of(runtime: Runtime) -> Tensor:
    sequences = random_prompts([length + 2 for length in PROMPT_LENS])
    return torch.cat(stepped_logits(runtime, sequences, PROMPT_LENS, chunk=4))


@every_family
def test_a_model_with_fused_kernels_gives_the_same_logits(
    models: Models, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = models[family]
    expected = logits_of(load(folder, monkeypatch, TorchOperations()))
    got = logits_of(load(folder, monkeypatch, TritonOperations()))
    assert relative_error(got, expected) <= TOLERANCE


def test_an_encoder_with_fused_kernels_gives_the_same_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_embedder(make_bert(), tmp_path)
    texts = [[CLS, 5, 6, 7, SEP], [CLS, 8, SEP]]
    expected = vectors(open_tiny(folder), texts)
    compute_with(monkeypatch, TritonOperations())
    torch.testing.assert_close(vectors(open_tiny(folder), texts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", routine({name: name for name in DENSE}, "llama", "gemma3"))
def test_a_dense_layer_takes_few_kernels_beside_attention(
    models: Models, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation is one kernel, as `test_triton_operations` counts, and so is a product and a bias that is added."""
    _, folder = models[family]
    runtime = load(folder, monkeypatch, TritonOperations())
    counts = Counter[str]()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            counts[name] += 1 + (name == "add" and self.bias is not None)
            return method(self, *args)

        return call

    for kind, names in ((TritonOperations, Operations.__abstractmethods__), (Linear, ("__call__", "add"))):
        for name in names:
            monkeypatch.setattr(kind, name, counted(name, getattr(kind, name)))
    [sequence] = random_prompts([1])
    stepped_logits(runtime, [sequence], [1], chunk=8)
    head = 1
    in_layers = counts.total() - head - sum(counts[name] for name in OUTSIDE)
    num_layers = len(runtime.definition.attention_specs())
    assert counts["turn_heads"] == num_layers
    assert in_layers <= MOST_KERNELS * num_layers, counts


def test_the_setting_chooses_the_kernels() -> None:
    where = (torch.device("cpu"), torch.float32, inline_launcher())
    assert isinstance(compute.make_operations(LayerKernels.TORCH, *where), TorchOperations)
    assert isinstance(compute.make_operations(LayerKernels.TRITON, *where), TritonOperations)
    assert isinstance(compute.make_operations(LayerKernels.NUMBA, *where), CpuOperations)


def test_kernels_of_a_cpu_never_get_addresses_of_a_gpu() -> None:
    with pytest.raises(ValueError, match="expected the device cpu for kernels of a CPU, got cuda:0"):
        compute.make_operations(LayerKernels.NUMBA, torch.device("cuda", 0), torch.float32, inline_launcher())


def test_fused_kernels_are_refused_on_a_cpu(models: Models) -> None:
    _, folder = models["llama"]
    with pytest.raises(ConfigError, match="expected layer_kernels torch or numba on the device cpu, got triton"):
        load_runtime(folder, EngineConfig(device="cpu", layer_kernels="triton"))


class OfTheDevice(Linear):
    """Stands for the products that a device brings."""


def projections_in(part: object) -> Iterator[Projection]:
    """All projections of a network but those of single experts."""
    match part:
        case Projection():
            yield part
        case SeparateExperts():
            return
        case tuple():
            for each in part:
                yield from projections_in(each)
        case _ if is_dataclass(part):
            for each in vars(part).values():
                yield from projections_in(each)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "deepseek_v3"])
def test_every_dense_product_is_the_devices(models: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = models[family]
    monkeypatch.setattr(build, "linear_maker", lambda *_: OfTheDevice)
    found = list(projections_in(load_runtime(folder, EngineConfig(cache_tokens=256, max_num_seqs=4)).runner._model))
    assert len(found) > 8
    assert {type(each) for each in found} == {OfTheDevice}
