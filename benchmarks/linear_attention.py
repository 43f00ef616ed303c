"""Times recurrent layers beside fla-core and FlashInfer on one GPU: `python benchmarks/linear_attention.py`.

    decode 1, 64 and 256 rows, prefill 1 × 8192 and 8 × 1024 tokens; 32 heads of 128 × 128, bf16 inputs, fp32 states
    the gated delta rule (one decay per head) and Kimi delta attention (one per channel)

Each library is timed twice: its operation as it comes (states in one tensor, as it lays them out), and the backend that
an engine would use (states in slots; ours convolves nothing here). All contenders of a shape run in turns, in CUDA
graphs; one that cannot be captured, or whose graph leaves outputs unwritten, is timed from the host and marked. Before
any time is reported, outputs and states are compared with a plain fp32 recurrence; a contender that is wrong is
reported as such and not timed.

Each of the other libraries has a budget of seconds for compiling and tuning (`--budget`): what is beyond it is skipped,
and told. `--dry-run` tries everything on a CPU, with tiny shapes, in fp16, and with Triton's interpreter.
Prints medians as Markdown, in microseconds, with the least time that traffic and products allow at the rates of this
device.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sightline.attention.buffers import PlanMemory
from sightline.attention.contract import BackendContext, CachePolicy, RecurrentInputs, StepLimits, StepView
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import RecurrentSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.bench.attention.shapes import Cost
from sightline.bench.attention.timing import (
    Between,
    Clock,
    Rates,
    TimedTask,
    TimingBudget,
    capture,
    clock_of,
    eager_task,
    measure_rates,
    time_in_turns,
)
from sightline.bench.budget import Budget, OutOfTime
from sightline.cache.pools import GroupCache
from sightline.cache.states import STATES, StatePool
from sightline.core.batch import Batch, RowWork, StepWork
from sightline.core.device import Device, detect_device
from sightline.kernels.cpu.program import inline_launcher

DIM, CHUNK = 128, 64
LAYERS = 4
"""Calls in a graph, each with inputs of its own: libraries remember what they derive from the same tensors."""
TOLERANCE = 2e-2
"""Of the norm of the difference, relative to that of the answer: inputs are bf16."""


class Shape(NamedTuple):
    """Rows of equal length."""

    rows: int
    length: int
    heads: int = 32


SHAPES = {
    "decode": (Shape(1, 1), Shape(64, 1), Shape(256, 1)),
    "prefill": (Shape(1, 8192), Shape(8, 1024)),
}
DRY_SHAPES = {"decode": (Shape(1, 1, 1), Shape(3, 1, 1)), "prefill": (Shape(2, 20, 1),)}


class Answer(NamedTuple):
    """What a contender gives."""

    out: Tensor
    """[num_tokens, heads, dim]."""
    states: Tensor
    """[rows, heads, key_dim, value_dim] fp32, behind each row."""


@dataclass(frozen=True, eq=False)
class Case:
    """One shape with its inputs: rows one after the other."""

    shape: Shape
    channels: bool
    device: torch.device
    q: Tensor
    """[num_tokens, heads, dim], like k and v."""
    k: Tensor
    v: Tensor
    decay: Tensor
    """[num_tokens, heads] or [num_tokens, heads, dim] fp32."""
    beta: Tensor
    """[num_tokens, heads] fp32."""
    begin: Tensor
    """[rows, heads, dim, dim] fp32: the states that rows begin with."""

    @staticmethod
    def make(shape: Shape, device: torch.device, dtype: torch.dtype, *, channels: bool) -> Case:
        generator = torch.Generator(device).manual_seed(1)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device)

        size = (shape.rows * shape.length, shape.heads, DIM)
        q, k = (torch.nn.functional.normalize(draw(*size), dim=-1).to(dtype) for _ in range(2))
        return Case(
            shape=shape,
            channels=channels,
            device=device,
            q=q,
            k=k,
            v=draw(*size).to(dtype),
            decay=-draw(*(size if channels else size[:2])).abs() * 0.1 - 1e-3,
            beta=draw(*size[:2]).sigmoid(),
            begin=draw(shape.rows, shape.heads, DIM, DIM) * 0.1,
        )

    def copy(self) -> Case:
        """The same numbers in other memory."""
        copies: dict[str, Any] = {name: each.clone() for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **copies)

    @property
    def name(self) -> str:
        kind, shape = "Kimi delta" if self.channels else "gated delta", self.shape
        return f"{kind}, {'decode' if shape.length == 1 else 'prefill'} {shape.rows} × {shape.length}"

    @property
    def scale(self) -> float:
        return float(DIM**-0.5)

    @property
    def spec(self) -> RecurrentSpec:
        heads = self.shape.heads
        return RecurrentSpec(heads, heads, DIM, DIM, self.scale, True, self.channels, unit_keys=False, conv_width=0)

    def slots(self) -> tuple[Tensor, list[int], list[int]]:
        """States [2 * rows + 1, ...] of which slot 0 is empty, the slots that rows read, and those that tokens
        write."""
        rows, length, *_ = self.shape
        states = torch.zeros(2 * rows + 1, *self.begin.shape[1:], device=self.device)
        states[1 : 1 + rows] = self.begin
        written = [0 if token < length - 1 else 1 + rows + row for row in range(rows) for token in range(length)]
        return states, [1 + row for row in range(rows)], written

    def answer(self) -> Answer:
        """The plain recurrence, token by token in fp32."""
        rows, length, *_ = self.shape
        state = self.begin.clone()
        q, k, v, decay, beta = (
            each.float().view(rows, length, *each.shape[1:]) for each in (self.q, self.k, self.v, self.decay, self.beta)
        )
        left = decay.exp().unsqueeze(-1) if self.channels else decay.exp()[..., None, None]
        out = torch.empty_like(v)
        for token in range(length):
            state *= left[:, token]
            recalled = torch.einsum("rhk,rhkv->rhv", k[:, token], state)
            stored = beta[:, token, :, None] * (v[:, token] - recalled)
            state += k[:, token, :, :, None] * stored[:, :, None, :]
            out[:, token] = self.scale * torch.einsum("rhk,rhkv->rhv", q[:, token], state)
        return Answer(out.flatten(0, 1), state)

    def cost(self) -> Cost:
        """Every tensor is read or written once. Long rows are computed in chunks, with products of matrices."""
        given = (self.q, self.k, self.v, self.v, self.decay, self.beta, self.begin, self.begin)
        within = 2 * CHUNK * DIM if self.shape.length > 1 else 0
        return Cost(
            sum(each.nbytes for each in given), self.q.shape[0] * self.shape.heads * (6 * DIM * DIM + 2 * within)
        )


Run: TypeAlias = Callable[[], Answer]


class NoOperationError(Exception):
    """A library has no such operation for fp32 states on this device."""


def our_kernel(case: Case) -> Run:
    """The kernels that the Triton backend launches for such rows."""
    chunks = import_module("sightline.kernels.triton.recurrent_chunks")
    steps = import_module("sightline.kernels.triton.recurrent_steps")
    places = import_module("sightline.kernels.triton.recurrent_tokens")
    chip = import_module("sightline.kernels.triton.chip").Chip.of(case.device)
    rows, length, heads = case.shape
    rule = steps.RecurrentRule(heads, heads, DIM, DIM, case.scale, True, case.channels, False, 0)
    states, read, written = case.slots()
    slots = places.TokenSlots(*(torch.tensor(each, device=case.device) for each in (read, written)))
    out, behind = torch.empty_like(case.v), states[1 + rows :]
    if length == 1:
        mixed = torch.cat([each.flatten(1) for each in (case.q, case.k, case.v)], dim=1)
        layer = steps.RecurrentLayer(mixed, case.decay, case.beta, None, None, None, states, None)
        tokens = places.TokenRows(slots.read.new_empty(rows + 1), slots.read.new_empty(rows).int())
        places.find_tokens(torch.ones_like(slots.read), tokens)

        def decode() -> Answer:
            steps.recurrent_steps(rule, layer, slots, tokens, out, longest=1, overlaps=chip.overlaps)
            return Answer(out, behind)

        return decode
    split = import_module("sightline.kernels.triton.short_convolution").Split(case.q, case.k, case.v)
    chunked, cut = chunks.ChunkedLayer(split, case.decay, case.beta, None, states), cut_rows(case, chunks)

    def prefill() -> Answer:
        chunks.recur_chunks(rule, chunked, slots, cut, out, shared_bytes=chip.shared_bytes)
        return Answer(out, behind)

    return prefill


def cut_rows(case: Case, chunks: Any) -> Any:
    """Rows that are one segment each, for our kernel."""
    (rows, length, heads), device = case.shape, case.device
    per_row = -(-length // CHUNK)
    table = [
        [row * length + done, min(CHUNK, length - done)] for row in range(rows) for done in range(0, length, CHUNK)
    ]
    segments = [[row * length, length, row * per_row] for row in range(rows)]
    squares = torch.empty(rows * per_row, heads, CHUNK, CHUNK, dtype=case.q.dtype, device=device)
    faded = None
    if case.channels:
        faded = chunks.Faded(
            q=torch.empty_like(case.q),
            k=torch.empty_like(case.k),
            kept=torch.empty_like(case.k),
            left=torch.empty(rows * per_row, heads, DIM, device=device),
            sums=torch.empty_like(case.decay),
        )
    return chunks.CutRows(
        table=torch.tensor(table, device=device),
        segments=torch.tensor(segments, device=device),
        rows=torch.tensor([[row, row, 1] for row in range(rows)], device=device),
        solved=squares,
        scores=torch.empty_like(squares),
        seen=torch.empty_like(squares, dtype=torch.float32),
        sums=torch.empty(squares.shape[:3], device=device),
        faded=faded,
    )


def fla_operation(case: Case) -> Run:
    """fla-core's function for such rows."""
    name = "kda" if case.channels else "gated_delta_rule"
    module: Any = import_module(f"fla.ops.{name}")
    inputs = (case.q, case.k, case.v, case.decay, case.beta)
    settings = {"scale": case.scale, "initial_state": case.begin, "output_final_state": True}
    if case.shape.length == 1:
        run, (q, k, v, decay, beta) = vars(module)[f"fused_recurrent_{name}"], (each.unsqueeze(1) for each in inputs)
    else:
        run, (q, k, v, decay, beta) = vars(module)[f"chunk_{name}"], (each.unsqueeze(0) for each in inputs)
        borders = torch.arange(case.shape.rows + 1) * case.shape.length
        settings |= {"cu_seqlens": borders.to(case.device), "cu_seqlens_cpu": borders}

    def call() -> Answer:
        out, states = run(q=q, k=k, v=v, g=decay, beta=beta, **settings)
        return Answer(out.view_as(case.v), states)

    return call


