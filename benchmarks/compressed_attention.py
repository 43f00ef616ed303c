"""Times decode steps of compressed attention on one GPU: `python benchmarks/compressed_attention.py`.

    window   64 heads of 512 over a window of 128 tokens
    chosen   the same and 512 chosen entries of 4 tokens, which overlap
    whole    the same and all entries of 128 tokens
    index    64 heads of 128: scores and choice of 512 entries of 4 tokens
    sweep    the kernel of `chosen` with other sizes of programs

at 1 × 131,072 and 64 × 32,768 tokens (DeepSeek V4's sizes), or at `--shape ROWS TOKENS`. A layer is everything that a
backend launches: states and entries are kept too, and the new token completes a window. All contenders of a shape run
in turns, in CUDA graphs, over several layers, so that no layer finds its keys in the cache of the device. Results are
checked before any time is reported. The floor has the bytes of queries, outputs, states, and entries that are read, at
the rate of a copy on this device. `--cpu` tries everything with tiny shapes, in Triton's interpreter. Prints medians as
Markdown, in microseconds.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sightline.attention.buffers import PlanMemory
from sightline.attention.compressed.inputs import CompressedIndexInputs, CompressedInputs, CompressionInputs
from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.attention.contract import AttentionPlan, BackendContext, CachePolicy, StepLimits, StepView
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import Feature
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.bench.attention.contest import Contest, Entrant, Entrants
from sightline.bench.attention.shapes import Cost
from sightline.bench.attention.timing import TimingBudget, measure_rates
from sightline.bench.budget import Budget
from sightline.cache.layout import Layout, arrange_free_pages
from sightline.cache.pools import CacheLimits
from sightline.cache.store import CacheStore
from sightline.core.batch import Batch, RowWork
from sightline.core.device import Device, detect_device
from sightline.kernels.cpu.program import inline_launcher
from sightline.runner.batching import assemble

BACKENDS = "sightline.attention.backends."
ATTENDERS = {
    "triton-compressed": f"{BACKENDS}triton.compressed_backend:TritonCompressedBackend",
    "torch-compressed": f"{BACKENDS}torch.compressed_backend:TorchCompressedBackend",
}
INDEXERS = {
    "triton-compressed-index": f"{BACKENDS}triton.compressed_index_backend:TritonCompressedIndexBackend",
    "torch-compressed-index": f"{BACKENDS}torch.compressed_index_backend:TorchCompressedIndexBackend",
}
CHECKED_ROWS = 2
PARTS = ("window", "chosen", "whole", "index")


@dataclass(frozen=True)
class Sizes:
    """A model's sizes, and the shapes that are timed."""

    specs: dict[str, CompressedSpec]
    index: CompressedIndexSpec
    shapes: tuple[tuple[int, int], ...]
    """Rows, and tokens of each."""
    page_size: int
    dtype: torch.dtype
    layers: int
    tolerance: float


def sizes_of(
    heads: tuple[int, int, int], index: tuple[int, int], top_k: int, ratios: tuple[int, int], rope_dim: int
) -> tuple[dict[str, CompressedSpec], CompressedIndexSpec]:
    """Specs of `heads`, their dimension and window; and of an indexer's heads and their dimension."""
    near, far = Compression(ratios[0], True, rope_dim, 1e-6), Compression(ratios[1], False, rope_dim, 1e-6)
    num_heads, dim, window = heads
    make = partial(CompressedSpec, num_heads, dim, dim**-0.5, window)
    specs = {"window": make(None), "chosen": make(near, top_k), "whole": make(far)}
    return specs, CompressedIndexSpec(*index, top_k, near)


LARGE = Sizes(
    *sizes_of((64, 512, 128), (64, 128), 512, (4, 128), 64),
    ((1, 131_072), (64, 32_768)),
    256,
    torch.bfloat16,
    4,
    2e-2,
)
TINY = Sizes(*sizes_of((4, 16, 4), (4, 16), 3, (4, 8), 4), ((1, 40), (2, 24)), 8, torch.float32, 2, 1e-4)


