"""Logits equal transformers' on the same weights, however a sequence is cut into steps and pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from sightline.attention.kinds import SpecKind
from sightline.attention.spec import SoftmaxSpec
from sightline.core import resolution
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.runner.batching import assemble, assemble_transient
from sightline.runner.runtime import Runtime
from support.attention_cases import BACKENDS, CPU
from support.tiny_gemma4 import SHARING
from support.tiny_models import (
    FAMILIES,
    Models,
    load_runtime,
    make_model,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)

TOLERANCE = 1e-4
"""Of the logits' scale."""
CLEAR = 1e-3
"""Two best logits this far apart leave no doubt about the greedy token."""
DOUBT = 1e-4
"""Router logits closer than this could choose another expert in another order of summation."""
SCORE_DOUBT = 1e-6
"""The same of what becomes of the logits."""
DECODE_STEPS = 32
PROMPT_LENS = (5, 40, 1, 71, 16)

GRID = [(page_size, chunk) for page_size in (1, 16, 64) for chunk in (7, 64)]
LATENT = [family for family in FAMILIES if family.startswith("deepseek")]
GROUPED = [*LATENT, *(family for family in FAMILIES if family.startswith("glm"))]
"""Families whose experts may be in groups."""
WHOLE_GRID = ("llama", "deepseek_v3")
"""A family of each kind of attention that runs every cell of the grid; the others run one on each backend.

Every run has one cell for each family on each backend; `make prove` has the others.
"""


def serving(family: str) -> list[str]:
    """The backends that compute the family's kind of attention."""
    kind = SpecKind.LATENT if family in LATENT else SpecKind.SOFTMAX
    return [name for name, backend in BACKENDS.items() if any(kind in row.spec_kinds for row in backend.capabilities)]


SERVED = [(family, backend) for family in FAMILIES for backend in serving(family)]


def cells() -> list[ParameterSet]:
    """Family, backend, page size, chunk: every family on every backend."""
    found = []
    for family_index, family in enumerate(FAMILIES):
        for backend_index, backend in enumerate(serving(family)):
            for index, (page_size, chunk) in enumerate(GRID):
                turn = (index + family_index + backend_index) % len(GRID)
                if family in WHOLE_GRID or turn == 0:
                    marks = pytest.mark.prove if turn else ()
                    found.append(pytest.param(family, backend, page_size, chunk, marks=marks))
    return found


