"""On an NVIDIA GPU: tokens are those of the CPU, and neither choosing nor launching waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from sightline import LLM, SamplingParams
from sightline.core.batch import PADDING_ROW, Batch, RowWork, StepWork
from sightline.core.batch_memory import StaticMemory, StepShape
from sightline.core.config import LayerKernels
from sightline.core.request import EffectiveParams
from sightline.core.staging import StagingRing
from sightline.core.token_lists import LogitBias, TokenIds
from sightline.core.transfer import Arrival
from sightline.engine import engine, sampled
from sightline.kernels.cpu.program import inline_launcher
from sightline.llm import TokensPrompt
from sightline.runner.compute import make_operations
from sightline.runner.graphs import Graphs
from sightline.runner.sampling.adjust import TokenAdjustment
from sightline.runner.sampling.logprobs import score_tokens
from sightline.runner.sampling.sampler import RowSampling, choose
from support.tiny_models import make_model, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]
PLAIN = EffectiveParams(1.0, 1.0, 0, 0.0, 5, 16, frozenset({7}), True, frozenset({2}))
ON_A_GPU = [LayerKernels.TORCH, LayerKernels.TRITON]
CHANGES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 1e4},
    {"temperature": 5e-324},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 5000, "top_p": 0.9},
    {"top_p": 0.9},
    {"top_p": 5e-324},
    {"top_p": 0.99, "min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3, "top_p": 0.8},
    {"logit_bias": LogitBias([(3, 20.0), (9, -100.0)]), "top_k": 20},
    {"allowed_token_ids": TokenIds((3, 40, 77)), "min_tokens": 9},
    {"bad_words": ((5,), (1, 2))},
]


@contextmanager
def no_sync() -> Iterator[None]:
    """An operation that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def row(changes: dict[str, Any], seed: int, output: list[int], last_input: int | None) -> RowSampling:
    params = replace(PLAIN, seed=seed, **changes)
    if not params.adjusts_logits:
        return RowSampling(params, len(output))
    adjustment = TokenAdjustment(params, [1, 2, 3, 3])
    is_late = last_input is not None and params.needs.max_unread_tokens != 0
    adjustment.count(output[:-1] if is_late else output)
    return RowSampling(params, len(output), adjustment, last_input if is_late else None)


@pytest.mark.parametrize("vocab_size", [100, 32_000, 128_256])
@pytest.mark.parametrize("scale", [0.3, 4.0])
@pytest.mark.parametrize("is_late", [False, True], ids=["read", "unread"])
@pytest.mark.parametrize("kernels", ON_A_GPU)
def test_tokens_are_those_of_the_cpu_and_nothing_waits(
    vocab_size: int, scale: float, is_late: bool, kernels: LayerKernels
) -> None:
    best = make_operations(kernels, torch.device("cuda", 0), torch.float32, inline_launcher()).best_tokens
    generator = torch.Generator().manual_seed(vocab_size)
    for equal in (False, True):
        logits = torch.randn(4 * len(CHANGES), vocab_size, generator=generator) * scale
        logits = logits.bfloat16().float() if equal else logits
        rows = [
            row(CHANGES[index % len(CHANGES)], index, [4, 7, 7, index % 9], index if is_late else None)
            for index in range(len(logits))
        ]
        inputs = torch.tensor([index % 9 for index in range(len(logits))])
        expected = choose(logits, rows, inputs)
        on_device, inputs_on_device = logits.cuda(), inputs.cuda()
        choose(on_device, rows, inputs_on_device, best)
        torch.cuda.synchronize()
        with no_sync():
            chosen = choose(on_device, rows, inputs_on_device, best)
            arrival = Arrival(chosen.packed)
        assert arrival.wait().tolist() == expected.packed.tolist()
        assert torch.equal(on_device.cpu(), logits), "the logits are not as they were"


@pytest.mark.parametrize("kernels", ON_A_GPU)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_greedy_step_is_a_few_kernels(kernels: LayerKernels, rows: int) -> None:
    best = make_operations(kernels, torch.device("cuda", 0), torch.float32, inline_launcher()).best_tokens
    logits = torch.randn(rows, 32_000, device="cuda")
    greedy = [row({"temperature": 0.0}, index, [4, 7], None) for index in range(rows)]
    choose(logits, greedy, None, best)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as recorded:
        choose(logits, greedy, None, best)
        torch.cuda.synchronize()
    launched = [event.name for event in recorded.events() or () if event.device_type == DeviceType.CUDA]
    assert 1 <= len(launched) <= {LayerKernels.TRITON: 1, LayerKernels.TORCH: 8}[kernels], launched


