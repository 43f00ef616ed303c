"""Steps of a hybrid of latent and recurrent layers that prefill behind a context, and what every group was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.capability import Capability, Requirement, Work
from sightline.attention.contract import AttentionBackend
from sightline.attention.selection import Candidate, serving_row
from sightline.attention.spec import AttentionSpec, LatentSpec, RecurrentSpec
from sightline.core.batch import RowWork
from sightline.core.device import Device
from sightline.runner.batching import assemble
from sightline.runner.runtime import Runtime
from support.recording_backend import Record, RecordingBackend, install, recording
from support.tiny_models import random_prompts, reference_logits

RECORDED = "recorded_latent,recorded_recurrent"
"""The names of the backends that `install_recorded` installs."""
LENGTHS = (90, 33, 50)
STEPS: Sequence[Sequence[tuple[int, int]]] = (
    [(0, 9)],
    [(0, 73), (1, 7)],
    [(0, 1), (1, 26), (2, 40)],
    [(0, 7), (2, 1)],
    [(2, 9)],
)
"""The sequences of each step and their new tokens: prefill with and without a context, beside decode, in steps of
growing and shrinking sizes."""
HEADS, LINEAR_DIM, PAGE_SIZE = 16, 128, 64
"""Of `make_wide_kimi`, and of its cache: sizes that every library for GPUs has."""
WIDE_LATENT = LatentSpec(HEADS, 512, 64, 128, 128, 192**-0.5)
WIDE_RECURRENT = RecurrentSpec(2, 2, LINEAR_DIM, LINEAR_DIM, LINEAR_DIM**-0.5, True, True, True, 4)
OWN = ("triton-recurrent", "torch-recurrent")

Rows = tuple[Capability, ...]
Kind = type[AttentionBackend[Any, Any]]


def serving(spec: AttentionSpec, device: Device) -> dict[str, Candidate]:
    """The built-in backends that serve such layers in bf16 on a device, by name, but for the oracle."""
    need = Requirement(spec, device, torch.bfloat16, torch.bfloat16, PAGE_SIZE)
    return {
        each.name: each
        for each in BUILT_IN
        if "reference" not in each.name and serving_row(each, need, Work.PREFILL) is not None
    }


def pairs_on(device: Device) -> list[tuple[str, str]]:
    """A latent and a recurrent backend each: our own recurrent ones with all latent ones, and those of libraries, which
    tune for a minute, with one."""
    latent, recurrent = serving(WIDE_LATENT, device), serving(WIDE_RECURRENT, device)
    own = [(each, name) for each in latent for name in OWN if name in recurrent]
    return own + [("triton-latent", name) for name in recurrent if name not in OWN]


def install_recorded(monkeypatch: pytest.MonkeyPatch, latent: tuple[Kind, Rows], recurrent: tuple[Kind, Rows]) -> None:
    """Makes recording forms of both backends known under the names `RECORDED`."""
    install(monkeypatch, recorded_latent=recording(*latent), recorded_recurrent=recording(*recurrent))


def recorded_backends(runtime: Runtime) -> list[RecordingBackend]:
    """The backend of each group, in the order of the groups."""
    found = [part.backend for binding in runtime.bindings for part in binding.parts]
    assert len(found) == len(runtime.bindings) == 2
    return [each for each in found if isinstance(each, RecordingBackend)]


def steps_of(runtime: Runtime, model: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits of every new token of each step, and those of transformers.

    Checks that every group was planned once for the step, with its lengths, and ran each of its layers on that plan.
    """
    sequences = random_prompts(LENGTHS)
    expected = [reference_logits(model, sequence) for sequence in sequences]
    rows, done = [runtime.store.open_row() for _ in sequences], [0] * len(sequences)
    backends = recorded_backends(runtime)
    for step in STEPS:
        before = tuple(done)
        for backend in backends:
            backend.records.clear()
        work = []
        for index, count in step:
            runtime.store.grow_row(rows[index], done[index] + count)
            new = sequences[index][done[index] : done[index] + count]
            work.append(RowWork(rows[index], new, done[index], num_logits=count))
        logits = runtime.runner.forward(runtime.planner.plan(assemble(work, runtime.store)))
        for index, count in step:
            done[index] += count
            runtime.store.lengths.commit(rows[index], done[index])
        lengths = tuple(before[index] for index, _ in step), tuple(count for _, count in step)
        for binding, backend in zip(runtime.bindings, backends, strict=True):
            check_records(backend.records, lengths, len(binding.group.layers))
        yield (
            logits.cpu(),
            torch.cat([expected[index][before[index] : before[index] + count] for index, count in step]),
        )


def check_records(records: Sequence[Record], lengths: tuple[tuple[int, ...], tuple[int, ...]], num_layers: int) -> None:
    assert [record.lengths for record in records] == [lengths]
    [record] = records
    assert record.prepared == [0]
    assert record.runs == [(layer, sum(lengths[1])) for layer in range(num_layers)]


def check_steps(
    runtime: Runtime, model: PreTrainedModel, error: Callable[[Tensor, Tensor], float], most: float
) -> None:
    """Compares every step's logits with those of transformers."""
    errors = [error(got, wanted) for got, wanted in steps_of(runtime, model)]
    assert len(errors) == len(STEPS)
    assert max(errors) <= most
    assert runtime.planner.num_rebuilt == 0


def turned(got: Tensor, expected: Tensor) -> float:
    """How far the direction of any token's logits is from the expected one, for results in half precision."""
    return float((1.0 - torch.cosine_similarity(got.float(), expected, dim=-1)).max())