def config(backend: str | None = None, page_size: int = 16, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(page_size=page_size, attention_backend=backend, dtype=dtype, cache_tokens=2048, max_num_seqs=8)


def assert_untouched(runtime: Runtime) -> None:
    assert all(pool.plane(plane.name).isnan().all() for pool in runtime.store.pools for plane in pool.spec.planes)


def assert_same_greedy_tokens(got: Tensor, expected: Tensor) -> None:
    best = expected.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    assert clear.any()
    assert torch.equal(got.argmax(dim=-1)[clear], expected.argmax(dim=-1)[clear])


@pytest.mark.parametrize(("family", "backend", "page_size", "chunk"), cells())
def test_stepped_logits_equal_a_full_forward(
    models: Models, family: str, backend: str, page_size: int, chunk: int
) -> None:
    model, folder = models[family]
    sequences = random_prompts([length + DECODE_STEPS for length in PROMPT_LENS])
    runtime = load_runtime(folder, config(backend, page_size))
    stepped = stepped_logits(runtime, sequences, PROMPT_LENS, chunk)
    for sequence, prompt_len, got in zip(sequences, PROMPT_LENS, stepped, strict=True):
        expected = reference_logits(model, sequence)[prompt_len - 1 :]
        assert got.shape == (DECODE_STEPS + 1, expected.shape[1])
        assert relative_error(got, expected) <= TOLERANCE
        assert_same_greedy_tokens(got, expected)
    assert runtime.planner.num_rebuilt == 0
    assert runtime.store.num_free_pages == runtime.store.num_usable_pages


@pytest.mark.parametrize(("family", "backend"), [each for each in SERVED if each[0] not in SHARING])
def test_a_transient_forward_equals_a_paged_one_and_leaves_the_pools_alone(
    models: Models, family: str, backend: str
) -> None:
    model, folder = models[family]
    runtime = load_runtime(folder, config(backend))
    prompts = random_prompts([9, 1, 33])
    batch = assemble_transient([RowWork(0, prompt, 0, True) for prompt in prompts], CPU)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    for prompt, got in zip(prompts, logits, strict=True):
        assert relative_error(got, reference_logits(model, prompt)[-1]) <= TOLERANCE
    assert_untouched(runtime)


@pytest.mark.parametrize(("family", "backend"), SERVED)
def test_an_idle_batch_gives_no_logits_and_touches_nothing(models: Models, family: str, backend: str) -> None:
    runtime = load_runtime(models[family][1], config(backend))
    logits = runtime.runner.forward(runtime.planner.plan(assemble([], runtime.store)))
    assert logits.shape == (0, runtime.definition.vocab_size)
    assert_untouched(runtime)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_logits(models: Models, family: str) -> None:
    model, folder = models[family]
    runtime = load_runtime(folder, config())
    [prompt] = random_prompts([19])
    row = runtime.store.open_row()
    runtime.store.grow_row(row, 19)
    batch = assemble([RowWork(row, prompt, 0, True)], runtime.store).pad(5, 32)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    assert relative_error(logits[0], reference_logits(model, prompt)[-1]) <= TOLERANCE


def test_planning_again_inside_a_forward_leaves_buffers_that_planning_can_use(models: Models) -> None:
    runtime = load_runtime(models["llama"][1], config())
    rows = [runtime.store.open_row(), runtime.store.open_row()]
    prompts = random_prompts([9, 30])
    for row, prompt in zip(rows, prompts, strict=True):
        runtime.store.grow_row(row, len(prompt))
    batches = [
        assemble([RowWork(row, prompt, 0, True)], runtime.store) for row, prompt in zip(rows, prompts, strict=True)
    ]
    early = runtime.planner.plan(batches[0])
    late = runtime.planner.plan(batches[1])
    first = runtime.runner.forward(early)
    second = runtime.runner.forward(late)
    assert runtime.planner.num_rebuilt == 2
    torch.testing.assert_close(runtime.runner.forward(runtime.planner.plan(batches[0])), first)
    torch.testing.assert_close(runtime.runner.forward(runtime.planner.plan(batches[1])), second)


@pytest.mark.parametrize(
    ("family", "layers", "windows"),
    [
        ("mistral", [(0, 1)], [9]),
        ("qwen2", [(0,), (1, 2)], [None, 11]),
        ("gemma2", [(0, 2), (1,)], [10, None]),
        ("gemma3", [(0, 2, 3), (1,)], [10, None]),
        ("gemma4", [(0, 1, 3), (2,), (4, 5), (6,)], [10, None, 10, None]),
        ("qwen3_moe", [(0, 1, 2)], [12]),
        ("gpt_oss", [(0, 2), (1,)], [9, None]),
    ],
)
def test_layers_with_the_same_window_are_a_group(
    models: Models, family: str, layers: list[tuple[int, ...]], windows: list[int | None]
) -> None:
    runtime = load_runtime(models[family][1], config())
    assert [binding.group.layers for binding in runtime.bindings] == layers
    specs = [binding.group.spec for binding in runtime.bindings]
    assert [spec.window for spec in specs if isinstance(spec, SoftmaxSpec)] == windows


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_plain", "gpt_oss"])
def test_the_routers_of_the_tiny_models_leave_no_doubt_and_use_every_expert(models: Models, family: str) -> None:
    model, _ = models[family]
    used: set[int] = set()
    for sequence in random_prompts([length + DECODE_STEPS for length in PROMPT_LENS]):
        with torch.no_grad():
            output = model(torch.tensor([sequence]), output_router_logits=True, use_cache=False)
        for logits in output.router_logits:
            per_token = model.config.num_experts_per_tok
            ranked = logits.sort(dim=-1, descending=True)
            gaps = ranked.values[:, per_token - 1] - ranked.values[:, per_token]
            assert gaps.min() > DOUBT
            used.update(ranked.indices[:, :per_token].flatten().tolist())
    assert used == set(range(model.config.num_local_experts))


@pytest.mark.parametrize("family", GROUPED)
def test_the_scores_of_the_tiny_models_leave_no_doubt_and_use_every_expert(models: Models, family: str) -> None:
    model, _ = models[family]
    gates = [layer.mlp.gate for layer in model.model.layers[model.config.first_k_dense_replace :]]
    used: set[int] = set()
    corrected = "deepseek_v2" not in family
    for sequence in random_prompts([length + DECODE_STEPS for length in PROMPT_LENS]):
        with torch.no_grad():
            output = model(torch.tensor([sequence]), output_router_logits=True, use_cache=False)
        for gate, logits in zip(gates, output.router_logits, strict=True):
            ranks = logits.softmax(dim=-1)
            if corrected:
                ranks = logits.sigmoid() + gate.e_score_correction_bias
            if model.config.n_group not in (None, 1):
                best = ranks.unflatten(-1, (model.config.n_group, -1)).topk(2 if corrected else 1).values.sum(-1)
                open_groups = clear_best(best, model.config.topk_group)
                size = model.config.n_routed_experts // model.config.n_group
                ranks = ranks.where(open_groups.repeat_interleave(size, dim=-1), -1e9)
            chosen = clear_best(ranks, model.config.num_experts_per_tok)
            used.update(chosen.any(dim=0).nonzero().flatten().tolist())
    assert used == set(range(model.config.n_routed_experts))


def clear_best(ranks: Tensor, count: int) -> Tensor:
    """Which are among the best of their line; no line leaves a doubt."""
    ordered = ranks.sort(dim=-1, descending=True).values
    assert (ordered[:, count - 1] - ordered[:, count]).min() > SCORE_DOUBT
    return ranks >= ordered[:, count - 1 : count]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_a_bf16_checkpoint_runs_in_fp32_as_the_same_numbers_and_in_bf16_near_them(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU without instructions for bf16 is slow, and right.
    monkeypatch.setattr(resolution, "lacks_products", lambda device, dtype: False)
    made = make_model(family)
    made.bfloat16().save_pretrained(tmp_path)
    model = type(made).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    [sequence] = random_prompts([40])
    expected = reference_logits(model, sequence)[19:]
    [exact] = stepped_logits(load_runtime(tmp_path, config(dtype="float32")), [sequence], [20], chunk=7)
    assert relative_error(exact, expected) <= TOLERANCE
    [rounded] = stepped_logits(load_runtime(tmp_path, config(dtype="bfloat16")), [sequence], [20], chunk=7)
    # A rounded router logit may choose another expert, which moves single logits far: compare directions.
    assert torch.cosine_similarity(rounded.flatten(), expected.flatten(), dim=0) > 0.95
