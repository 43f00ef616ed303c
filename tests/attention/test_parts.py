"""A step whose rows two backends serve: which rows go where, and that nobody can tell from the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.attention.backends.reference.backend import ReferenceBackend
from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.bindings import divide
from sightline.attention.capability import FEW_ROWS, Work
from sightline.attention.kinds import Feature
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE
from sightline.core.batch import FULL, Batch
from sightline.core.errors import PlanError, StalePlanError
from sightline.llm import TokensPrompt
from sightline.runner.startup import serving_text, startup_report
from sightline.testing.conformance.rig import Row
from sightline.testing.conformance.steps import Step
from support import recording_backend
from support.recording_backend import RecordingBackend
from support.tiny_models import make_model, random_prompts
from support.two_backends import ServedBench, split_serving

SPEC = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
WINDOWED = replace(SPEC, window=6)
SINKS = replace(SPEC, sinks=True, softcap=2.0)
LSE = frozenset({Feature.LSE})
MIXED = [Row(17, 1), Row(0, 1), Row(33, 1), Row(3, 4), Row(0, 9)]


class Prefill(TorchBackend):
    """For rows of many new tokens."""


class Decode(TorchBackend):
    """For rows of one new token."""


class Few(TorchBackend):
    """For few such rows."""


class Alone(TorchBackend):
    """For one such row."""


FOUR = {Work.PREFILL: Prefill, Work.DECODE: Decode, Work.FEW: Few, Work.ALONE: Alone}
TWO = split_serving(TorchBackend, ReferenceBackend)
ONES = [Row(5, 1)] * FEW_ROWS


def parts_of(batch: Batch, bench: ServedBench) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Who serves which rows and tokens."""
    [binding] = bench.bindings
    return [
        (type(serving.backend).__name__, (rows.start, rows.stop), (tokens.start, tokens.stop))
        for serving, rows, tokens in divide(batch, binding.serving)
    ]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([Row(9, 1), Row(0, 1), Row(3, 4)], [("Few", (0, 2), (0, 2)), ("Prefill", (2, 3), (2, 6))]),
        ([*ONES, Row(3, 4)], [("Few", (0, 8), (0, 8)), ("Prefill", (8, 9), (8, 12))]),
        ([*ONES, Row(0, 1), Row(3, 4)], [("Decode", (0, 9), (0, 9)), ("Prefill", (9, 10), (9, 13))]),
        (ONES, [("Few", (0, 8), (0, 8))]),
        (ONES[:2], [("Few", (0, 2), (0, 2))]),
        (ONES[:1], [("Alone", (0, 1), (0, 1))]),
        ([*ONES, Row(0, 1)], [("Decode", (0, 9), (0, 9))]),
        ([Row(3, 4), Row(9, 1)], [("Prefill", (0, 2), (0, 5))]),
        ([Row(9, 1), Row(3, 4), Row(9, 1)], [("Alone", (0, 1), (0, 1)), ("Prefill", (1, 3), (1, 6))]),
        ([Row(9, 1, FULL), Row(3, 4)], [("Prefill", (0, 2), (0, 5))]),
        ([Row(9, 1), Row(9, 1, FULL)], [("Alone", (0, 1), (0, 1)), ("Prefill", (1, 2), (1, 2))]),
        ([Row(4, 0), Row(9, 1), Row(3, 2)], [("Few", (0, 2), (0, 1)), ("Prefill", (2, 3), (1, 3))]),
        ([], [("Prefill", (0, 0), (0, 0))]),
    ],
    ids=[
        "decode-first", "few", "many", "few-alone", "two-alone", "one-alone", "many-alone", "prefill-first",
        "decode-behind", "full-mask", "full-mask-behind", "row-of-none", "idle",
    ],
)  # fmt: skip
def test_rows_that_decode_first_are_a_part_of_their_own(
    rows: Sequence[Row], wanted: list[tuple[str, tuple[int, int], tuple[int, int]]]
) -> None:
    bench = ServedBench([SPEC], FOUR)
    assert parts_of(Step(bench, rows).batch, bench) == wanted


def test_padding_goes_with_the_rows_behind() -> None:
    bench = ServedBench([SPEC], FOUR)
    batch = Step(bench, [Row(9, 1), Row(3, 4)]).batch.pad(4, 9)
    assert parts_of(batch, bench) == [("Alone", (0, 1), (0, 1)), ("Prefill", (1, 4), (1, 9))]
    alone = Step(bench, [Row(9, 1), Row(3, 1)]).batch.pad(4, 9)
    assert parts_of(alone, bench) == [("Few", (0, 4), (0, 9))]


def test_a_step_without_a_cache_is_served_whole() -> None:
    bench = ServedBench([SPEC], FOUR)
    batch = Step(bench, [Row(0, 1), Row(0, 4)], transient=True).batch
    assert parts_of(batch, bench) == [("Prefill", (0, 2), (0, 5))]


