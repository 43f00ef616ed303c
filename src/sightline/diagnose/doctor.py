"""Examines whether a machine is fit for an engine: device, versions, proofs, and a short self-test.

Each examination yields findings, and can fail on its own. Does not know how findings are printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from sightline.attention.backends import registry
from sightline.attention.capability import Work
from sightline.attention.proof import ProofBook, dtype_name
from sightline.attention.selection import Candidate, serving_row
from sightline.core.config import EngineConfig, Task
from sightline.core.device import Device, DeviceKind, detect_device, device_memory
from sightline.core.environment import proof_folder
from sightline.core.errors import SightlineError
from sightline.core.ledger import Ledger
from sightline.core.memory import gibibytes
from sightline.core.request import SamplingParams
from sightline.diagnose.explain import explain
from sightline.diagnose.self_test import (
    NUM_TOKENS,
    PROMPTS,
    TIES,
    Ask,
    Asking,
    GreedyAnswer,
    Variant,
    compare,
    ways,
)
from sightline.llm import LLM
from sightline.opening import build_engine, describe_model
from sightline.runner.demand import requirement
from sightline.runner.missing import missing_packages
from sightline.version import __version__

DRIVER_FILE = Path("/proc/driver/nvidia/version")
PLAIN = Variant("answers", "the plain engine")
_EXACT = re.compile(r"^\s*(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?\s*==\s*(?P<version>[^\s;,*]+)\s*(;|$)")
"""A requirement of one version alone."""
_TESTED_WITH: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "cache_tokens": 1024,
    "prefix_caching": False,
    "enforce_eager": True,
    "cuda_graph_sizes": None,
    "speculative_config": None,
    "async_scheduling": None,
    "max_step_ms": None,
    "host_cache_gib": 0.0,
    "require_proof": False,
    "strict": False,
    "skip_weight_check": True,
}
"""What the self-test sets: small engines, which start quickly and differ in one setting each."""


class Fitness(Enum):
    """What a finding means."""

    FIT = "fit"
    NOTE = "note"
    """Worth knowing; nothing is wrong."""
    FAILED = "failed"


@dataclass(frozen=True)
class Diagnosis:
    """One finding."""

    topic: str
    verdict: Fitness
    text: str
    remedy: str = ""

    def to_data(self) -> dict[str, str]:
        """JSON-serializable data."""
        return asdict(self) | {"verdict": self.verdict.value}


def examine(config: EngineConfig, *, is_short: bool = False, ask: Ask | None = None) -> Iterator[Diagnosis]:
    """Yields what is found, as it is found. `is_short` leaves the self-test out, which builds engines; `ask` answers
    its prompts in place of engines of this config."""
    try:
        device = detect_device(config.device)
    except SightlineError as error:
        yield Diagnosis("device", Fitness.FAILED, str(error))
        return
    yield from examine_device(device)
    yield from examine_versions(device, metadata.requires("sightline") or ())
    yield from examine_proofs(config, device, ProofBook(proof_folder()))
    if not is_short:
        yield from examine_answers(config, ask or (lambda way: answers_of(config, way)))


def examine_device(device: Device, driver_file: Path = DRIVER_FILE) -> Iterator[Diagnosis]:
    """The device, its driver, and whether any fast kernel lists it."""
    if device.kind is DeviceKind.CPU:
        told = f"{device.name}: {gibibytes(device_memory(device).free_bytes)} of memory are free"
        yield Diagnosis("device", Fitness.FIT, told)
        return
    capability = device.compute_capability
    free = device_memory(device)
    yield Diagnosis(
        "device",
        Fitness.FIT,
        f"{device.name}, compute capability {'.'.join(map(str, capability or ()))}: {gibibytes(free.free_bytes)} of "
        f"{gibibytes(free.total_bytes)} are free",
    )
    listed = [each for each in registry.BUILT_IN for row in each.rows() if _lists(row.compute_capabilities, capability)]
    if not listed:
        yield Diagnosis(
            "device",
            Fitness.FAILED,
            f"no kernel but torch's lists compute capability {capability}",
            "use another GPU, or expect torch's speed",
        )
    if driver_file.is_file():
        yield Diagnosis("driver", Fitness.FIT, driver_file.read_text().splitlines()[0].strip())
    else:
        yield Diagnosis("driver", Fitness.NOTE, f"its version is not known: there is no {driver_file}")


def _lists(values: object, capability: tuple[int, int] | None) -> bool:
    return isinstance(values, frozenset) and capability in values


def examine_versions(
    device: Device, requirements: Sequence[str], version_of: Callable[[str], str] = metadata.version
) -> Iterator[Diagnosis]:
    """Versions of packages that Sightline needs exactly, and packages that are missing."""
    yield Diagnosis("versions", Fitness.FIT, f"sightline {__version__}, torch {version_of('torch')}")
    for match in filter(None, map(_EXACT.match, requirements)):
        name, wanted = match["name"], match["version"]
        try:
            got = version_of(name)
        except metadata.PackageNotFoundError:
            continue
        if got != wanted:
            yield Diagnosis(
                "versions",
                Fitness.FAILED,
                f"expected {name} {wanted}, for which its backends are declared, got {got}",
                f"pip install '{name}=={wanted}'",
            )
    for missing in missing_packages(registry.BUILT_IN, device):
        if not missing.hindrance:
            yield Diagnosis("packages", Fitness.NOTE, missing.line)


def examine_proofs(config: EngineConfig, device: Device, book: ProofBook) -> Iterator[Diagnosis]:
    """Proofs that are not trusted, and what the config's engine would use that is not proven."""
    for file in book.distrusted():
        yield Diagnosis("proofs", Fitness.FAILED, f"not trusted: {file}", "remove the file, and prove again")
    try:
        explanation = explain(replace(config, require_proof=False, strict=False), device)
    except SightlineError as error:
        yield Diagnosis("engine", Fitness.FAILED, str(error))
        return
    for entry in explanation.degradations:
        is_fatal = bool(explanation.memory.shortage)
        yield Diagnosis(
            "engine", Fitness.FAILED if is_fatal else Fitness.NOTE, f"{entry.subject}: {entry.outcome}", entry.remedy
        )
    for group in explanation.groups:
        for choice in group.choices:
            where = f"{', '.join(choice.works)} of {group.name} by {choice.name}"
            if choice.is_proven:
                yield Diagnosis("proofs", Fitness.FIT, f"{where}: proven")
                continue
            reason, _, run = choice.unproven[0].partition("; run: ")
            yield Diagnosis("proofs", Fitness.NOTE, f"{where}: {reason}", run)


