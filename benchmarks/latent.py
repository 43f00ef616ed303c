"""Latent attention of a small model: absorbed decode compared with its floor, and a whole step with transformers'.

    python benchmarks/latent.py

Hidden 512, 16 heads, latent 128, rope 64, 128 of each head's key and value; random weights, one row, context 4,096.
Checks at every step that both give the same logits. The floor of attention is the bytes of the latents over the read
rate, or the operations over the product rate, both measured here; transformers keeps every head's keys and values.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from sightline.attention.contract import LatentInputs
from sightline.attention.spec import LatentSpec
from sightline.bench.floor import Machine, measure_machine
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.batching import assemble
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime

VOCAB, HIDDEN, HEADS = 4096, 512, 16
SPEC = LatentSpec(HEADS, 128, 64, 128, 128, 192**-0.5)
CPU = torch.device("cpu")


def make_model(layers: int) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1408,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=SPEC.latent_dim,
        qk_rope_head_dim=SPEC.rope_dim,
        qk_nope_head_dim=SPEC.nope_dim,
        v_head_dim=SPEC.value_dim,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )
    return DeepseekV3ForCausalLM(config).eval()


class Sightline:
    """One row, decoded step by step."""

    def __init__(self, folder: str, context: int) -> None:
        config = EngineConfig(max_model_len=context + 256, cache_tokens=context + 512, max_num_seqs=2, dtype="float32")
        ledger = Ledger()
        checkpoint = open_checkpoint(folder, ledger)
        self.runtime: Runtime = build_runtime(config, checkpoint, ledger)
        self.row = self.runtime.store.open_row()
        self.length = 0

    def forward(self, tokens: list[int]) -> torch.Tensor:
        store = self.runtime.store
        store.grow_row(self.row, self.length + len(tokens))
        batch = assemble([RowWork(self.row, tokens, self.length, 1)], store)
        self.length += len(tokens)
        return self.runtime.runner.forward(self.runtime.planner.plan(batch))[-1]


class Transformers:
    """One row with keys and values of every head cached."""

    def __init__(self, model: DeepseekV3ForCausalLM) -> None:
        self.model = model
        self.cache = DynamicCache()

    def forward(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            out = self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[0, -1]
        return logits


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def attention_seconds(runtime: Runtime, row: int, context: int, layers: int, rounds: int) -> float:
    """Median time of one layer's attention, including the projections of queries and values."""
    inputs = LatentInputs(
        q_nope=torch.randn(1, HEADS, SPEC.nope_dim),
        q_rope=torch.randn(1, HEADS, SPEC.rope_dim),
        latent=torch.randn(1, SPEC.latent_dim),
        k_rope=torch.randn(1, SPEC.rope_dim),
        key_up=torch.randn(HEADS, SPEC.nope_dim, SPEC.latent_dim),
        value_up=torch.randn(HEADS, SPEC.value_dim, SPEC.latent_dim),
    )
    runtime.store.grow_row(row, context + 1)
    planned = runtime.planner.plan(assemble([RowWork(row, [1], context, 0)], runtime.store))
    planned.prepare()
    out = torch.empty(1, HEADS, SPEC.value_dim)

    def all_layers() -> None:
        with torch.inference_mode():
            for layer in range(layers):
                planned.attend(layer, inputs, out)

    all_layers()
    return statistics.median(timed(all_layers) for _ in range(rounds)) / layers


def report(machine: Machine, context: int, attention: float, steps: dict[str, float]) -> None:
    entries, expanded = SPEC.head_dim * 4, HEADS * (SPEC.nope_dim + SPEC.rope_dim + SPEC.value_dim) * 4
    operations = 2 * context * HEADS * (SPEC.head_dim + SPEC.latent_dim)
    by_bytes, by_work = context * entries / machine.read_bytes_per_second, operations / machine.operations_per_second
    print(f"machine: {machine}, {torch.get_num_threads()} threads")
    print(
        f"attention of a layer at context {context:,}: {attention * 1e6:.0f} us; its bytes take "
        f"{by_bytes * 1e6:.0f} us ({by_bytes / attention:.0%}), its products {by_work * 1e6:.0f} us "
        f"({by_work / attention:.0%})"
    )
    print(
        f"cached bytes per token and layer: {entries:,} here, {expanded:,} in transformers ({expanded / entries:.1f}x)"
    )
    ours, theirs = steps["sightline"], steps["transformers"]
    print(f"a step: {ours * 1e3:.2f} ms here, {theirs * 1e3:.2f} ms in transformers: {theirs / ours:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    model = make_model(given.layers)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = Sightline(folder, given.context)
    peer = Transformers(model)
    prompt = torch.randint(0, VOCAB, (given.context,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = {"sightline": engine.forward(prompt[:1]), "transformers": peer.forward(prompt[:1])}
    for start in range(1, given.context, 512):
        logits["sightline"] = engine.forward(prompt[start : start + 512])
        logits["transformers"] = peer.forward(prompt[start : start + 512])
    machine = measure_machine(torch.float32, CPU)
    times: dict[str, list[float]] = {"sightline": [], "transformers": []}
    for _ in range(given.rounds):
        tokens = {name: int(each.argmax()) for name, each in logits.items()}
        if not torch.allclose(logits["sightline"], logits["transformers"], atol=1e-3):
            raise SystemExit("expected the same logits from both, got different ones: nothing is reported")
        for name, side in (("sightline", engine), ("transformers", peer)):
            started = time.perf_counter()
            logits[name] = side.forward([tokens["sightline"]])
            times[name].append(time.perf_counter() - started)
        machine = machine.best(measure_machine(torch.float32, CPU))
    attention = attention_seconds(engine.runtime, engine.row, engine.length, given.layers, given.rounds)
    report(machine, engine.length, attention, {name: statistics.median(each) for name, each in times.items()})


if __name__ == "__main__":
    main()
