"""Measures what `max_step_ms` costs and gives: rows that generate while long prompts arrive one after the other.

    python benchmarks/step_limit.py [--model M] [--device cuda] [--limits 0,auto] [--seconds 20]

The same engine runs the traffic once with each limit: 0 is none, auto is what a server measures and chooses. Prints the
gaps between the tokens of the rows, and the tokens per second of prompts and of rows.
"""

from __future__ import annotations

import argparse
import statistics
import time

from sightline import LLM
from sightline.bench.engine.measure import random_prompts
from sightline.bench.engine.stepping import Watched, check_room, step
from sightline.bench.tables import markdown_table
from sightline.core.request import SamplingParams
from sightline.engine.engine import Engine
from sightline.engine.measuring import choose_limit

HEADING = "limit, ms | gaps, ms: median | 99% | largest | rows, tokens/s | prompts, tokens/s | both"


def submit(engine: Engine, length: int, max_tokens: int) -> Watched:
    [prompt] = random_prompts([length], engine.vocab_size)
    return Watched(engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)))


def measure(engine: Engine, args: argparse.Namespace) -> list[str]:
    """Runs the traffic and returns the cells of a table row."""
    longest = engine.runtime.config.max_model_len - args.row_len
    rows = [submit(engine, args.row_len, min(args.row_tokens, longest)) for _ in range(args.rows)]
    while not all(row.tokens for row in rows):
        step(engine, rows)
    start = time.perf_counter()
    end, num_prompt_tokens, num_before = start + args.seconds, 0, sum(len(row.tokens) for row in rows)
    while time.perf_counter() < end:
        guest = submit(engine, args.prompt_len, 1)
        while not guest.tokens and time.perf_counter() < end:
            step(engine, [*rows, guest])
        computed = [
            each.num_computed for each in engine._scheduler.running if each.request.request_id == guest.request_id
        ]
        num_prompt_tokens += args.prompt_len if guest.tokens else sum(computed)
        engine.forget(guest.request_id)
        for prefixes in engine.prefixes:
            prefixes.clear()
    seconds = time.perf_counter() - start
    if any(row.ended for row in rows):
        raise SystemExit("expected rows that generate to the end, got one that ended; raise --row-tokens")
    num_tokens = sum(len(row.tokens) for row in rows) - num_before
    gaps = sorted(gap * 1e3 for row in rows for gap in row.gaps(start, start + seconds))
    for row in rows:
        engine.forget(row.request_id)
    while engine.has_work:
        engine.step()
    limit = engine.pace.max_step_ms
    spread = [statistics.median(gaps), gaps[99 * (len(gaps) - 1) // 100], gaps[-1]]
    rates = [num_tokens / seconds, num_prompt_tokens / seconds, (num_tokens + num_prompt_tokens) / seconds]
    return [
        "none" if limit is None else f"{limit:.0f}",
        *(f"{each:.0f}" for each in spread),
        *(f"{each:.1f}" for each in rates),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limits", default="0,auto", help="milliseconds, 0 for none, auto for what a server chooses")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-len", type=int, default=32)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--prompt-len", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-num-batched-tokens", type=int)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        device=args.device,
        max_num_batched_tokens=args.max_num_batched_tokens,
        skip_tokenizer_init=args.model is not None,
    )
    engine = llm.engine
    check_room(engine, [args.prompt_len + 1] + [args.row_len + 1] * args.rows, "--rows or --prompt-len")
    choose_limit(engine)
    chosen, table = engine.pace.max_seconds, []
    for limit in args.limits.split(","):
        engine.pace.max_seconds = chosen if limit == "auto" else float(limit) / 1e3 or None
        table.append(measure(engine, args))
    print("\n".join(markdown_table(HEADING, table)))


if __name__ == "__main__":
    main()
