"""What structured output costs: the time of masks in a step, how much of it the device hides, and whether answers hold.

The same rows answer under a schema and without one, in turns, after a round that does not count. The time of filling is
that of a matcher that is led through the answers again. Nothing is reported unless every answer follows its grammar,
and is JSON if it ended.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from sightline.bench.engine.measure import Prompts, random_prompts
from sightline.bench.engine.stepping import WARM_STEPS, Watched, check_room, step
from sightline.bench.tables import markdown_table
from sightline.core.device import DeviceKind
from sightline.core.errors import SightlineError
from sightline.core.request import RequestOutput, SamplingParams
from sightline.core.structured import StructuredOutputs
from sightline.engine.engine import Engine
from sightline.llm import LLM, EngineSettings

_STREET: dict[str, Any] = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 30}, "city": {"type": "string", "maxLength": 30}},
    "required": ["street", "city"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 8},
        "address": _STREET,
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
_PROMPT_LEN = 16
_HEADING = (
    "rows | step without, ms | step with, ms | longer by | filling a mask, µs | filling, of a step | hidden | "
    "valid, of all answers"
)


@dataclass(frozen=True)
class MaskedWork:
    """Rows that answered under the schema, and without it."""

    rows: int
    plain_seconds: float
    """The time of a step without masks: the median of the rounds."""
    masked_seconds: float
    """The time of a step with a mask for each row, likewise."""
    fill_seconds: float
    """A core's time of filling one mask, on average over the answers."""
    num_ended: int
    """Answers that ended before the limit of their tokens. All are valid."""
    num_answers: int
    overlaps: bool
    """True if the host fills masks while the device computes. On a CPU it does both, one after the other."""

    @property
    def filling(self) -> float:
        """The time of filling all masks of a step, as a share of a step without them."""
        return self.rows * self.fill_seconds / self.plain_seconds

    @property
    def longer(self) -> float:
        """By how much masks make a step longer, as a share of a step without them."""
        return self.masked_seconds / self.plain_seconds - 1.0

    @property
    def hidden(self) -> float:
        """The share of the time of filling that does not make a step longer; 0 without overlap."""
        return min(1.0, max(0.0, 1.0 - self.longer / self.filling)) if self.overlaps else 0.0

    def row(self) -> list[str]:
        """The cells of a table row."""
        steps = [f"{each * 1e3:.2f}" for each in (self.plain_seconds, self.masked_seconds)]
        filling = [f"{self.fill_seconds * 1e6:.0f}", f"{self.filling:.1%}"]
        valid = f"{self.num_answers}, {self.num_ended} of them ended"
        return [str(self.rows), *steps, f"{self.longer:.1%}", *filling, f"{self.hidden:.0%}", valid]


@dataclass(frozen=True)
class StructuredReport:
    """A whole run."""

    model: str
    vocab_size: int
    compile_seconds: float
    """The time of compiling the schema, with the vocabulary read before."""
    num_iters: int
    works: tuple[MaskedWork, ...]

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            f"{self.model}: {self.vocab_size:,} tokens; the schema compiles in {self.compile_seconds * 1e3:.1f} ms.",
            f"Rows at temperature 1, medians of {self.num_iters} rounds.",
            "",
            *markdown_table(_HEADING, [each.row() for each in self.works]),
        ]


def measure_structured(
    settings: dict[str, object],
    rows: Sequence[int],
    num_steps: int,
    output_len: int,
    num_iters: int,
    on_work: Callable[[MaskedWork], None],
) -> StructuredReport:
    """Measures `num_steps` decode steps for each number of rows, with answers of at most `output_len` tokens.

    Raises before anything is reported if an answer does not hold.
    """
    llm = LLM(**cast("EngineSettings", settings | {"prefix_caching": False}))
    engine, works = llm.engine, list[MaskedWork]()
    for count in rows:
        check_room(engine, [_PROMPT_LEN + output_len] * count, "--rows or --output-len")
    plain = SamplingParams(temperature=1.0, max_tokens=output_len)
    held = replace(plain, structured_outputs=StructuredOutputs(json=SCHEMA))
    compile_seconds = _compiled(engine, held)
    for count in rows:
        prompts = random_prompts([_PROMPT_LEN] * count, engine.vocab_size)
        rounds = [
            (
                _round(engine, prompts, replace(plain, ignore_eos=True), num_steps),
                _round(engine, prompts, held, num_steps),
            )
            for _ in range(num_iters + 1)
        ]
        outputs = rounds[-1][1].outputs
        works.append(
            MaskedWork(
                rows=count,
                plain_seconds=statistics.median(each.seconds for each, _ in rounds[1:]),
                masked_seconds=statistics.median(each.seconds for _, each in rounds[1:]),
                fill_seconds=statistics.mean(_checked(engine, held, each) for each in outputs),
                num_ended=sum(each.outputs[0].finish_reason == "stop" for each in outputs),
                num_answers=len(outputs),
                overlaps=engine.runtime.config.device.kind is DeviceKind.CUDA,
            )
        )
        on_work(works[-1])
    name = str(settings.get("model") or "the default model")
    llm.close()
    return StructuredReport(name, engine.vocab_size, compile_seconds, num_iters, tuple(works))


def _compiled(engine: Engine, held: SamplingParams) -> float:
    """Compiles the schema, and returns the seconds that it took."""
    if engine.grammars is None:
        raise SightlineError("expected a model with its tokenizer, got one without; leave skip_tokenizer_init out")
    engine.grammars.warm_up()
    start = time.perf_counter()
    pending = engine.prepare(held)
    assert pending is not None
    pending.result()
    return time.perf_counter() - start


@dataclass(frozen=True)
class _Round:
    seconds: float
    """The time of a step, from when every row has some tokens."""
    outputs: list[RequestOutput]


def _round(engine: Engine, prompts: Prompts, params: SamplingParams, num_steps: int) -> _Round:
    """Lets rows answer, and times `num_steps` tokens of each while all of them run."""
    watched = [Watched(engine.submit(prompt, replace(params, seed=seed))) for seed, prompt in enumerate(prompts)]
    while min(len(each.tokens) for each in watched) < WARM_STEPS:
        step(engine, watched)
    before, start = min(len(each.tokens) for each in watched), time.perf_counter()
    while min(len(each.tokens) for each in watched) < before + num_steps and not any(each.ended for each in watched):
        step(engine, watched)
    seconds = (time.perf_counter() - start) / max(1, min(len(each.tokens) for each in watched) - before)
    if params.structured_outputs is None:
        outputs = list[RequestOutput]()
        for each in watched:
            engine.forget(each.request_id)
    else:
        while engine.has_work:
            step(engine, watched)
        outputs = [engine.pop_output(each.request_id) for each in watched]
    return _Round(seconds, outputs)


def _checked(engine: Engine, held: SamplingParams, output: RequestOutput) -> float:
    """Leads a matcher through an answer; returns a core's seconds for a mask. Raises if the answer does not hold."""
    pending = engine.prepare(held)
    assert pending is not None
    matcher, seconds, [answer] = pending.result().matcher(), list[float](), output.outputs
    for token in answer.token_ids:
        start = time.thread_time()
        matcher.mask()
        seconds.append(time.thread_time() - start)
        matcher.consume([token])
    if answer.finish_reason == "stop":
        json.loads(answer.text)
    elif answer.finish_reason != "length":
        raise SightlineError(f"expected answers that hold, got one that ended with {answer.finish_reason!r}")
    return statistics.mean(seconds)
