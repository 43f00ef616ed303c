"""Measures a server that speaks OpenAI's protocol: whom it asks, whether the answers are right, then how fast.

Owns the order of a run: find the model and its vocabulary, check, warm up, load, report. Nothing is reported of a
server whose stream and whole body differ. What is sent is `serving_work`'s, the sending `serving_load`'s.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from sightline.bench.serving.answers import ReportedUsage, read_object, read_whole, refusal, shown
from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.load import LoadResult, Outcome, Record, run_load
from sightline.bench.serving.report import Sent, ServingReport, check_percentiles, make_report
from sightline.bench.serving.work import Arrivals, Ask, Dataset, Endpoint, Sampling, payload
from sightline.core.errors import ConfigError, SightlineError

_CHECK = Ask("The capital of France is", max_tokens=16)
_OTHER_SEED = 1 << 32
"""Between the seed of what is measured and that of what warms up, so that no prompt of one is cached for the other."""


@dataclass(frozen=True)
class ServingBench:
    """What to measure, of whom."""

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """None is the first that is served."""
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


def measure_serving(
    bench: ServingBench,
    on_note: Callable[[str], None] = lambda _: None,
    on_record: Callable[[Record], None] | None = None,
) -> ServingReport:
    """Raises where the server cannot be measured. Ctrl-C during the load ends it, and what was measured is told."""
    check_percentiles(bench.percentiles)
    if not 0 < bench.timeout < float("inf"):
        raise ConfigError(f"expected a timeout above 0 seconds, got {bench.timeout:g}")
    return asyncio.run(_measure(bench, on_note, on_record))


async def _measure(
    bench: ServingBench, on_note: Callable[[str], None], on_record: Callable[[Record], None] | None
) -> ServingReport:
    client = Client(Address.parse(bench.base_url), bench.api_key)
    model = await find_model(client, bench.model, bench.timeout)
    is_text = bench.endpoint is Endpoint.CHAT
    vocab_size = None if is_text else await find_vocabulary(client, bench.timeout)
    checked = "not asked for"
    if bench.check:
        checked = await check_answers(client, model, bench.endpoint, bench.timeout)
        on_note(checked)
    await _warm_up(client, bench, model, vocab_size)
    asks = bench.dataset.draw(vocab_size)
    on_note(f"sending {len(asks)} requests")
    with _stopped_by_interrupt() as stop:
        result = await _load(client, bench, model, asks, stop, on_record)
    sent = Sent(
        server=str(client.address),
        endpoint=bench.endpoint.value,
        model=model,
        dataset=bench.dataset.told(vocab_size),
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
    """The model that is asked for, or the first. Raises where it is not served, or where there is no such server."""
    status, body = await _ask(client, "/v1/models", timeout)
    if status in (401, 403):
        raise ConfigError(f"{refusal(status, body)}; give the server's key with --api-key or in OPENAI_API_KEY")
    if status == 404 and wanted is not None:
        return wanted
    names = _model_names(body) if status == 200 else None
    if not names:
        raise SightlineError(
            f"expected a list of models at {client.address}/v1/models, got HTTP {status}: {shown(body)}; check that "
            "--base-url is a server that speaks OpenAI's protocol"
        )
    if wanted is not None and wanted not in names:
        raise ConfigError(f"expected one of the models that are served, {', '.join(names)}; got {wanted}")
    return wanted or names[0]


async def find_vocabulary(client: Client, timeout: float) -> int | None:
    """How many token ids there are, where the server tells."""
    status, body = await _ask(client, "/server_info", timeout)
    if status != 200:
        return None
    try:
        found = read_object(body).get("vocab_size")
    except SightlineError:
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


async def check_answers(client: Client, model: str, endpoint: Endpoint, timeout: float) -> str:
    """Asks one greedy prompt twice, whole and streamed. Raises where the two are not one answer."""
    greedy = Sampling(ignore_eos=False)
    body = payload(_CHECK, 0, model, endpoint, greedy, stream=False)
    status, answer = await _ask(client, endpoint.value, timeout, body)
    if status != 200:
        raise SightlineError(f"expected an answer to one greedy prompt, got {refusal(status, answer)}")
    whole = read_whole(answer)
    result = await run_load(
        client, [_CHECK], model=model, endpoint=endpoint, sampling=greedy, timeout=timeout, retry=True
    )
    [streamed] = result.records
    if streamed.outcome is not Outcome.COMPLETED or streamed.usage is None:
        raise SightlineError(f"expected a stream of one greedy prompt, got none: {streamed.error}; nothing is reported")
    _compare(whole, (streamed.text, streamed.finish_reason, streamed.usage))
    return f"one greedy prompt gave the same {streamed.usage.output_tokens} tokens, whole and streamed"


def _compare(whole: tuple[str, str | None, ReportedUsage], streamed: tuple[str, str | None, ReportedUsage]) -> None:
    counts = [(usage.prompt_tokens, usage.output_tokens) for _, _, usage in (whole, streamed)]
    named = {
        "text": (whole[0], streamed[0]),
        "finish_reason": (whole[1], streamed[1]),
        "tokens of prompt and answer": (counts[0], counts[1]),
    }
    for what, (one, other) in named.items():
        if one != other:
            raise SightlineError(
                f"expected the same {what} streamed as in the whole body, {shown(one)}, got {shown(other)}; "
                "nothing is reported"
            )


async def _warm_up(client: Client, bench: ServingBench, model: str, vocab_size: int | None) -> None:
    """Requests of the same kind with other prompts. Raises where one does not complete."""
    dataset = replace(bench.dataset, num_prompts=bench.num_warmups, seed=bench.dataset.seed + _OTHER_SEED)
    result = await run_load(
        client,
        dataset.draw(vocab_size),
        model=model,
        endpoint=bench.endpoint,
        sampling=bench.sampling,
        arrivals=Arrivals(max_concurrency=bench.arrivals.max_concurrency),
        timeout=bench.timeout,
        retry=True,
    )
    for record in result.records:
        if record.outcome is not Outcome.COMPLETED:
            raise SightlineError(f"expected requests to warm up that complete, got one that did not: {record.error}")


async def _load(
    client: Client,
    bench: ServingBench,
    model: str,
    asks: Sequence[Ask],
    stop: asyncio.Event,
    on_record: Callable[[Record], None] | None,
) -> LoadResult:
    return await run_load(
        client,
        asks,
        model=model,
        endpoint=bench.endpoint,
        sampling=bench.sampling,
        arrivals=bench.arrivals,
        timeout=bench.timeout,
        retry=bench.retry,
        stop=stop,
        on_record=on_record,
    )


@contextmanager
def _stopped_by_interrupt() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; the second interrupts as ever."""
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
    """A whole answer. Raises where there is no server."""
    try:
        async with asyncio.timeout(timeout), client.exchange("GET" if body is None else "POST", path, body) as response:
            return response.status, await response.read()
    except OSError as error:
        raise SightlineError(
            f"expected a server at {client.address}, got {str(error) or 'no answer in time'}; start one with "
            "`sightline serve`, or name another with --base-url"
        ) from error
    except SightlineError as error:
        raise SightlineError(f"{error}; it came from {client.address}{path}: check --base-url") from error


def _model_names(body: bytes) -> list[str]:
    """Names in a list of models, none where it is not one."""
    try:
        models = read_object(body).get("data")
    except SightlineError:
        return []
    entries = models if isinstance(models, list) else []
    return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
