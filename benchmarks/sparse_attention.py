"""Times sparse attention on one GPU: `python benchmarks/sparse_attention.py`.

    index      scores and choice of 2,048 at 1 × 131,072 and 64 × 32,768 tokens, keys in bf16 and in 8 bits
    choice     the choice alone, beside torch.topk
    attention  128 heads at 64 × 2,048 and 1 × 2,048 chosen latents, through the backends and, given its library
               (`--flashmla PATH`, flashmla_ops.abi3.so of sglang-kernel), FlashMLA's sparse kernel
    sweep      the attention kernel of Triton with other sizes of programs

All contenders of a shape run in turns, in CUDA graphs, over several layers, so that no layer finds its keys in the
cache of the device. Results are checked before any time is reported: a contender that is wrong is reported as such and
not timed, and one that takes longer than `--budget` seconds to compile and check is skipped. `--cpu` tries everything
with tiny shapes, in Triton's interpreter. Prints medians as Markdown, in microseconds, with the least time that bytes
and products allow at the rates of this device.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sightline.attention.buffers import PlanMemory
from sightline.attention.contract import (
    AttentionPlan,
    BackendContext,
    CachePolicy,
    IndexInputs,
    LatentInputs,
    StepLimits,
    StepView,
)
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import Feature
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import IndexSpec, LatentSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.bench.attention.contest import Contest, Entrant, Entrants
from sightline.bench.attention.shapes import Cost
from sightline.bench.attention.timing import TimingBudget, measure_rates
from sightline.bench.budget import Budget
from sightline.cache.layout import Layout, arrange_free_pages
from sightline.cache.pools import CacheLimits, Pool
from sightline.cache.store import CacheStore
from sightline.core.batch import Batch, RowWork
from sightline.core.device import Device, detect_device
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.latent_attention import absorb_queries, project_values
from sightline.runner.batching import assemble

FP8 = torch.float8_e4m3fn
BACKENDS = "sightline.attention.backends."
INDEXERS = {
    "triton-index": f"{BACKENDS}triton.index_backend:TritonIndexBackend",
    "torch-index": f"{BACKENDS}torch.index_backend:TorchIndexBackend",
}
ATTENDERS = {
    "triton-latent": f"{BACKENDS}triton.latent_backend:TritonLatentBackend",
    "flashinfer-latent": f"{BACKENDS}flashinfer.latent_backend:FlashInferLatentBackend",
}
CHECKED_ROWS = 2


@dataclass(frozen=True)
class Sizes:
    """A model's sizes, and the shapes that are timed."""

    index: IndexSpec
    latent: LatentSpec
    shapes: tuple[tuple[int, int], ...]
    """Rows, and tokens of each."""
    page_size: int
    dtype: torch.dtype
    layers: int
    tolerance: float


LARGE = Sizes(
    IndexSpec(64, 128, 2048),
    LatentSpec(128, 512, 64, 128, 128, 192**-0.5, 2048),
    ((1, 131_072), (64, 32_768)),
    64,
    torch.bfloat16,
    4,
    2e-2,
)
TINY = Sizes(IndexSpec(4, 16, 5), LatentSpec(4, 16, 8, 8, 8, 0.25, 5), ((1, 40), (3, 24)), 4, torch.float32, 2, 1e-4)