def test_steps_without_rows_that_decode_ask_for_no_backend_for_them() -> None:
    bench = ServedBench([SPEC], {Work.PREFILL: Prefill})
    for step in (Step(bench, MIXED[3:]), Step(bench, []), Step(bench, [Row(0, 1)], transient=True)):
        assert [serving for serving, *_ in parts_of(step.batch, bench)] == ["Prefill"]


def test_lengths_that_only_the_device_knows_are_served_whole() -> None:
    bench = ServedBench([SPEC], FOUR)
    for rows, serves in ((MIXED, "Prefill"), (ONES, "Few")):
        batch = Step(bench, rows).batch
        unknown = batch.bounded(batch.query_lens.bound, batch.context_lens.bound, known=False)
        assert parts_of(unknown, bench) == [(serves, (0, batch.num_rows), (0, batch.num_tokens))]


def test_one_backend_for_all_serves_every_step_whole() -> None:
    bench = ServedBench([SPEC], dict.fromkeys(Work, TorchBackend))
    assert len(parts_of(Step(bench, MIXED).batch, bench)) == 1
    few_alone = ServedBench([SPEC], {**dict.fromkeys(Work, TorchBackend), Work.DECODE: Decode})
    assert len(parts_of(Step(few_alone, MIXED).batch, few_alone)) == 1


@pytest.mark.parametrize("spec", [SPEC, WINDOWED, SINKS], ids=["full", "window", "sinks"])
@pytest.mark.parametrize(
    "serving", [TWO, split_serving(ReferenceBackend, TorchBackend)], ids=["torch-reference", "reference-torch"]
)
def test_two_backends_over_one_pool_equal_the_oracle(
    spec: SoftmaxSpec, serving: dict[Work, type[TorchBackend]]
) -> None:
    bench = ServedBench([spec], serving)
    step = Step(bench, MIXED)
    for seed in range(3):
        planned = step.plan(LSE)
        assert len(planned.plan.groups[0].parts) == (2 if seed == 0 else 1)
        require_oracle(step, planned)
        step = step.next_step(1, seed=seed + 1)


def require_oracle(step: Step, planned: PlannedBatch) -> None:
    """Outputs, LSE, what stands in the cache; padding as it was."""
    planned.prepare()
    answer, wanted = step.attend(planned), step.expected()
    count = wanted.out.shape[0]
    torch.testing.assert_close(answer.out[:count], wanted.out, atol=3e-5, rtol=3e-5)
    assert bool(answer.out[count:].isnan().all())
    assert answer.lse is not None
    assert answer.lse.shape == answer.out.shape[:2]
    torch.testing.assert_close(answer.lse[:count], wanted.lse, atol=1e-4, rtol=1e-4)
    assert step.unwritten() is None


def test_padding_behind_two_parts_stays_as_it_is() -> None:
    step = Step(ServedBench([SPEC], TWO), MIXED)
    step.pad(2, 5, torch.nan)
    require_oracle(step, step.plan(LSE))


def test_every_group_of_a_hybrid_is_taken_apart() -> None:
    bench = ServedBench([SPEC, WINDOWED], TWO)
    for layer in range(2):
        step = Step(bench, MIXED, layer=layer)
        planned = step.plan(LSE)
        assert [len(group.parts) for group in planned.plan.groups] == [2, 2]
        require_oracle(step, planned)


def test_a_plan_whose_buffers_one_part_lost_is_made_again() -> None:
    for others in ([Row(7, 1), Row(8, 1)], [Row(0, 5), Row(2, 3)]):
        bench = ServedBench([SPEC], split_serving(Prefill, Decode))
        step, other = Step(bench, MIXED), Step(bench, others, seed=1)
        planned = step.plan(LSE)
        assert bench.planner.ensure(planned) is planned
        bench.planner.plan(other.batch)
        again = bench.planner.ensure(planned)
        assert again is not planned
        assert bench.planner.num_rebuilt == 1
        require_oracle(step, again)


class CausalOnly(TorchBackend):
    capabilities = tuple(
        replace(row, features=row.features - {Feature.NON_CAUSAL, Feature.TREE_MASK})
        for row in TorchBackend.capabilities
    )


def test_a_plan_that_is_made_again_asks_no_part_for_the_other_parts_masks() -> None:
    bench = ServedBench([SPEC], split_serving(TorchBackend, CausalOnly))
    step = Step(bench, [Row(9, 1), Row(3, 4, FULL)])
    planned = bench.planner.plan(step.batch, needs=frozenset({Feature.LSE}))
    bench.planner.plan(replace(step.batch))
    again = bench.planner.ensure(planned)
    assert bench.planner.num_rebuilt == 1
    assert [part.tokens for part in again.plan.groups[0].parts] == [
        part.tokens for part in planned.plan.groups[0].parts
    ]
    assert again.plan.asked == {Feature.LSE}


@pytest.mark.parametrize("row", [0, 4], ids=["decode", "prefill"])
def test_pages_that_changed_owner_in_either_part_raise(row: int) -> None:
    bench = ServedBench([SPEC], TWO)
    step = Step(bench, MIXED)
    planned = step.plan()
    bench.store.close_row(step.table_rows[row])
    with pytest.raises(StalePlanError, match=f"row {step.table_rows[row]} was version"):
        bench.planner.ensure(planned)


