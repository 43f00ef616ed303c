"""The work of `bench latency` and `bench throughput`: prompts, numbers of tokens, and floors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias, cast

import torch

from sightline.bench.engine.measure import (
    CHECKED_TOKENS,
    OURS,
    Conditions,
    MeasuredWork,
    Report,
    TimedPart,
    compare_tokens,
    measure,
    random_prompts,
    sightline_engine,
    summarise,
)
from sightline.bench.engine.peers import PeerModel, load_peers
from sightline.bench.floor import Floor, cache_reads, measure_machine, model_size
from sightline.core.config import MEMORY_FRACTIONS, EngineConfig, EngineKeywords, Quantization
from sightline.core.device import detect_device
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.ledger import Ledger
from sightline.llm import LLM, EngineSettings
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.random_weights import RandomCheckpoint
from sightline.opening import build_engine_of, open_named

CHECKED_TEXT = (
    "The kettle had been on the stove for some time when Anna came home from the market. She put the basket on the "
    "table, opened the window and looked out at the river, where two boats were being unloaded. In the afternoon the "
    "children would come back from school, and"
)
"""Every engine continues this before it is timed. On random tokens any rounding could change the most likely token."""
CHECKED_LENGTHS = (12, 24, 36, 48)
CONFIGS = Path(__file__).parent / "model_configs"
"""Configs of public models, for random weights."""
Works: TypeAlias = Callable[[Floor, int], Sequence[MeasuredWork]]
"""(floor, size of the vocabulary) to the pieces of work."""


@dataclass(frozen=True)
class MeasuredEngine:
    """Sightline with the measured model."""

    llm: LLM
    checkpoint: Checkpoint
    floor: Floor
    """From the machine's rates before anything was timed."""
    conditions: Conditions

    def measured_again(self) -> Floor:
        """Returns the floor from the better of the first rates and new ones, in case the machine was busy before."""
        config = self.llm.engine.runtime.config
        return replace(
            self.floor, machine=self.floor.machine.best(measure_machine(config.dtype, config.device.torch_device))
        )


def load_subject(
    settings: dict[str, object], model_config: str | None = None, *, prefix_caching: bool = False
) -> MeasuredEngine:
    """Loads the model of the engine's `settings` and measures the machine.

    With `model_config`, the model is that config's, with random weights (`find_config`).
    """
    # Rounds repeat their prompts, so that a prefix cache would spare all rounds but the first.
    wanted = settings | {"skip_tokenizer_init": True, "prefix_caching": prefix_caching}
    config = EngineKeywords(**cast("EngineSettings", wanted))
    ledger = Ledger(strict=config.strict)
    if model_config is None:
        checkpoint = open_named(config, ledger)
        name = _shown_name(config.model, checkpoint)
    else:
        path = find_config(model_config)
        checkpoint = RandomCheckpoint(path, detect_device(config.device).torch_device, ledger)
        name = f"{path.stem} with random weights"
    llm = LLM.of(build_engine_of(config, checkpoint, ledger))
    runtime = llm.engine.runtime
    dtype, quantization = runtime.config.dtype, runtime.config.quantization.value
    machine = measure_machine(dtype, runtime.config.device.torch_device)
    return MeasuredEngine(
        llm=llm,
        checkpoint=checkpoint,
        floor=Floor(
            machine, model_size(checkpoint, dtype, quantization, runtime.definition.expert_stacks), cache_reads(runtime)
        ),
        conditions=Conditions(
            model=name,
            dtype=str(dtype).removeprefix("torch."),
            quantization=quantization,
            threads=torch.get_num_threads(),
            degradations=tuple(map(str, llm.engine.ledger.degradations)),
        ),
    )


def sharing_memory(settings: dict[str, object]) -> dict[str, object]:
    """The settings of each of two engines that share the memory which one would take."""
    # EngineConfig refuses an invalid fraction as it was given.
    asked = EngineConfig(memory_fraction=cast("float | None", settings.get("memory_fraction"))).memory_fraction
    kind = detect_device(cast("str", settings.get("device", EngineConfig.device))).kind
    return settings | {"memory_fraction": (MEMORY_FRACTIONS[kind.value] if asked is None else asked) / 2}


def find_config(name: str) -> Path:
    """The file of a model's config: one of Sightline's own by its name, or a path."""
    own = {path.stem: path for path in CONFIGS.glob("*.json")}
    path = own.get(name, Path(name).expanduser())
    if not path.is_file():
        raise ConfigError(
            f"expected --model-config {', '.join(sorted(own))} or a config.json, got {name!r}: no such file"
        )
    return path


def _shown_name(model: str | None, checkpoint: Checkpoint) -> str:
    """A Hugging Face id as given, or the last part of a path."""
    if model is None or Path(model).exists():
        return checkpoint.location.resolve().name
    return model


