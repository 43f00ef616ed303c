"""Failures of other engines in the field, met from the first day: one test, or a few, for each.

The number in a test's section is its entry in docs/regressions.md, which also names the tests that live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sightline import LLM, RequestOutput, SamplingParams
from sightline.attention.backends import registry
from sightline.attention.backends.reference.backend import ReferenceBackend
from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.capability import Capability, Requirement
from sightline.attention.kinds import Feature
from sightline.attention.planner import PlannedBatch
from sightline.attention.selection import Candidate, select_backend
from sightline.attention.spec import SoftmaxSpec
from sightline.cache.layout import walk_slots
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import NoBackendError, RequestError
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.batching import assemble
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases
from support.attention_cases import BACKENDS
from support.engines import is_at_rest
from support.recording_backend import install
from support.tiny_models import load_runtime, make_model, random_prompts

PLAIN = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
HYBRID = [PLAIN, replace(PLAIN, window=6)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def engine_for(folder: Path, **changes: Any) -> LLM:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "cache_tokens": 512, "max_num_batched_tokens": 64}
    return LLM(str(folder), **(settings | changes))


def prompts_of(lengths: list[int], seed: int = 0) -> Any:
    return [{"prompt_token_ids": prompt} for prompt in random_prompts(lengths, seed)]


def answers(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def forward(runtime: Runtime, row: int, tokens: list[int], context_len: int, *, padding: int = 0) -> torch.Tensor:
    """Logits of a row's last new token."""
    runtime.store.grow_row(row, context_len + len(tokens))
    batch = assemble([RowWork(row, tokens, context_len, 1)], runtime.store)
    batch = batch.pad(1 + padding, len(tokens) + padding)
    return runtime.runner.forward(runtime.planner.plan(batch))


# 4: padded query rows against the real offsets; padded output is poisoned and never read.
@pytest.mark.parametrize("family", ["gemma", "gpt_oss"])
def test_padding_on_poisoned_memory_changes_no_logit_and_no_cached_entry(
    family: str, request: pytest.FixtureRequest
) -> None:
    config = EngineConfig(cache_tokens=256, max_num_batched_tokens=64, paranoid=True)
    runtimes = [load_runtime(request.getfixturevalue(family), config) for _ in range(2)]
    [prompt] = random_prompts([20])
    for tokens, context_len in ((prompt[:13], 0), (prompt[13:19], 13), (prompt[19:], 19)):
        plain, padded = (
            forward(runtime, 1 if context_len else runtime.store.open_row(), tokens, context_len, padding=padding)
            for runtime, padding in zip(runtimes, (0, 7), strict=True)
        )
        assert padded.shape == plain.shape
        torch.testing.assert_close(padded, plain, atol=1e-4, rtol=1e-4)
    for left, right in zip(*(runtime.store.pools for runtime in runtimes), strict=True):
        written = [pool.plane("k")[:, walk_slots(pool, 1, 20)] for pool in (left, right)]
        torch.testing.assert_close(*written, atol=1e-4, rtol=1e-4)
        others = set(range(right.page_size, right.plane("k").shape[1])) - set(walk_slots(right, 1, 20))
        assert right.plane("k")[:, sorted(others)].isnan().all(), "padding is written to the padding page alone"


# 5: an empty batch.
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_idle_step_between_two_steps_of_a_sequence_changes_nothing(gemma: Path, backend: str) -> None:
    [prompt] = random_prompts([20])
    config = EngineConfig(cache_tokens=256, max_num_batched_tokens=64, attention_backend=backend)
    logits = []
    for idles in (False, True):
        runtime = load_runtime(gemma, config)
        row = runtime.store.open_row()
        forward(runtime, row, prompt[:19], 0)
        if idles:
            idle = assemble([RowWork(row, prompt[:0], 19, 0)], runtime.store).idle()
            assert runtime.runner.forward(runtime.planner.plan(idle)).shape[0] == 0
        logits.append(forward(runtime, row, prompt[19:], 19))
    assert torch.equal(*logits)


