"""Decodes with entries on the card, and in host memory behind hot ones: `python benchmarks/hisparse.py`.

    3 layers of DeepSeek V3.2's shape, two of them with all 256 experts, bf16, random weights
    8 rows of 32,768 tokens: four times what a pool of 65,536 tokens would hold
    buffers of 4,096 hot entries a row and layer, of which a token chooses 2,048

`--model v4` takes 4 layers of V4-Flash's shape instead, one of each kind and a second that chooses: a token chooses 512
entries of 4 tokens, and 1,024 are hot.

Random weights choose at random, so the choice is scripted: the indexers run, and what they chose is replaced by one of
which nine tenths stay from step to step and the rest moves on, which a buffer of this size has forgotten when it comes
back. The hit rate is counted, not assumed. The first steps of both are compared before any time is reported, and both
are timed in turns. Prints Markdown. `--cpu` runs a tiny model on a CPU to try the script.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sightline.attention.contract import IndexInputs
from sightline.attention.planner import PlannedBatch
from sightline.bench.engine.work import CONFIGS
from sightline.core.batch import RowWork, StepWork
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.models.random_weights import RandomCheckpoint
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime

TOLERANCE = 3e-2
"""Of the logits' norm: the same entries are read in another order of memory, in bf16."""
COMPARED = 4
ROUNDS = 3
MOVING = 10
"""One in so many chosen entries moves on from step to step."""
V32: dict[str, object] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 4096,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 16,
    "index_topk": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "torch_dtype": "float32",
}


class Plan(NamedTuple):
    """What is measured."""

    top_k: int
    buffer: int
    rows: int
    context: int
    warm_up: int
    steps: int
    settings: dict[str, Any]
    tokens_per_entry: int = 1


