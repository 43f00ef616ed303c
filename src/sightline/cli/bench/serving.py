"""Options of `bench serve`. `sightline.bench.serving` does the measuring."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from sightline.cli.console import notes
from sightline.cli.options import collected, count_option, measure_option, parse_positive_count
from sightline.cli.reports import print_report, report_file_options

if TYPE_CHECKING:
    from sightline.bench.serving.load import RequestRecord

_NOTE_SECONDS = 5.0


def _parse_rate(text: str) -> float:
    """Parses requests per second; `inf` sends all at once."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise click.BadParameter(f"expected requests per second above 0, or inf, got {text!r}")
    return rate


def _parse_percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers separated by commas, got {text!r}") from None
    if not all(0 <= each <= 100 for each in found):
        raise click.BadParameter(f"expected numbers between 0 and 100, got {text!r}")
    return found


server_options = collected(
    "server",
    base_url=click.option(
        "--base-url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server."
    ),
    model=click.option("--model", "-m", help="A model of the server. Default: the first one."),
    api_key=click.option("--api-key", help="The server's key. Default: OPENAI_API_KEY of the environment."),
    endpoint=click.option(
        "--endpoint",
        type=click.Choice(["/v1/completions", "/v1/chat/completions"]),
        default="/v1/completions",
        show_default=True,
        help="API endpoint.",
    ),
    timeout=click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds per request."),
)
dataset_options = collected(
    "dataset",
    dataset_name=click.option(
        "--dataset-name",
        type=click.Choice(["random", "sharegpt-like"]),
        default="random",
        show_default=True,
        help="Lengths as given, or distributed as in conversations.",
    ),
    num_prompts=measure_option("--num-prompts", default=100, help="Number of requests."),
    input_len=count_option(
        "--random-input-len", "input_len", default=128, parse=parse_positive_count, help="Tokens per random prompt."
    ),
    output_len=count_option(
        "--random-output-len", "output_len", default=64, parse=parse_positive_count, help="Tokens per answer."
    ),
    range_ratio=click.option(
        "--random-range-ratio",
        "range_ratio",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="Random lengths differ from those given by at most this share.",
    ),
)
arrival_options = collected(
    "arrivals",
    request_rate=click.option(
        "--request-rate",
        type=_parse_rate,
        metavar="RATE",
        default="inf",
        help="Requests per second; inf sends all at once.",
    ),
    burstiness=click.option(
        "--burstiness",
        type=float,
        default=1.0,
        show_default=True,
        help="1 is Poisson; less gives bursts.",
    ),
    max_concurrency=count_option("--max-concurrency", parse=parse_positive_count, help="Most requests at once."),
)
drawing_options = collected(
    "sampling",
    temperature=click.option(
        "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy."
    ),
    ignore_eos=click.option(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        show_default=True,
        help="Ignore end tokens, so that answers have the requested length.",
    ),
)
run_options = collected(
    "run",
    num_warmups=count_option("--num-warmups", default=1, help="Warm-up requests, which do not count."),
    refused=click.option(
        "--refused",
        type=click.Choice(["count", "retry"]),
        default="count",
        show_default=True,
        help="For a request answered with 429 or 503: count it, or send it again after Retry-After.",
    ),
    check=click.option(
        "--check/--no-check", default=True, show_default=True, help="First compare a streamed answer with a whole one."
    ),
    percentiles=click.option(
        "--percentiles",
        type=_parse_percentiles,
        default="50,99",
        show_default=True,
        metavar="NUMBERS",
        help="Percentiles of latencies to report.",
    ),
)


@click.command()
@server_options
@dataset_options
@arrival_options
@drawing_options
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of prompts, arrivals and sampling.")
@run_options
@report_file_options
def serve(
    server: dict[str, Any],
    dataset: dict[str, Any],
    arrivals: dict[str, Any],
    sampling: dict[str, Any],
    seed: int,
    run: dict[str, Any],
    how: dict[str, Any],
) -> None:
    """Send load to an OpenAI-compatible server: throughput, and latencies as the client sees them.

    Token counts come from the server's usage. Exits with 1 if a request failed; 429 and 503 are refusals, not failures.
    Ctrl-C ends the load and reports what was measured until then.
    """
    from sightline.bench.serving.measure import ServingBench, measure_serving
    from sightline.bench.serving.work import Arrivals, Dataset, DatasetName, Endpoint, Sampling
    from sightline.core.environment import openai_api_key

    retry = run.pop("refused") == "retry"
    rate = arrivals.pop("request_rate")
    report = measure_serving(
        ServingBench(
            **server
            | {"endpoint": Endpoint(server["endpoint"]), "api_key": server["api_key"] or openai_api_key()}
            | run,
            dataset=Dataset(DatasetName(dataset.pop("dataset_name")), **dataset, seed=seed),
            sampling=Sampling(**sampling, seed=seed),
            arrivals=Arrivals(request_rate=None if math.isinf(rate) else rate, **arrivals, seed=seed),
            retry=retry,
        ),
        on_note=lambda text: notes.print(text, style="dim", markup=False),
        on_record=_counted(dataset["num_prompts"]),
    )
    print_report(report, how)
    sys.exit(report.exit_code)


def _counted(total: int) -> Callable[[RequestRecord], None]:
    """Returns a callback that prints from time to time how many requests have ended."""
    ended, noted = 0, time.monotonic()

    def count(_: RequestRecord) -> None:
        nonlocal ended, noted
        ended += 1
        if time.monotonic() - noted > _NOTE_SECONDS:
            noted = time.monotonic()
            notes.print(f"[dim]{ended} of {total} have ended[/]")

    return count
