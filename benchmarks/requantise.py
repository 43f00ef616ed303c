"""Writes the default model, or another GGUF file, in another type, with llama.cpp's own quantiser.

    python benchmarks/requantise.py Q4_K_M smollm2.Q4_K_M.gguf
    python benchmarks/requantise.py Q4_K_M wide.Q4_K_M.gguf --wide

With `--wide` the matrices are random, and wide enough for every block type: rows of 2,048 and 5,632 inputs, 4 layers.
The default model's rows of 576 inputs are no multiple of 256, so that llama.cpp stores most of them in smaller blocks.
From a file that is quantised already this adds its error to that of the new type: good for speed, not for quality.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

from sightline.models.loading.default_model import default_model_path

TYPES = {
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K_M": LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
    "F16": LlamaFileType.MOSTLY_F16,
    "F32": LlamaFileType.ALL_F32,
}
WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS = 2048, 5632, 4, 32, 4
WIDE_KEYS: dict[str, Any] = {
    "embedding_length": WIDTH,
    "feed_forward_length": HIDDEN,
    "block_count": LAYERS,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "rope.dimension_count": WIDTH // HEADS,
}


def write_wide(source: Path, target: Path) -> None:
    """Writes a model of random fp16 weights with the tokenizer of `source`."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    changed = {f"{architecture}.{name}": value for name, value in WIDE_KEYS.items()}
    for name, field in reader.fields.items():
        if name in ("general.architecture", "general.file_type") or name.startswith("GGUF."):
            continue
        nested = field.types[1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.get(name, field.contents()), field.types[0], nested)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    kv_width = WIDTH // HEADS * KV_HEADS
    matrices = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv_width, WIDTH),
        "attn_v": (kv_width, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    draw = numpy.random.default_rng(0)

    def add_matrix(name: str, shape: tuple[int, int]) -> None:
        values = draw.standard_normal(shape, dtype=numpy.float32) / numpy.sqrt(shape[1])
        writer.add_tensor(f"{name}.weight", values.astype(numpy.float16))

    add_matrix("token_embd", (int(embedding.shape[1]), WIDTH))
    writer.add_tensor("output_norm.weight", numpy.ones(WIDTH, numpy.float32))
    for layer in range(LAYERS):
        for name, shape in matrices.items():
            add_matrix(f"blk.{layer}.{name}", shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", numpy.ones(WIDTH, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def requantise(source: Path, target: Path, kind: LlamaFileType) -> None:
    llama_cpp = import_module("llama_cpp")

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = kind.value, True, 2
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if status != 0:
        raise SystemExit(f"expected llama.cpp to write {target}, got status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF file in another type.")
    parser.add_argument("type", choices=sorted(TYPES))
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; default: the default model")
    parser.add_argument("--wide", action="store_true", help="random weights with wide rows, and the file's tokenizer")
    arguments = parser.parse_args()
    source = arguments.model or default_model_path()
    with tempfile.TemporaryDirectory(dir=arguments.target.resolve().parent) as folder:
        if arguments.wide:
            wide = Path(folder) / "wide.gguf"
            write_wide(source, wide)
            source = wide
        requantise(source, arguments.target, TYPES[arguments.type])
    print(f"{arguments.target}: {arguments.target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
