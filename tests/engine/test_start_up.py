"""Starting is quick, and importing the package drags nothing heavy in."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import sightline

FIRST_TOKEN = """
import json, sys, time
import torch
start = time.process_time()
from sightline import LLM, SamplingParams
llm = LLM()
stream = llm.stream("The capital of France is", SamplingParams(temperature=0.0, max_tokens=4))
text = next(stream).text
seconds = time.process_time() - start
heavy = sorted({"transformers", "torch._dynamo"} & set(sys.modules))
print(json.dumps({"seconds": seconds, "text": text, "heavy": heavy}))
"""
MOST_SECONDS = 6.0
"""Of one processor: 1.5 to 3 s on a slow one, and many more where weights were converted or transformers imported."""


def python(code: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    return done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, sightline, json; print(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(python(code)))
    assert not modules & {"transformers", "torch", "numpy", "tokenizers", "gguf", "rich", "click"}
    assert not [name for name in modules if name.startswith("sightline.models")]


def test_the_first_token_takes_little_work_beyond_importing_torch_and_no_compiler_or_transformers() -> None:
    told = json.loads(python(FIRST_TOKEN))
    if told["seconds"] >= MOST_SECONDS:
        told = json.loads(python(FIRST_TOKEN))  # the first may have compiled kernels, which are kept
    assert told["text"] == " Paris"
    assert not told["heavy"]
    assert told["seconds"] < MOST_SECONDS


def test_every_export_is_there_and_an_unknown_one_is_not() -> None:
    for name in sightline.__all__:
        assert getattr(sightline, name) is not None
    assert set(dir(sightline)) == set(sightline.__all__)
    assert not hasattr(sightline, "no_such_name")
