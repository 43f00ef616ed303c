"""A package that is not installed is named once, with what it would bring and how to get it; nothing needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from sightline.attention import capability
from sightline.attention.backends import registry
from sightline.attention.proof import ProofBook
from sightline.cli.application import app
from sightline.core.device import Device, DeviceKind
from sightline.core.memory import MemoryBudget, MemoryTaken
from sightline.diagnose.capabilities import capability_matrix
from sightline.runner import startup
from sightline.runner.environment import collect_environment
from sightline.runner.missing import missing_packages
from sightline.runner.progress import BuildTimes
from sightline.runner.roles import ALONE_ROLE

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
HOPPER = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (9, 0))
AMPERE = replace(HOPPER, compute_capability=(8, 0))
SERVING = ("triton", "flashinfer", "fla", "flash_attn.cute")
"""Packages that serve Hopper."""
ALL = (*SERVING, "tokenspeed_mla")


@pytest.fixture(autouse=True)
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel library, whatever is."""
    names = {package.split(".")[0] for package in ALL}

    def find(name: str) -> ModuleSpec | None:
        return None if name.split(".")[0] in names else find_spec(name)

    monkeypatch.setattr(capability, "find_spec", find)


def test_each_package_is_told_once_with_what_it_brings_and_how_to_get_it() -> None:
    missing = missing_packages(registry.BUILT_IN, HOPPER)
    assert tuple(each.package for each in missing) == ALL
    for each in missing:
        assert (each.hindrance == "") == (each.package in SERVING)
        assert each.line.startswith(f"{each.package} is not installed: ")
        assert "pip install 'sightline[" in each.line
        assert len(each.line.splitlines()) == 1
    kinds = ("latent", "recurrent", "convolution", "index", "compressed", "compressed-index")
    assert missing[0].backends == ("triton", *(f"triton-{kind}" for kind in kinds))


def test_on_a_cpu_they_are_said_to_serve_cuda_devices_only() -> None:
    for each in missing_packages(registry.BUILT_IN, CPU):
        assert each.line.endswith("(serves CUDA devices only)")


def test_a_package_that_would_not_serve_the_card_says_so() -> None:
    by_package = {each.package: each for each in missing_packages(registry.BUILT_IN, AMPERE)}
    assert by_package["triton"].hindrance == ""
    assert by_package["flash_attn.cute"].hindrance == "does not list compute capability (8, 0)"


def test_what_is_installed_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_is_installed", lambda package: package != "")
    assert missing_packages(registry.BUILT_IN, HOPPER) == ()


def test_a_backend_that_does_not_say_what_its_package_brings_is_named() -> None:
    bare = replace(registry.find("triton", registry.BUILT_IN), brings="")
    [missing] = missing_packages([bare], HOPPER)
    assert missing.brings == "backend triton; install the package that has it"


def test_the_matrix_tells_one_line_a_package(tmp_path: Path) -> None:
    matrix = capability_matrix(registry.BUILT_IN, HOPPER, ProofBook(tmp_path))
    assert matrix.lines()[-len(ALL) :] == [each.line for each in matrix.missing]
    data = json.loads(json.dumps(matrix.to_data()))
    assert [each["package"] for each in data["missing"]] == list(ALL)
    assert all(each["brings"] for each in data["missing"])
    assert [each["package"] for each in data["missing"] if not each["hindrance"]] == list(SERVING)


def test_the_command_tells_them_as_text_and_as_json() -> None:
    text = CliRunner().invoke(app, ["capabilities"]).stdout.splitlines()
    for package in ALL:
        [line] = [line for line in text if line.startswith(f"{package} is not installed")]
        assert line.endswith("(serves CUDA devices only)")
    data = json.loads(CliRunner().invoke(app, ["capabilities", "--json"]).stdout)
    assert {each["hindrance"] for each in data["missing"]} == {"serves CUDA devices only"}


def test_the_environment_of_a_bug_report_tells_them() -> None:
    facts = collect_environment()
    for package in ALL:
        assert "pip install" in facts[f"missing {package}"]


@pytest.mark.parametrize(
    ("device", "told"),
    [(HOPPER, SERVING), (AMPERE, ("triton", "fla")), (CPU, ())],
    ids=["hopper", "ampere", "cpu"],
)
def test_the_start_up_report_tells_what_would_help_on_the_device(device: Device, told: tuple[str, ...]) -> None:
    config = SimpleNamespace(
        device=device, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, quantization=None, num_pages=0, page_size=16,
        cache_tokens=0, max_model_len=64, memory=MemoryBudget(), states_per_row=0, hot_buffer_size=0,
    )  # fmt: skip
    runtime = SimpleNamespace(
        config=config,
        store=SimpleNamespace(num_bytes=0),
        workspace=SimpleNamespace(num_bytes=0),
        bindings=(),
        selections=(),
        graphs=SimpleNamespace(buckets=()),
        times=BuildTimes(),
        memory_taken=MemoryTaken(0, 0, 0, 0),
        tiers=(),
        role=ALONE_ROLE,
    )
    lines = startup.startup_report(runtime)  # type: ignore[arg-type]
    assert [line.split(" is not installed")[0] for line in lines[2:]] == list(told)


WITHOUT = """
import json, sys

from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        blocked = name.split(".")[0] in ("triton", "flashinfer", "flash_attn")
        return None if blocked else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
import sightline
from sightline import LLM, SamplingParams
from sightline.attention.backends import registry
rows = {candidate.name: len(candidate.rows()) for candidate in registry.installed()}
llm = LLM(device="cpu", cache_tokens=64, max_model_len=32)
[output] = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
loaded = sorted({name.split(".")[0] for name in sys.modules} & {"triton", "flashinfer", "flash_attn"})
print(json.dumps({"rows": rows, "text": output.outputs[0].text, "loaded": loaded}))
"""


@pytest.mark.prove
def test_a_machine_without_any_of_them_imports_and_generates() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["text"] == " Paris"
    assert told["loaded"] == []
    assert all(told["rows"][candidate.name] for candidate in registry.BUILT_IN)