def flashinfer_operation(case: Case) -> Run:
    """FlashInfer's function for such rows."""
    if case.channels:
        raise NoOperationError
    if case.shape.length > 1:
        return flashinfer_prefill(case)
    decode = import_module("flashinfer.gdn_decode").gated_delta_rule_decode
    state, heads = case.begin.clone(), case.shape.heads
    # It takes gates before their activations, in half precision, and changes states in place.
    a, b = torch.log(torch.expm1(-case.decay)), torch.logit(case.beta)
    q, k, v, a, b = (each.to(case.q.dtype).unsqueeze(1) for each in (case.q, case.k, case.v, a, b))
    rates, bias = (torch.zeros(heads, device=case.device) for _ in range(2))
    out = torch.empty_like(v)

    def call() -> Answer:
        decode(q, k, v, state, rates, a, bias, b, scale=case.scale, output=out, use_qk_l2norm=False)
        return Answer(out.squeeze(1), state)

    return call


def flashinfer_prefill(case: Case) -> Run:
    prefill = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    first, left = case.begin.mT.contiguous(), case.decay.exp()
    behind, out = torch.empty_like(first), torch.empty_like(case.v)
    borders = (torch.arange(case.shape.rows + 1) * case.shape.length).to(case.device)

    def call() -> Answer:
        prefill(
            case.q,
            case.k,
            case.v,
            g=left,
            beta=case.beta,
            scale=case.scale,
            initial_state=first,
            output_final_state=True,
            cu_seqlens=borders,
            output=out,
            output_state=behind,
            max_seqlen=case.shape.length,
        )
        return Answer(out, behind.mT)

    return call