class ScriptedChoice:
    """Replaces what indexers choose. Counts steps on the device, so that captured steps move on too."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._number = torch.arange(plan.top_k, device=device)
        self._context, self._stride = plan.context, plan.context // plan.tokens_per_entry // plan.top_k
        self._choose = PlannedBatch.choose

    def install(self) -> None:
        def choose(planned: PlannedBatch, layer: int, inputs: IndexInputs) -> Tensor | None:
            chosen = self._choose(planned, layer, inputs)
            if chosen is not None and max(planned.batch.query_lens.bound) <= 1:
                if layer == min(planned.plan.indexers):
                    self.step += 1
                moved = (self.step * 7 + self._number) % self._stride
                offset = torch.where(self._number % MOVING == 0, moved, 0)
                # Rows that are shorter, as while graphs are captured, keep their own choice.
                contexts = planned.batch.context_lens.device[: chosen.shape[0]]
                long = (contexts >= self._context).unsqueeze(1)
                chosen.copy_(torch.where(long, (self._number * self._stride + offset).to(torch.int32), chosen))
            return chosen

        PlannedBatch.choose = choose  # type: ignore[method-assign, assignment]


def build(plan: Plan, config: Path, ledger: Ledger, *, hot: bool) -> Runtime:
    settings = {**plan.settings, "cache_tokens": plan.rows * (plan.context + 1024), "max_num_seqs": plan.rows}
    if hot:
        settings |= {"enable_hisparse": True, "hisparse_config": {"device_buffer_size": plan.buffer}}
    engine = EngineConfig(**settings, max_model_len=plan.context + 1024)
    device = torch.device("cpu" if engine.device == "cpu" else "cuda")
    return build_runtime(engine, RandomCheckpoint(config, device, ledger), ledger)


def fill(runtime: Runtime, plan: Plan) -> list[int]:
    """Opens rows with random entries, the same in every pool of the same name."""
    rows = [runtime.store.open_row() for _ in range(plan.rows)]
    for row in rows:
        runtime.store.grow_row(row, plan.context + 1024)
        for pool in runtime.store.pools:
            device = pool.table.pages.device
            places = torch.arange(plan.context, device=device)
            slots = pool.slots_of(torch.full_like(places, row), places)
            for spec in pool.spec.planes:
                for number, layer in enumerate(pool.plane(spec.name)):
                    generator = torch.Generator(device).manual_seed(1000 * row + number)
                    values = torch.randn(plan.context, *spec.shape, generator=generator, device=device)
                    layer.index_copy_(0, slots, values.mul_(0.1).to(spec.dtype))
        runtime.store.fill_row(row, plan.context)
        states = runtime.store.main.states
        if states is not None:
            for each in states.pools:
                each.fill([states.slot(row, plan.context)], 0.0)
    return rows


def decode(runtime: Runtime, rows: list[int], step: int, plan: Plan) -> Tensor:
    length, network = plan.context + step, runtime.network
    work = StepWork.of([RowWork(row, [3 + (row + step) % 50], length, 1) for row in rows])
    planned = network.planner.plan(network.graphs.assemble(work))
    logits = network.runner.forward(planned)
    for row in rows:
        runtime.store.lengths.commit(row, length + 1)
    return logits


def wait(runtime: Runtime) -> tuple[int, int]:
    """Waits for the device, and returns the entries that were chosen and copied so far."""
    if runtime.config.device.torch_device.type == "cuda":
        for each in runtime.coordinators:
            each.counts()
        torch.cuda.synchronize()
    counts = [each.counts() for each in runtime.coordinators]
    return sum(each.chosen for each in counts), sum(each.copied for each in counts)


class Measured:
    """One way to keep entries, with rows that go on from measurement to measurement."""

    def __init__(self, runtime: Runtime, plan: Plan, script: ScriptedChoice) -> None:
        self._runtime, self._plan, self._script = runtime, plan, script
        self._rows = fill(runtime, plan)
        script.step.zero_()
        self.logits = torch.stack([decode(runtime, self._rows, step, plan).float().cpu() for step in range(COMPARED)])
        """[steps, rows, vocab] of the first steps."""
        self._step = COMPARED
        self._run(plan.warm_up)
        self.tokens_per_second = 0.0
        """The best of all measurements."""
        self.hit_rate: float | None = None

    def _run(self, steps: int) -> None:
        self._script.step.fill_(self._step)
        for step in range(self._step, self._step + steps):
            decode(self._runtime, self._rows, step, self._plan)
        self._step += steps
        wait(self._runtime)

    def measure(self) -> None:
        chosen, copied = wait(self._runtime)
        started = time.perf_counter()
        self._run(self._plan.steps)
        seconds = time.perf_counter() - started
        self.tokens_per_second = max(self.tokens_per_second, self._plan.rows * self._plan.steps / seconds)
        all_chosen, all_copied = wait(self._runtime)
        if all_chosen > chosen:
            self.hit_rate = 1.0 - (all_copied - copied) / (all_chosen - chosen)


TRIAL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 64}


def card(given: argparse.Namespace, backends: str) -> dict[str, Any]:
    """Settings on a GPU. The same kernels read both, and nothing waits for a library to compile."""
    return {
        "device": "cuda",
        "dtype": "bfloat16",
        "attention_backend": given.attention_backend or backends,
        "cuda_graph_sizes": "8",
        "max_num_batched_tokens": 64,
    }


def v32(given: argparse.Namespace) -> tuple[dict[str, Any], Plan]:
    values = V32 | {"num_hidden_layers": given.layers} | (TINY if given.cpu else {})
    if given.cpu:
        return values, Plan(16, 32, 2, 256, 12, 8, TRIAL)
    return values, Plan(2048, 4096, 8, given.context, 40, given.steps, card(given, "triton-latent,triton-index"))


def v4(given: argparse.Namespace) -> tuple[dict[str, Any], Plan]:
    values = json.loads((CONFIGS / f"deepseek-v4-{'small' if given.cpu else '4-layers'}.json").read_text())
    if given.cpu:
        return values, Plan(64, 96, 2, 2048, 12, 8, TRIAL, 4)
    settings = card(given, "triton-compressed,triton-compressed-index")
    return values, Plan(512, 1024, 8, given.context, 40, given.steps, settings, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="try the script with a tiny model")
    parser.add_argument("--model", choices=("v32", "v4"), default="v32")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=3, help="of V3.2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--attention-backend", help="of both engines; Triton's kernels without it")
    given = parser.parse_args()
    values, plan = (v4 if given.model == "v4" else v32)(given)
    script = ScriptedChoice(plan, torch.device("cpu" if given.cpu else "cuda"))
    script.install()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(values))
        runtimes = {name: build(plan, config, Ledger(), hot=name == "HiSparse") for name in ("resident", "HiSparse")}
    found = {name: Measured(runtime, plan, script) for name, runtime in runtimes.items()}
    resident, hot = found.values()
    error = float((hot.logits - resident.logits).norm() / resident.logits.norm())
    if not error <= TOLERANCE:
        raise SystemExit(f"expected logits within {TOLERANCE} of the resident ones, got a difference of {error:.3g}")
    for _ in range(ROUNDS):
        for each in found.values():
            each.measure()
    print("| entries | tokens/s | hit rate | cache on the device | entries on the host |\n|---|---|---|---|---|")
    for name, each in found.items():
        taken, rate = runtimes[name].memory_taken, "" if each.hit_rate is None else f"{each.hit_rate:.1%}"
        sizes = f"{taken.cache / 2**30:.2f} GiB | {taken.host_entries / 2**30:.2f} GiB"
        print(f"| {name} | {each.tokens_per_second:,.0f} | {rate} | {sizes} |")
    share, rows = hot.tokens_per_second / resident.tokens_per_second, f"{plan.rows} rows of {plan.context:,} tokens"
    print(f"\nHiSparse decodes at {share:.2f} of the resident speed: {rows}; logits differ by {error:.1e}.")


if __name__ == "__main__":
    main()
