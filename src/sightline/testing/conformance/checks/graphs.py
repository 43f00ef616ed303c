"""CUDA graphs: a captured step that is replayed after another plan computes that plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from sightline.attention.capability import GraphLevel
from sightline.attention.contract import AttentionInputs
from sightline.attention.kinds import Feature
from sightline.attention.spec import AttentionSpec
from sightline.attention.workspace import MAIN_LANE
from sightline.core.device import DeviceKind
from sightline.testing.conformance.given_inputs import tensors_of, to_device
from sightline.testing.conformance.layer_step import LayerStep
from sightline.testing.conformance.rig import Row, Subject
from sightline.testing.conformance.trial import Trial, check

_DECODED = [Row(5 * index, 1) for index in range(8)]
_DECODED_LATER: tuple[Sequence[Row], ...] = (
    [Row(40, 1), Row(3, 1), Row(0, 1), Row(17, 1), Row(33, 1)],
    [Row(100, 1)] * 8,
    [Row(1, 1)],
    [],
)
"""Other rows and lengths that fit in the captured step."""
_MIXED = [Row(5 * index, 1 + index % 3) for index in range(8)]
_MIXED_LATER: tuple[Sequence[Row], ...] = (
    [Row(40, 1), Row(3, 4), Row(0, 6), Row(17, 1), Row(33, 2)],
    [Row(100, 1)] * 8,
    [Row(0, 15)],
    [],
)


def _not_captured(*levels: GraphLevel) -> Callable[[Subject], str | None]:
    def excused(subject: Subject) -> str | None:
        if subject.capability.graph not in levels:
            return "the row declares that such steps cannot be captured"
        if subject.device.kind is not DeviceKind.CUDA:
            return "graphs are captured on CUDA devices only"
        return None

    return excused


@check(
    "stable-addresses read-back padding idle lse host-bounds sparse",
    excused=_not_captured(GraphLevel.DECODE, GraphLevel.FULL),
)
def captured_decode(trial: Trial) -> None:
    """A captured step with one new token per row, replayed with other rows and lengths, equals the oracle."""
    for spec, needs in _specs_and_needs(trial):
        _capture(trial, spec, _DECODED, _DECODED_LATER, 1, needs)


@check("captured-decode", excused=_not_captured(GraphLevel.FULL))
def captured_replay(trial: Trial) -> None:
    """A captured step with any rows, replayed with others, equals the oracle; plan buffers keep their addresses."""
    num_tokens = sum(row.query_len for row in _MIXED)
    for spec, needs in _specs_and_needs(trial):
        _capture(trial, spec, _MIXED, _MIXED_LATER, num_tokens, needs)


def _specs_and_needs(trial: Trial) -> Iterator[tuple[AttentionSpec, frozenset[Feature]]]:
    """Yields what steps are captured for: the plain spec, and one with chosen entries if the row serves these."""
    specs = [trial.plain]
    if Feature.SPARSE in trial.features and trial.plain.top_k is None:
        specs.append(replace(trial.plain, top_k=12))
    for spec in specs:
        for needs in (frozenset(), frozenset({Feature.LSE}) & trial.features):
            yield spec, needs


def _capture(
    trial: Trial,
    spec: AttentionSpec,
    captured: Sequence[Row],
    later: Sequence[Sequence[Row]],
    longest: int,
    needs: frozenset[Feature],
) -> None:
    """Captures a step in which no row has more than `longest` new tokens, and replays it for the `later` ones."""
    bench = trial.bench(spec)
    num_rows, num_tokens = len(captured), sum(row.query_len for row in captured)
    bounds = (longest,) * num_rows
    step = trial.step(bench, captured)
    # The graph reads from this memory; each replayed step is copied into it.
    static = step.batch.bounded(bounds, _context_bounds(step), known=True)
    inputs = to_device(step.inputs, bench.device)
    planned = bench.planner.plan(static, needs=needs)
    out = step.room(planned)
    with torch.inference_mode():
        planned.prepare()
        step.launch(planned, inputs, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            planned.prepare()
            lse = step.launch(planned, inputs, out)
    addresses = bench.planner.buffer_addresses(MAIN_LANE)
    for seed, rows in enumerate((captured, *later)):
        other = trial.step(bench, rows, seed=seed)
        other.pad(num_rows - len(rows), num_tokens - other.batch.num_tokens, torch.nan)
        real = sum(row.query_len for row in rows)
        _copy_inputs(to_device(other.inputs, bench.device), inputs)
        other.batch = other.batch.bounded(other.batch.query_lens.bound, _context_bounds(other), known=True)
        later_plan = bench.planner.plan(other.batch.placed_in(static), needs=needs)
        step.clear(out)
        graph.replay()
        torch.cuda.synchronize()
        answer = other.answer_in(later_plan, out, lse)
        trial.hold(other, answer, "a captured step, replayed")
        trial.require(
            bool(answer.out[real:].isnan().all()), "expected the output of padding tokens to be unchanged, got numbers"
        )
        moved = addresses.items() ^ bench.planner.buffer_addresses(MAIN_LANE).items()
        trial.require(not moved, f"expected plan buffers at their captured addresses, got {sorted(moved)[:3]}")
        for table_row in other.table_rows:
            bench.store.close_row(table_row)


def _context_bounds(step: LayerStep) -> tuple[int, ...]:
    """Bounds with which even a step without tokens is sparse, if its layer chooses entries or reads chosen ones."""
    least = 0 if step.spec.top_k is None else (step.spec.top_k + 1) * step.spec.tokens_per_entry
    return tuple(max(bound, least) for bound in step.batch.context_lens.bound)


def _copy_inputs(source: AttentionInputs, target: AttentionInputs) -> None:
    for name, tensor in tensors_of(target).items():
        tensor.copy_(tensors_of(source)[name])
