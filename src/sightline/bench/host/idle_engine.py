"""An engine whose model computes nothing, to measure the host's work per step apart from the scheduler.

Everything is real except the network and its attention: every logit is 0, so that greedy decoding always gives token 0.
One step stays in flight, so that its parts can be repeated. There is no tokenizer. `scheduling` measures the scheduler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, HostLengths, Work
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, SoftmaxInputs, StepView
from sightline.attention.groups import group_layers
from sightline.attention.kinds import SpecKind
from sightline.attention.planner import PlannedBatch
from sightline.attention.selection import Candidate, Selection
from sightline.attention.spec import SoftmaxSpec
from sightline.bench.host.load import PAGE_SIZE, PREFIX_PAGES, Load, cache_prefixes, caller_of, random_lengths
from sightline.core.batch import CAUSAL
from sightline.core.config import PADDING_PAGES, Quantization
from sightline.core.device import DeviceKind, detect_device
from sightline.core.errors import SightlineError
from sightline.core.ledger import Ledger
from sightline.core.request import SamplingParams, Terms
from sightline.core.resolution import ResolvedConfig
from sightline.engine.engine import Engine
from sightline.engine.launch import LaunchedStep, rows_work
from sightline.engine.live import LiveSequence
from sightline.engine.sampled import sample
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.scratch import Scratch
from sightline.models.contract import NO_TAPS, Model, ModelDefinition, Taps
from sightline.models.loading.generation import GenerationDefaults
from sightline.models.weights import WeightReader
from sightline.runner.build import assemble_runtime, make_store

_VOCAB = 64
_STEP_TOKENS = 8192
_SPECS = (SoftmaxSpec(1, 1, 1, 1.0), SoftmaxSpec(1, 1, 1, 2.0))
"""Two groups, each with its own pools."""


@dataclass(frozen=True)
class HostStep:
    """Median seconds of the host's processor time per step."""

    whole: float
    assemble: float
    """Assembling the batch."""
    plan: float
    """Planning with its certificate, without the work of a real backend."""
    sampling: float
    """Sampling parameters of each row, the choice among equal logits, and reading it."""


class _NoPlan(AttentionPlan[SoftmaxInputs]):
    def prepare(self) -> None:
        """Nothing to prepare."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
        """Reads and writes nothing."""


class _NoAttention(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    capabilities: ClassVar[tuple[Capability, ...]] = (
        Capability(
            spec_kinds=frozenset({SpecKind.SOFTMAX}),
            devices=frozenset({DeviceKind.CPU}),
            compute_capabilities=ANY,
            dtypes=frozenset({torch.float32}),
            cache_dtypes=frozenset({torch.float32}),
            head_dims=frozenset({1}),
            group_sizes=frozenset({1}),
            page_sizes=ANY,
            features=frozenset(),
            host_lengths=HostLengths.EXACT,
        ),
    )

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        """Needs nothing."""

    def plan(self, step: StepView, buffers: PlanBuffers) -> _NoPlan:
        del step, buffers
        return _NoPlan()


class _NoModel(Model):
    @property
    def turns(self) -> bool:
        return False

    def reserve(self, scratch: Scratch) -> None:
        """Needs no memory."""

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        del scratch
        return torch.zeros(planned.batch.logit_indices.shape[0], _VOCAB)


class _NoDefinition(ModelDefinition):
    @property
    def vocab_size(self) -> int:
        return _VOCAB

    @property
    def max_positions(self) -> int:
        return 1 << 16

    def attention_specs(self) -> tuple[SoftmaxSpec, ...]:
        return _SPECS

    def load(self, weights: WeightReader, taps: Taps = NO_TAPS) -> Model:
        del weights, taps
        return _NoModel()


class HostBench:
    """An idle engine whose rows all decode, and the times of its steps."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._engine = _build(load)
        self._seconds: dict[str, list[float]] = {"whole": [], "assemble": [], "plan": [], "sampling": []}
        _submit(self._engine, load)
        while not _all_decode(self._engine, load):
            self._engine.step()

    def run(self, num_steps: int) -> None:
        """Runs decode steps and repeats the parts of each. Raises if a step did not run all rows."""
        for _ in range(num_steps):
            with self._timed("whole"):
                self._engine.step()
            if not _all_decode(self._engine, self._load):
                raise SightlineError(
                    f"expected steps of {self._load.rows} rows, got a different one; nothing is reported"
                )
            self._take_apart(self._engine.in_flight[0])

    def step(self) -> HostStep:
        return HostStep(**{name: statistics.median(seconds) for name, seconds in self._seconds.items()})

    def _take_apart(self, step: LaunchedStep[LiveSequence]) -> None:
        """Repeats and times the parts of a step, as if it had not been launched yet."""
        runtime = self._engine.runtime
        lengths = runtime.store.lengths
        for row in step.rows:
            lengths.settle(row.table_row, row.context_len)
        with self._timed("assemble"):
            batch = runtime.graphs.assemble(rows_work(step.rows, CAUSAL, {}))
        with self._timed("plan"):
            runtime.planner.plan(batch)
        for row in step.rows:
            lengths.advance(row.table_row, row.seq_len)
        with self._timed("sampling"):
            logits = torch.zeros(len(step.rows), _VOCAB)
            sample(runtime.operations.best_tokens, step.rows, step.lives, batch.tokens, logits).read()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self._seconds[name].append(time.thread_time() - start)


def _all_decode(engine: Engine, load: Load) -> bool:
    """Whether the step in flight gives every row its next token."""
    rows = [row for step in engine.in_flight for row in step.rows]
    return len(rows) == load.rows and all(row.num_tokens == 1 and row.completes for row in rows)


def _build(load: Load) -> Engine:
    num_pages = load.num_prefixes * PREFIX_PAGES
    config = ResolvedConfig(
        device=detect_device("cpu"),
        dtype=torch.float32,
        cache_dtype=torch.float32,
        quantization=Quantization.DEQUANTISE,
        max_model_len=load.max_len,
        max_rows=load.rows,
        max_step_tokens=_STEP_TOKENS,
        page_size=PAGE_SIZE,
        num_pages=num_pages + PADDING_PAGES,
        scratch_bytes=1 << 20,
        prefix_caching=True,
        max_queued=2 * load.rows,
        async_scheduling=True,
        attention_backend=None,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        seed=0,
        paranoid=False,
        require_proof=False,
    )
    groups = group_layers(_SPECS)
    candidate = Candidate.of("none", _NoAttention, "sightline", by_default=False)
    selection = dict.fromkeys(Work, Selection(candidate, _NoAttention.capabilities[0], refused=(), forgone=()))
    store = make_store(config, groups)
    runtime = assemble_runtime(
        config, _NoDefinition(), _NoModel(), groups, [selection] * len(groups), store, inline_launcher()
    )
    engine = Engine(runtime, None, GenerationDefaults(frozenset()), Ledger())
    [prefixes] = engine.prefixes
    cache_prefixes(prefixes, store, load.num_prefixes, _VOCAB, Random(0))
    return engine


def _submit(engine: Engine, load: Load) -> None:
    draw = Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=load.max_tokens)
    for index, length in enumerate(random_lengths(2 * load.rows, draw)):
        engine.submit(draw.choices(range(_VOCAB), k=length), params, terms=Terms(caller=caller_of(index)))
