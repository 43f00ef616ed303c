"""One thread a test process: the tests' tensors are tiny, and the processes run side by side.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything imports triton. A shell
that runs the tests in the background has them, and every process that they start, ignore Ctrl-C: they must not.

`make test` runs what is not marked `prove`, and `make prove` what is: single tests, and all of `PROOFS`.
What is marked `prove` has more time, so that a slow machine does not fail it.
"""

import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sightline.attention import capability
from sightline.core import extensions
from support.interpreted_triton import language_prepared_once
from support.lone_oracles import import_oracles_alone
from support.named_failures import NamedFailures

TESTS = Path(__file__).parent
PROOFS = tuple(
    TESTS / name
    for name in (
        # Tests of the tests: the kit, its mutants, the simulator and its planted bugs.
        "conformance",
        "testing",
        # Much time for what changes seldom, or for what quicker tests see a part of.
        "bench/attention",
        "bench/engine",
        "kernels/cpu/test_compiler.py",
        "kernels/test_triton_experts.py",
        "kernels/test_triton_extend.py",
        "kernels/test_triton_routing.py",
        "kernels/test_triton_row_product.py",
        "kernels/test_triton_thin_product.py",
        "models/loading/test_hub.py",
        "models/test_cache_scales.py",
        "models/test_quantised_compute.py",
        "server/test_life.py",
        "server/test_page_access.py",
        "server/test_security.py",
        "test_embedding_weights.py",
        "test_fp8_cache.py",
        "test_latent_models.py",
        "test_real_weights.py",
        "test_typing.py",
        "text/templates/test_template_sandbox.py",
    )
)
"""Folders and files whose tests are all proofs."""
PROOF_SECONDS = 900
"""The timeout of what is marked `prove`, unless a test has its own."""

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import_oracles_alone()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _packages_are_looked_for_once() -> Iterator[None]:
    """Every engine asks some hundred times whether a kernel library is installed, and reads the entry points of every
    package: half of a tiny engine's start. A test that changes the path or `find_spec` is told what is there then."""
    look = capability._is_installed

    @cache
    def looked(package: str, finder: object) -> bool:
        return look(package)

    @cache
    def listed(group: str, path: tuple[str, ...]) -> EntryPoints:
        return entry_points(group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capability, "find_spec", cache(find_spec))
        patch.setattr(capability, "_is_installed", lambda package: looked(package, vars(capability)["find_spec"]))
        patch.setattr(extensions, "entry_points", lambda *, group: listed(group, tuple(sys.path)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _the_language_of_kernels_is_prepared_once() -> Iterator[None]:
    with language_prepared_once():
        yield


@cache
def _is_proof(path: Path) -> bool:
    """Whether all tests of a file are proofs: asked once a file, because thousands of tests share few files."""
    return any(path.is_relative_to(place) for place in PROOFS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_proof(item.path):
            item.add_marker(pytest.mark.prove)
        if item.get_closest_marker("prove") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PROOF_SECONDS))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Names failures where the reports of all processes come together: only there is a terminal.

    Runs last, because pytest registers the terminal in a hook of the same name.
    """
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(NamedFailures(terminal))