def examine_answers(config: EngineConfig, ask: Ask) -> Iterator[Diagnosis]:
    """Compares greedy answers of the plain engine with those of every other way to compute them."""
    if Task(config.task) is Task.EMBED:
        yield Diagnosis("self-test", Fitness.NOTE, "left out: the model embeds, and the self-test compares answers")
        return
    try:
        tried, tie = ways_for(config)
        plain = ask(PLAIN)
    except SightlineError as error:
        yield Diagnosis("self-test", Fitness.FAILED, f"the plain engine: {error}")
        return
    for way in tried:
        try:
            others = ask(way)
        except SightlineError as error:
            told = " ".join(str(error).split())[:300]
            yield Diagnosis(f"self-test: {way.subject}", Fitness.NOTE, f"{way.name} could not be tried: {told}")
            continue
        yield _compared(way, plain, others, tie)


def _compared(way: Variant, plain: Sequence[GreedyAnswer], others: Sequence[GreedyAnswer], tie: float) -> Diagnosis:
    topic, pair = f"self-test: {way.subject}", f"{PLAIN.name} and {way.name}"
    if way.asking is Asking.AGAIN and not any(answer.num_cached for answer in others):
        return Diagnosis(topic, Fitness.FAILED, f"{pair}: no prompt was found in the cache the second time")
    difference = compare(plain, others, tie)
    if difference is None:
        return Diagnosis(topic, Fitness.FIT, f"{pair} give the same {len(plain)} answers")
    if difference.is_tie(tie):
        return Diagnosis(topic, Fitness.NOTE, f"{pair} differ where two tokens are equally likely: {difference}")
    return Diagnosis(
        topic,
        Fitness.FAILED,
        f"{pair} differ: {difference}",
        "run sightline conformance, and report the pair with the output of sightline explain",
    )


def ways_for(config: EngineConfig) -> tuple[tuple[Variant, ...], float]:
    """The ways to try for a config's engine on this machine, and how close two tokens are that may change places.

    Backends that serve by name alone are left to the conformance kit.
    """
    config = replace(config, **_TESTED_WITH)
    blueprint = describe_model(config, Ledger()).draw_up(Ledger())
    installed = registry.installed()
    selections = blueprint.select(installed)
    needs = [requirement(blueprint.config, group, Work.PREFILL, blueprint.usage) for group in blueprint.groups]

    def is_other(candidate: Candidate) -> bool:
        """True if it could serve a group, and does not serve all of it already."""
        return candidate.by_default and any(
            serving_row(candidate, need, Work.PREFILL) is not None
            and any(each.candidate is not candidate for each in selection.values())
            for need, selection in zip(needs, selections, strict=True)
        )

    others = [candidate.name for candidate in installed if is_other(candidate)]
    captured = replace(config, enforce_eager=False)
    has_graphs = bool(describe_model(captured, Ledger()).draw_up(Ledger()).config.graph_sizes)
    tie = TIES[dtype_name(blueprint.config.dtype)]
    return ways(blueprint.config.page_size, has_graphs=has_graphs, backends=others), tie


def answers_of(config: EngineConfig, way: Variant) -> tuple[GreedyAnswer, ...]:
    """Builds a small engine of the config for one way, and asks it."""
    llm = LLM.of(build_engine(replace(config, **{**_TESTED_WITH, **way.settings})))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=5, ignore_eos=True)
    try:
        match way.asking:
            case Asking.ALONE:
                outputs = [output for prompt in PROMPTS for output in llm.generate([prompt], params, use_tqdm=False)]
            case Asking.AGAIN:
                llm.generate(list(PROMPTS), params, use_tqdm=False)
                outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
            case Asking.TOGETHER:
                outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    finally:
        llm.close()
    for output in outputs:
        if output.error is not None:
            raise SightlineError(f"a prompt failed: {output.error}")
    return tuple(
        GreedyAnswer(
            output.outputs[0].token_ids,
            tuple({token: each.logprob for token, each in place.items()} for place in output.outputs[0].logprobs or ()),
            output.num_cached_tokens,
        )
        for output in outputs
    )
