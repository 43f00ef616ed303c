"""Writes the default model, or another GGUF file, with its matrices in another type.

    python benchmarks/requantise.py Q4_0 smollm2.Q4_0.gguf

The embedding keeps its type, as the tools that make such files do it. From a file that is quantised already this adds
its error to that of the new type: good for speed, not for quality.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGMLQuantizationType

from sightline.bench.engine.peer_copies import copy_gguf
from sightline.models.loading.default_model import default_model_path


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF file with its matrices in another type.")
    parser.add_argument("type", choices=["Q8_0", "Q4_0", "Q4_1", "F16", "F32"])
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; default: the default model")
    arguments = parser.parse_args()
    source = arguments.model or default_model_path()
    copy_gguf(
        source, arguments.target, GGMLQuantizationType[arguments.type], unchanged=frozenset({"token_embd.weight"})
    )
    print(f"{arguments.target}: {arguments.target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
