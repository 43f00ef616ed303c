"""Measures a server that speaks OpenAI's protocol: finds its model, checks its answers, warms up, then applies load.

Nothing is reported about a server whose streamed and whole answers differ. `work` makes the
requests, `load` sends them.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from sightline.bench.serving.answers import decoded, read_whole, refusal, shown
from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.load import RequestOutcome, RequestRecord, run_load
from sightline.bench.serving.report import Sent, ServingReport, check_percentiles, make_report
from sightline.bench.serving.work import Arrivals, Ask, Dataset, Endpoint, Sampling, payload
from sightline.core.errors import ConfigError, SightlineError

_CHECK = Ask("The capital of France is", max_tokens=16)
_OTHER_SEED = 1 << 32
"""Added to the seed of the warm-up, so that none of its prompts is cached for the measurement."""


@dataclass(frozen=True)
class ServingBench:
    """What to measure, and on which server."""

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """None uses the first model that is served."""
    api_key: str | None = field(default=None, repr=False)
    endpoint: Endpoint = Endpoint.COMPLETIONS
    dataset: Dataset = field(default_factory=Dataset)
    sampling: Sampling = field(default_factory=Sampling)
    arrivals: Arrivals = field(default_factory=Arrivals)
    num_warmups: int = 1
    timeout: float = 600.0
    retry: bool = False
    check: bool = True
    percentiles: Sequence[float] = ()


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


class _ServerInfo(Struct):
    vocab_size: Annotated[int, Meta(gt=0)]


def measure_serving(
    bench: ServingBench,
    on_note: Callable[[str], None] = lambda _: None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> ServingReport:
    """Raises if the server cannot be measured. Ctrl-C ends the load; what was measured until then is reported."""
    check_percentiles(bench.percentiles)
    if not 0 < bench.timeout < float("inf"):
        raise ConfigError(f"expected a timeout above 0 seconds, got {bench.timeout:g}")
    return asyncio.run(_measure(bench, on_note, on_record))


async def _measure(
    bench: ServingBench, on_note: Callable[[str], None], on_record: Callable[[RequestRecord], None] | None
) -> ServingReport:
    client = Client(Address.parse(bench.base_url), bench.api_key)
    model = await find_model(client, bench.model, bench.timeout)
    vocab_size = None if bench.endpoint is Endpoint.CHAT else await find_vocabulary(client, bench.timeout)
    checked = "not asked for"
    if bench.check:
        checked = await check_answers(client, model, bench.endpoint, bench.timeout)
        on_note(checked)
    send = partial(
        run_load, client, model=model, endpoint=bench.endpoint, sampling=bench.sampling, timeout=bench.timeout
    )
    warm_ups = replace(bench.dataset, num_prompts=bench.num_warmups, seed=bench.dataset.seed + _OTHER_SEED)
    at_once = Arrivals(max_concurrency=bench.arrivals.max_concurrency)
    for record in (await send(warm_ups.draw(vocab_size), arrivals=at_once, retry=True)).records:
        if record.outcome is not RequestOutcome.COMPLETED:
            raise SightlineError(f"expected warm-up requests to complete, got one that did not: {record.error}")
    asks = bench.dataset.draw(vocab_size)
    on_note(f"sending {len(asks)} requests")
    with _stopped_by_interrupt() as stop:
        result = await send(asks, arrivals=bench.arrivals, retry=bench.retry, stop=stop, on_record=on_record)
    sent = Sent(
        server=str(client.address),
        endpoint=bench.endpoint.value,
        model=model,
        dataset=bench.dataset.describe(vocab_size),
        arrivals=bench.arrivals,
        sampling=bench.sampling.fields(0),
        num_prompts=len(asks),
        num_warmups=bench.num_warmups,
        timeout_seconds=bench.timeout,
        refused_are_retried=bench.retry,
        check=checked,
    )
    return make_report(sent, result, [ask.max_tokens for ask in asks], bench.percentiles)


async def find_model(client: Client, wanted: str | None, timeout: float) -> str:
    """Returns the requested model, or the first. Raises if it is not served, or if this is not such a server."""
    status, body = await _ask(client, "/v1/models", timeout)
    if status in (401, 403):
        raise ConfigError(f"{refusal(status, body)}; pass the server's key with --api-key or in OPENAI_API_KEY")
    if status == 404 and wanted is not None:
        return wanted
    found = decoded(body, _Models) if status == 200 else None
    if found is None or not found.data:
        raise SightlineError(
            f"expected a list of models at {client.address}/v1/models, got HTTP {status}: {shown(body)}; check that "
            "--base-url is a server that speaks OpenAI's protocol"
        )
    names = [each.id for each in found.data]
    if wanted is not None and wanted not in names:
        raise ConfigError(f"expected one of the models that are served, {', '.join(names)}; got {wanted}")
    return wanted or names[0]


async def find_vocabulary(client: Client, timeout: float) -> int | None:
    """Returns the number of token ids, or None if the server does not report it."""
    status, body = await _ask(client, "/server_info", timeout)
    found = decoded(body, _ServerInfo) if status == 200 else None
    return None if found is None else found.vocab_size


async def check_answers(client: Client, model: str, endpoint: Endpoint, timeout: float) -> str:
    """Sends one greedy prompt twice, whole and streamed. Raises if the answers differ."""
    greedy = Sampling(ignore_eos=False)
    body = payload(_CHECK, 0, model, endpoint, greedy, stream=False)
    status, answer = await _ask(client, endpoint.value, timeout, body)
    if status != 200:
        raise SightlineError(f"expected an answer to one greedy prompt, got {refusal(status, answer)}")
    text, finish_reason, usage = read_whole(answer)
    result = await run_load(
        client, [_CHECK], model=model, endpoint=endpoint, sampling=greedy, timeout=timeout, retry=True
    )
    [streamed] = result.records
    if streamed.outcome is not RequestOutcome.COMPLETED or streamed.usage is None:
        raise SightlineError(f"expected a stream of one greedy prompt, got none: {streamed.error}; nothing is reported")
    for what, whole, other in (
        ("text", text, streamed.text),
        ("finish_reason", finish_reason, streamed.finish_reason),
        ("number of prompt tokens", usage.prompt_tokens, streamed.usage.prompt_tokens),
        ("number of output tokens", usage.output_tokens, streamed.usage.output_tokens),
    ):
        if whole != other:
            raise SightlineError(
                f"expected the same {what} streamed as in the whole body, {shown(whole)}, got {shown(other)}; "
                "nothing is reported"
            )
    return f"one greedy prompt gave the same {streamed.usage.output_tokens} tokens, whole and streamed"


@contextmanager
def _stopped_by_interrupt() -> Iterator[asyncio.Event]:
    """Yields an event that the first Ctrl-C sets; the second interrupts as usual."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _ask(client: Client, path: str, timeout: float, body: bytes | None = None) -> tuple[int, bytes]:
    """Sends one request and returns status and body. Raises if there is no server."""
    try:
        async with asyncio.timeout(timeout), client.exchange("GET" if body is None else "POST", path, body) as response:
            return response.status, await response.read()
    except OSError as error:
        raise SightlineError(
            f"expected a server at {client.address}, got {str(error) or 'no answer in time'}; start one with "
            "`sightline serve`, or name another with --base-url"
        ) from error
    except SightlineError as error:
        raise SightlineError(f"{error}; the response came from {client.address}{path}: check --base-url") from error
