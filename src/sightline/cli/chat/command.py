"""`chat`: options, and who answers."""

from __future__ import annotations

from typing import Any

import click

from sightline.cli.conformance.proving import prove_first
from sightline.cli.loading import load_llm
from sightline.cli.options import engine_options, options_given, prove_option, quiet_option, sampling_options
from sightline.core.command_line import flag
from sightline.core.environment import api_keys
from sightline.core.request import SamplingParams


@click.command()
@click.argument("message", required=False)
@click.option("--system", help="What the model is told before the conversation.")
@click.option("--url", help="Talk to the server at this address instead of a model in this process.")
@click.option("--api-key", help="The server's key; better in SIGHTLINE_API_KEY.")
@sampling_options
@quiet_option
@prove_option
@engine_options
@click.pass_context
def chat(
    context: click.Context,
    message: str | None,
    system: str | None,
    url: str | None,
    api_key: str | None,
    quiet: bool,
    prove: bool,
    sampling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Answer MESSAGE; without one, talk until the end of input. /help lists commands.

    Ctrl-C stops an answer, Ctrl-D leaves.
    """
    # Imported here: they import HTTP, TLS and asyncio, which `--help` does not need.
    from sightline.cli.chat.conversation import ChatSession
    from sightline.cli.chat.lines import remembered, typed_messages
    from sightline.cli.chat.partners import LocalModel, Partner, RemoteServer

    params = SamplingParams(**sampling)
    partner: Partner
    if url is None:
        if api_key is not None:
            raise click.UsageError("expected --url with --api-key, got none; add --url, or leave --api-key out")
        settings = prove_first(settings) if prove else settings
        partner = LocalModel(settings["model"], lambda name: load_llm({**settings, "model": name}, quiet=quiet), params)
    else:
        given = [flag(name) for name in settings if name != "model" and options_given(context, name)]
        if given or prove:
            raise click.UsageError(
                f"expected no settings of an engine with --url, got {', '.join(given or ['--prove'])}: the server has "
                "its own; leave them out"
            )
        sent = {name: value for name, value in sampling.items() if options_given(context, name)}
        partner = RemoteServer(url, api_key or next(iter(api_keys()), None), settings["model"], sent)
    conversation = ChatSession(partner, system, quiet=quiet)
    if message is not None:
        conversation.answer(message)
        return
    with remembered():
        conversation.talk(typed_messages())