@pytest.mark.parametrize("place", [0, 1])
def test_contents_of_either_parts_buffers_are_fingerprinted(place: int) -> None:
    bench = ServedBench([SPEC], split_serving(Prefill, Decode), paranoid=True)
    planned = Step(bench, MIXED).plan()
    contents = bench.planner._memory[MAIN_LANE].contents()
    own = [tensor for name, tensor in contents.items() if name.startswith(f"group0[{place}]")]
    assert own
    assert bench.planner.ensure(planned) is planned
    for tensor in own:
        tensor.zero_()
    assert bench.planner.ensure(planned) is not planned
    assert bench.planner.num_rebuilt == 1


def test_a_step_of_the_same_sizes_as_an_earlier_one_has_its_buffers_in_the_same_place() -> None:
    bench = ServedBench([SPEC], split_serving(Prefill, Decode))
    seen = []
    for contexts in 2 * ((40, 41), (3, 9), (22, 0)):
        step = Step(bench, [*(Row(context, 1) for context in contexts), Row(contexts[0], 4)])
        step.plan()
        seen.append(dict(bench.planner.buffer_addresses(MAIN_LANE)))
        for table_row in step.table_rows:
            bench.store.close_row(table_row)
    assert {name.split(".")[0] for name in seen[0]} == {"group0[0]", "group0[1]"}
    assert seen[:3] == seen[3:]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups: layers with a window and layers without."""
    folder = tmp_path_factory.mktemp("gemma3")
    make_model("gemma3").save_pretrained(folder)
    return folder


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts([5, 30, 9, 17])]
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_an_engine_of_two_backends_gives_the_same_tokens_and_says_who_serves_what(gemma: Path) -> None:
    plain = LLM(
        str(gemma), skip_tokenizer_init=True, cache_tokens=512, max_num_batched_tokens=16, attention_backend="torch"
    )
    split = LLM(
        str(gemma),
        skip_tokenizer_init=True,
        cache_tokens=512,
        max_num_batched_tokens=16,
        prefill_attention_backend="torch",
        decode_attention_backend="reference",
    )
    assert answers(split) == answers(plain)
    assert [serving_text(selection) for selection in plain.engine.runtime.selections] == ["torch", "torch"]
    told = "torch (prefill), reference (decode, decode of few rows, decode of one row)"
    assert [serving_text(selection) for selection in split.engine.runtime.selections] == [told, told]
    assert sum(told in line for line in startup_report(split.engine.runtime)) == 2
    assert [len(binding.parts) for binding in split.engine.runtime.bindings] == [2, 2]


def test_one_of_the_two_may_be_named_alone(gemma: Path) -> None:
    llm = LLM(
        str(gemma), skip_tokenizer_init=True, cache_tokens=512, attention_backend="torch",
        decode_attention_backend="reference",
    )  # fmt: skip
    chosen = llm.engine.runtime.selections[0]
    assert {work: each.candidate.name for work, each in chosen.items()} == {
        Work.PREFILL: "torch",
        Work.DECODE: "reference",
        Work.FEW: "reference",
        Work.ALONE: "reference",
    }


def test_an_engine_puts_rows_that_decode_first(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Prompts(RecordingBackend):
        """Of rows of many new tokens."""

    class Tokens(RecordingBackend):
        """Of rows of one."""

    recording_backend.install(monkeypatch, prompts=Prompts, tokens=Tokens)
    llm = LLM(
        str(gemma), skip_tokenizer_init=True, cache_tokens=512, max_num_batched_tokens=16,
        prefill_attention_backend="prompts", decode_attention_backend="tokens",
    )  # fmt: skip
    answers(llm)
    prompts, tokens = (part.backend for part in llm.engine.runtime.bindings[0].parts)
    assert isinstance(prompts, Prompts)
    assert isinstance(tokens, Tokens)
    assert {length for record in tokens.records for length in record.lengths[1]} == {1}
    # The budget leaves no prompt a piece of one token, so that every row of one decodes.
    assert min(length for record in prompts.records for length in record.lengths[1]) > 1
    # Some steps were of both kinds.
    assert len(prompts.records) + len(tokens.records) > llm.engine.runtime.planner.num_plans


def test_each_part_is_held_to_the_row_by_which_it_was_chosen() -> None:
    bench = ServedBench([SPEC], TWO)
    [binding] = bench.bindings
    decode = binding.serving[Work.ALONE]
    causal_only = replace(decode, capability=replace(decode.capability, features=frozenset({Feature.WINDOW})))
    serving = {**binding.serving, Work.ALONE: causal_only}
    bench.planner._bindings = (replace(binding, serving=serving),)
    mixed = Step(bench, [Row(9, 1), Row(3, 4, FULL)])
    assert len(mixed.plan().plan.groups[0].parts) == 2, "the mask is the prefill part's matter"
    with pytest.raises(PlanError, match="lacks lse"):
        mixed.plan(LSE)
