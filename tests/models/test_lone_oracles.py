"""The oracle of hybrids computes on a CPU, whatever library is installed beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import with_support

LIBRARY = "def {}(*given, **named):\n    raise RuntimeError('computed by the library')\n"
SCRIPT = """
import importlib.util, sys, torch
from support.lone_oracles import import_oracles_alone
import_oracles_alone()
from support.hybrids import make_hybrid
for family in ("qwen3_next", "kimi_linear"):
    assert make_hybrid(family)(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
assert importlib.util.find_spec("fla")
assert "fla" not in sys.modules
"""


@pytest.mark.prove
def test_transformers_computes_recurrent_layers_itself(tmp_path: Path) -> None:
    ops = tmp_path / "fla" / "ops"
    ops.mkdir(parents=True)
    for place in (ops.parent, ops):
        (place / "__init__.py").touch()
    for name, functions in {
        "gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        "kda": ("chunk_kda", "fused_recurrent_kda", "fused_kda_gate"),
    }.items():
        (ops / f"{name}.py").write_text("".join(map(LIBRARY.format, functions)))
    environment = with_support()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
