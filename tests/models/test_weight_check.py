"""Weights that are NaN or infinite are refused when they are loaded, by name, in every format.

What becomes NaN later, while a step runs, fails its own row.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightline import LLM, SamplingParams
from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.models.finite import find_not_finite
from sightline.models.kept_weights import KeptWeights
from sightline.models.loading.gguf.file import GgufFile
from sightline.models.loading.opening import open_checkpoint
from sightline.models.weights import WeightReader
from support.case_marks import proofs
from support.gguf_files import tiny_llama, write_llama
from support.kept_weights import BLOCKS, CODES
from support.tiny_bert import make_bert, save_embedder
from support.tiny_models import make_model, random_prompts

QUERIES = "model.layers.0.self_attn.q_proj.weight"
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "cache_tokens": 512, "page_size": 4}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
CPU = torch.device("cpu")


def edit(folder: Path, name: str, change: Callable[[Tensor], object]) -> None:
    """Changes a stored tensor in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, {"format": "pt"})


def poison(value: float, *place: int) -> Callable[[Tensor], object]:
    def change(tensor: Tensor) -> None:
        tensor[place] = value

    return change


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


def reader_of(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> WeightReader:
    return WeightReader(open_checkpoint(path, Ledger()), dtype, CPU, Ledger(), lambda *_: None, **options)


def take(path: Path, name: str = QUERIES, dtype: torch.dtype = torch.float32) -> Tensor:
    reader = reader_of(path, dtype)
    return reader.take(name, open_checkpoint(path, Ledger()).tensors[name].shape)


def outcome(llm: LLM, *lengths: int) -> list[str | None]:
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in random_prompts(list(lengths))]
    return [result.outputs[0].finish_reason for result in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_wrong_number_of_a_projection_is_an_error_that_names_it(llama: Path, value: float) -> None:
    edit(llama, QUERIES, poison(value, 5, 3))
    expected = rf"{re.escape(QUERIES)} in .*model\.safetensors, got .*: 1 of 2304, the first at \[5, 3\]"
    with pytest.raises(CheckpointError, match=expected):
        LLM(str(llama), **SETTINGS)


@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "gemma3", "deepseek_v3"])
def test_every_kind_of_tensor_is_looked_at(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    # One of each kind, in the last layer and of the last expert that has it: every one takes a whole load.
    kinds = {re.sub(r"\d+", "#", name): name for name in sorted(load_file(tmp_path / "model.safetensors"))}
    for name in kinds.values():
        edit(tmp_path, name, keep := _Exchange(torch.nan))
        with pytest.raises(CheckpointError, match=f"{re.escape(name)} in .* the first at .0"):
            LLM(str(tmp_path), **SETTINGS)
        edit(tmp_path, name, keep)


class _Exchange:
    """Replaces the first number; the second call puts it back."""

    def __init__(self, value: float) -> None:
        self._value = value

    def __call__(self, tensor: Tensor) -> None:
        first = tensor.view(-1)[0]
        kept = float(first)
        first.fill_(self._value)
        self._value = kept


def test_an_embedder_is_checked_too(tmp_path: Path) -> None:
    save_embedder(make_bert(), tmp_path)
    name = "encoder.layer.0.attention.self.query.weight"
    edit(tmp_path, name, poison(torch.nan, 0, 1))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} in .* 1 of \d+, the first at \[0, 1\]"):
        LLM(str(tmp_path), task="embed", skip_tokenizer_init=True)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("used", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stored_dtype(tmp_path: Path, stored: torch.dtype, used: torch.dtype) -> None:
    make_model("llama").to(stored).save_pretrained(tmp_path)
    take(tmp_path, dtype=used)
    edit(tmp_path, QUERIES, poison(torch.nan, 47, 47))
    with pytest.raises(CheckpointError, match=r"1 of 2304, the first at \[47, 47\]"):
        take(tmp_path, dtype=used)


def test_a_number_that_the_compute_dtype_cannot_hold(llama: Path) -> None:
    edit(llama, QUERIES, poison(1e30, 1, 2))
    assert take(llama)[1, 2] == 1e30
    with pytest.raises(CheckpointError, match=r"to fit in torch.float16, got values that become infinite: 1 of 2304"):
        take(llama, dtype=torch.float16)


@pytest.mark.parametrize(("changed", "value"), [("", 0x7F), ("", 0xFF), ("_scale_inv", torch.nan)])
def test_fp8_codes_and_factors(tmp_path: Path, changed: str, value: float) -> None:
    folder, name = tmp_path, QUERIES.replace("q_proj", "q_b_proj")
    make_model("deepseek_v3").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones([-(-size // 16) for size in tensors[name].shape])
    part = tensors[name + changed]
    (part if changed else part.view(torch.uint8))[2, 1] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} in .*: \d+ of \d+, the first at"):
        take(folder, name)


HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "F16": (0,),
    "BF16": (0,),
}
"""The places of a block's fp16 numbers, by type."""


@pytest.mark.parametrize("kept", [None, *proofs(BLOCKS), CODES], ids=["dequantised", "blocks", "codes"])
@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind, places in HALVES.items() for place in places])
def test_the_scales_and_minima_of_gguf_blocks(tmp_path: Path, kind: str, place: int, kept: KeptWeights | None) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama(path, tiny_llama(hidden_size=256, intermediate_size=256), quantised=kind)
    tensor = GgufFile(path).tensors["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        # Of the second block.
        file.seek(tensor.start + tensor.storage.block_bytes + place)
        file.write(struct.pack("<H", 0x7FC0 if kind == "BF16" else 0x7E00))
    reader = reader_of(path, kept=kept)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight in .*tiny\.gguf, got"):
        reader.projection({"model.layers.1.mlp.up_proj": 256}, 256, bias=False)
    reader.projection({"model.layers.1.mlp.gate_proj": 256}, 256, bias=False)


def test_the_check_can_be_skipped_and_the_ledger_says_so(llama: Path) -> None:
    edit(llama, "model.layers.1.mlp.up_proj.weight", poison(torch.nan, 0, 0))
    llm = LLM(str(llama), skip_weight_check=True, **SETTINGS)
    assert "skip_weight_check" in [note.subject for note in llm.engine.ledger.notes]
    assert outcome(llm, 5) == ["error"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_rows_of_any_length_fail_where_attention_meets_nan(llama: Path, projection: str, dtype: str) -> None:
    edit(llama, QUERIES.replace("q_proj", projection), poison(torch.nan))
    llm = LLM(str(llama), skip_weight_check=True, dtype=dtype, **SETTINGS)
    lengths = (1, 2, 7, 8, 15, 16, 17, 40)
    assert [outcome(llm, length) for length in lengths] == [["error"]] * len(lengths)
    assert outcome(llm, *lengths) == ["error"] * len(lengths)


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
def test_a_row_whose_queries_overflow_fails_alone(llama: Path, projection: str) -> None:
    """A projection of one token overflows fp16, although every weight is finite."""

    def stand_out(tensor: Tensor) -> None:
        tensor[77] = 0.0
        tensor[77, 7] = 100.0

    edit(llama, "model.embed_tokens.weight", stand_out)
    edit(llama, QUERIES.replace("q_proj", projection), lambda tensor: tensor[:, 7].fill_(2e4))
    llm = LLM(str(llama), dtype="float16", **SETTINGS)
    prompts: Any = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [5, 77, 7], [77], [8, 9])]
    together = [result.outputs[0].finish_reason for result in llm.generate(prompts, PARAMS)]
    alone = [llm.generate([prompt], PARAMS)[0].outputs[0].finish_reason for prompt in prompts]
    assert together == alone == ["length", "error", "error", "length"]


def test_a_tensor_of_any_layout_is_searched_without_a_copy() -> None:
    for shape in ((), (0, 3), (5,), (3, 4, 5)):
        assert find_not_finite(torch.ones(shape)) is None
    tensor = torch.ones(4, 6, 5).transpose(1, 2)
    tensor[3, 2, 1] = tensor[2, 4, 5] = torch.nan
    assert find_not_finite(tensor) == "2 of 120, the first at [2, 4, 5]"
    assert find_not_finite(torch.tensor(-torch.inf)) == "1 of 1, the first at []"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16])
def test_numbers_of_every_width_are_searched(dtype: torch.dtype) -> None:
    assert find_not_finite(torch.ones(2, 3).to(dtype)) is None
    if dtype.is_floating_point:
        broken = torch.tensor([1.0, torch.nan]).to(dtype)
        assert find_not_finite(broken) == "1 of 2, the first at [1]"