@dataclass(eq=False)
class Step:
    """Rows of one new token each over filled pools and states. The new token completes a window of every layer."""

    device: torch.device
    spec: CompressedSpec | CompressedIndexSpec
    sizes: Sizes
    rows: int
    tokens: int

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        sizes, group = self.sizes, LayerGroup("group0", self.spec, tuple(range(self.sizes.layers)))
        pages = self.rows * -(-self.tokens // sizes.page_size) + 1
        limits = CacheLimits(pages, sizes.page_size, self.rows, self.tokens, 2, 0)
        self.store = CacheStore([group.cache_spec(sizes.dtype)], limits, self.device)
        arrange_free_pages(self.store, Layout.SHUFFLED)
        self.cache = self.store.cache("group0")
        for pool in self.cache.pools.values():
            for plane in pool.spec.planes:
                for part in torch.split(pool.plane(plane.name).view(-1, self.spec.head_dim), 1 << 18):
                    part.copy_(torch.randn(part.shape, device=self.device))
        table_rows = [self.store.open_row() for _ in range(self.rows)]
        for row in table_rows:
            self.store.grow_row(row, self.tokens)
            self.store.fill_row(row, self.tokens - 1)
        self._fill_states()
        self.batch: Batch = assemble([RowWork(row, [1], self.tokens - 1, 1) for row in table_rows], self.store)

    def _fill_states(self) -> None:
        states = self.cache.states
        for plane in states.spec.planes:
            numbers = torch.randn(states.plane(plane.name).shape, device=self.device)
            if plane.name == "sums":
                numbers[..., 1, :] = numbers[..., 1, :].abs() + 1.0
            states.plane(plane.name)[:, 1:] = numbers[:, 1:].to(plane.dtype)

    @property
    def compression(self) -> Compression | None:
        return self.spec.compression

    @property
    def num_entries(self) -> int:
        """Entries that a row sees."""
        return 0 if self.compression is None else self.tokens // self.compression.ratio

    def plan(self, backend: Callable[[BackendContext[Any]], Any]) -> AttentionPlan[Any]:
        """The plan of a backend, prepared."""
        workspace = Workspace(self.device, 1 << 36)
        limits = StepLimits(self.rows, self.rows, self.tokens, (MAIN_LANE,), 0)
        context = BackendContext(
            "group0",
            self.spec,
            self.cache,
            workspace,
            limits,
            self.sizes.dtype,
            self.device,
            inline_launcher(),
            ResidentEntries(self.cache),
        )
        made = backend(context)
        memory = PlanMemory(workspace.elastic("benchmark", "plans", MAIN_LANE))
        needs = frozenset() if self.spec.top_k is None else frozenset({Feature.SPARSE})
        memory.begin()
        step = StepView(self.batch, CachePolicy.PAGED, MAIN_LANE, needs)
        plan: AttentionPlan[Any] = made.plan(step, memory.part("group0"))
        plan.prepare()
        return plan

    def slots(self, pool: str, row: int, numbers: Tensor) -> Tensor:
        """The slots of entries of a row."""
        return self.cache.pools[pool].entry_slots(torch.full_like(numbers, self.batch.rows[row]), numbers)

    def compressed(self) -> CompressionInputs | None:
        """Random values and gates of the step's tokens."""
        rule = self.compression
        if rule is None:
            return None
        width = rule.width(self.spec.head_dim)
        angles = torch.rand(self.rows, rule.rope_dim // 2, device=self.device)
        return CompressionInputs(
            draw(self, self.rows, width),
            draw(self, self.rows, width),
            torch.ones(self.spec.head_dim, device=self.device),
            angles.cos(),
            angles.sin(),
        )

    def new_entry(self, inputs: CompressionInputs, row: int) -> Tensor:
        """[head_dim] fp32: the entry that a row's token completes in the last layer."""
        rule, dim = self.compression, self.spec.head_dim
        slots = self.batch.pools["states"].read_slots
        assert rule is not None
        assert slots is not None
        sums = self.cache.states.plane("sums")[-1, slots[row]]
        gate, value = inputs.gates[row, -dim:].float(), inputs.values[row, -dim:].float()
        triples = [torch.stack((gate, torch.ones_like(gate), value)), sums[0], *([sums[2]] if rule.overlap else [])]
        numbers = torch.stack(triples)
        weights = (numbers[:, 0] - numbers[:, 0].amax(0)).exp()
        mixed = (weights * numbers[:, 2]).sum(0) / (weights * numbers[:, 1]).sum(0)
        entry = mixed / (mixed.square().mean() + rule.norm_eps).sqrt() * inputs.norm
        pairs = torch.view_as_complex(entry[dim - rule.rope_dim :].reshape(-1, 2))
        turned = torch.view_as_real(pairs * torch.complex(inputs.cos[row], inputs.sin[row])).flatten()
        return torch.cat((entry[: dim - rule.rope_dim], turned))

    def check_entry(self, pool: str, plane: str, inputs: CompressionInputs, row: int) -> str | None:
        last = torch.tensor([self.num_entries - 1], device=self.device)
        found = self.cache.pools[pool].plane(plane)[-1, self.slots(pool, row, last)[0]].float()
        return self.off(found, self.new_entry(inputs, row), f"the new entry of row {row}")

    def off(self, found: Tensor, expected: Tensor, what: str) -> str | None:
        error = float((found.float() - expected).norm() / expected.norm())
        return None if error <= self.sizes.tolerance else f"{what} is off by {error:.1e}"


def draw(step: Step, *shape: int) -> Tensor:
    return torch.randn(shape, device=step.device).to(step.sizes.dtype)


class Attention(NamedTuple):
    """The inputs of an attention shape, and what is right."""

    step: Step
    spec: CompressedSpec
    inputs: CompressedInputs

    @staticmethod
    def of(step: Step, spec: CompressedSpec) -> Attention:
        chosen = None
        if spec.top_k is not None:
            rows = [torch.randperm(step.num_entries, device=step.device)[: spec.top_k] for _ in range(step.rows)]
            chosen = torch.stack(rows).sort(1).values.to(torch.int32)
        inputs = CompressedInputs(
            draw(step, step.rows, spec.num_q_heads, spec.head_dim),
            draw(step, step.rows, spec.head_dim),
            torch.randn(spec.num_q_heads, device=step.device),
            step.compressed(),
            chosen,
        )
        return Attention(step, spec, inputs)

    def check(self, out: Tensor) -> str | None:
        step, inputs, states = self.step, self.inputs, self.step.batch.pools["states"]
        assert states.read_slots is not None
        for row in range(min(CHECKED_ROWS, step.rows)):
            ring = step.cache.states.plane("window")[-1, states.read_slots[row]].clone()
            ring[(step.tokens - 1) % self.spec.window] = inputs.key[row]
            kept = step.cache.states.plane("window")[-1, states.write_slots[row]]
            if not torch.equal(kept, ring):
                return f"the new state of row {row} has another window"
            keys = ring
            if inputs.entries is not None:
                wrong = step.check_entry("entry", "entry", inputs.entries, row)
                if wrong is not None:
                    return wrong
                whole = torch.arange(step.num_entries, device=step.device)
                numbers = whole if inputs.chosen is None else inputs.chosen[row].long()
                entries = step.cache.pools["entry"].plane("entry")[-1, step.slots("entry", row, numbers)]
                keys = torch.cat((ring, entries))
            scores = inputs.q[row].float() @ keys.float().T * self.spec.scale
            weights = torch.cat((scores, inputs.sinks[:, None]), 1).softmax(1)[:, :-1]
            wrong = step.off(out[row], weights @ keys.float(), f"row {row}")
            if wrong is not None:
                return wrong
        return None

    def contender(self, backend: Callable[[BackendContext[Any]], Any]) -> Entrant:
        out = torch.empty_like(self.inputs.q)
        plan = self.step.plan(backend)

        def run(layer: int) -> Tensor:
            plan.run(layer, self.inputs, out)
            return out

        return Entrant(run, self.check)

    def contenders(self) -> Entrants:
        return [(name, partial(self.contender, resolve_name(place))) for name, place in ATTENDERS.items()]

    def swept(self, device: Device) -> Entrants:
        """The Triton backend with other sizes of programs."""
        backend = resolve_name(ATTENDERS["triton-compressed"])
        config_of = resolve_name("sightline.kernels.triton.decode_shares:DecodeConfig")
        chip = resolve_name("sightline.kernels.triton.chip:Chip").of(device.torch_device)
        large = [
            (64, 32, 4, 3), (64, 32, 4, 2), (64, 64, 4, 1), (64, 32, 8, 3), (64, 64, 8, 1),
            (32, 64, 4, 2), (32, 64, 8, 2), (32, 32, 4, 2), (32, 32, 4, 4), (16, 64, 4, 2),
        ]  # fmt: skip
        for heads, block, warps, depth in large if device.torch_device.type == "cuda" else [(16, 16, 4, 1)]:
            for programs in (chip.multiprocessors, 2 * chip.multiprocessors):
                config = config_of(block, heads, programs, warps, depth, chip.overlaps)
                made = type("Swept", (backend,), {"sizes": config})
                name = f"heads {heads}, block {block}, warps {warps}, depth {depth}, programs {programs}"
                yield name, partial(self.contender, made)


class Indexing(NamedTuple):
    """The inputs of an indexer's shape, and what is right."""

    step: Step
    spec: CompressedIndexSpec
    inputs: CompressedIndexInputs

    @staticmethod
    def of(step: Step, spec: CompressedIndexSpec) -> Indexing:
        entries = step.compressed()
        assert entries is not None
        q, weights = draw(step, step.rows, spec.num_q_heads, spec.head_dim), draw(step, step.rows, spec.num_q_heads)
        return Indexing(step, spec, CompressedIndexInputs(q, weights, entries))

    def check(self, chosen: Tensor) -> str | None:
        step, inputs = self.step, self.inputs
        whole = torch.arange(step.num_entries, device=step.device)
        for row in range(min(CHECKED_ROWS, step.rows)):
            wrong = step.check_entry("index", "key", inputs.entries, row)
            if wrong is not None:
                return wrong
            keys = step.cache.pools["index"].plane("key")[-1, step.slots("index", row, whole)].float()
            scores = inputs.weights[row].float() @ (inputs.q[row].float() @ keys.T).relu()
            found = chosen[row].long()
            if int(found[0]) < 0 or not bool((found.diff() > 0).all()):
                return f"row {row} is no increasing choice of {self.spec.top_k}"
            least = scores.topk(self.spec.top_k).values[-1]
            missed = float((least - scores[found].min()) / scores.abs().max())
            if missed > step.sizes.tolerance:
                return f"row {row} chose a score that is too low by {missed:.1e}"
        return None

    def contender(self, place: str) -> Entrant:
        step = self.step
        out = torch.empty(step.rows, self.spec.top_k, dtype=torch.int32, device=step.device)
        plan = step.plan(resolve_name(place))

        def run(layer: int) -> Tensor:
            plan.run(layer, self.inputs, out)
            return out

        return Entrant(run, self.check)

    def contenders(self) -> Entrants:
        return [(name, partial(self.contender, place)) for name, place in INDEXERS.items()]


def cost_of(step: Step) -> Cost:
    """The bytes and operations of a layer."""
    spec, rule, size = step.spec, step.compression, step.sizes.dtype.itemsize
    sums = 0 if rule is None else 4 * 3 * rule.num_sums * spec.head_dim
    tokens = 0 if rule is None else 2 * rule.width(spec.head_dim)
    if isinstance(spec, CompressedIndexSpec):
        operations = 2 * step.num_entries * spec.num_q_heads * spec.head_dim
        read = (step.num_entries + spec.num_q_heads) * spec.head_dim + spec.num_q_heads + tokens
        return Cost(step.rows * (size * read + 2 * sums + 4 * spec.top_k), step.rows * operations)
    window = min(spec.window, step.tokens)
    keys = window + (step.num_entries if spec.top_k is None else min(spec.top_k, step.num_entries))
    # Queries and outputs, the keys, the window of the new state, and what becomes an entry.
    numbers = (2 * spec.num_q_heads + keys + window + 1) * spec.head_dim + tokens
    return Cost(step.rows * (size * numbers + 2 * sums), 4 * step.rows * keys * spec.num_q_heads * spec.head_dim)


def contests(step: Step, part: str, device: Device) -> Iterator[tuple[str, Entrants]]:
    if isinstance(step.spec, CompressedIndexSpec):
        indexing = Indexing.of(step, step.spec)
        yield f"choice of {step.spec.top_k} of {step.num_entries:,} entries", indexing.contenders()
        return
    attention = Attention.of(step, step.spec)
    yield step.spec.label, attention.swept(device) if part == "sweep" else attention.contenders()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS], help="or sweep")
    parser.add_argument("--shape", nargs=2, type=int, action="append", metavar=("ROWS", "TOKENS"))
    parser.add_argument("--page-size", type=int, help="tokens of a page")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for compiling and checking, per contender")
    parser.add_argument("--cpu", action="store_true", help="try everything on a CPU with tiny shapes")
    options = parser.parse_args(arguments)
    if options.cpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    device, sizes = detect_device("cpu" if options.cpu else "cuda"), TINY if options.cpu else LARGE
    rates = measure_rates(device, sizes.dtype)
    print(f"{device.name}: {rates.bytes_per_second / 1e12:.2f} TB/s, {rates.operations_per_second / 1e12:.0f} TFLOP/s")
    effort = TimingBudget(rounds=1, sample_seconds=1e-6) if options.cpu else TimingBudget()
    contest = Contest(device, rates, effort, sizes.layers, defaultdict(lambda: Budget(options.budget)))
    specs: dict[str, CompressedSpec | CompressedIndexSpec] = {**sizes.specs, "sweep": sizes.specs["chosen"]}
    specs["index"] = sizes.index
    page_size = options.page_size or sizes.page_size
    with torch.inference_mode():
        for rows, tokens in options.shape or sizes.shapes:
            for part in options.parts:
                paged = replace(sizes, page_size=page_size)
                step = Step(device.torch_device, specs[part], paged, rows, tokens)
                for title, contenders in contests(step, part, device):
                    contest.report(f"{part}: {title}, {rows} × {tokens:,}", cost_of(step), contenders)
                del step


if __name__ == "__main__":
    main()