def latency_works(
    floor: Floor, vocab_size: int, lengths: tuple[int, int], contexts: Sequence[int], rows: int
) -> list[MeasuredWork]:
    """One prompt to read, and rows to decode. The rows' prompts take the `contexts` in turns."""
    input_len, output_len = lengths
    if len(contexts) > rows:
        raise ConfigError(f"expected at most {rows} contexts, one per row, got {len(contexts)}; raise --batch-size")
    held = [contexts[row % len(contexts)] for row in range(rows)]
    described = "+".join(str(context) for context in dict.fromkeys(held))
    return [
        MeasuredWork(
            name=f"prefill {input_len}",
            span=TimedPart.PREFILL,
            prompts=random_prompts([input_len], vocab_size),
            output_len=1,
            floor_seconds=floor.prefill(input_len),
        ),
        MeasuredWork(
            name=f"decode {rows} × {output_len - 1} at {described}",
            span=TimedPart.DECODE,
            prompts=random_prompts(held, vocab_size),
            output_len=output_len,
            floor_seconds=floor.decode_all(held, output_len - 1),
        ),
    ]


def throughput_works(floor: Floor, vocab_size: int, lengths: tuple[int, int], count: int) -> list[MeasuredWork]:
    """Many prompts at once, each read and continued: the whole, the reading, and the rest."""
    input_len, output_len = lengths
    held = [input_len] * count
    read, continued = floor.prefill(sum(held)), floor.decode_all(held, output_len - 1)
    floors = {
        TimedPart.WHOLE: (f"{count} × ({input_len} in, {output_len} out)", read + continued),
        TimedPart.PREFILL: (f"prefill {count} × {input_len}", read),
        TimedPart.DECODE: (f"decode {count} × {output_len - 1} at {input_len}", continued),
    }
    # A single token is there once the prompt is read.
    spans = [span for span in floors if output_len > 1 or span is not TimedPart.DECODE]
    return [
        MeasuredWork(
            name=floors[span][0],
            span=span,
            prompts=random_prompts(held, vocab_size),
            output_len=output_len,
            floor_seconds=floors[span][1],
        )
        for span in spans
    ]


def compare_engines(subject: MeasuredEngine, works: Works, compared: Sequence[str], rounds: int) -> Report:
    """Loads the other engines, checks that all agree, and measures each piece of work."""
    vocab_size = subject.llm.engine.vocab_size
    planned = works(subject.floor, vocab_size)
    checked_on, checked = checked_prompts(subject.checkpoint, vocab_size)
    # The copies are large, and needed only while the engines exist.
    with TemporaryDirectory(prefix="sightline-bench-") as folder:
        peers = load_peers(compared, _peer_model(subject, planned, Path(folder)))
        engines = {OURS: sightline_engine(subject.llm)} | {name: peer.generate for name, peer in peers.items()}
        agreement = compare_tokens(engines, checked, frozenset(subject.checkpoint.generation.eos_token_ids))
        for name, found in agreement.items():
            found.check(f"from {OURS} and {name}", exact=subject.conditions.is_exact)
        seconds = [measure(engines, work, rounds) for work in planned]
    kept = subject.conditions.quantization == Quantization.KEEP.value
    own = "the file's own" if kept else subject.conditions.dtype
    prepared = ", ".join(subject.llm.engine.runtime.times.lines())
    ours = f"{own} weights, {subject.conditions.dtype} cache; {prepared}"
    described = {OURS: ours} | {name: peer.runs for name, peer in peers.items()}
    floor = subject.measured_again()
    timed = zip(works(floor, vocab_size), seconds, strict=True)
    results = tuple(result for work, times in timed for result in summarise(work, times))
    return Report(subject.conditions, floor.machine, described, checked_on, agreement, results)


def checked_prompts(checkpoint: Checkpoint, vocab_size: int) -> tuple[str, list[list[int]]]:
    """Returns the kind of the prompts, and the prompts: starts of a text, or random tokens without a tokenizer."""
    try:
        tokens = list(checkpoint.load_tokenizer().encode_prompt(CHECKED_TEXT))
    except SightlineError as error:
        return f"random tokens, because there is no tokenizer ({error})", random_prompts(CHECKED_LENGTHS, vocab_size)
    return "starts of a text", [tokens[:length] for length in CHECKED_LENGTHS]


def _peer_model(subject: MeasuredEngine, works: Sequence[MeasuredWork], folder: Path) -> PeerModel:
    config = subject.llm.engine.runtime.config
    longest = max(len(prompt) + work.output_len for work in works for prompt in work.prompts)
    return PeerModel(
        checkpoint=subject.checkpoint,
        dtype=config.dtype,
        cache_dtype=config.cache_dtype,
        quantization=subject.conditions.quantization,
        device=config.device.torch_device,
        threads=subject.conditions.threads,
        max_rows=max(len(CHECKED_LENGTHS), *(len(work.prompts) for work in works)),
        max_tokens=max(longest, max(CHECKED_LENGTHS) + CHECKED_TOKENS),
        cache_bytes_per_token=round(sum([cache.bytes_per_token for cache in subject.floor.caches])),
        folder=folder,
    )