@pytest.mark.parametrize("unread", [[0, 1, 2], [2, 0], [1]], ids=["all", "some", "one"])
def test_a_batch_takes_the_tokens_of_a_step_in_flight_without_waiting(unread: list[int]) -> None:
    chosen, shape = torch.tensor([70, 71, 72], device="cuda"), StepShape(4, 1)
    memory = StaticMemory(shape, 0, chosen.device, StagingRing.of(StaticMemory.num_numbers(shape, 0), chosen.device))
    work = tuple(RowWork(PADDING_ROW, [], 0, 1, unread=place) for place in unread)
    batch = Batch.inside(StepWork.of(work), (), memory, chosen)
    torch.cuda.synchronize()
    with no_sync():
        batch = Batch.inside(StepWork.of(work), (), memory, chosen)
        alone = Batch(StepWork.of(work), (), chosen.device, chosen)
    expected = [70 + place for place in unread]
    assert batch.tokens.tolist() == [*expected, *[0] * (4 - len(unread))]
    assert alone.tokens.tolist() == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = torch.randn(len(CHANGES) * 2, 3000, generator=torch.Generator().manual_seed(1))
    rows = [row(CHANGES[index // 2], index, [4, 7], None) for index in range(len(logits))]
    expected = choose(logits, rows).tokens.tolist()
    logits[1::2, 17] = bad
    chosen = choose(logits.cuda(), rows)
    assert chosen.finite.tolist() == [True, False] * len(CHANGES)
    assert chosen.tokens.tolist()[::2] == expected[::2]
    assert 0 <= int(chosen.tokens.min()) <= int(chosen.tokens.max()) < 3000


def test_scores_are_those_of_the_cpu() -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(2)) * 3
    tokens = torch.arange(9) * 500
    got, expected = score_tokens(logits.cuda(), tokens.cuda(), 20).cpu(), score_tokens(logits, tokens, 20)
    # Flags, ranks and ids come first. The log probabilities behind them are computed in fp32, and stored in fp64.
    assert torch.equal(got[:, :23], expected[:, :23])
    torch.testing.assert_close(got[:, 23:], expected[:, 23:], rtol=0.0, atol=1e-5)


def test_a_default_device_does_not_move_what_belongs_on_the_host() -> None:
    target = torch.zeros(2, dtype=torch.int64, device="cuda")
    with torch.device("cuda"):
        StagingRing.of(2, target.device).copy([[3, 1]], target)
        assert Arrival(target).wait().tolist() == [3, 1]


def test_results_wait_for_their_step_and_not_for_the_next() -> None:
    arrival = Arrival(torch.arange(1000, device="cuda").double())
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    after = torch.cuda.Event()  # type: ignore[no-untyped-call]
    after.record()
    assert arrival.wait().tolist() == list(range(1000))
    assert not after.query(), "it waited for what was launched after it"  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kernels", [each.value for each in ON_A_GPU])
def test_an_engines_steps_sample_without_waiting(
    in_flight: bool, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*arguments: Any) -> Any:
            with no_sync():
                return function(*arguments)

        return called

    make_model("llama").save_pretrained(tmp_path)
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([9, 14, 3, 30, 6])]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, max_tokens=24, ignore_eos=True, n=3),
        SamplingParams(temperature=0.8, seed=5, max_tokens=9, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, prompt_logprobs=1, logprobs=1),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=1, max_tokens=12, ignore_eos=True),
    ]
    monkeypatch.setattr(engine, "sample", guarded(sampled.sample))
    monkeypatch.setattr(Graphs, "assemble", guarded(Graphs.assemble))
    answers = {}
    for device in ("cpu", "cuda"):
        llm = LLM(
            str(tmp_path),
            skip_tokenizer_init=True,
            cache_tokens=2048,
            device=device,
            dtype="float32",
            layer_kernels=kernels if device == "cuda" else "torch",
            async_scheduling=in_flight,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers[device] = [[each.token_ids for each in output.outputs] for output in outputs]
    assert answers["cuda"] == answers["cpu"]