@dataclass(eq=False)
class ChosenSlots:
    """The states of a step's rows: slots that the benchmark chooses."""

    read: list[int]
    written: list[int]
    key: str = STATES
    table_id: int = 1
    num_table_rows: int = 1 << 10

    def versions(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(0 for _ in rows)

    def slots_of(self, rows: Tensor, entries: Tensor) -> Tensor:
        raise NotImplementedError

    def slots_to_read(self, rows: Sequence[int], contexts: Sequence[int]) -> list[int]:
        del rows, contexts
        return self.read

    def slots_to_write(
        self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int], candidates: Sequence[int]
    ) -> list[int]:
        del rows, firsts, counts, candidates
        return self.written


def through_backend(place: str) -> Callable[[Case], Run]:
    """Makes contenders of a backend, "module:class" in `attention.backends`, as an engine calls it."""

    def make(case: Case) -> Run:
        backend, spec, rows = resolve_name(f"sightline.attention.backends.{place}"), case.spec, case.shape.rows
        if not any(spec.features <= row.features for row in backend.capabilities):
            raise NoOperationError
        states, read, written = case.slots()
        pool = StatePool(spec.states(1, torch.float32), states.shape[0], case.device)
        plane = pool.plane("state")[0]
        plane.copy_(states)
        num_tokens = case.q.shape[0]
        workspace = Workspace(case.device, 1 << 36)
        limits = StepLimits(rows, num_tokens, case.shape.length + 1, (MAIN_LANE,), 0)
        cache = GroupCache("group0", {}, pool)
        device, launcher, homes = case.device, inline_launcher(), ResidentEntries(cache)
        made = backend(BackendContext("group0", spec, cache, workspace, limits, case.q.dtype, device, launcher, homes))
        memory = PlanMemory(workspace.elastic("benchmark", "plans", MAIN_LANE))
        memory.begin()
        work = [RowWork(row + 1, [1] * case.shape.length, 1, 1) for row in range(rows)]
        batch = Batch(StepWork.of(work), (ChosenSlots(read, written),), case.device)
        plan = made.plan(StepView(batch, CachePolicy.PAGED, MAIN_LANE, frozenset()), memory.part("group0"))
        plan.prepare()
        mixed = torch.cat([each.flatten(1) for each in (case.q, case.k, case.v)], dim=1)
        inputs, out = RecurrentInputs(mixed, case.decay, case.beta, None, None), torch.empty_like(case.v)

        def call() -> Answer:
            plan.run(0, inputs, out)
            return Answer(out, plane[1 + rows :])

        return call

    return make


