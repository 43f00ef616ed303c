"""Look-ups in packed weights give exactly what the weights dequantise to."""

from __future__ import annotations

import pytest
import torch

from sightline.kernels.coded_weights import CodeForm
from sightline.kernels.cpu.processor import Processor
from sightline.layers.cpu_compute import CpuCompute
from sightline.layers.cpu_embedding import CodedEmbedding
from sightline.layers.cpu_linear import CodedLinear
from sightline.layers.torch_operations import TorchOperations
from support.coded_weights import FORMS, defined_product, random_coded
from support.cpu_launchers import SerialLauncher

TOKENS = torch.tensor([0, 36, 7, 8, 21, 7])
PROCESSORS = {"this": Processor.detect(), "portable": Processor.detect().portable()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS.keys())
@pytest.mark.parametrize("num_threads", [1, 5])
def test_vectors_are_those_of_the_dequantised_weights(form: CodeForm, processor: Processor, num_threads: int) -> None:
    weights = random_coded(form, 37, 512)
    compute = CpuCompute.on(SerialLauncher(num_threads), processor)
    [matrix] = compute.pack([weights])
    out = torch.full((6, 600), float("nan"))
    CodedEmbedding(matrix, compute)(TOKENS, 1.0, out[:, 40:552], TorchOperations())
    assert torch.equal(out[:, 40:552], weights.dequantised()[TOKENS])
    assert bool(out[:, :40].isnan().all())
    assert bool(out[:, 552:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_is_rounded_to_the_dtype_of_the_output(dtype: torch.dtype) -> None:
    weights, compute = random_coded(FORMS["Q6_K"], 37, 256), CpuCompute.on(SerialLauncher())
    [matrix] = compute.pack([weights])
    out, scale = torch.full((6, 256), float("nan"), dtype=dtype), torch.tensor(24.03, dtype=dtype)
    CodedEmbedding(matrix, compute)(TOKENS, 24.03, out, TorchOperations())
    assert torch.equal(out, (weights.dequantised()[TOKENS] * scale.float()).to(dtype))


def test_tokens_beyond_the_vocabulary_give_nan_and_read_nothing() -> None:
    weights, compute = random_coded(FORMS["Q8_0"], 37, 64), CpuCompute.on(SerialLauncher())
    [matrix] = compute.pack([weights])
    out, tokens = torch.zeros(4, 64), torch.tensor([36, 37, -1, 1 << 60])
    CodedEmbedding(matrix, compute)(tokens, 1.0, out, TorchOperations())
    assert torch.equal(out[0], weights.dequantised()[36])
    assert bool(out[1:].isnan().all())


def test_no_tokens_launch_nothing() -> None:
    launcher = SerialLauncher()
    compute = CpuCompute.on(launcher)
    [matrix] = compute.pack([random_coded(FORMS["Q8_0"], 8, 64)])
    CodedEmbedding(matrix, compute)(torch.empty(0, dtype=torch.int64), 1.0, torch.empty(0, 64), TorchOperations())
    assert launcher.names == []


def test_an_embedding_and_the_output_projection_share_their_weights() -> None:
    weights, compute = random_coded(FORMS["Q4_0"], 37, 64), CpuCompute.on(SerialLauncher(2))
    [matrix] = compute.pack([weights])
    vectors, logits = torch.empty(6, 64), torch.empty(6, 37)
    CodedEmbedding(matrix, compute)(TOKENS, 1.0, vectors, TorchOperations())
    CodedLinear([matrix], None, compute)(vectors, logits)
    expected = defined_product(weights, weights.dequantised()[TOKENS])
    assert float((logits - expected).abs().max() / expected.abs().max()) < 2e-6
