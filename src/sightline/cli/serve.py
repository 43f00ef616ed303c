"""`serve`: an OpenAI-compatible server. What it does is in `sightline.server`."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from sightline.cli.conformance.proving import prove_first
from sightline.cli.console import notes
from sightline.cli.options import collected, count_option, parse_positive_count, prove_option, serving_options

if TYPE_CHECKING:
    from sightline.server.process.protocol import Opened

server_options = collected(
    "served",
    host=click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    port=click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one."),
    api_key=click.option(
        "--api-key",
        multiple=True,
        metavar="KEY",
        help="A key that clients must send; may be repeated. Better in SIGHTLINE_API_KEY: command lines can be seen.",
    ),
    served_model_name=click.option(
        "--served-model-name", multiple=True, metavar="NAME", help="What clients call the model; may be repeated."
    ),
    allowed_host=click.option(
        "--allowed-host",
        multiple=True,
        metavar="NAME",
        help="A name under which clients may address the server, beside this machine's; * allows any.",
    ),
    cors_origin=click.option(
        "--cors-origin",
        multiple=True,
        metavar="ORIGIN",
        help="A site whose pages may use the server, as http://localhost:3000; may be repeated; * allows every site.",
    ),
    max_body_bytes=count_option("--max-body-bytes", default=4 << 20, help="Largest body of a request."),
    max_answer_bytes=count_option(
        "--max-answer-bytes", default=64 << 20, help="Memory for all answers that are generated and not sent."
    ),
    max_stored_responses=count_option(
        "--max-stored-responses", default=4096, help="Responses that are kept for previous_response_id; 0: none."
    ),
    max_stored_bytes=count_option("--max-stored-bytes", default=64 << 20, help="Memory for all of them."),
    max_request_cost=count_option(
        "--max-request-cost",
        help="Most that one request may cost: prompts × n × tokens × (1 + 4 × logprobs). 128 contexts without it.",
    ),
    request_timeout=click.option(
        "--request-timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds that a request may run."
    ),
    drain_timeout=click.option(
        "--drain-timeout",
        type=click.FloatRange(min=0),
        default=30.0,
        show_default=True,
        help="Seconds that requests under way have when the server is told to end.",
    ),
    stall_timeout=click.option(
        "--stall-timeout",
        type=click.FloatRange(min=1),
        default=300.0,
        show_default=True,
        help="Seconds after which an engine that has work and finishes no step is replaced.",
    ),
    text_processes=count_option(
        "--text-processes",
        help="Processes that parse, tokenize and write JSON. Half of the cores without it, from 2 to 4.",
        parse=parse_positive_count,
    ),
    text_timeout=click.option(
        "--text-timeout",
        type=click.FloatRange(min=0.1),
        default=10.0,
        show_default=True,
        help="Seconds that such a process may take over one request; then it is replaced, and the request refused.",
    ),
    allow_unknown_fields=click.option(
        "--allow-unknown-fields",
        is_flag=True,
        help="Accept requests with fields that no route knows, and name them in the header x-sightline-unused.",
    ),
    otlp_traces_endpoint=click.option(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="Collector that gets a trace of every request, by OTLP over HTTP. Needs the extra otel.",
    ),
    log_level=click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="What is logged, as JSON, on standard error.",
    ),
)


@click.command()
@click.argument("name", metavar="[MODEL]", required=False)
@server_options
@prove_option
@serving_options
def serve(name: str | None, served: dict[str, Any], prove: bool, settings: dict[str, Any]) -> None:
    """Serve MODEL over HTTP, as OpenAI's clients expect it, with a chat page at /.

    MODEL is a folder, a .gguf file or a Hugging Face id; without one the default model answers. SIGTERM and Ctrl-C let
    requests under way finish; a second one ends at once.
    """
    started = time.perf_counter()
    import asyncio

    import uvloop

    from sightline.core.config import EngineConfig
    from sightline.server.logs import log_as_json

    if name is not None and settings["model"] is not None:
        raise click.UsageError("expected one model, got MODEL and --model; leave one out")
    if name is not None:
        settings = settings | {"model": name}
    engine = EngineConfig(**(prove_first(settings) if prove else settings))
    log_as_json(served["log_level"])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(served, engine, started))


async def _run(served: dict[str, Any], engine: Any, started: float) -> None:
    from sightline.core.environment import api_keys
    from sightline.server.http.limits import Limits
    from sightline.server.serve import Server, ServerConfig, default_text_processes, memory_bound

    keys = (*served["api_key"], *api_keys())
    config = ServerConfig(
        host=served["host"],
        port=served["port"],
        api_keys=keys,
        served_names=served["served_model_name"],
        allowed_hosts=served["allowed_host"],
        cors_origins=served["cors_origin"],
        otlp_traces_endpoint=served["otlp_traces_endpoint"],
        limits=Limits(
            max_body_bytes=served["max_body_bytes"],
            max_cost=served["max_request_cost"],
            # Room for a few bodies of that size: half of it is what one of several callers may hold.
            max_held_bytes=max(Limits.max_held_bytes, 4 * served["max_body_bytes"]),
            max_answer_bytes=served["max_answer_bytes"],
            max_stored_responses=served["max_stored_responses"],
            max_stored_bytes=served["max_stored_bytes"],
        ),
        request_timeout=served["request_timeout"],
        drain_seconds=served["drain_timeout"],
        stall_seconds=served["stall_timeout"],
        text_processes=served["text_processes"] or default_text_processes(),
        text_seconds=served["text_timeout"],
        strict=engine.strict,
        allows_unknown_fields=served["allow_unknown_fields"],
        log_level=served["log_level"],
    )
    front_end = f"front end: at most {memory_bound(config.limits) >> 20} MiB, {config.text_processes} text processes"
    await Server(config, engine, lambda url, opened: _announce(url, opened, front_end, bool(keys), started)).run()


def _announce(url: str, opened: Opened, front_end: str, needs_key: bool, started: float) -> None:
    """What was decided, where to go, and a command to copy."""
    for line in (*opened.lines, front_end):
        notes.print(f"[dim]{escape(line)}[/]")
    notes.print(f"[dim]{escape(opened.model)} · ready in {time.perf_counter() - started:.1f} s[/]")
    embeds = opened.vector_size is not None
    path = "embeddings" if embeds else "chat/completions"
    body = (
        '{"input": ["Why is the sky blue?", "Light is scattered."]}'
        if embeds
        else '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64, "stream": true}'
    )
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    face = "" if embeds else f"\n  Chat    [bold]{escape(url)}/[/]"
    notes.print(f"{face}\n  API     {escape(url)}/v1   (documentation: {escape(url)}/docs)\n")
    notes.print(
        f"  curl -N {url}/v1/{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n",
        markup=False,
    )