class Contender(NamedTuple):
    """What is timed."""

    library: str
    make: Callable[[Case], Run]
    decodes: bool = True
    """False for backends that no engine chooses to decode: they copy every state twice."""


CONTENDERS = {
    "Sightline's kernel": Contender("triton", our_kernel),
    "Sightline's backend": Contender("triton", through_backend("triton.recurrent_backend:TritonRecurrentBackend")),
    "FlashInfer's operation": Contender("flashinfer", flashinfer_operation),
    "through FlashInfer": Contender(
        "flashinfer", through_backend("flashinfer.recurrent_backend:FlashInferRecurrentBackend"), decodes=False
    ),
    "fla-core's operation": Contender("fla", fla_operation),
    "through fla-core": Contender("fla", through_backend("fla.recurrent_backend:FlaRecurrentBackend"), decodes=False),
}


@dataclass
class Bench:
    """What all cases share."""

    device: Device
    contenders: Mapping[str, Contender]
    budgets: Mapping[str, Budget]
    dtype: torch.dtype = torch.bfloat16
    effort: TimingBudget = field(default_factory=TimingBudget)
    remarks: list[str] = field(default_factory=list)

    @property
    def clock(self) -> Clock:
        return clock_of(self.device)

    def measure(self, case: Case) -> dict[str, str]:
        """The median of each contender in microseconds, or why there is none."""
        answer, found, tasks, eager = case.answer(), dict[str, str](), dict[str, TimedTask](), set[str]()
        for name, contender in self.contenders.items():
            try:
                if case.shape.length == 1 and not contender.decodes:
                    raise NoOperationError
                with self.budgets[contender.library].spend():
                    runs = [contender.make(case.copy()) for _ in range(LAYERS)]
                    wrong = next(filter(None, [difference(run(), answer) for run in runs]), None)
                    # A fault of the device is this contender's, not that of whatever waits next.
                    self.clock.wait()
                    if wrong is None:
                        tasks[name], is_captured = self.task(name, runs)
                        eager |= set() if is_captured else {name}
                    found[name] = wrong or ""
            except OutOfTime:
                found[name] = "skipped"
                self.remarks.append(f"{case.name}: {name} was skipped: the budget of {contender.library} is used up")
            except NoOperationError:
                found[name] = "–"
            except ImportError as missing:
                found[name] = "not installed"
                self.remarks.append(f"{name} is not there: {missing}")
            except Exception as raised:  # foreign code: whatever it raises is its result
                found[name] = "failed"
                self.remarks.append(f"{case.name}: {name} failed: {type(raised).__name__}: {raised}")
        for name, taken in time_in_turns(tasks, self.clock, self.effort).items():
            found[name] = f"{taken.median * 1e6:.1f}{' from the host' if name in eager else ''}"
        return found

    def task(self, name: str, runs: Sequence[Run]) -> tuple[TimedTask, bool]:
        """A captured task if the contender can be captured, and whether it is."""
        if self.device.torch_device.type == "cuda":
            outputs: dict[int, Tensor] = {}

            def layer(index: int) -> Tensor:
                outputs[index] = runs[index]().out
                return outputs[index]

            try:
                captured = capture(layer, LAYERS, Between(self.device.torch_device))
            except RuntimeError as raised:
                self.remarks.append(f"{name} is not captured: {raised}")
                torch.cuda.synchronize()
            else:
                for each in outputs.values():
                    each.fill_(math.nan)
                captured.graph.replay()
                if all(bool(each.isfinite().all()) for each in outputs.values()):
                    return captured.task(), True
                self.remarks.append(f"{name} is not captured: a replay leaves outputs unwritten")
        return eager_task(lambda index: runs[index](), LAYERS), False