@dataclass(eq=False)
class Step:
    """Rows of one new token each over a filled pool."""

    device: torch.device
    spec: IndexSpec | LatentSpec
    sizes: Sizes
    rows: int
    tokens: int
    cache_dtype: torch.dtype

    def __post_init__(self) -> None:
        sizes, group = self.sizes, LayerGroup("group0", self.spec, tuple(range(self.sizes.layers)))
        scales = {"entry": [1.0] * sizes.layers} if self.cache_dtype is FP8 else None
        pages = self.rows * -(-self.tokens // sizes.page_size) + 1
        limits = CacheLimits(pages, sizes.page_size, self.rows, self.tokens, 1, 0)
        self.store = CacheStore([group.cache_spec(self.cache_dtype, scales)], limits, self.device)
        arrange_free_pages(self.store, Layout.SHUFFLED)
        self.cache = self.store.cache("group0")
        [self.pool] = self.cache.pools.values()
        self._fill(self.pool)
        table_rows = [self.store.open_row() for _ in range(self.rows)]
        for row in table_rows:
            self.store.grow_row(row, self.tokens)
        work = [RowWork(row, [1], self.tokens - 1, 1) for row in table_rows]
        self.batch: Batch = assemble(work, self.store)

    def _fill(self, pool: Pool) -> None:
        torch.manual_seed(0)
        for plane in pool.spec.planes:
            for layer in pool.plane(plane.name):
                numbers = torch.ones_like(layer) if plane.name == "scale" else None
                if numbers is None:
                    for part in layer.split(1 << 18):
                        part.copy_(torch.randn(part.shape, device=self.device).to(plane.dtype))
                else:
                    layer.copy_(numbers)

    def plan(self, place: str) -> AttentionPlan[Any]:
        """The plan of a backend, prepared."""
        workspace = Workspace(self.device, 1 << 36)
        limits = StepLimits(self.rows, self.rows, self.tokens, (MAIN_LANE,), 0)
        entries = ResidentEntries(self.cache, resolve_name("sightline.kernels.triton.slots:find_slots"))
        context = BackendContext(
            "group0",
            self.spec,
            self.cache,
            workspace,
            limits,
            self.sizes.dtype,
            self.device,
            inline_launcher(),
            entries,
        )
        backend = resolve_name(place)(context)
        memory = PlanMemory(workspace.elastic("benchmark", "plans", MAIN_LANE))
        step = StepView(self.batch, CachePolicy.PAGED, MAIN_LANE, frozenset({Feature.SPARSE}))
        memory.begin()
        plan: AttentionPlan[Any] = backend.plan(step, memory.part("group0"))
        plan.prepare()
        return plan

    def slots(self, row: int) -> Tensor:
        """[tokens] int64: the slots of a row."""
        places = torch.arange(self.tokens, device=self.device)
        return self.pool.table.slots(torch.full_like(places, self.batch.rows[row]), places, self.pool.page_size)

    def read(self, plane: str, slots: Tensor) -> Tensor:
        """Entries of the last layer, in fp32."""
        numbers = self.pool.plane(plane)[-1]
        return numbers.view(torch.uint8)[slots].view(numbers.dtype).float()


def draw(step: Step, *shape: int) -> Tensor:
    return torch.randn(shape, device=step.device).to(step.sizes.dtype)


def index_contenders(step: Step, spec: IndexSpec) -> Entrants:
    inputs = IndexInputs(
        draw(step, step.rows, spec.num_q_heads, spec.head_dim),
        draw(step, step.rows, spec.head_dim),
        draw(step, step.rows, spec.num_q_heads),
    )

    def check(chosen: Tensor) -> str | None:
        for row in range(min(CHECKED_ROWS, step.rows)):
            slots = step.slots(row)
            keys = step.read("key", slots)
            if step.cache_dtype is FP8:
                keys *= step.read("scale", slots)
            products = inputs.q[row].float() @ keys.T
            scores = inputs.weights[row].float() @ products.relu()
            found = chosen[row].long()
            if int(found[0]) < 0 or not bool((found.diff() > 0).all()):
                return f"row {row} is no increasing choice of {spec.top_k}"
            least = scores.topk(spec.top_k).values[-1]
            missed = float((least - scores[found].min()) / scores.abs().max())
            if missed > step.sizes.tolerance:
                return f"row {row} chose a score that is too low by {missed:.1e}"
        return None

    out = torch.empty(step.rows, spec.top_k, dtype=torch.int32, device=step.device)

    def make(place: str) -> Entrant:
        plan = step.plan(place)

        def run(layer: int) -> Tensor:
            plan.run(layer, inputs, out)
            return out

        return Entrant(run, check)

    return [(name, partial(make, place)) for name, place in INDEXERS.items()]


def choice_contenders(step: Step, spec: IndexSpec) -> Entrants:
    module = "sightline.kernels.triton.choose:"
    config = resolve_name(f"{module}ChoiceConfig").of(spec.top_k, step.tokens)
    scores = torch.randn(step.sizes.layers, step.rows, step.tokens, device=step.device)
    rows = torch.arange(step.rows, dtype=torch.int32, device=step.device)
    counts = torch.full_like(rows, step.tokens)
    room = resolve_name(f"{module}ChoiceRoom").of(
        config, step.rows, lambda _, shape: torch.empty(shape, dtype=torch.int32, device=step.device)
    )
    overlaps = resolve_name("sightline.kernels.triton.chip:Chip").of(step.device).overlaps
    out = torch.empty(step.rows, spec.top_k, dtype=torch.int32, device=step.device)

    def ours(layer: int) -> Tensor:
        resolve_name(f"{module}choose_places")(scores[layer], rows, counts, room, out, config, overlaps=overlaps)
        return out

    def check(chosen: Tensor) -> str | None:
        expected = scores[-1].topk(spec.top_k, dim=1).indices.sort(dim=1).values
        return None if torch.equal(chosen.long().sort(dim=1).values, expected) else "another choice than torch.topk"

    theirs = Entrant(lambda layer: scores[layer].topk(spec.top_k, dim=1).indices, check)
    return [("triton", lambda: Entrant(ours, check)), ("torch.topk", lambda: theirs)]


class Attention(NamedTuple):
    """The inputs of an attention shape, and what is right."""

    step: Step
    inputs: LatentInputs
    slots: Tensor
    """[rows, top_k] int64."""

    @staticmethod
    def of(step: Step, spec: LatentSpec) -> Attention:
        heads, top_k = spec.num_q_heads, spec.top_k or 0
        chosen = torch.stack(
            [torch.randperm(step.tokens - 1, device=step.device)[:top_k].sort().values for _ in range(step.rows)]
        )
        inputs = LatentInputs(
            draw(step, step.rows, heads, spec.nope_dim),
            draw(step, step.rows, heads, spec.rope_dim),
            draw(step, step.rows, spec.latent_dim),
            draw(step, step.rows, spec.rope_dim),
            draw(step, heads, spec.nope_dim, spec.latent_dim) / spec.latent_dim**0.5,
            draw(step, heads, spec.value_dim, spec.latent_dim) / spec.latent_dim**0.5,
            chosen.to(torch.int32),
        )
        slots = torch.stack([step.slots(row)[chosen[row]] for row in range(step.rows)])
        return Attention(step, inputs, slots)

    def queries(self) -> Tensor:
        """[rows, heads, latent + rope]: absorbed."""
        q = torch.einsum("thn,hnl->thl", self.inputs.q_nope.float(), self.inputs.key_up.float())
        return torch.cat((q, self.inputs.q_rope.float()), -1).to(self.step.sizes.dtype)

    def found(self, spec: LatentSpec, row: int) -> Tensor:
        """[heads, latent]: the weighted latents of a row."""
        entries = self.step.read("entry", self.slots[row])
        weights = torch.softmax(self.queries()[row].float() @ entries.T * spec.scale, -1)
        return weights @ entries[:, : spec.latent_dim]

    def check(self, spec: LatentSpec, out: Tensor, *, projects: bool) -> str | None:
        for row in range(min(CHECKED_ROWS, self.step.rows)):
            expected = self.found(spec, row)
            if projects:
                expected = torch.einsum("hvl,hl->hv", self.inputs.value_up.float(), expected)
            error = float((out[row].float() - expected).norm() / expected.norm())
            if not error <= self.step.sizes.tolerance:
                return f"row {row} is off by {error:.1e}"
        return None


def attention_contenders(attention: Attention, spec: LatentSpec, flashmla: Path | None) -> Entrants:
    step, inputs = attention.step, attention.inputs
    out = torch.empty(step.rows, spec.num_q_heads, spec.value_dim, dtype=step.sizes.dtype, device=step.device)

    def make(place: str) -> Entrant:
        plan = step.plan(place)

        def run(layer: int) -> Tensor:
            plan.run(layer, inputs, out)
            return out

        return Entrant(run, lambda found: attention.check(spec, found, projects=True))

    found: list[tuple[str, Callable[[], Entrant]]] = [
        (f"{name}, whole layer", partial(make, place)) for name, place in ATTENDERS.items()
    ]
    found.append(("what surrounds a kernel: to subtract", partial(surrounding_contender, attention, spec)))
    if flashmla is not None:
        found.append(("FlashMLA sparse, kernel alone", partial(flashmla_contender, attention, spec, flashmla)))
    return found


def surrounding_contender(attention: Attention, spec: LatentSpec) -> Entrant:
    """A layer without its attention kernel: the new entries, the queries into the latent space and the values out."""
    step, inputs = attention.step, attention.inputs
    write = resolve_name("sightline.kernels.triton.write:write_latents")
    slots = torch.stack([step.slots(row)[-1] for row in range(step.rows)])
    queries = torch.empty(step.rows, spec.num_q_heads, spec.head_dim, dtype=step.sizes.dtype, device=step.device)
    latents = torch.stack([attention.found(spec, row) for row in range(step.rows)]).to(step.sizes.dtype)
    out = torch.empty(step.rows, spec.num_q_heads, spec.value_dim, dtype=step.sizes.dtype, device=step.device)

    def run(layer: int) -> Tensor:
        write(inputs.latent, inputs.k_rope, step.pool.plane("entry")[layer], slots)
        absorb_queries(inputs.q_nope, inputs.q_rope, inputs.key_up, queries)
        project_values(latents, inputs.value_up, out)
        return out

    return Entrant(run, lambda found: attention.check(spec, found, projects=True))


def flashmla_contender(attention: Attention, spec: LatentSpec, library: Path) -> Entrant:
    """The kernel of the library. Arguments that other versions have are left at their defaults or None."""
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    op = torch.ops.sgl_kernel.sparse_prefill_fwd.default
    q, indices = attention.queries(), attention.slots.to(torch.int32).unsqueeze(1)
    given = {"q": q, "indices": indices, "sm_scale": spec.scale, "d_v": spec.latent_dim}

    def run(layer: int) -> Tensor:
        kv = attention.step.pool.plane("entry")[layer].unsqueeze(1)
        arguments = {
            each.name: (given | {"kv": kv}).get(each.name)
            for each in op._schema.arguments
            if each.name in given or each.name == "kv" or not each.has_default_value()
        }
        found: Tensor = op(**arguments)[0]
        return found

    return Entrant(run, lambda found: attention.check(spec, found, projects=False))


def sweep_contenders(attention: Attention, spec: LatentSpec, device: Device) -> Entrants:
    """The decode kernel over the slots, with other sizes of programs."""
    shares = "sightline.kernels.triton.decode_shares:"
    decode = resolve_name("sightline.kernels.triton.latent_decode:decode_latent")
    layer_of = resolve_name("sightline.kernels.triton.latent_decode:LatentLayer")
    make_rows, make_scratch, make_config, divide = (
        resolve_name(f"{shares}{name}") for name in ("DecodeRows", "DecodeScratch", "DecodeConfig", "divide")
    )
    chip = resolve_name("sightline.kernels.triton.chip:Chip").of(device.torch_device)
    rows, where, q = attention.step.rows, attention.step.device, attention.queries()
    ones, numbers = torch.ones(rows, dtype=torch.int64, device=where), torch.arange(rows, device=where)
    table = make_rows(ones, ones * (spec.top_k or 0), numbers, numbers, attention.slots, 1)
    out = torch.empty(rows, spec.num_q_heads, spec.latent_dim, dtype=attention.step.sizes.dtype, device=where)
    shapes = [(heads, block, warps) for heads in (16, 32, 64) for block in (32, 64) for warps in (4, 8)]
    for heads, block, warps in shapes if device.torch_device.type == "cuda" else [(16, 16, 4)]:
        for depth, programs in ((1, chip.multiprocessors), (2, chip.multiprocessors), (1, 2 * chip.multiprocessors)):
            config = make_config(block, heads, programs, warps, depth, chip.overlaps)
            ints = [torch.empty(programs, 8, dtype=torch.int32, device=where) for _ in range(2)]
            parts = torch.empty(2 * programs, heads, spec.latent_dim, device=where)
            stats = torch.empty(2 * programs, 2, heads, device=where)
            scratch = make_scratch(*ints, torch.empty(rows, dtype=torch.int32, device=where), parts, stats)
            divide(table, scratch, config, config.num_subgroups(spec.num_q_heads), None)

            def run(layer: int, scratch: Any = scratch, config: Any = config) -> Tensor:
                entries = layer_of(attention.step.pool.plane("entry")[layer], None, spec.scale)
                queries = q[..., : spec.latent_dim], q[..., spec.latent_dim :]
                decode(*queries, None, entries, table, scratch, config, out, None)
                return out

            name = f"heads {heads}, block {block}, warps {warps}, depth {depth}, programs {programs}"
            contender = Entrant(run, lambda found: attention.check(spec, found, projects=False))
            yield name, partial(Entrant, *contender)


def index_cost(step: Step, spec: IndexSpec) -> Cost:
    scale = 4 if step.cache_dtype is FP8 else 0
    pairs = step.rows * step.tokens
    return Cost(
        pairs * (spec.head_dim * step.cache_dtype.itemsize + scale), 2 * pairs * spec.num_q_heads * spec.head_dim
    )


def attention_cost(step: Step, spec: LatentSpec) -> Cost:
    pairs = step.rows * (spec.top_k or 0)
    operations = 2 * pairs * spec.num_q_heads * (spec.head_dim + spec.latent_dim)
    return Cost(pairs * spec.head_dim * step.cache_dtype.itemsize, operations)


def run_parts(parts: Sequence[str], bench: Contest, sizes: Sizes, flashmla: Path | None) -> None:
    where, index, latent = bench.device.torch_device, sizes.index, sizes.latent
    for rows, tokens in sizes.shapes:
        for dtype in (sizes.dtype, FP8) if "index" in parts else ():
            step = Step(where, index, sizes, rows, tokens, dtype)
            title = f"scores and choice of {index.top_k}, {rows} × {tokens:,}, keys {dtype}"
            bench.report(title, index_cost(step, index), index_contenders(step, index))
            del step
        if "choice" in parts:
            step = Step(where, index, sizes, rows, tokens, sizes.dtype)
            cost = Cost(4 * rows * (tokens + index.top_k), 0)
            bench.report(f"choice of {index.top_k}, {rows} × {tokens:,}", cost, choice_contenders(step, index))
            del step
        for part in [each for each in ("attention", "sweep") if each in parts]:
            step = Step(where, latent, sizes, rows, tokens, sizes.dtype)
            attention = Attention.of(step, latent)
            contenders = attention_contenders(attention, latent, flashmla)
            if part == "sweep":
                contenders = sweep_contenders(attention, latent, bench.device)
            title = f"{part}, {rows} × {latent.top_k} of {tokens:,}, {latent.num_q_heads} heads"
            bench.report(title, attention_cost(step, latent), contenders)
            del step, attention, contenders


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["index", "choice", "attention"], help="or sweep")
    parser.add_argument("--flashmla", type=Path, help="the library with FlashMLA's sparse kernel")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for compiling and checking, per contender")
    parser.add_argument("--cpu", action="store_true", help="try everything on a CPU with tiny shapes")
    options = parser.parse_args(arguments)
    if options.cpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    device, sizes = detect_device("cpu" if options.cpu else "cuda"), TINY if options.cpu else LARGE
    rates = measure_rates(device, sizes.dtype)
    print(f"{device.name}: {rates.bytes_per_second / 1e12:.2f} TB/s, {rates.operations_per_second / 1e12:.0f} TFLOP/s")
    effort = TimingBudget(rounds=1, sample_seconds=1e-6) if options.cpu else TimingBudget()
    bench = Contest(device, rates, effort, sizes.layers, defaultdict(lambda: Budget(options.budget)))
    with torch.inference_mode():
        run_parts(options.parts, bench, sizes, options.flashmla)


if __name__ == "__main__":
    main()
