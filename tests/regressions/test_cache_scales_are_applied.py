"""Cache scales other than 1 were ignored elsewhere (S#20705). Here they are applied in both directions or show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.attention.shared import entry_planes
from sightline.core.config import EngineConfig
from sightline.runner.runtime import Runtime
from support.tiny_models import load_runtime, make_model, random_prompts, relative_error, stepped_logits

BACKENDS = ["torch", "reference"]
PROMPTS, PROMPT_LENS = random_prompts([24, 15]), [18, 9]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same weights with scales of 1, and with powers of two that differ everywhere."""
    made = []
    for factor in (0, 1):
        folder = tmp_path_factory.mktemp(f"scaled{factor}")
        make_model("gemma3").save_pretrained(folder)
        file = folder / "model.safetensors"
        weights = load_file(file)
        layers = {int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")}
        scales = {
            f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(0.5 ** (factor * (place + layer % 3)))
            for layer in layers
            for place, name in enumerate("kv", start=1)
        }
        save_file({**weights, **scales}, file, metadata={"format": "pt"})
        made.append(folder)
    return made


def run(folder: Path, backend: str) -> tuple[Runtime, torch.Tensor]:
    config = EngineConfig(cache_tokens=256, page_size=8, attention_backend=backend, kv_cache_dtype="fp8")
    runtime = load_runtime(folder, config)
    return runtime, torch.cat(stepped_logits(runtime, PROMPTS, PROMPT_LENS, chunk=5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_a_checkpoint_change_what_is_stored_and_not_what_comes_out(folders: list[Path], backend: str) -> None:
    (plain, expected), (scaled, got) = (run(folder, backend) for folder in folders)
    for one, two in zip(plain.store.pools, scaled.store.pools, strict=True):
        for name in ("k", "v"):
            assert set(one.scales(name)) == {1.0}
            assert 1.0 not in two.scales(name)
            for layer, scale in enumerate(two.scales(name)):
                stored, divided = (pool.plane(name)[layer].float().nan_to_num() for pool in (one, two))
                torch.testing.assert_close(divided * scale, stored, atol=0.2, rtol=0.2)
                assert not torch.equal(divided, stored)
    # Powers of two: nothing is rounded otherwise but what is next to 0.
    assert relative_error(got, expected) < 0.05


@contextmanager
def ignoring(direction: str) -> Iterator[None]:
    """The torch backend as it would be if writing, or reading, took every scale for 1."""
    name = f"{direction}_scaled_entries"
    kept = vars(entry_planes)[name]
    with pytest.MonkeyPatch.context() as patch:
        if direction == "write":
            patch.setattr(entry_planes, name, lambda plane, slots, values, scale: kept(plane, slots, values, 1.0))
        else:
            patch.setattr(entry_planes, name, lambda plane, slots, scale, out: kept(plane, slots, 1.0, out))
        yield


@pytest.mark.parametrize("direction", ["write", "gather"])
def test_scales_that_one_direction_ignores_are_seen(folders: list[Path], direction: str) -> None:
    _, expected = run(folders[1], "torch")
    with ignoring(direction):
        _, got = run(folders[1], "torch")
    assert relative_error(got, expected) > 0.2