def difference(found: Answer, answer: Answer) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    for name, got, wanted in zip(("outputs", "states"), found, answer, strict=True):
        error = float((got.float() - wanted).norm() / wanted.norm())
        if not error < TOLERANCE:
            return f"{name} wrong by {error:.2g}"
    return None


def report(bench: Bench, shapes: Sequence[Shape], rules: Sequence[bool], rates: Rates) -> None:
    """Prints one row for each case. `rules` says whether decays are per channel."""
    names = list(bench.contenders)
    print(f"| shape | {' | '.join(names)} | floor |\n|---|{'---|' * (len(names) + 1)}", flush=True)
    for shape in shapes:
        for channels in rules:
            case = Case.make(shape, bench.device.torch_device, bench.dtype, channels=channels)
            found = bench.measure(case)
            floor = f"{rates.floor(case.cost()) * 1e6:.1f}"
            print(f"| {case.name} | {' | '.join(found[name] for name in names)} | {floor} |", flush=True)
    for remark in dict.fromkeys(bench.remarks):
        print(f"- {remark}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["decode", "prefill"], help="decode, prefill, or both")
    parser.add_argument("--rule", choices=("gated", "kimi"), help="one rule alone; both without it")
    parser.add_argument("--without", default="", help="libraries to leave out, separated by commas: flashinfer, fla")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for compiling and tuning, per library")
    parser.add_argument("--dry-run", action="store_true", help="try everything on a CPU with tiny shapes")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # Graphs hold what fla-core derives from the borders of rows. It would be freed with the fifth such tensor.
    os.environ.setdefault("FLA_TENSOR_CACHE_SIZE", "4096")
    device, left_out = detect_device("cpu" if options.dry_run else "cuda"), options.without.split(",")
    bench = Bench(
        device,
        {name: each for name, each in CONTENDERS.items() if each.library not in left_out},
        # Without ours there is nothing to compare.
        {"triton": Budget(math.inf), "flashinfer": Budget(options.budget), "fla": Budget(options.budget)},
        # The interpreter multiplies no bf16.
        torch.float16 if options.dry_run else torch.bfloat16,
        TimingBudget(rounds=1, sample_seconds=1e-6) if options.dry_run else TimingBudget(),
    )
    rates = measure_rates(device, torch.float32 if options.dry_run else torch.bfloat16)
    print(f"{device.name}: {rates.bytes_per_second / 1e12:.2f} TB/s, {rates.operations_per_second / 1e12:.0f} TFLOP/s")
    shapes = DRY_SHAPES if options.dry_run else SHAPES
    rules = {"gated": [False], "kimi": [True]}.get(options.rule, [False, True])
    with torch.inference_mode():
        report(bench, [shape for part in options.parts for shape in shapes[part]], rules, rates)


if __name__ == "__main__":
    main()