# 7: the pool's page size is not the kernel's; written by one backend, read by another.
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("writer", "reader"), [("torch", "reference"), ("reference", "torch")])
def test_what_one_backend_writes_another_reads_whatever_the_page_size(writer: str, reader: str, page_size: int) -> None:
    bench = cases.bench(HYBRID, writer, page_size=page_size)
    for layer in range(2):
        first = Step(bench, [Row(0, 21), Row(5, 12), Row(0, page_size)], layer=layer)
        first.run()
        second = first.next_step(3, seed=1)
        other = AttentionRig(cases.subject_for(reader, torch.float32), HYBRID, RigSetting(page_size=page_size))
        other.store = bench.store
        planned = other.another_planner().plan(second.batch)
        planned.prepare()
        torch.testing.assert_close(second.attend(planned).out, second.expected().out, atol=3e-5, rtol=3e-5)


# 9: a feature that the backend lacks is an error before the weights are read.
def lacking(feature: Feature) -> type[TorchBackend]:
    class Lacking(TorchBackend):
        capabilities: ClassVar[tuple[Capability, ...]] = tuple(
            replace(row, features=row.features - {feature}) for row in TorchBackend.capabilities
        )

    return Lacking


@pytest.mark.parametrize(
    ("family", "feature"),
    [("gemma3", Feature.WINDOW), ("gemma2", Feature.SOFTCAP), ("gpt_oss", Feature.SINKS), ("gpt_oss", Feature.WINDOW)],
)
def test_a_model_on_a_backend_that_lacks_its_feature_does_not_start(
    family: str, feature: Feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(family).save_pretrained(tmp_path)
    install(monkeypatch, lacking=lacking(feature), whole=TorchBackend)
    progress: list[int] = []

    def build(backend: str) -> Runtime:
        config = EngineConfig(cache_tokens=256, attention_backend=backend)
        checkpoint = open_checkpoint(tmp_path, Ledger())
        return build_runtime(config, checkpoint, Ledger(), lambda step: progress.append(step.done))

    with pytest.raises(NoBackendError, match=rf"lacking: lacks .*{feature.value}"):
        build("lacking")
    assert progress == [], "a weight was read for a model that cannot run"
    assert build("whole").bindings
    assert progress != []


# 11: a prefix tail of one token, and a prefix as long as one page.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_pages", [1, 2])
def test_a_tail_of_one_token_after_shared_pages_reads_all_of_them(backend: str, page_size: int, num_pages: int) -> None:
    bench = cases.bench([PLAIN], backend, page_size=page_size)
    prefix = num_pages * page_size
    step = Step(bench, [Row(prefix, 1)])
    twin = bench.store.open_row()
    shared = step.pool.table.owned(step.table_rows[0])[:num_pages]
    step.pool.allocator.share(shared)
    step.pool.table.append(twin, shared)
    bench.store.grow_row(twin, prefix + 1)
    tail = Step(bench, [Row(prefix, 1)], seed=1, table_rows=[twin], contexts=step.contexts)
    torch.testing.assert_close(tail.run().out, tail.expected().out, atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(step.run().out, step.expected().out, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("length", [64, 65, 66, 129])
def test_a_prompt_of_whole_chunks_and_a_token_more_or_less_answers_as_in_one_piece(gemma: Path, length: int) -> None:
    prompts = prompts_of([length])
    whole = answers(engine_for(gemma, max_num_batched_tokens=256).generate(prompts, GREEDY))
    assert answers(engine_for(gemma, max_num_batched_tokens=64, page_size=64).generate(prompts, GREEDY)) == whole


# 12: SM120 is not SM100; an explicit choice holds for every group.
def test_a_card_that_is_newer_than_the_listed_ones_is_refused_by_name() -> None:
    class Blackwell(ReferenceBackend):
        capabilities: ClassVar[tuple[Capability, ...]] = tuple(
            replace(row, compute_capabilities=frozenset({(10, 0)})) for row in ReferenceBackend.capabilities
        )

    offer = registry.offer([Candidate.of("blackwell", Blackwell, "a test", by_default=True)], None)
    card = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (10, 0))
    need = Requirement(PLAIN, card, torch.float32, torch.float32, page_size=16)
    assert select_backend(offer, need, "group0").candidate.name == "blackwell"
    newer = replace(need, device=replace(card, compute_capability=(12, 0)))
    with pytest.raises(NoBackendError, match=r"blackwell: does not list compute capability \(12, 0\)"):
        select_backend(offer, newer, "group0")


@pytest.mark.parametrize("name", BACKENDS)
def test_the_backend_that_was_asked_for_serves_every_group(gemma: Path, name: str) -> None:
    runtime = engine_for(gemma, attention_backend=name).engine.runtime
    assert len(runtime.bindings) == 2
    assert {each.candidate.name for selection in runtime.selections for each in selection.values()} == {name}
    assert {type(part.backend) for binding in runtime.bindings for part in binding.parts} == {
        registry.find(name, BUILT_IN).load()
    }


# 13: a NaN fails its own request, loudly.
def test_a_stream_whose_logits_turn_nan_ends_with_an_error_and_no_more_tokens(gemma: Path) -> None:
    llm = engine_for(gemma)
    broken, whole = (llm.stream(prompt, GREEDY) for prompt in prompts_of([4, 9]))
    next(broken)
    next(whole)
    for pool in llm.engine.runtime.store.pools:
        pool.plane("v")[:, pool.table.owned(1)[0] * pool.page_size] = torch.nan
    deltas = list(broken)
    assert deltas[-1].finish_reason == "error"
    assert sum(len(delta.token_ids) for delta in deltas) == 0
    rest = [token for delta in whole for token in delta.token_ids]
    assert rest == list(answers(engine_for(gemma).generate(prompts_of([4, 9]), GREEDY))[1][1:])
    assert is_at_rest(llm)


# 14: a slot is not reused while a forward that reads it is in flight.
def test_pages_of_a_cancelled_request_are_given_to_nobody_while_its_forward_runs(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([30, 30])
    expected = answers(engine_for(gemma).generate(prompts, GREEDY))
    llm = engine_for(gemma, cache_tokens=48, max_model_len=48)
    engine, store = llm.engine, llm.engine.runtime.store
    first, second = (engine.submit(prompt["prompt_token_ids"], GREEDY) for prompt in prompts)
    run: Callable[[PlannedBatch], torch.Tensor] = engine.runtime.runner.forward
    rows = []

    def cancelled_in_flight(planned: PlannedBatch) -> torch.Tensor:
        owned = [pool.table.owned(1) for pool in store.pools]
        engine.cancel(first)
        logits = run(planned)
        assert [pool.table.owned(1) for pool in store.pools] == owned
        rows.append(planned.batch.rows)
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime.runner, "forward", cancelled_in_flight)
        engine.step()
    assert rows == [(1,)], "there is room for one of the two"
    while engine.has_work:
        engine.step()
    assert engine.pop_output(first).outputs[0].finish_reason == "abort"
    assert engine.pop_output(second).outputs[0].token_ids == expected[1]
    assert is_at_rest(llm)


# 15: stop, an unknown field, a stream that is given up.
def test_a_stop_token_ends_its_request_and_no_other(gemma: Path) -> None:
    prompts = prompts_of([8, 9])
    free = answers(engine_for(gemma).generate(prompts, GREEDY))
    stop = free[0][4]
    stopping = replace(GREEDY, stop_token_ids=(stop,))
    first, second = engine_for(gemma).generate(prompts, [stopping, GREEDY])
    assert first.outputs[0].token_ids == free[0][: free[0].index(stop) + 1]
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == ("stop", "length")
    assert second.outputs[0].token_ids == free[1]


@pytest.mark.parametrize("field", ["best_of", "use_beam_search", "max_new_tokens", "do_sample", "stopp"])
def test_a_sampling_field_that_nobody_knows_is_refused_and_not_ignored(field: str) -> None:
    unknown: dict[str, Any] = {field: 1}
    with pytest.raises(RequestError, match=f"^{field} is not "):
        SamplingParams(**unknown)


def test_requests_given_up_and_asked_again_corrupt_no_unrelated_request(gemma: Path) -> None:
    bystander, shared = prompts_of([25, 40])
    [expected] = answers(engine_for(gemma).generate([bystander], GREEDY))
    [retried] = answers(engine_for(gemma).generate([shared], GREEDY))
    llm = engine_for(gemma, paranoid=True, max_num_batched_tokens=64)
    for given_up_after in range(5):
        request = llm.engine.submit(bystander["prompt_token_ids"], GREEDY)
        stream = llm.stream(shared, GREEDY)
        for _ in range(given_up_after):
            next(stream)
        stream.close()
        again = llm.engine.submit(shared["prompt_token_ids"], GREEDY)
        while llm.engine.has_work:
            llm.engine.step()
        assert llm.engine.pop_output(request).outputs[0].token_ids == expected
        assert llm.engine.pop_output(again).outputs[0].token_ids == retried
        assert is_at_rest(llm)
